"""Launchers as processes of their own, and the check that nothing of them is left."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

from paceline.cluster.launcher import janitor
from tests.harness.jobs import PATIENCE, ROOT

PROGRAM = str(ROOT / "tests" / "harness" / "programs" / "launcher.py")


class Launched:
    """One launcher under test, and how to look at what it started."""

    def __init__(self, folder: Path, job: dict[str, Any], **environ: str) -> None:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("OMP_", "PACELINE_"))
        }
        self.process = subprocess.Popen(
            [sys.executable, PROGRAM, json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={**kept, "PYTHONPATH": str(ROOT), **environ},
        )

    def end(self, timeout: float = PATIENCE) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=timeout)
        return self.process.returncode, out, err


def alive_in(folder: Path) -> list[psutil.Process]:
    """All processes that live there, or were given a path there: zombies are nowhere."""
    alive = []
    for pid in janitor.list_processes():
        seen = Path(f"/proc/{pid}")
        with contextlib.suppress(OSError, psutil.NoSuchProcess):
            if (
                os.readlink(seen / "cwd") == str(folder)
                or os.fsencode(folder) in (seen / "cmdline").read_bytes()
            ):
                alive.append(psutil.Process(pid))
    return alive


def wait_gone(folder: Path, seconds: float = 30.0) -> list[psutil.Process]:
    end = time.monotonic() + seconds
    while (left := alive_in(folder)) and time.monotonic() < end:
        time.sleep(0.05)
    return left


# What pl.start() does, as far as the launcher sees it.
JOINED = """
import sys
from paceline.cluster.control import events
from paceline.cluster.discover import discover_place
from paceline.errors import *
place = discover_place()
events.report_joined(place)
def hook(kind, error, trace):
    events.report_failure(place, kind, error)
    sys.__excepthook__(kind, error, trace)
sys.excepthook = hook
"""
