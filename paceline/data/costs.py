"""Dealing by cost, where samples differ: workers get equal sums of costs, or sums in proportion to their parts, instead of equal counts.

costs, sorted     1 1 2 2 3 3 4 5 | 6 7 8 | 9 11      cut at consecutive places: what is alike goes together, and little is padded
sums              21                21      20

Where a few large samples can't be cut evenly by that, samples change places until no sum is far too large.
"""

from __future__ import annotations

import math
import struct
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from paceline.comm.agreement import Agreement
from paceline.data import rng
from paceline.errors import DataError

Cost = Callable[[Any], float]
"""The cost of a sample, as the data set gives it: a number, zero or more, such as its length."""

ABOVE = 1.02  # times its part: what a worker gets at most before samples change places
EXCHANGES = 8  # for each worker, at most


def deal_by_cost(costs: Sequence[float], parts: Sequence[float]) -> list[list[int]]:
    """Return the places of the samples of each rank, by rising cost, so that sums of costs are in proportion to `parts`.

    Larger parts get larger samples, so that counts differ less. A sample that is more than the largest part is dealt alone, and what is
    left to the ranks that are left. A rank whose part is zero gets none.
    """
    dealt: list[list[int]] = [[] for _ in parts]
    order = sorted(range(len(costs)), key=lambda place: costs[place])
    ranks = sorted((rank for rank, part in enumerate(parts) if part > 0), key=lambda rank: parts[rank])
    sums = [0.0, *accumulate(costs[place] for place in order)]
    ends = list(accumulate(parts[rank] for rank in ranks))
    while len(ranks) > 1 and order and costs[order[-1]] * ends[-1] > parts[ranks[-1]] * sums[-1]:
        dealt[ranks.pop()] = [order.pop()]
        ends.pop()
        sums.pop()
    loads, start = list[_Load](), 0
    for end in ends:
        stop = _nearest(sums, end / ends[-1] * sums[-1], start)
        loads.append(_Load(parts[ranks[len(loads)]] / ends[-1], [(costs[place], place) for place in order[start:stop]]))
        start = stop
    loads[-1].samples += [(costs[place], place) for place in order[start:]]  # of no cost: its sum stays
    _level(loads)
    for rank, load in zip(ranks, loads, strict=True):
        dealt[rank] = [place for _, place in load.samples]
    return dealt


def _nearest(sums: Sequence[float], wanted: float, start: int) -> int:
    """Return the place, from `start` on, whose sum is nearest to what is wanted."""
    after = min(max(start, bisect_left(sums, wanted)), len(sums) - 1)
    return after - 1 if after > start and wanted - sums[after - 1] <= sums[after] - wanted else after


class _Load:
    """What a worker is given: `samples` by rising cost, and its `part` of the whole."""

    def __init__(self, part: float, samples: list[tuple[float, int]]) -> None:
        self.part, self.samples, self.cost = part, samples, 0.0
        self.add_up()

    def add_up(self) -> None:
        """Find out what the samples cost, which have changed."""
        self.cost = math.fsum(cost for cost, _ in self.samples)


def _level(loads: Sequence[_Load]) -> None:
    """Let samples change places, or move, until each worker has at most `ABOVE` its part, or nothing gets better by it.

    A worker that nothing makes lighter, as one sample may be more than its part, is left as it is, and the rest is levelled without it.
    """
    order = list(loads)
    for _ in range(EXCHANGES * len(loads)):
        order.sort(key=lambda load: load.cost / load.part)
        most = ABOVE * math.fsum(load.cost for load in order) / math.fsum(load.part for load in order)
        if order[-1].cost <= most * order[-1].part:
            return
        if not any(_exchange(order[-1], light) for light in order[:-1]):
            order.pop()


def _exchange(heavy: _Load, light: _Load) -> bool:
    """Give a sample of the one to the other, or exchange it for a smaller one, whichever levels them best. False where nothing does."""
    wanted = (heavy.cost * light.part - light.cost * heavy.part) / (heavy.part + light.part)  # to be moved, so that both are level
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
        load.samples.sort()
        load.add_up()
    return True


