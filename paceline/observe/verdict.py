"""The verdict on a run in three sentences: what was trained, where a step's time went, and what
that means.
"""

from __future__ import annotations

import math

from paceline.formatting import counted, spoken
from paceline.observe.advice import quiet, remarks
from paceline.observe.facts import RunFacts
from paceline.observe.remarks import Remark
from paceline.observe.tables import seconds
from paceline.trace import PARTS

UNSTARTED = "No step was finished, so there is nothing to tell about time."


def verdict(facts: RunFacts) -> list[str]:
    """Return the sentences; one alone for a run without a step."""
    return [_trained(facts), _spent(facts), _means(facts)] if facts.steps else [UNSTARTED]


def _trained(facts: RunFacts) -> str:
    work = f"{counted(facts.samples, 'sample')} in {counted(facts.steps, 'step')}"
    took = "" if facts.seconds is None else f" in {spoken(facts.seconds)}"
    loss = "" if facts.final_loss is None else f", to a loss of {facts.final_loss:.4g}"
    who = f"{counted(facts.workers, 'worker')} on {counted(facts.hosts, 'host')}"
    mesh = "" if facts.mesh is None else f" (mesh {facts.mesh})"
    if not facts.ended:
        so_far = (
            f"{who}{mesh} {'has' if facts.workers == 1 else 'have'} trained"
            if facts.sync
            else "it has trained"
        )
        return f"So far {so_far} {work}{took}{loss}{f', with {facts.sync}' if facts.sync else ''}."
    return f"{who}{mesh} trained {work}{took}{loss}, with {facts.sync}."


def _spent(facts: RunFacts) -> str:
    rate = f" ({facts.samples / facts.steps / facts.step:,.0f} samples/s)" if facts.step > 0 else ""
    shares = sorted(PARTS, key=facts.share, reverse=True)
    first, *others = (f"{part} {facts.share(part):.0%}" for part in shares)
    return (
        f"A step took {seconds(facts.step)}{rate}: {first}, {', '.join(others[:-1])} and "
        f"{others[-1]}."
    )


def _means(facts: RunFacts) -> str:
    if facts.final_loss is not None and not math.isfinite(facts.final_loss):
        return (
            f"The loss is {facts.final_loss}: the weights are likely lost, and the curve shows "
            "since when."
        )
    found = [remark for remark in remarks(facts) if remark.gain is not None]
    if not found:
        return quiet(facts)
    best = max(found, key=lambda remark: (not remark.most, remark.gain))
    return f"{headline(best)}; what `paceline report` advises {best.saves}."


def headline(remark: Remark) -> str:
    """Return the first sentence of advice, or what stands before its first colon."""
    return remark.words.partition(". ")[0].partition(": ")[0].rstrip(".")
