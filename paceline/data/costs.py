"""Dealing by cost: workers get equal sums of costs, or sums in proportion to their parts.

largest costs first        11 9 8 | 7 6 5 | 4 3 3 2 2 1 1      each sample goes to the worker
(`deal_by_cost`)           11     9     8                      with the smallest sum so far, so
                            5     6     7                      each gets large and small ones
                            3     3     4
                            2 1   2     1        sums 22 20 20

padded to the longest      1 1 2 2 3 3 4 | 5 6 7 | 8 9 | 11    samples of similar cost stay
(`deal_padded`)                       28      21    18   11    together: count x largest cost
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from paceline.comm.agreement import Agreement
from paceline.data import rng
from paceline.errors import DataError

Cost = Callable[[Any], float]
"""Sample of a data set -> its cost: a number, zero or more, such as a length."""

MAX_EXCESS = 1.01  # a worker's sum / its part of all costs, above which samples are exchanged
# Times the mean cost: added to each sample, so that samples of cost 0 count.
MIN_RELATIVE_COST = 1e-6
MAX_EXCHANGES = 8  # most exchanges per worker
BISECTIONS = 40  # steps of the bisection for the smallest padded cost


class PaddedCost:
    """A cost function for workers that pad their samples: count times largest cost."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def __call__(self, sample: Any) -> float:
        return self._cost(sample)


def padded(cost: Cost) -> PaddedCost:
    """Mark a cost function for batches that are padded to their longest sample.

    >>> import paceline as pl
    >>> by_length = pl.padded(len)      # loader = run.prepare(loader, cost=by_length)
    >>> by_length("abc")
    3

    The work of a worker is then the number of its samples times the largest of their costs. Samples
    of similar cost go to one worker, and large samples in small numbers. So there is little
    padding, and workers finish at the same time.

    Raises:
        DataError: The cost isn't a function.
    """
    if not callable(cost):
        raise DataError(f"pl.padded takes a function of a sample, such as len, and not {cost!r}")
    return PaddedCost(cost)


def deal_by_cost(costs: Sequence[float], parts: Sequence[float]) -> list[list[int]]:
    """Deal samples so that the costs of ranks sum up in proportion to `parts`.

    The largest samples are dealt first, each to the rank with the smallest sum in proportion to its
    part (LPT: Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). This keeps counts in
    proportion too, as far as costs allow it, and so the work per sample that its cost leaves out.

    Returns:
        Places in `costs` of each rank's samples, by rising cost. None for a rank whose part is 0.
    """
    ranks = [rank for rank, part in enumerate(parts) if part > 0]
    shares, sums = np.array([parts[rank] for rank in ranks]), np.zeros(len(ranks))
    loads = [_Load(parts[rank]) for rank in ranks]
    # Samples of cost 0 are dealt evenly, too.
    trifle = MIN_RELATIVE_COST * math.fsum(costs) / max(len(costs), 1) or 1.0
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        least = int(np.argmin((sums + costs[place]) / shares))
        sums[least] += costs[place] + trifle
        loads[least].samples.append((costs[place], place))
    for load in loads:
        load.sort_samples()
    _level_loads(loads)
    dealt: list[list[int]] = [[] for _ in parts]
    for rank, load in zip(ranks, loads, strict=True):
        dealt[rank] = [place for _, place in load.samples]
    return dealt


def deal_padded(costs: Sequence[float], parts: Sequence[float]) -> list[list[int]]:
    """Deal samples to workers that pad: the largest padded cost / part is as small as possible.

    The padded cost of a rank is its count times its largest cost. Samples are sorted by cost and
    cut into one piece per rank; larger parts get larger samples.

    Returns:
        Places in `costs` of each rank's samples, by rising cost. None for a rank whose part is 0.
    """
    order = sorted(range(len(costs)), key=lambda place: costs[place])
    rising = [costs[place] for place in order]
    ranks = sorted(
        (rank for rank, part in enumerate(parts) if part > 0), key=lambda rank: parts[rank]
    )
    # Bisect for the smallest limit, per unit of a part, with which no sample is left over.
    below, enough = 0.0, len(costs) * max(costs, default=0.0) / min(parts[rank] for rank in ranks)
    for _ in range(BISECTIONS):
        middle = (below + enough) / 2
        if _cut_sorted(rising, [middle * parts[rank] for rank in ranks]) is None:
            below = middle
        else:
            enough = middle
    cuts = _cut_sorted(rising, [enough * parts[rank] for rank in ranks])
    assert cuts is not None  # with the first limit, one rank could have all samples
    dealt: list[list[int]] = [[] for _ in parts]
    for rank, (start, stop) in zip(ranks, pairwise(cuts), strict=True):
        dealt[rank] = order[start:stop]
    return dealt


