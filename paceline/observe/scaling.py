"""Scaling of a run: speed-up, efficiency, losses by part, and when adding workers stops paying.

Everything is in worker-seconds per sample: the workers times the seconds of a step, divided by its
samples. The run with the fewest workers is the base. The parts of a step add up to the step, so
losses add up, too: 1 - efficiency is the sum of the losses by part.

    1 worker    ######################################## 100%
    4 workers   ####################eeeeeeeeeewwwwddrrrr  50%     exchange, wait, data, and the
                                                                  rest of compute
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.formatting import format_count
from paceline.observe.facts import WARM_UP_STEPS, read_facts, read_timed_steps
from paceline.observe.tables import align_columns, format_seconds
from paceline.record.folder import RunFolder
from paceline.trace import STEP_PARTS

# Share of its ideal speed that an added worker has to bring, or adding it does not pay.
MIN_GAIN = 0.5
FEW_STEPS = 20  # with fewer steps there is a warning
# Relative difference of global batches that counts as none.
BATCH_TOLERANCE = 0.01
_BAR_WIDTH = 50  # characters of a bar
_PART_LETTERS = {"exchange": "e", "wait": "w", "data": "d", "compute": "r"}
_PART_NAMES = {"exchange": "exchange", "wait": "waiting", "data": "data", "compute": "the rest"}
_PART_ADVICE = {
    "exchange": (
        "gradients travel longer than backward hides; a larger batch for each worker, a codec or "
        "LocalSGD would help"
    ),
    "wait": (
        'workers wait for those that are late; where these are always the same, shares="auto" '
        "would give them less to do"
    ),
    "data": (
        "batches don't come fast enough; more num_workers of the DataLoader, "
        "or a faster disk, would help"
    ),
}


@dataclass(frozen=True)
class ScalingPoint:
    """The steps of one run.

    Attributes:
        workers: Number of workers.
        batch: Samples of a mean step of all workers.
        parts: Seconds of a mean step by part.
        steps: Number of steps that were measured.
    """

    workers: int
    batch: float
    parts: dict[str, float]
    steps: int

    @property
    def step_seconds(self) -> float:
        """Seconds of a mean step."""
        return sum(self.parts.values())

    @property
    def samples_per_second(self) -> float:
        """Samples per second."""
        return self.batch / self.step_seconds

    def work_per_sample(self, part: str) -> float:
        """Return the worker-seconds of a sample that `part` takes."""
        return self.workers * self.parts[part] / self.batch

    @property
    def cost_per_sample(self) -> float:
        """Worker-seconds of a sample."""
        return sum(self.work_per_sample(part) for part in STEP_PARTS)


@dataclass(frozen=True)
class ScalingCurve:
    """Runs with different numbers of workers, the fewest first.

    With strong scaling all have the same global batch; with weak scaling it grows with the workers.
    """

    points: tuple[ScalingPoint, ...]
    strong: bool

    @property
    def base(self) -> ScalingPoint:
        """The run with the fewest workers."""
        return self.points[0]

    def speed_up_of(self, point: ScalingPoint) -> float:
        """Return the speed of a run, relative to the run with the fewest workers."""
        return point.samples_per_second / self.base.samples_per_second

    def efficiency_of(self, point: ScalingPoint) -> float:
        """Return the share of its workers' time that a run has put to use.

        The run with the fewest workers counts as having lost nothing.
        """
        return self.base.cost_per_sample / point.cost_per_sample


def measure_run(folder: RunFolder) -> ScalingPoint:
    """Measure a run that has ended, without its first steps.

    Raises:
        UsageError: The run has not ended, or has too few steps.
    """
    facts, steps = read_facts(folder), read_timed_steps(folder)
    if not facts.ended:
        raise UsageError(
            f"the run {folder.name} {facts.standing.words}: only one that has ended can be measured"
        )
    # Short runs keep at least four fifths of their steps.
    steps = steps[min(WARM_UP_STEPS, len(steps) // 5) :]
    samples = sum(batch for batch, _ in steps)
    if len(steps) < 2 or not samples:
        raise UsageError(
            f"the run {folder.name} took {format_count(facts.steps, 'step')}: "
            "at least 2 with samples are needed to measure"
        )
    parts = {
        part: statistics.fmean(part_seconds[part] for _, part_seconds in steps)
        for part in STEP_PARTS
    }
    return ScalingPoint(facts.workers, samples / len(steps), parts, len(steps))


def choose_median_run(points: Sequence[ScalingPoint]) -> ScalingPoint:
    """Return the run of median speed; the slower of the two in the middle if there are two."""
    return sorted(points, key=lambda point: point.samples_per_second)[(len(points) - 1) // 2]


def make_scaling_curve(points: Sequence[ScalingPoint]) -> ScalingCurve:
    """Combine runs, and tell strong from weak scaling by their global batches.

    Raises:
        UsageError: It is neither, or the numbers of workers are not all different.
    """
    ordered = tuple(sorted(points, key=lambda point: point.workers))
    if len({point.workers for point in ordered}) < max(2, len(ordered)):
        raise UsageError("scaling takes runs of two or more numbers of workers, one of each")
    for strong in (True, False):
        # What stays the same: the global batch, or the batch of a worker.
        sizes = [point.batch / (1 if strong else point.workers) for point in ordered]
        if max(sizes) - min(sizes) <= BATCH_TOLERANCE * max(sizes):
            return ScalingCurve(ordered, strong)
    batches = ", ".join(f"{point.batch:g} samples with {point.workers}" for point in ordered)
    raise UsageError(
        f"global batches are neither the same nor in proportion to the workers: {batches}; "
        "give all runs the same batch"
    )


def compute_losses(point: ScalingPoint, base: ScalingPoint) -> dict[str, float]:
    """Return the share of its workers' time that `point` loses to each part, compared with `base`.

    A negative loss is a gain.
    """
    return {
        part: (point.work_per_sample(part) - base.work_per_sample(part)) / point.cost_per_sample
        for part in STEP_PARTS
    }


def fit_serial_seconds(points: Sequence[ScalingPoint]) -> float:
    """Fit `serial + divisible / workers` to the seconds of compute; return `serial`, at least 0.

    Source: Amdahl, Validity of the single processor approach to achieving large scale computing
    capabilities, 1967.
    """
    inverse_workers, compute_seconds = (
        [1 / point.workers for point in points],
        [point.parts["compute"] for point in points],
    )
    slope = max(statistics.linear_regression(inverse_workers, compute_seconds).slope, 0.0)
    return max(statistics.fmean(compute_seconds) - slope * statistics.fmean(inverse_workers), 0.0)


def compute_gain(fewer: ScalingPoint, more: ScalingPoint) -> float:
    """Return the speed that added workers bring, as a share of the ideal."""
    return (more.samples_per_second / fewer.samples_per_second - 1) / (
        more.workers / fewer.workers - 1
    )


# In words ----------------------------------------------------------------------------------------


def describe_scaling(scaling: ScalingCurve, cores: int | None = None) -> str:
    """Format the table, the bars and the conclusion.

    Args:
        scaling: Measured runs.
        cores: Processors that all workers share, if they share any.
    """
    kind = (
        "Strong scaling: the same global batch"
        if scaling.strong
        else "Weak scaling: the global batch grows with the workers"
    )
    short_runs = [point for point in scaling.points if point.steps < FEW_STEPS]
    warned = []
    if short_runs:
        workers = format_count(short_runs[0].workers, "worker")
        warned = [
            f"Only {short_runs[0].steps} steps were measured with {workers}: take more, to be sure."
        ]
    blocks = [
        f"{kind}.",
        "\n".join(_format_table(scaling)),
        "\n".join(_draw_bars(scaling)),
        "\n".join(_describe_amdahl(scaling)),
        describe_conclusion(scaling, cores),
        *warned,
    ]
    return "\n\n".join(block for block in blocks if block)


def _format_table(scaling: ScalingCurve) -> list[str]:
    """Return the lines of the table of runs."""
    head = (
        "workers",
        "batch",
        "step",
        "samples/s",
        "speed-up",
        "efficiency",
        *(f"lost to {_PART_NAMES[part]}" for part in _PART_LETTERS),
    )
    rows = [
        (
            str(point.workers),
            f"{point.batch:,.1f}".removesuffix(".0"),
            format_seconds(point.step_seconds),
            f"{point.samples_per_second:,.0f}"
            if point.samples_per_second >= 10
            else f"{point.samples_per_second:.2f}",
            f"{scaling.speed_up_of(point):.2f}",
            f"{scaling.efficiency_of(point):.0%}",
            *(
                f"{compute_losses(point, scaling.base)[part]:.0%}".replace("-0%", "0%")
                for part in _PART_LETTERS
            ),
        )
        for point in scaling.points
    ]
    return list(align_columns([head, *rows], left=0))


def _draw_bars(scaling: ScalingCurve) -> list[str]:
    """Draw how the time of the workers is spent, one bar for each run."""
    lines = []
    for point in scaling.points:
        lost = compute_losses(point, scaling.base)
        segments, filled = [], min(scaling.efficiency_of(point), 1.0)
        bar = "#" * round(_BAR_WIDTH * filled)
        # The ends of segments are rounded, and not their lengths, so rounding errors don't add up.
        for part, letter in _PART_LETTERS.items():
            filled += max(lost[part], 0.0)
            segments.append((letter, min(round(_BAR_WIDTH * filled), _BAR_WIDTH)))
        for letter, end in segments:
            bar += letter * (end - len(bar))
        lines.append(
            (str(point.workers), bar.ljust(_BAR_WIDTH), f"{scaling.efficiency_of(point):.0%}")
        )
    key = "  # work as with the fewest workers, e exchange, w waiting, d data, r rest of compute"
    return [*align_columns(lines, left=0), key]


def _describe_amdahl(scaling: ScalingCurve) -> list[str]:
    """Describe the part of compute that doesn't shrink with more workers."""
    if not scaling.strong:
        return []
    base, serial_seconds = scaling.base, fit_serial_seconds(scaling.points)
    share = serial_seconds / base.parts["compute"] if base.parts["compute"] > 0 else 0.0
    if share > 1 - BATCH_TOLERANCE:
        return ["Compute doesn't shrink with more workers (Amdahl's fit)."]
    if share < BATCH_TOLERANCE:
        return ["Compute shrinks in proportion to the workers (Amdahl's fit finds no serial rest)."]
    compute = (
        f"{format_seconds(base.parts['compute'])} of compute with "
        f"{format_count(base.workers, 'worker')}"
    )
    return [
        f"Of the {compute}, {format_seconds(serial_seconds)} ({share:.0%}) "
        "don't shrink (Amdahl's fit): more workers alone bring "
        f"{base.step_seconds / serial_seconds:.1f} times the speed at most."
    ]


