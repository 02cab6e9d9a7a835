"""Makes a profile and a cluster of a finished run, for `paceline plan runs/NAME --what-if CHANGE`.

A run shows its steps with one number of samples for each worker. So computing is taken to be in
proportion to samples, besides the optimizer, whose time follows from the bytes that it changes.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from paceline.cluster.machine import count_cores
from paceline.errors import UsageError
from paceline.planner.answer import Plan, Wishes, make_plan
from paceline.planner.candidates import list_candidates
from paceline.planner.ledger import MOST_CORRECTION
from paceline.planner.model_profile import (
    GradientProfile,
    MeasuredCondition,
    ModelProfile,
    StepTimes,
)
from paceline.planner.planned_cluster import PlannedCluster, PlannedHost
from paceline.planner.planning.planned_input import apply_changes, choose_cluster
from paceline.planner.search import price_candidate
from paceline.record.folder import RunFolder
from paceline.unequal.probe.compute import make_copy_pair, measure_copies

COPY_SECONDS: Final = 0.3  # seconds for which copies are measured
PIECE: Final = 250_000  # elements of a gradient: a run doesn't say how many parameters there are
FORWARD: Final = 1 / 3  # part of computing, the optimizer left out


@dataclass(frozen=True)
class FinishedRun:
    """What the summary of a run says about its steps.

    Attributes:
        folder: Folder of the run.
        script: Its script.
        sync: Its strategy. Empty: the exact all-reduce.
        workers: Number of workers of each host, by the host's name.
        threads: Threads of each worker.
        batch: Samples of a step of all workers.
        step_seconds: Seconds of a mean step by part: compute, exchange, wait, data.
        state_bytes: Bytes of parameters, gradients, and optimizer of a worker.
        peak_bytes: Most bytes of a worker.
    """

    folder: Path
    script: str
    sync: str
    workers: Mapping[str, int]
    threads: int
    batch: int
    step_seconds: Mapping[str, float]
    state_bytes: tuple[int, int, int]
    peak_bytes: int

    @property
    def seconds(self) -> float:
        """Seconds of a mean step."""
        return sum(self.step_seconds.values())


def read_finished_run(folder: Path) -> FinishedRun:
    """Read the summary of a run.

    Raises:
        UsageError: The folder isn't that of a run that has ended, or the run can't be planned.
    """
    summary = RunFolder(folder).summary
    try:
        fields: dict[str, Any] = json.loads(summary.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{folder} has no summary of a run that has ended ({summary.name}): give the folder "
            "of such a run, or its script"
        ) from error
    if fields.get("mesh"):
        raise UsageError(f"{folder} has a cut model; give its script: its cuts are planned, too")
    try:
        run = _parse_summary(folder, fields)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise UsageError(
            f"{folder} doesn't say what its steps took ({type(error).__name__}: {error}): it was "
            "made by another version; give its script"
        ) from error
    if not (run.seconds > 0 and run.batch > 0 and run.state_bytes[1] > 0):
        raise UsageError(f"{folder} has made no steps that could be planned with")
    return run


def _parse_summary(folder: Path, fields: Mapping[str, Any]) -> FinishedRun:
    settings = fields["settings"]
    if settings.get("device", "cpu") != "cpu":
        raise UsageError(f"{folder} trained on {settings['device']}: runs on CPUs are planned")
    hosts = Counter(str(each["host"]) for each in fields["members"] if each["rank"] is not None)
    # Every worker of a whole model holds the same; the first one's prediction is as good as any.
    held = fields["memory"][0]
    state = [int(held["predicted"][kind] or 0) for kind in ("parameters", "gradients", "optimizer")]
    sync = str(fields["sync"])
    return FinishedRun(
        folder,
        str(settings["script"]),
        "" if sync == "AllReduce()" else sync,
        dict(hosts),
        int(settings["threads"]),
        round(fields["samples"] / fields["steps"]) if fields["steps"] else 0,
        {str(part): float(seconds) for part, seconds in fields["step_seconds"].items()},
        (state[0], state[1], state[2]),
        max(int(each["peak"]) for each in fields["memory"]),
    )


def describe_run_cluster(run: FinishedRun) -> PlannedCluster:
    """Describe the hosts of a run. Of several hosts, only workers are known, and no links."""
    cores = count_cores() if len(run.workers) == 1 else 0
    hosts = tuple(
        PlannedHost(name, workers, run.threads, float(max(cores, workers * run.threads)))
        for name, workers in run.workers.items()
    )
    return PlannedCluster(hosts, str(run.folder))


def make_run_profile(
    run: FinishedRun, copied_bytes_per_second: float | None = None
) -> ModelProfile:
    """Make a profile of what a run shows.

    Args:
        run: The run.
        copied_bytes_per_second: Rate of copies of a worker. Default: measured on this machine.
    """
    rate = copied_bytes_per_second or measure_copies(
        make_copy_pair(torch.device("cpu")), COPY_SECONDS
    )
    parameters, gradients, optimizer = run.state_bytes
    workers = sum(run.workers.values())
    # Parameters and states are read and written, and gradients are read.
    moved = 2 * (parameters + optimizer) + gradients
    compute = run.step_seconds["compute"]
    stepping = min(moved / rate, compute / 2)
    share = run.batch / workers

    def make_times(samples: float) -> StepTimes:
        computing = (compute - stepping) * samples / share
        return StepTimes(
            max(1, round(samples)),
            run.step_seconds["data"],
            FORWARD * computing,
            (1 - FORWARD) * computing,
            stepping,
            0.0,
        )

    steps = {times.samples: times for times in (make_times(share), make_times(2 * share))}
    processes = max(run.workers.values())
    condition = MeasuredCondition(
        processes, run.threads, 0.0, rate, 1.0, tuple(steps[count] for count in sorted(steps))
    )
    count = math.ceil(gradients / 4 / PIECE)
    pieces = tuple(
        GradientProfile(gradients // 4 // count, "float32", (index + 1) / count)
        for index in range(count)
    )
    buckets = gradients if workers > 1 else 0
    return ModelProfile(
        run.script,
        "",
        max(count_cores(), processes * run.threads),
        run.batch,
        pieces,
        run.state_bytes,
        max(0, run.peak_bytes - sum(run.state_bytes) - buckets),
        0,
        (condition,),
    )


def plan_run(
    folder: Path, cluster: str | None, changes: Sequence[str], wishes: Wishes
) -> tuple[Plan, str]:
    """Plan what a change would give, starting from a finished run.

    Args:
        folder: Folder of the run.
        cluster: The cluster that it ran on, as `--cluster` takes it. None: this host.
        changes: Changes of the cluster.
        wishes: What the user asks.

    Returns:
        The plan, and a line about the run and its own prediction.

    Raises:
        UsageError: The run can't be planned, or the speed of its links isn't known.
    """
    run = read_finished_run(folder)
    before = _find_run_cluster(run, cluster, changes)
    profile = make_run_profile(run)
    own = next(
        (
            each
            for each in list_candidates(before, lossy=True)
            if each.sync == run.sync
            and not each.cut
            and [host.workers for host in each.cluster.hosts] == list(run.workers.values())
        ),
        None,
    )
    # Links that are only assumed say nothing about how far off a prediction is.
    priced = own is not None and (cluster is not None or len(run.workers) == 1)
    predicted = price_candidate(profile, own).step.seconds if own and priced else None
    correction = find_correction(run, predicted)
    plan = make_plan(profile, apply_changes(before, changes), wishes, correction)
    return plan, _describe_run(run, predicted)


def _find_run_cluster(
    run: FinishedRun, cluster: str | None, changes: Sequence[str]
) -> PlannedCluster:
    """Find the cluster of a run: the one that is given, or its own hosts."""
    if cluster is not None:
        return choose_cluster(None, cluster)
    if len(run.workers) > 1 and not any(change.startswith("link=") for change in changes):
        raise UsageError(
            f"{run.folder} had {len(run.workers)} hosts, and doesn't say how fast their links are: "
            "add --cluster FILE, or --what-if link=1gbit"
        )
    return describe_run_cluster(run)


def _describe_run(run: FinishedRun, predicted: float | None) -> str:
    workers = sum(run.workers.values())
    text = (
        f"{run.folder}: {workers} worker{'s' if workers > 1 else ''}, {run.sync or 'AllReduce()'}, "
        f"{run.seconds * 1e3:.3g} ms a step, {run.batch / run.seconds:.4g} samples/s"
    )
    if predicted is not None:
        text += f"; predicted: {predicted * 1e3:.3g} ms"
    return (
        f"{text}. Computing is taken to be in proportion to samples, besides the optimizer: "
        "plan the script itself to have that measured"
    )


def find_correction(run: FinishedRun, predicted: float | None) -> float:
    """Find the factor by which a run took longer than its own way is predicted to take.

    Args:
        run: The run.
        predicted: Seconds of a step of its own way. None: it can't be priced.
    """
    if predicted is None or sum(run.workers.values()) == 1:
        return 1.0
    return min(max(run.seconds / predicted, 1 / MOST_CORRECTION), MOST_CORRECTION)
