"""Access to a stream: each worker reads everything, or the stream is sharded by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.data.batches import cut, rows
from paceline.data.empty_batch import collated_empty
from paceline.data.reader import ReadResult, last_shares
from paceline.data.serialization import pack, unpack
from paceline.data.spec import GlobalBatch, LoaderSpec, SharePart, source, whole_rows
from paceline.errors import DataError


@dataclass
class StreamPosition:
    """Position in a stream: for each DataLoader worker its batches, end, mark and stream state."""

    numbers: list[int]
    ended: list[bool]
    marks: list[int]
    states: list[Any]
    worker: int = 0  # the reader of the next batch
    # the cursors of all ranks, where they differ
    every: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def at_start(cls, workers: int) -> StreamPosition:
        """Make the position before the first batch."""
        return cls([0] * workers, [False] * workers, [0] * workers, [None] * workers)

    def copy(self) -> StreamPosition:
        """Make another one, at the same place."""
        return StreamPosition(
            list(self.numbers),
            list(self.ended),
            list(self.marks),
            list(self.states),
            self.worker,
            self.every,
        )

    def dump(self) -> dict[str, Any]:
        """Write as plain values."""
        return {
            "numbers": self.numbers,
            "ended": self.ended,
            "marks": self.marks,
            "states": self.states,
            "worker": self.worker,
        }

    def fill(self, saved: dict[str, Any]) -> None:
        """Go to where `dump` was called."""
        if len(saved["numbers"]) != len(self.numbers):
            raise DataError(
                f"the state of a stream was saved with {len(saved['numbers'])} DataLoader workers, "
                f"and there are {len(self.numbers)} here: "
                "each of them reads its own part of the stream, so give num_workers as it was"
            )
        self.numbers, self.ended = list(saved["numbers"]), list(saved["ended"])
        self.marks, self.states, self.worker = (
            list(saved["marks"]),
            list(saved["states"]),
            int(saved["worker"]),
        )


Fetch = Callable[[], ReadResult | None]  # the next global batch; None at the end of the stream


class StreamAccess(Protocol):
    """The differences between the ways to read a stream."""

    @property
    def cost(self) -> str:
        """The cost to announce to the user."""
        ...

    def asked(self) -> tuple[int | None, tuple[int, ...], int]:
        """Samples to read at a time (None: whole batches), their shares, and the share to make."""
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
        size = terms.agreement.group.size
        self.cost = (
            f"every worker reads the whole stream, which is read {size} times; "
            'shard="mine" is for streams that give each rank its own samples'
        )

    def asked(self) -> tuple[int | None, tuple[int, ...], int]:
        batch = self.terms.loader.batch_size
        return batch, () if batch is None else self.terms.shares(batch), self.terms.rank

    def step(self, fetch: Fetch, cursor: StreamPosition) -> GlobalBatch | None:
        dealt = fetch()
        if dealt is None:
            return None
        if self.terms.loader.batch_size is None:
            return whole_rows(self.terms, dealt.whole)
        part, batch = dealt.part, self.terms.loader.batch_size
        assert part is not None
        shares = self.terms.shares(batch)
        return GlobalBatch(
            dealt.samples,
            lambda: part,
            source(shares if dealt.samples == batch else last_shares(shares, dealt.samples)),
        )

    def saved(self, cursor: StreamPosition) -> list[dict[str, Any]]:
        return [cursor.dump()]

    def restored(self, cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
        _one(cursor, saved)


class SelfSharded:
    """Takes the samples that the stream gives each rank.

    Each step announces their number; a worker whose stream has ended gets ghosts.
    """

    cost = (
        'shard="mine": each worker reads its own part, and the workers tell each other at every '
        "step how many samples they have"
    )

    def __init__(self, terms: LoaderSpec) -> None:
        self.terms = terms
        self._last: Any = None  # a batch to be a ghost
        self._none: Any = None  # one of no rows

    def asked(self) -> tuple[int | None, tuple[int, ...], int]:
        batch = self.terms.loader.batch_size
        if batch is None:
            return None, (), 0
        shares = self.terms.shares(batch)
        if 0 in shares:
            raise DataError(
                f'the shares of a batch of {batch} are {shares}: shard="mine" needs all above '
                "zero, or a part of the stream is never read"
            )
        mine = shares[self.terms.rank]
        return mine, (mine,), 0

    def step(self, fetch: Fetch, cursor: StreamPosition) -> GlobalBatch | None:
        dealt = fetch()
        part = self._part(dealt)
        packed = pack(
            (0 if part is None else part.share, cursor.dump(), any(cursor.numbers)),
            what="the stream's state",
        )
        answers = [unpack(body) for body in self.terms.agreement.meet("shares of a stream", packed)]
        cursor.every = [dump for _, dump, _ in answers]
        shares = [share for share, _, _ in answers]
        if not any(shares):
            return None
        without = [rank for rank, (_, _, had) in enumerate(answers) if not had]
        if without:
            raise DataError(
                f'shard="mine": the stream of rank {without[0]} has no batch at all; '
                "give fewer workers, or leave out the sharding"
            )
        whole = sum(shares)
        mine = SharePart(whole, 0, self._ghost()) if part is None else part._replace(whole=whole)
        return GlobalBatch(whole, lambda: mine, source(shares))

    def saved(self, cursor: StreamPosition) -> list[dict[str, Any]]:
        return cursor.every or [cursor.dump()] * self.terms.agreement.group.size

    def restored(self, cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
        size = self.terms.agreement.group.size
        if len(saved) != size:
            raise DataError(
                f'shard="mine": the state was saved by {len(saved)} workers, and there are {size} '
                "here: give as many workers"
            )
        cursor.fill(saved[self.terms.rank])
        cursor.every = saved

    def _part(self, dealt: ReadResult | None) -> SharePart | None:
        if dealt is None:
            return None
        if self.terms.loader.batch_size is None:
            count = rows(dealt.whole)
            part = SharePart(count, count, dealt.whole)
        else:
            assert dealt.part is not None
            part = dealt.part
        count = rows(part.batch, missing=0)
        self._last = cut(part.batch, 0, 1, count) if count else part.batch
        return part

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
                self._none = collated_empty(
                    loader.collate_fn, first, surely=not self.terms.training
                )
        return self._none


def _one(cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
    if len(saved) != 1:
        raise DataError(
            f'the state was saved with shard="mine" by {len(saved)} workers: '
            'give shard="mine" and as many workers, or start anew'
        )
    cursor.fill(saved[0])
