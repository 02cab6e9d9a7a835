"""Rounds of local SGD: workers send their changes, and all continue from the mean change.

    start                 values that all replicas had after the last round
    change = now - start  of each worker, weighted by its part of the samples
    mean                  sum of the changes / sum of the weights, over all workers
    start                 moved by the outer optimizer; each replica is set to it (or mixed with it)

Each fragment has rounds of its own. With `delay` a fragment's changes are on their way for some
steps: `_send_fragment` starts the exchange and `_finish_round` ends it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.sync.base import Slot
from paceline.sync.context import SyncContext
from paceline.sync.localsgd.exchange import FragmentExchange
from paceline.sync.localsgd.fragment import Fragment, FragmentUnit
from paceline.sync.localsgd.options import RoundOptions
from paceline.sync.localsgd.outer_memories import OuterMemories, has_memory_per_element
from paceline.sync.localsgd.round_length import RoundLength


class Rounds:
    """The rounds of all fragments of a model.

    There are no units until `build_units`. From then on each parameter is in one unit of one
    fragment. A step is open from `open_step` to `end_step` or `abort`. `_step_counted` says
    whether the fragments have counted the open step already, as `converge` may end a round in the
    middle of a step. The state of the outer optimizer lives in the units, and in `_memories` while
    a parameter is in no unit.
    """

    def __init__(self, context: SyncContext, options: RoundOptions) -> None:
        self._context, self._options = context, options
        self._length = RoundLength(options.every, options.delay)
        self._exchange = FragmentExchange(context, options, self._length)
        self._fragments = [Fragment() for _ in range(options.fragments)]
        self._memories = OuterMemories()
        self.steps = 0  # since the begin of training
        self._sample_part = 0.0  # this worker's part of the samples of the open step
        self._step_open = self._step_counted = False

    # ---- units

    @property
    def units(self) -> list[FragmentUnit]:
        """Units of all fragments."""
        return [unit for fragment in self._fragments for unit in fragment.units]

    def set_slots(self, slots: Sequence[Slot]) -> None:
        """Take these parameters in place of the former ones. There are no units afterwards."""
        self._memories.save_units(self.units, self._exchange.slots)
        self._exchange.release_units(self.units)
        self._exchange.set_slots(slots)
        self._fragments = [
            Fragment(self.steps + self._step_open) for _ in range(self._options.fragments)
        ]

    def build_units(self) -> None:
        """Build the units of all fragments, and begin their first rounds. Collective."""
        self._exchange.build_units(self._fragments)
        self._memories.restore_units(self.units, self._exchange.slots)

    def close(self) -> None:
        """Free all memory, and end threads and groups."""
        self._exchange.release_units(self.units)
        self._exchange.close()

    # ---- steps

    def open_step(self) -> None:
        """Open a step, if it isn't open."""
        self._step_open = True

    def set_sample_part(self, part: float) -> None:
        """Set this worker's part of the samples of the open step, from 0 to 1."""
        self._sample_part = part

    def note_optimizer_step(self) -> None:
        """Note that an optimizer has changed parameters since the last round."""
        self._step_counted = False

    def end_warm_up_step(self) -> None:
        """End a step in which replicas are kept equal by AllReduce."""
        self.steps += 1

    def end_step(self) -> None:
        """End a step, and the rounds that are due with it. Collective."""
        self.steps += 1
        self._count_step()
        self._sample_part, self._step_open, self._step_counted = 0.0, False, False
        # All workers go through the fragments in the same order, as both calls are collective.
        for index, fragment in enumerate(self._fragments):
            if fragment.in_exchange and fragment.steps_made >= self._options.delay:
                self._finish_round(index, self._options.alpha)
            local_steps = self.steps - self._options.after
            if self._length.is_due(fragment, index, len(self._fragments), local_steps):
                self._send_fragment(index)
                if not self._options.delay:
                    self._finish_round(index, 0.0)
        self._exchange.commit()

    def converge(self) -> None:
        """End all rounds now; the step under way is part of them. Collective."""
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
        self._exchange.commit()

    def abort(self) -> None:
        """Discard the open step."""
        self._sample_part, self._step_open = 0.0, False
        if self._exchange.codecs is not None:
            self._exchange.codecs.abort()

    def _count_step(self) -> None:
        """Count the step under way in all rounds, unless that was done."""
        if not self._step_counted:
            for fragment in self._fragments:
                fragment.steps_made += 1
                fragment.sample_parts += self._sample_part
        self._step_counted = True

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
        # Without a delay, `wait` starts the exchange, as it follows at once.
        self._exchange.start(index, fragment, adapt=True) if self._options.delay else None

    def _finish_round(self, index: int, alpha: float) -> None:
        """End a fragment's round: wait for the mean change, and move the replica by it.

        `alpha`: weight of the replica's own values.
        """
        begun = time.perf_counter_ns()
        fragment = self._fragments[index]
        changes, memories = self._context.agreement.repeat_until_settled(
            lambda: self._exchange.wait(index, fragment),
            lambda: self._exchange.discard(fragment),
            f"round of {index}",
        )
        self._length.begin_measuring()
        for unit, change in zip(fragment.units, changes, strict=True):
            unit.work = None
            change.div_(fragment.total_weight)
            # Before the outer optimizer, which may write over `change` and moves `start`.
            if self._length.adapts:
                own_change = self._exchange.compute_change(unit, torch.zeros_like(change))
                self._length.measure_drift(own_change, change)
            self._options.outer.move(unit.start, change, unit.memory)
            for slot_index, view in zip(
                unit.bucket.members, unit.bucket.views_over(unit.start), strict=True
            ):
                parameter = self._exchange.slots[slot_index].parameter.detach()
                parameter.copy_(view) if not alpha else parameter.lerp_(view, 1 - alpha)
        for memory, mean in memories:
            memory.copy_(mean)
        fragment.end_round(self.steps + self._step_open)
        fragment.equal_step = -1 if alpha else self.steps
        self._context.trace.record_span("round", "exchange", begun, time.perf_counter_ns())

    def values_if_equal(self) -> dict[str, Tensor] | None:
        """Values of the last round, if all replicas are equal to them; else None."""
        if any(fragment.equal_step != self.steps for fragment in self._fragments if fragment.units):
            return None
        memories = {
            f"momentum of rounds, {unit.index}": unit.memory
            for unit in self.units
            if unit.memory is not None
        }
        return {
            f"where all last agreed to be, {unit.index}": unit.start for unit in self.units
        } | memories

    # ---- workers that leave and join

    def join_info(self) -> dict[str, Any]:
        """Counts of the rounds and the codec in use, for a worker that joins."""
        codecs = self._exchange.codecs if self.units else None
        coded = None if codecs is None else codecs.join_info()
        return {"steps": self.steps, "every": self._length.steps, "coded": coded}

    def regroup(self, context: SyncContext, info: dict[str, Any]) -> None:
        """Continue in another group, with the counts of another worker's `join_info`."""
        self._context = context
        self._exchange.regroup(context)
        self.steps = info["steps"]
        self._length.set_steps(info["every"])
        if self._exchange.codecs is not None and info["coded"] is not None:
            self._exchange.codecs.load_join_info(info["coded"])

    def rebuild_units(self) -> None:
        """Build units after `regroup`. They keep the values of the last round. Collective.

        Exchanges that hadn't ended are started again.
        """
        codecs = self._exchange.codecs
        codec_states = None if codecs is None else codecs.all_states
        # Made beside the old ones: if another worker is lost in this call, nothing has changed.
        rounds = [Fragment() for _ in self._fragments]
        self._exchange.build_units(rounds)
        for new_fragment, old_fragment in zip(rounds, self._fragments, strict=True):
            # Not strict, as a worker that has just joined may have no units.
            for new, old in zip(new_fragment.units, old_fragment.units, strict=False):
                new.continue_unit(old)
            old_fragment.units = new_fragment.units
        self._exchange.restore_codecs(self._fragments, codec_states)

    def load_from_peer(self, state: dict[str, Any]) -> None:
        """Begin new rounds with the state of another worker, whose replica is equal."""
        for unit, memory in zip(self.units, state["memory"], strict=True):
            unit.memory = unit.memory if memory is None else memory
            self._exchange.read_parameters(unit.bucket, unit.start)
        self._memories.load_saved(state["memories"])
        self._memories.restore_units(self.units, self._exchange.slots)
        for fragment in self._fragments:
            fragment.steps_made, fragment.sample_parts = 0, 0.0
            fragment.end_round(self.steps)

    def unreplicated_state(self) -> dict[str, Any]:
        """This worker's changes since the last rounds, and the residuals of its codec."""
        codecs = self._exchange.codecs
        coded = None if codecs is None else codecs.unreplicated_state()
        rounds = [
            fragment.copy_changes(self._exchange.compute_change) for fragment in self._fragments
        ]
        return {"rounds": rounds, "coded": coded}

    def load_unreplicated_state(self, state: dict[str, Any], step: int) -> bool:
        """Add a lost worker's changes to the rounds under way.

        Rounds that have ended after `step` have included them already. Returns False if the
        changes don't fit.
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
        if self._exchange.codecs is not None and state["coded"] is not None:
            stale = [fragment for fragment in self._fragments if fragment.ended_step > step]
            self._exchange.codecs.load_unreplicated_state(
                state["coded"], {unit.index for fragment in stale for unit in fragment.units}
            )
        return True

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """State of the outer optimizer and the codec. Replicas must be equal."""
        units, codecs = self.units, self._exchange.codecs
        coded = {} if codecs is None or not units else codecs.state_dict()
        return {
            "steps": self.steps + self._step_open,
            "every": self._length.steps,
            "memory": [None if has_memory_per_element(unit) else unit.memory for unit in units],
            "memories": self._memories.copy_all(units, self._exchange.slots),
            "sizes": [unit.start.numel() for unit in units],
            "coded": coded,
        }

    def load_counts(self, saved: dict[str, Any]) -> None:
        """Load the count of steps and the length of rounds from a `state_dict`."""
        self.steps = saved["steps"]
        self._length.set_steps(saved["every"])

    def load_state_dicts(self, saved: Sequence[dict[str, Any]]) -> None:
        """Load the `state_dict` of every worker into the units, if there are any.

        The parameters come from the checkpoint: every replica starts a new round from them.
        """
        units, codecs = self.units, self._exchange.codecs
        if saved and units:
            # Memories by unit fit only the same units. Those by name (below) fit any.
            if saved[0]["sizes"] == [unit.start.numel() for unit in units]:
                for unit, memory in zip(units, saved[0]["memory"], strict=True):
                    unit.memory = unit.memory if memory is None or unit.memory is None else memory
            elif codecs is not None or any(memory is not None for memory in saved[0]["memory"]):
                raise UsageError(
                    "this checkpoint was written for another model, with other parameters "
                    "unfrozen, or with other fragments or bucket_mb, and its residuals of a codec "
                    "or its momentum without names (of an older version) don't fit here; "
                    "resume with the same settings"
                )
            self._memories.load_saved(saved[0].get("memories", {}))
            self._memories.restore_units(units, self._exchange.slots)
            if codecs is not None:
                codecs.load_state_dicts([state["coded"] for state in saved if state["coded"]])
        for unit in units:
            self._exchange.read_parameters(unit.bucket, unit.start)
        for fragment in self._fragments:
            fragment.steps_made, fragment.sample_parts = 0, 0.0
