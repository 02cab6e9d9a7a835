"""The report on a run, in words: where its time went, and what to do about it."""

from __future__ import annotations

from pathlib import Path

from paceline.formatting import counted, printable, sized, spoken
from paceline.observe import pipelines, serving
from paceline.observe.advice import LEAST, advise
from paceline.observe.facts import RunFacts, read
from paceline.observe.tables import aligned, seconds
from paceline.record.folder import KINDS, RunFolder
from paceline.trace import PARTS
from paceline.unequal.stragglers.causes import CAUSES, WORDS

LISTED = 200  # events
TOLD = 5e-5  # seconds of a step that show in a table
_MEANING = {
    "compute": "forward, backward and the optimizer",
    "exchange": "what could not be hidden behind compute",
    "wait": "for slower workers",
    "data": "for the next batch",
}


def report(folder: Path) -> str:
    """Write the report on the run in `folder`; of one that has not ended, what is known so far.

    A folder that is not there, is of no run, or has a damaged file raises UsageError.
    """
    facts = read(RunFolder(folder))
    if facts.steps == 0:
        return (
            f"{printable(_title(facts))}\n\nNo step was finished, so there is nothing to tell "
            "about time."
        )
    served = serving.tell(facts.servers, facts.seconds or 0.0, facts.samples)
    exchanged = (
        _late(facts),
        _links(facts),
        _traffic(facts),
        _axes(facts),
        pipelines.tell(facts),
        *facts.codecs,
        served,
        _memory(facts),
    )
    blocks = [
        _title(facts),
        _times(facts),
        *exchanged,
        _checkpoints(facts),
        advise(facts),
        _events(facts),
    ]
    return printable("\n\n".join(block for block in blocks if block))


# Telling
# --------------------------------------------------------------------------------------------------


def _title(facts: RunFacts) -> str:
    took = "" if facts.seconds is None else f" in {spoken(facts.seconds)}"
    loss = (
        ""
        if facts.final_loss is None
        else f"; {'final' if facts.ended else 'last'} loss {facts.final_loss:.4g}"
    )
    done = (
        f"{counted(facts.steps, 'step')} of {counted(facts.samples, 'sample')} in all{took}{loss}"
    )
    if not facts.ended:
        return f"{facts.name} {facts.standing.words}. So far: {done}"
    mesh = "" if facts.mesh is None else f", mesh {facts.mesh}"
    return (
        f"{facts.name}: {facts.sync}{mesh}, {counted(facts.workers, 'worker')} on "
        f"{counted(facts.hosts, 'host')}, {done}"
    )


def _times(facts: RunFacts) -> str:
    rate = f" ({facts.samples / facts.steps / facts.step:,.0f} samples/s)" if facts.step > 0 else ""
    lines = [
        (
            f"A step took {seconds(facts.step)}{rate}, mean over "
            f"steps{' and workers' if facts.workers > 1 else ''}:"
        )
    ]
    for part in PARTS:
        lines.append(
            f"  {part:<9}{facts.share(part):>5.0%}  {seconds(facts.step_seconds[part]):>9}  "
            f"{_MEANING[part]}"
        )
    if facts.ended and facts.seconds:
        outside = facts.seconds - facts.step * facts.steps
        if outside > 0.05 * facts.seconds:
            lines.append(
                f"Outside of steps: {spoken(outside)}, {outside / facts.seconds:.0%} of the run "
                "(evaluation, checkpoints, the start)."
            )
    return "\n".join(lines)


