"""The reader of a stream, run by a DataLoader's worker: it follows commands to read and cut."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from paceline.data.empty_batch import collated_empty
from paceline.data.serialization import pack
from paceline.data.shares import proportional, spans
from paceline.data.spec import SharePart
from paceline.errors import DataError

BRIEF = 256  # elements of a tensor that its mark looks at


class ReadStart(NamedTuple):
    """Start of a first read: batches consumed before, state of the data set, mark of the
    batches.
    """

    done: int
    state: Any
    mark: int


class ReadCommand(NamedTuple):
    """A command to a reader.

    `number` counts its batches (-1: nothing to do); batches before `oldest` aren't requested any
    more.
    """

    number: int
    oldest: int = 0
    start: ReadStart | None = None  # with the first command: begin anew
    batch: int | None = None  # samples of a whole batch; None: the stream gives batches by itself
    shares: tuple[int, ...] = ()  # of a whole batch
    rank: int = 0  # whose share is to be made
    ghosts: bool = True  # what an empty share is: the first sample, or no rows
    train: bool = True  # and if these can't be had, the first sample nevertheless


class ReadResult(NamedTuple):
    """Answer of a reader: the part of the rank that asks, or the uncut batch that the stream
    gave.
    """

    samples: int
    part: SharePart | None
    whole: Any
    mark: int
    state: Any
    ended: bool = False


NOTHING = ReadResult(0, None, None, 0, None, ended=True)


class StreamReader(Dataset[Any]):
    """A stream as a map from commands to batches.

    Attributes are those of the stream, to read and to set.
    """

    _reading: ReadState

    def __init__(self, reading: ReadState) -> None:
        object.__setattr__(self, "_reading", reading)

    def __getattr__(self, name: str) -> Any:
        if name == "_reading":  # not there yet: it is being unpickled
            raise AttributeError(name)
        return getattr(self._reading.stream, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._reading.stream, name, value)

    def __getitem__(self, command: ReadCommand) -> ReadResult:
        return self._reading.obey(command)


class ReadState:
    """Position of a reader in its stream, and the batches that may be requested again."""

    def __init__(self, stream: Any, collate: Callable[[Any], Any], *, drop_last: bool) -> None:
        self.stream = stream
        self.collate = collate
        self.drop_last = drop_last
        self._samples: Iterator[Any] | None = None
        # number -> what was read, mark, state after it
        self._kept: dict[int, tuple[Any, int, Any]] = {}
        self._read = 0  # batches read so far
        self._mark = 0  # of what was read so far

    def obey(self, command: ReadCommand) -> ReadResult:
        """Carry out a command."""
        if command.start is not None:
            self._begin(command.start, command.batch)
        for old in [number for number in self._kept if number < command.oldest]:
            del self._kept[old]
        if command.number < 0:
            return NOTHING
        while self._read <= command.number:
            if not self._read_on(command.batch):
                return NOTHING
        samples, mark, state = self._kept[command.number]
        if command.batch is None:
            return ReadResult(1, None, self.collate(samples), mark, state)
        return ReadResult(len(samples), self._part(samples, command), None, mark, state)

    def _begin(self, start: ReadStart, batch: int | None) -> None:
        """Read from the start, or from where the state says; without one, what was consumed is
        read again and left out.
        """
        self._kept.clear()
        self._read, self._mark = start.done, start.mark
        if start.done == 0:
            self._samples = iter(self.stream)
            return
        if start.state is not None and not start.state["of_iterator"]:
            self.stream.load_state_dict(start.state["state"])
        self._samples = iter(self.stream)
        if start.state is not None and start.state["of_iterator"]:
            restored: Any = self._samples
            restored.load_state_dict(start.state["state"])
        if start.state is not None and start.state.get("over"):
            self._samples = iter(())
        if start.state is None:
            self._read, self._mark = 0, 0
            while self._read < start.done and self._read_on(batch):
                self._kept.clear()
            if self._mark != start.mark:
                raise DataError(
                    "the stream does not give again what it gave before, so that it can't be "
                    "resumed by counting: give it a state_dict and load_state_dict, "
                    "or an order that depends on a fixed seed only"
                )

    def _read_on(self, batch: int | None) -> bool:
        """Read one more batch; False at the end."""
        assert self._samples is not None
        samples: Any
        over = False
        if batch is None:
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
        self._mark = _marked(first, len(samples) if batch is not None else 1, self._mark)
        self._kept[self._read] = (samples, self._mark, self._state(over=over))
        self._read += 1
        return True

    def _state(self, *, over: bool) -> Any:
        """Return the stream's own state; None where it has none.

        `over`: it has ended, and its state may be that of its start again.
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

    def _part(self, samples: list[Any], command: ReadCommand) -> SharePart:
        shares = (
            command.shares
            if len(samples) == command.batch
            else last_shares(command.shares, len(samples))
        )
        start, stop = spans(shares)[command.rank]
        if start == stop:
            none = (
                None
                if command.ghosts
                else collated_empty(self.collate, samples[0], surely=not command.train)
            )
            return SharePart(len(samples), 0, self.collate(samples[:1]) if command.ghosts else none)
        return SharePart(len(samples), stop - start, self.collate(samples[start:stop]))


def last_shares(shares: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Shares of a last batch of `count` samples, in proportion to those of other batches."""
    return proportional(count, shares)


def _marked(sample: Any, count: int, before: int) -> int:
    """Return a number that tells one stream from another: of how many samples a batch has and of
    the first one, as far as possible.
    """
    try:
        body = pack(_brief(sample))
    except DataError:
        body = type(sample).__qualname__.encode()
    return zlib.crc32(body, zlib.crc32(str(count).encode(), before))


def _brief(value: Any) -> Any:
    if isinstance(value, Tensor):
        return [list(value.shape), value.detach().reshape(-1)[:BRIEF].clone()]
    if isinstance(value, np.ndarray):
        return [list(value.shape), value.reshape(-1)[:BRIEF]]
    if isinstance(value, dict):
        return [[str(key), _brief(part)] for key, part in value.items()]
    return [_brief(part) for part in value[:BRIEF]] if isinstance(value, list | tuple) else value
