"""Access to a stream: each worker reads everything, or the stream is sharded by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.comm.group import pieces
from paceline.data.batches import cut, rows
from paceline.data.empty_batch import collated_empty
from paceline.data.reader import Cuts, ReadResult, recut
from paceline.data.serialization import pack, unpack
from paceline.data.spec import GlobalBatch, LoaderSpec, MicroBatchPart, drained, source, whole_rows
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
        """Return the next step, which moves `cursor`; None where the stream has ended for all."""
        ...

    def saved(self, cursor: StreamPosition) -> list[dict[str, Any]]:
        """Return the cursors that a state holds."""
        ...

    def restored(self, cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
        """Move `cursor` to where `saved` was called."""
        ...


class ReadAll:
    """Reads everything on each worker, which takes its share."""

    def __init__(self, terms: LoaderSpec) -> None:
        self.terms = terms
        self.wanted = (terms.rank,)
        size = terms.agreement.group.size
        self.cost = (
            f"every worker reads the whole stream, which is read {size} times; "
            'shard="mine" is for streams that give each rank its own samples'
        )

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


class SelfSharded:
    """Takes the samples that the stream gives each rank. Each step announces their number; a worker whose stream has ended gets ghosts."""

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