def _late(facts: RunFacts) -> str:
    """Write how late each worker was and why, if that took a twentieth of a step; causes that
    took nothing are left out.
    """
    worst = max((sum(late.values()) for late in facts.late), default=0.0)
    if worst < max(LEAST, 0.05 * facts.step):
        return ""
    causes = [cause for cause in CAUSES if any(late.get(cause, 0.0) >= TOLD for late in facts.late)]
    rows = [
        (
            facts.rank(rank),
            *(
                seconds(value)
                for value in (sum(late.values()), *(late.get(cause, 0.0) for cause in causes))
            ),
        )
        for rank, late in enumerate(facts.late)
    ]
    head = "How much later than usual each worker was in a mean step, and why:"
    table = aligned([("", "late", *(WORDS[cause] for cause in causes)), *rows])
    untold = (
        [f"Not told apart on this machine: {' and '.join(WORDS[cause] for cause in facts.untold)}."]
        if facts.untold
        else []
    )
    return "\n".join([head, *table, *untold])


def _links(facts: RunFacts) -> str:
    return "\n".join(f"From step {link.step} on {link.words}." for link in facts.links)


def _traffic(facts: RunFacts) -> str:
    if facts.bytes_sent is None or facts.workers == 1:
        return ""
    within, between = facts.bytes_sent["within"], facts.bytes_sent["between"]
    text = (
        f"All workers together sent {sized(within)} within hosts and {sized(between)} between "
        "hosts in a step."
    )
    spent = facts.step_seconds["exchange"]
    if between > 0 and facts.hosts > 1 and spent > 0:
        text += (
            f" Over the exposed exchange that is {between * 8 / facts.hosts / spent / 1e6:,.0f} "
            "Mbit/s out of each host."
        )
    return text


def _axes(facts: RunFacts) -> str:
    """Write what a step exchanges along each axis of the mesh."""
    if not facts.axes:
        return ""
    lines = [
        (
            "Along the axes of the mesh, waits for others included; bytes are those of all workers "
            "in a step:"
        )
    ]
    for along in facts.axes:
        share = along.seconds / facts.step if facts.step > 0 else 0.0
        sent = f"{sized(along.within)} within hosts, {sized(along.between)} between hosts"
        lines.append(f"  {along.axis:<9}{share:>5.0%}  {seconds(along.seconds):>9}  {sent}")
    return "\n".join(lines)


def _memory(facts: RunFacts) -> str:
    """Write what workers held; those that held the same share a line."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank, held in enumerate(facts.memory):
        cells = tuple(_held(held.measured[kind], held.predicted[kind]) for kind in KINDS)
        alike.setdefault(cells, []).append(rank)
    rows = [
        # the last cell
        (facts.ranks(ranks), *cells, sized(max(facts.memory[rank].peak for rank in ranks)))
        for cells, ranks in alike.items()
    ]
    if not rows:
        return ""
    head = (
        "Held by each worker from step to step (in brackets what was predicted, where that is "
        "something else):"
    )
    return "\n".join([head, *aligned([("", *KINDS, "process at most"), *rows])])


def _held(measured: int, predicted: int | None) -> str:
    """Write bytes, with those that were predicted if they look otherwise."""
    text = sized(measured)
    return text if predicted is None or sized(predicted) == text else f"{text} ({sized(predicted)})"


def _checkpoints(facts: RunFacts) -> str:
    if not facts.saves:
        return ""
    once, best = (
        facts.saves == 1,
        ""
        if facts.best is None
        else f" The best is {facts.best[0]}, with a metric of {facts.best[1]:.6g}.",
    )
    return (
        f"{counted(facts.saves, 'checkpoint')}: training stood still for "
        f"{seconds(facts.stall)}{'' if once else ' each'}, and "
        f"{'it was' if once else 'they were'} on the disk after {seconds(facts.write)} of "
        f"writing{'' if once else ' each'}.{best}"
    )


def _events(facts: RunFacts) -> str:
    head = (
        "Events:"
        if len(facts.events) <= LISTED
        else f"Events, the last {LISTED} of {len(facts.events):,}; all are in summary.json:"
    )
    lines = [f"  {spoken(event['time']):>7}  {event['what']}" for event in facts.events[-LISTED:]]
    return "\n".join([head, *lines]) if lines else ""
