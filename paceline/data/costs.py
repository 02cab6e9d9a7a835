"""Dealing by cost, if samples differ: workers get equal sums of costs instead of equal counts.

With parts, sums are in proportion to them.

costs, the largest first     11 9 8 | 7 6 5 | 4 3 3 2 2 1 1      each goes to the worker with the
                             11     9     8                      smallest sum so far: large and
                              5     6     7                      small ones for every worker
                              3     3     4
                              2 1   2     1        sums 22 20 20

padded to the longest        1 1 2 2 3 3 4 | 5 6 7 | 8 9 | 11    cut at consecutive places: similar
count x longest                         28      21    18   11    costs go together
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
"""The cost of a sample, as the data set gives it: a number, zero or more, such as its length."""

ABOVE = 1.01  # times its part: what a worker gets at most before samples change places
TRIFLE = 1e-6  # of the mean cost: what a sample takes at least while it is dealt
EXCHANGES = 8  # for each worker, at most
HALVINGS = 40  # of the range in which the least is that a worker has to have


class PaddedCost:
    """Cost of samples that a worker pads to the longest: their count times the largest cost."""

    def __init__(self, cost: Cost) -> None:
        self._cost = cost

    def __call__(self, sample: Any) -> float:
        return self._cost(sample)


def padded(cost: Cost) -> PaddedCost:
    """Say that a worker's samples are padded to the longest of them.

    >>> import paceline as pl
    >>> by_length = pl.padded(len)      # loader = run.prepare(loader, cost=by_length)
    >>> by_length("abc")
    3

    The work of a worker is then the count of its samples times the largest of their costs. Samples
    of similar cost go to one worker, and fewer of them if they are large. So little is padded, and
    workers finish at the same time.

    Raises `DataError` for anything but a function.
    """
    if not callable(cost):
        raise DataError(f"pl.padded takes a function of a sample, such as len, and not {cost!r}")
    return PaddedCost(cost)


def deal_by_cost(costs: Sequence[float], parts: Sequence[float]) -> list[list[int]]:
    """Places of the samples of each rank, by rising cost, with sums in proportion to `parts`.

    The largest are dealt first, each to the rank that has least in proportion to its part (LPT:
    Graham, "Bounds on Multiprocessing Timing Anomalies", 1969). So counts are in proportion as
    well, as far as costs allow it, and work that a sample takes beside its cost is even, too. A
    rank whose part is zero gets none.
    """
    ranks = [rank for rank, part in enumerate(parts) if part > 0]
    shares, sums = np.array([parts[rank] for rank in ranks]), np.zeros(len(ranks))
    loads = [_Load(parts[rank]) for rank in ranks]
    # so that samples of no cost are dealt evenly, too
    trifle = TRIFLE * math.fsum(costs) / max(len(costs), 1) or 1.0
    for place in sorted(range(len(costs)), key=lambda place: (-costs[place], place)):
        least = int(np.argmin((sums + costs[place]) / shares))
        sums[least] += costs[place] + trifle
        loads[least].samples.append((costs[place], place))
    for load in loads:
        load.settle()
    _level(loads)
    dealt: list[list[int]] = [[] for _ in parts]
    for rank, load in zip(ranks, loads, strict=True):
        dealt[rank] = [place for _, place in load.samples]
    return dealt


def deal_padded(costs: Sequence[float], parts: Sequence[float]) -> list[list[int]]:
    """Places of the samples of each rank, by rising cost, for workers that pad.

    The largest value of count times largest cost, divided by the part, is as small as possible.
    Samples are cut at consecutive places of their order by cost, and larger parts get larger
    samples. A rank whose part is zero gets none.
    """
    order = sorted(range(len(costs)), key=lambda place: costs[place])
    rising = [costs[place] for place in order]
    ranks = sorted(
        (rank for rank, part in enumerate(parts) if part > 0), key=lambda rank: parts[rank]
    )
    below, enough = 0.0, len(costs) * max(costs, default=0.0) / min(parts[rank] for rank in ranks)
    for _ in range(HALVINGS):
        middle = (below + enough) / 2
        if _cut(rising, [middle * parts[rank] for rank in ranks]) is None:
            below = middle
        else:
            enough = middle
    cuts = _cut(rising, [enough * parts[rank] for rank in ranks])
    assert cuts is not None  # the first rank could have all
    dealt: list[list[int]] = [[] for _ in parts]
    for rank, (start, stop) in zip(ranks, pairwise(cuts), strict=True):
        dealt[rank] = order[start:stop]
    return dealt


def _cut(rising: Sequence[float], mosts: Sequence[float]) -> list[int] | None:
    """Places to cut at so that each piece has at most this count times largest cost.

    None if samples are left over. Each piece has at least one.
    """
    cuts = [0]
    for later, most in zip(range(len(mosts) - 1, -1, -1), mosts, strict=True):
        start = cuts[-1]
        last = max(len(rising) - later, min(start + 1, len(rising)))
        cuts.append(
            bisect_right(range(start, last), most, key=lambda at: (at + 1 - start) * rising[at])
            + start
        )
    return cuts if cuts[-1] == len(rising) else None


class _Load:
    """What a worker is given: `samples` by rising cost, and its `part` of the whole."""

    def __init__(self, part: float) -> None:
        self.part, self.samples, self.cost = part, list[tuple[float, int]](), 0.0

    def settle(self) -> None:
        """Sort the samples, which have changed, and find out what they cost."""
        self.samples.sort()
        self.cost = math.fsum(cost for cost, _ in self.samples)


def _level(loads: Sequence[_Load]) -> None:
    """Let samples change places, or move, until each worker has at most `ABOVE` its part, or
    nothing gets better by it.

    A worker that nothing makes lighter, as one sample may be more than its part, is left as it is,
    and the rest is levelled without it.
    """
    order = list(loads)
    for _ in range(EXCHANGES * len(loads)):
        order.sort(key=lambda load: load.cost / load.part)
        most = (
            ABOVE * math.fsum(load.cost for load in order) / math.fsum(load.part for load in order)
        )
        if order[-1].cost <= most * order[-1].part:
            return
        if not any(_exchange(order[-1], light) for light in order[:-1]):
            order.pop()


def _exchange(heavy: _Load, light: _Load) -> bool:
    """Give a sample of one worker to another, or exchange it for a smaller one.

    The exchange that levels them best is made. False if none does.
    """
    # to be moved, so that both are level
    wanted = (heavy.cost * light.part - light.cost * heavy.part) / (heavy.part + light.part)
    best: tuple[float, tuple[float, int], tuple[float, int] | None] | None = None
    last = -1.0
    for sample in heavy.samples:
        if sample[0] == last:
            continue
        last = sample[0]
        at = bisect_left(light.samples, (sample[0] - wanted, -1))
        for other in (*light.samples[max(0, at - 1) : at + 1], None):
            moved = sample[0] - (0.0 if other is None else other[0])
            off = abs(moved - wanted)
            if moved > 0 and off < wanted * (1 - 1e-9) and (best is None or off < best[0]):
                best = off, sample, other
    if best is None:
        return False
    _, sample, other = best
    heavy.samples.remove(sample)
    light.samples.append(sample)
    if other is not None:
        light.samples.remove(other)
        heavy.samples.append(other)
    for load in (heavy, light):
        load.settle()
    return True


class BatchDeal(NamedTuple):
    """A global batch dealt by cost: places of each rank's samples, and their costs."""

    places: list[list[int]]
    costs: list[float]  # of each rank's samples together

    @property
    def shares(self) -> list[int]:
        """How many samples each rank has."""
        return [len(places) for places in self.places]

    def of(self, batch: Any, rank: int) -> Any:
        """Return the indices of one rank's samples, where `batch` has those of the global batch."""
        places = self.places[rank]
        return (
            batch[places]
            if isinstance(batch, Tensor | np.ndarray)
            else [batch[place] for place in places]
        )