def _cut_sorted(rising: Sequence[float], mosts: Sequence[float]) -> list[int] | None:
    """Cut sorted costs into pieces, each with the padded cost `mosts[i]` at most.

    Returns the bounds of the pieces, or None if samples are left over.
    """
    cuts = [0]
    for pieces_after, most in zip(range(len(mosts) - 1, -1, -1), mosts, strict=True):
        start = cuts[-1]
        # Leave at least one sample to each later piece, as long as there are enough.
        last = max(len(rising) - pieces_after, min(start + 1, len(rising)))
        # The padded cost rises with each further sample, so the end can be bisected.
        cuts.append(
            bisect_right(range(start, last), most, key=lambda end: (end + 1 - start) * rising[end])
            + start
        )
    return cuts if cuts[-1] == len(rising) else None


class _Load:
    """The samples of one worker, as (cost, place) by rising cost."""

    def __init__(self, part: float) -> None:
        self.part, self.samples, self.cost = part, list[tuple[float, int]](), 0.0

    def sort_samples(self) -> None:
        """Sort the samples after a change, and sum up their costs."""
        self.samples.sort()
        self.cost = math.fsum(cost for cost, _ in self.samples)


def _level_loads(loads: Sequence[_Load]) -> None:
    """Exchange samples until the sum of each worker is at most `MAX_EXCESS` times its part.

    If no exchange makes the heaviest worker lighter (one sample may be more than its part), it is
    left as it is, and the other workers are levelled.
    """
    order = list(loads)
    for _ in range(MAX_EXCHANGES * len(loads)):
        order.sort(key=lambda load: load.cost / load.part)
        most = (
            MAX_EXCESS
            * math.fsum(load.cost for load in order)
            / math.fsum(load.part for load in order)
        )
        if order[-1].cost <= most * order[-1].part:
            return
        if not any(_exchange_samples(order[-1], light) for light in order[:-1]):
            order.pop()


def _exchange_samples(heavy: _Load, light: _Load) -> bool:
    """Move a sample from one worker to another, or exchange it for a smaller one.

    Of all such exchanges, makes the one that levels the two best; False if none does.
    """
    # Cost that has to move so that both have the same sum in proportion to their parts.
    wanted = (heavy.cost * light.part - light.cost * heavy.part) / (heavy.part + light.part)
    # Try each different cost of the heavy worker's samples once.
    best: tuple[float, tuple[float, int], tuple[float, int] | None] | None = None
    last = -1.0
    for sample in heavy.samples:
        if sample[0] == last:
            continue
        last = sample[0]
        # Candidates: the two samples around the ideal one, and none in return.
        nearest = bisect_left(light.samples, (sample[0] - wanted, -1))
        for other in (*light.samples[max(0, nearest - 1) : nearest + 1], None):
            moved = sample[0] - (0.0 if other is None else other[0])
            distance = abs(moved - wanted)
            # Smaller than now by more than rounding, so that exchanges come to an end.
            if (
                moved > 0
                and distance < wanted * (1 - 1e-9)
                and (best is None or distance < best[0])
            ):
                best = distance, sample, other
    if best is None:
        return False
    _, sample, other = best
    heavy.samples.remove(sample)
    light.samples.append(sample)
    if other is not None:
        light.samples.remove(other)
        heavy.samples.append(other)
    for load in (heavy, light):
        load.sort_samples()
    return True


class BatchDeal(NamedTuple):
    """A global batch dealt by cost."""

    places: list[list[int]]  # per rank: places of its samples in the batch
    costs: list[float]  # per rank: cost of its samples together

    @property
    def shares(self) -> list[int]:
        """Number of samples of each rank."""
        return [len(places) for places in self.places]

    def indices_of(self, batch: Any, rank: int) -> Any:
        """Select the indices of one rank's samples from those of the global batch."""
        places = self.places[rank]
        return (
            batch[places]
            if isinstance(batch, Tensor | np.ndarray)
            else [batch[place] for place in places]
        )


def deal_batch(
    costs: Sequence[float], parts: Callable[[float], Sequence[float]], *, pads: bool = False
) -> BatchDeal:
    """Deal a global batch by cost.

    Args:
        costs: Cost of each sample.
        parts: Sum of costs -> part of each rank in it.
        pads: Whether each worker pads its samples to the longest. Default: False.
    """
    # If all samples cost 0, deal by count.
    dealt_costs = costs if any(costs) else [1.0] * len(costs)
    places = (deal_padded if pads else deal_by_cost)(dealt_costs, parts(math.fsum(dealt_costs)))
    costs_by_rank = [[costs[place] for place in rank_places] for rank_places in places]
    return BatchDeal(
        places,
        [
            len(rank_costs) * max(rank_costs, default=0.0) if pads else math.fsum(rank_costs)
            for rank_costs in costs_by_rank
        ],
    )


