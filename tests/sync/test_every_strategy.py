"""Every codec and every strategy on processes: the same bits on all of them, and the identities
between strategies.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.harness import every_strategy
from tests.harness.jobs import Jobs


@pytest.mark.slow
def test_on_processes(job: Jobs, tmp_path: Path) -> None:
    size = 3
    program = [every_strategy.__file__, str(tmp_path), every_strategy.ask(tmp_path)]
    command = [sys.executable, *job.launcher, "run", "--workers", str(size), *program]
    ended = job.start(command).end(150)
    assert ended.code == 0, ended.err
    every_strategy.check(tmp_path, size)