def deal_batch(
    costs: Sequence[float], parts: Callable[[float], Sequence[float]], *, pads: bool = False
) -> BatchDeal:
    """Deal a global batch with these costs.

    `parts` are those of each rank in a sum of costs; `pads`: each worker pads to the longest.
    """
    known = costs if any(costs) else [1.0] * len(costs)  # of no cost at all: by count
    places = (deal_padded if pads else deal_by_cost)(known, parts(math.fsum(known)))
    theirs = [[costs[place] for place in of] for of in places]
    return BatchDeal(
        places, [len(of) * max(of, default=0.0) if pads else math.fsum(of) for of in theirs]
    )


class SampleCosts:
    """Costs of a data set's samples; each is computed once, by one worker, and sent to the others.

    `pads`: each worker pads its samples to the longest.
    """

    def __init__(self, cost: Cost, dataset: Any) -> None:
        self._cost, self._dataset, self.pads = cost, dataset, isinstance(cost, PaddedCost)
        self._known: dict[Any, float] = {}

    def of(self, batch: Any) -> list[float]:
        """Return the costs of the samples of a batch, which are known."""
        return [self._known[_key(index)] for index in batch]

    def learn(self, batches: Sequence[Any], agreement: Agreement) -> None:
        """Find out what the samples of these batches cost. Collective.

        Raises `DataError` for a cost that is no number, zero or more, and for a batch that costs
        nothing.
        """
        keys = list(dict.fromkeys(_key(index) for batch in batches for index in batch))
        mine = np.fromiter((key in self._known for key in keys), dtype=bool, count=len(keys))
        told = [
            np.frombuffer(body, dtype=bool)
            for body in agreement.meet("costs known", mine.tobytes())
        ]
        if not all(known.all() for known in told):
            self._exchange(keys, told, agreement)
        for batch in batches:
            if len(batch) and not any(self.of(batch)):
                raise DataError(
                    f"cost= gives 0 for all samples of a batch, as for sample {batch[0]!r}: "
                    "let a cost be what a sample takes, above zero"
                )

    def _exchange(
        self,
        keys: Sequence[Any],
        told: Sequence[np.ndarray[Any, np.dtype[np.bool_]]],
        agreement: Agreement,
    ) -> None:
        """Compute unknown costs, each worker some of them, and send all known ones to the
        others.
        """
        rank, size = agreement.group.rank, agreement.group.size
        owners, unknown = list[int | None](), 0
        for place in range(len(keys)):
            knowing = [other for other in range(size) if told[other][place]]
            owners.append(
                None if len(knowing) == size else knowing[0] if knowing else unknown % size
            )
            unknown += not knowing
        before, mine, failed = rng.shared_state(), list[float](), ""
        try:
            mine += [
                self._ask(key) for key, owner in zip(keys, owners, strict=True) if owner == rank
            ]
        except DataError as error:
            failed = str(error)
        finally:
            # samples are drawn anew when they are trained on
            if rng.mark(rng.shared_state()) != rng.mark(before):
                rng.put_shared(before)
        bodies = agreement.meet(
            "costs", failed.encode() if failed else struct.pack(f"<{len(mine) + 1}d", 0.0, *mine)
        )
        for body in bodies:
            if body[:1] != b"\0":  # what a worker says in the place of its costs
                raise DataError(body.decode())
        answers = [iter(struct.unpack(f"<{len(body) // 8}d", body)[1:]) for body in bodies]
        for key, owner in zip(keys, owners, strict=True):
            if owner is not None:
                self._known[key] = next(answers[owner])

    def _ask(self, key: Any) -> float:
        if key in self._known:
            return self._known[key]
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


def _key(index: Any) -> Any:
    """Key of an index: indices of numpy and torch become numbers."""
    if isinstance(index, Tensor | np.generic):
        return index.item()
    try:
        hash(index)
    except TypeError:
        raise DataError(
            "cost= is kept by index, and this loader's sampler gives a "
            f"{type(index).__qualname__}, which can't be looked up: "
            "let it give numbers or strings"
        ) from None
    return index
