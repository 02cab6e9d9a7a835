"""Loops on real workers: those that threads can't run, and some of all the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.harness.jobs import Jobs
from tests.loops import script
from tests.loops.collection import LOOPS, differences, plain
from tests.loops.script import TENTHS

THREADLESS = [name for name, known in LOOPS.items() if known.threads]
# each worker would load the compiler
COMPILED = [name for name in THREADLESS if "compiled" in name]


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [
        [*(name for name in THREADLESS if name not in COMPILED), *TENTHS[3::10]],
        pytest.param(COMPILED, marks=pytest.mark.soak),
    ],
    ids=["plain", "compiled"],
)
def test_on_processes(job: Jobs, tmp_path: Path, names: list[str]) -> None:
    size = 2
    found = outcome(job, tmp_path, names, size)
    for name in names:
        wanted, _ = plain(LOOPS[name])
        for rank, mine in enumerate(found):
            assert differences(mine[name], wanted, LOOPS[name].near) == [], (
                f"{name}: rank {rank} of {size}"
            )


def outcome(
    job: Jobs, folder: Path, names: list[str], size: int
) -> list[dict[str, list[tuple[str, object]]]]:
    """What each worker came to."""
    ended = job.start(
        [
            sys.executable,
            *job.launcher,
            "run",
            "--workers",
            str(size),
            script.__file__,
            str(folder),
            *names,
        ]
    ).end()
    assert ended.code == 0, ended.err
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]
