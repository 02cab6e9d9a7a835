"""Advice on where the time of a run went. Each rule looks at one thing.

A rule speaks only of what lasts: it takes its share of a step in four of five tenths of the run,
after the first steps, so that neither the start nor a busy moment is taken for the rule; it is
worth having, in seconds; and it is not what the run does already.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator

from paceline.formatting import counted
from paceline.observe import pipelines, serving
from paceline.observe.facts import FEWEST, RunFacts, SteadyTimes
from paceline.observe.remarks import Remark
from paceline.observe.tables import seconds
from paceline.unequal.stragglers.causes import REMEDIES, WORDS
from paceline.unequal.stragglers.lateness import main_cause
from paceline.unequal.stragglers.stragglers import remedy, work_by_share

LEAST = 1e-3  # seconds of a step that are worth a change of the training
# seconds of a step that are worth processes that read: to hand over a batch costs them up to so
# much
READING = 2e-3
READERS_COST = 10e-3  # seconds of a step below which it may be the handing over that is waited for
STOOD = 1.0  # seconds of a run that are worth another way to save

_ALONG = {  # what makes exchanges along an axis take less, where it lies in hosts
    "tensor": ": fewer workers along it exchange less, if memory allows for that",
    "shard": ": larger batches gather and sum less often for the same samples",
}


def advise(facts: RunFacts) -> str:
    """Write the advice for a run, or why there is none."""
    found = remarks(facts)
    return (
        "\n".join(["What to do about it:", *(f"- {remark.words}" for remark in found)])
        if found
        else quiet(facts)
    )


def remarks(facts: RunFacts) -> list[Remark]:
    """Return the advice for a run."""
    always = [remark for rule in WHOLE for remark in rule(facts)]
    steady = facts.steady
    return (
        always
        if steady is None
        else [*always, *(remark for rule in RULES for remark in rule(facts, steady))]
    )


def quiet(facts: RunFacts) -> str:
    """Say why there is no advice for a run."""
    if facts.steps < FEWEST:
        few = f"{counted(facts.steps, 'step')} {'is' if facts.steps == 1 else 'are'} too few"
        return f"{few} to tell a rule from chance: from {FEWEST} on there is advice."
    if facts.steady is None:
        return "metrics.jsonl is missing, and without the time of each step there is no advice."
    if facts.share("compute") >= 0.75:
        return f"Nothing stands out: {facts.share('compute'):.0%} of a step is compute."
    return "Nothing to gain for sure: what isn't compute is short, or comes and goes."


def exchange(facts: RunFacts, steady: SteadyTimes) -> Iterator[Remark]:
    """Advise where the exchange is exposed for more than a quarter of a step."""
    if not steady.lasts("exchange", 0.25, LEAST):
        return
    most = max(facts.axes, key=lambda along: along.seconds, default=None)
    if most is not None and most.axis == "stage":
        return  # waits of a pipeline, of which `pipelines` knows more
    if most is not None and most.axis != "data":
        inside = (
            ", which goes between hosts: give the mesh fewer workers along it, so that it fits in "
            "a host"
            if most.between
            else ""
        )
        words = (
            f"Exchange takes {facts.share('exchange'):.0%} of a step, most of it along "
            f"`{most.axis}`{inside or _ALONG[most.axis]}. "
            "`paceline layout` shows what a worker would hold by another mesh"
        )
        yield Remark(words, min(most.seconds / facts.step, facts.share("exchange")), most=True)
        return
    share = facts.share("exchange")
    words = (
        f"Exchange takes {share:.0%} of a step. A larger global batch makes fewer exchanges for "
        "the same samples "
        "(in pieces by run.step(..., micro_batches=k) if memory is short); "
        "parameters in bfloat16 halve the bytes"
    )
    yield Remark(words, share / 2)  # with twice the batch, or half the bytes
    if facts.hosts > 1 and "via=" in facts.sync and "hierarchical" not in facts.sync:
        words = (
            f"{facts.sync} names its own way between hosts. "
            "AllReduce() and AllReduce(via='hierarchical') send one copy per host"
        )
        yield Remark(words, share, most=True)
    elif facts.hosts == 1 and "via=" in facts.sync:
        words = (
            f"{facts.sync} names its own way inside the host. AllReduce() goes through shared "
            "memory, which is usually fastest there"
        )
        yield Remark(words, share, most=True)
    elif facts.hosts > 1 and facts.sync == "AllReduce()":
        words = (
            "One copy per host is sent already. AllReduce(codec='auto') sends fewer bits of it "
            "where that pays"
        )
        yield Remark(words, share, most=True)
    elif facts.hosts > 1:
        words = (
            "One copy per host is sent already. `paceline bench collectives` says whether the link "
            "is as fast as it should be"
        )
        yield Remark(words, share, most=True)


def slow(facts: RunFacts, steady: SteadyTimes) -> Iterator[Remark]:
    """Advise where workers wait for one that is slower, or for a different one each time."""
    if not steady.lasts("wait", 0.1, LEAST):
        return
    busy = [work.seconds for work in facts.work]
    slowest = max(range(len(busy)), key=busy.__getitem__, default=0)
    head = f"Waiting for slower workers takes {facts.share('wait'):.0%} of a step"
    cause = main_cause(facts.late[slowest]) if slowest < len(facts.late) else "compute"
    if (
        busy
        and min(busy) > 0
        and busy[slowest] > 1.15 * min(busy)
        and facts.work[slowest].late >= 0.8
    ):
        words = (
            f"{head}. The slowest is {facts.rank(slowest)}, with {seconds(busy[slowest])} of own "
            "work in a step where the median is "
            f"{seconds(statistics.median(busy))}, for {WORDS[cause]}. "
            f"{REMEDIES.get(cause) or _evened(facts, busy)}"
        )
        yield Remark(words, *_sooner(facts, busy, cause))
    elif not busy:
        words = (
            f"{head}. Once the run has ended, this report says whether it is always the same one "
            "that is late"
        )
        yield Remark(words, facts.share("wait"), most=True)
    else:
        words = (
            f"{head}, and no worker is the slowest throughout: batches of unequal work (lengths of "
            "texts), more workers than cores, or "
            "other programs on the machines. trace.json, opened in Perfetto (ui.perfetto.dev), "
            "shows who was late when"
        )
        yield Remark(words, facts.share("wait"), most=True)


def _sooner(facts: RunFacts, busy: list[float], cause: str) -> tuple[float, bool]:
    """Return the part of a step that is saved where the slowest worker is as fast as others, or
    its work is dealt; and whether at most.
    """
    dealt, shares = work_by_share(busy, facts.mesh), facts.dealing.shares if facts.dealing else ()
    if cause in REMEDIES or facts.pipelines or len(dealt) == 1:
        return min((max(busy) - statistics.median_low(busy)) / facts.step, 1.0), True
    # what all need with samples by their speed
    even = statistics.harmonic_mean(dealt, shares if len(shares) == len(dealt) else None)
    return min(max(max(busy) - even, 0.0) / facts.step, 1.0), False


def _evened(facts: RunFacts, busy: list[float]) -> str:
    """Advise on a slow worker: shares by speed, unless they are so already."""
    if facts.pipelines:
        return (
            "See what else runs there; if it is only that its layers take longer than others', a "
            "better split of the layers helps"
        )
    busy = work_by_share(busy, facts.mesh)
    shares = facts.dealing.shares if facts.dealing else ()
    if len(shares) != len(busy) or max(shares) - min(shares) <= 1:
        return remedy(busy)
    speeds = [share / mine for share, mine in zip(shares, busy, strict=True)]
    fit = ", ".join(f"{speed / max(speeds):.2g}" for speed in speeds)
    return (
        f"See what else runs there; the shares are {', '.join(map(str, shares))} now, and by speed "
        f"they would be shares=[{fit}]"
    )


def data(facts: RunFacts, steady: SteadyTimes) -> Iterator[Remark]:
    """Advise where batches come too slowly."""
    readers = facts.dealing.num_workers if facts.dealing else 0
    if not steady.lasts("data", 0.1, LEAST if readers else READING):
        return
    head = f"The next batch is waited for during {facts.share('data'):.0%} of a step"
    if not readers:
        words = (
            f"{head}. Where cores are left, let others prepare it: DataLoader(..., num_workers=2 "
            "or more, persistent_workers=True); or do "
            f"the costly part of the data set once, ahead"
        )
    elif steady.least["data"] < READERS_COST:
        words = (
            f"{head}, with num_workers={readers} for each worker. Such processes need a few "
            "milliseconds to hand a batch over: see whether "
            f"num_workers=0 is faster, or larger batches"
        )
    else:
        words = (
            f"{head}, with num_workers={readers} for each worker. More of them help only where "
            "cores are left; else do the costly part of "
            f"the data set once, ahead"
        )
    yield Remark(words, facts.share("data"), most=True)


def servers(facts: RunFacts, steady: SteadyTimes) -> Iterator[Remark]:
    return serving.advise(facts.servers, facts.seconds or 0.0, facts.samples)


RULES: tuple[Callable[[RunFacts, SteadyTimes], Iterator[Remark]], ...] = (
    exchange,
    slow,
    data,
    servers,
)


def outside(facts: RunFacts) -> Iterator[Remark]:
    """Advise where much of the run lies outside of its steps."""
    if (
        facts.ended
        and facts.seconds
        and facts.seconds > 60
        and facts.step * facts.steps < 0.6 * facts.seconds
    ):
        inside = facts.step * facts.steps / facts.seconds
        words = (
            f"Only {inside:.0%} of the run was spent in steps: evaluate and save less often, or "
            "see what the script does before the first"
        )
        yield Remark(words, 1 - inside, most=True, of="run")


def checkpoints(facts: RunFacts) -> Iterator[Remark]:
    """Advise where training stands still for checkpoints."""
    stood = facts.stall * facts.saves
    if not facts.seconds or stood < STOOD or stood <= 0.03 * facts.seconds:
        return
    part = stood / facts.seconds
    if facts.stall > facts.write / 2 and not facts.background:
        words = (
            f"Checkpoints took {part:.0%} of the run: run.save(background=True) writes them while "
            "training goes on"
        )
        yield Remark(words, part, most=True, of="run")
    else:  # half as often
        yield Remark(
            f"Training stood still for checkpoints for {part:.0%} of the run: save less often",
            part / 2,
            of="run",
        )


def links(facts: RunFacts) -> Iterator[Remark]:
    """Advise where a link between hosts became slow."""
    last = facts.links[-1] if facts.links else None
    if last is not None and last.advice:
        yield Remark(last.advice, 1 - 1 / last.gain if last.gain else None)


WHOLE: tuple[Callable[[RunFacts], Iterator[Remark]], ...] = (
    outside,
    checkpoints,
    links,
    pipelines.advise,
)
