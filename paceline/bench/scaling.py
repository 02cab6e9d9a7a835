"""Runs a user's script with several numbers of workers, a launch of its own for each, and shows
what more workers bring.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

from paceline import notation
from paceline.cluster import machine
from paceline.cluster.discover import copy_environment
from paceline.cluster.launcher import launch
from paceline.cluster.launcher.request import LaunchRequest, check_request
from paceline.errors import PacelineError, UsageError
from paceline.formatting import format_count
from paceline.lab import kernel, terminal
from paceline.lab.description import Description
from paceline.lab.running import LabRequest
from paceline.observe import scaling
from paceline.observe.scaling import ScalingPoint
from paceline.record.folder import RunFolder

ScalingKind = Literal["strong", "weak", "both"]
_STOP_EXIT_CODES = (129, 130, 143)  # exit codes of a launch that was asked to end
_SHOWN_LINES = 6  # last lines of a launch that failed


@dataclass(frozen=True)
class ScalingRequest:
    """A measurement: the script, the numbers of workers, and how much of each run is taken (`steps`
    or `seconds`, what comes first).

    `batch_option` is the script's option for the global batch, whose value in `args` is that for
    the fewest workers; weak scaling needs it. `cluster` is that of a lab (None: this machine). Run
    folders go into `folder` (None: they go when all is done).
    """

    script: str
    args: tuple[str, ...]
    workers: tuple[int, ...]
    kind: ScalingKind = "strong"
    batch_option: str | None = None
    rounds: int = 1
    steps: int = 100
    seconds: float = 60.0
    cluster: Description | None = None
    threads: int | None = None
    sync: str | None = None
    folder: Path | None = None


class ScalingLaunch(NamedTuple):
    """One run: its arguments, and for which kinds of scaling it counts."""

    workers: int
    args: tuple[str, ...]
    kinds: tuple[str, ...]


class LaunchFailed(PacelineError):
    """A run that can't be measured, with the end of what it wrote."""


