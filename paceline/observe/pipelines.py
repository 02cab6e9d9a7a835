"""Reports on a pipeline of a run: its stages, idle workers, a picture of a step, and advice."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline.errors import UsageError
from paceline.formatting import counted, sized
from paceline.observe.facts import RunFacts
from paceline.observe.remarks import Remark
from paceline.observe.tables import aligned, seconds
from paceline.parallel.pipelining.drawing import draw
from paceline.parallel.pipelining.schedules import SCHEDULES, check, make_schedule
from paceline.parallel.pipelining.simulate import PipelineTimeline, simulate
from paceline.parallel.pipelining.split import best_split
from paceline.record.pipeline_profile import PipelineProfile, StageProfile

WIDE, HIGH = 110, 40  # most characters and lines of a picture
# Share of a step that a change has to save to be worth a line.
GAIN = 0.05
# Seconds of a step that a change has to save, as for other advice.
LEAST = 1e-3
# Bubble from which more micro-batches are proposed.
LARGE = 0.2
# Most micro-batches for each worker that are proposed.
MOST = 8
# If the measured bubble exceeds the predicted one by this, the schedule doesn't explain the waits.
APART = 0.1


def slowest(facts: RunFacts) -> PipelineProfile | None:
    """Return the pipeline with the longest steps; None if there is none."""
    return max(facts.pipelines, key=lambda profile: profile.step_seconds, default=None)


def tell(facts: RunFacts) -> str:
    """Describe the slowest pipeline of a run; empty without one."""
    profile = slowest(facts)
    if profile is None:
        return ""
    title = (
        "Pipeline"
        if len(facts.pipelines) == 1
        else f"The slowest of {len(facts.pipelines)} pipelines"
    )
    stages = counted(len(profile.stages), "stage")
    lines = [
        f"{title}: {profile.schedule}, {stages}, {_micro_batches(profile.micro_batches)}; a step "
        f"took {seconds(profile.step_seconds)} "
        f"({_median(profile.steps)}), with a bubble of {profile.bubble:.1%}; "
        "by the schedule and the times of its actions it would be "
        f"{seconds(profile.timeline.makespan)} and {profile.timeline.bubble:.1%}:",
        *aligned(_rows(facts, profile), left=3),
    ]
    # A picture that doesn't fit a terminal is left out.
    picture = draw(_in_milliseconds(profile.timeline), WIDE).plain.splitlines()
    if len(picture) <= HIGH:
        lines += [
            "",
            "That schedule with these times, in milliseconds:",
            *(f"  {line}".rstrip() for line in picture),
        ]
    return "\n".join(lines)


def _rows(facts: RunFacts, profile: PipelineProfile) -> Iterator[Sequence[str]]:
    """Yield the rows of the table of stages."""
    kinds = ("forward", "input", "weight") if profile.plan.split else ("forward", "backward")
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
        action_seconds = [seconds(stage.seconds[kind]) for kind in kinds]
        yield (
            str(stage_index),
            facts.rank(stage.rank),
            _layers(stage),
            *action_seconds,
            seconds(stage.waited),
            seconds(idle),
            sized(stage.kept),
        )


def _in_milliseconds(timeline: PipelineTimeline) -> PipelineTimeline:
    """Convert a timeline from seconds to milliseconds, for the picture."""
    rows = tuple(
        tuple(replace(span, start=1e3 * span.start, end=1e3 * span.end) for span in row)
        for row in timeline.rows
    )
    return replace(timeline, rows=rows, transfers=())


def advise(facts: RunFacts) -> Iterator[Remark]:
    """Advise on the slowest pipeline of a run.

    The advice is on its split, its schedule, its micro-batches, and waits that these don't explain.
    """
    profile = slowest(facts)
    if profile is None:
        return
    yield from _split(facts, profile)
    yield from _schedule(profile)
    yield from _more(profile)
    # The simulation takes the same time for all actions of a kind. A larger bubble means that they
    # differ.
    if profile.bubble > profile.timeline.bubble + APART and profile.step_seconds * APART > LEAST:
        words = (
            f"Workers of the pipeline are idle for {profile.bubble:.0%} of a step, and by its "
            "schedule it would be "
            f"{profile.timeline.bubble:.0%}: actions of one kind take different times. "
            "The row `stage` of trace.json shows which: more "
            "workers than cores, other programs on the machines, or lengths that differ"
        )
        yield Remark(words, profile.bubble - profile.timeline.bubble, most=True)


def _split(facts: RunFacts, profile: PipelineProfile) -> Iterator[Remark]:
    """Advise if one stage delays the others."""
    loads = [sum(stage.seconds.values()) for stage in profile.stages]
    slowest_stage = max(range(len(loads)), key=loads.__getitem__)
    mean = statistics.fmean(loads)
    if loads[slowest_stage] < (1 + GAIN) * mean:
        return
    stage = profile.stages[slowest_stage]
    finding = (
        f"Stage {slowest_stage} ({_layers(stage)}, on {facts.rank(stage.rank)}) holds the pipeline "
        f"up: a micro-batch takes {seconds(loads[slowest_stage])} "
        f"there, and {seconds(mean)} in the mean stage"
    )
    # Simulate the best split of the same layers, with the same schedule.
    problem = profile.problem(profile.plan)
    counts = best_split(problem)
    now, best_time = problem.timeline(profile.split).makespan, problem.timeline(counts).makespan
    if _pays(now, best_time):
        words = (
            f"{finding}. split={counts}, where it is {profile.split} now, takes "
            f"{_less(now, best_time)} if that fits into memory"
        )
        yield Remark(words, 1 - best_time / now)
    elif loads[slowest_stage] > 1.2 * mean and _pays(now, now * mean / loads[slowest_stage]):
        words = (
            f"{finding}, and no other split of these {len(profile.costs)} layers is faster: name "
            "smaller layers, or make that one cheaper"
        )
        yield Remark(words, 1 - mean / loads[slowest_stage], most=True)


def _schedule(profile: PipelineProfile) -> Iterator[Remark]:
    """Advise if another schedule is faster, with the best split for it."""
    now = profile.timeline.makespan
    best: tuple[float, PipelineTimeline, list[int]] | None = None
    for name in SCHEDULES:
        if name == profile.schedule:
            continue
        try:
            check(name, len(profile.ranks), profile.micro_batches, None)
            schedule = make_schedule(name, len(profile.ranks), profile.micro_batches)
            problem = profile.problem(schedule)
        except UsageError:  # too few layers or micro-batches for this schedule
            continue
        # The split can stay if the stages lie on the same workers.
        is_placed_alike = schedule.placed == profile.plan.placed
        counts = profile.split if is_placed_alike else best_split(problem)
        timeline = simulate(schedule, problem.times(counts))
        if best is None or timeline.makespan < best[0]:
            best = timeline.makespan, timeline, counts
    if best is None or not _pays(now, best[0]):
        return
    _, timeline, counts = best
    most_kept = max(timeline.kept), max(profile.timeline.kept)
    memory = ""
    if most_kept[0] > most_kept[1]:
        memory = (
            f"; a worker keeps {most_kept[0]:.3g} micro-batches at once at most then, "
            f"{most_kept[1]:.3g} now"
        )
    split = "" if timeline.schedule.placed == profile.plan.placed else f" with split={counts}"
    name = timeline.schedule.name
    words = (
        f"schedule={name!r}{split} in the place of {profile.schedule!r} takes "
        f"{_less(now, best[0])} by simulation{memory}"
    )
    yield Remark(words, 1 - best[0] / now)


def _more(profile: PipelineProfile) -> Iterator[Remark]:
    """Advise if more micro-batches make the bubble smaller."""
    count = profile.micro_batches
    simulated = profile.timeline
    if simulated.bubble < LARGE or 2 * count > MOST * len(profile.ranks):
        return
    # Twice the micro-batches of half the size, so actions and messages take half the time.
    halved = replace(
        profile, stages=tuple(_halved(stage) for stage in profile.stages), micro_batches=2 * count
    )
    doubled = replace(halved, sends=_half(profile.sends), returns=_half(profile.returns)).timeline
    if _pays(simulated.makespan, doubled.makespan):
        words = (
            f"The bubble is {simulated.bubble:.0%} with {_micro_batches(count)}. "
            f"micro_batches={2 * count} takes "
            f"{_less(simulated.makespan, doubled.makespan)}, if half a micro-batch takes half the "
            "time"
        )
        yield Remark(words, 1 - doubled.makespan / simulated.makespan)


def _halved(stage: StageProfile) -> StageProfile:
    """Return a stage whose actions take half the time."""
    return replace(
        stage, seconds={kind: action_seconds / 2 for kind, action_seconds in stage.seconds.items()}
    )


def _half(transfers: Sequence[float | None]) -> tuple[float | None, ...]:
    """Return transfers that take half the time."""
    return tuple(None if each is None else each / 2 for each in transfers)


def _pays(now: float, then: float) -> bool:
    """Whether a step that takes `then` instead of `now` seconds is worth a line."""
    return now - then > max(GAIN * now, LEAST)


def _less(now: float, then: float) -> str:
    """Format how much less time a step takes."""
    return f"{seconds(then)} for a step in the place of {seconds(now)} ({1 - then / now:.0%} less)"


def _layers(stage: StageProfile) -> str:
    """Name the layers of a stage by the first and the last one."""
    first, last = stage.layers[0], stage.layers[-1]
    return first if first == last else f"{first} to {last}"


def _micro_batches(count: int) -> str:
    """Format a number of micro-batches."""
    return f"{count} micro-batch{'' if count == 1 else 'es'}"


def _median(steps: int) -> str:
    """Describe the number of steps that were measured."""
    return "one step" if steps == 1 else f"the median of {steps}"
