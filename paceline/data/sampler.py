"""The indices of an epoch: drawn by the first worker, and sent ahead to all in chunks.

    turn             0 . . . . . . . C . . . . . . . 2C. . .      C: at least the prefetch of any
    met at 0         [ chunk 0       | chunk 1      ]             DataLoader
    met at C                                         [ chunk 2      ]

All workers meet at the same turns. A DataLoader that runs ahead by C batches finds its indices
without waiting, so no two workers can wait for each other.
"""

from __future__ import annotations

import contextlib
import zlib
from array import array
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, RandomSampler, SequentialSampler

from paceline.comm.agreement import Agreement
from paceline.data import rng
from paceline.data.serialization import pack, unpack
from paceline.errors import DataError

CHUNK = 32  # batches in a message, where they are small
CHUNK_INDICES = 65_536  # and about so many indices, where they are not


class EpochIndices:
    """The global batches (of indices) of one epoch, by step.

    Made on every worker with the same arguments. `ahead` is the deepest prefetch of any worker, in
    steps. `origin` is what the generators were when this epoch began, and whether a base seed was
    drawn then; `start` is the first step that is wanted: the same order is drawn again and skipped
    up to there. `at_once`: so many indices, about, are drawn at a time. `learn` is called on all
    workers with batches that have come, at the turns at which they meet.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        agreement: Agreement,
        order: rng.SampleOrder,
        *,
        ahead: int,
        origin: rng.State,
        start: int = 0,
        at_once: int | None = None,
        learn: Callable[[list[Any]], None] = lambda batches: None,
    ) -> None:
        self.agreement = agreement
        self.origin = origin
        self._loader, self._order = loader, order
        self._late = any(
            not type(each).__module__.startswith("torch.") for _, each in _samplers(loader)
        )
        self._learn = learn
        self._ahead = ahead
        size = loader.batch_size or 1_024
        self._chunk = max(
            1, ahead, min(CHUNK, CHUNK_INDICES // size) if at_once is None else at_once // 2 // size
        )
        self._source: Iterator[Any] | None = None
        self._drawn = 0  # batches taken out of the source, on the worker that has one
        self._start = start
        self._batches: dict[int, Any] = {}
        self._marks: dict[int, int] = {start: 0}  # step -> mark of all batches before it
        self._high = start  # the first step that isn't here yet
        self._due = start  # the step at which all meet next
        self._end: int | None = None
        self._fresh = True  # the generators are where they were when the epoch began
        self._wanted: int | None = None
        # batches drawn -> the samplers' generators after that
        self._states: dict[int, rng.State] = {}
        self._moved = 0

    def prime(self, check: int | None = None) -> None:
        """Draw the first batches, in lockstep.

        `check`: the mark that the batches before the first one must have.
        """
        self._wanted = check
        if check is not None:
            self._marks[self._start] = check
        if not self.agreement.is_alone:
            self.refill(self._start)
        else:
            for step in range(self._start, self._start + self._ahead + 1):
                self.batch(step)
        self._fresh = False

    def refill(self, step: int) -> None:
        """Meet if a chunk is due at `step`; all workers call it before they ask for a step's
        batch.
        """
        for old in [known for known in self._batches if known < step]:
            del self._batches[old]
            del self._marks[old]
        if self._states:
            keep = max((drawn for drawn in self._states if drawn <= step), default=0)
            for drawn in [drawn for drawn in self._states if drawn < keep]:
                del self._states[drawn]
        if self.agreement.is_alone or self._end is not None or step < self._due:
            return
        count = step + 2 * self._chunk - self._high
        before = self._order.shared_state()
        self._accept(
            self.agreement.tell_everyone("indices", lambda: self._message(count, before)), before
        )
        self._due = step + self._chunk

    def batch(self, step: int) -> Any | None:
        """Return the global batch of a step: what the user's batch sampler gave.

        None where the epoch has ended before it. Never waits.
        """
        while step >= self._high and self._end is None:
            if not self.agreement.is_alone:
                raise AssertionError(
                    f"step {step} was asked for, and indices are here up to {self._high} only"
                )
            self._keep(self._draw(1))
        return self._batches.get(step)

    @property
    def high(self) -> int:
        """The first step whose batch is not here yet."""
        return self._high

    @property
    def first(self) -> int:
        """The first step whose batch is here."""
        return min(self._batches, default=self._high)

    def sizes(self) -> list[int]:
        """Return the numbers of samples of the batches that are here."""
        return [len(self._batches[step]) for step in sorted(self._batches)]

    def mark(self, step: int) -> int:
        """Number that identifies the order of all batches before `step`, for comparison on
        resume.
        """
        return self._marks[step]

    def regroup(self, agreement: Agreement, step: int) -> None:
        """Go on in another group from `step` on, with any first worker.

        Every worker of the group calls this at the same step.
        """
        self.agreement = agreement
        mark = self._marks[step]
        self._batches.clear()
        self._marks = {step: mark}
        self._high = self._due = self._start = step
        self._end = None
        self._wanted = mark

    def settle(self, step: int) -> None:
        """End the epoch before `step`, and set generators back that were used for later batches."""
        later = [drawn for drawn in self._states if drawn > step]
        if later:
            rng.put_own(
                self._loader,
                self._states[
                    max((drawn for drawn in self._states if drawn <= step), default=min(later))
                ],
            )

    def _draw(self, count: int) -> list[Any]:
        """Draw the next `count` global batches from the user's samplers, fewer at the end."""
        if self._source is None or self._drawn != self._high:
            self._reopen()
        with self._order.drawing() if self._late else contextlib.nullcontext():
            return self._taken(count)

    def _taken(self, count: int) -> list[Any]:
        assert self._source is not None
        batches: list[Any] = []
        while len(batches) < count:
            batch = next(self._source, self)
            if batch is self:
                self._remember(self._drawn + 1)
                break
            batches.append(_sliceable(batch, of_samples=self._loader.batch_sampler is not None))
            self._drawn += 1
            self._remember(self._drawn)
        return batches

    def _remember(self, drawn: int) -> None:
        """Keep the state of the samplers' generators after so many batches, where they are drawn
        ahead and have moved.
        """
        if self.agreement.is_alone and not self._ahead:
            return
        state = rng.own_state(self._loader)
        mark = rng.mark(state) if state else 0
        if state and mark != self._moved:
            self._moved = mark
            self._states[drawn] = state

    def _reopen(self) -> None:
        """Begin to draw, and skip what was drawn in this epoch before."""
        # what was drawn first got lost with a worker
        again = self._fresh and self._source is not None
        kept = None if self._fresh else self._order.shared_state()
        if kept is not None or again:
            rng.put_own(self._loader, self.origin["own"])
            self._order.put_shared(self.origin["shared"])
        with self._order.drawing():
            if (kept is not None or again) and self.origin["seeded"]:
                rng.draw_seed(self._loader.generator)
            self._source = _ordered(self._loader)
            mark = self._skip(self._high)
            first = list(islice(self._source, 1))  # samplers draw when they are asked first: now
        self._source = chain(first, self._source)
        if kept is not None:
            self._order.put_shared(kept)
        if self._wanted is not None and mark != self._wanted:
            raise DataError(
                f"the sampler does not draw again the {self._high} batches drawn before: "
                "data set, batch size and seed have to be "
                "what they were, and an order that depends on more than its generators needs a "
                "sampler with state_dict and load_state_dict"
            )

    def _skip(self, count: int) -> int:
        """Draw `count` batches and give their mark."""
        assert self._source is not None
        mark = 0
        for batch in islice(self._source, count):
            mark = _marked(
                _sliceable(batch, of_samples=self._loader.batch_sampler is not None), mark
            )
        self._drawn = count
        return mark

    def _message(self, count: int, before: rng.State) -> bytes:
        batches = self._draw(count)
        packed = [_packed(batch) for batch in batches]
        after = self._order.shared_state()
        marks = {name: rng.mark(before[name]) for name in after}
        moved = [name for name in after if name == "torch" or marks[name] != rng.mark(after[name])]
        shared = {name: (marks[name], after[name]) for name in moved}
        own = rng.own_state(self._loader)
        origin = self.origin if self._high == self._start else None
        return pack(
            (packed, len(batches) < count, origin, own, shared), what="the state of a sampler"
        )

    def _accept(self, message: bytes, before: rng.State) -> None:
        packed, ended, origin, own, shared = unpack(message)
        self.origin = self.origin if origin is None else origin
        if self._source is None:
            rng.put_own(self._loader, own)
            for name, (mark, after) in shared.items():
                together = mark == rng.mark(before[name])  # it was where the first worker's was
                if together or name == "torch":  # the order is the first worker's in any case
                    self._order.put_shared({name: after}, together=together)
        batches = [_unpacked(body) for body in packed]
        self._keep(batches, ended=ended)
        self._learn(batches)

    def _keep(self, batches: list[Any], *, ended: bool | None = None) -> None:
        for batch in batches:
            self._batches[self._high] = batch
            self._marks[self._high + 1] = _marked(batch, self._marks[self._high])
            self._high += 1
        if not batches if ended is None else ended:
            self._end = self._high


