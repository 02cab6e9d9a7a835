"""Benchmarks find what they import, and those that are packages read their options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STARTED_BY_MPI = {"openmpi"}  # needs mpi4py
IMPORT_ALL = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)"

pytestmark = pytest.mark.slow


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run Python as a user does, without what tests preload."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ["PYTHONPATH"] = os.pathsep.join(map(str, (BENCHMARKS.parent, BENCHMARKS)))
    return subprocess.run(
        [sys.executable, *words],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_scripts_find_what_they_import() -> None:
    names = sorted({path.stem for path in BENCHMARKS.glob("*.py")} - STARTED_BY_MPI)
    assert len(names) > 10
    answer = run("-c", IMPORT_ALL, *names)
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize("package", ["faults", "learning", "peers"])
def test_a_package_says_what_it_takes(package: str) -> None:
    answer = run("-m", f"benchmarks.{package}", "--help")
    assert answer.returncode == 0 and "usage" in answer.stdout.lower(), answer.stderr
