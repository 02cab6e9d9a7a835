"""Buckets of gradients: their layout, how far this backward has filled them, and their exchange.

bucket         members (slots)      state
0  flat [g9 g8]                     left: its work is under way
1  flat [g7 g6 g5]                  full: leaves as soon as all before it have left
2  flat [g4 g3 g2 g1]               two are missing
                                    next = 1
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.comm.bucket_layout import (
    Bucket,
    BucketShape,
    build_buckets,
    cut_runs,
    put_all_scaled,
    put_scaled,
)
from paceline.comm.group_protocol import Work
from paceline.sync.base import Slot
from paceline.sync.bucket_memory import BucketMemory
from paceline.sync.compressed import CodecOptions, CompressedExchange
from paceline.sync.context import SyncContext
from paceline.sync.routes import Reducer

FIRST_MB = 1.0  # the first bucket is small, so that the exchange starts early
# elements above which a gradient is copied when it comes; smaller ones by the bucket
LARGE = 16 << 10
# Flags of a slot in this backward: its gradient came; it was sparse; it came too late for its
# bucket, or has no bucket.
USED, SPARSE, LATE = 1, 2, 4


class SmallGradients(NamedTuple):
    """Small gradients that wait to be copied into a bucket: three lists of the same length."""

    views: list[Tensor]  # their places in the bucket
    gradients: list[Tensor]
    scales: list[float]

    def clear(self) -> None:
        """Let go of all of them."""
        self.views.clear()
        self.gradients.clear()
        self.scales.clear()


class GradientBuckets:
    """The buckets of all parameters with dense gradients; none before the first backward has ended.

    Invariants: buckets leave in order, so those before `next` have left, and `works` has the work
    of each one that has. `writing` is true from the first gradient of a backward to its end:
    buckets lie in memory that no one else holds. A bucket in `patient` leaves at the end only, as
    its members may come more than once.

    Attributes:
        home: For each slot its bucket and its view there. None: it is sparse, and has no place.
        missing: For each bucket the number of members that have not come in this backward.
        small: For each bucket the small gradients to be copied.
    """

    def __init__(
        self, context: SyncContext, reducer: Reducer, coded: CompressedExchange | None
    ) -> None:
        self._context, self._reducer, self._coded = context, reducer, coded
        self.layout: list[Bucket] = []
        self.home: list[tuple[int, Tensor] | None] = []
        self.missing: list[int] = []
        self.small: list[SmallGradients] = []
        self.works: list[Work[Tensor] | None] = []
        self.next = 0
        self.writing = False
        self.patient: set[int] = set()
        self._begun: list[int] = []  # when each bucket left, nanoseconds
        self._memory: BucketMemory | None = None

    # ---- layout

    def lay_out(
        self,
        slots: Sequence[Slot],
        shapes: Sequence[BucketShape],
        kinds: Sequence[CodecOptions | None],
        *,
        order: Sequence[int],
        sparse: set[int],
        limit: int,
    ) -> None:
        """Make buckets of at most `limit` bytes.

        Args:
            order: Slots in the order of the first worker's first backward.
            sparse: Slots with sparse gradients, which have no place in buckets.
        """
        seen = {*order, *sparse}
        dense = [
            *(slot for slot in order if slot not in sparse),
            # parameters that it hasn't reached: the last come first in backward
            *(slot for slot in reversed(range(len(slots))) if slot not in seen),
        ]
        runs = cut_runs(shapes, dense, limit, int(min(FIRST_MB * 1e6, limit)))
        self.layout = build_buckets(shapes, runs, self._allocate)
        self.home = [None] * len(slots)
        self.patient.clear()
        parameters = [slot.parameter for slot in slots]
        self._memory = BucketMemory(self.layout, self.home, parameters, self._reducer)
        if self._coded is not None:
            self._coded.use_buckets(self.layout, [slot.name for slot in slots], shapes, kinds)
        self.forget_backward()

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self._reducer.allocate_bucket(numel, dtype)
        return torch.empty(numel, dtype=dtype, device=device)

    def release_memory(self) -> None:
        """Give the memory of the buckets back, and have none."""
        if self._memory is not None:
            self._memory.close()
        self.layout, self._memory = [], None

    def move_to_group(self, context: SyncContext, reducer: Reducer) -> None:
        """Have no buckets, and go on with other workers.

        The memory belonged to the old group, and Gloo may still write to it: it is not given back.
        """
        self.layout, self._memory = [], None
        self._context, self._reducer = context, reducer

    # ---- while backward runs

    def forget_backward(self) -> None:
        """Forget a backward that has failed: the next one begins anew."""
        for small in self.small:
            small.clear()
        self.works = [None] * len(self.layout)
        self.writing = False

    def overwrites(self, slot: int, grad: Tensor) -> bool:
        """Whether the exchange of this backward writes over `grad`, the `p.grad` of this slot."""
        self.begin_writing()
        home = self.home[slot] if self._memory is not None else None
        return home is not None and home[1] is grad

    def begin_writing(self) -> None:
        """Begin a backward, in which all members of all buckets are missing so far.

        Buckets go to memory that no one holds, as they are about to be written.
        """
        if not self.writing and self._memory is not None:
            self._memory.choose_memory()
            self.missing = [len(bucket.members) for bucket in self.layout]
            self.small = [SmallGradients([], [], []) for _ in self.layout]
            self._begun = [0] * len(self.layout)
            self.next, self.writing = 0, True

    def put_gradient(self, home: tuple[int, Tensor], gradient: Tensor, scale: float) -> None:
        """Put a gradient, times a scale, into its place; if that fills the bucket, send it.

        Large gradients are copied at once, small ones together when their bucket leaves.
        """
        index, view = home
        if gradient.numel() >= LARGE:
            put_scaled(view, gradient, scale)
        else:
            views, gradients, scales = self.small[index]
            views.append(view)
            gradients.append(gradient)
            scales.append(scale)
        self.missing[index] -= 1
        if not self.missing[index]:
            self.send_full()
        elif self.next and (work := self.works[self.next - 1]) is not None:
            work.done()  # a look at the last bucket that has left pushes it forward

    def send_full(self) -> None:
        """Send the buckets that are full, in order."""
        while (
            self.next < len(self.layout)
            and not self.missing[self.next]
            and self.next not in self.patient
        ):
            self._send_bucket(self.next)
            self.next += 1

    def _send_bucket(self, index: int) -> None:
        self.fill_bucket(index)
        self._begun[index] = time.perf_counter_ns()
        flat, name = self.layout[index].flat, f"bucket {index}"
        if self._coded is not None and self._coded.is_coded(index):
            self.works[index] = self._coded.all_reduce(index, flat, name)
        else:
            last = index == len(self.layout) - 1
            self.works[index] = self._reducer.all_reduce(flat, name, soon=last)

    def fill_bucket(self, index: int) -> None:
        """Copy the small gradients of a bucket, times their scales, in few calls."""
        # Three lists, as it takes long to take a thousand tuples apart.
        views, gradients, scales = small = self.small[index]
        if not views:
            return
        alike = scales.count(scales[0]) == len(scales)
        if not alike:  # passes of different weights
            for view, gradient, scale in zip(*small, strict=True):
                put_scaled(view, gradient, scale)
        elif not put_all_scaled(views, gradients, scales[0]):
            torch._foreach_copy_(views, gradients)
            if scales[0] == 0.0:
                torch._foreach_zero_(views)
            elif scales[0] != 1.0:
                torch._foreach_mul_(views, scales[0])
        small.clear()

    def add_again(self, slot: int, value: Tensor) -> bool:
        """Add a gradient that comes a second time in one backward to its place in the bucket.

        Returns False if the bucket has left, or the slot has no place.
        """
        home = self.home[slot]
        if home is None:
            return False
        index, view = home
        self.patient.add(index)  # from now on this bucket waits for the end
        if self.works[index] is not None:
            return False
        self.fill_bucket(index)
        view.add_(value)
        return True

    # ---- at the end of backward

    def finish_backward(self, own: Sequence[int], union: Sequence[int]) -> None:
        """Send the buckets that have not left, if any worker has used a member, and wait for all.

        Args:
            own: Flags of each slot on this worker. Members that it hasn't used become zeros.
            union: Flags of each slot on all workers together.
        """
        if not self.writing:
            self.begin_writing()
        for index in range(self.next, len(self.layout)):
            bucket = self.layout[index]
            if any(union[slot] & USED for slot in bucket.members):
                self.fill_bucket(index)
                for slot, view in zip(bucket.members, bucket.views, strict=True):
                    if not own[slot] & USED:
                        view.zero_()
                self._send_bucket(index)
        begun = [
            (index, self._begun[index]) for index, work in enumerate(self.works) if work is not None
        ]
        with contextlib.nullcontext() if self._coded is None else self._coded.measure_wait(begun):
            for index, start in begun:
                if (work := self.works[index]) is not None:
                    work.wait()
                    ended = time.perf_counter_ns()
                    self._context.trace.record_span(f"bucket {index}", "bucket", start, ended)
        # works hold memory of the buckets
        self.works = [None] * len(self.layout)
        self.writing = False
