"""Shares: how many samples of a global batch each worker takes, as plain integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import lru_cache, partial
from itertools import pairwise
from typing import Literal

from paceline.comm.group_protocol import piece_bounds
from paceline.data.balance import SpeedShares
from paceline.errors import DataError

Shares = Callable[[int], tuple[int, ...]]
"""A policy: the number of samples in a global batch -> how many of them each rank takes.

It depends on nothing else.
"""

Auto = Literal["auto"]
AskedShares = Shares | Sequence[float] | Auto | None
"""Shares as a caller says them: a policy, one number per worker, by the speeds that are
measured, or equal.
"""

PROBES = (1, 2, 3, 7, 43, 64, 1000)
FINE = 10_000  # samples of which shares are near enough to what a policy means


def equal(batch: int, size: int) -> tuple[int, ...]:
    """Shares of `size` workers in `batch` samples; they differ by one at most, the first are
    larger.
    """
    return tuple(stop - start for start, stop in piece_bounds(batch, size))


def proportional(batch: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Integer shares as near to `ratios` as possible (largest remainder; first ranks win ties).

    If `batch` is the sum of integer ratios, the shares are the ratios. A ratio of zero gives an
    empty share.
    """
    exact = [Fraction(ratio) for ratio in ratios]
    whole = sum(exact)
    if whole <= 0 or any(ratio < 0 for ratio in exact):
        raise DataError(
            f"shares are {list(ratios)}: they must be zero or more, and at least one above zero"
        )
    parts = [batch * ratio / whole for ratio in exact]
    shares = [int(part) for part in parts]
    order = sorted(range(len(parts)), key=lambda rank: (shares[rank] - parts[rank], rank))
    for rank in order[: batch - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


def policy(shares: AskedShares, size: int) -> Shares:
    """Make a policy of `shares`: None is `equal`, numbers are `proportional`, a function is
    checked.

    "auto" is `equal` until speeds are known. Raises `DataError` if the number of shares is not
    `size`.
    """
    if isinstance(shares, str) and shares != "auto":
        raise DataError(
            f"shares is {shares!r}: give 'auto', one number per worker, "
            "or a function of the batch size"
        )
    if shares is None or shares == "auto":
        return lru_cache(maxsize=128)(partial(equal, size=size))
    if isinstance(shares, SpeedShares) and len(shares.curves) == size:
        return shares
    if callable(shares):
        return lru_cache(maxsize=128)(partial(_checked, shares, size))
    ratios = tuple(shares)
    if len(ratios) != size:
        raise DataError(
            f"shares are {list(ratios)}, {len(ratios)} numbers for {size} workers: "
            "give one number per worker, in rank order"
        )
    proportional(0, ratios)
    return lru_cache(maxsize=128)(partial(proportional, ratios=ratios))


def parts(shares: Shares, total: float) -> tuple[float, ...]:
    """Part of each rank in `total` units of small pieces; a policy's own `parts` has priority."""
    own = getattr(shares, "parts", None)
    if own is not None:
        return tuple(own(total))
    return tuple(share * total / FINE for share in shares(FINE))


def spans(shares: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of each rank's samples in the global batch: contiguous, in rank order."""
    stops = [0]
    for share in shares:
        stops.append(stops[-1] + share)
    return list(pairwise(stops))


def probe(shares: Shares, batch: int | None) -> list[list[float]]:
    """Shares of some batches by a policy, to compare between workers; `batch` is the usual size."""
    if isinstance(shares, SpeedShares):
        return [*([curve.fixed, curve.per_unit] for curve in shares.curves), [shares.per_sample]]
    sizes = PROBES if batch is None else (batch, *PROBES)
    return [list(shares(size)) for size in sizes]


def _checked(shares: Shares, size: int, batch: int) -> tuple[int, ...]:
    answer = tuple(shares(batch))
    right = (
        len(answer) == size
        and all(type(share) is int and share >= 0 for share in answer)
        and sum(answer) == batch
    )
    if not right:
        raise DataError(
            f"the shares of a batch of {batch} are {answer}: they must be {size} integers, zero or "
            f"more, that sum to {batch}"
        )
    return answer
