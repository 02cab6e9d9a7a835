"""Access to a stream: each worker reads everything, the first worker of a host reads for all, or the stream is sharded by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.comm.agreement import Agreement
from paceline.comm.group import Group, pieces
from paceline.data.batches import cut, rows
from paceline.data.empty_batch import collated_empty
from paceline.data.reader import Cuts, ReadResult, recut
from paceline.data.serialization import flatten, pack, room, unflatten, unpack
from paceline.data.spec import GlobalBatch, LoaderSpec, MicroBatchPart, drained, rows_part, source, whole_rows
from paceline.errors import DataError


@dataclass
class StreamPosition:
    """The position in a stream: of each DataLoader worker the batches consumed, whether it has ended, its mark and what the stream says."""

    numbers: list[int]
    ended: list[bool]
    marks: list[int]
    states: list[Any]
    worker: int = 0  # the reader of the next batch
    every: list[dict[str, Any]] = field(default_factory=list)  # the cursors of all ranks, where they differ

    @classmethod
    def at_start(cls, workers: int) -> StreamPosition:
        """Make the position before the first batch."""
        return cls([0] * workers, [False] * workers, [0] * workers, [None] * workers)

    def copy(self) -> StreamPosition:
        """Make another one, at the same place."""
        return StreamPosition(list(self.numbers), list(self.ended), list(self.marks), list(self.states), self.worker, self.every)

    def dump(self) -> dict[str, Any]:
        """Write as plain values."""
        return {"numbers": self.numbers, "ended": self.ended, "marks": self.marks, "states": self.states, "worker": self.worker}

    def fill(self, saved: dict[str, Any]) -> None:
        """Go to where `dump` was called."""
        if len(saved["numbers"]) != len(self.numbers):
            raise DataError(
                f"the state of a stream was saved with {len(saved['numbers'])} DataLoader workers, and there are {len(self.numbers)} here: "
                "each of them reads its own part of the stream, so give num_workers as it was"
            )
        self.numbers, self.ended = list(saved["numbers"]), list(saved["ended"])
        self.marks, self.states, self.worker = list(saved["marks"]), list(saved["states"]), int(saved["worker"])


Fetch = Callable[[], ReadResult | None]  # the next global batch; None at the end of the stream


class StreamAccess(Protocol):
    """The differences between the ways to read a stream."""

    @property
    def reads(self) -> bool:
        """Whether this worker reads."""
        ...

    @property
    def cost(self) -> str:
        """The cost to announce to the user."""
        ...

    @property
    def wanted(self) -> tuple[int, ...]:
        """The ranks, in the cuts, whose parts this worker's reader makes."""
        ...

    def asked(self) -> tuple[int | None, Cuts]:
        """Return the samples to be read at a time (None: whole batches come), and how they are cut."""
        ...

    def step(self, fetch: Fetch, cursor: StreamPosition) -> GlobalBatch | None:
        """Return the next step, which moves `cursor`; None where the stream has ended for all. `fetch` is called where `reads`."""
        ...

    def saved(self, cursor: StreamPosition) -> list[dict[str, Any]]:
        """Return the cursors that a state holds."""
        ...

    def restored(self, cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
        """Move `cursor` to where `saved` was called."""
        ...


class ReadAll:
    """Reads everything on each worker, which takes its share."""

    reads = True

    def __init__(self, terms: LoaderSpec) -> None:
        self.terms = terms
        self.wanted = (terms.rank,)
        size = terms.agreement.group.size
        self.cost = f'every worker reads the whole stream, which is read {size} times; readers="host" reads it once per host'

    def asked(self) -> tuple[int | None, Cuts]:
        batch = self.terms.loader.batch_size
        return batch, () if batch is None else tuple(self.terms.micros(batch))

    def step(self, fetch: Fetch, cursor: StreamPosition) -> GlobalBatch | None:
        dealt = fetch()
        if dealt is None:
            return None
        if self.terms.loader.batch_size is None:
            return whole_rows(self.terms, dealt.whole)
        return GlobalBatch(dealt.samples, len(dealt.parts[0]), drained(dealt.parts[0]), _sources(self.terms, dealt.samples))

    def saved(self, cursor: StreamPosition) -> list[dict[str, Any]]:
        return [cursor.dump()]

    def restored(self, cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
        _one(cursor, saved)


class FirstOfHostReads:
    """Reads on the first worker of each host, which hands the others their shares: structure and sizes first, then all tensors as one."""

    def __init__(self, terms: LoaderSpec, local: Group) -> None:
        self.terms = terms
        self._local = local
        self._agreement = Agreement(local)
        ranks = tuple(local.global_rank(rank) for rank in range(local.size))
        self.reads = ranks[0] == terms.rank
        self.wanted = ranks
        self._place = ranks.index(terms.rank)
        self._sends: list[Tensor] = []
        self._mine: list[MicroBatchPart] = []
        self.cost = "the first worker of each host reads the whole stream and hands the others their shares"

    def asked(self) -> tuple[int | None, Cuts]:
        batch = self.terms.loader.batch_size
        return batch, () if batch is None else tuple(self.terms.micros(batch))

    def step(self, fetch: Fetch, cursor: StreamPosition) -> GlobalBatch | None:

        def tell() -> bytes:
            return self._agreement.tell("shares of a stream", lambda: self._read(fetch, cursor))

        header = tell() if self.reads else self.terms.agreement.wait(tell, "shares of a stream")
        count, position, heads, bodies = unpack(header)
        if not self.reads:
            cursor.fill(position)
        if count is None:
            return None
        parts = self._mine if self.reads else self._receive(heads[self._place - 1], bodies[self._place - 1])
        if self.reads:
            sends = [(rank + 1, buffer) for rank, buffer in enumerate(self._sends) if buffer.numel()]
            self._local.exchange(sends, []).wait()
        return GlobalBatch(count, len(parts), drained(parts), _sources(self.terms, count))

    def saved(self, cursor: StreamPosition) -> list[dict[str, Any]]:
        return [cursor.dump()]

    def restored(self, cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
        _one(cursor, saved)

    def _read(self, fetch: Fetch, cursor: StreamPosition) -> bytes:
        dealt = fetch()
        if dealt is None:
            return pack((None, cursor.dump(), [], []), what="the state of the stream")
        count, parts = (dealt.samples, dealt.parts) if dealt.whole is None else self._rows(dealt.whole)
        self._mine, self._sends = parts[0], []
        heads, bodies = [], []
        for others in parts[1:]:
            tensors: list[Tensor] = []
            bodies.append(pack([list(part) for part in others], what="a batch", apart=tensors))
            head, buffer = flatten(tensors)
            heads.append(head)
            self._sends.append(buffer)
        return pack((count, cursor.dump(), [[list(pair) for pair in head] for head in heads], bodies), what="the state of the stream")

    def _rows(self, item: Any) -> tuple[int, list[list[MicroBatchPart]]]:
        count = whole_rows(self.terms, item).global_batch
        return count, [[rows_part(self.terms, item, count, micro, rank) for micro in self.terms.micros(count)] for rank in self.wanted]

    def _receive(self, head: list[list[Any]], body: bytes) -> list[MicroBatchPart]:
        heads = [(str(kind), list(shape)) for kind, shape in head]
        buffer = torch.empty(room(heads), dtype=torch.uint8)
        self._local.exchange([], [(0, buffer)] if buffer.numel() else []).wait()
        return [MicroBatchPart(*values) for values in unpack(body, unflatten(heads, buffer))]


class SelfSharded:
    """Takes the samples that the stream gives each rank. Each step announces their number; a worker whose stream has ended gets ghosts."""

    reads = True
    wanted: tuple[int, ...] = (0,)
    cost = 'shard="mine": each worker reads its own part, and the workers tell each other at every step how many samples they have'

    def __init__(self, terms: LoaderSpec) -> None:
        self.terms = terms
        self._last: Any = None  # a batch to be a ghost
        self._none: Any = None  # one of no rows

    def asked(self) -> tuple[int | None, Cuts]:
        batch = self.terms.loader.batch_size
        if batch is None:
            return None, ()
        shares = self.terms.shares(batch)
        if 0 in shares:
            raise DataError(
                f'the shares of a batch of {batch} are {shares}: shard="mine" needs all above zero, or a part of the stream is never read'
            )
        mine = shares[self.terms.rank]
        micros = self.terms.accumulate if self.terms.training else 1
        return mine, tuple((first, (stop - first,)) for first, stop in pieces(mine, min(micros, mine)))

    def step(self, fetch: Fetch, cursor: StreamPosition) -> GlobalBatch | None:
        dealt = fetch()
        parts = self._parts(dealt)
        packed = pack(([part.share for part in parts], cursor.dump(), any(cursor.numbers)), what="the stream's state")
        answers = [unpack(body) for body in self.terms.agreement.meet("shares of a stream", packed)]
        cursor.every = [dump for _, dump, _ in answers]
        shares = [counts for counts, _, _ in answers]
        if not any(shares):
            return None
        without = [rank for rank, (_, _, had) in enumerate(answers) if not had]
        if without:
            raise DataError(
                f'shard="mine": the stream of rank {without[0]} has no batch at all; give fewer workers, or leave out the sharding'
            )
        micros = max(len(counts) for counts in shares)
        wholes = [sum(counts[micro] for counts in shares if micro < len(counts)) for micro in range(micros)]
        mine = [MicroBatchPart(whole, part.share, part.batch) for whole, part in zip(wholes, parts, strict=False)]
        mine += [MicroBatchPart(whole, 0, self._ghost()) for whole in wholes[len(parts) :]]
        held = [[counts[micro] if micro < len(counts) else 0 for counts in shares] for micro in range(micros)]
        return GlobalBatch(sum(wholes), micros, drained(mine), [source(each) for each in held])

    def saved(self, cursor: StreamPosition) -> list[dict[str, Any]]:
        return cursor.every or [cursor.dump()] * self.terms.agreement.group.size

    def restored(self, cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
        size = self.terms.agreement.group.size
        if len(saved) != size:
            raise DataError(f'shard="mine": the state was saved by {len(saved)} workers, and there are {size} here: give as many workers')
        cursor.fill(saved[self.terms.rank])
        cursor.every = saved

    def _parts(self, dealt: ReadResult | None) -> list[MicroBatchPart]:
        if dealt is None:
            return []
        parts = dealt.parts[0] if self.terms.loader.batch_size is not None else self._rows(dealt.whole)
        count = rows(parts[0].batch, missing=0)
        self._last = cut(parts[0].batch, 0, 1, count) if count else parts[0].batch
        return parts

    def _rows(self, item: Any) -> list[MicroBatchPart]:
        count = rows(item)
        micros = self.terms.accumulate if self.terms.training else 1
        return [
            MicroBatchPart(stop - start, stop - start, cut(item, start, stop, count)) for start, stop in pieces(count, min(micros, count))
        ]

    def _ghost(self) -> Any:
        if not self.terms.ghosts:
            return self._empty()
        if self._last is None:  # resumed after this worker's stream had ended: any sample will do
            loader = self.terms.loader
            first = next(iter(loader.dataset))
            self._last = loader.collate_fn(first if loader.batch_size is None else [first])
        return self._last

    def _empty(self) -> Any:
        """Make no rows, as they would be made of any sample."""
        if self._none is None:
            loader = self.terms.loader
            first = next(iter(loader.dataset))
            if loader.batch_size is None:
                whole = loader.collate_fn(first)
                self._none = cut(whole, 0, 0, rows(whole))
            else:
                self._none = collated_empty(loader.collate_fn, first, surely=not self.terms.training)
        return self._none


def _sources(terms: LoaderSpec, count: int) -> list[int | None]:
    """Return the worker that has samples where others have none, of each micro-batch; a last batch is cut as the others are."""
    batch = terms.loader.batch_size
    cuts = terms.micros(count) if batch is None or batch == count else recut(tuple(terms.micros(batch)), count)
    return [source(shares) for _, shares in cuts]


def _one(cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
    if len(saved) != 1:
        raise DataError(
            f'the state was saved with shard="mine" by {len(saved)} workers: give shard="mine" and as many workers, or start anew'
        )
    cursor.fill(saved[0])
