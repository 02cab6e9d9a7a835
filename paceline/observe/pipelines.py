"""The report on a pipeline of a run: what its stages take, how long its workers are idle, a
picture of a step; and what to do about it.
"""

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

WIDE, HIGH = 110, 40  # characters and lines of a picture, at most
GAIN = 0.05  # of the time of a step, below which a change isn't worth a line
LEAST = 1e-3  # seconds of a step, as for other advice
LARGE = 0.2  # a bubble that more micro-batches are proposed for
MOST = 8  # micro-batches for each worker that are proposed, at most
# between the bubbles measured and predicted, above which steps aren't what the schedule makes of
# them
APART = 0.1


def slowest(facts: RunFacts) -> PipelineProfile | None:
    """Return the pipeline whose steps take longest; None where there is none."""
    return max(facts.pipelines, key=lambda profile: profile.step_seconds, default=None)


def tell(facts: RunFacts) -> str:
    """Describe the slowest pipeline of a run; empty without one."""
    profile = slowest(facts)
    if profile is None:
        return ""
    which = (
        "Pipeline"
        if len(facts.pipelines) == 1
        else f"The slowest of {len(facts.pipelines)} pipelines"
    )
    stages = counted(len(profile.stages), "stage")
    lines = [
        f"{which}: {profile.schedule}, {stages}, {_micro_batches(profile.micro_batches)}; "
        f"a step took {seconds(profile.step_seconds)} "
        f"({_median(profile.steps)}), with a bubble of {profile.bubble:.1%}; "
        "by the schedule and the times of its actions it would be "
        f"{seconds(profile.timeline.makespan)} and {profile.timeline.bubble:.1%}:",
        *aligned(_rows(facts, profile), left=3),
    ]
    picture = draw(_in_milliseconds(profile.timeline), WIDE).plain.splitlines()
    if len(picture) <= HIGH:
        lines += [
            "",
            "That schedule with these times, in milliseconds:",
            *(f"  {line}".rstrip() for line in picture),
        ]
    return "\n".join(lines)


def _rows(facts: RunFacts, profile: PipelineProfile) -> Iterator[Sequence[str]]:
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
    for number, stage in enumerate(profile.stages):
        idle = profile.idle[profile.ranks.index(stage.rank)]
        took = [seconds(stage.seconds[kind]) for kind in kinds]
        yield (
            str(number),
            facts.rank(stage.rank),
            _layers(stage),
            *took,
            seconds(stage.waited),
            seconds(idle),
            sized(stage.kept),
        )


def _in_milliseconds(timeline: PipelineTimeline) -> PipelineTimeline:
    rows = tuple(
        tuple(replace(span, start=1e3 * span.start, end=1e3 * span.end) for span in row)
        for row in timeline.rows
    )
    return replace(timeline, rows=rows, transfers=())


def advise(facts: RunFacts) -> Iterator[Remark]:
    """Advise on the slowest pipeline of a run: its split, its schedule, its micro-batches, and
    waits that are none of theirs.
    """
    profile = slowest(facts)
    if profile is None:
        return
    yield from _split(facts, profile)
    yield from _schedule(profile)
    yield from _more(profile)
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
    """Advise where a stage holds the others up."""
    loads = [sum(stage.seconds.values()) for stage in profile.stages]
    most = max(range(len(loads)), key=loads.__getitem__)
    mean = statistics.fmean(loads)
    if loads[most] < (1 + GAIN) * mean:
        return
    stage = profile.stages[most]
    head = (
        f"Stage {most} ({_layers(stage)}, on {facts.rank(stage.rank)}) holds the pipeline up: "
        f"a micro-batch takes {seconds(loads[most])} "
        f"there, and {seconds(mean)} in the mean stage"
    )
    problem = profile.problem(profile.plan)
    counts = best_split(problem)
    now, then = problem.timeline(profile.split).makespan, problem.timeline(counts).makespan
    if _pays(now, then):
        words = (
            f"{head}. split={counts}, where it is {profile.split} now, takes {_less(now, then)} if "
            "that fits into memory"
        )
        yield Remark(words, 1 - then / now)
    elif loads[most] > 1.2 * mean and _pays(now, now * mean / loads[most]):
        words = (
            f"{head}, and no other split of these {len(profile.costs)} layers is faster: "
            "name smaller layers, or make that one cheaper"
        )
        yield Remark(words, 1 - mean / loads[most], most=True)


def _schedule(profile: PipelineProfile) -> Iterator[Remark]:
    """Advise where another schedule is faster, its best split included."""
    now = profile.timeline.makespan
    best: tuple[float, PipelineTimeline, list[int]] | None = None
    for name in SCHEDULES:
        if name == profile.schedule:
            continue
        try:
            check(name, len(profile.ranks), profile.micro_batches, None)
            schedule = make_schedule(name, len(profile.ranks), profile.micro_batches)
            problem = profile.problem(schedule)
        except UsageError:  # too few layers or micro-batches for it
            continue
        alike = schedule.placed == profile.plan.placed
        counts = profile.split if alike else best_split(problem)
        timeline = simulate(schedule, problem.times(counts))
        if best is None or timeline.makespan < best[0]:
            best = timeline.makespan, timeline, counts
    if best is None or not _pays(now, best[0]):
        return
    _, timeline, counts = best
    kept = max(timeline.kept), max(profile.timeline.kept)
    memory = (
        f"; a worker keeps {kept[0]:.3g} micro-batches at once at most then, {kept[1]:.3g} now"
        if kept[0] > kept[1]
        else ""
    )
    split = "" if timeline.schedule.placed == profile.plan.placed else f" with split={counts}"
    name = timeline.schedule.name
    words = (
        f"schedule={name!r}{split} in the place of {profile.schedule!r} takes "
        f"{_less(now, best[0])} by simulation{memory}"
    )
    yield Remark(words, 1 - best[0] / now)


def _more(profile: PipelineProfile) -> Iterator[Remark]:
    """Advise where more micro-batches make the bubble smaller."""
    count = profile.micro_batches
    found = profile.timeline
    if found.bubble < LARGE or 2 * count > MOST * len(profile.ranks):
        return
    halved = replace(
        profile, stages=tuple(_halved(stage) for stage in profile.stages), micro_batches=2 * count
    )
    then = replace(halved, sends=_half(profile.sends), returns=_half(profile.returns)).timeline
    if _pays(found.makespan, then.makespan):
        words = (
            f"The bubble is {found.bubble:.0%} with {_micro_batches(count)}. "
            f"micro_batches={2 * count} takes "
            f"{_less(found.makespan, then.makespan)}, if half a micro-batch takes half the time"
        )
        yield Remark(words, 1 - then.makespan / found.makespan)


def _halved(stage: StageProfile) -> StageProfile:
    return replace(stage, seconds={kind: took / 2 for kind, took in stage.seconds.items()})


def _half(transfers: Sequence[float | None]) -> tuple[float | None, ...]:
    return tuple(None if each is None else each / 2 for each in transfers)


def _pays(now: float, then: float) -> bool:
    return now - then > max(GAIN * now, LEAST)


def _less(now: float, then: float) -> str:
    return f"{seconds(then)} for a step in the place of {seconds(now)} ({1 - then / now:.0%} less)"


def _layers(stage: StageProfile) -> str:
    first, last = stage.layers[0], stage.layers[-1]
    return first if first == last else f"{first} to {last}"


def _micro_batches(count: int) -> str:
    return f"{count} micro-batch{'' if count == 1 else 'es'}"


def _median(steps: int) -> str:
    return "one step" if steps == 1 else f"the median of {steps}"
