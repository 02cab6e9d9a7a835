"""The verdict on a run in three sentences: the training, its time, and what to do."""

from __future__ import annotations

import math

from paceline.formatting import format_count, format_duration
from paceline.observe.advice import collect_remarks, explain_no_advice
from paceline.observe.facts import RunFacts
from paceline.observe.remarks import Remark
from paceline.observe.tables import format_seconds
from paceline.trace import STEP_PARTS

NO_STEP = "No step was finished, so there is nothing to tell about time."


def make_verdict(facts: RunFacts) -> list[str]:
    """Return the sentences of the verdict; a single one for a run without a step."""
    return (
        [_describe_training(facts), _describe_step_time(facts), _describe_gain(facts)]
        if facts.steps
        else [NO_STEP]
    )


def _describe_training(facts: RunFacts) -> str:
    """Describe what was trained, by how many workers, and the loss."""
    work = f"{format_count(facts.samples, 'sample')} in {format_count(facts.steps, 'step')}"
    duration = "" if facts.seconds is None else f" in {format_duration(facts.seconds)}"
    loss = "" if facts.final_loss is None else f", to a loss of {facts.final_loss:.4g}"
    who = f"{format_count(facts.workers, 'worker')} on {format_count(facts.hosts, 'host')}"
    mesh = "" if facts.mesh is None else f" (mesh {facts.mesh})"
    if not facts.ended:
        so_far = (
            f"{who}{mesh} {'has' if facts.workers == 1 else 'have'} trained"
            if facts.sync
            else "it has trained"
        )
        return (
            f"So far {so_far} {work}{duration}{loss}{f', with {facts.sync}' if facts.sync else ''}."
        )
    return f"{who}{mesh} trained {work}{duration}{loss}, with {facts.sync}."


def _describe_step_time(facts: RunFacts) -> str:
    """Describe where the time of a step went."""
    rate = (
        f" ({facts.samples / facts.steps / facts.mean_step_seconds:,.0f} samples/s)"
        if facts.mean_step_seconds > 0
        else ""
    )
    shares = sorted(STEP_PARTS, key=facts.share_of_step, reverse=True)
    first, *other_parts = (f"{part} {facts.share_of_step(part):.0%}" for part in shares)
    return (
        f"A step took {format_seconds(facts.mean_step_seconds)}{rate}: "
        f"{first}, {', '.join(other_parts[:-1])} and {other_parts[-1]}."
    )


def _describe_gain(facts: RunFacts) -> str:
    """Describe the most valuable advice, or why there is none."""
    if facts.final_loss is not None and not math.isfinite(facts.final_loss):
        return (
            f"The loss is {facts.final_loss}: the weights are likely lost, "
            "and the curve shows since when."
        )
    known_gains = [remark for remark in collect_remarks(facts) if remark.gain is not None]
    if not known_gains:
        return explain_no_advice(facts)
    # Estimates come before upper bounds, which may be far from what is saved.
    best = max(known_gains, key=lambda remark: (not remark.most, remark.gain))
    return f"{extract_headline(best)}; what `paceline report` advises {best.saving_in_words}."


def extract_headline(remark: Remark) -> str:
    """Return the first sentence of a remark, up to its first colon."""
    return remark.words.partition(". ")[0].partition(": ")[0].rstrip(".")
