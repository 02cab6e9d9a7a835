"""Shared parts of all benchmarks: crews of processes, rounds, ratios with intervals, results.

    coordinator ──ask──> crew A (processes 0..n-1) works     crew B sleeps in a socket
                ──ask──> crew B works                        crew A sleeps
                ... rounds, in rotating order

This module imports nothing but the standard library, so that a peer in another environment can use
the side of the workers (`serve`).
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


# ---- crews of processes; one crew works at a time


class Crew:
    """A group of processes that answer questions. Between questions they sleep in a socket.

    Args:
        name: Name of the crew in errors.
        commands: Commands that start the processes. Each process calls `serve`.
        size: Number of processes. A launcher among the commands may start several.
        patience: Seconds to wait until all processes have connected.
        folder: Working folder of the processes. Default: the current one.
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
        self._log = tempfile.TemporaryFile(mode="w+")  # noqa: SIM115 (it is open as long as the crew lives)
        self._processes: list[subprocess.Popen[str]] = []
        self._links: list[_Link] = []
        listener = socket.create_server(("127.0.0.1", 0), backlog=size)
        # Processes find the coordinator by an environment variable.
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
        """Wait until all processes have connected, and return their links in rank order."""
        links: dict[int, _Link] = {}
        end = time.monotonic() + patience
        listener.settimeout(0.5)
        while len(links) < size:
            # Wake up often, to notice a process that has failed.
            with contextlib.suppress(TimeoutError):
                link = _Link(listener.accept()[0])
                links[link.receive()["rank"]] = link
            failed = [process for process in self._processes if process.poll() not in (None, 0)]
            if failed or time.monotonic() > end:
                reason = (
                    f"exit code {failed[0].returncode}"
                    if failed
                    else f"only {len(links)} of {size} connected within {patience:g} s"
                )
                raise RuntimeError(f"{self.name}: {reason}\n{self._tail()}")
        return [links[rank] for rank in range(size)]

    def ask(self, **message: Any) -> list[Message]:
        """Send a message to all processes, and return their answers in rank order."""
        try:
            for link in self._links:
                link.send(message)
            return [link.receive() for link in self._links]
        except (ConnectionError, EOFError) as error:
            time.sleep(1)  # time for the failed process to write its error
            raise RuntimeError(
                f"{self.name} has ended at the message {message}\n{self._tail()}"
            ) from error

    def close(self) -> None:
        """End the processes.

        They end by themselves when their links close. After 10 s they are terminated, and after 5 s
        more they are killed, together with all processes that they have started.
        """
        for link in self._links:
            link.close()
        self._await(10 if self._links else 0)
        for process in self._processes:
            process.terminate()  # a launcher then ends its workers
        self._await(5)
        # Each process leads a session, so this also kills the processes that it has started.
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
    """A connection that carries a line of JSON for each message."""

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
            raise EOFError("the other side has closed the connection")
        message: Message = json.loads(line)
        return message

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._lines.close()
        self._connection.close()


def serve(rank: int, handle: Callable[[Message], Message]) -> None:
    """Answer the questions of the coordinator until it closes the connection.

    Args:
        rank: Rank of this process in its crew.
        handle: Makes the answer to a message.
    """
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
    """Measure all variants in rounds, in an order that rotates from round to round.

    Args:
        variants: Functions by name. Each makes a measurement and returns seconds.
        rounds: Number of rounds that count.
        warmup: Number of rounds before them.

    Returns:
        The seconds of each variant in each round that counts.
    """
    names, samples = list(variants), {name: [] for name in variants}
    for index in range(-warmup, rounds):
        # The first variant of a round may find other caches or clock rates, so it changes.
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = variants[name]()
            if index >= 0:
                samples[name].append(seconds)
    return samples


class Interval(NamedTuple):
    """A number with the bounds of its 90 % bootstrap interval."""

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
    """Compute a statistic of medians, with a bootstrap interval.

    Whole rounds are drawn with replacement. The samples of a round stay together, because they were
    measured side by side.

    Args:
        statistic: Function of the median of each of `samples`.
        samples: Sequences of equal length, with an item for each round.
        draws: Number of draws.
        level: Probability that the interval covers.
        seed: Seed of the draws.
    """
    rounds, generator = len(samples[0]), random.Random(seed)
    values = []
    for _ in range(draws):
        # The same rounds are taken of all samples.
        chosen = [generator.randrange(rounds) for _ in range(rounds)]
        values.append(
            statistic(
                *(statistics.median([sample[index] for index in chosen]) for sample in samples)
            )
        )
    values.sort()
    # The interval leaves out the same number of values on both sides.
    edge = (1 - level) / 2
    return Interval(
        statistic(*map(statistics.median, samples)),
        values[int(edge * draws)],
        values[min(int((1 - edge) * draws), draws - 1)],
    )


def ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """Compute median(above) / median(below), with its interval."""
    return bootstrap(lambda a, b: a / b, above, below)


# ---- results


@dataclass
class Row:
    """One line of a table.

    Attributes:
        what: The case.
        seconds: Median of each variant.
        compared: Meaning of `value`.
        value: Result of the comparison.
        least: Bar that `value` has to reach. Default: none.
        most: Bar that `value` must not exceed. Default: none.
        note: Remark after `compared`.
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
        """True if the row keeps its bar, False if it misses it, None without a bar."""
        if self.value is None or (self.least is None and self.most is None):
            return None
        return (self.least is None or self.value.value >= self.least) and (
            self.most is None or self.value.value <= self.most
        )

    @property
    def bar(self) -> str:
        """Text of the bar."""
        return (
            f">= {self.least:g}"
            if self.least is not None
            else f"<= {self.most:g}"
            if self.most is not None
            else ""
        )


def table(rows: Sequence[Row]) -> str:
    """Format rows as a table in Markdown."""
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
    """Format a time with a unit that suits it."""
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
    """Print the table, and write the results to the file `options.out`.

    Args:
        name: Name of the benchmark.
        rows: Rows of the table.
        options: Arguments of the benchmark.
        raw: All samples.

    Returns:
        Whether all bars are kept.
    """
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
    """Describe this machine."""
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
    """Look up the versions of packages. None: the package isn't installed."""
    version_by_package: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            version_by_package[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version_by_package[package] = None
    return version_by_package


def _lines(path: str) -> Iterator[str]:
    with contextlib.suppress(OSError), open(path) as file:
        yield from file


def arguments(description: str, name: str, *, rounds: int) -> argparse.ArgumentParser:
    """Make a parser with the options that all benchmarks have.

    Args:
        description: Text for --help.
        name: Name of the benchmark, which names the file of results.
        rounds: Default number of rounds.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--rounds",
        type=int,
        default=rounds,
        help="timed rounds of each variant (default %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(__file__).parent / "results" / f"{name}.json",
        help="file for the results, as JSON",
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    return parser