def check_samplers(loader: DataLoader[Any]) -> None:
    """Raise `DataError` where `loader` cuts its data by rank already, or can't tell its length."""
    for path, sampler in _samplers(loader):
        name = type(sampler).__qualname__
        if "DistributedSampler" in name or (
            hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")
        ):
            raise DataError(
                f"the loader's {path} is a {name}, which cuts the data by rank already: "
                "leave it out, and give shuffle=True or a plain "
                "sampler; the loader's batch size is that of all workers together"
            )
        if type(sampler) in {SequentialSampler, RandomSampler}:
            data = sampler.data_source
            try:
                len(data)
            except (TypeError, NotImplementedError):
                raise DataError(
                    f"the data set is a {type(data).__qualname__} without a length: "
                    "give it __len__, or a sampler, or make it a torch.utils.data.IterableDataset"
                ) from None


def is_list(batch: Any) -> bool:
    """Whether what a sampler gave is a list of indices, to be cut, and not one index."""
    return isinstance(batch, list | range) or (
        isinstance(batch, Tensor | np.ndarray) and batch.ndim == 1
    )


def _samplers(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    waiting = [("sampler", loader.sampler, 4), ("batch_sampler", loader.batch_sampler, 4)]
    while waiting:
        path, sampler, depth = waiting.pop()
        if sampler is None:
            continue
        yield path, sampler
        parts = getattr(sampler, "__dict__", {})
        waiting += [
            (f"{path}.{name}", part, depth - 1)
            for name, part in parts.items()
            if depth and name.endswith("sampler")
        ]


def _ordered(loader: DataLoader[Any]) -> Iterator[Any]:
    return iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def _sliceable(batch: Any, *, of_samples: bool) -> Any:
    """Return a batch whose samples can be counted and cut: what a batch sampler gave, or a list
    of it.
    """
    if not of_samples or isinstance(batch, list | tuple | range | np.ndarray | Tensor):
        return batch
    return list(batch)


def _words(batch: Any) -> bytes | None:
    """Return a list of integers as 8 bytes each; None for anything else."""
    if type(batch) is not list or any(type(index) is not int for index in batch):
        return None
    try:
        return array("q", batch).tobytes()
    except OverflowError:
        return None


def _packed(batch: Any) -> bytes:
    words = _words(batch)
    return (
        b"i" + words
        if words is not None
        else b"p" + pack(batch, what=f"an index of the sampler ({type(batch).__qualname__})")
    )


def _unpacked(body: bytes) -> Any:
    if body[:1] == b"p":
        return unpack(body[1:])
    words = array("q")
    words.frombytes(body[1:])
    return words.tolist()


def _marked(batch: Any, before: int) -> int:
    words = _words(batch)
    if words is None:
        try:
            words = pack(batch, what="an index")
        except DataError:
            # an index that only one worker can use
            words = str(len(batch) if hasattr(batch, "__len__") else 1).encode()
    return zlib.crc32(words, before)
