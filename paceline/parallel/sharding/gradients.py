"""Gradients whose sums are cut (ZeRO): flat buckets, one per `FlatMemory`, leave during backward.

    gradient of a parameter    ->  its place in the bucket, times the weight of this worker's batch
    the bucket is full         ->  summed over the workers of the group; each keeps its part
    the sum has come           ->  cut into pieces, which go where plain parameters' gradients go

Buckets leave in the same order on all workers: that of the units, backwards. Their sums are
delivered in that order, too. A worker whose pass gives a parameter no gradient keeps that bucket,
and all later ones, to the end of the pass. There all workers say which parameters they have used.

Each bucket on its way has the memory of a unit. So a worker that is ahead waits until only few are,
or else it would need the memory of all of them. Before it copies a gradient that is most of a unit,
it waits for all of them: that gradient and its copy are as large as two more buckets.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence, Set
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.axis_meter import AxisMeter
from paceline.comm.bucket_layout import put_scaled
from paceline.comm.group_protocol import (
    ConnectsAhead,
    Group,
    UncheckedReduceScatter,
    Work,
    WritesResults,
)
from paceline.errors import DeadlineExceeded, UsageError
from paceline.parallel.cut import GradientSink
from paceline.parallel.sharding.flat_memory import FlatMemory

# Number of buckets on their way while the next one fills.
BUCKETS_ON_THE_WAY = 1
# Seconds to wait for other workers' buckets in a pass. Halved after each pass that waits in vain.
LONGEST_WAIT = 3.0
# Seconds of one wait: well below the time after which a group suspects workers of waiting for each
# other.
SHORT_WAIT = 0.1


class GradientBucket:
    """The gradients of one `FlatMemory` in one pass.

    With `keeps`, the bucket's memory stays from pass to pass. `has_gradient` says which gradients
    are there.
    """

    def __init__(self, memory: FlatMemory, dtype: torch.dtype | None, *, keeps: bool) -> None:
        self.memory, self.dtype, self.keeps = memory, dtype or memory.dtype, keeps
        self._flat: Tensor | None = None
        self._work: Work[Tensor] | None = None
        self._sent_at = 0  # when it left, in nanoseconds
        self.has_gradient = [False] * len(memory.parameters)

    @property
    def nbytes(self) -> int:
        """Bytes that the bucket takes at this moment."""
        return 0 if self._flat is None else self._flat.numel() * self._flat.element_size()

    @property
    def is_full(self) -> bool:
        """Whether all gradients have come."""
        return all(self.has_gradient)

    @property
    def is_sent(self) -> bool:
        """Whether the bucket has left in this pass."""
        return self._work is not None

    def add_gradient(self, index: int, grad: Tensor, scale: float) -> None:
        """Take a parameter's gradient, times `scale`; more may come before the bucket leaves."""
        held, (start, stop) = self.memory.parameters[index], self.memory.ranges[index]
        if grad.layout != torch.strided:
            raise UsageError(
                f"the gradient of {held.name} is sparse, and shard() cuts dense ones; "
                "make its layer without sparse=True"
            )
        if self.is_sent:
            raise UsageError(
                f"{held.name} got a second gradient in one backward pass when the first had left "
                "already (checkpoints with use_reentrant=True share it); say use_reentrant=False"
            )
        if self._flat is None:
            self._flat = torch.empty(
                self.memory.layout.padded_numel, dtype=self.dtype, device=grad.device
            )
            self._flat[sum(self.memory.layout.numels) :].zero_()  # the padding
        view = self._flat[start:stop].view(grad.shape)
        if self.has_gradient[index]:
            view.add_(grad, alpha=scale) if scale else None
        else:
            put_scaled(view, grad, scale)
        self.has_gradient[index] = True

    def begin_sum(self, group: Group) -> None:
        """Begin the sum over the workers; gradients that haven't come count as zeros."""
        layout = self.memory.layout
        if self._flat is None:
            self._flat = torch.zeros(
                layout.padded_numel, dtype=self.dtype, device=self.memory.own_part.device
            )
        for (start, stop), came in zip(self.memory.ranges, self.has_gradient, strict=True):
            if not came:
                self._flat[start:stop].zero_()
        self._sent_at = time.perf_counter_ns()
        # An agreed reduce-scatter doesn't wait until all workers have called it. A worker that
        # lacks a gradient sends this bucket at the end of its pass only, and may need us to get
        # there.
        if isinstance(group, UncheckedReduceScatter):
            self._work = group.reduce_scatter_agreed(self._flat)
        elif isinstance(group, WritesResults):
            part = torch.empty(layout.part_numel, dtype=self.dtype, device=self._flat.device)
            self._work = group.reduce_scatter_into(self._flat, part, name=self._exchange_name)
        else:
            self._work = group.reduce_scatter(self._flat, name=self._exchange_name)

    @property
    def _exchange_name(self) -> str:
        return f"the gradients of {self.memory.unit or 'the root'}"

    @property
    def has_arrived(self) -> bool:
        """Whether the sum is there; reading this drives the exchange on."""
        return self._work is not None and self._work.done()

    def wait_briefly(self, seconds: float, meter: AxisMeter) -> bool:
        """Wait for the sum, `seconds` at most, as `meter` measures; return whether it is there.

        The wait is made of short ones, so that the group doesn't take it for workers that wait for
        each other. Meanwhile other workers get what they need from this one.
        """
        assert self._work is not None
        end = time.monotonic() + seconds
        with meter.measure_wait(self._exchange_name):
            while not self.has_arrived and time.monotonic() < end:
                with contextlib.suppress(DeadlineExceeded):
                    self._work.wait(SHORT_WAIT)
        return self.has_arrived

    def wait_for_pieces(self, meter: AxisMeter) -> list[Tensor]:
        """Wait for the sum, and cut it into pieces. Then the bucket is as before the pass."""
        assert self._work is not None
        part = meter.wait_measured(self._work, self._exchange_name, self._sent_at)
        self.forget_pass()
        part = part.to(self.memory.kept_dtype)
        return [part[start:stop] for start, stop in self.memory.part_ranges]

    def forget_pass(self) -> None:
        """Forget the pass."""
        self._work = None
        self.has_gradient = [False] * len(self.has_gradient)
        if not self.keeps:
            self._flat = None


