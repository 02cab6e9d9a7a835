"""Every codec and every strategy on processes: the same bits on all of them, and the identities between strategies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import ways
from tests.launches import Jobs


@pytest.mark.slow
@pytest.mark.preloaded
def test_on_processes(job: Jobs, tmp_path: Path) -> None:
    size = 3
    command = [sys.executable, *job.launcher, "run", "--workers", str(size), ways.__file__, str(tmp_path), ways.ask(tmp_path)]
    ended = job.start(command).end(150)
    assert ended.code == 0, ended.err
    ways.check(tmp_path, size)
