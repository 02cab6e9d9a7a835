"""Watches backward passes: hands gradients to the strategy, finds the end, and sets p.grad.

    a pass begins:         parameters whose p.grad holds something are guarded from now on, before
                           the pass adds to them
    AccumulateGrad of p:   before it the old p.grad is set aside; after it the part that backward
                           added goes to the strategy
    end of the outermost:  p.grad = old + the strategy's result

The transaction decides how a pass is exchanged. It gives zeros if a pass has no result on any
worker.

The end is a callback of autograd's graph. If backward runs inside a backward (reentrant
checkpointing), the inner callback finds the outer node under way. It then queues itself again from
there, until no node is left around it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from paceline.comm.bucket_layout import add_gradients
from paceline.errors import UsageError
from paceline.sync.abilities import Abilities
from paceline.sync.base import GradientSource, Slot, Sync
from paceline.sync.context import SyncContext
from paceline.sync.gradient_guard import GRAPHLESS, GradientGuard, explain_changed
from paceline.sync.joined_passes import JoiningTracker
from paceline.sync.mixed_weights import MixedWeights
from paceline.sync.transaction import Addends, Deliver, PlainTransaction, Transaction


class ParameterHook:
    """State of one parameter during backward passes."""

    __slots__ = (
        *("carry", "given", "handles", "name", "node", "number"),
        *("parameter", "prior", "shown", "touched", "version"),
    )

    def __init__(self, number: int, name: str, parameter: Parameter) -> None:
        self.number, self.name, self.parameter = number, name, parameter
        self.node: Any = None
        self.handles: list[Any] = []
        self.touched = False  # in this backward
        # what p.grad held before this backward: final, not exchanged again
        self.prior: Tensor | None = None
        self.carry: Tensor | None = None  # weighted gradients of silent passes, not exchanged yet
        self.shown: Tensor | None = None  # the p.grad that a silent pass left, and its version then
        self.version = 0
        # id of what p.grad was set to, in the strategy's memory, which counts references to see
        # whether others hold it
        self.given = 0

    def show(self) -> None:
        """Let p.grad show what silent passes have added up, and what it held before."""
        if self.carry is None:
            self.parameter.grad, self.prior, self.shown = self.prior, None, None
            return
        shown = self.carry if self.prior is None else add_gradients(self.carry.clone(), self.prior)
        self.parameter.grad = self.shown = shown
        self.version = shown._version


class GradientTracker(JoiningTracker):
    """Follows the backward passes over some parameters, on behalf of a strategy.

    `prepare` sets the step's state when a pass begins.
    """

    def __init__(
        self, sync: Sync, context: SyncContext, abilities: Abilities, prepare: Callable[[], None]
    ) -> None:
        self.sync, self.context, self._prepare = sync, context, prepare
        self._remote = abilities.remote is not None  # optimizers step elsewhere
        # each worker's own gradients go there
        self._mixes = self._remote and not (sync.exchanges_in_backward or sync.replicas_diverge)
        self.hooks: list[ParameterHook] = []
        self.slots: list[Slot] = []
        self.passes = 0  # exchanged since the turn began
        self.silenced = False  # a silent pass was made or asked for since the turn began
        self.owing = False  # a silent pass was made or asked for since the last exchange
        self._overwrites: Callable[[int, Tensor], bool] = (
            (lambda number, grad: False)
            if abilities.lender is None
            else abilities.lender.overwrites
        )
        self.reached = 0  # passes in which some worker has reached a parameter
        self.begun = 0  # passes, silent ones too
        self.transaction: Transaction = PlainTransaction(sync, context)
        self._deliver: Deliver = sync.ready  # of the pass under way
        self.seconds = 0.0  # exposed: time spent at the end of passes
        self.since = 0  # when this worker began to compute (nanoseconds); 0: outside of a turn
        self._by_id: dict[int, ParameterHook] = {}
        self._guard = GradientGuard(self._set_apart_first)
        self.open = False  # a pass is under way
        self._silent = False
        self._scale = 1.0
        self.mixed = MixedWeights(self._by_id)
        self._sources: list[GradientSource] = []

    def watch(self, slots: Sequence[Slot]) -> None:
        """Follow parameters that are not followed yet, and hand all of them to the strategy.

        If optimizers step elsewhere, this is called again when an optimizer is prepared for
        parameters that had none.
        """
        self._guard.listen()
        new = [slot for slot in slots if id(slot.parameter) not in self._by_id]
        by_id = {id(slot.parameter): slot for slot in slots}
        before, self.slots = (
            self.slots,
            [by_id.get(id(slot.parameter), slot) for slot in self.slots],
        )
        owned = self._remote and any(
            one.optimizer is not two.optimizer for one, two in zip(before, self.slots, strict=True)
        )
        for slot in new:
            hook = ParameterHook(len(self.hooks), slot.name, slot.parameter)
            self._by_id[id(slot.parameter)] = hook
            self.hooks.append(hook)
            self.slots.append(slot)
            self._hook(hook)
        if new or owned:
            for hook in self.hooks:  # the strategy lays its memory out anew
                if hook.parameter.grad is not None and id(hook.parameter.grad) == hook.given:
                    hook.parameter.grad, hook.given = hook.parameter.grad.clone(), 0
            self.sync.attach(self.slots)

    def _hook(self, hook: ParameterHook) -> None:
        parameter = hook.parameter
        hook.node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

        def after(_: Tensor) -> None:
            grad = parameter.grad
            if grad is None:
                self.reached += 1  # a hook of the script's own has taken it
                return
            parameter.grad = None
            if not self.open:
                self._begin()
            if (
                self._silent
                or hook.number in self.late
                or hook.carry is not None
                or grad.requires_grad
            ):
                self._add_up(hook, grad, self._scale)
            else:
                hook.touched = True
                self._deliver(hook.number, grad, self._scale)

        hook.handles = [parameter.register_post_accumulate_grad_hook(after)]
        self._guard.add(hook)

    def follow(self, source: GradientSource) -> None:
        """Take gradients of cut parameters, which autograd doesn't add to, from `source` too."""
        self._sources.append(source)
        source.deliver_to(self)

    def unwatch(self) -> list[Slot]:
        """Remove all hooks, and return what was watched."""
        self._guard.leave()
        for handle in [handle for hook in self.hooks for handle in hook.handles]:
            handle.remove()
        for kept in (self.hooks, self._by_id, self.mixed):
            kept.clear()
        watched, self.slots = self.slots, []
        return watched

    # ---- while backward runs

    def _begin(self, *, idle: bool = False) -> None:
        if not (idle or self._guard.announced):
            self._guard.follow_unannounced(first=not self.begun)
        self._prepare()
        step_state = self.context.step_state
        self.open = True
        self.begun += 1
        self._scale = 0.0 if step_state.ghost else step_state.scale
        self._deliver = self.transaction.deliver()
        if not self.joins:
            self._silent = step_state.defer_exchange
            Variable._execution_engine.queue_callback(self._end)

    def weigh(self) -> float:
        """Weight of this worker's gradients in the pass under way; begins a pass if there is
        none.
        """
        if not self.open:
            self._begin()
        return self._scale

    def take(self, parameter: Tensor, grad: Tensor) -> None:
        """Take the gradient of a cut parameter from a source; it is weighted already."""
        self.open_idle()
        hook = self._by_id[id(parameter)]
        self._set_apart(hook)
        if self._silent or hook.number in self.late or hook.carry is not None:
            self._add_up(hook, grad, 1.0)
        else:
            hook.touched = True
            self._deliver(hook.number, grad, 1.0)

    def _end(self) -> None:
        node = torch._C._current_autograd_node()
        # this pass runs inside a node of another: wait for the end of that one
        if node is not None:

            def again(*_: Any) -> None:
                Variable._execution_engine.queue_callback(self._end)

            node.register_hook(again)
            return
        self._close("backward")

    def _set_apart_first(self, hook: ParameterHook) -> None:
        if not self.open:
            self._begin()
        self._set_apart(hook)

    def put_added_up(self, parameter: Tensor, total: Tensor) -> None:
        self.open_idle()
        hook = self._by_id[id(parameter)]
        self._set_apart(hook)
        hook.carry, hook.touched = total, True

    def _set_apart(self, hook: ParameterHook) -> None:
        """Keep what p.grad holds, before this pass adds to it."""
        if hook.touched:
            return
        parameter, grad = hook.parameter, hook.parameter.grad
        if hook.shown is not None:
            self._reclaim(hook, grad)
        elif grad is not None:
            written = (
                id(grad) == hook.given if self._silent else self._overwrites(hook.number, grad)
            )
            hook.prior, hook.given = (grad.clone(), hook.given) if written else (grad, 0)
        parameter.grad = None

    def _reclaim(self, hook: ParameterHook, grad: Tensor | None) -> None:
        """Find out whether the script has changed p.grad after silent passes showed their sum."""
        shown, hook.shown = hook.shown, None
        if grad is shown and shown is not None and shown._version == hook.version:
            return
        if grad is shown and hook.prior is None:
            hook.carry = grad  # changed in place (zeroed, clipped): the carry is what it is now
        elif grad is None or not bool(grad.any()):
            hook.prior, hook.carry = grad, None
        else:
            raise UsageError(
                f"p.grad of {hook.name} was changed between passes under run.no_sync(), after a "
                "pass without it had been exchanged; "
                "call zero_grad() first, or leave it alone until the exchange"
            )

    def _add_up(self, hook: ParameterHook, grad: Tensor, scale: float) -> None:
        """Take in a gradient of a silent pass, or of the first pass after some that were silent."""
        if grad.requires_grad:
            self._forget()
            raise UsageError(
                f"backward(create_graph=True) reached the parameter {hook.name}: {GRAPHLESS}"
            )
        hook.touched = True
        grad = grad.mul_(scale) if scale else torch.zeros_like(grad)
        keeps = self._silent or hook.number in self.late
        total = (
            grad
            if hook.carry is None
            else add_gradients(hook.carry, grad)
            if keeps
            else add_gradients(grad, hook.carry)
        )
        hook.carry = total if keeps else None
        if not keeps:
            self._deliver(hook.number, total, 1.0)

    # ---- at its end

    def _close(self, where: str) -> None:
        for source in self._sources:
            source.end_pass()
        if self._silent:
            self._show()
            return
        started = time.perf_counter_ns()
        if self.since:
            self.computed(started)
        for hook in self.hooks:
            if not hook.touched or hook.carry is not None:
                self._give_leftover(hook)
        uneven = self._mixes and self.mixed.changes(self.context.step_state.share_of_step)
        results = self.transaction.exchange(functools.partial(self.sync.backward_done, where))
        self.reached += bool(results)
        hooks, mixing, final = self.hooks, uneven or bool(self.mixed.numbers), 0
        for number, mean in results:
            hook = hooks[number]
            if mixing or hook.prior is not None or not hook.touched:
                self._put(hook, mean, mixing=mixing, uneven=uneven)
                continue
            try:
                hook.parameter.grad = mean
            except RuntimeError as error:
                raise explain_changed(hook.name, hook.parameter, mean, error) from error
            hook.given, hook.touched = id(mean), False
            final += 1
        self.open = False
        if final < len(hooks):
            self._reset()
        self.passes += 1
        self.owing = False
        ended = self.since = time.perf_counter_ns()
        self.seconds += (ended - started) / 1e9
        self.context.trace.record(where, "exchange", started, ended)

    def _give_leftover(self, hook: ParameterHook) -> None:
        """Hand over what silent passes have left of a parameter that this pass hasn't reached."""
        grad = hook.parameter.grad
        if hook.carry is not None:
            self._set_apart(hook)
            if hook.carry is not None:
                carry, hook.carry, hook.touched = hook.carry, None, True
                self._deliver(hook.number, carry, 1.0)
        elif grad is not None:
            if self._overwrites(hook.number, grad):
                hook.parameter.grad = grad.clone()
            else:
                hook.given = 0

    def _put(self, hook: ParameterHook, mean: Tensor, *, mixing: bool, uneven: bool) -> None:
        """Set p.grad to the mean plus what it held before."""
        before, hook.prior = hook.prior, None
        if before is None:
            before = hook.parameter.grad if not hook.touched else None
        if mixing:
            self.mixed.note(hook.number, before, uneven=uneven)
        if before is not None and not hook.given and not (before.is_sparse or mean.is_sparse):
            # the script's own tensor: added to in place, as torch does
            hook.parameter.grad = before.add_(mean)
            return
        if before is not None:
            mean = add_gradients(mean, before)
        try:
            hook.parameter.grad = mean
        except RuntimeError as error:
            raise explain_changed(hook.name, hook.parameter, mean, error) from error
        hook.given = id(mean)

    def computed(self, until: int) -> None:
        """Record that this worker computed until `until` (nanoseconds).

        It began with the turn, or with the end of the last exchange.
        """
        if self.since:
            self.context.trace.record("compute", "compute", self.since, until)
            self.since = 0

    def _show(self) -> None:
        """End a silent pass: p.grad shows what this worker has added up so far."""
        for hook in self.hooks:
            if hook.touched and hook.carry is not None:
                hook.show()
        self.silenced = self.owing = True
        self._reset()

    def _reset(self) -> None:
        self.open = self._silent = False
        for hook in self.hooks:
            hook.touched = False
            if hook.prior is not None and hook.shown is None:
                if hook.parameter.grad is None:
                    hook.parameter.grad = hook.prior
                hook.prior = None

    def _forget(self) -> None:
        self.open = self._silent = False
        for hook in self.hooks:
            hook.prior = hook.carry = hook.shown = None
            hook.touched = False
        for source in self._sources:
            source.abort_pass()
        self.sync.abort()

    # ---- between passes

    def unhooked_scale(self) -> float:
        """Weight in the mean for a gradient in the pass that belongs to no hooked parameter."""
        self._prepare()
        self.begun += 1
        step_state = self.context.step_state
        return 0.0 if step_state.ghost else step_state.scale

    def join(self, where: str, *, due: bool = False) -> None:
        """Join, with zeros, the exchanges of a turn in which backward reached no parameter here.

        With `due`, gradients are about to be used, so the rest of silent passes is exchanged too.
        """
        self.refuse_inside(where)
        if self.open:
            self._forget()
            raise UsageError(
                f"a backward of step {self.context.step_state.step} ended with an error that was "
                "caught, so its gradients were never exchanged; let the error end the run, "
                "or skip the batch before backward on every worker"
            )
        expected = (not self.passes or self.owing) if due else not (self.passes or self.silenced)
        if expected and self.hooks and (self.owing or self._sources or self.context.group.size > 1):
            self.open, self._silent, self._deliver = True, False, self.transaction.deliver()
            self._close(where)

    def foreign(self, parameters: Iterable[Any]) -> list[int]:
        """Numbers of the parameters whose p.grad is not the tensor that the last pass has set."""
        found = []
        for parameter in parameters:
            hook, grad = self._by_id.get(id(parameter)), parameter.grad
            if hook is not None and grad is not None and id(grad) != hook.given:
                found.append(hook.number)
        return found

    def turn(self) -> tuple[int, bool]:
        """Begin a new turn; return the number of exchanges of the last one, and if it was
        silenced.
        """
        before, self.passes, self.silenced = (self.passes, self.silenced), 0, False
        return before

    def go_back(self, turn: tuple[int, bool]) -> None:
        """Go on with the turn around the one that has ended, from what `turn` returned."""
        self.passes, self.silenced = turn

    def silence(self, *, silent: bool) -> None:
        """Begin or end silent passes; the next pass after them is exchanged by all workers."""
        self.silenced = silent
        self.owing = self.owing or silent

    def owe(self) -> None:
        """Exchange what was added up with the next pass, or before gradients are used."""
        self.owing = True

    def compute_from(self, since: int) -> None:
        """Count what is done from `since` on (nanoseconds) as computing; 0: as nothing."""
        self.since = since

    def expose(self, seconds: float) -> None:
        """Count time of an exchange beside which nothing was computed."""
        self.seconds += seconds

    def recover_by(self, transaction: Transaction) -> None:
        """End passes by this transaction from now on."""
        self.transaction = transaction

    # ---- what a transaction keeps of gradients

    def held(self) -> dict[int, Tensor]:
        """Copy the gradients as they were before the pass that ends."""
        found = (
            (hook.number, hook.prior if hook.touched else hook.parameter.grad)
            for hook in self.hooks
        )
        return {number: grad.clone() for number, grad in found if grad is not None}

    def carried(self) -> dict[int, Tensor]:
        """Copy what silent passes have left."""
        return {hook.number: hook.carry.clone() for hook in self.hooks if hook.carry is not None}

    def zeros(self) -> Addends:
        """Return addends of a pass that has no result."""
        return [
            (hook.number, torch.zeros_like(hook.parameter)) for hook in self.hooks if hook.touched
        ]

    def restore(self, grads: dict[int, Tensor], carried: dict[int, Tensor]) -> None:
        """Set gradients, and what silent passes have left, to these."""
        for hook in self.hooks:
            hook.parameter.grad, hook.carry, hook.shown = (
                grads.get(hook.number),
                carried.get(hook.number),
                None,
            )
        self.owing = any(hook.carry is not None for hook in self.hooks)