class MicroBatchDeal(NamedTuple):
    """A micro-batch that is dealt by cost: the places in the global batch of each rank's samples, and what they cost."""

    first: int  # the place of its first sample
    places: list[list[int]]
    costs: list[float]  # of each rank

    @property
    def shares(self) -> list[int]:
        """How many samples each rank has."""
        return [len(places) for places in self.places]

    @property
    def rows(self) -> list[list[int]]:
        """The places of each rank's samples in this micro-batch."""
        return [[place - self.first for place in places] for places in self.places]

    def of(self, batch: Any, rank: int) -> Any:
        """Return the indices of one rank's samples, where `batch` has those of the global batch."""
        places = self.places[rank]
        return batch[places] if isinstance(batch, Tensor | np.ndarray) else [batch[place] for place in places]


def deal_micros(
    costs: Sequence[float], spans: Iterable[tuple[int, int]], parts: Callable[[float], Sequence[float]]
) -> list[MicroBatchDeal]:
    """Deal the micro-batches of a global batch with these costs: places `spans` of it. `parts` are those of each rank in a sum of costs."""
    dealt = []
    for first, last in spans:
        mine = costs[first:last]
        known = mine if any(mine) else [1.0] * len(mine)  # of no cost at all: by count
        places = deal_by_cost(known, parts(math.fsum(known)))
        dealt.append(
            MicroBatchDeal(
                first,
                [[first + place for place in of] for of in places],
                [math.fsum(mine[place] for place in of) for of in places],
            )
        )
    return dealt


class SampleCosts:
    """The costs of the samples of a data set: each is asked for once, by one of the workers, which tells the others."""

    def __init__(self, cost: Cost, dataset: Any) -> None:
        self._cost, self._dataset = cost, dataset
        self._known: dict[Any, float] = {}

    def of(self, batch: Any) -> list[float]:
        """Return the costs of the samples of a batch, which are known."""
        return [self._known[_key(index)] for index in batch]

    def learn(self, batches: Sequence[Any], agreement: Agreement) -> None:
        """Find out what the samples of these batches cost. Collective.

        Raises `DataError` for a cost that is no number, zero or more, and for a batch that costs nothing.
        """
        keys = list(dict.fromkeys(_key(index) for batch in batches for index in batch))
        mine = np.fromiter((key in self._known for key in keys), dtype=bool, count=len(keys))
        told = [np.frombuffer(body, dtype=bool) for body in agreement.meet("costs known", mine.tobytes())]
        if not all(known.all() for known in told):
            self._exchange(keys, told, agreement)
        for batch in batches:
            if len(batch) and not any(self.of(batch)):
                raise DataError(
                    f"cost= gives 0 for all samples of a batch, as for sample {batch[0]!r}: let a cost be what a sample takes, above zero"
                )

    def _exchange(self, keys: Sequence[Any], told: Sequence[np.ndarray[Any, np.dtype[np.bool_]]], agreement: Agreement) -> None:
        """Ask for what nobody knows, each worker for some of it, and tell what some know to the others."""
        rank, size = agreement.group.rank, agreement.group.size
        owners, unknown = list[int | None](), 0
        for place in range(len(keys)):
            knowing = [other for other in range(size) if told[other][place]]
            owners.append(None if len(knowing) == size else knowing[0] if knowing else unknown % size)
            unknown += not knowing
        before, mine, failed = rng.shared_state(), list[float](), ""
        try:
            mine += [self._ask(key) for key, owner in zip(keys, owners, strict=True) if owner == rank]
        except DataError as error:
            failed = str(error)
        finally:
            if rng.mark(rng.shared_state()) != rng.mark(before):  # samples are drawn anew when they are trained on
                rng.put_shared(before)
        bodies = agreement.meet("costs", failed.encode() if failed else struct.pack(f"<{len(mine) + 1}d", 0.0, *mine))
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
            raise DataError(f"cost= failed on sample {key!r}: {type(error).__name__}: {error}") from error
        if not 0 <= cost < math.inf:
            raise DataError(f"cost= gives {cost} for sample {key!r}: a cost is a number, zero or more, such as a length")
        return cost


def _key(index: Any) -> Any:
    """Return what an index is known by: those of numpy and of torch are numbers."""
    if isinstance(index, Tensor | np.generic):
        return index.item()
    try:
        hash(index)
    except TypeError:
        raise DataError(
            f"cost= is kept by index, and this loader's sampler gives a {type(index).__qualname__}, which can't be looked up: "
            "let it give numbers or strings"
        ) from None
    return index
