"""Reports on a pipeline of a run: its stages, idle workers, a picture of a step, and advice."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.errors import UsageError
from paceline.formatting import format_bytes, format_count
from paceline.observe.facts import RunFacts
from paceline.observe.remarks import Remark
from paceline.observe.tables import align_columns, format_seconds
from paceline.parallel.pipelining.drawing import draw_timeline
from paceline.parallel.pipelining.schedules import SCHEDULES, check_schedule, make_schedule
from paceline.parallel.pipelining.simulate import PipelineTimeline, simulate_schedule
from paceline.parallel.pipelining.split import find_best_split
from paceline.record.pipeline_profile import PipelineProfile, StageProfile

MAX_WIDTH, MAX_HEIGHT = 110, 40  # most characters and lines of a picture
# Share of a step that a change has to save to be worth a line.
MIN_GAIN = 0.05
# Seconds of a step that a change has to save, as for other advice.
MIN_SECONDS = 1e-3
# Bubble from which more micro-batches are proposed.
LARGE_BUBBLE = 0.2
# Most micro-batches for each worker that are proposed.
MAX_MICRO_BATCHES_PER_WORKER = 8
# If the measured bubble exceeds the predicted one by this, the schedule doesn't explain the waits.
BUBBLE_TOLERANCE = 0.1


def find_slowest_pipeline(facts: RunFacts) -> PipelineProfile | None:
    """Return the pipeline with the longest steps; None if there is none."""
    return max(facts.pipelines, key=lambda profile: profile.step_seconds, default=None)


def describe_pipeline(facts: RunFacts) -> str:
    """Describe the slowest pipeline of a run; empty without one."""
    profile = find_slowest_pipeline(facts)
    if profile is None:
        return ""
    title = (
        "Pipeline"
        if len(facts.pipelines) == 1
        else f"The slowest of {len(facts.pipelines)} pipelines"
    )
    stages = format_count(len(profile.stages), "stage")
    lines = [
        f"{title}: {profile.schedule}, {stages}, {_format_micro_batches(profile.micro_batches)}; "
        f"a step took {format_seconds(profile.step_seconds)} "
        f"({_describe_median(profile.steps)}), with a bubble of {profile.bubble:.1%}; "
        "by the schedule and the times of its actions it would be "
        f"{format_seconds(profile.simulated_timeline.makespan)} and "
        f"{profile.simulated_timeline.bubble:.1%}:",
        *align_columns(_stage_rows(facts, profile), left=3),
    ]
    # A picture that doesn't fit a terminal is left out.
    picture = draw_timeline(
        _to_milliseconds(profile.simulated_timeline), MAX_WIDTH
    ).plain.splitlines()
    if len(picture) <= MAX_HEIGHT:
        lines += [
            "",
            "That schedule with these times, in milliseconds:",
            *(f"  {line}".rstrip() for line in picture),
        ]
    return "\n".join(lines)


def _stage_rows(facts: RunFacts, profile: PipelineProfile) -> Iterator[Sequence[str]]:
    """Yield the rows of the table of stages."""
    kinds = (
        ("forward", "input", "weight")
        if profile.schedule_plan.splits_backward
        else ("forward", "backward")
    )
    yield (
        "stage",
        "on",
        "layers",
        *kinds,
        "waits in a step",
        "its worker is idle",
        "keeps of a micro-batch",
    )
    for stage_index, stage in enumerate(profile.stages):
        idle = profile.idle[profile.ranks.index(stage.rank)]
        action_seconds = [format_seconds(stage.seconds[kind]) for kind in kinds]
        yield (
            str(stage_index),
            facts.name_rank(stage.rank),
            _name_layers(stage),
            *action_seconds,
            format_seconds(stage.waited),
            format_seconds(idle),
            format_bytes(stage.kept),
        )


def _to_milliseconds(timeline: PipelineTimeline) -> PipelineTimeline:
    """Convert a timeline from seconds to milliseconds, for the picture."""
    rows = tuple(
        tuple(replace(span, start=1e3 * span.start, end=1e3 * span.end) for span in row)
        for row in timeline.rows
    )
    return replace(timeline, rows=rows, transfers=())


def advise_on_pipelines(facts: RunFacts) -> Iterator[Remark]:
    """Advise on the slowest pipeline of a run.

    The advice is on its split, its schedule, its micro-batches, and waits that these don't explain.
    """
    profile = find_slowest_pipeline(facts)
    if profile is None:
        return
    yield from _advise_on_split(facts, profile)
    yield from _advise_on_schedule(profile)
    yield from _advise_on_micro_batches(profile)
    # The simulation takes the same time for all actions of a kind. A larger bubble means that they
    # differ.
    if (
        profile.bubble > profile.simulated_timeline.bubble + BUBBLE_TOLERANCE
        and profile.step_seconds * BUBBLE_TOLERANCE > MIN_SECONDS
    ):
        words = (
            f"Workers of the pipeline are idle for {profile.bubble:.0%} of a step, and by its "
            "schedule it would be "
            f"{profile.simulated_timeline.bubble:.0%}: actions of one kind take different times. "
            "The row `stage` of trace.json shows which: more "
            "workers than cores, other programs on the machines, or lengths that differ"
        )
        yield Remark(words, profile.bubble - profile.simulated_timeline.bubble, most=True)


def _advise_on_split(facts: RunFacts, profile: PipelineProfile) -> Iterator[Remark]:
    """Advise if one stage delays the others."""
    loads = [sum(stage.seconds.values()) for stage in profile.stages]
    slowest_stage = max(range(len(loads)), key=loads.__getitem__)
    mean = statistics.fmean(loads)
    if loads[slowest_stage] < (1 + MIN_GAIN) * mean:
        return
    stage = profile.stages[slowest_stage]
    finding = (
        f"Stage {slowest_stage} ({_name_layers(stage)}, on {facts.name_rank(stage.rank)}) holds "
        f"the pipeline up: a micro-batch takes {format_seconds(loads[slowest_stage])} "
        f"there, and {format_seconds(mean)} in the mean stage"
    )
    # Simulate the best split of the same layers, with the same schedule.
    problem = profile.make_split_problem(profile.schedule_plan)
    counts = find_best_split(problem)
    now, best_time = (
        problem.simulate_split(profile.layer_counts).makespan,
        problem.simulate_split(counts).makespan,
    )
    if _is_worthwhile(now, best_time):
        words = (
            f"{finding}. split={counts}, where it is {profile.layer_counts} now, takes "
            f"{_format_saving(now, best_time)} if that fits into memory"
        )
        yield Remark(words, 1 - best_time / now)
    elif loads[slowest_stage] > 1.2 * mean and _is_worthwhile(
        now, now * mean / loads[slowest_stage]
    ):
        words = (
            f"{finding}, and no other split of these {len(profile.layer_costs)} "
            "layers is faster: name smaller layers, or make that one cheaper"
        )
        yield Remark(words, 1 - mean / loads[slowest_stage], most=True)


def _advise_on_schedule(profile: PipelineProfile) -> Iterator[Remark]:
    """Advise if another schedule is faster, with the best split for it."""
    now = profile.simulated_timeline.makespan
    best: tuple[float, PipelineTimeline, list[int]] | None = None
    for name in SCHEDULES:
        if name == profile.schedule:
            continue
        try:
            check_schedule(name, len(profile.ranks), profile.micro_batches, None)
            schedule = make_schedule(name, len(profile.ranks), profile.micro_batches)
            problem = profile.make_split_problem(schedule)
        except UsageError:  # too few layers or micro-batches for this schedule
            continue
        # The split can stay if the stages lie on the same workers.
        is_placed_alike = schedule.placed == profile.schedule_plan.placed
        counts = profile.layer_counts if is_placed_alike else find_best_split(problem)
        timeline = simulate_schedule(schedule, problem.stage_times(counts))
        if best is None or timeline.makespan < best[0]:
            best = timeline.makespan, timeline, counts
    if best is None or not _is_worthwhile(now, best[0]):
        return
    _, timeline, counts = best
    most_kept = max(timeline.kept_micro_batches), max(profile.simulated_timeline.kept_micro_batches)
    memory = ""
    if most_kept[0] > most_kept[1]:
        memory = (
            f"; a worker keeps {most_kept[0]:.3g} micro-batches at once at most then, "
            f"{most_kept[1]:.3g} now"
        )
    split = (
        "" if timeline.schedule.placed == profile.schedule_plan.placed else f" with split={counts}"
    )
    name = timeline.schedule.name
    words = (
        f"schedule={name!r}{split} in the place of {profile.schedule!r} takes "
        f"{_format_saving(now, best[0])} by simulation{memory}"
    )
    yield Remark(words, 1 - best[0] / now)


def _advise_on_micro_batches(profile: PipelineProfile) -> Iterator[Remark]:
    """Advise if more micro-batches make the bubble smaller."""
    count = profile.micro_batches
    simulated = profile.simulated_timeline
    if simulated.bubble < LARGE_BUBBLE or 2 * count > MAX_MICRO_BATCHES_PER_WORKER * len(
        profile.ranks
    ):
        return
    # Twice the micro-batches of half the size, so actions and messages take half the time.
    halved = replace(
        profile,
        stages=tuple(_halve_stage(stage) for stage in profile.stages),
        micro_batches=2 * count,
    )
    doubled = replace(
        halved, sends=_halve_transfers(profile.sends), returns=_halve_transfers(profile.returns)
    ).simulated_timeline
    if _is_worthwhile(simulated.makespan, doubled.makespan):
        words = (
            f"The bubble is {simulated.bubble:.0%} with {_format_micro_batches(count)}. "
            f"micro_batches={2 * count} takes "
            f"{_format_saving(simulated.makespan, doubled.makespan)}, "
            "if half a micro-batch takes half the time"
        )
        yield Remark(words, 1 - doubled.makespan / simulated.makespan)


def _halve_stage(stage: StageProfile) -> StageProfile:
    """Return a stage whose actions take half the time."""
    return replace(
        stage, seconds={kind: action_seconds / 2 for kind, action_seconds in stage.seconds.items()}
    )


def _halve_transfers(transfers: Sequence[float | None]) -> tuple[float | None, ...]:
    """Return transfers that take half the time."""
    return tuple(None if each is None else each / 2 for each in transfers)


def _is_worthwhile(now: float, then: float) -> bool:
    """Whether a step that takes `then` instead of `now` seconds is worth a line."""
    return now - then > max(MIN_GAIN * now, MIN_SECONDS)


def _format_saving(now: float, then: float) -> str:
    """Format how much less time a step takes."""
    return (
        f"{format_seconds(then)} for a step in the place of {format_seconds(now)} "
        f"({1 - then / now:.0%} less)"
    )


def _name_layers(stage: StageProfile) -> str:
    """Name the layers of a stage by the first and the last one."""
    first, last = stage.layers[0], stage.layers[-1]
    return first if first == last else f"{first} to {last}"


def _format_micro_batches(count: int) -> str:
    """Format a number of micro-batches."""
    return f"{count} micro-batch{'' if count == 1 else 'es'}"


def _describe_median(steps: int) -> str:
    """Describe the number of steps that were measured."""
    return "one step" if steps == 1 else f"the median of {steps}"
