"""Draws the indices of an epoch on the first worker, and sends them ahead to all, in chunks.

    step             0 . . . . . . . C . . . . . . . 2C. . .      C: batches of a chunk, at least
    sent at step 0   [ chunk 0       | chunk 1      ]             the prefetch of any DataLoader
    sent at step C                                   [ chunk 2      ]

All workers meet at the same steps. A DataLoader that reads up to C batches ahead finds its indices
here without waiting for other workers, so workers can't wait for each other in a circle.
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
from paceline.data.serialization import pack_value, unpack_value
from paceline.errors import DataError

CHUNK_BATCHES = 32  # most batches in a chunk
CHUNK_INDICES = 65_536  # most indices in a chunk, about


class EpochIndices:
    """The global batches (of indices) of one epoch, by step.

    Batches from `first_step` to before `end_of_batches` are here. The first worker draws batches
    from `_source`, `_drawn_batches` of them so far. If these aren't the batches before `_next_step`
    (this worker has just become the first, or the epoch begins in the middle), `_reopen_source`
    draws the same order again from `origin`. A *mark* is a checksum of all batches before a step,
    which shows whether two orders are the same.

    Made on every worker with the same arguments.

    Args:
        loader: DataLoader whose samplers give the indices.
        agreement: All workers.
        order: Generator of samplers that have none of their own.
        ahead: Steps of the deepest prefetch of any worker.
        origin: State of the generators when the epoch began, and whether a base seed was drawn.
        start: First step that is needed. Earlier ones are drawn and skipped. Default: 0.
        at_once: Number of indices to draw at a time, about. Default: as many as fit in two chunks.
        learn: Called on all workers with each new list of batches. Default: does nothing.
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
        # Samplers of a script's own may draw from torch's generator in the middle of an epoch.
        # Those of torch draw all they need at its begin.
        self._draws_late = any(
            not type(each).__module__.startswith("torch.") for _, each in _walk_samplers(loader)
        )
        self._handle_batches = learn
        self._ahead = ahead
        size = loader.batch_size or 1_024
        self._chunk = max(
            1,
            ahead,
            min(CHUNK_BATCHES, CHUNK_INDICES // size) if at_once is None else at_once // 2 // size,
        )
        self._source: Iterator[Any] | None = None
        self._drawn_batches = 0  # batches taken from the source, on the worker that has one
        self._start = start
        self._batches: dict[int, Any] = {}
        self._marks: dict[int, int] = {start: 0}  # by step: mark of all batches before it
        self._next_step = start  # first step that isn't here yet
        self._due_step = start  # step at which all workers meet next
        self._end_step: int | None = None
        self._generators_unmoved = True  # generators are in the state from the begin of the epoch
        self._expected_mark: int | None = None  # mark that an order drawn again must have
        # By number of drawn batches: state of the samplers' generators after them.
        self._generator_states: dict[int, rng.State] = {}
        self._last_state_mark = 0  # mark of the last of these states

    def draw_first(self, check: int | None = None) -> None:
        """Draw the first batches. Collective.

        `check`: mark that the skipped batches must have. Default: not checked.
        """
        self._expected_mark = check
        if check is not None:
            self._marks[self._start] = check
        if not self.agreement.is_alone:
            self.fetch_chunk(self._start)
        else:
            for step in range(self._start, self._start + self._ahead + 1):
                self.batch_of(step)
        self._generators_unmoved = False

    def fetch_chunk(self, step: int) -> None:
        """Fetch the next chunk if it is due at `step`, and drop earlier batches.

        All workers call this before they ask for the batch of a step.
        """
        for past in [earlier for earlier in self._batches if earlier < step]:
            del self._batches[past]
            del self._marks[past]
        # `undo_later_draws` needs the last state at or before the present step.
        if self._generator_states:
            oldest = max((drawn for drawn in self._generator_states if drawn <= step), default=0)
            for drawn in [drawn for drawn in self._generator_states if drawn < oldest]:
                del self._generator_states[drawn]
        if self.agreement.is_alone or self._end_step is not None or step < self._due_step:
            return
        count = step + 2 * self._chunk - self._next_step
        before = self._order.get_shared_state()
        self._unpack_chunk(
            self.agreement.tell_everyone("indices", lambda: self._pack_chunk(count, before)), before
        )
        self._due_step = step + self._chunk

    def batch_of(self, step: int) -> Any | None:
        """Look up the global batch of a step, as the script's sampler gave it.

        None if the epoch has ended before it. Never waits for other workers.
        """
        while step >= self._next_step and self._end_step is None:
            if not self.agreement.is_alone:
                raise AssertionError(
                    f"step {step} is wanted, but indices are here up to {self._next_step} only"
                )
            self._keep_batches(self._draw_batches(1))
        return self._batches.get(step)

    @property
    def end_of_batches(self) -> int:
        """First step whose batch is not here yet."""
        return self._next_step

    @property
    def first_step(self) -> int:
        """First step whose batch is here."""
        return min(self._batches, default=self._next_step)

    def count_samples(self) -> list[int]:
        """Count the samples of each batch that is here."""
        return [len(self._batches[step]) for step in sorted(self._batches)]

    def mark_before(self, step: int) -> int:
        """Checksum of all batches before `step`, to compare orders when a run is resumed."""
        return self._marks[step]

    def regroup(self, agreement: Agreement, step: int) -> None:
        """Continue from a step in another group, which may have another first worker.

        Every worker of the group calls this with the same step.
        """
        self.agreement = agreement
        mark = self._marks[step]
        self._batches.clear()
        self._marks = {step: mark}
        self._next_step = self._due_step = self._start = step
        self._end_step = None
        self._expected_mark = mark

    def undo_later_draws(self, step: int) -> None:
        """End the epoch before `step`, and undo draws of generators for later batches."""
        # Without states, no generator of a sampler has moved. Otherwise restore the last state at
        # or before the step.
        later = [drawn for drawn in self._generator_states if drawn > step]
        if later:
            rng.set_own_state(
                self._loader,
                self._generator_states[
                    max(
                        (drawn for drawn in self._generator_states if drawn <= step),
                        default=min(later),
                    )
                ],
            )

    def _draw_batches(self, count: int) -> list[Any]:
        """Draw the next `count` global batches from the script's samplers, fewer at the end."""
        if self._source is None or self._drawn_batches != self._next_step:
            self._reopen_source()
        with self._order.draw_from_order() if self._draws_late else contextlib.nullcontext():
            return self._take_from_source(count)

    def _take_from_source(self, count: int) -> list[Any]:
        assert self._source is not None
        batches: list[Any] = []
        while len(batches) < count:
            batch = next(self._source, self)
            if batch is self:
                self._remember_state(self._drawn_batches + 1)
                break
            batches.append(
                _make_sliceable(batch, of_samples=self._loader.batch_sampler is not None)
            )
            self._drawn_batches += 1
            self._remember_state(self._drawn_batches)
        return batches

    def _remember_state(self, drawn: int) -> None:
        """Keep the state of the samplers' generators after `drawn` batches, if it has changed."""
        # Nothing is drawn ahead, so nothing has to be undone.
        if self.agreement.is_alone and not self._ahead:
            return
        state = rng.get_own_state(self._loader)
        mark = rng.mark_state(state) if state else 0
        if state and mark != self._last_state_mark:
            self._last_state_mark = mark
            self._generator_states[drawn] = state

    def _reopen_source(self) -> None:
        """Start the samplers again, and skip the batches that this epoch has had."""
        # The first draws were lost with a worker.
        repeated = self._generators_unmoved and self._source is not None
        # Shared generators have moved in this epoch, by dropout for example. Put that back later.
        present = None if self._generators_unmoved else self._order.get_shared_state()
        if present is not None or repeated:
            rng.set_own_state(self._loader, self.origin["own"])
            self._order.set_shared_state(self.origin["shared"])
        with self._order.draw_from_order():
            # Draw for draw as a DataLoader: its base seed, then its sampler.
            if (present is not None or repeated) and self.origin["seeded"]:
                rng.draw_seed(self._loader.generator)
            self._source = _iterate_sampler(self._loader)
            mark = self._skip_batches(self._next_step)
            # Samplers are generators: they draw their order with the first index, so take it now.
            first = list(islice(self._source, 1))
        self._source = chain(first, self._source)
        if present is not None:
            self._order.set_shared_state(present)
        if self._expected_mark is not None and mark != self._expected_mark:
            raise DataError(
                f"the sampler does not draw again the {self._next_step} batches drawn before: "
                "use the same data set, batch size and seed; if its order depends on more than "
                "its generators, give the sampler state_dict and load_state_dict"
            )

    def _skip_batches(self, count: int) -> int:
        """Draw `count` batches, and return their mark."""
        assert self._source is not None
        mark = 0
        for batch in islice(self._source, count):
            mark = _extend_mark(
                _make_sliceable(batch, of_samples=self._loader.batch_sampler is not None), mark
            )
        self._drawn_batches = count
        return mark

    def _pack_chunk(self, count: int, before: rng.State) -> bytes:
        """Draw the next chunk on the first worker, and pack it with the generators' states."""
        batches = self._draw_batches(count)
        packed = [_pack_batch(batch) for batch in batches]
        after = self._order.get_shared_state()
        marks = {name: rng.mark_state(before[name]) for name in after}
        # Generators that the samplers have moved. Other workers move theirs likewise.
        moved = [
            name for name in after if name == "torch" or marks[name] != rng.mark_state(after[name])
        ]
        shared = {name: (marks[name], after[name]) for name in moved}
        own = rng.get_own_state(self._loader)
        origin = self.origin if self._next_step == self._start else None
        return pack_value(
            (packed, len(batches) < count, origin, own, shared), what="the state of a sampler"
        )

    def _unpack_chunk(self, message: bytes, before: rng.State) -> None:
        packed, ended, origin, own, shared = unpack_value(message)
        self.origin = self.origin if origin is None else origin
        if self._source is None:
            rng.set_own_state(self._loader, own)
            for name, (mark_before, after) in shared.items():
                # A worker's own generator moves along only if it was in the first worker's state.
                # The sample order is the first worker's in any case.
                together = mark_before == rng.mark_state(before[name])
                if together or name == "torch":
                    self._order.set_shared_state({name: after}, together=together)
        batches = [_unpack_batch(body) for body in packed]
        self._keep_batches(batches, ended=ended)
        self._handle_batches(batches)

    def _keep_batches(self, batches: list[Any], *, ended: bool | None = None) -> None:
        for batch in batches:
            self._batches[self._next_step] = batch
            self._marks[self._next_step + 1] = _extend_mark(batch, self._marks[self._next_step])
            self._next_step += 1
        if not batches if ended is None else ended:
            self._end_step = self._next_step


def check_samplers(loader: DataLoader[Any]) -> None:
    """Raise `DataError` if `loader` already divides its data by rank, or has no length."""
    for path, sampler in _walk_samplers(loader):
        name = type(sampler).__qualname__
        if "DistributedSampler" in name or (
            hasattr(sampler, "num_replicas") and hasattr(sampler, "rank")
        ):
            raise DataError(
                f"the loader's {path} is a {name}, which cuts the data by rank already: leave it "
                "out, and give shuffle=True or a plain sampler; "
                "the loader's batch size is that of all workers together"
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


def is_index_list(batch: Any) -> bool:
    """Whether a sampler's batch is a list of indices, and not a single index."""
    return isinstance(batch, list | range) or (
        isinstance(batch, Tensor | np.ndarray) and batch.ndim == 1
    )


def _walk_samplers(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    """Yield all samplers of a loader with their paths, also those inside other samplers."""
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


def _iterate_sampler(loader: DataLoader[Any]) -> Iterator[Any]:
    return iter(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)


def _make_sliceable(batch: Any, *, of_samples: bool) -> Any:
    """Convert a sampler's batch to a list if it has samples but can't be counted and cut."""
    if not of_samples or isinstance(batch, list | tuple | range | np.ndarray | Tensor):
        return batch
    return list(batch)


def _pack_integers(batch: Any) -> bytes | None:
    """Pack a list of integers in 8 bytes each; None for anything else."""
    if type(batch) is not list or any(type(index) is not int for index in batch):
        return None
    try:
        return array("q", batch).tobytes()
    except OverflowError:
        return None


def _pack_batch(batch: Any) -> bytes:
    words = _pack_integers(batch)
    return (
        b"i" + words
        if words is not None
        else b"p" + pack_value(batch, what=f"an index of the sampler ({type(batch).__qualname__})")
    )


def _unpack_batch(body: bytes) -> Any:
    if body[:1] == b"p":
        return unpack_value(body[1:])
    words = array("q")
    words.frombytes(body[1:])
    return words.tolist()


def _extend_mark(batch: Any, before: int) -> int:
    words = _pack_integers(batch)
    if words is None:
        try:
            words = pack_value(batch, what="an index")
        except DataError:
            # The index can't be sent, so it is used by one worker only: count samples instead.
            words = str(len(batch) if hasattr(batch, "__len__") else 1).encode()
    return zlib.crc32(words, before)
