"""Whether a peer computed the right thing: as many workers as asked for, in one job, with the
weights of one process on the whole batch.

A peer that quietly runs alone looks fast; it is found by its workers' number, by their size, and by
weights that saw other batches.

    warm-up steps                           timed steps
                  | weights: close           | weights: far nearer than a lone worker's

Sums of a batch that is cut in another way are rounded in another way. That stays at 1e-7 until a
ReLU or a maximum is decided by it, as happens to single samples in a hundred steps; then a right
peer is 1e-3 away. So only the first steps are held to `EXACT`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.catalogue import EXACT, HALF, ROUNDED

TELLING = 100  # a lone worker's weights are at least so many times EXACT away from the reference's

WORDS = {
    "exact": f"within {EXACT:g} of one process after the warm-up",
    "half": f"within {HALF:g} of one process after the warm-up",
    "near": "equal on all workers, and nearer to one process than a lone worker is",
}


def complaint(
    check: str, answers: Sequence[Mapping[str, Any]], workers: int, steps: int, alone: float
) -> str | None:
    """What is wrong with the workers' answers, or None.

    `alone` is how far a worker that never exchanged ends from the reference.
    """
    if len(answers) != workers:
        ranks = ", ".join(str(answer["rank"]) for answer in answers) or "none"
        return f"{len(answers)} of {workers} workers answered (ranks: {ranks})" + (
            ": it ran alone" if len(answers) == 1 else ""
        )
    sizes = sorted({answer["size"] for answer in answers})
    if sizes != [workers]:
        return f"the workers' job has {', '.join(map(str, sizes))} of {workers} workers"
    if any(len(answer["seconds"]) != steps for answer in answers):
        return f"{min(len(answer['seconds']) for answer in answers)} of {steps} steps were trained"
    away = max(answer["away"] for answer in answers)
    if check == "near":
        if len({answer["sha256"] for answer in answers}) != 1:
            return "the workers' weights differ"
        return (
            None
            if away < alone
            else f"weights are {away:.1e} away from one process's, a lone worker's are {alone:.1e}"
        )
    bound, early = (
        {"exact": EXACT, "half": HALF}[check],
        max(answer["away_warmed"] for answer in answers),
    )
    if not early <= bound:
        return (
            f"weights are {early:.1e} away from one process's after "
            f"the warm-up, more than {bound:g}"
        )
    return (
        None
        if away <= ROUNDED * alone
        else f"weights are {away:.1e} away from one process's, a lone worker's are {alone:.1e}"
    )


def telling(reference: Mapping[str, Any], name: str) -> None:
    """Raise unless the reference tells a right worker from a lone one."""
    away = min(reference["alone"], reference["alone_warmed"])
    if away < TELLING * EXACT:
        raise RuntimeError(
            f"{name}: a lone worker is only {away:.1e} away from the reference: train more steps"
        )
