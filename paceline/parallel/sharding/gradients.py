"""Gradients of parameters whose sums are cut: in flat buckets, one for each `FlatMemory`, that
leave while backward runs.

    gradient of a whole parameter  ->  its place in the bucket, times what this worker's batch
                                       counts
    the bucket is full             ->  summed over the workers of the group; each keeps the sum of
                                       its part
    the sum has come               ->  cut into pieces, which go where gradients of plain parameters
                                       go

Buckets leave in one order everywhere, that of the units backwards, and their sums are handed on in
it. A worker in whose pass a parameter has no gradient keeps its bucket, and all later ones, to the
end of the pass, when all workers say what they have used.

A worker that is ahead waits until few buckets are on their way: each has the memory of a unit, and
it would fill the memory of all. Before it copies a gradient that is most of a unit, it waits for
those that are: that gradient and its copy are two more.
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
from paceline.comm.bucket_layout import put
from paceline.comm.group import ConnectsAhead, Group, UncheckedReduceScatter, Work, WritesResults
from paceline.errors import DeadlineExceeded, UsageError
from paceline.parallel.cut import GradientSink
from paceline.parallel.sharding.memory import FlatMemory

ON_THE_WAY = 1  # buckets, while the next one fills
# seconds for others to send theirs, in a pass; half of it after each pass in which that was in vain
LONGEST_WAIT = 3.0
# seconds, well below those after which a group looks whether workers wait for each other
SHORT_WAIT = 0.1


class GradientBucket:
    """The gradients of one `FlatMemory` in one pass.

    `keeps`: the memory is kept from pass to pass.
    """

    def __init__(self, memory: FlatMemory, dtype: torch.dtype | None, *, keeps: bool) -> None:
        self.memory, self.dtype, self.keeps = memory, dtype or memory.dtype, keeps
        self._flat: Tensor | None = None
        self._work: Work[Tensor] | None = None
        self._begun = 0  # nanoseconds
        self.came = [False] * len(memory.held)

    @property
    def nbytes(self) -> int:
        """The bytes that the bucket takes at this moment."""
        return 0 if self._flat is None else self._flat.numel() * self._flat.element_size()

    @property
    def full(self) -> bool:
        """Whether all gradients have come."""
        return all(self.came)

    @property
    def sent(self) -> bool:
        """Whether the bucket has left in this pass."""
        return self._work is not None

    def put(self, index: int, grad: Tensor, scale: float) -> None:
        """Take the gradient of one parameter, which may come more than once before the bucket
        leaves.
        """
        held, (start, stop) = self.memory.held[index], self.memory.spans[index]
        if grad.layout != torch.strided:
            raise UsageError(
                f"the gradient of {held.name} is sparse, and shard() cuts dense ones; "
                "make its layer without sparse=True"
            )
        if self.sent:
            raise UsageError(
                f"{held.name} has come to a gradient twice in one backward pass (checkpoints with "
                "use_reentrant=True that share it), when "
                "the first was on its way; say use_reentrant=False"
            )
        if self._flat is None:
            self._flat = torch.empty(
                self.memory.layout.padded, dtype=self.dtype, device=grad.device
            )
            self._flat[sum(self.memory.layout.numels) :].zero_()
        view = self._flat[start:stop].view(grad.shape)
        if self.came[index]:
            view.add_(grad, alpha=scale) if scale else None
        else:
            put(view, grad, scale)
        self.came[index] = True

    def send(self, group: Group) -> None:
        """Begin to sum over the workers; gradients that haven't come count as zeros."""
        layout = self.memory.layout
        if self._flat is None:
            self._flat = torch.zeros(
                layout.padded, dtype=self.dtype, device=self.memory.part.device
            )
        for (start, stop), came in zip(self.memory.spans, self.came, strict=True):
            if not came:
                self._flat[start:stop].zero_()
        self._begun = time.perf_counter_ns()
        # a worker that keeps its bucket must not be waited for, as it waits at the end
        if isinstance(group, UncheckedReduceScatter):
            self._work = group.reduce_scatter_agreed(self._flat)
        elif isinstance(group, WritesResults):
            part = torch.empty(layout.part, dtype=self.dtype, device=self._flat.device)
            self._work = group.reduce_scatter_into(self._flat, part, name=self._named)
        else:
            self._work = group.reduce_scatter(self._flat, name=self._named)

    @property
    def _named(self) -> str:
        return f"the gradients of {self.memory.unit or 'the root'}"

    @property
    def arrived(self) -> bool:
        """Whether the sum is there; asking pushes it forward."""
        return self._work is not None and self._work.done()

    def arrives(self, seconds: float, meter: AxisMeter) -> bool:
        """Wait at most `seconds` for the sum, as `meter` measures, and return whether it is there.

        These are short waits, which the group doesn't take for workers that wait for each other.
        What others need goes on meanwhile.
        """
        assert self._work is not None
        end = time.monotonic() + seconds
        with meter.standing(self._named):
            while not self.arrived and time.monotonic() < end:
                with contextlib.suppress(DeadlineExceeded):
                    self._work.wait(SHORT_WAIT)
        return self.arrived

    def sums(self, meter: AxisMeter) -> list[Tensor]:
        """Wait for the sum, as `meter` measures, and return it cut into pieces.

        The bucket is as before the pass.
        """
        assert self._work is not None
        part = meter.wait(self._work, self._named, self._begun)
        self.reset()
        part = part.to(self.memory.kept_dtype)
        return [part[start:stop] for start, stop in self.memory.places]

    def reset(self) -> None:
        """Forget the pass."""
        self._work = None
        self.came = [False] * len(self.came)
        if not self.keeps:
            self._flat = None


