"""One launch of one peer: start it, wait with a deadline, gather what its workers wrote, and
take everything down.
"""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers import launchers, places
from benchmarks.peers.catalogue import Peer
from benchmarks.peers.environments import last_words
from benchmarks.peers.places import Place, Process

GRACE = 20.0  # seconds that the others have to end after the first command has failed
Answer = dict[str, Any]


class LaunchError(RuntimeError):
    """A peer didn't get to its end; the text says why in a line."""


def launch(
    peer: Peer,
    place: Place,
    arguments: Sequence[str],
    *,
    deadline: float,
    bucket: float | None = None,
) -> list[Answer]:
    """What the workers of a peer wrote, in rank order.

    Raises `LaunchError` when a command failed or `deadline` seconds have passed.
    """
    out = Path(tempfile.mkdtemp(prefix="out-", dir=place.folder))
    log = (out / "log").open("wb")
    helpers: list[Process] = []
    others: list[Process] = []
    try:
        for start in launchers.starts(peer, place, (*arguments, "--out", str(out)), bucket):
            environ = {**places.surroundings(place), **start.environ}
            process = place.spawn(start.host, start.command, environ, log)
            (helpers if start.helper else others).append(process)
        _await(others, deadline, out / "log")
        return gather(out)
    finally:
        places.end([*others, *helpers])
        place.sweep()
        log.close()
        shutil.rmtree(out, ignore_errors=True)


def gather(out: Path) -> list[Answer]:
    """The answers in a folder, in rank order; what `run_ddp.py --try-buckets` wrote counts as
    one.
    """
    found = [
        json.loads(path.read_text())
        for path in (*out.glob("rank-*.json"), *out.glob("buckets.json"))
    ]
    return sorted(found, key=lambda answer: answer.get("rank", 0))


def why(code: int, log: str) -> str:
    """A reason in a line, from an exit code and the output.

    A worker that was ended by a signal is told by it.
    """
    for number in (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE):
        if (
            code == -number
            or f"({number.name})" in log
            or f"Signal {number.value} ({number.name})" in log
        ):
            thrown = [
                line.strip()
                for line in log.splitlines()
                if "what():" in line or "terminate called" in line
            ]
            return f"a worker ended by {number.name}" + (
                f": {last_words(thrown[-1])}" if thrown else ""
            )
    return f"exit code {code}: {last_words(log)}"


def sent(answers: Sequence[Mapping[str, Any]], kind: str) -> float:
    """Bytes that left all hosts in a step, counted once for each host: over its `links`, or over
    `loopback`.
    """
    hosts: dict[str, float] = {}
    for answer in answers:
        hosts[answer["host"]] = max(
            hosts.get(answer["host"], 0.0), answer["sent"][kind] / len(answer["seconds"])
        )
    return sum(hosts.values())


def _await(processes: Sequence[Process], deadline: float, log: Path) -> None:
    """Wait until all have ended well."""
    end = time.monotonic() + deadline
    failed: Process | None = None
    while any(process.poll() is None for process in processes):
        if failed is None and any(process.poll() for process in processes):
            failed = next(process for process in processes if process.poll())
            end = min(end, time.monotonic() + GRACE)
        if time.monotonic() > end:
            if failed is not None:
                break
            raise LaunchError(
                f"not done after {deadline:.0f} s; it last said: {last_words(_text(log))}"
            )
        time.sleep(0.05)
    failed = failed or next((process for process in processes if process.returncode), None)
    if failed is not None:
        raise LaunchError(why(failed.returncode, _text(log)))


def _text(log: Path) -> str:
    return log.read_text(errors="replace")[-100_000:]
