"""Explains a plan: the verdict, the table, why other ways lose, and what would change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.formatting import format_bytes
from paceline.planner.search import CLEAR_GAIN, PlanTurning, PricedCandidate

COLUMNS = (
    "way",
    "ms/step",
    "+-",
    "samples/s",
    "of one worker",
    "memory",
    "within",
    "between",
    "waits for",
)
# Names of the parts of a step in the column "waits for".
_WAITS = {
    "data": "data",
    "forward": "computing",
    "backward": "computing",
    "exchange": "the exchange",
    "optimizer": "the optimizer",
    "other": "the script",
}


def explain_verdict(
    best: PricedCandidate, alone: PricedCandidate, all_workers: PricedCandidate
) -> str:
    """Say in a sentence or two whether more workers help.

    Args:
        best: The fastest way.
        alone: The fastest single worker.
        all_workers: The fastest way that uses all workers.
    """
    ratio = all_workers.step.seconds / alone.step.seconds
    name = _capitalize(_name_workers(all_workers))
    takes = "take" if all_workers.candidate.cluster.workers > 1 else "takes"
    text = f"{name} {takes} {ratio:.2f} of the time of one worker"
    if best is alone:
        cause = explain_loss(all_workers)
        return f"{text}: stay with one worker. {cause}"
    if best.step.seconds > CLEAR_GAIN * alone.step.seconds:
        return f"{text}: more workers make no clear difference here. {explain_loss(best)}"
    if best is all_workers or not _uses_fewer(best, all_workers):
        how = best.candidate.sync or best.candidate.cut
        way = f" with {how}" if how else ""
        fastest = best.step.seconds / alone.step.seconds
        return (
            f"{text}: they pay."
            if not way
            else (f"{name} take {fastest:.2f} of the time of one worker{way}: they pay.")
        )
    fewer = best.step.seconds / alone.step.seconds
    return (
        f"{text}. {_capitalize(_name_workers(best))} take {fewer:.2f}: use these. "
        f"{explain_loss(all_workers)}"
    )


def explain_loss(priced: PricedCandidate) -> str:
    """Say what a step of this way mostly waits for."""
    parts = priced.step.parts
    exchange = parts["exchange"] / priced.step.seconds
    optimizer = parts["optimizer"] / priced.step.seconds
    if exchange >= 0.25:
        return (
            f"The exchange takes {exchange:.0%} of a step: "
            f"{format_bytes(round(priced.step.between_bytes or priced.step.within_bytes))} travel "
            "in each."
        )
    if optimizer >= 0.25:
        return (
            f"The optimizer takes {optimizer:.0%} of a step, and each worker steps the whole model."
        )
    if len(priced.candidate.cluster.hosts) == 1:
        return "The workers share the cores of one host, which one worker already uses."
    return "The slowest worker decides."


def name_largest_wait(priced: PricedCandidate) -> str:
    """Name the part that takes most of a step, with its percentage."""
    sums: dict[str, float] = {}
    for part, seconds in priced.step.parts.items():
        name = _WAITS[part]
        sums[name] = sums.get(name, 0.0) + seconds
    name = max(sums, key=sums.__getitem__)
    return f"{name} {sums[name] / priced.step.seconds:.0%}"


def make_rows(shown: Sequence[PricedCandidate], alone: PricedCandidate) -> list[tuple[str, ...]]:
    """Make the rows of the table."""
    return [
        (
            each.candidate.describe(),
            f"{each.step.seconds * 1e3:.3g}",
            f"{each.uncertainty:.0%}",
            f"{each.samples_per_second:.4g}",
            f"{each.step.seconds / alone.step.seconds:.2f}",
            format_bytes(round(each.memory_bytes)),
            format_bytes(round(each.step.within_bytes)) if each.step.within_bytes else "-",
            format_bytes(round(each.step.between_bytes)) if each.step.between_bytes else "-",
            name_largest_wait(each),
        )
        for each in shown
    ]


def explain_turnings(turnings: Sequence[PlanTurning]) -> list[str]:
    """Say what would change the answer, a line for each change."""
    return [
        f"With {turning.what}, the fastest way would be: {turning.best.candidate.describe()} "
        f"({turning.best.step.seconds * 1e3:.3g} ms a step)."
        for turning in turnings
    ]


def to_fields(priced: PricedCandidate) -> dict[str, Any]:
    """Convert a priced candidate to plain data with stable keys, for `--json`."""
    candidate, step = priced.candidate, priced.step
    return {
        "kind": candidate.kind,
        "way": candidate.describe(),
        "hosts": [host.name for host in candidate.cluster.hosts],
        "workers": [host.workers for host in candidate.cluster.hosts],
        "threads": [host.threads for host in candidate.cluster.hosts],
        "sync": candidate.sync,
        "mesh": candidate.mesh,
        "cut": candidate.cut,
        "activation_checkpoints": candidate.recompute,
        "shares": list(priced.shares),
        "shares_by_speed": candidate.by_speed,
        "seconds_per_step": step.seconds,
        "uncertainty": priced.uncertainty,
        "samples_per_second": priced.samples_per_second,
        "memory_bytes": priced.memory_bytes,
        "within_bytes": step.within_bytes,
        "between_bytes": step.between_bytes,
        "parts": step.parts,
    }


def _uses_fewer(one: PricedCandidate, other: PricedCandidate) -> bool:
    return one.candidate.cluster.workers < other.candidate.cluster.workers


def _name_workers(priced: PricedCandidate) -> str:
    cluster = priced.candidate.cluster
    workers = f"{cluster.workers} worker{'s' if cluster.workers > 1 else ''}"
    return workers if len(cluster.hosts) == 1 else f"{workers} on {len(cluster.hosts)} hosts"


def _capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]
