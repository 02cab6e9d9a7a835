"""Rounds of local SGD: workers send their changes, and all continue from the mean change.

    start                 values that all replicas had after the last round
    change = now - start  of each worker, weighted by its part of the samples
    mean                  sum of the changes / sum of the weights, over all workers
    start                 moved by the outer optimizer; each replica is set to it (or mixed with it)

Each fragment has rounds of its own. With `delay` a fragment's changes are on their way for some
steps: `_send_fragment` starts the exchange and `_finish_round` ends it. See `LocalSGD`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from typing import Any

import msgpack
import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.codec.codec import plain, to_codec
from paceline.comm.bucket_layout import Bucket, BucketShape, build_buckets, cut_runs, scale_copy
from paceline.errors import RECOVERABLE_ERRORS, UsageError, ViewChanged
from paceline.sync.allreduce import AllReduce
from paceline.sync.base import Slot, check_strategy
from paceline.sync.compressed import CompressedExchange
from paceline.sync.context import SyncContext, rescale_to_part
from paceline.sync.localsgd.fragment import Fragment, FragmentUnit, adaptive
from paceline.sync.localsgd.options import RoundOptions
from paceline.sync.localsgd.outer_memories import OuterMemories, has_memory_per_element
from paceline.sync.routes import find_reducer_maker


class LocalSGDSync:
    """The running side of `LocalSGD`.

    While `_warm_up` isn't None, the strategy is AllReduce and there are no units. Afterwards each
    parameter is in one unit of one of the `_fragments`. A step is open from its first backward to
    `commit`. `_step_counted` says whether the fragments have counted the open step already, as
    `converge` may end a round in the middle of a step. The state of the outer optimizer lives in
    the units, and in `_memories` while a parameter is in no unit.
    """

    replicas_diverge = True  # replicas differ between rounds, and so do their optimizers

    def __init__(self, context: SyncContext, options: RoundOptions) -> None:
        self._context, self._options = context, options
        self._round_steps = (
            options.every.first if isinstance(options.every, adaptive) else options.every
        )
        self._coded = (
            None
            if isinstance(to_codec(options.codec), plain)
            else CompressedExchange(context, options.codec, hosts=True)
        )
        self._reducer = find_reducer_maker("auto", coded=self._coded is not None)(context)
        self._warm_up = AllReduce().begin(context) if options.after else None
        self._slots: list[Slot] = []
        self._grads: dict[int, Tensor] = {}
        self._steps = 0  # since the begin of training
        self._sample_part = 0.0  # this worker's part of the samples of the open step
        self._step_open = self._step_counted = False
        # Of this worker's last round: squared distance of its change from the mean change, and
        # squared norm of the mean change.
        self._drift = (0.0, 0.0)
        self._fragments = [Fragment() for _ in range(options.fragments)]
        self._memories = OuterMemories()
        self.has_sync_points = options.fragments == 1 and not options.alpha

    @property
    def exchanges_in_backward(self) -> bool:
        """Whether the strategy is still in its warm-up with AllReduce."""
        return self._warm_up is not None

    # ---- layout

    def attach(self, slots: Sequence[Slot]) -> None:
        self.converge()
        self._memories.save_units(self._units, self._slots)
        self._release_units()
        self._slots = list(slots)
        if self._warm_up is not None:
            self._warm_up.attach(slots)
        else:
            self._build_units(self._fragments)
            self._memories.restore_units(self._units, self._slots)

    def _build_units(self, rounds: list[Fragment]) -> None:
        """Divide the model among these fragments, and each fragment into buckets. Collective.

        Fragments have about the same number of elements. Replicas must be equal.
        """
        kinds = [
            None if self._coded is None else self._coded.choose_codecs(slot) for slot in self._slots
        ]
        layouts = [
            None if kind is None else (kind, slot.shard)
            for slot, kind in zip(self._slots, kinds, strict=True)
        ]
        shapes = [
            BucketShape.of_parameter(slot.parameter)._replace(kind=kind)
            for slot, kind in zip(self._slots, layouts, strict=True)
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
            for run in cut_runs(shapes, indices, self._bucket_bytes)
        ]
        buckets = build_buckets(shapes, [run for run, _ in runs], self._allocate_flat)
        if self._coded is not None:
            self._coded.use_buckets(buckets, [slot.name for slot in self._slots], shapes, kinds)
        for index, (bucket, (_, fragment)) in enumerate(zip(buckets, runs, strict=True)):
            start = self._read_parameters(bucket, torch.zeros_like(bucket.flat))
            memory = self._options.outer.begin(start)
            fragment.units.append(FragmentUnit(index, bucket, start, memory))

    @property
    def _bucket_bytes(self) -> int:
        return int(self._options.bucket_mb * 1e6)

    @property
    def _units(self) -> list[FragmentUnit]:
        return [unit for fragment in self._fragments for unit in fragment.units]

    def _allocate_flat(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return (
            torch.empty(numel, dtype=dtype, device=device)
            if device.type != "cpu"
            else self._reducer.allocate_bucket(numel, dtype)
        )

    def _read_parameters(self, bucket: Bucket, into: Tensor) -> Tensor:
        """Copy the present parameters of a bucket into a flat tensor, and return it."""
        for number, view in zip(bucket.members, bucket.views_over(into), strict=True):
            view.copy_(self._slots[number].parameter.detach())
        return into

    def _release_units(self) -> None:
        for unit in self._units:
            self._reducer.release_memory(unit.bucket.flat)
        self._fragments = [
            Fragment(self._steps + self._step_open) for _ in range(self._options.fragments)
        ]

    # ---- backward: nothing travels

    def take_gradient(self, number: int, grad: Tensor, scale: float) -> None:
        if self._warm_up is not None:
            self._warm_up.take_gradient(number, grad, scale)
            return
        state = self._context.step_state
        # If several workers share a replica, gradients are summed over them, with global weights.
        # `end_backward` turns the sums into means.
        value = scale_copy(
            grad, state.local_factor(grad, scale) if self._context.sharers is None else scale
        )
        self._grads[number] = self._grads[number] + value if number in self._grads else value

    def overwrites(self, number: int, grad: Tensor) -> bool:
        return self._warm_up is not None and self._warm_up.overwrites(number, grad)

    def end_backward(self, where: str) -> list[tuple[int, Tensor]]:
        self._step_open = True
        if self._warm_up is not None:
            return self._warm_up.end_backward(where)
        gradients, self._grads = list(self._grads.items()), {}
        self._sample_part = self._context.sum_replica_share()
        if self._context.sharers is not None:
            rescale_to_part((gradient for _, gradient in gradients), self._sample_part)
        return gradients

    def note_optimizer_step(self, optimizer: Optimizer) -> None:
        self._step_counted = False

    # ---- rounds

    def commit(self) -> None:
        """End a step, and the rounds that are due with it."""
        self._steps += 1
        if self._warm_up is not None:
            self._warm_up.commit()
            if self._steps >= self._options.after:
                self._context.agreement.attempt_call(self._end_warm_up)
            return
        self._count_step()
        self._sample_part, self._step_open, self._step_counted = 0.0, False, False
        # All workers go through the fragments in the same order, as both calls are collective.
        for index, fragment in enumerate(self._fragments):
            if fragment.in_exchange and fragment.steps_made >= self._options.delay:
                self._finish_round(index, self._options.alpha)
            if self._is_due(index):
                self._send_fragment(index)
                if not self._options.delay:
                    self._finish_round(index, 0.0)
        if self._coded is not None:
            self._coded.commit()

    def _count_step(self) -> None:
        """Count the step under way in all rounds, unless that was done."""
        if not self._step_counted:
            for fragment in self._fragments:
                fragment.steps_made += 1
                fragment.sample_parts += self._sample_part
        self._step_counted = True

    def _end_warm_up(self) -> None:
        if self._warm_up is not None:
            self._warm_up.detach()
            self._warm_up = None
        # There are units already if a worker was lost during an earlier try of this call.
        if not self._units:
            self._build_units(self._fragments)
            self._memories.restore_units(self._units, self._slots)

    def _is_due(self, index: int) -> bool:
        """Whether the round of a fragment ends with this step.

        In the first round, fragments are sent at equal distances. From then on each is sent again
        after `_round_steps` steps, so that fragments take turns.
        """
        fragment = self._fragments[index]
        local_steps = self._steps - self._options.after
        if local_steps < self._round_steps:
            return local_steps == self._round_steps * (index + 1) // len(self._fragments)
        return fragment.steps_made >= self._round_steps

    def _send_fragment(self, index: int) -> None:
        """End the local steps of a fragment's round; with a delay, start its exchange."""
        fragment = self._fragments[index]
        fragment.own_weight, fragment.sent_steps = (
            fragment.sample_parts / fragment.steps_made,
            fragment.steps_made,
        )
        fragment.steps_made, fragment.sample_parts, fragment.in_exchange, fragment.has_arrived = (
            0,
            0.0,
            True,
            False,
        )
        # Without a delay, `_wait_for_changes` starts the exchange, as it follows at once.
        self._start_exchange(index, adapt=True) if self._options.delay else None

    def _start_exchange(self, index: int, *, adapt: bool) -> None:
        """Exchange the weights of all workers, then start the sums of a fragment's changes."""
        fragment, agreement = self._fragments[index], self._context.agreement
        body = msgpack.packb(
            [fragment.own_weight, fragment.carried_parts / fragment.sent_steps, self._drift]
        )
        answers = [msgpack.unpackb(answer) for answer in agreement.meet(f"round of {index}", body)]
        fragment.present_weight = sum(weight for weight, _, _ in answers)
        fragment.total_weight = (
            fragment.present_weight + sum(carried for _, carried, _ in answers) or 1.0
        )
        if adapt:
            self._adapt_round_steps([drift for _, _, drift in answers])
        for unit in fragment.units:
            flat = unit.weight_change(
                self._compute_change(unit, unit.bucket.flat), fragment.own_weight
            )
            name, unit.started_ns = f"change {unit.index}", time.perf_counter_ns()
            try:
                if self._coded is not None and self._coded.is_coded(unit.index):
                    unit.work = self._coded.all_reduce(unit.index, flat, name)
                else:
                    unit.work = self._reducer.all_reduce(flat, name)
            except RECOVERABLE_ERRORS:
                if agreement.recovery is None:
                    raise
                # Works are missing now, so `_wait_for_changes` starts the exchange again.
                return

    def _compute_change(self, unit: FragmentUnit, into: Tensor) -> Tensor:
        """Compute this replica's change of a unit since the last round, into a flat tensor."""
        return self._read_parameters(unit.bucket, into).sub_(unit.start)

    def _wait_for_changes(self, index: int) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Wait for the sums of a fragment's changes, and for the means of optimizer state."""
        fragment = self._fragments[index]
        if any(unit.work is None for unit in fragment.units):
            self._start_exchange(index, adapt=not self._options.delay)
        works = [unit.work for unit in fragment.units if unit.work is not None]
        if len(works) < len(fragment.units):
            raise ViewChanged("a worker was lost while changes were sent")
        with (
            contextlib.nullcontext()
            if self._coded is None
            else self._coded.measure_wait(
                [(unit.index, unit.started_ns) for unit in fragment.units]
            )
        ):
            changes = [work.wait() for work in works]
        fragment.has_arrived = True
        memories = (
            self._average_optimizer_state(fragment) if self._options.momentum == "averaged" else []
        )
        return changes, memories

    def _discard_exchange(self, index: int) -> None:
        """Discard an exchange that some workers couldn't finish, so that it is started again."""
        fragment = self._fragments[index]
        fragment.has_arrived = False
        for unit in fragment.units:
            unit.work = None
            if self._coded is not None:
                self._coded.abort(unit.index)

    def _finish_round(self, index: int, alpha: float) -> None:
        """End a fragment's round: wait for the mean change, and move the replica by it.

        `alpha`: weight of the replica's own values.
        """
        begun, apart, moved = time.perf_counter_ns(), 0.0, 0.0
        fragment = self._fragments[index]
        changes, memories = self._context.agreement.repeat_until_settled(
            lambda: self._wait_for_changes(index),
            lambda: self._discard_exchange(index),
            f"round of {index}",
        )
        for unit, change in zip(fragment.units, changes, strict=True):
            unit.work = None
            change.div_(fragment.total_weight)
            # Before the outer optimizer, which may write over `change` and moves `start`.
            if isinstance(self._options.every, adaptive):
                own_change = self._compute_change(unit, torch.zeros_like(change))
                apart += float((own_change - change).square().sum())
                moved += float(change.square().sum())
            self._options.outer.move(unit.start, change, unit.memory)
            for slot_index, view in zip(
                unit.bucket.members, unit.bucket.views_over(unit.start), strict=True
            ):
                parameter = self._slots[slot_index].parameter.detach()
                parameter.copy_(view) if not alpha else parameter.lerp_(view, 1 - alpha)
        for memory, mean in memories:
            memory.copy_(mean)
        fragment.end_round(self._steps + self._step_open)
        fragment.equal_step = -1 if alpha else self._steps
        self._drift = (apart, moved)
        self._context.trace.record_span("round", "exchange", begun, time.perf_counter_ns())

    def _adapt_round_steps(self, drifts: Sequence[Sequence[float]]) -> None:
        """Set the length of the next round by the drift of all workers in the last one."""
        apart, moved = (sum(drift[side] for drift in drifts) / len(drifts) for side in (0, 1))
        if isinstance(self._options.every, adaptive) and moved > 0:
            # An exchange must end before the next one of its fragment begins.
            self._round_steps = max(
                self._options.every.next_steps(self._round_steps, math.sqrt(apart / moved)),
                self._options.delay + 1,
            )

    def _average_optimizer_state(self, fragment: Fragment) -> list[tuple[Tensor, Tensor]]:
        """Average the optimizer state of a fragment over all workers. Collective.

        Returns each state tensor with its mean, without writing to it.
        """
        tensors, pairs = [], []
        for unit in fragment.units:
            for slot in (self._slots[index] for index in unit.bucket.members):
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

    def replicated_state(self) -> dict[str, Tensor] | None:
        """Values of the last round, if all replicas are equal to them; else None.

        During the warm-up replicas are always equal, and the strategy has no state of its own.
        """
        if self._warm_up is not None:
            return {}
        if any(
            fragment.equal_step != self._steps for fragment in self._fragments if fragment.units
        ):
            return None
        memories = {
            f"momentum of rounds, {unit.index}": unit.memory
            for unit in self._units
            if unit.memory is not None
        }
        return {
            f"where all last agreed to be, {unit.index}": unit.start for unit in self._units
        } | memories

    def converge(self) -> None:
        """End all rounds now; the step under way is part of them."""
        if self._warm_up is not None:
            return
        if self._step_open:
            self._count_step()
        for index, fragment in enumerate(self._fragments):
            if fragment.in_exchange:
                self._finish_round(index, self._options.alpha)
                # Replicas still differ, by later steps or by `alpha`: make one more round.
                fragment.steps_made = max(fragment.steps_made, 1)
            if fragment.units and fragment.steps_made:
                self._send_fragment(index)
                self._finish_round(index, 0.0)
        if self._coded is not None:
            self._coded.commit()

    # ---- the rest of the life of a strategy

    def abort(self) -> None:
        self._grads.clear()
        self._sample_part, self._step_open = 0.0, False
        if self._warm_up is not None:
            self._warm_up.abort()
        if self._coded is not None:
            self._coded.abort()

    def join_info(self) -> Any:
        warm = None if self._warm_up is None else self._warm_up.join_info()
        coded = None if self._coded is None or not self._units else self._coded.join_info()
        return {"steps": self._steps, "every": self._round_steps, "warm": warm, "coded": coded}

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Keep the values of the last round, and start unfinished exchanges again."""
        layout = self.join_info() if layout is None else layout
        self._context, self._reducer = (
            context,
            find_reducer_maker("auto", coded=self._coded is not None)(context),
        )
        self._steps, self._round_steps = layout["steps"], layout["every"]
        if self._coded is not None:
            self._coded.regroup()
            if layout["coded"] is not None:
                self._coded.load_join_info(layout["coded"])
        if not self._have_rounds_begun():
            if self._warm_up is not None:
                self._warm_up.regroup(context, layout["warm"])
            return
        self._warm_up = None
        codec_states = None if self._coded is None else self._coded.all_states
        # Made beside the old ones: if another worker is lost in this call, nothing has changed.
        rounds = [Fragment() for _ in self._fragments]
        self._build_units(rounds)
        for new_fragment, old_fragment in zip(rounds, self._fragments, strict=True):
            # Not strict, as a worker that has just joined may have no units.
            for new, old in zip(new_fragment.units, old_fragment.units, strict=False):
                new.start, new.memory, new.carried_change, new.copied_change = (
                    old.start,
                    old.memory,
                    old.carried_change,
                    old.copied_change,
                )
                # The exchange is started again, so the codec's new state of it isn't valid.
                if (
                    not old_fragment.has_arrived
                    and self._coded is not None
                    and codec_states is not None
                ):
                    codec_states[1].pop(old.index, None)
            old_fragment.units = new_fragment.units
        if self._coded is not None and codec_states is not None:
            self._coded.restore_states(codec_states)

    def _have_rounds_begun(self) -> bool:
        """Whether some worker has begun with rounds. Collective.

        Others may not have, if a worker was lost at the end of the warm-up.
        """
        return not self._options.after or any(
            self._context.group.gather_bytes(b"1" if self._units else b"")
        )

    def load_from_peer(self, state: dict[str, Any]) -> None:
        for unit, memory in zip(self._units, state["memory"], strict=True):
            unit.memory = unit.memory if memory is None else memory
            self._read_parameters(unit.bucket, unit.start)
        self._memories.load_saved(state["memories"])
        self._memories.restore_units(self._units, self._slots)
        for fragment in self._fragments:
            fragment.steps_made, fragment.sample_parts = 0, 0.0
            fragment.end_round(self._steps)

    @property
    def has_unreplicated_state(self) -> bool:
        return self._warm_up is None and bool(self._units)

    def unreplicated_state(self) -> dict[str, Any] | None:
        """This worker's changes since the last rounds, and the residuals of its codec."""
        if not self.has_unreplicated_state:
            return None
        coded = None if self._coded is None else self._coded.unreplicated_state()
        rounds = [fragment.copy_changes(self._compute_change) for fragment in self._fragments]
        return {"rounds": rounds, "coded": coded}

    def load_unreplicated_state(self, state: dict[str, Any], step: int) -> bool:
        """Add a lost worker's changes to the rounds under way.

        Rounds that have ended after `step` have included them already.
        """
        has_unfinished = any(fragment.ended_step <= step for fragment in self._fragments)
        rounds = list(zip(self._fragments, state["rounds"], strict=False))
        if (
            not has_unfinished
            or len(rounds) != len(state["rounds"])
            or not all(fragment.has_shapes_of(changes) for fragment, changes in rounds)
        ):
            return False
        for fragment, changes in rounds:
            if fragment.ended_step <= step and changes is not None:
                fragment.carry_changes(changes)
        if self._coded is not None and state["coded"] is not None:
            stale = [fragment for fragment in self._fragments if fragment.ended_step > step]
            self._coded.load_unreplicated_state(
                state["coded"], {unit.index for fragment in stale for unit in fragment.units}
            )
        return True

    def detach(self) -> None:
        self._release_units()
        self._reducer.close()
        if self._warm_up is not None:
            self._warm_up.detach()
        if self._coded is not None:
            self._coded.close()

    def state_dict(self) -> dict[str, Any]:
        """State of the outer optimizer and the codec. Replicas must be equal."""
        units = self._units
        coded = {} if self._coded is None or not units else self._coded.state_dict()
        return {
            "steps": self._steps + self._step_open,
            "every": self._round_steps,
            "memory": [None if has_memory_per_element(unit) else unit.memory for unit in units],
            "memories": self._memories.copy_all(units, self._slots),
            "sizes": [unit.start.numel() for unit in units],
            "coded": coded,
        }

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        saved = [state for state in states if state]
        check_strategy("LocalSGD", saved, "every")
        if saved:
            self._steps, self._round_steps = saved[0]["steps"], saved[0]["every"]
            if self._warm_up is not None and self._steps >= self._options.after:
                self._end_warm_up()
        units = self._units
        if saved and units:
            # Memories by unit fit only the same units. Those by name (below) fit any.
            if saved[0]["sizes"] == [unit.start.numel() for unit in units]:
                for unit, memory in zip(units, saved[0]["memory"], strict=True):
                    unit.memory = unit.memory if memory is None or unit.memory is None else memory
            elif self._coded is not None or any(
                memory is not None for memory in saved[0]["memory"]
            ):
                raise UsageError(
                    "this checkpoint was written for another model, with other parameters "
                    "unfrozen, or with other fragments or bucket_mb, and its residuals of a codec "
                    "or its momentum without names (of an older version) don't fit here; "
                    "resume with the same settings"
                )
            self._memories.load_saved(saved[0].get("memories", {}))
            self._memories.restore_units(units, self._slots)
            if self._coded is not None:
                self._coded.load_state_dicts([state["coded"] for state in saved if state["coded"]])
        # The parameters come from the checkpoint: every replica starts a new round from them.
        for unit in units:
            self._read_parameters(unit.bucket, unit.start)
        for fragment in self._fragments:
            fragment.steps_made, fragment.sample_parts = 0, 0.0
