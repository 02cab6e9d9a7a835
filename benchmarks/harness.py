"""What all benchmarks share: crews of processes asked in turn, medians of interleaved rounds,
ratios with intervals, results as files.

    coordinator ──ask──> crew A (processes 0..n-1) works     crew B sleeps in a socket
                ──ask──> crew B works                        crew A sleeps
                ... rounds, in rotating order

Imports nothing but the standard library, so that a peer in another environment can use its worker
side (`serve`).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import random
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

Message = dict[str, Any]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


# ---- processes that are asked, one crew at a time


class Crew:
    """`size` processes started by `commands`, each of which calls `serve`; while they aren't
    asked, they sleep in a socket.
    """

    def __init__(
        self,
        name: str,
        commands: Sequence[Sequence[str]],
        size: int,
        *,
        patience: float = 120.0,
        folder: str | None = None,
    ) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (lives as long as the crew)
        self._processes: list[subprocess.Popen[str]] = []
        self._links: list[_Link] = []
        listener = socket.create_server(("127.0.0.1", 0), backlog=size)
        environ = {**os.environ, **ONE_THREAD, "HARNESS": f"127.0.0.1:{listener.getsockname()[1]}"}
        try:
            for command in commands:
                process = subprocess.Popen(
                    command,
                    env=environ,
                    cwd=folder,
                    stdout=self._log,
                    stderr=self._log,
                    start_new_session=True,
                    text=True,
                )
                self._processes.append(process)
            self._links = self._welcome(listener, size, patience)
        except BaseException:
            self.close()
            raise
        finally:
            listener.close()

    def _welcome(self, listener: socket.socket, size: int, patience: float) -> list[_Link]:
        ranks: dict[int, _Link] = {}
        end = time.monotonic() + patience
        listener.settimeout(0.5)
        while len(ranks) < size:
            with contextlib.suppress(TimeoutError):
                link = _Link(listener.accept()[0])
                ranks[link.receive()["rank"]] = link
            gone = [p for p in self._processes if p.poll() not in (None, 0)]
            if gone or time.monotonic() > end:
                why = (
                    f"exit code {gone[0].returncode}"
                    if gone
                    else f"only {len(ranks)} of {size} came within {patience:g} s"
                )
                raise RuntimeError(f"{self.name}: {why}\n{self._tail()}")
        return [ranks[rank] for rank in range(size)]

    def ask(self, **message: Any) -> list[Message]:
        """Every process's answer to `message`, in rank order."""
        try:
            for link in self._links:
                link.send(message)
            return [link.receive() for link in self._links]
        except (ConnectionError, EOFError) as error:
            time.sleep(1)  # let the first one say why
            raise RuntimeError(
                f"{self.name} is gone while asked {message}\n{self._tail()}"
            ) from error

    def close(self) -> None:
        """Dismiss the processes; those that don't leave within 10 s are ended, 5 s later killed,
        with all they started.
        """
        for link in self._links:
            link.close()
        self._await(10 if self._links else 0)
        for process in self._processes:
            process.terminate()  # launchers end their workers then
        self._await(5)
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._links, self._processes = [], []

    def _await(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=max(0.0, end - time.monotonic()))

    def _tail(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Link:
    """JSON lines over a socket."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._lines = connection, connection.makefile("rw")

    def send(self, message: Message) -> None:
        self._lines.write(json.dumps(message) + "\n")
        self._lines.flush()

    def receive(self) -> Message:
        line = self._lines.readline()
        if not line:
            raise EOFError("the other side has left")
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._lines.close()
        self._connection.close()


def serve(rank: int, handle: Callable[[Message], Message]) -> None:
    """The worker's side: answer whatever the coordinator asks, until it hangs up."""
    host, port = os.environ["HARNESS"].rsplit(":", 1)
    link = _Link(socket.create_connection((host, int(port))))
    link.send({"rank": rank})
    with contextlib.suppress(EOFError):
        while True:
            link.send(handle(link.receive()))
    link.close()


# ---- rounds and their statistics


def interleave(
    variants: Mapping[str, Callable[[], float]], rounds: int, *, warmup: int = 1
) -> dict[str, list[float]]:
    """Seconds of each variant in each round; who begins rotates from round to round.

    The first `warmup` rounds aren't counted.
    """
    names, samples = list(variants), {name: [] for name in variants}
    for index in range(-warmup, rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = variants[name]()
            if index >= 0:
                samples[name].append(seconds)
    return samples


class Interval(NamedTuple):
    """A number, and the bounds of its 90 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def bootstrap(
    statistic: Callable[..., float],
    *samples: Sequence[float],
    draws: int = 2000,
    level: float = 0.9,
    seed: int = 0,
) -> Interval:
    """`statistic` of the medians of `samples`, whole rounds drawn anew with replacement: rounds
    stay pairs, as they ran side by side.
    """
    rounds, generator = len(samples[0]), random.Random(seed)
    drawn = []
    for _ in range(draws):
        chosen = [generator.randrange(rounds) for _ in range(rounds)]
        drawn.append(statistic(*(statistics.median([s[i] for i in chosen]) for s in samples)))
    drawn.sort()
    edge = (1 - level) / 2
    return Interval(
        statistic(*map(statistics.median, samples)),
        drawn[int(edge * draws)],
        drawn[min(int((1 - edge) * draws), draws - 1)],
    )


def ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """median(above) / median(below)."""
    return bootstrap(lambda a, b: a / b, above, below)


# ---- results


@dataclass
class Row:
    """One line of a table: what was compared, by how much, and the bar it is held to (`least`:
    at least, `most`: at most).
    """

    what: str
    seconds: dict[str, float] = field(default_factory=dict)
    compared: str = ""
    value: Interval | None = None
    least: float | None = None
    most: float | None = None
    note: str = ""

    @property
    def held(self) -> bool | None:
        """Whether the bar is held; None without a bar."""
        if self.value is None or (self.least is None and self.most is None):
            return None
        return (self.least is None or self.value.value >= self.least) and (
            self.most is None or self.value.value <= self.most
        )

    @property
    def bar(self) -> str:
        """The bar in words."""
        return (
            f">= {self.least:g}"
            if self.least is not None
            else f"<= {self.most:g}"
            if self.most is not None
            else ""
        )


def table(rows: Sequence[Row]) -> str:
    """`rows` in Markdown."""
    lines = [
        "| what | medians | compared | ratio [90 %] | bar | held |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    words = {True: "yes", False: "**no**", None: ""}
    for row in rows:
        medians = ", ".join(f"{name} {duration(seconds)}" for name, seconds in row.seconds.items())
        value = "" if row.value is None else str(row.value)
        lines.append(
            f"| {row.what} | {medians} | {row.compared}{row.note} | {value} | {row.bar} | "
            f"{words[row.held]} |"
        )
    return "\n".join(lines)


def duration(seconds: float) -> str:
    """Seconds as a person reads them."""
    return (
        f"{seconds * 1e6:.0f} us"
        if seconds < 1e-3
        else f"{seconds * 1e3:.2f} ms"
        if seconds < 1
        else f"{seconds:.2f} s"
    )


def report(
    name: str, rows: Sequence[Row], options: argparse.Namespace, raw: Mapping[str, Any]
) -> bool:
    """Print the table and write all of it to `options.out`; whether every bar is held."""
    held = all(row.held is not False for row in rows)
    print(table(rows))
    result = {
        "benchmark": name,
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": machine(),
        "versions": versions("torch", "numpy", "mpi4py", "paceline"),
        "options": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(options).items()
        },
        "rows": [
            {**asdict(row), "value": row.value and row.value._asdict(), "held": row.held}
            for row in rows
        ],
        "raw": dict(raw),
    }
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"\nwritten to {options.out}")
    return held


def machine() -> dict[str, Any]:
    """What this ran on."""
    models = [
        line.partition(":")[2].strip()
        for line in _lines("/proc/cpuinfo")
        if line.startswith("model name")
    ]
    memory = [
        int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")
    ]
    return {
        "processor": models[0] if models else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory[0] / 2**20, 1) if memory else None,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load_average": os.getloadavg(),
    }


def versions(*packages: str) -> dict[str, str | None]:
    """Versions of `packages`, None for those that aren't here."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _lines(path: str) -> Iterator[str]:
    with contextlib.suppress(OSError), open(path) as file:
        yield from file


def arguments(description: str, name: str, *, rounds: int) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help="timed rounds of every variant (default %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results" / f"{name}.json",
        help="where the JSON goes",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 when a bar isn't held")
    return parser