def parse_worker_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of workers with commas, such as `1,2,4`, the fewest first."""
    parts = [part.strip() for part in text.split(",")]
    if (
        not all(part.isascii() and part.isdecimal() and 0 < int(part) < 10_000 for part in parts)
        or len(set(map(int, parts))) < 2
    ):
        raise UsageError(
            f"--workers {text}: give two or more numbers of workers with commas, each 1 or more, "
            "such as 1,2,4"
        )
    return tuple(sorted({int(part) for part in parts}))


def plan_launches(asked: ScalingRequest) -> list[ScalingLaunch]:
    """List the runs of a round.

    One that counts for both kinds, with the fewest workers, is made once.
    """
    wanted: defaultdict[tuple[int, tuple[str, ...]], list[str]] = defaultdict(list)
    for kind in ("strong", "weak") if asked.kind == "both" else (asked.kind,):
        for workers in asked.workers:
            args = (
                asked.args
                if kind == "strong"
                else scale_batch(asked.args, asked.batch_option, workers, asked.workers[0])
            )
            wanted[workers, args].append(kind)
    return [ScalingLaunch(workers, args, tuple(kinds)) for (workers, args), kinds in wanted.items()]


def scale_batch(
    args: tuple[str, ...], option: str | None, workers: int, fewest: int
) -> tuple[str, ...]:
    """Return the arguments with the batch for so many workers, in proportion to the one that
    they give for the `fewest`.
    """
    if option is None:
        raise UsageError(
            "weak scaling lets the batch grow, which the script has to do: "
            "give --batch-option, or take --kind strong"
        )
    at = next(
        (at for at, arg in enumerate(args) if arg == option or arg.startswith(f"{option}=")), None
    )
    joined = at is not None and args[at] != option
    text = (
        ""
        if at is None
        else args[at].partition("=")[2]
        if joined
        else "".join(args[at + 1 : at + 2])
    )
    if at is None or not (text.isascii() and text.isdecimal() and int(text)):
        raise UsageError(
            f"--batch-option {option}: give the script the global batch for "
            f"{format_count(fewest, 'worker')}, behind a --, as in -- {option} 32"
        )
    if int(text) * workers % fewest:
        raise UsageError(
            f"a batch of {text} for {fewest} workers is no whole number for {workers}: "
            f"give one that {fewest} divides"
        )
    batch = str(int(text) * workers // fewest)
    return (
        (*args[:at], f"{option}={batch}", *args[at + 1 :])
        if joined
        else (*args[: at + 1], batch, *args[at + 2 :])
    )


def take_first_hosts(cluster: Description, workers: int) -> Description:
    """Return the cluster with its first hosts alone, as many as have so many workers; the last
    may have fewer than it could.
    """
    if workers > cluster.workers:
        raise UsageError(f"--workers {workers}: the cluster {cluster.name} has {cluster.workers}")
    hosts, left = [], workers
    for host in cluster.hosts:
        if left:
            hosts.append(replace(host, workers=min(host.workers, left)))
            left -= hosts[-1].workers
    names = {host.name for host in hosts}
    racks = [
        replace(rack, hosts=tuple(name for name in rack.hosts if name in names))
        for rack in cluster.racks
    ]
    return replace(cluster, hosts=tuple(hosts), racks=tuple(rack for rack in racks if rack.hosts))


def measure_scaling(
    asked: ScalingRequest, show: Callable[[str], None], note: Callable[[str], None]
) -> int:
    """Make all runs, `show` what they come to, and return the exit code: 1 where runs have failed.

    `note` tells how far it is.
    """
    launches = _plan_checked_launches(asked)
    points: defaultdict[ScalingLaunch, list[ScalingPoint]] = defaultdict(list)
    failed: set[ScalingLaunch] = set()
    with (
        nullcontext(asked.folder)
        if asked.folder
        else tempfile.TemporaryDirectory(prefix="paceline-scaling-") as root
    ):
        for number in range(1, asked.rounds + 1):
            for each in launches:
                if each in failed:
                    continue
                turn = f", round {number} of {asked.rounds}" if asked.rounds > 1 else ""
                note(
                    f"{format_count(each.workers, 'worker')}, {' and '.join(each.kinds)} "
                    f"scaling{turn}"
                )
                folder = Path(root).absolute() / f"{each.workers}-{'-'.join(each.kinds)}-{number}"
                try:
                    code = _run_launch(asked, each, folder)
                    if code:
                        return code
                    points[each].append(_read_run(folder))
                except LaunchFailed as error:
                    failed.add(each)
                    note(f"{format_count(each.workers, 'worker')}: {error}")
    texts = []
    for kind in ("strong", "weak"):
        found = [
            scaling.choose_median_run(points[each])
            for each in launches
            if kind in each.kinds and points[each] and each not in failed
        ]
        if len(found) > 1:
            texts.append(_describe_result(kind, found, asked))
    if texts:
        show("\n\n".join(texts))
    if failed:
        missing = [format_count(each.workers, "worker") for each in launches if each in failed]
        note(f"not measured: {', '.join(missing)}")
    return 1 if failed else 0


def compare_runs(folders: Sequence[Path]) -> str:
    """Describe the scaling that runs show that were made before, anywhere: one of each number of
    workers, or several rounds.
    """
    points: defaultdict[int, list[ScalingPoint]] = defaultdict(list)
    for folder in folders:
        point = scaling.measure_run(RunFolder(folder))
        points[point.workers].append(point)
    return scaling.describe_scaling(
        scaling.make_scaling_curve(
            [scaling.choose_median_run(rounds) for rounds in points.values()]
        )
    )


def _plan_checked_launches(asked: ScalingRequest) -> list[ScalingLaunch]:
    """Return the runs of a round, or raise `UsageError` before any of them is made."""
    for option, value in (
        ("--rounds", asked.rounds),
        ("--steps", asked.steps),
        ("--seconds", asked.seconds),
    ):
        if not value > 0:
            raise UsageError(f"{option} is {value:g}, and has to be more than 0")
    if asked.batch_option is not None and asked.kind == "strong":
        raise UsageError(
            f"--batch-option {asked.batch_option} is for weak scaling: "
            "leave it out, or --kind strong"
        )
    if asked.sync is not None:
        notation.verify_strategy(asked.sync)
    if (
        asked.folder is not None
        and asked.folder.exists()
        and (not asked.folder.is_dir() or any(asked.folder.iterdir()))
    ):
        raise UsageError(
            f"--folder {asked.folder} is there already: give a folder that is new or empty"
        )
    launches = plan_launches(asked)
    for each in launches:
        if asked.cluster is not None:
            take_first_hosts(asked.cluster, each.workers)
        check_request(LaunchRequest(asked.script, each.args, each.workers, threads=asked.threads))
    if asked.cluster is not None:
        kernel.seek_rights()
    return launches


def _describe_result(kind: str, points: list[ScalingPoint], asked: ScalingRequest) -> str:
    """Describe what was measured for one kind of scaling, or say that the script doesn't scale
    like that.
    """
    cores = (
        machine.count_cores()
        if asked.cluster is None or all(host.processors is None for host in asked.cluster.hosts)
        else None
    )
    try:
        found = scaling.make_scaling_curve(points)
    except UsageError as error:
        return f"No {kind} scaling can be told: {error}"
    other = ""
    if found.strong != (kind == "strong"):
        other = (
            "The script's batch doesn't follow its option. "
            if found.strong
            else "The script's batch grows with its workers by itself. "
        )
    return other + scaling.describe_scaling(found, cores)


def _run_launch(asked: ScalingRequest, each: ScalingLaunch, folder: Path) -> int:
    """Make one run, whose folder goes into `folder`: 0, or the exit code if this was asked to end.

    `LaunchFailed` if it went wrong.
    """
    folder.mkdir(parents=True)
    given = {
        "PACELINE_FOLDER": str(folder),
        "PACELINE_STEPS": str(asked.steps),
        "PACELINE_SECONDS": str(asked.seconds),
    }
    given["PACELINE_REPORT_TO"] = "none"  # what is measured is no training
    code, said = (_run_here if asked.cluster is None else _run_in_lab)(asked, each, given)
    if code in _STOP_EXIT_CODES:
        return code
    if code:
        last = "\n".join(f"    {line}" for line in said.strip().splitlines()[-_SHOWN_LINES:])
        raise LaunchFailed(f"the script ended with {code}; its last lines:\n{last}")
    return 0


def _run_here(
    asked: ScalingRequest, each: ScalingLaunch, given: Mapping[str, str]
) -> tuple[int, str]:
    """Run on this machine.

    Workers have as many threads in all runs: those that they have with the most workers.
    """
    threads = asked.threads
    if threads is None and "OMP_NUM_THREADS" not in copy_environment():
        threads = max(1, machine.count_cores() // asked.workers[-1])
    job = LaunchRequest(asked.script, each.args, each.workers, threads=threads, sync=asked.sync)
    with tempfile.TemporaryFile() as kept:
        with _redirect_output(kept.fileno()):
            code = launch.run_job(job, {**copy_environment(), **given})
        kept.seek(0)
        return code, kept.read().decode(errors="replace")


def _run_in_lab(
    asked: ScalingRequest, each: ScalingLaunch, given: Mapping[str, str]
) -> tuple[int, str]:
    """Run on the first hosts of a lab, with the threads that workers have on all of them."""
    assert asked.cluster is not None
    threads = asked.threads
    if threads is None and all(host.processors is None for host in asked.cluster.hosts):
        threads = max(1, machine.count_cores() // asked.cluster.workers)
    start = LabRequest(asked.script, each.args, sync=asked.sync, threads=threads, environ=given)
    outcome = terminal.build_and_run(take_first_hosts(asked.cluster, each.workers), start)
    return outcome.code, outcome.output


@contextmanager
def _redirect_output(descriptor: int) -> Iterator[None]:
    """Have what this process and those that it starts write go to this file."""
    streams = (sys.stdout, sys.stderr)
    before = [os.dup(number) for number in (1, 2)]
    for stream in streams:
        stream.flush()
    for number in (1, 2):
        os.dup2(descriptor, number)
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()
        for number, was in zip((1, 2), before, strict=True):
            os.dup2(was, number)
            os.close(was)


def _read_run(folder: Path) -> ScalingPoint:
    """Read the only run in `folder`; `LaunchFailed` if there is none, or more."""
    runs = [path.parent for path in folder.glob("*/metrics.jsonl")]
    if len(runs) != 1:
        raise LaunchFailed(
            "the script made no run: it has to train between pl.start and its end"
            if not runs
            else "the script made several runs"
        )
    try:
        return scaling.measure_run(RunFolder(runs[0]))
    except UsageError as error:
        raise LaunchFailed(str(error)) from error
