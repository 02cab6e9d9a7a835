"""Runs a user's script with several numbers of workers, and describes how its speed scales.

Each number of workers has its own launch.
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
_STOP_EXIT_CODES = (129, 130, 143)  # of a launch that SIGHUP, SIGINT or SIGTERM has ended
_SHOWN_LINES = 6  # number of last lines that are shown of a launch that failed


@dataclass(frozen=True)
class ScalingRequest:
    """A measurement of scaling.

    A run stops after `steps` steps or after `seconds` seconds, whichever comes first.

    Attributes:
        script: Path of the training script.
        args: Arguments of the script.
        workers: Numbers of workers, the smallest first.
        kind: Strong scaling keeps the global batch, weak scaling lets it grow with the workers.
        batch_option: The script's own option for the global batch. Its value in `args` is the batch
            for the smallest number of workers. Weak scaling needs it.
        rounds: Number of runs for each number of workers.
        steps: Largest number of steps of a run.
        seconds: Longest training time of a run.
        cluster: Cluster of the lab to run on. Default: this machine.
        threads: Threads of each worker. Default: a share of the cores.
        sync: Strategy. Default: the one that the script chooses.
        folder: Folder for the run folders. Default: they are removed at the end.
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
    """One run.

    Attributes:
        workers: Number of workers.
        args: Arguments of the script.
        kinds: Kinds of scaling that the run is part of.
    """

    workers: int
    args: tuple[str, ...]
    kinds: tuple[str, ...]


class LaunchFailed(PacelineError):
    """A run can't be measured. The message has the end of its output."""


def parse_worker_counts(text: str) -> tuple[int, ...]:
    """Parse numbers of workers with commas, such as `1,2,4`. The result is sorted."""
    words = [word.strip() for word in text.split(",")]
    if (
        not all(word.isascii() and word.isdecimal() and 0 < int(word) < 10_000 for word in words)
        or len(set(map(int, words))) < 2
    ):
        raise UsageError(
            f"--workers {text}: give two or more numbers of workers with commas, each at least 1, "
            "such as 1,2,4"
        )
    return tuple(sorted({int(word) for word in words}))


def plan_launches(asked: ScalingRequest) -> list[ScalingLaunch]:
    """List the runs of a round.

    With the smallest number of workers, strong and weak scaling share one run.
    """
    kinds_by_run: defaultdict[tuple[int, tuple[str, ...]], list[str]] = defaultdict(list)
    for kind in ("strong", "weak") if asked.kind == "both" else (asked.kind,):
        for workers in asked.workers:
            args = (
                asked.args
                if kind == "strong"
                else scale_batch(asked.args, asked.batch_option, workers, asked.workers[0])
            )
            kinds_by_run[workers, args].append(kind)
    return [
        ScalingLaunch(workers, args, tuple(kinds))
        for (workers, args), kinds in kinds_by_run.items()
    ]


