"""A host that loses most of its processors is named by the run itself, while it goes on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline import lab
from tests.harness.jobs import PRELUDE

pytestmark = [pytest.mark.usefixtures("clean", "quotas"), pytest.mark.slow]

# Some 15 ms of work in a step of each worker, until the host that has become slow has been named.
TRAINING = """
with pl.start(folder=sys.argv[1], name="run") as run:
    model, optimizer, loader = parts(run, nn.Sequential(nn.Linear(4, 512), nn.Tanh(), nn.Linear(512, 1)), samples=10**6, batch=1024)
    end = time.monotonic() + 200
    for x, y in loader:
        step(run, model, optimizer, x, y)
        work = time.thread_time() + 0.015
        while time.thread_time() < work:
            pass
        if run.events and run.is_first or time.monotonic() > end:
            run.stop()
"""  # noqa: E501


def test_a_slow_host_is_named_with_its_lateness(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PRELUDE + TRAINING)
    with lab.cluster(hosts=3, workers=1, processors=0.5) as cluster:
        options = {"folder": tmp_path, "deadline": 250, "environ": {"OMP_NUM_THREADS": "1"}}
        ended = cluster.run(
            tmp_path / "script.py",
            str(tmp_path),
            faults="slow(host=1, factor=0.3, step=5)",
            **options,
        )
    assert ended.code == 0, ended.output
    events = [
        str(event["what"])
        for event in json.loads((tmp_path / "run" / "summary.json").read_text())["events"]
    ]
    found = [event for event in events if "the others wait: " in event]
    assert (
        len(found) == 1
        and found[0].startswith("rank 1 on ")
        and "deal by speed: prepare(..., shares='auto')" in found[0]
    ), events
    assert f"paceline: {found[0]}" in ended.output