def describe_conclusion(scaling: ScalingCurve, cores: int | None = None) -> str:
    """Describe from when on adding workers stops paying, and why."""
    for fewer, more in zip(scaling.points, scaling.points[1:], strict=False):
        gained = compute_gain(fewer, more)
        if gained < MIN_GAIN:
            added = (
                "the worker added"
                if more.workers - fewer.workers == 1
                else f"each of {more.workers - fewer.workers} workers added"
            )
            what = (
                f"brings {gained:.0%} of its worth"
                if gained >= 0
                else (
                    f"is a loss: {more.samples_per_second / fewer.samples_per_second:.2f} times "
                    "the speed"
                )
            )
            why = _explain_loss(fewer, more, strong=scaling.strong, cores=cores)
            return (
                f"Adding workers stops paying at {fewer.workers}: from there to {more.workers}, "
                f"{added} {what}. {why}"
            )
    last = scaling.points[-1]
    text = (
        f"Adding workers pays up to {last.workers}, the most that were measured: "
        f"{scaling.speed_up_of(last):.2f} times the speed"
    )
    lost = 1 - scaling.efficiency_of(last)
    if lost < 0.05:
        return f"{text}, with next to nothing lost."
    return f"{text}. {_explain_loss(scaling.base, last, strong=scaling.strong, cores=cores)}"


def _explain_loss(
    fewer: ScalingPoint, more: ScalingPoint, *, strong: bool, cores: int | None
) -> str:
    """Explain which part of a step lost most from `fewer` to `more` workers, and how to help."""
    lost = compute_losses(more, fewer)
    # More workers than processors is a reason by itself.
    crowded = (
        ""
        if cores is None or more.workers <= cores
        else f"{more.workers} workers share {format_count(cores, 'processor')} here"
    )
    part = max(lost, key=lambda part: lost[part])
    name = _PART_NAMES[part] if part != "compute" else "compute"
    finding = f"Most was lost to {name} ({lost[part]:.0%} of the time of {more.workers} workers): "
    if part != "compute":
        note = f" ({crowded}, which makes that worse)" if crowded else ""
        return f"{finding}{_PART_ADVICE[part]}{note}."
    if crowded:
        return f"{finding}{crowded}; measure on more of them, or on several hosts."
    if strong:
        share = f"{more.batch / more.workers:.3g} samples for each worker"
        return (
            f"{finding}with {share}, what a step costs whatever its size remains; "
            "a larger batch would help."
        )
    return (
        f"{finding}the same work takes longer beside more workers, which share memory, caches or a "
        "quota of processors."
    )
