"""Agreement on the next operations: every rank works out the same answer from the same payloads.

    rank 0: submits A, B     rank 1: submits B, C          cycle 1     both have B: run B
    rank 0: submits C        rank 1: submits A             cycle 2     both have A and C: A, C

Each cycle all ranks gather what each has submitted since the cycle before. There is no coordinator
(Horovod's paper, arXiv 1802.05799, has one): the payloads are equal everywhere, so the decision is.

What all ranks have agreed on once is cached under a number, and only the number travels the next
time. The cache changes only with gathered payloads, so it is equal on all ranks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgpack

from paceline.bridges.horovod.engine.requests import (
    SET_KINDS,
    OperationKey,
    OperationRequest,
    find_disagreement,
    list_ranks,
)

CACHE_CAPACITY: Final = 1024  # as many as Horovod's HOROVOD_CACHE_CAPACITY has by default


class Agreed(NamedTuple):
    """An operation that every rank runs now, or that fails on every rank.

    Args:
        requests: What each rank asked for. Ranks that have joined are missing.
        ranks: Ranks of its process set.
        error: Why it fails; "" if it runs.
        last_joined: For a join: the rank that joined last.
    """

    key: OperationKey
    requests: dict[int, OperationRequest]
    ranks: tuple[int, ...]
    error: str = ""
    last_joined: int = -1


class CycleMessage(NamedTuple):
    """What one rank says in one cycle.

    Args:
        submitted: New requests.
        overdue: Keys for which this rank has waited until its deadline.
        shutdown: Whether this rank ends.
    """

    submitted: Sequence[OperationRequest] = ()
    overdue: Sequence[OperationKey] = ()
    shutdown: bool = False


class Controller:
    """Works out which operations all ranks have submitted.

    Args:
        size: Number of ranks.
        rank: Rank of this process.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.process_sets: dict[int, tuple[int, ...]] = {0: tuple(range(size))}
        self.pending: dict[OperationKey, dict[int, OperationRequest]] = {}
        self.ending: list[int] = []  # ranks that shut down in the last cycle
        self.cache_hits = 0
        self._rank = rank
        self._next_set = 1
        self._joined: dict[int, None] = {}  # ranks in the order in which they joined
        # for each key the number of its entry, and what each rank asked for; the oldest use first
        self._cache: OrderedDict[OperationKey, tuple[int, dict[int, OperationRequest]]]
        self._cache = OrderedDict()
        self._keys: dict[int, OperationKey] = {}  # by the number of the entry
        self._next_number = 0

    def encode_message(self, message: CycleMessage) -> bytes:
        """Encode what this rank says, with numbers in place of cached requests."""
        entries = [self._shorten(request) for request in message.submitted]
        packed: bytes = msgpack.packb([entries, message.overdue, message.shutdown])
        return packed

    def decide_cycle(self, payloads: Sequence[bytes]) -> list[Agreed]:
        """Take what all ranks said, in rank order, and return what runs now, in one order."""
        overdue: dict[OperationKey, None] = {}
        self.ending = []
        for rank, payload in enumerate(payloads):
            entries, late_keys, shutdown = msgpack.unpackb(payload)
            self.ending += [rank] * bool(shutdown)
            overdue.update((OperationKey(*key), None) for key in late_keys)
            for entry in entries:
                self._take_request(rank, entry)
        decisions = [
            decision
            for key in [*self.pending]
            if (decision := self._decide(key, overdue=key in overdue)) is not None
        ]
        for decision in decisions:
            del self.pending[decision.key]
            self._remember(decision)
            if decision.key.kind == "join":
                self._joined = {}
        return decisions

    def describe_missing(self, key: OperationKey) -> str:
        """Describe who lacks an operation: "rank 1 has not submitted it, and waits for ..."."""
        lacking = self._lacking_ranks(key)
        others = sorted(
            {
                str(other)
                for other, requests in self.pending.items()
                if any(rank in requests for rank in lacking) and other != key
            }
        )
        waiting = f"; there it waits for {', '.join(others[:5])}" if others else ""
        return f"{list_ranks(lacking)} did not submit it{waiting}"

    def _take_request(self, rank: int, entry: object) -> None:
        if isinstance(entry, int):
            request = self._cache[self._keys[entry]][1][rank]
            self.cache_hits += rank == self._rank
        else:
            assert isinstance(entry, list)
            request = OperationRequest.from_wire(entry)
        self.pending.setdefault(request.key, {})[rank] = request
        if request.key.kind == "join":
            self._joined[rank] = None

    def _shorten(self, request: OperationRequest) -> OperationRequest | int:
        number, cached = self._cache.get(request.key, (-1, {}))
        return number if cached.get(self._rank) == request else request

    def _lacking_ranks(self, key: OperationKey) -> list[int]:
        requests = self.pending[key]
        return [
            rank
            for rank in self.process_sets.get(key.process_set, ())
            if rank not in requests and (rank not in self._joined or key.kind == "join")
        ]

    def _decide(self, key: OperationKey, *, overdue: bool) -> Agreed | None:
        """Decide on one operation; None if it waits for more ranks."""
        requests, ranks = self.pending[key], self.process_sets.get(key.process_set, ())
        if any(rank not in ranks for rank in requests):
            return Agreed(
                key, requests, ranks, f"{key}: process set {key.process_set} doesn't exist"
            )
        if self._lacking_ranks(key):
            error = f"{key}: {self.describe_missing(key)} before the deadline"
            return Agreed(key, requests, ranks, error) if overdue else None
        in_order = {rank: requests[rank] for rank in ranks if rank in requests}
        absent = [rank for rank in ranks if rank not in requests]
        error = find_disagreement(in_order, absent, ranks) or self._change_sets(in_order)
        return Agreed(key, in_order, ranks, error, [*self._joined][-1] if self._joined else -1)

    def _change_sets(self, requests: dict[int, OperationRequest]) -> str:
        """Add or remove the process set that the requests ask for, and return what is wrong."""
        request = next(iter(requests.values()))
        if request.key.kind not in SET_KINDS:
            return ""
        if request.key.kind == "remove_process_set":
            return "" if self.process_sets.pop(request.numbers[0], None) else "unknown process set"
        if request.numbers in self.process_sets.values():
            return f"a process set of {list_ranks(request.numbers)} exists already"
        if not request.numbers or not {*request.numbers} <= {*self.process_sets[0]}:
            return f"a process set can't have {list_ranks(request.numbers)}"
        self.process_sets[self._next_set] = request.numbers
        self._next_set += 1
        return ""

    def _remember(self, decision: Agreed) -> None:
        """Cache the requests of a decision under a number, or mark them as used last."""
        if decision.error or len(decision.requests) < len(decision.ranks):
            return
        key = decision.key
        number, cached = self._cache.get(key, (-1, {}))
        if cached == decision.requests:
            self._cache.move_to_end(key)
            return
        self._keys.pop(number, None)
        self._cache[key] = (self._next_number, decision.requests)
        self._cache.move_to_end(key)
        self._keys[self._next_number] = key
        self._next_number += 1
        if len(self._cache) > CACHE_CAPACITY:
            _, (oldest, _) = self._cache.popitem(last=False)
            del self._keys[oldest]
