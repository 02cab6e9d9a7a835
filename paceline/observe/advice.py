"""Advice on where the time of a run went. Each rule looks at one thing.

A rule speaks only if all of this holds:
- The part takes its share of a step in four of five tenths of the run, after the first steps, so
  neither the start nor a busy moment is mistaken for the rule.
- The change saves enough seconds to be worth it.
- The run does not do it already.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from paceline.formatting import format_count
from paceline.observe import pipeline_report, server_report
from paceline.observe.facts import MIN_STEPS, RunFacts, SteadyTimes
from paceline.observe.remarks import Remark
from paceline.observe.tables import format_seconds
from paceline.unequal.stragglers.causes import REMEDIES, WORDS
from paceline.unequal.stragglers.lateness import find_main_cause
from paceline.unequal.stragglers.stragglers import advise_remedy, work_by_share

# Seconds of a step that are worth a change of the training.
MIN_SECONDS = 1e-3
# Seconds of a step that are worth reader processes, which take up to this long for a batch.
MIN_READING_SECONDS = 2e-3
# Seconds of a step below which workers may wait for the handing over, and not for the reading.
HANDOVER_SECONDS = 10e-3
# Seconds of a run that are worth another way to save.
MIN_STALL_SECONDS = 1.0

# How to make exchanges along an axis faster, if the axis lies inside of hosts.
_AXIS_ADVICE = {
    "tensor": ": fewer workers along it exchange less, if memory allows for that",
    "shard": ": larger batches gather and sum less often for the same samples",
}


def format_advice(facts: RunFacts) -> str:
    """Format the advice for a run, or the reason why there is none."""
    advice = collect_remarks(facts)
    return (
        "\n".join(["What to do about it:", *(f"- {remark.words}" for remark in advice)])
        if advice
        else explain_no_advice(facts)
    )


def collect_remarks(facts: RunFacts) -> list[Remark]:
    """Return the advice for a run, from all rules."""
    run_remarks = [remark for rule in RUN_RULES for remark in rule(facts)]
    steady = facts.steady
    return (
        run_remarks
        if steady is None
        else [*run_remarks, *(remark for rule in STEP_RULES for remark in rule(facts, steady))]
    )


def explain_no_advice(facts: RunFacts) -> str:
    """Explain why there is no advice for a run."""
    if facts.steps < MIN_STEPS:
        few = f"{format_count(facts.steps, 'step')} {'is' if facts.steps == 1 else 'are'} too few"
        return f"{few} to tell a rule from chance: from {MIN_STEPS} on there is advice."
    if facts.steady is None:
        return "metrics.jsonl is missing, and without the time of each step there is no advice."
    if facts.share_of_step("compute") >= 0.75:
        return f"Nothing stands out: {facts.share_of_step('compute'):.0%} of a step is compute."
    return "Nothing to gain for sure: what isn't compute is short, or comes and goes."


def advise_on_exchange(facts: RunFacts, steady: SteadyTimes) -> Iterator[Remark]:
    """Advise if the exposed exchange takes more than a quarter of a step."""
    if not steady.is_lasting("exchange", 0.25, MIN_SECONDS):
        return
    slowest_axis = max(facts.axes, key=lambda along: along.seconds, default=None)
    if slowest_axis is not None and slowest_axis.axis == "stage":
        # These are waits of a pipeline, see `pipeline_report`.
        return
    # On other axes than `data`, activations or parameters are exchanged, and not only gradients.
    # The size of the batch and the codec don't help there.
    if slowest_axis is not None and slowest_axis.axis != "data":
        between = (
            ", which goes between hosts: give the mesh fewer workers along it, "
            "so that it fits in a host"
        )
        ending = between if slowest_axis.between else _AXIS_ADVICE[slowest_axis.axis]
        words = (
            f"Exchange takes {facts.share_of_step('exchange'):.0%} of a step, most of it along "
            f"`{slowest_axis.axis}`{ending}. "
            "`paceline layout` shows what a worker would hold by another mesh"
        )
        yield Remark(
            words,
            min(slowest_axis.seconds / facts.mean_step_seconds, facts.share_of_step("exchange")),
            most=True,
        )
        return
    # From here on, it is the exchange of gradients.
    share = facts.share_of_step("exchange")
    words = (
        f"Exchange takes {share:.0%} of a step. A larger global batch makes fewer exchanges for "
        "the same samples (in pieces by run.step(..., micro_batches=k) if memory is short); "
        "parameters in bfloat16 halve the bytes"
    )
    # Twice the batch, or half the bytes, halves it.
    yield Remark(words, share / 2)
    if route_advice := _advise_on_route(facts):
        yield Remark(route_advice, share, most=True)


def _advise_on_route(facts: RunFacts) -> str:
    """Advise on the way of gradients between workers; empty if there is no better one."""
    names_route = "via=" in facts.sync
    if facts.hosts <= 1:
        return (
            f"{facts.sync} names its own way inside the host. AllReduce() goes through shared "
            "memory, which is usually fastest there"
            if names_route
            else ""
        )
    if names_route and "hierarchical" not in facts.sync:
        return (
            f"{facts.sync} names its own way between hosts. "
            "AllReduce() and AllReduce(via='hierarchical') send one copy per host"
        )
    next_step = (
        "AllReduce(codec='auto') sends fewer bits of it where that pays"
        if facts.sync == "AllReduce()"
        else "`paceline bench collectives` says whether the link is as fast as it should be"
    )
    return f"One copy per host is sent already. {next_step}"


def advise_on_slow_workers(facts: RunFacts, steady: SteadyTimes) -> Iterator[Remark]:
    """Advise if workers wait for a slower worker, always the same or a different one each time."""
    if not steady.is_lasting("wait", 0.1, MIN_SECONDS):
        return
    work_seconds = [work.seconds for work in facts.work]
    slowest = max(range(len(work_seconds)), key=work_seconds.__getitem__, default=0)
    finding = f"Waiting for slower workers takes {facts.share_of_step('wait'):.0%} of a step"
    cause = find_main_cause(facts.late[slowest]) if slowest < len(facts.late) else "compute"
    # Always the same worker is slowest: clearly slower than the fastest, in most of the steps.
    if (
        work_seconds
        and min(work_seconds) > 0
        and work_seconds[slowest] > 1.15 * min(work_seconds)
        and facts.work[slowest].late >= 0.8
    ):
        words = (
            f"{finding}. The slowest is {facts.name_rank(slowest)}, with "
            f"{format_seconds(work_seconds[slowest])} of own work in a step where the median is "
            f"{format_seconds(statistics.median(work_seconds))}, for {WORDS[cause]}. "
            f"{REMEDIES.get(cause) or _advise_on_shares(facts, work_seconds)}"
        )
        yield Remark(words, *_estimate_saving(facts, work_seconds, cause))
    elif not work_seconds:
        words = (
            f"{finding}. Once the run has ended, this report says whether it is always the same "
            "one that is late"
        )
        yield Remark(words, facts.share_of_step("wait"), most=True)
    else:
        words = (
            f"{finding}, and no worker is the slowest throughout: batches of unequal work (lengths "
            "of texts), more workers than cores, or "
            "other programs on the machines. trace.json, opened in Perfetto (ui.perfetto.dev), "
            "shows who was late when"
        )
        yield Remark(words, facts.share_of_step("wait"), most=True)


def _estimate_saving(facts: RunFacts, work_seconds: list[float], cause: str) -> tuple[float, bool]:
    """Estimate the part of a step that is saved, and whether that is an upper bound.

    Either the slowest worker becomes as fast as the median one, if its cause can be fixed, or the
    samples are shared out by speed.
    """
    seconds_by_share, shares = (
        work_by_share(work_seconds, facts.mesh),
        facts.dealing.shares if facts.dealing else (),
    )
    if cause in REMEDIES or facts.pipelines or len(seconds_by_share) == 1:
        return min(
            (max(work_seconds) - statistics.median_low(work_seconds)) / facts.mean_step_seconds, 1.0
        ), True
    # If each worker gets samples in proportion to its speed, all need the same time.
    weights = shares if len(shares) == len(seconds_by_share) else None
    balanced_seconds = statistics.harmonic_mean(seconds_by_share, weights)
    return min(max(max(work_seconds) - balanced_seconds, 0.0) / facts.mean_step_seconds, 1.0), False


def _advise_on_shares(facts: RunFacts, work_seconds: list[float]) -> str:
    """Advise to share out samples by speed, unless they are so already."""
    if facts.pipelines:
        return (
            "See what else runs there; if it is only that its layers take longer than others', a "
            "better split of the layers helps"
        )
    work_seconds = work_by_share(work_seconds, facts.mesh)
    shares = facts.dealing.shares if facts.dealing else ()
    if len(shares) != len(work_seconds) or max(shares) - min(shares) <= 1:
        return advise_remedy(work_seconds)
    speeds = [
        share / seconds_of_share
        for share, seconds_of_share in zip(shares, work_seconds, strict=True)
    ]
    proposed = ", ".join(f"{speed / max(speeds):.2g}" for speed in speeds)
    return (
        f"See what else runs there; the shares are {', '.join(map(str, shares))} now, and by speed "
        f"they would be shares=[{proposed}]"
    )


def advise_on_data(facts: RunFacts, steady: SteadyTimes) -> Iterator[Remark]:
    """Advise if workers wait for their next batch."""
    readers = facts.dealing.num_workers if facts.dealing else 0
    if not steady.is_lasting("data", 0.1, MIN_SECONDS if readers else MIN_READING_SECONDS):
        return
    finding = f"The next batch is waited for during {facts.share_of_step('data'):.0%} of a step"
    if not readers:
        words = (
            f"{finding}. Where cores are left, let others prepare it: DataLoader(..., "
            "num_workers=2 or more, persistent_workers=True); or do "
            f"the costly part of the data set once, ahead"
        )
    elif steady.least["data"] < HANDOVER_SECONDS:
        words = (
            f"{finding}, with num_workers={readers} for each worker. Such processes need a few "
            "milliseconds to hand a batch over: see whether "
            f"num_workers=0 is faster, or larger batches"
        )
    else:
        words = (
            f"{finding}, with num_workers={readers} for each worker. More of them help only where "
            "cores are left; else do the costly part of "
            f"the data set once, ahead"
        )
    yield Remark(words, facts.share_of_step("data"), most=True)


def advise_on_server_load(facts: RunFacts, steady: SteadyTimes) -> Iterator[Remark]:
    """Advise on busy servers, see `server_report`."""
    return server_report.advise_on_servers(facts.servers, facts.seconds or 0.0, facts.samples)


STEP_RULES: tuple[Callable[[RunFacts, SteadyTimes], Iterator[Remark]], ...] = (
    advise_on_exchange,
    advise_on_slow_workers,
    advise_on_data,
    advise_on_server_load,
)


def advise_on_time_outside_steps(facts: RunFacts) -> Iterator[Remark]:
    """Advise if much of the run lies outside of its steps."""
    if (
        facts.ended
        and facts.seconds
        and facts.seconds > 60
        and facts.mean_step_seconds * facts.steps < 0.6 * facts.seconds
    ):
        share_in_steps = facts.mean_step_seconds * facts.steps / facts.seconds
        words = (
            f"Only {share_in_steps:.0%} of the run was spent in steps: evaluate and save less "
            "often, or see what the script does before the first"
        )
        yield Remark(words, 1 - share_in_steps, most=True, of="run")


def advise_on_checkpoints(facts: RunFacts) -> Iterator[Remark]:
    """Advise if training stands still for checkpoints."""
    stall_seconds = facts.stall * facts.saves
    if (
        not facts.seconds
        or stall_seconds < MIN_STALL_SECONDS
        or stall_seconds <= 0.03 * facts.seconds
    ):
        return
    stall_share = stall_seconds / facts.seconds
    if facts.stall > facts.write / 2 and not facts.background:
        words = (
            f"Checkpoints took {stall_share:.0%} of the run: run.save(background=True) writes them "
            "while training goes on"
        )
        yield Remark(words, stall_share, most=True, of="run")
    else:
        # Saving half as often halves it.
        yield Remark(
            (
                f"Training stood still for checkpoints for {stall_share:.0%} of the run: "
                "save less often"
            ),
            stall_share / 2,
            of="run",
        )


def advise_on_links(facts: RunFacts) -> Iterator[Remark]:
    """Advise if a link between hosts became slow."""
    last = facts.links[-1] if facts.links else None
    if last is not None and last.advice:
        yield Remark(last.advice, 1 - 1 / last.gain if last.gain else None)


RUN_RULES: tuple[Callable[[RunFacts], Iterator[Remark]], ...] = (
    advise_on_time_outside_steps,
    advise_on_checkpoints,
    advise_on_links,
    pipeline_report.advise_on_pipelines,
)