def scale_batch(
    args: tuple[str, ...], option: str | None, workers: int, fewest: int
) -> tuple[str, ...]:
    """Make arguments with the batch for a number of workers.

    Args:
        args: Arguments of the script, with the batch for the smallest number of workers.
        option: The script's option for the batch.
        workers: Number of workers. The batch is in proportion to it.
        fewest: Smallest number of workers.

    Raises:
        UsageError: The option is missing, or the batch isn't a whole number.
    """
    if option is None:
        raise UsageError(
            "weak scaling needs an option of the script that sets the batch: "
            "give --batch-option, or --kind strong"
        )
    # The value is in the same argument, as in --batch=32, or in the next one.
    index = next(
        (index for index, arg in enumerate(args) if arg == option or arg.startswith(f"{option}=")),
        None,
    )
    is_joined = index is not None and args[index] != option
    text = (
        ""
        if index is None
        else args[index].partition("=")[2]
        if is_joined
        else "".join(args[index + 1 : index + 2])
    )
    if index is None or not (text.isascii() and text.isdecimal() and int(text)):
        raise UsageError(
            f"--batch-option {option}: give the script the global batch for "
            f"{format_count(fewest, 'worker')}, behind a --, as in -- {option} 32"
        )
    if int(text) * workers % fewest:
        raise UsageError(
            f"a batch of {text} for {fewest} workers is no whole number for {workers}: "
            f"give a batch that {fewest} divides"
        )
    batch = str(int(text) * workers // fewest)
    return (
        (*args[:index], f"{option}={batch}", *args[index + 1 :])
        if is_joined
        else (*args[: index + 1], batch, *args[index + 2 :])
    )


def take_first_hosts(cluster: Description, workers: int) -> Description:
    """Take the first hosts of a cluster, as many as this number of workers needs.

    The last of them may get fewer workers than it could have.
    """
    if workers > cluster.workers:
        raise UsageError(f"--workers {workers}: the cluster {cluster.name} has {cluster.workers}")
    hosts, remaining = [], workers
    for host in cluster.hosts:
        if remaining:
            hosts.append(replace(host, workers=min(host.workers, remaining)))
            remaining -= hosts[-1].workers
    names = {host.name for host in hosts}
    racks = [
        replace(rack, hosts=tuple(name for name in rack.hosts if name in names))
        for rack in cluster.racks
    ]
    return replace(cluster, hosts=tuple(hosts), racks=tuple(rack for rack in racks if rack.hosts))


def measure_scaling(
    asked: ScalingRequest, show: Callable[[str], None], note: Callable[[str], None]
) -> int:
    """Make all runs, and show the results.

    Args:
        asked: The measurement.
        show: Shows the results.
        note: Tells about progress and failures.

    Returns:
        The exit code: 0, 1 if a run has failed, or that of a run that was asked to stop.
    """
    launches = _plan_checked_launches(asked)
    points: defaultdict[ScalingLaunch, list[ScalingPoint]] = defaultdict(list)
    failed: set[ScalingLaunch] = set()
    with (
        nullcontext(asked.folder)
        if asked.folder
        else tempfile.TemporaryDirectory(prefix="paceline-scaling-") as root
    ):
        # Launches take turns, so that a slow minute of the machine doesn't hit one of them alone.
        for round_number in range(1, asked.rounds + 1):
            for planned in launches:
                if planned in failed:
                    continue
                workers = format_count(planned.workers, "worker")
                turn = f", round {round_number} of {asked.rounds}" if asked.rounds > 1 else ""
                note(f"{workers}, {' and '.join(planned.kinds)} scaling{turn}")
                name = f"{planned.workers}-{'-'.join(planned.kinds)}-{round_number}"
                folder = Path(root).absolute() / name
                try:
                    code = _run_launch(asked, planned, folder)
                    if code:
                        return code
                    points[planned].append(_read_run(folder))
                except LaunchFailed as error:
                    failed.add(planned)
                    note(f"{workers}: {error}")
    texts = []
    for kind in ("strong", "weak"):
        medians = [
            scaling.choose_median_run(points[planned])
            for planned in launches
            if kind in planned.kinds and points[planned] and planned not in failed
        ]
        # One point is no curve.
        if len(medians) > 1:
            texts.append(_describe_result(kind, medians, asked))
    if texts:
        show("\n\n".join(texts))
    if failed:
        missing = [format_count(each.workers, "worker") for each in launches if each in failed]
        note(f"not measured: {', '.join(missing)}")
    return 1 if failed else 0


def compare_runs(folders: Sequence[Path]) -> str:
    """Describe the scaling of runs that already exist, from any machine.

    `folders` has a run for each number of workers, or several rounds of them.
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
    """List the runs of a round.

    Raises `UsageError` before any run is made, if one of them is impossible.
    """
    for option, value in (
        ("--rounds", asked.rounds),
        ("--steps", asked.steps),
        ("--seconds", asked.seconds),
    ):
        if not value > 0:
            raise UsageError(f"{option} {value:g}: give more than 0")
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
            f"--folder {asked.folder} is not an empty folder: give a new or an empty one"
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
    """Describe one kind of scaling, or say that the script doesn't scale in this way."""
    # In a lab with quotas the cores of this machine say nothing.
    cores = (
        machine.count_cores()
        if asked.cluster is None or all(host.processors is None for host in asked.cluster.hosts)
        else None
    )
    try:
        curve = scaling.make_scaling_curve(points)
    except UsageError as error:
        return f"{kind.capitalize()} scaling can't be computed: {error}"
    warning = ""
    if curve.strong != (kind == "strong"):
        warning = (
            "The script's batch doesn't follow its option. "
            if curve.strong
            else "The script's batch grows with its workers by itself. "
        )
    return warning + scaling.describe_scaling(curve, cores)


def _run_launch(asked: ScalingRequest, planned: ScalingLaunch, folder: Path) -> int:
    """Make one run, and put its run folder into `folder`.

    Returns 0, or the exit code if the run was asked to stop. Raises `LaunchFailed` if it failed.
    """
    folder.mkdir(parents=True)
    environ = {
        "PACELINE_FOLDER": str(folder),
        "PACELINE_STEPS": str(asked.steps),
        "PACELINE_SECONDS": str(asked.seconds),
    }
    environ["PACELINE_REPORT_TO"] = "none"  # trackers shall not show a benchmark as a training
    code, output = (_run_here if asked.cluster is None else _run_in_lab)(asked, planned, environ)
    if code in _STOP_EXIT_CODES:
        return code
    if code:
        lines = "\n".join(f"    {line}" for line in output.strip().splitlines()[-_SHOWN_LINES:])
        raise LaunchFailed(f"the script ended with exit code {code}; its last lines:\n{lines}")
    return 0


def _run_here(
    asked: ScalingRequest, planned: ScalingLaunch, environ: Mapping[str, str]
) -> tuple[int, str]:
    """Run on this machine. Returns the exit code and the output.

    Workers have the same number of threads in all runs: their share of the cores in the run with
    the most workers.
    """
    threads = asked.threads
    if threads is None and "OMP_NUM_THREADS" not in copy_environment():
        threads = max(1, machine.count_cores() // asked.workers[-1])
    job = LaunchRequest(
        asked.script, planned.args, planned.workers, threads=threads, sync=asked.sync
    )
    with tempfile.TemporaryFile() as file:
        with _redirect_output(file.fileno()):
            code = launch.run_job(job, {**copy_environment(), **environ})
        file.seek(0)
        return code, file.read().decode(errors="replace")


def _run_in_lab(
    asked: ScalingRequest, planned: ScalingLaunch, environ: Mapping[str, str]
) -> tuple[int, str]:
    """Run on the first hosts of a lab. Returns the exit code and the output.

    Workers have the threads that they would have on the whole cluster.
    """
    assert asked.cluster is not None
    threads = asked.threads
    if threads is None and all(host.processors is None for host in asked.cluster.hosts):
        threads = max(1, machine.count_cores() // asked.cluster.workers)
    request = LabRequest(
        asked.script, planned.args, sync=asked.sync, threads=threads, environ=environ
    )
    outcome = terminal.build_and_run(take_first_hosts(asked.cluster, planned.workers), request)
    return outcome.code, outcome.output


@contextmanager
def _redirect_output(descriptor: int) -> Iterator[None]:
    """Redirect the output of this process and of its new children to a file."""
    streams = (sys.stdout, sys.stderr)
    # File descriptors are replaced, not just Python's streams, because children inherit them.
    saved = [os.dup(standard_descriptor) for standard_descriptor in (1, 2)]
    for stream in streams:
        stream.flush()
    for standard_descriptor in (1, 2):
        os.dup2(descriptor, standard_descriptor)
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()
        for standard_descriptor, saved_descriptor in zip((1, 2), saved, strict=True):
            os.dup2(saved_descriptor, standard_descriptor)
            os.close(saved_descriptor)


def _read_run(folder: Path) -> ScalingPoint:
    """Read the only run in a folder. Raises `LaunchFailed` if there isn't exactly one."""
    runs = [path.parent for path in folder.glob("*/metrics.jsonl")]
    if len(runs) != 1:
        raise LaunchFailed(
            "the script made no run: it has to train after pl.start"
            if not runs
            else f"the script made {len(runs)} runs: it has to call pl.start once"
        )
    try:
        return scaling.measure_run(RunFolder(runs[0]))
    except UsageError as error:
        raise LaunchFailed(str(error)) from error
