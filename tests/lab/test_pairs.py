"""Messages between pairs of workers of two hosts: they arrive as they were sent, and the links
carry what is counted.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from paceline.lab.hosts import Cluster

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).parents[1] / "harness" / "programs" / "pairs_over_hosts.py"


def test_messages_over_hosts_take_the_bytes_that_are_counted(
    build: Callable[..., Cluster], tmp_path: Path
) -> None:
    outcome = build(hosts=2, workers=2, bandwidth="1gbit").run(PROGRAM, str(tmp_path), deadline=120)
    assert outcome.code == 0, outcome.output
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for host in {each["host"] for each in found}:
        here = [each for each in found if each["host"] == host]
        counted = max(each["left"] for each in here)
        said = sum(each["between"] for each in here)
        assert len(here) == 2 and said > 40_000_000
        assert said == pytest.approx(counted, rel=0.02), (
            f"the workers of {host} say {said} bytes, its link {counted}"
        )
        # one worker beside it, two on the other host
        assert all(0 < each["within"] < each["between"] for each in here)
