"""What more workers bring: speed-up, efficiency, what was lost to which part of a step, and where
adding a worker stops paying.

Everything is told in worker-seconds for a sample: the workers times the seconds of a step, by its
samples. The fewest workers set the measure.
Parts of a step add up to the whole, so what is lost adds up, too: 1 - efficiency is the sum of the
losses by part.

    1 worker    ######################################## 100%
    4 workers   ####################eeeeeeeeeewwwwddrrrr  50%     exchange, wait, data, and the rest
                                                                  of compute
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.formatting import counted
from paceline.observe.facts import WARM, read, timed_steps
from paceline.observe.tables import aligned, seconds
from paceline.record.folder import RunFolder
from paceline.trace import PARTS

PAYS = 0.5  # what a worker has to bring of the speed that it would bring if nothing was lost
FEW = 20  # steps; fewer tell little
ALIKE = 0.01  # difference of global batches that counts as none
_WIDTH = 50  # characters of a bar
_LETTERS = {"exchange": "e", "wait": "w", "data": "d", "compute": "r"}
_NAMED = {"exchange": "exchange", "wait": "waiting", "data": "data", "compute": "the rest"}
_HELP = {
    "exchange": (
        "gradients travel longer than backward hides; a larger batch for each worker, a codec or "
        "LocalSGD would help"
    ),
    "wait": (
        'workers wait for those that are late; where these are always the same, shares="auto" '
        "would give them less to do"
    ),
    "data": (
        "batches don't come fast enough; more num_workers of the DataLoader, or a faster disk, "
        "would help"
    ),
}


@dataclass(frozen=True)
class ScalingPoint:
    """The steps of one run: `batch` are the samples of a mean step of all workers, `parts` its
    seconds by part.
    """

    workers: int
    batch: float
    parts: dict[str, float]
    steps: int  # that were measured

    @property
    def step(self) -> float:
        """Seconds of a mean step."""
        return sum(self.parts.values())

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.batch / self.step

    def work(self, part: str) -> float:
        """Return the worker-seconds that `part` takes for a sample."""
        return self.workers * self.parts[part] / self.batch

    @property
    def cost(self) -> float:
        """Worker-seconds of a sample."""
        return sum(self.work(part) for part in PARTS)


@dataclass(frozen=True)
class ScalingCurve:
    """Runs with several numbers of workers, the fewest first: of one global batch (strong
    scaling), or one that grows with them (weak).
    """

    points: tuple[ScalingPoint, ...]
    strong: bool

    @property
    def base(self) -> ScalingPoint:
        """The run with the fewest workers."""
        return self.points[0]

    def speedup(self, point: ScalingPoint) -> float:
        """Return how many times as fast as the fewest workers this run was."""
        return point.rate / self.base.rate

    def efficiency(self, point: ScalingPoint) -> float:
        """Return the share of its speed that this run would have had if more workers lost
        nothing.
        """
        return self.base.cost / point.cost


def measured(folder: RunFolder) -> ScalingPoint:
    """Read a run that has ended, without its first steps.

    `UsageError` where it has taken too few.
    """
    facts, steps = read(folder), timed_steps(folder)
    if not facts.ended:
        raise UsageError(
            f"the run {folder.name} {facts.standing.words}: only one that has ended can be measured"
        )
    steps = steps[min(WARM, len(steps) // 5) :]
    samples = sum(batch for batch, _ in steps)
    if len(steps) < 2 or not samples:
        raise UsageError(
            f"the run {folder.name} took {counted(facts.steps, 'step')}: "
            "at least 2 with samples are needed to measure"
        )
    parts = {part: statistics.fmean(spent[part] for _, spent in steps) for part in PARTS}
    return ScalingPoint(facts.workers, samples / len(steps), parts, len(steps))


def typical(points: Sequence[ScalingPoint]) -> ScalingPoint:
    """Return the run of median speed, of several rounds; the slower one of the two in the
    middle.
    """
    return sorted(points, key=lambda point: point.rate)[(len(points) - 1) // 2]


def curve(points: Sequence[ScalingPoint]) -> ScalingCurve:
    """Tell strong from weak scaling by the global batches of these runs; `UsageError` where it
    is neither, or one number of workers.
    """
    ordered = tuple(sorted(points, key=lambda point: point.workers))
    if len({point.workers for point in ordered}) < max(2, len(ordered)):
        raise UsageError("scaling takes runs of two or more numbers of workers, one of each")
    for strong in (True, False):
        sizes = [point.batch / (1 if strong else point.workers) for point in ordered]
        if max(sizes) - min(sizes) <= ALIKE * max(sizes):
            return ScalingCurve(ordered, strong)
    found = ", ".join(f"{point.batch:g} samples with {point.workers}" for point in ordered)
    raise UsageError(
        f"global batches are neither the same nor in proportion to the workers: {found}; "
        "give all runs the same batch"
    )


def losses(point: ScalingPoint, base: ScalingPoint) -> dict[str, float]:
    """Return the share of its workers' time that `point` loses to each part, compared with
    `base`; less than 0 is a gain.
    """
    return {part: (point.work(part) - base.work(part)) / point.cost for part in PARTS}


def serial(points: Sequence[ScalingPoint]) -> float:
    """Fit `serial + divisible / workers` to the seconds of compute (Amdahl's law), and return
    `serial`, at least 0.
    """
    x, y = [1 / point.workers for point in points], [point.parts["compute"] for point in points]
    slope = max(statistics.linear_regression(x, y).slope, 0.0)
    return max(statistics.fmean(y) - slope * statistics.fmean(x), 0.0)


def gain(fewer: ScalingPoint, more: ScalingPoint) -> float:
    """Return what the workers that were added bring, as a share of what they would bring if
    nothing was lost.
    """
    return (more.rate / fewer.rate - 1) / (more.workers / fewer.workers - 1)


# In words
# --------------------------------------------------------------------------------------------------


def describe(found: ScalingCurve, cores: int | None = None) -> str:
    """Write the table, the picture and the conclusion.

    `cores`: processors that all the workers share, where they share any.
    """
    kind = (
        "Strong scaling: the same global batch"
        if found.strong
        else "Weak scaling: the global batch grows with the workers"
    )
    few = [point for point in found.points if point.steps < FEW]
    warned = (
        [
            (
                f"Only {few[0].steps} steps were measured with "
                f"{counted(few[0].workers, 'worker')}: take more, to be sure."
            )
        ]
        if few
        else []
    )
    blocks = [
        f"{kind}.",
        "\n".join(_table(found)),
        "\n".join(_bars(found)),
        "\n".join(_amdahl(found)),
        conclusion(found, cores),
        *warned,
    ]
    return "\n\n".join(block for block in blocks if block)


def _table(found: ScalingCurve) -> list[str]:
    head = (
        "workers",
        "batch",
        "step",
        "samples/s",
        "speed-up",
        "efficiency",
        *(f"lost to {_NAMED[part]}" for part in _LETTERS),
    )
    rows = [
        (
            str(point.workers),
            f"{point.batch:,.1f}".removesuffix(".0"),
            seconds(point.step),
            f"{point.rate:,.0f}" if point.rate >= 10 else f"{point.rate:.2f}",
            f"{found.speedup(point):.2f}",
            f"{found.efficiency(point):.0%}",
            *(f"{losses(point, found.base)[part]:.0%}".replace("-0%", "0%") for part in _LETTERS),
        )
        for point in found.points
    ]
    return list(aligned([head, *rows], left=0))


def _bars(found: ScalingCurve) -> list[str]:
    """Draw where the time of the workers goes, a bar for each number of them."""
    lines = []
    for point in found.points:
        lost = losses(point, found.base)
        ends, at = [], min(found.efficiency(point), 1.0)
        bar = "#" * round(_WIDTH * at)
        for part, letter in _LETTERS.items():
            at += max(lost[part], 0.0)
            ends.append((letter, min(round(_WIDTH * at), _WIDTH)))
        for letter, end in ends:
            bar += letter * (end - len(bar))
        lines.append((str(point.workers), bar.ljust(_WIDTH), f"{found.efficiency(point):.0%}"))
    key = "  # work as with the fewest workers, e exchange, w waiting, d data, r rest of compute"
    return [*aligned(lines, left=0), key]


def _amdahl(found: ScalingCurve) -> list[str]:
    if not found.strong:
        return []
    whole, rest = found.base, serial(found.points)
    share = rest / whole.parts["compute"] if whole.parts["compute"] > 0 else 0.0
    if share > 1 - ALIKE:
        return ["Compute doesn't shrink with more workers (Amdahl's fit)."]
    if share < ALIKE:
        return ["Compute shrinks in proportion to the workers (Amdahl's fit finds no serial rest)."]
    compute = (
        f"{seconds(whole.parts['compute'])} of compute with {counted(whole.workers, 'worker')}"
    )
    return [
        f"Of the {compute}, {seconds(rest)} ({share:.0%}) don't shrink (Amdahl's fit): "
        "more workers alone bring "
        f"{whole.step / rest:.1f} times the speed at most."
    ]


def conclusion(found: ScalingCurve, cores: int | None = None) -> str:
    """Write where adding a worker stops paying, and why."""
    for fewer, more in zip(found.points, found.points[1:], strict=False):
        brought = gain(fewer, more)
        if brought < PAYS:
            each = (
                "the worker added"
                if more.workers - fewer.workers == 1
                else f"each of {more.workers - fewer.workers} workers added"
            )
            what = (
                f"brings {brought:.0%} of its worth"
                if brought >= 0
                else f"is a loss: {more.rate / fewer.rate:.2f} times the speed"
            )
            why = _reason(fewer, more, strong=found.strong, cores=cores)
            return (
                f"Adding workers stops paying at {fewer.workers}: from there to {more.workers}, "
                f"{each} {what}. {why}"
            )
    last = found.points[-1]
    text = (
        f"Adding workers pays up to {last.workers}, the most that were measured: "
        f"{found.speedup(last):.2f} times the speed"
    )
    lost = 1 - found.efficiency(last)
    return (
        f"{text}. {_reason(found.base, last, strong=found.strong, cores=cores)}"
        if lost >= 0.05
        else f"{text}, with next to nothing lost."
    )


def _reason(fewer: ScalingPoint, more: ScalingPoint, *, strong: bool, cores: int | None) -> str:
    """Say which part of a step has lost most from `fewer` workers to `more`, and what would
    help.
    """
    lost = losses(more, fewer)
    crowded = (
        ""
        if cores is None or more.workers <= cores
        else f"{more.workers} workers share {counted(cores, 'processor')} here"
    )
    part = max(lost, key=lambda part: lost[part])
    told = (
        f"Most was lost to {_NAMED[part] if part != 'compute' else 'compute'} ({lost[part]:.0%} of "
        f"the time of {more.workers} workers): "
    )
    if part != "compute":
        crowd = f" ({crowded}, which makes that worse)" if crowded else ""
        return f"{told}{_HELP[part]}{crowd}."
    if crowded:
        return f"{told}{crowded}; measure on more of them, or on several hosts."
    if strong:
        each = f"{more.batch / more.workers:.3g} samples for each worker"
        return (
            f"{told}with {each}, what a step costs whatever its size remains; "
            "a larger batch would help."
        )
    return (
        f"{told}the same work takes longer beside more workers, which share memory, caches or a "
        "quota of processors."
    )