class SampleCosts:
    """Costs of a data set's samples, by index.

    One worker computes the cost of a sample, once, and sends it to all others. `pads` says whether
    each worker pads its samples to the longest.
    """

    def __init__(self, cost: Cost, dataset: Any) -> None:
        self._cost, self._dataset, self.pads = cost, dataset, isinstance(cost, PaddedCost)
        self._cost_by_key: dict[Any, float] = {}

    def costs_of(self, batch: Any) -> list[float]:
        """Look up the costs of a batch's samples, which `exchange_costs` has learnt."""
        return [self._cost_by_key[_index_key(index)] for index in batch]

    def exchange_costs(self, batches: Sequence[Any], agreement: Agreement) -> None:
        """Compute and exchange the costs of these batches. Collective.

        Raises:
            DataError: A cost is negative or no number, or a whole batch costs nothing.
        """
        keys = list(dict.fromkeys(_index_key(index) for batch in batches for index in batch))
        # A worker that has just joined knows no costs, so workers first say which they know.
        own = np.fromiter((key in self._cost_by_key for key in keys), dtype=bool, count=len(keys))
        known_by_rank = [
            np.frombuffer(body, dtype=bool) for body in agreement.meet("costs known", own.tobytes())
        ]
        if not all(is_known.all() for is_known in known_by_rank):
            self._exchange_unknown(keys, known_by_rank, agreement)
        for batch in batches:
            if len(batch) and not any(self.costs_of(batch)):
                raise DataError(
                    f"cost= gives 0 for all samples of a batch, as for sample {batch[0]!r}: "
                    "give samples a cost above zero"
                )

    def _exchange_unknown(
        self,
        keys: Sequence[Any],
        known_by_rank: Sequence[np.ndarray[Any, np.dtype[np.bool_]]],
        agreement: Agreement,
    ) -> None:
        """Send costs that some workers lack; compute unknown ones, each worker some of them."""
        rank, size = agreement.group.rank, agreement.group.size
        # The owner of a cost sends it: the first rank that knows it, or ranks in turn if none does.
        # None: all know it.
        owners, unknown = list[int | None](), 0
        for place in range(len(keys)):
            knowing = [other for other in range(size) if known_by_rank[other][place]]
            owners.append(
                None if len(knowing) == size else knowing[0] if knowing else unknown % size
            )
            unknown += not knowing
        before, own_costs, failure = rng.get_shared_state(), list[float](), ""
        try:
            own_costs += [
                self._compute_cost(key)
                for key, owner in zip(keys, owners, strict=True)
                if owner == rank
            ]
        except DataError as error:
            # Raised on all workers below, as they wait for this one.
            failure = str(error)
        finally:
            # Reading samples may draw from the shared generators; training must draw the same.
            if rng.mark_state(rng.get_shared_state()) != rng.mark_state(before):
                rng.set_shared_state(before)
        # A leading 0.0 has a first byte of 0, which no error text begins with.
        answer = (
            failure.encode() if failure else struct.pack(f"<{len(own_costs) + 1}d", 0.0, *own_costs)
        )
        bodies = agreement.meet("costs", answer)
        for body in bodies:
            if body[:1] != b"\0":
                raise DataError(body.decode())
        answers = [iter(struct.unpack(f"<{len(body) // 8}d", body)[1:]) for body in bodies]
        for key, owner in zip(keys, owners, strict=True):
            if owner is not None:
                self._cost_by_key[key] = next(answers[owner])

    def _compute_cost(self, key: Any) -> float:
        if key in self._cost_by_key:
            return self._cost_by_key[key]
        sample = self._dataset[key]
        try:
            cost = float(self._cost(sample))
        except Exception as error:  # a script's own function may raise anything
            raise DataError(
                f"cost= failed on sample {key!r}: {type(error).__name__}: {error}"
            ) from error
        if not 0 <= cost < math.inf:
            raise DataError(
                f"cost= gives {cost} for sample {key!r}: a cost is a number, "
                "zero or more, such as a length"
            )
        return cost


def _index_key(index: Any) -> Any:
    """Convert an index to a key: indices of numpy and torch become numbers."""
    if isinstance(index, Tensor | np.generic):
        return index.item()
    try:
        hash(index)
    except TypeError:
        raise DataError(
            "cost= keeps costs by index, and this loader's sampler gives a "
            f"{type(index).__qualname__}, which can't be looked up: "
            "let it give numbers or strings"
        ) from None
    return index