class PassWatcher(Protocol):
    """Follows the backward passes over a cut model."""

    def note_gradient(self, memory: FlatMemory) -> None:
        """Note that a parameter in `memory` has its gradient."""
        ...

    def gather_for(self, parameters: Set[int]) -> None:
        """Make the unit whole if it has one of these whole parameters, given by their ids."""
        ...

    def end_pass(self) -> None:
        """Note that all workers have ended the pass."""
        ...


class ShardGradients:
    """Takes gradients of whole parameters, and hands those of pieces to a `GradientSink`.

    During backward, buckets go through three states in order. Those before `_delivered` are
    delivered, those from there to before `_next_to_send` are on their way, and those from
    `_next_to_send` on are filling: 0 <= _delivered <= _next_to_send <= number of buckets. Outside
    of a pass, both are 0, and `_used` is all zeros. Once false, `_same_parameters` stays so.

    Args:
        memories: Memories of trained parameters, in the order of the forward.
        group: Workers that have parts. Nothing else may use it.
        keeps: Whether the memory of buckets stays from pass to pass.
        dtype: dtype of the sums. Default (None): that of the memory.
        meter: Measures the exchanges.
    """

    def __init__(
        self,
        memories: Sequence[FlatMemory],
        group: Group,
        *,
        keeps: bool,
        dtype: torch.dtype | None,
        meter: AxisMeter | None = None,
    ) -> None:
        self._group, self._meter = group, AxisMeter("shard") if meter is None else meter
        # As sending a bucket doesn't wait for all workers.
        if isinstance(group, ConnectsAhead):
            group.connect()
        self.buckets = [GradientBucket(memory, dtype, keeps=keeps) for memory in reversed(memories)]
        self._used = [bytearray(len(bucket.has_gradient)) for bucket in self.buckets]
        self._next_to_send = self._delivered = 0
        # In all passes so far, all workers have used the same parameters.
        self._same_parameters = True
        self._patience = LONGEST_WAIT
        # Whether waits in this pass have all been successful.
        self._wait_succeeded = True
        self._sink: GradientSink | None = None
        self._watchers: list[PassWatcher] = []
        self._watcher_by_memory: dict[int, PassWatcher] = {}  # by id of a memory
        for bucket_index, bucket in enumerate(self.buckets):
            for index, whole in enumerate(bucket.memory.wholes):
                whole.register_post_accumulate_grad_hook(
                    partial(self._take_gradient, bucket_index, index)
                )

    def deliver_to(self, sink: GradientSink) -> None:
        """Hand gradients to `sink` from now on."""
        self._sink = sink

    def watch_passes(self, watcher: PassWatcher, memories: Iterable[FlatMemory]) -> None:
        """Tell `watcher` of gradients of these memories' parameters, and of the ends of passes."""
        self._watchers.append(watcher)
        self._watcher_by_memory |= {id(memory): watcher for memory in memories}

    @property
    def replicas_diverge(self) -> bool:
        """Whether pieces may change otherwise than by steps of optimizers."""
        return self._sink is not None and self._sink.replicas_diverge

    @property
    def nbytes(self) -> int:
        """Bytes that buckets take at this moment."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def kept_nbytes(self) -> int:
        return sum(
            bucket.memory.layout.padded_numel * bucket.dtype.itemsize
            for bucket in self.buckets
            if bucket.keeps
        )

    # ---- during a pass

    def _take_gradient(self, bucket_index: int, index: int, whole: Tensor) -> None:
        """Take the gradient of parameter `index` in bucket `bucket_index`; send what is ready."""
        grad, whole.grad = whole.grad, None
        if grad is None:
            return
        bucket = self.buckets[bucket_index]
        name = bucket.memory.parameters[index].name
        if grad.requires_grad:
            raise UsageError(
                f"backward(create_graph=True) reached the parameter {name}: "
                "an exchanged gradient has no graph; use "
                "torch.autograd.grad(..., create_graph=True) for the penalty, it stays local"
            )
        if self._sink is None:
            raise UsageError(
                f"backward reached the parameter {name}, which no run follows; "
                "give its model and optimizer to run.prepare"
            )
        # A large gradient and its copy in the bucket need room for two buckets.
        if 2 * grad.numel() > bucket.memory.layout.padded_numel:
            self._wait_for_room(0)
        bucket.add_gradient(index, grad, self._sink.pass_weight())
        # Frees its memory before this worker waits for others.
        del grad
        self._used[bucket_index][index] = True
        if (watcher := self._watcher_by_memory.get(id(bucket.memory))) is not None:
            watcher.note_gradient(bucket.memory)
        # A later bucket that is full waits for earlier ones: the order is the same on all workers.
        while self._next_to_send < len(self.buckets) and self.buckets[self._next_to_send].is_full:
            self.buckets[self._next_to_send].begin_sum(self._group)
            self._next_to_send += 1
        self._wait_for_room(BUCKETS_ON_THE_WAY)
        while self._delivered < self._next_to_send and self.buckets[self._delivered].has_arrived:
            self._deliver_next(self._used[self._delivered])

    def _wait_for_room(self, most: int) -> None:
        """Wait until at most `most` buckets are on their way; deliver those that have arrived.

        A worker that doesn't use a parameter keeps its buckets to the end of the pass. With zero=3
        it may need this worker to get there. So no wait is long, and there are none once workers
        have used different parameters.
        """
        while (
            self._same_parameters
            and self._wait_succeeded
            and self._next_to_send - self._delivered > most
            and not self.buckets[self._delivered].keeps
        ):
            bucket = self.buckets[self._delivered]
            if not bucket.has_arrived and not bucket.wait_briefly(self._patience, self._meter):
                self._patience, self._wait_succeeded = self._patience / 2, False
                return
            self._deliver_next(self._used[self._delivered])

    def _deliver_next(self, used: Sequence[int]) -> None:
        """Deliver the next sum, if there is one: pieces of parameters that some worker has used."""
        bucket = self.buckets[self._delivered]
        self._delivered += 1
        if bucket.is_sent and self._sink is not None:
            for piece, grad, counts in zip(
                bucket.memory.pieces, bucket.wait_for_pieces(self._meter), used, strict=True
            ):
                if counts:
                    self._sink.take_cut_gradient(piece, grad)

    def gather(self, parameters: Sequence[Tensor]) -> None:
        """Make the units of these whole parameters whole. Collective."""
        ids = {id(parameter) for parameter in parameters}
        for watcher in self._watchers:
            watcher.gather_for(ids)

    def end_pass(self) -> None:
        """End a pass, or take part in one in which only others have used parameters. Collective."""
        with self._meter.measure_exchange("the parameters that were used"):
            flags_of_all = self._group.gather_bytes(b"".join(self._used))
        self._same_parameters = self._same_parameters and len(set(flags_of_all)) == 1
        # A byte for each parameter, in the order of buckets: whether any worker has used it.
        union, used = bytes(any(flags) for flags in zip(*flags_of_all, strict=True)), list[bytes]()
        for bucket in self.buckets:
            used.append(union[: len(bucket.has_gradient)])
            union = union[len(bucket.has_gradient) :]
        # Send the rest: a bucket that no worker has put anything into stays here on all of them.
        for bucket_index in range(self._next_to_send, len(self.buckets)):
            if any(used[bucket_index]):
                self.buckets[bucket_index].begin_sum(self._group)
        while self._delivered < len(self.buckets):
            self._deliver_next(used[self._delivered])
        self._reset_pass()

    def abort_pass(self) -> None:
        """Forget a pass that has failed."""
        for bucket in self.buckets:
            bucket.forget_pass()
        self._reset_pass()

    def _reset_pass(self) -> None:
        self._next_to_send = self._delivered = 0
        self._wait_succeeded = True
        for flags in self._used:
            flags[:] = bytes(len(flags))
        for watcher in self._watchers:
            watcher.end_pass()
