"""Rounds of local SGD: each worker sends its changes, their mean is taken, and all go on from
there (see `LocalSGD`).
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

from paceline.codec.codec import lift, plain
from paceline.comm.bucket_layout import Bucket, BucketShape, build_buckets, cut_runs, scale_copy
from paceline.errors import LOSSES, UsageError, ViewChanged
from paceline.sync.allreduce import AllReduce
from paceline.sync.base import Slot, check_strategy
from paceline.sync.compressed import CompressedExchange
from paceline.sync.context import SyncContext, among_own
from paceline.sync.localsgd.fragment import Fragment, FragmentUnit, adaptive
from paceline.sync.localsgd.memories import OuterMemories, named
from paceline.sync.localsgd.options import RoundOptions
from paceline.sync.routes import reducer


class LocalSGDSync:
    """The running side of `LocalSGD`."""

    replicas_diverge = True  # replicas differ between rounds, and so do their optimizers

    def __init__(self, context: SyncContext, options: RoundOptions) -> None:
        self._context, self._options = context, options
        self._every = options.every.first if isinstance(options.every, adaptive) else options.every
        self._coded = (
            None
            if isinstance(lift(options.codec), plain)
            else CompressedExchange(context, options.codec, hosts=True)
        )
        self._reducer = reducer("auto", coded=self._coded is not None)(context)
        self._warm = AllReduce().begin(context) if options.after else None
        self._slots: list[Slot] = []
        self._grads: dict[int, Tensor] = {}
        self._steps = 0  # taken in all
        self._part = 0.0  # mine of the samples of this step
        self._open = self._counted = False  # a step is under way; its change is in a round already
        # of my last round: squares of what my change differs by, and of the mean change
        self._drift = (0.0, 0.0)
        self._rounds = [Fragment() for _ in range(options.fragments)]
        self._memories = OuterMemories()
        self.has_sync_points = options.fragments == 1 and not options.alpha

    @property
    def exchanges_in_backward(self) -> bool:
        """Whether the strategy still warms up with AllReduce."""
        return self._warm is not None

    # ---- layout

    def attach(self, slots: Sequence[Slot]) -> None:
        self.converge()
        self._memories.take(self._units, self._slots)
        self._release()
        self._slots = list(slots)
        if self._warm is not None:
            self._warm.attach(slots)
        else:
            self._lay_out(self._rounds)
            self._memories.give(self._units, self._slots)

    def _lay_out(self, rounds: list[Fragment]) -> None:
        """Cut the model into these fragments, of about the same size, and those into buckets;
        all replicas are equal now. Collective.
        """
        kinds = [None if self._coded is None else self._coded.kind(slot) for slot in self._slots]
        layouts = [
            None if kind is None else (kind, slot.shard)
            for slot, kind in zip(self._slots, kinds, strict=True)
        ]
        shapes = [
            BucketShape.of_parameter(slot.parameter)._replace(kind=kind)
            for slot, kind in zip(self._slots, layouts, strict=True)
        ]
        whole, before, count = sum(shape.numel for shape in shapes) or 1, 0, self._options.fragments
        members = [list[int]() for _ in range(count)]
        for number, shape in enumerate(shapes):
            members[min(before * count // whole, count - 1)].append(number)
            before += shape.numel
        runs = [
            (run, turn)
            for numbers, turn in zip(members, rounds, strict=True)
            for run in cut_runs(shapes, numbers, self._limit)
        ]
        buckets = build_buckets(shapes, [run for run, _ in runs], self._empty)
        if self._coded is not None:
            self._coded.lay_out(buckets, [slot.name for slot in self._slots], shapes, kinds)
        for index, (bucket, (_, turn)) in enumerate(zip(buckets, runs, strict=True)):
            start = self._read(bucket, torch.zeros_like(bucket.flat))
            turn.units.append(FragmentUnit(index, bucket, start, self._options.outer.begin(start)))

    @property
    def _limit(self) -> int:
        return int(self._options.bucket_mb * 1e6)

    @property
    def _units(self) -> list[FragmentUnit]:
        return [unit for turn in self._rounds for unit in turn.units]

    def _empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return (
            torch.empty(numel, dtype=dtype, device=device)
            if device.type != "cpu"
            else self._reducer.empty(numel, dtype)
        )

    def _read(self, bucket: Bucket, into: Tensor) -> Tensor:
        """Copy the parameters as they are, laid out as in the bucket."""
        for number, view in zip(bucket.members, bucket.views_over(into), strict=True):
            view.copy_(self._slots[number].parameter.detach())
        return into

    def _release(self) -> None:
        for unit in self._units:
            self._reducer.release(unit.bucket.flat)
        self._rounds = [Fragment(self._steps + self._open) for _ in range(self._options.fragments)]

    # ---- backward: nothing travels

    def ready(self, number: int, grad: Tensor, scale: float) -> None:
        if self._warm is not None:
            self._warm.ready(number, grad, scale)
            return
        state = self._context.step_state
        value = scale_copy(
            grad, state.local_factor(grad, scale) if self._context.sharers is None else scale
        )
        self._grads[number] = self._grads[number] + value if number in self._grads else value

    def overwrites(self, number: int, grad: Tensor) -> bool:
        return self._warm is not None and self._warm.overwrites(number, grad)

    def backward_done(self, where: str) -> list[tuple[int, Tensor]]:
        self._open = True
        if self._warm is not None:
            return self._warm.backward_done(where)
        found, self._grads = list(self._grads.items()), {}
        self._part = self._context.replica_share()
        if self._context.sharers is not None:  # gradients are sums over them
            among_own((total for _, total in found), self._part)
        return found

    def stepped(self, optimizer: Optimizer) -> None:
        self._counted = False

    # ---- rounds

    def commit(self) -> None:
        """End a step, and with it perhaps a round."""
        self._steps += 1
        if self._warm is not None:
            self._warm.commit()
            if self._steps >= self._options.after:
                self._context.agreement.attempt_call(self._end_warm_up)
            return
        self._count()
        self._part, self._open, self._counted = 0.0, False, False
        for number, turn in enumerate(self._rounds):
            if turn.flying and turn.steps >= self._options.delay:
                self._land(number, self._options.alpha)
            if self._due(number):
                self._send(number)
                if not self._options.delay:
                    self._land(number, 0.0)
        if self._coded is not None:
            self._coded.commit()

    def _count(self) -> None:
        """Count the step under way, which has changed my replica."""
        if not self._counted:
            for turn in self._rounds:
                turn.steps += 1
                turn.parts += self._part
        self._counted = True

    def _end_warm_up(self) -> None:
        if self._warm is not None:
            self._warm.detach()
            self._warm = None
        if not self._units:  # or a worker was lost in between, and they were made since
            self._lay_out(self._rounds)
            self._memories.give(self._units, self._slots)

    def _due(self, number: int) -> bool:
        """Whether a fragment is to be sent.

        Fragments take turns: each first comes after a part of a round, then after whole ones.
        """
        turn = self._rounds[number]
        local = self._steps - self._options.after
        if local < self._every:  # the first round
            return local == self._every * (number + 1) // len(self._rounds)
        return turn.steps >= self._every

    def _send(self, number: int) -> None:
        """Send my change of a fragment, weighted by my samples."""
        turn = self._rounds[number]
        turn.mine, turn.length = turn.parts / turn.steps, turn.steps
        turn.steps, turn.parts, turn.flying, turn.here = 0, 0.0, True, False
        self._launch(number, adapt=True) if self._options.delay else None

    def _launch(self, number: int, *, adapt: bool) -> None:
        turn, agreement = self._rounds[number], self._context.agreement
        mine = msgpack.packb([turn.mine, turn.lost / turn.length, self._drift])
        found = [msgpack.unpackb(body) for body in agreement.meet(f"round of {number}", mine)]
        turn.living = sum(weight for weight, _, _ in found)
        turn.weights = turn.living + sum(lost for _, lost, _ in found) or 1.0
        if adapt:
            self._adapt([drift for _, _, drift in found])
        for unit in turn.units:
            flat = unit.weigh(self._changed(unit, unit.bucket.flat), turn.mine)
            name, unit.begun = f"change {unit.index}", time.perf_counter_ns()
            try:
                if self._coded is not None and self._coded.takes(unit.index):
                    unit.work = self._coded.all_reduce(unit.index, flat, name)
                else:
                    unit.work = self._reducer.all_reduce(flat, name)
            except LOSSES:
                if agreement.recovery is None:
                    raise
                return  # it is sent anew when it is waited for

    def _changed(self, unit: FragmentUnit, into: Tensor) -> Tensor:
        """Compute my change since all last agreed."""
        return self._read(unit.bucket, into).sub_(unit.start)

    def _arrive(self, number: int) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        """Wait for the changes of all workers, and for the means of their optimizers' state."""
        turn = self._rounds[number]
        if any(unit.work is None for unit in turn.units):
            self._launch(number, adapt=not self._options.delay)
        works = [unit.work for unit in turn.units if unit.work is not None]
        if len(works) < len(turn.units):
            raise ViewChanged("a worker was lost while changes were sent")
        with (
            contextlib.nullcontext()
            if self._coded is None
            else self._coded.awaited([(unit.index, unit.begun) for unit in turn.units])
        ):
            changes = [work.wait() for work in works]
        turn.here = True
        return changes, self._mean_memories(turn) if self._options.momentum == "averaged" else []

    def _void(self, number: int) -> None:
        """Discard an exchange in which a worker was lost before all had its result; it is sent
        anew.
        """
        turn = self._rounds[number]
        turn.here = False
        for unit in turn.units:
            unit.work = None
            if self._coded is not None:
                self._coded.abort(unit.index)

    def _land(self, number: int, alpha: float) -> None:
        """Go on from the mean change of all workers, once it has arrived."""
        begun, apart, moved, turn = time.perf_counter_ns(), 0.0, 0.0, self._rounds[number]
        changes, memories = self._context.agreement.repeat_until_settled(
            lambda: self._arrive(number), lambda: self._void(number), f"round of {number}"
        )
        for unit, change in zip(turn.units, changes, strict=True):
            unit.work = None
            change.div_(turn.weights)
            if isinstance(self._options.every, adaptive):
                mine = self._changed(unit, torch.zeros_like(change))
                apart += float((mine - change).square().sum())
                moved += float(change.square().sum())
            self._options.outer.move(unit.start, change, unit.memory)
            for index, view in zip(
                unit.bucket.members, unit.bucket.views_over(unit.start), strict=True
            ):
                parameter = self._slots[index].parameter.detach()
                parameter.copy_(view) if not alpha else parameter.lerp_(view, 1 - alpha)
        for memory, mean in memories:
            memory.copy_(mean)
        turn.land(self._steps + self._open)
        turn.level = -1 if alpha else self._steps
        self._drift = (apart, moved)
        self._context.trace.record("round", "exchange", begun, time.perf_counter_ns())

    def _adapt(self, drifts: Sequence[Sequence[float]]) -> None:
        """Set the length of the next round by how far replicas had drifted apart at the end of
        the last one.
        """
        apart, moved = (sum(drift[side] for drift in drifts) / len(drifts) for side in (0, 1))
        if isinstance(self._options.every, adaptive) and moved > 0:
            self._every = max(
                self._options.every.next(self._every, math.sqrt(apart / moved)),
                self._options.delay + 1,
            )

    def _mean_memories(self, turn: Fragment) -> list[tuple[Tensor, Tensor]]:
        """Return the optimizers' state of a fragment's parameters, and the means of it."""
        tensors, found = [], []
        for unit in turn.units:
            for slot in (self._slots[number] for number in unit.bucket.members):
                state = (
                    {} if slot.optimizer is None else slot.optimizer.state.get(slot.parameter, {})
                )
                alike = [
                    value
                    for value in state.values()
                    if isinstance(value, Tensor) and value.shape == slot.parameter.shape
                ]
                tensors += [value for value in alike if value.is_floating_point()]
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            kind = [tensor for tensor in tensors if tensor.dtype == dtype]
            flat = torch.cat([tensor.reshape(-1) for tensor in kind]).mul_(turn.mine)
            means = (
                self._reducer.all_reduce(flat, f"momentum {dtype}").wait().div_(turn.living or 1.0)
            )
            found += [
                (tensor, mean.view(tensor.shape))
                for tensor, mean in zip(kind, means.split([t.numel() for t in kind]), strict=True)
            ]
        return found

    def replicated_state(self) -> dict[str, Tensor] | None:
        """Return the values that all agreed on, right after a round; during the warm-up an empty
        dict, as all is equal.
        """
        if self._warm is not None:
            return {}
        if any(turn.level != self._steps for turn in self._rounds if turn.units):
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
        """End a round early; the step under way is part of it."""
        if self._warm is not None:
            return
        if self._open:
            self._count()
        for number, turn in enumerate(self._rounds):
            if turn.flying:
                self._land(number, self._options.alpha)
                turn.steps = max(turn.steps, 1)
            if turn.units and turn.steps:
                self._send(number)
                self._land(number, 0.0)
        if self._coded is not None:
            self._coded.commit()

    # ---- the rest of the life of a strategy

    def abort(self) -> None:
        self._grads.clear()
        self._part, self._open = 0.0, False
        if self._warm is not None:
            self._warm.abort()
        if self._coded is not None:
            self._coded.abort()

    def join_info(self) -> Any:
        warm = None if self._warm is None else self._warm.join_info()
        coded = None if self._coded is None or not self._units else self._coded.join_info()
        return {"steps": self._steps, "every": self._every, "warm": warm, "coded": coded}

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Keep the values that all last agreed on, and send anew what has not arrived
        everywhere.
        """
        layout = self.join_info() if layout is None else layout
        self._context, self._reducer = (
            context,
            reducer("auto", coded=self._coded is not None)(context),
        )
        self._steps, self._every = layout["steps"], layout["every"]
        if self._coded is not None:
            self._coded.regroup()
            if layout["coded"] is not None:
                self._coded.follow(layout["coded"])
        if not self._rounds_began():
            if self._warm is not None:
                self._warm.regroup(context, layout["warm"])
            return
        self._warm = None
        kept = None if self._coded is None else self._coded.kept
        rounds = [Fragment() for _ in self._rounds]
        self._lay_out(rounds)  # or another worker is lost meanwhile, and all is as it was
        for turn, old in zip(rounds, self._rounds, strict=True):
            # a worker that has just joined may have none
            for new, unit in zip(turn.units, old.units, strict=False):
                new.start, new.memory, new.carried, new.copied = (
                    unit.start,
                    unit.memory,
                    unit.carried,
                    unit.copied,
                )
                if not old.here and self._coded is not None and kept is not None:
                    kept[1].pop(unit.index, None)
            old.units = turn.units
        if self._coded is not None and kept is not None:
            self._coded.keep(kept)

    def _rounds_began(self) -> bool:
        """Whether rounds have begun, on some worker at least: another may have been lost while
        they began. Collective.
        """
        return not self._options.after or any(
            self._context.group.gather_bytes(b"1" if self._units else b"")
        )

    def load_from_peer(self, state: dict[str, Any]) -> None:
        for unit, memory in zip(self._units, state["memory"], strict=True):
            unit.memory = unit.memory if memory is None else memory
            self._read(unit.bucket, unit.start)
        self._memories.load(state["memories"])
        self._memories.give(self._units, self._slots)
        for turn in self._rounds:
            turn.steps, turn.parts = 0, 0.0
            turn.land(self._steps)

    @property
    def has_unreplicated_state(self) -> bool:
        return self._warm is None and bool(self._units)

    def unreplicated_state(self) -> dict[str, Any] | None:
        """Return my changes since the last rounds, and what a codec has kept."""
        if not self.has_unreplicated_state:
            return None
        coded = None if self._coded is None else self._coded.unreplicated_state()
        return {"rounds": [turn.own(self._changed) for turn in self._rounds], "coded": coded}

    def load_unreplicated_state(self, state: dict[str, Any], step: int) -> bool:
        """Carry a lost worker's changes into the rounds under way; a round that has ended since
        included them.
        """
        fresh = [turn for turn in self._rounds if turn.landed <= step]
        rounds = list(zip(self._rounds, state["rounds"], strict=False))
        if (
            not fresh
            or len(rounds) != len(state["rounds"])
            or not all(turn.fits(theirs) for turn, theirs in rounds)
        ):
            return False
        for turn, theirs in rounds:
            if turn.landed <= step and theirs is not None:
                turn.carry(theirs)
        if self._coded is not None and state["coded"] is not None:
            self._coded.load_unreplicated_state(
                state["coded"],
                {unit.index for turn in self._rounds if turn.landed > step for unit in turn.units},
            )
        return True

    def detach(self) -> None:
        self._release()
        self._reducer.close()
        if self._warm is not None:
            self._warm.detach()
        if self._coded is not None:
            self._coded.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the outer optimizer's state; replicas are equal when it is called."""
        units = self._units
        coded = {} if self._coded is None or not units else self._coded.state_dict()
        return {
            "steps": self._steps + self._open,
            "every": self._every,
            "memory": [None if named(unit) else unit.memory for unit in units],
            "memories": self._memories.known(units, self._slots),
            "sizes": [unit.start.numel() for unit in units],
            "coded": coded,
        }

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        found = [state for state in states if state]
        check_strategy("LocalSGD", found, "every")
        if found:
            self._steps, self._every = found[0]["steps"], found[0]["every"]
            if self._warm is not None and self._steps >= self._options.after:
                self._end_warm_up()
        units = self._units
        if found and units:
            if found[0]["sizes"] == [unit.start.numel() for unit in units]:
                for unit, memory in zip(units, found[0]["memory"], strict=True):
                    unit.memory = unit.memory if memory is None or unit.memory is None else memory
            elif self._coded is not None or any(
                memory is not None for memory in found[0]["memory"]
            ):
                raise UsageError(
                    "this checkpoint was written for another model, with other parameters "
                    "unfrozen, or with other fragments or bucket_mb, "
                    "and a codec has kept something of those, or an older version momentum without "
                    "names: resume with the same"
                )
            self._memories.load(found[0].get("memories", {}))
            self._memories.give(units, self._slots)
            if self._coded is not None:
                self._coded.load_state_dicts([state["coded"] for state in found if state["coded"]])
        for unit in units:
            self._read(unit.bucket, unit.start)
        for turn in self._rounds:
            turn.steps, turn.parts = 0, 0.0
