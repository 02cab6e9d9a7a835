"""Follows backward passes: where one begins, each gradient of it, and where the outermost ends.

    a pass begins:         parameters whose p.grad holds something are guarded from now on, before
                           the pass adds to them
    AccumulateGrad of p:   before it the old p.grad is set apart; after it the part that backward
                           added goes to the strategy
    end of the outermost:  `end_backward` of loop/step.py: p.grad = old + the strategy's result

The transaction decides how a pass is exchanged. It gives zeros if a pass has no result on any
worker.

The end is a callback of autograd's graph. If backward runs inside a backward (reentrant
checkpointing), the inner callback finds the outer node under way. It then queues itself again from
there, until no node is left around it.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from paceline.comm.backward_pass import call_at_end_of_backward, current_node
from paceline.comm.bucket_layout import add_gradients
from paceline.errors import UsageError
from paceline.sync.abilities import Abilities
from paceline.sync.base import GradientSource, Slot, Sync
from paceline.sync.context import SyncContext
from paceline.sync.gradient_guard import NO_GRAPH
from paceline.sync.joined_passes import JoiningTracker
from paceline.sync.mixed_weights import MixedWeights
from paceline.sync.transaction import Addends, Deliver, PlainTransaction, Transaction
from paceline.sync.watched_parameters import WatchedParameter, WatchedParameters
from paceline.trace import ComputeMeter


class GradientTracker(JoiningTracker):
    """Follows the backward passes over some parameters, on behalf of a strategy.

    Invariants: `open` from the first gradient of a pass to its end. `passes` counts the exchanges
    of the turn. `owing` means that `unsent` sums of silent passes wait for an exchange, `silenced`
    that the turn had a silent pass.

    Args:
        begin_backward: Called when a pass begins, before its first gradient. It sets the state of
            the step.
        end_backward: Called with this tracker and the name of the call at the end of the outermost
            pass.
    """

    def __init__(
        self,
        sync: Sync,
        context: SyncContext,
        abilities: Abilities,
        *,
        begin_backward: Callable[[], None],
        end_backward: Callable[[GradientTracker, str], None],
    ) -> None:
        self.sync, self.context = sync, context
        self._begin_backward = begin_backward
        self.end_pass = functools.partial(end_backward, self)
        self._remote = abilities.remote is not None  # optimizers step elsewhere
        overwrites = _never_overwrites if abilities.lender is None else abilities.lender.overwrites
        self.watched = WatchedParameters(overwrites, self._set_apart_first, self._take_gradient)
        self.sources: list[GradientSource] = []
        self.transaction: Transaction = PlainTransaction(sync, context)
        # each worker's own gradients are sent, with the weight of the last pass
        uneven = self._remote and not (sync.exchanges_in_backward or sync.replicas_diverge)
        self.mixed = MixedWeights(self.watched.by_id) if uneven else None

        # ---- the pass under way
        self.open = False
        self.is_silent = False  # it isn't exchanged
        self._scale = 1.0
        self._deliver: Deliver = sync.take_gradient

        # ---- this turn
        self.passes = 0  # exchanged
        self.silenced = False  # a silent pass was made or asked for

        # ---- the whole run
        self.owing = False  # a silent pass was made or asked for since the last exchange
        self.reached = 0  # passes in which some worker has reached a parameter
        self.begun = 0  # passes, silent ones too
        self.meter = ComputeMeter(context.trace)

    # ---- which parameters

    def watch_slots(self, slots: Sequence[Slot]) -> None:
        """Follow parameters that are not followed yet, and hand all of them to the strategy.

        If optimizers step elsewhere, this is called again when an optimizer is prepared for
        parameters that had none.
        """
        added, other_optimizers = self.watched.add_slots(slots)
        if added or (self._remote and other_optimizers):
            self.watched.copy_lent()
            self.sync.attach(self.watched.slots)

    def watch_thawed(self) -> None:
        """Follow parameters that were frozen at `run.prepare` and are not any more."""
        if any(slot.parameter.requires_grad for slot in self.watched.frozen):
            self.watch_slots(self.watched.take_thawed())

    def follow_source(self, source: GradientSource) -> None:
        """Take gradients of cut parameters, which autograd doesn't add to, from `source` too."""
        self.sources.append(source)
        source.deliver_to(self)

    def unwatch(self) -> list[Slot]:
        """Remove all hooks, and return the slots that were watched."""
        if self.mixed is not None:
            self.mixed.clear_numbers()
        return self.watched.remove_hooks()

    # ---- while backward runs

    def _begin_pass(self, *, idle: bool = False) -> None:
        if not (idle or self.watched.guard.is_pass_announced):
            self.watched.guard.follow_unannounced(first=not self.begun)
        self._begin_backward()
        step_state = self.context.step_state
        self.open = True
        self.begun += 1
        self._scale = 0.0 if step_state.ghost else step_state.scale
        self._deliver = self.transaction.gradient_receiver()
        if not self.joining:
            self.is_silent = step_state.defer_exchange
            call_at_end_of_backward(self._end_if_outermost)

    def _set_apart_first(self, watched: WatchedParameter) -> None:
        """Keep what `p.grad` holds, before autograd adds to it."""
        if not self.open:
            self._begin_pass()
        watched.set_apart(silent=self.is_silent, overwrites=self.watched.overwrites)

    def _take_gradient(self, watched: WatchedParameter, parameter: Tensor) -> None:
        """Hand the gradient that autograd has just added to `p.grad` to the strategy."""
        grad = parameter.grad
        if grad is None:
            self.reached += 1  # a hook of the script's own has taken it
            return
        parameter.grad = None
        if not self.open:
            self._begin_pass()
        if (
            self.is_silent
            or watched.index in self.delayed
            or watched.unsent is not None
            or grad.requires_grad
        ):
            self._add_up(watched, grad, self._scale)
        else:
            watched.touched = True
            self._deliver(watched.index, grad, self._scale)

    def take_cut_gradient(self, parameter: Tensor, grad: Tensor) -> None:
        """Take the gradient of a cut parameter from a source; it is weighted already."""
        self.open_idle()
        watched = self.watched.by_id[id(parameter)]
        watched.set_apart(silent=self.is_silent, overwrites=self.watched.overwrites)
        if self.is_silent or watched.index in self.delayed or watched.unsent is not None:
            self._add_up(watched, grad, 1.0)
        else:
            watched.touched = True
            self._deliver(watched.index, grad, 1.0)

    def put_added_up(self, parameter: Tensor, total: Tensor) -> None:
        self.open_idle()
        watched = self.watched.by_id[id(parameter)]
        watched.set_apart(silent=self.is_silent, overwrites=self.watched.overwrites)
        watched.keep_unsent(total)

    def pass_weight(self) -> float:
        """Weight of this worker's gradients in the pass under way; begins one if there is none."""
        if not self.open:
            self._begin_pass()
        return self._scale

    def _add_up(self, watched: WatchedParameter, grad: Tensor, scale: float) -> None:
        """Take in a gradient of a silent pass, or of the first pass after silent ones."""
        if grad.requires_grad:
            self._forget_pass()
            raise UsageError(
                f"backward(create_graph=True) reached the parameter {watched.name}: {NO_GRAPH}"
            )
        grad = grad.mul_(scale) if scale else torch.zeros_like(grad)
        unsent = watched.unsent
        if self.is_silent or watched.index in self.delayed:
            watched.keep_unsent(grad if unsent is None else add_gradients(unsent, grad))
            return
        watched.keep_unsent(None)
        total = grad if unsent is None else add_gradients(grad, unsent)
        self._deliver(watched.index, total, 1.0)

    def _end_if_outermost(self) -> None:
        node = current_node()
        # this pass runs inside a node of another: wait for the end of that one
        if node is not None:
            node.register_hook(lambda *_: call_at_end_of_backward(self._end_if_outermost))
            return
        self.end_pass("backward")

    # ---- at the end of a pass, in the order in which `end_backward` calls them

    def end_sources(self) -> None:
        """Let the sources of cut gradients deliver the rest of their gradients."""
        for source in self.sources:
            source.end_pass()

    def show_sums(self) -> None:
        """End a silent pass: `p.grad` shows what this worker has added up so far."""
        self.open = self.is_silent = False
        self.silenced = self.owing = True
        self.watched.show_sums()

    def begin_exchange(self) -> int:
        """Deliver sums of silent passes for parameters that this pass hasn't reached.

        `p.grad` of other parameters that it hasn't reached leaves the memory that the exchange
        writes. Returns the time in nanoseconds, up to which this worker has computed.
        """
        now = time.perf_counter_ns()
        if self.meter.since:
            self.meter.stop(now)
        for watched in self.watched.parameters:
            if watched.touched and watched.unsent is None:
                continue
            grad = watched.parameter.grad
            if watched.unsent is not None:
                watched.set_apart(silent=self.is_silent, overwrites=self.watched.overwrites)
                # the script may have zeroed p.grad, and with it the sum
                if watched.unsent is not None:
                    self._deliver(watched.index, watched.take_unsent(), 1.0)
            elif grad is not None:
                watched.keep_own(grad, lent=self.watched.overwrites(watched.index, grad))
        return now

    def finish_exchange(self, where: str, means: Addends, started: int) -> None:
        """Make `p.grad` final, and count a pass whose exchange began at `started` (nanoseconds)."""
        mixed, part = self.mixed, self.context.step_state.share_of_step
        self.reached += bool(means)
        uneven = mixed is not None and mixed.record_part(part)
        self.watched.set_gradients(means, mixed, uneven=uneven)
        self.open = self.is_silent = False
        self.passes += 1
        self.owing = False
        self.meter.end_exchange(where, started)

    def _forget_pass(self) -> None:
        self.open = self.is_silent = False
        self.watched.forget_pass()
        for source in self.sources:
            source.abort_pass()
        self.sync.abort()

    # ---- between passes

    def unhooked_scale(self) -> float:
        """Weight in the mean for a gradient of the pass that belongs to no watched parameter."""
        self._begin_backward()
        self.begun += 1
        step_state = self.context.step_state
        return 0.0 if step_state.ghost else step_state.scale

    def join_exchange(self, where: str, *, due: bool = False) -> None:
        """Join, with zeros, the exchanges of a turn in which backward reached no parameter here.

        With `due`, gradients are about to be used, so the rest of silent passes is exchanged too.
        """
        self.refuse_inside(where)
        if self.open:
            self._forget_pass()
            raise UsageError(
                f"a backward of step {self.context.step_state.step} ended with an error that was "
                "caught, so its gradients were never exchanged; let the error end the run, "
                "or skip the batch before backward on every worker"
            )
        expected = (not self.passes or self.owing) if due else not (self.passes or self.silenced)
        several = self.owing or self.sources or self.context.group.size > 1
        if expected and self.watched.parameters and several:
            self.open, self.is_silent, self._deliver = (
                True,
                False,
                self.transaction.gradient_receiver(),
            )
            self.end_pass(where)

    def begin_turn(self) -> tuple[int, bool]:
        """Begin a turn; return the exchanges of the last one, and whether it was silenced."""
        before, self.passes, self.silenced = (self.passes, self.silenced), 0, False
        return before

    def return_to_turn(self, turn: tuple[int, bool]) -> None:
        """Go on with the turn around the one that has ended, from what `begin_turn` returned."""
        self.passes, self.silenced = turn

    def begin_silence(self, *, silent: bool) -> None:
        """Begin or end silent passes; the next pass after them is exchanged by all workers."""
        self.silenced = silent
        self.owing = self.owing or silent

    def recover_by(self, transaction: Transaction) -> None:
        """End passes by this transaction from now on."""
        self.transaction = transaction

    def restore_gradients(self, priors: dict[int, Tensor], unsent: dict[int, Tensor]) -> None:
        """Set gradients and sums of silent passes to these, by index of the parameter."""
        self.watched.restore_gradients(priors, unsent)
        self.owing = bool(unsent)


def _never_overwrites(index: int, grad: Tensor) -> bool:
    return False
