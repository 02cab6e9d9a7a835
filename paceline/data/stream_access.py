"""Two ways to read a stream: each worker reads all of it, or the stream shards itself.

ReadAll       shard=None or "none": each worker reads every global batch and cuts its share out
SelfSharded   shard="mine": each worker reads the samples that its stream gives it, and workers
              tell each other their numbers of samples at each step
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.data.batches import count_rows, cut_rows
from paceline.data.empty_batch import collate_empty
from paceline.data.reader import ReadResult, shares_of_last
from paceline.data.serialization import pack_value, unpack_value
from paceline.data.spec import GlobalBatch, LoaderSpec, SharePart, deal_rows, find_ghost_source
from paceline.errors import DataError


@dataclass
class StreamPosition:
    """Position in a stream: the lists have one entry per reader (worker of the DataLoader)."""

    numbers: list[int]  # batches that were read
    ended: list[bool]
    marks: list[int]  # checksums of these batches
    states: list[Any]  # states of the streams
    worker: int = 0  # reader of the next batch
    # Positions of all ranks, if the stream shards itself.
    all_ranks: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def at_start(cls, workers: int) -> StreamPosition:
        """Make the position before the first batch."""
        return cls([0] * workers, [False] * workers, [0] * workers, [None] * workers)

    def copy(self) -> StreamPosition:
        """Copy the position, so that it can be moved on its own."""
        return StreamPosition(
            list(self.numbers),
            list(self.ended),
            list(self.marks),
            list(self.states),
            self.worker,
            self.all_ranks,
        )

    def to_plain(self) -> dict[str, Any]:
        """Convert the position to plain values."""
        return {
            "numbers": self.numbers,
            "ended": self.ended,
            "marks": self.marks,
            "states": self.states,
            "worker": self.worker,
        }

    def load_plain(self, saved: dict[str, Any]) -> None:
        """Move to a position that was converted to plain values."""
        if len(saved["numbers"]) != len(self.numbers):
            raise DataError(
                f"the state of a stream was saved with {len(saved['numbers'])} DataLoader workers, "
                f"and there are {len(self.numbers)} here: each worker reads its own part of the "
                f"stream, so give num_workers={len(saved['numbers'])}"
            )
        self.numbers, self.ended = list(saved["numbers"]), list(saved["ended"])
        self.marks, self.states, self.worker = (
            list(saved["marks"]),
            list(saved["states"]),
            int(saved["worker"]),
        )


Fetch = Callable[[], ReadResult | None]  # reads the next global batch; None at the stream's end


class StreamAccess(Protocol):
    """A way to read a stream."""

    @property
    def cost(self) -> str:
        """Cost of this way, in words, to announce to the user."""
        ...

    def read_terms(self) -> tuple[int | None, tuple[int, ...], int]:
        """Terms of commands to readers: samples per batch, shares in it, and the rank to cut for.

        Samples per batch are None if the stream gives whole batches.
        """
        ...

    def deal_step(self, fetch: Fetch, cursor: StreamPosition) -> GlobalBatch | None:
        """Deal the next step, and move `cursor`; None if the stream has ended on all workers."""
        ...

    def save_positions(self, cursor: StreamPosition) -> list[dict[str, Any]]:
        """Positions that a checkpoint needs, as plain values."""
        ...

    def restore_positions(self, cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
        """Move `cursor` to the positions of a checkpoint."""
        ...


class ReadAll:
    """Each worker reads the whole stream and takes its share of each batch."""

    def __init__(self, terms: LoaderSpec) -> None:
        self.terms = terms
        size = terms.agreement.group.size
        self.cost = (
            f"every worker reads the whole stream, which is read {size} times; "
            'shard="mine" is for streams that give each rank its own samples'
        )

    def read_terms(self) -> tuple[int | None, tuple[int, ...], int]:
        batch = self.terms.loader.batch_size
        return batch, () if batch is None else self.terms.shares(batch), self.terms.rank

    def deal_step(self, fetch: Fetch, cursor: StreamPosition) -> GlobalBatch | None:
        result = fetch()
        if result is None:
            return None
        if self.terms.loader.batch_size is None:
            return deal_rows(self.terms, result.whole)
        part, batch = result.part, self.terms.loader.batch_size
        assert part is not None
        shares = self.terms.shares(batch)
        return GlobalBatch(
            result.samples,
            lambda: part,
            find_ghost_source(
                shares if result.samples == batch else shares_of_last(shares, result.samples)
            ),
        )

    def save_positions(self, cursor: StreamPosition) -> list[dict[str, Any]]:
        return [cursor.to_plain()]

    def restore_positions(self, cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
        _restore_single(cursor, saved)


class SelfSharded:
    """Each worker takes the samples that its stream gives it.

    At each step the workers exchange their numbers of samples. A worker whose stream has ended gets
    ghosts.
    """

    cost = (
        'shard="mine": each worker reads its own part, and the workers tell each other at every '
        "step how many samples they have"
    )

    def __init__(self, terms: LoaderSpec) -> None:
        self.terms = terms
        self._ghost_batch: Any = None  # batch of one sample, used as a ghost
        self._empty_batch: Any = None  # batch without rows

    def read_terms(self) -> tuple[int | None, tuple[int, ...], int]:
        batch = self.terms.loader.batch_size
        if batch is None:
            return None, (), 0
        shares = self.terms.shares(batch)
        if 0 in shares:
            raise DataError(
                f'the shares of a batch of {batch} are {shares}: shard="mine" needs all above '
                "zero, or a part of the stream is never read"
            )
        own_share = shares[self.terms.rank]
        return own_share, (own_share,), 0

    def deal_step(self, fetch: Fetch, cursor: StreamPosition) -> GlobalBatch | None:
        result = fetch()
        part = self._make_part(result)
        packed = pack_value(
            (0 if part is None else part.share, cursor.to_plain(), any(cursor.numbers)),
            what="the stream's state",
        )
        answers = [
            unpack_value(body) for body in self.terms.agreement.meet("shares of a stream", packed)
        ]
        # Each worker gets all positions, so that any of them can write a checkpoint.
        cursor.all_ranks = [dump for _, dump, _ in answers]
        shares = [share for share, _, _ in answers]
        if not any(shares):
            return None
        never_read = [rank for rank, (_, _, has_read) in enumerate(answers) if not has_read]
        if never_read:
            raise DataError(
                f'shard="mine": the stream of rank {never_read[0]} has no batch at all: '
                "give fewer workers, or leave out the sharding"
            )
        # A worker whose stream has ended goes on with ghosts until all streams have ended.
        total = sum(shares)
        own_part = (
            SharePart(total, 0, self._make_ghost()) if part is None else part._replace(whole=total)
        )
        return GlobalBatch(total, lambda: own_part, find_ghost_source(shares))

    def save_positions(self, cursor: StreamPosition) -> list[dict[str, Any]]:
        return cursor.all_ranks or [cursor.to_plain()] * self.terms.agreement.group.size

    def restore_positions(self, cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
        size = self.terms.agreement.group.size
        if len(saved) != size:
            raise DataError(
                f'shard="mine": the state was saved by {len(saved)} workers, and there are {size} '
                "here: give as many workers"
            )
        cursor.load_plain(saved[self.terms.rank])
        cursor.all_ranks = saved

    def _make_part(self, result: ReadResult | None) -> SharePart | None:
        if result is None:
            return None
        if self.terms.loader.batch_size is None:
            count = count_rows(result.whole)
            part = SharePart(count, count, result.whole)
        else:
            assert result.part is not None
            part = result.part
        # Keep a sample, in case this worker's stream ends before the others.
        count = count_rows(part.batch, missing=0)
        self._ghost_batch = cut_rows(part.batch, 0, 1, count) if count else part.batch
        return part

    def _make_ghost(self) -> Any:
        if not self.terms.uses_ghosts:
            return self._make_empty()
        # Resumed after this worker's stream had ended, so it has read nothing: any sample will do.
        if self._ghost_batch is None:
            loader = self.terms.loader
            first = next(iter(loader.dataset))
            self._ghost_batch = loader.collate_fn(first if loader.batch_size is None else [first])
        return self._ghost_batch

    def _make_empty(self) -> Any:
        """Make a batch without rows, by the first sample of the stream."""
        if self._empty_batch is None:
            loader = self.terms.loader
            first = next(iter(loader.dataset))
            if loader.batch_size is None:
                whole = loader.collate_fn(first)
                self._empty_batch = cut_rows(whole, 0, 0, count_rows(whole))
            else:
                self._empty_batch = collate_empty(
                    loader.collate_fn, first, surely=not self.terms.training
                )
        return self._empty_batch


def _restore_single(cursor: StreamPosition, saved: list[dict[str, Any]]) -> None:
    if len(saved) != 1:
        raise DataError(
            f'the state was saved with shard="mine" by {len(saved)} workers: '
            'give shard="mine" and as many workers, or start anew'
        )
    cursor.load_plain(saved[0])
