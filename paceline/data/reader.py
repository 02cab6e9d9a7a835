"""Reads a stream in a worker process of a DataLoader, by commands to read and cut.

To the DataLoader, the stream is a map-style data set whose indices are commands:

    StreamReader[ReadCommand(number=3, shares=(2, 2), rank=1)] -> ReadResult(part of rank 1, ...)
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.empty_batch import collate_empty
from paceline.data.serialization import pack_value
from paceline.data.shares import divide_proportionally, share_bounds
from paceline.data.spec import SharePart
from paceline.errors import DataError

MARKED_ELEMENTS = 256  # elements of a tensor or list that go into a mark


class ReadStart(NamedTuple):
    """Position at which a reader starts."""

    done: int  # batches that were read before
    state: Any  # of the stream after them; None if it has none
    mark: int  # checksum of them


class ReadCommand(NamedTuple):
    """A command to a reader: read one of its batches, and cut a share out of it."""

    number: int  # of the batch, counted per reader; -1: empty command
    oldest: int = 0  # batches before this one won't be requested again
    start: ReadStart | None = None  # in a reader's first command: start here
    batch: int | None = None  # samples of a batch; None: the stream gives whole batches
    shares: tuple[int, ...] = ()  # of a full batch
    rank: int = 0  # place of the share to cut out
    ghosts: bool = True  # an empty share is the first sample; False: no rows
    train: bool = True  # if a batch without rows can't be made, use the first sample after all


class ReadResult(NamedTuple):
    """Answer of a reader."""

    samples: int  # of the global batch
    part: SharePart | None  # the share; None if the stream gives whole batches
    whole: Any  # the whole batch in that case
    mark: int  # checksum of all batches of this reader so far
    state: Any  # of the stream after the batch; None if it has none
    ended: bool = False


EMPTY_RESULT = ReadResult(0, None, None, 0, None, ended=True)


class StreamReader(Dataset[Any]):
    """A stream as a map-style data set, from commands to batches.

    Its attributes are those of the stream: a `worker_init_fn` may read and set them.
    """

    _reading: ReadState

    def __init__(self, reading: ReadState) -> None:
        object.__setattr__(self, "_reading", reading)

    def __getattr__(self, name: str) -> Any:
        # Unpickling asks for attributes before `_reading` is set.
        if name == "_reading":
            raise AttributeError(name)
        return getattr(self._reading.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._reading.stream, name, value)

    def __getitem__(self, command: ReadCommand) -> ReadResult:
        return self._reading.run_command(command)


class ReadState:
    """Position of a reader in its stream, and the batches that may be requested again."""

    def __init__(self, stream: Any, collate: Callable[[Any], Any], *, drop_last: bool) -> None:
        self.stream = stream
        self.collate = collate
        self.drop_last = drop_last
        self._samples: Iterator[Any] | None = None
        # By number of the batch: its samples, mark, and state of the stream after it.
        self._batches: dict[int, tuple[Any, int, Any]] = {}
        self._batches_read = 0  # batches read so far
        self._mark = 0  # checksum of these batches

    def run_command(self, command: ReadCommand) -> ReadResult:
        """Carry out a command."""
        if command.start is not None:
            self._start_reading(command.start, command.batch)
        # Batches stay until they can't be requested again, by other shares.
        for past in [earlier for earlier in self._batches if earlier < command.oldest]:
            del self._batches[past]
        if command.number < 0:
            return EMPTY_RESULT
        while self._batches_read <= command.number:
            if not self._read_batch(command.batch):
                return EMPTY_RESULT
        samples, mark, state = self._batches[command.number]
        if command.batch is None:
            return ReadResult(1, None, self.collate(samples), mark, state)
        return ReadResult(len(samples), self._cut_part(samples, command), None, mark, state)

    def _start_reading(self, start: ReadStart, batch: int | None) -> None:
        """Go to a position: by the state of the stream, or else by reading up to there again."""
        self._batches.clear()
        self._batches_read, self._mark = start.done, start.mark
        if start.done == 0:
            self._samples = iter(self.stream)
            return
        # The state may be that of the data set, set before its iterator is made, or that of the
        # iterator.
        if start.state is not None and not start.state["of_iterator"]:
            self.stream.load_state_dict(start.state["state"])
        self._samples = iter(self.stream)
        if start.state is not None and start.state["of_iterator"]:
            restored: Any = self._samples
            restored.load_state_dict(start.state["state"])
        # A stream that had ended may start again by its state: let it stay ended.
        if start.state is not None and start.state.get("over"):
            self._samples = iter(())
        if start.state is None:
            self._batches_read, self._mark = 0, 0
            while self._batches_read < start.done and self._read_batch(batch):
                self._batches.clear()
            if self._mark != start.mark:
                raise DataError(
                    "the stream gives other samples than before, so it can't be resumed by "
                    "reading them again: give it a state_dict and load_state_dict, "
                    "or an order that depends on a fixed seed only"
                )

    def _read_batch(self, batch: int | None) -> bool:
        """Read one more batch; False at the end of the stream."""
        assert self._samples is not None
        samples: Any
        over = False
        # Without a batch size, each item of the stream is a whole batch.
        if batch is None:
            # `self` as the default: no stream gives it.
            samples = next(self._samples, self)
            if samples is self:
                return False
            first = samples
        else:
            samples = list(islice(self._samples, batch))
            over = len(samples) < batch
            if not samples or (self.drop_last and over):
                return False
            first = samples[0]
        self._mark = _extend_mark(first, len(samples) if batch is not None else 1, self._mark)
        self._batches[self._batches_read] = (samples, self._mark, self._stream_state(over=over))
        self._batches_read += 1
        return True

    def _stream_state(self, *, over: bool) -> Any:
        """State of the iterator, or else of the stream; None if neither has one.

        `over`: the stream has ended, so this may be the state of its start again.
        """
        sources: list[tuple[Any, bool]] = [(self._samples, True), (self.stream, False)]
        for source, of_iterator in sources:
            if hasattr(source, "state_dict") and hasattr(source, "load_state_dict"):
                return {
                    "of_iterator": of_iterator,
                    "state": copy.deepcopy(source.state_dict()),
                    "over": over,
                }
        return None

    def _cut_part(self, samples: list[Any], command: ReadCommand) -> SharePart:
        shares = (
            command.shares
            if len(samples) == command.batch
            else shares_of_last(command.shares, len(samples))
        )
        start, stop = share_bounds(shares)[command.rank]
        if start == stop:
            if command.ghosts:
                return SharePart(len(samples), 0, self.collate(samples[:1]))
            no_rows = collate_empty(self.collate, samples[0], surely=not command.train)
            return SharePart(len(samples), 0, no_rows)
        return SharePart(len(samples), stop - start, self.collate(samples[start:stop]))


def shares_of_last(shares: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Shares of a last, smaller batch of `count` samples, in proportion to the usual shares."""
    return divide_proportionally(count, shares)


def _extend_mark(sample: Any, count: int, before: int) -> int:
    """Extend a checksum by a batch: its number of samples, and the first sample if it can be sent.

    Otherwise only the type of the sample counts.
    """
    try:
        body = pack_value(_shorten_value(sample))
    except DataError:
        body = type(sample).__qualname__.encode()
    return zlib.crc32(body, zlib.crc32(str(count).encode(), before))


def _shorten_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [list(value.shape), value.detach().reshape(-1)[:MARKED_ELEMENTS].clone()]
    if isinstance(value, np.ndarray):
        return [list(value.shape), value.reshape(-1)[:MARKED_ELEMENTS]]
    if isinstance(value, dict):
        return [[str(key), _shorten_value(part)] for key, part in value.items()]
    return (
        [_shorten_value(part) for part in value[:MARKED_ELEMENTS]]
        if isinstance(value, list | tuple)
        else value
    )
