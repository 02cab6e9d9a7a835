"""Divides a global batch into shares: the number of samples of each worker, as plain integers.

batch of 10 samples     equal on 3 workers      4, 3, 3
                        ratios 3 : 1 : 1        6, 2, 2
                        by speed                see `balance`
"""

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
"""A policy: number of samples in a global batch -> number of samples for each rank.

The result depends on nothing else.
"""

Auto = Literal["auto"]
RequestedShares = Shares | Sequence[float] | Auto | None
"""Shares as a caller gives them: a policy, one number per worker, "auto" (by measured speeds), or
None (equal).
"""

PROBE_SIZES = (1, 2, 3, 7, 43, 64, 1000)  # batch sizes by which policies are compared
FINE_BATCH = 10_000  # samples for which integer shares show a policy's ratios exactly enough


def divide_equally(batch: int, size: int) -> tuple[int, ...]:
    """Equal shares of `batch` samples for `size` workers.

    They differ by one at most; first ranks have the larger ones.
    """
    return tuple(stop - start for start, stop in piece_bounds(batch, size))


def divide_proportionally(batch: int, ratios: Sequence[float]) -> tuple[int, ...]:
    """Integer shares as near to `ratios` as possible (largest remainder; first ranks win ties).

    If `batch` is the sum of integer ratios, the shares are the ratios. A ratio of zero gives an
    empty share.
    """
    # Fractions, as rounding of floats could give workers different shares.
    exact = [Fraction(ratio) for ratio in ratios]
    ratio_sum = sum(exact)
    if ratio_sum <= 0 or any(ratio < 0 for ratio in exact):
        raise DataError(
            f"shares are {list(ratios)}: they must be zero or more, and at least one above zero"
        )
    exact_shares = [batch * ratio / ratio_sum for ratio in exact]
    shares = [int(part) for part in exact_shares]
    # Rounding down has left some samples over. They go to the largest remainders.
    by_remainder = sorted(
        range(len(exact_shares)), key=lambda rank: (shares[rank] - exact_shares[rank], rank)
    )
    for rank in by_remainder[: batch - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


def make_policy(shares: RequestedShares, size: int) -> Shares:
    """Convert shares to a policy.

    Args:
        shares: None (equal), one number per worker (proportional), a function (its results are
            checked), or "auto" (equal until speeds are known).
        size: Number of workers.

    Raises:
        DataError: Other than one number per worker, or no such kind of shares.
    """
    if isinstance(shares, str) and shares != "auto":
        raise DataError(
            f"shares is {shares!r}: give 'auto', one number per worker, "
            "or a function of the batch size"
        )
    if shares is None or shares == "auto":
        return lru_cache(maxsize=128)(partial(divide_equally, size=size))
    if isinstance(shares, SpeedShares) and len(shares.curves) == size:
        return shares
    if callable(shares):
        return lru_cache(maxsize=128)(partial(_call_checked, shares, size))
    ratios = tuple(shares)
    if len(ratios) != size:
        raise DataError(
            f"shares are {list(ratios)}, {len(ratios)} numbers for {size} workers: "
            "give one number per worker, in rank order"
        )
    # Raises an error for bad ratios now, and not at the first batch.
    divide_proportionally(0, ratios)
    return lru_cache(maxsize=128)(partial(divide_proportionally, ratios=ratios))


def fractional_shares(shares: Shares, total: float) -> tuple[float, ...]:
    """Fractional share of each rank in `total` units, by a policy's own `parts` if it has one."""
    own_parts = getattr(shares, "parts", None)
    if own_parts is not None:
        return tuple(own_parts(total))
    return tuple(share * total / FINE_BATCH for share in shares(FINE_BATCH))


def share_bounds(shares: Sequence[int]) -> list[tuple[int, int]]:
    """(start, stop) of each rank's samples in the global batch: contiguous, in rank order."""
    stops = [0]
    for share in shares:
        stops.append(stops[-1] + share)
    return list(pairwise(stops))


def probe_policy(shares: Shares, batch: int | None) -> list[list[float]]:
    """Apply a policy to some batch sizes, so that workers can compare their policies.

    `batch`: the usual size; None if it isn't known.
    """
    if isinstance(shares, SpeedShares):
        return [*([curve.fixed, curve.per_unit] for curve in shares.curves), [shares.per_sample]]
    sizes = PROBE_SIZES if batch is None else (batch, *PROBE_SIZES)
    return [list(shares(size)) for size in sizes]


def _call_checked(shares: Shares, size: int, batch: int) -> tuple[int, ...]:
    answer = tuple(shares(batch))
    is_valid = (
        len(answer) == size
        and all(type(share) is int and share >= 0 for share in answer)
        and sum(answer) == batch
    )
    if not is_valid:
        raise DataError(
            f"the shares of a batch of {batch} are {answer}: they must be {size} integers, zero or "
            f"more, that sum to {batch}"
        )
    return answer
