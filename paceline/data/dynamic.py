"""Deals map-style data to workers that are out of lockstep: each takes samples when it is ready.

    global batches   | 0: a a a b b b c c c | 1: a a a c c c a a a | 2: b b b ...
                       a, b, c: worker that has taken the sample

The next piece goes to the first worker that asks. All indices of an epoch are drawn before it
begins. If there are too many for that, workers meet when they have used up a part of them.
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

from torch.utils.data import IterableDataset

from paceline.comm.sample_queue import SampleQueue
from paceline.data import rng
from paceline.data.indexed import IndexedPipeline, IndexFeed
from paceline.data.reader_failure import read_batch
from paceline.data.sampler import is_index_list
from paceline.data.spec import GlobalBatch, LoaderSpec, SharePart
from paceline.errors import DataError, UsageError

INDICES_AT_ONCE = 1 << 20  # indices to draw at a time, about


class StepSamples(NamedTuple):
    """Numbers of samples in a step of one worker."""

    samples: int  # samples of this worker
    whole: int  # samples of the global batch that they belong to


class QueueFeed(IndexFeed):
    """Index lists of one worker: a piece of the queue for each request of its DataLoader."""

    def __init__(self, terms: LoaderSpec, sample_queue: SampleQueue) -> None:
        super().__init__(terms)
        self.step_samples: deque[StepSamples] = deque()
        self.latest_batch = -1  # last global batch of which this worker has taken a piece
        self._sample_queue = sample_queue

    def __next__(self) -> Any:
        if not self.terms.training:
            return super().__next__()
        if not self._pending_lists and not self.take_piece():
            raise StopIteration
        index, part = self._pending_lists.popleft()
        self.requested_parts.append((self.round, part))
        return index

    def take_piece(self) -> bool:
        """Take the next piece; False if there is none."""
        assert self.indices is not None
        piece = self._sample_queue.take(self.piece_size)
        if piece is None:
            return False
        batch_step, start, stop = piece
        batch = self.indices.batch_of(batch_step)
        assert batch is not None, f"batch {batch_step} is not here"
        own_indices = batch[start:stop]
        self._pending_lists.append(
            (own_indices, SharePart(len(own_indices), len(own_indices), None))
        )
        self.step_samples.append(StepSamples(len(own_indices), len(batch)))
        self.latest_batch = max(self.latest_batch, batch_step)
        return True

    @property
    def batch_size(self) -> int:
        """Number of samples of a global batch; if sizes differ, of the first one that is here."""
        assert self.indices is not None
        return self.terms.loader.batch_size or len(
            self.indices.batch_of(self.indices.first_step) or [0]
        )

    @property
    def piece_size(self) -> int:
        """Largest number of samples that this worker takes at a time: its share of a batch."""
        return self.terms.shares(self.batch_size)[self.terms.rank]


class DynamicPipeline(IndexedPipeline):
    """The pipeline of a map-style data set whose workers take samples from a `SampleQueue`.

    In evaluation workers are in lockstep, and it deals as `IndexedPipeline` does.
    """

    def __init__(self, terms: LoaderSpec, sample_queue: SampleQueue) -> None:
        super().__init__(terms)
        self._sample_queue = sample_queue
        self._feed: QueueFeed = QueueFeed(terms, sample_queue)
        self._epoch = 0
        # Whether an epoch of training is under way, or workers have met in it.
        self._in_training_epoch = False

    @property
    def is_apart(self) -> bool:
        return self.terms.training and self._in_training_epoch

    @property
    def is_paused(self) -> bool:
        return self.is_apart and self._sample_queue.paused

    def common_step(self, index: int) -> int:
        return self._epoch_indices.first_step if self.is_apart else index

    def begin_epoch(self, epoch: int, state: dict[str, Any] | None) -> int:
        self._epoch = epoch
        self.indices_at_once = INDICES_AT_ONCE if self.terms.training else None
        return super().begin_epoch(epoch, state)

    def handle_first_indices(self, start: int) -> None:
        if not self.terms.training:
            return
        indices, terms = self._epoch_indices, self.terms
        if not is_index_list(indices.batch_of(start)) or (
            terms.loader.batch_sampler is None and terms.loader.batch_size is None
        ):
            raise DataError(
                "workers that are not in lockstep take pieces of batches, and each item of this "
                "data set is a whole batch (batch_size=None): "
                "give the loader a batch size, or leave out staleness and backup_workers"
            )
        shares = terms.shares(self._feed.batch_size)
        if 0 in shares:
            raise UsageError(
                f"the shares of a batch of {self._feed.batch_size} are {shares}, and a worker with "
                "a share of 0 never trains: give each worker a share above 0"
            )
        # From here on workers take pieces of the drawn batches, each at its own pace.
        self._feed.step_samples.clear()
        self._feed.latest_batch = start - 1
        self._in_training_epoch = True
        self._sample_queue.begin(self._epoch, start, indices.count_samples())

    def deal_step(self, index: int) -> GlobalBatch | None:
        if not self.terms.training:
            return super().deal_step(index)
        # Each piece counts as a step of this worker, with its part of the global batch as weight.
        part = self._read_piece()
        self._last_step = self._feed.latest_batch
        if part is None:
            return None
        step_samples = self._feed.step_samples.popleft()
        return GlobalBatch(
            step_samples.samples,
            lambda: part,
            None,
            float(step_samples.samples),
            float(step_samples.whole),
        )

    def _read_piece(self) -> SharePart | None:
        """Read the next piece; None if the epoch is over or workers have met in the middle."""
        while True:
            part = self._read_next()
            if part is not None:
                return part
            # The DataLoader has ended, as the queue was empty. Open it again if there is more.
            if not self._feed.take_piece() and (
                self._sample_queue.paused or not self._draw_further()
            ):
                return None
            self._open_loader(
                rng.make_reader_generator(self.terms.loader.generator, self.terms.rank)
            )

    def _read_next(self) -> SharePart | None:
        assert self._batches is not None
        data = read_batch(self._batches, self)
        if data is self:
            return None
        _, part = self._feed.requested_parts.popleft()
        return part._replace(batch=data)

    def _draw_further(self) -> bool:
        """Meet with all workers, and draw the next part of the epoch; False at its end.

        Called when the queue is empty. Collective.
        """
        indices = self._epoch_indices
        start = indices.end_of_batches
        # All workers must be inside before the queue gets new samples, so that none of them takes
        # the end of the old part for the end of the epoch.
        with self._sample_queue.together():
            indices.fetch_chunk(start)
            if indices.batch_of(start) is None:
                return False
            self._sample_queue.begin(self._epoch, start, indices.count_samples())
        return True

    def peek_batch(self) -> Any:
        return None if self.terms.training else super().peek_batch()

    def regroup(self, index: int) -> None:
        """Deal the rest of the drawn part to the present workers. Collective."""
        if not self.terms.training:
            super().regroup(index)
            return
        indices, start, high = (
            self._epoch_indices,
            self._epoch_indices.first_step,
            self._epoch_indices.end_of_batches,
        )
        self._agree_on_prefetch()
        indices.regroup(self.terms.agreement, start)
        indices.fetch_chunk(start)
        # A worker alone draws batches when they are asked for. Draw the whole part now, as the
        # queue needs the sizes of all its batches.
        for step in range(start, high if self.terms.agreement.is_alone else start):
            indices.batch_of(step)
        self._feed.continue_at(indices, start)
        self.handle_first_indices(start)
        self._open_loader(rng.make_reader_generator(self.terms.loader.generator, self.terms.rank))

    def redeal_step(self, index: int) -> None:
        if self.terms.training:
            raise UsageError(
                "batches can't be dealt anew while workers are not in lockstep: "
                "call reshare between epochs"
            )
        super().redeal_step(index)

    def position_at(self, index: int) -> dict[str, Any]:
        if self.is_apart and not self._sample_queue.paused:
            raise UsageError(
                "workers that are not in lockstep have no common place in an epoch: "
                "save between epochs"
            )
        return super().position_at(self.common_step(index))

    def end_epoch(self) -> None:
        super().end_epoch()
        if self._in_training_epoch:
            self._in_training_epoch = False
            self._sample_queue.leave()


def check_out_of_lockstep(terms: LoaderSpec) -> None:
    """Check that a loader can be dealt out of lockstep.

    Raises:
        UsageError: An option needs all workers in each step.
        DataError: The data set is a stream.
    """
    if terms.weigh is not None:
        raise UsageError(
            "weigh= has all workers add up the weights of each batch, and with staleness, "
            "backup_workers or a quorum they are not in lockstep: "
            "leave it out (samples are the weights), or leave those out"
        )
    if isinstance(terms.loader.dataset, IterableDataset):
        raise DataError(
            "a stream (IterableDataset) is dealt step by step to all workers, and with staleness, "
            "backup_workers or a quorum they are not in lockstep: use a data set with indices, or "
            "leave those out; if this loader is for evaluation, say train=False"
        )