class PassWatcher(Protocol):
    """Whatever follows the backward passes over a cut model."""

    def gradient_came(self, memory: FlatMemory) -> None:
        """Take note that a parameter has its gradient."""
        ...

    def gather_for(self, parameters: Set[int]) -> None:
        """Make the unit whole where it has one of these whole parameters, given by their ids."""
        ...

    def pass_ended(self) -> None:
        """Take note that all workers have ended the pass."""
        ...


class ShardGradients:
    """Takes the gradients of whole parameters and hands those of pieces to a `GradientSink`, in
    every backward pass.

    `group`: one that nothing else uses. `keeps`: the memory of buckets is kept from pass to pass.
    `meter` measures the exchanges.
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
        if isinstance(group, ConnectsAhead):  # no bucket waits for all workers
            group.connect()
        self.buckets = [GradientBucket(memory, dtype, keeps=keeps) for memory in reversed(memories)]
        self._used = [bytearray(len(bucket.came)) for bucket in self.buckets]
        self._next = self._handed = 0
        self._even = True  # all workers have used the same parameters in each pass
        self._patience = LONGEST_WAIT
        self._waits = True  # in this pass
        self._sink: GradientSink | None = None
        self._watchers: list[PassWatcher] = []
        self._watching: dict[int, PassWatcher] = {}  # each memory, by its id
        for number, bucket in enumerate(self.buckets):
            for index, whole in enumerate(bucket.memory.wholes):
                whole.register_post_accumulate_grad_hook(partial(self._came, number, index))

    def deliver_to(self, sink: GradientSink) -> None:
        """Hand gradients to `sink` from now on."""
        self._sink = sink

    def observe(self, watcher: PassWatcher, memories: Iterable[FlatMemory]) -> None:
        """Tell `watcher` of the gradients of parameters in these memories, and of the ends of
        passes, from now on.
        """
        self._watchers.append(watcher)
        self._watching |= {id(memory): watcher for memory in memories}

    @property
    def replicas_diverge(self) -> bool:
        """Whether pieces may change otherwise than by steps of optimizers."""
        return self._sink is not None and self._sink.replicas_diverge

    @property
    def nbytes(self) -> int:
        """The bytes that buckets take at this moment."""
        return sum(bucket.nbytes for bucket in self.buckets)

    @property
    def kept_nbytes(self) -> int:
        return sum(
            bucket.memory.layout.padded * bucket.dtype.itemsize
            for bucket in self.buckets
            if bucket.keeps
        )

    def _came(self, number: int, index: int, whole: Tensor) -> None:
        grad, whole.grad = whole.grad, None
        if grad is None:
            return
        bucket = self.buckets[number]
        name = bucket.memory.held[index].name
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
        if 2 * grad.numel() > bucket.memory.layout.padded:
            self._make_room(0)
        bucket.put(index, grad, self._sink.weigh())
        del grad  # its memory is free while others are waited for
        self._used[number][index] = True
        if (watcher := self._watching.get(id(bucket.memory))) is not None:
            watcher.gradient_came(bucket.memory)
        while self._next < len(self.buckets) and self.buckets[self._next].full:
            self.buckets[self._next].send(self._group)
            self._next += 1
        self._make_room(ON_THE_WAY)
        while self._handed < self._next and self.buckets[self._handed].arrived:
            self._hand_on(self._used[self._handed])

    def _make_room(self, most: int) -> None:
        """Wait until at most so many buckets are on their way, and hand on those that have arrived.

        A worker that doesn't use a parameter keeps its buckets to the end of the pass, and may need
        this worker to get there (zero=3): so no wait is long, and there are none once workers have
        used different parameters.
        """
        while (
            self._even
            and self._waits
            and self._next - self._handed > most
            and not self.buckets[self._handed].keeps
        ):
            bucket = self.buckets[self._handed]
            if not bucket.arrived and not bucket.arrives(self._patience, self._meter):
                self._patience, self._waits = self._patience / 2, False
                return
            self._hand_on(self._used[self._handed])

    def _hand_on(self, used: Sequence[int]) -> None:
        """Hand on the next sum, where there is one: the pieces of the parameters that some
        worker has used.
        """
        bucket = self.buckets[self._handed]
        self._handed += 1
        if bucket.sent and self._sink is not None:
            for piece, grad, counts in zip(
                bucket.memory.pieces, bucket.sums(self._meter), used, strict=True
            ):
                if counts:
                    self._sink.take(piece, grad)

    def gather(self, parameters: Sequence[Tensor]) -> None:
        """Make the units of these whole parameters whole. Collective."""
        ids = {id(parameter) for parameter in parameters}
        for watcher in self._watchers:
            watcher.gather_for(ids)

    def end_pass(self) -> None:
        """End a backward pass, or take part in one in which others have used parameters.

        Collective.
        """
        with self._meter.exchange("the parameters that were used"):
            everyones = self._group.agree(b"".join(self._used))
        self._even = self._even and len(set(everyones)) == 1
        union, used = bytes(any(flags) for flags in zip(*everyones, strict=True)), list[bytes]()
        for bucket in self.buckets:
            used.append(union[: len(bucket.came)])
            union = union[len(bucket.came) :]
        for number in range(self._next, len(self.buckets)):
            if any(used[number]):
                self.buckets[number].send(self._group)
        while self._handed < len(self.buckets):
            self._hand_on(used[self._handed])
        self._reset()

    def abort_pass(self) -> None:
        """Forget a pass that has failed."""
        for bucket in self.buckets:
            bucket.reset()
        self._reset()

    def _reset(self) -> None:
        self._next = self._handed = 0
        self._waits = True
        for flags in self._used:
            flags[:] = bytes(len(flags))
        for watcher in self._watchers:
            watcher.pass_ended()
