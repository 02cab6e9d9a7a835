"""How the changes of a fragment travel: its buckets, its sums over workers, and its codec.

fragment 0 = units [a b] [c]      each unit has a bucket: one flat tensor
start    weights of all workers are gathered, then each unit's change is summed
wait     the sums have arrived; momentum of optimizers is averaged if `LocalSGD` says so
discard  a worker was lost: the sums are started again by the workers that are left
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import msgpack
import torch
from torch import Tensor

from paceline.codec.codec import plain, to_codec
from paceline.comm.bucket_layout import Bucket, BucketShape, build_buckets, cut_runs
from paceline.errors import RECOVERABLE_ERRORS, ViewChanged
from paceline.sync.base import Slot
from paceline.sync.compressed import CompressedExchange
from paceline.sync.context import SyncContext
from paceline.sync.localsgd.fragment import Fragment, FragmentUnit
from paceline.sync.localsgd.options import RoundOptions
from paceline.sync.localsgd.round_length import RoundLength
from paceline.sync.routes import find_reducer_maker


class FragmentExchange:
    """Builds the units of fragments, and sums their changes over all workers.

    Args:
        context: Groups and step of the strategy.
        options: Options of `LocalSGD`.
        length: Length of the rounds. It is adapted when all workers exchange their drifts.
    """

    def __init__(self, context: SyncContext, options: RoundOptions, length: RoundLength) -> None:
        self._context, self._options, self._length = context, options, length
        self.codecs = (
            None
            if isinstance(to_codec(options.codec), plain)
            else CompressedExchange(context, options.codec, hosts=True)
        )
        self._reducer = find_reducer_maker("auto", coded=self.codecs is not None)(context)
        self.slots: list[Slot] = []  # the parameters of the model

    def set_slots(self, slots: Sequence[Slot]) -> None:
        """Take these parameters in place of the former ones."""
        self.slots = list(slots)

    def commit(self) -> None:
        """Keep the new states of the codec."""
        if self.codecs is not None:
            self.codecs.commit()

    def regroup(self, context: SyncContext) -> None:
        """Continue in another group of workers."""
        self._context = context
        self._reducer = find_reducer_maker("auto", coded=self.codecs is not None)(context)
        if self.codecs is not None:
            self.codecs.regroup()

    def close(self) -> None:
        """End threads and groups."""
        self._reducer.close()
        if self.codecs is not None:
            self.codecs.close()

    # ---- units

    def build_units(self, rounds: list[Fragment]) -> None:
        """Divide the model among these fragments, and each fragment into buckets. Collective.

        Fragments have about the same number of elements. Replicas must be equal.
        """
        kinds = [
            None if self.codecs is None else self.codecs.choose_codecs(slot) for slot in self.slots
        ]
        layouts = [
            None if kind is None else (kind, slot.shard)
            for slot, kind in zip(self.slots, kinds, strict=True)
        ]
        shapes = [
            BucketShape.of_parameter(slot.parameter)._replace(kind=kind)
            for slot, kind in zip(self.slots, layouts, strict=True)
        ]
        total, before, count = sum(shape.numel for shape in shapes) or 1, 0, self._options.fragments
        members = [list[int]() for _ in range(count)]
        # A parameter goes to the fragment in which its first element lies.
        for index, shape in enumerate(shapes):
            members[min(before * count // total, count - 1)].append(index)
            before += shape.numel
        runs = [
            (run, fragment)
            for indices, fragment in zip(members, rounds, strict=True)
            for run in cut_runs(shapes, indices, int(self._options.bucket_mb * 1e6))
        ]
        buckets = build_buckets(shapes, [run for run, _ in runs], self._allocate_flat)
        if self.codecs is not None:
            self.codecs.use_buckets(buckets, [slot.name for slot in self.slots], shapes, kinds)
        for index, (bucket, (_, fragment)) in enumerate(zip(buckets, runs, strict=True)):
            start = self.read_parameters(bucket, torch.zeros_like(bucket.flat))
            memory = self._options.outer.begin(start)
            fragment.units.append(FragmentUnit(index, bucket, start, memory))

    def _allocate_flat(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return (
            torch.empty(numel, dtype=dtype, device=device)
            if device.type != "cpu"
            else self._reducer.allocate_bucket(numel, dtype)
        )

    def read_parameters(self, bucket: Bucket, into: Tensor) -> Tensor:
        """Copy the present parameters of a bucket into a flat tensor, and return it."""
        for number, view in zip(bucket.members, bucket.views_over(into), strict=True):
            view.copy_(self.slots[number].parameter.detach())
        return into

    def compute_change(self, unit: FragmentUnit, into: Tensor) -> Tensor:
        """Compute this replica's change of a unit since the last round, into a flat tensor."""
        return self.read_parameters(unit.bucket, into).sub_(unit.start)

    def release_units(self, units: Iterable[FragmentUnit]) -> None:
        """Free the memory of units that are about to be replaced."""
        for unit in units:
            self._reducer.release_memory(unit.bucket.flat)

    def restore_codecs(self, fragments: Sequence[Fragment], states: Any) -> None:
        """Restore the codec's states from before `regroup`, for exchanges that have arrived.

        Other exchanges are started again, so the codec's new states of those aren't valid.
        """
        if self.codecs is None:
            return
        for fragment in fragments:
            for unit in fragment.units if not fragment.has_arrived else ():
                states[1].pop(unit.index, None)
        self.codecs.restore_states(states)

    # ---- sums

    def start(self, index: int, fragment: Fragment, *, adapt: bool) -> None:
        """Exchange the weights of all workers, then start the sums of a fragment's changes.

        Args:
            index: Index of the fragment, for messages.
            fragment: The fragment. Its units get works.
            adapt: Whether the length of rounds is adapted to the drifts of all workers.
        """
        agreement = self._context.agreement
        body = msgpack.packb(
            [fragment.own_weight, fragment.carried_parts / fragment.sent_steps, self._length.drift]
        )
        answers = [msgpack.unpackb(answer) for answer in agreement.meet(f"round of {index}", body)]
        fragment.present_weight = sum(weight for weight, _, _ in answers)
        fragment.total_weight = (
            fragment.present_weight + sum(carried for _, carried, _ in answers) or 1.0
        )
        if adapt:
            self._length.adapt_steps([drift for _, _, drift in answers])
        for unit in fragment.units:
            flat = unit.weight_change(
                self.compute_change(unit, unit.bucket.flat), fragment.own_weight
            )
            name, unit.started_ns = f"change {unit.index}", time.perf_counter_ns()
            try:
                if self.codecs is not None and self.codecs.is_coded(unit.index):
                    unit.work = self.codecs.all_reduce(unit.index, flat, name)
                else:
                    unit.work = self._reducer.all_reduce(flat, name)
            except RECOVERABLE_ERRORS:
                if agreement.recovery is None:
                    raise
                # Works are missing now, so `wait` starts the exchange again.
                return

    def wait(
        self, index: int, fragment: Fragment
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Wait for the sums of a fragment's changes, and for the means of optimizer state.

        Returns:
            The sum of each unit, and pairs of a state tensor and its mean.
        """
        if any(unit.work is None for unit in fragment.units):
            self.start(index, fragment, adapt=not self._options.delay)
        works = [unit.work for unit in fragment.units if unit.work is not None]
        if len(works) < len(fragment.units):
            raise ViewChanged("a worker was lost while changes were sent")
        with (
            contextlib.nullcontext()
            if self.codecs is None
            else self.codecs.measure_wait(
                [(unit.index, unit.started_ns) for unit in fragment.units]
            )
        ):
            changes = [work.wait() for work in works]
        fragment.has_arrived = True
        averaged = self._options.momentum == "averaged"
        return changes, self._average_optimizer_state(fragment) if averaged else []

    def discard(self, fragment: Fragment) -> None:
        """Discard an exchange that some workers couldn't finish, so that it is started again."""
        fragment.has_arrived = False
        for unit in fragment.units:
            unit.work = None
            if self.codecs is not None:
                self.codecs.abort(unit.index)

    def _average_optimizer_state(self, fragment: Fragment) -> list[tuple[Tensor, Tensor]]:
        """Average the optimizer state of a fragment over all workers. Collective.

        Returns each state tensor with its mean, without writing to it.
        """
        tensors, pairs = [], []
        for unit in fragment.units:
            for slot in (self.slots[index] for index in unit.bucket.members):
                state = (
                    {} if slot.optimizer is None else slot.optimizer.state.get(slot.parameter, {})
                )
                # Momentum has the shape of its parameter. Step counts, for example, don't.
                same_shape = [
                    value
                    for value in state.values()
                    if isinstance(value, Tensor) and value.shape == slot.parameter.shape
                ]
                tensors += [value for value in same_shape if value.is_floating_point()]
        # One sum per dtype, in an order that is the same on all workers.
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same_dtype = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in same_dtype]).mul_(
                fragment.own_weight
            )
            total = self._reducer.all_reduce(flat, f"momentum {dtype}").wait()
            means = total.div_(fragment.present_weight or 1.0)
            pieces = means.split([tensor.numel() for tensor in same_dtype])
            pairs += [
                (tensor, mean.view(tensor.shape))
                for tensor, mean in zip(same_dtype, pieces, strict=True)
            ]
        return pairs
