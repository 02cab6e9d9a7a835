"""Runs copies of a training script that only measure some steps, for `paceline plan`.

Each copy is a process of its own, started without a launcher, and trains alone. Copies that run at
the same time show what a step takes while the cores of this machine are shared.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, NamedTuple

from paceline.cluster.discover import copy_environment
from paceline.errors import UsageError
from paceline.planner.model_profile import (
    ModelProfile,
    TensorWorker,
    join_processes,
    read_profile,
)
from paceline.unequal.probe.step_profiler import ProfileRequest

LONGEST: Final = 300.0  # seconds that all copies of one condition may take
SHOWN_LINES: Final = 6  # last lines that are shown of a copy that failed
# Variables of launchers: a copy must not take itself for a worker.
LAUNCHER_VARIABLES: Final = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Condition(NamedTuple):
    """What to measure at the same time.

    Attributes:
        processes: Processes.
        threads: Threads of each.
        parts: Parts of the global batch: 2 is half of it.
        micro_parts: Parts for micro-batches, with which layers are measured. Default: none.
        tensor: Processes that divide the layers between them. Default: 1.
    """

    processes: int
    threads: int
    parts: tuple[float, ...]
    micro_parts: tuple[float, ...] = ()
    tensor: int = 1


def measure_script(
    script: str, args: Sequence[str], conditions: Sequence[Condition]
) -> ModelProfile:
    """Measure steps of a script under each condition, one condition after the other.

    Raises:
        UsageError: The script fails, or ends without a measured step; the message has the last
            lines of its output.
    """
    with _end_on_sigterm():
        profiles = [_measure_condition(script, args, condition) for condition in conditions]
    return join_conditions(profiles)


def measure_tensor_workers(
    script: str, args: Sequence[str], conditions: Sequence[Condition]
) -> tuple[TensorWorker, ...]:
    """Measure steps of workers that divide the layers of a script's model between them.

    Raises:
        UsageError: As `measure_script` does.
    """
    with _end_on_sigterm():
        profiles = {each: _measure_condition(script, args, each) for each in conditions}
    return tuple(
        TensorWorker(
            size,
            join_conditions([found for each, found in profiles.items() if each.tensor == size]),
        )
        for size in sorted({each.tensor for each in conditions})
    )


def join_conditions(profiles: Sequence[ModelProfile]) -> ModelProfile:
    """Join profiles of one script under several conditions."""
    measured = tuple(condition for profile in profiles for condition in profile.conditions)
    return replace(profiles[0], conditions=measured)


@contextlib.contextmanager
def _end_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise, so that no copy and no folder is left. Only the main thread can do so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _measure_condition(script: str, args: Sequence[str], condition: Condition) -> ModelProfile:
    with tempfile.TemporaryDirectory(prefix="paceline-plan-") as folder:
        requests = [
            ProfileRequest(
                script,
                folder,
                index,
                condition.processes,
                condition.parts,
                condition.micro_parts,
                condition.tensor,
            )
            for index in range(condition.processes)
        ]
        # Workers that divide layers are one run. Its first request is that of all of them.
        _run_copies(script, args, condition.threads, requests[:: condition.tensor])
        profiles = [read_profile(request.result_file()) for request in requests]
    joined = join_processes([profile.conditions[0] for profile in profiles])
    return replace(profiles[0], conditions=(joined,))


def _run_copies(
    script: str, args: Sequence[str], threads: int, requests: Sequence[ProfileRequest]
) -> None:
    """Run all copies to their ends. Whatever happens, none of them is left."""
    copies: list[subprocess.Popen[bytes]] = []
    try:
        for request in requests:
            folder = Path(request.folder)
            ask = folder / f"request-{request.index}.json"
            request.write(ask)
            with (folder / f"output-{request.index}.txt").open("wb") as output:
                copies.append(
                    subprocess.Popen(
                        _make_command(script, args, threads, request.tensor),
                        stdin=subprocess.DEVNULL,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=_make_environment(copy_environment(), ask, threads, folder),
                        start_new_session=True,
                    )
                )
        _wait_for_copies(script, copies, requests)
    finally:
        for copy in copies:
            # The copy's own children end with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(copy.pid, signal.SIGKILL)
            copy.wait()


def _wait_for_copies(
    script: str, copies: Sequence[subprocess.Popen[bytes]], requests: Sequence[ProfileRequest]
) -> None:
    """Wait until each copy has written its profile. The first one that fails ends the wait."""
    limit, waiting = time.monotonic() + LONGEST, set(range(len(copies)))
    while waiting:
        for index in sorted(waiting):
            if copies[index].poll() is None:
                continue
            waiting.discard(index)
            if not requests[index].result_file().exists():
                raise UsageError(
                    _describe_failure(script, copies[index].returncode, requests[index])
                )
        if time.monotonic() > limit:
            raise UsageError(
                f"{script} hasn't made its first steps within {LONGEST:g} s: give it a smaller "
                "data set to plan with"
            )
        time.sleep(0.02)


def _make_command(script: str, args: Sequence[str], threads: int, tensor: int) -> list[str]:
    """Make the command of a copy: the script alone, or a run of workers that divide its layers."""
    if tensor == 1:
        return [sys.executable, script, *args]
    mesh = ["--mesh", f"tensor={tensor}", "--cut", 'tensor("auto")']
    quiet = ["--quiet", "--report-to", "none"]
    run = ["-m", "paceline", "run", "--workers", str(tensor), "--threads", str(threads)]
    return [sys.executable, *run, *mesh, *quiet, script, *args]


def _describe_failure(script: str, code: int, request: ProfileRequest) -> str:
    output = Path(request.folder) / f"output-{request.index}.txt"
    lines = output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if code:
        return f"{script} fails (exit code {code}):\n" + "\n".join(lines[-SHOWN_LINES:])
    return (
        f"{script} ended before any steps were measured: `paceline plan` needs a script that "
        "trains in a loop over a loader from run.prepare"
    )


def _make_environment(
    environment: Mapping[str, str], ask: Path, threads: int, folder: Path
) -> dict[str, str]:
    kept = {
        name: value
        for name, value in environment.items()
        if name not in LAUNCHER_VARIABLES and not name.startswith("PACELINE_")
    }
    return {
        **kept,
        "OMP_NUM_THREADS": str(threads),
        "PACELINE_PROFILE": str(ask),
        # The run folders of the copies go with this folder.
        "PACELINE_FOLDER": str(folder / f"runs-{ask.stem}"),
    }
