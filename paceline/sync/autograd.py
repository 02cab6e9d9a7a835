"""Watches backward passes: hands every gradient to the strategy, sees the end of the outermost pass, and puts p.grad together.

    AccumulateGrad of p:   before: what p.grad held is kept apart    after: what backward added goes to the strategy
    end of the outermost:  p.grad = kept + the strategy's result

Where losses are survived, a pass in which a worker was lost ends as if nothing had happened, with zeros in p.grad, and `failed` says so.
It is so on all workers: a pass counts once all of them have its result. After a loss no pass of the turn is exchanged
(`StepState.exchange_closed`). Where passes are not exchanged with all workers but optimizers step elsewhere, the step fails (`void`).

The end is a callback of autograd's graph. Where backward runs inside a backward (reentrant checkpointing), the inner callback
finds the outer node under way, and queues itself again from there, until no node is left around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn import Parameter

from paceline.comm.agreement import CallDiscarded
from paceline.errors import LOSSES, PacelineError, UsageError, WorkerLost
from paceline.sync.abilities import Abilities
from paceline.sync.base import Slot, Sync
from paceline.sync.context import SyncContext


class ParameterHook:
    """What is remembered of one parameter."""

    __slots__ = (
        *("before", "carry", "given", "handles", "name", "node", "number", "owed"),
        *("parameter", "prior", "shown", "touched", "version"),
    )

    def __init__(self, number: int, name: str, parameter: Parameter) -> None:
        self.number, self.name, self.parameter = number, name, parameter
        self.node: Any = None
        self.handles: list[Any] = []
        self.touched = False  # in this backward
        self.prior: Tensor | None = None  # what p.grad held before this backward: final, not exchanged again
        self.carry: Tensor | None = None  # weighted gradients of silent passes, not exchanged yet
        self.shown: Tensor | None = None  # the p.grad that a silent pass left, and its version then
        self.version = 0
        self.given = 0  # the id of what p.grad was set to, in the strategy's memory: that sees by references who else holds it
        self.before: Tensor | None = None  # what p.grad held before a pass that failed
        self.owed: Tensor | None = None  # what silent passes had left when the turn began, where losses are survived


class GradientTracker:
    """The backward passes over some parameters, on behalf of a strategy."""

    def __init__(self, sync: Sync, context: SyncContext, abilities: Abilities) -> None:
        self.sync, self.context = sync, context
        self._remote = abilities.remote is not None  # optimizers step elsewhere
        self.taps: list[ParameterHook] = []
        self.slots: list[Slot] = []
        self.passes = 0  # exchanged since the turn began
        self.silenced = False  # a silent pass was made or asked for since the turn began
        self.owing = False  # a silent pass was made or asked for since the last exchange
        self._overwrites: Callable[[int, Tensor], bool] = (
            (lambda number, grad: False) if abilities.lender is None else abilities.lender.overwrites
        )
        self.begins: Callable[[], None] = lambda: None  # called when a pass begins, before it asks for the moment
        self.reached = False  # some worker's pass has touched a parameter, since somebody set this
        self.ran = False  # a pass has touched a parameter since this turn, or micro-batch, began
        self.failed = False  # this turn had a pass without a result
        self._lost: PacelineError | None = None  # in the pass under way
        self.seconds = 0.0  # exposed: time spent at the end of passes
        self.since = 0  # when this worker began to compute (nanoseconds); 0: outside of a turn
        self._by_id: dict[int, ParameterHook] = {}
        self._open = False
        self._silent = False
        self._scale = 1.0
        self._part: float | None = None  # my part of the batch, in the last pass that wasn't silent
        self._mixed: set[int] = set()  # numbers of those whose p.grad adds up passes of different parts

    def watch(self, slots: Sequence[Slot]) -> None:
        """Tap these parameters (those already tapped are left alone) and hand all of them to the strategy.

        Again, where optimizers step elsewhere, when one has come for parameters that had none.
        """
        new = [slot for slot in slots if id(slot.parameter) not in self._by_id]
        told = {id(slot.parameter): slot for slot in slots}
        before, self.slots = self.slots, [told.get(id(slot.parameter), slot) for slot in self.slots]
        owned = self._remote and any(one.optimizer is not two.optimizer for one, two in zip(before, self.slots, strict=True))
        for slot in new:
            tap = ParameterHook(len(self.taps), slot.name, slot.parameter)
            self._by_id[id(slot.parameter)] = tap
            self.taps.append(tap)
            self.slots.append(slot)
            self._hook(tap)
        if new or owned:
            for tap in self.taps:  # the strategy lays its memory out anew
                if tap.parameter.grad is not None and id(tap.parameter.grad) == tap.given:
                    tap.parameter.grad, tap.given = tap.parameter.grad.clone(), 0
            self.sync.attach(self.slots)

    def _hook(self, tap: ParameterHook) -> None:
        parameter = tap.parameter
        tap.node = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]

        def before(_: Any) -> None:
            if parameter.grad is not None or tap.carry is not None:
                if not self._open:
                    self._begin()
                self._set_apart(tap)

        def after(_: Tensor) -> None:
            grad = parameter.grad
            if grad is None:
                self.reached = True  # a hook of the script's own has taken it
                return
            parameter.grad = None
            if not self._open:
                self._begin()
            self._arrived(tap, grad)

        tap.handles = [tap.node.register_prehook(before), parameter.register_post_accumulate_grad_hook(after)]

    def unwatch(self) -> None:
        """Take all hooks out."""
        for tap in self.taps:
            for handle in tap.handles:
                handle.remove()
        self.taps.clear()
        self._by_id.clear()
        self._mixed.clear()

    # ---- while backward runs

    def _begin(self) -> None:
        self.begins()
        step_state = self.context.step_state
        self._open = self.ran = True
        self._silent = step_state.defer_exchange
        self._scale = 0.0 if step_state.ghost else step_state.scale
        _at_end(self._end)

    def _end(self) -> None:
        node = torch._C._current_autograd_node()
        if node is not None:  # this pass runs inside a node of another: wait for the end of that one

            def again(*_: Any) -> None:
                _at_end(self._end)

            node.register_hook(again)
            return
        self._close("backward")

    def _set_apart(self, tap: ParameterHook) -> None:
        """Before p.grad is added to: keep what it holds."""
        if tap.touched:
            return
        parameter, grad = tap.parameter, tap.parameter.grad
        if tap.shown is not None:
            self._reclaim(tap, grad)
        elif grad is not None:
            written = id(grad) == tap.given if self._silent else self._overwrites(tap.number, grad)
            tap.prior, tap.given = (grad.clone(), tap.given) if written else (grad, 0)
        parameter.grad = None

    def _reclaim(self, tap: ParameterHook, grad: Tensor | None) -> None:
        """After silent passes p.grad shows their sum: find out what the user has made of it."""
        shown, tap.shown = tap.shown, None
        if grad is shown and shown is not None and shown._version == tap.version:
            return
        if grad is shown and tap.prior is None:
            tap.carry = grad  # changed in place (zeroed, clipped): the carry is what it is now
        elif grad is None or not bool(grad.any()):
            tap.prior, tap.carry = grad, None
        else:
            raise UsageError(
                f"p.grad of {tap.name} was changed between passes under run.no_sync(), after a pass without it had been exchanged; "
                "call zero_grad() first, or leave it alone until the exchange"
            )

    def _arrived(self, tap: ParameterHook, grad: Tensor) -> None:
        if grad.requires_grad:
            self._forget()
            raise UsageError(
                f"backward(create_graph=True) reached the parameter {tap.name}: an exchanged gradient has no graph; "
                "use torch.autograd.grad(..., create_graph=True) for the penalty, it stays local"
            )
        if self._silent:
            grad = grad.mul_(self._scale) if self._scale else torch.zeros_like(grad)
            tap.carry = grad if tap.carry is None else _add(tap.carry, grad)
            tap.touched = True
            return
        scale = self._scale
        if tap.carry is not None:
            grad, tap.carry, scale = _add(grad.mul_(scale) if scale else torch.zeros_like(grad), tap.carry), None, 1.0
        tap.touched = True
        self._give(tap, grad, scale)

    def _give(self, tap: ParameterHook, grad: Tensor, scale: float) -> None:
        if self._lost is None and not self._void:
            try:
                self.sync.ready(tap.number, grad, scale)
            except LOSSES as error:
                if self.context.agreement.recovery is None:
                    raise
                self._lost = error

    @property
    def _void(self) -> bool:
        return self.context.step_state.exchange_closed and self.sync.exchanges_in_backward

    # ---- at its end

    def _close(self, where: str) -> None:
        if self._silent:
            self._show()
            return
        started = time.perf_counter_ns()
        self.computed(started)
        for tap in self.taps:
            if tap.touched:
                continue
            grad = tap.parameter.grad
            if tap.carry is not None:
                self._set_apart(tap)
                if tap.carry is not None:
                    carry, tap.carry, tap.touched = tap.carry, None, True
                    self._give(tap, carry, 1.0)
            elif grad is not None:
                if self._overwrites(tap.number, grad):
                    tap.parameter.grad = grad.clone()
                else:
                    tap.given = 0
        uneven = self._uneven()
        mixing = uneven or bool(self._mixed)
        results = self._results(where)
        self.reached = self.reached or bool(results)
        for number, mean in results:
            tap = self.taps[number]
            prior, tap.prior = tap.prior, None
            if prior is None:
                prior = tap.parameter.grad if not tap.touched else None
            if mixing:
                self._note_mixed(number, prior, uneven=uneven)
            if prior is not None and not tap.given and not (prior.is_sparse or mean.is_sparse):
                tap.parameter.grad = prior.add_(mean)  # the script's own tensor: added to in place, as torch does
                continue
            if prior is not None:
                mean = _add(mean, prior)
            try:
                tap.parameter.grad = mean
            except RuntimeError as error:
                raise _cast(tap, mean, error) from error
            tap.given = id(mean)
        self._reset()
        self.passes += 1
        self.owing = False
        ended = self.since = time.perf_counter_ns()
        self.seconds += (ended - started) / 1e9
        self.context.trace.record(where, "exchange", started, ended)

    def _uneven(self) -> bool:
        """Whether p.grad goes to servers with another weight than the pass before had: that of this worker's part of the batch."""
        part, self._part = self._part, self.context.step_state.share_of_step
        return not self.sync.exchanges_in_backward and part not in (None, self._part) and self._remote and not self.sync.replicas_diverge

    def _note_mixed(self, number: int, prior: Tensor | None, *, uneven: bool) -> None:
        if prior is None or not bool(prior.any()):
            self._mixed.discard(number)
        elif uneven:
            self._mixed.add(number)

    def refuse_mixed(self, parameters: Iterable[Any]) -> None:
        """Raise `UsageError` if p.grad of one of them adds up what has to be weighted each by itself on its way to servers."""
        for parameter in parameters if self._mixed else ():
            tap = self._by_id.get(id(parameter))
            if tap is not None and tap.number in self._mixed and parameter.grad is not None and bool(parameter.grad.any()):
                raise UsageError(
                    f"p.grad of {tap.name} adds up batches that this worker has different parts of, and goes to servers with the weight of "
                    "the last: add them up under run.no_sync(), all but the last, which weights each, or say prepare(..., accumulate=k)"
                )

    def _results(self, where: str) -> list[tuple[int, Tensor]]:
        if self.context.agreement.recovery is not None:
            self._remember(first=not self.passes and not self.failed)
        if not self.sync.exchanges_in_backward:
            if self.context.agreement.recovery is not None:
                self._lost = None  # the strategy knows, when the optimizer steps
            return self.sync.backward_done(where)
        if not self._void:
            try:
                found = self.context.agreement.settle(lambda: self._exchanged(where), "backward")
                return found
            except CallDiscarded as error:
                self._check_cut(error)
        self._fail()
        return [(tap.number, torch.zeros_like(tap.parameter)) for tap in self.taps if tap.touched]

    def _fail(self) -> None:
        """This pass has no result, on any worker."""
        self.failed, self._lost = True, None
        self.sync.abort()

    def _remember(self, *, first: bool) -> None:
        """What gradients were before the first pass."""
        for tap in self.taps if first else ():
            before = tap.prior if tap.touched else tap.parameter.grad
            tap.before = None if before is None else before.clone()

    def _check_cut(self, error: CallDiscarded) -> None:
        if not self.context.step_state.exchange_closed:
            text = "gradients that were exchanged outside of a loop over a prepared loader can't be had again"
            raise WorkerLost(f"a worker was lost, and {text}: resume from a checkpoint") from error

    def void(self, error: CallDiscarded) -> None:
        """An optimizer can't step any more in this turn, on any worker. Raises `WorkerLost` where no turn comes again."""
        self._check_cut(error)
        if not self.failed:
            self.failed = True
            self.sync.abort()

    def back(self) -> None:
        """The turn begins anew: gradients are what they were when it began first."""
        if not self.failed:
            return
        self.failed = False
        for tap in self.taps:
            tap.parameter.grad, tap.before, tap.shown = tap.before, None, None
            tap.carry, tap.owed = tap.owed, None
        self.owing = any(tap.carry is not None for tap in self.taps)

    def _exchanged(self, where: str) -> list[tuple[int, Tensor]]:
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost
        return self.sync.backward_done(where)

    def computed(self, until: int) -> None:
        """This worker has computed since the turn began or the last exchange ended; nanoseconds."""
        if self.since:
            self.context.trace.record("compute", "compute", self.since, until)
            self.since = 0

    def _show(self) -> None:
        """A silent pass has ended: p.grad shows what this rank has added up so far."""
        for tap in self.taps:
            if tap.touched and tap.carry is not None:
                shown = tap.carry if tap.prior is None else _add(tap.carry.clone(), tap.prior)
                tap.parameter.grad = tap.shown = shown
                tap.version = shown._version
        self.silenced = self.owing = True
        self._reset()

    def _reset(self) -> None:
        self._open = self._silent = False
        for tap in self.taps:
            if tap.prior is not None and tap.shown is None:
                if tap.parameter.grad is None:
                    tap.parameter.grad = tap.prior
                tap.prior = None
            tap.touched = False

    def _forget(self) -> None:
        self._open = self._silent = False
        for tap in self.taps:
            tap.prior = tap.carry = tap.shown = None
            tap.touched = False
        self.sync.abort()

    # ---- between passes

    def join(self, where: str, *, due: bool = False) -> None:
        """A turn in which backward reached no parameter here: take part in what the others exchange, with zeros.

        With `due` gradients are about to be used, and what silent passes have left is exchanged too.
        """
        self.refuse_inside(where)
        if self._open:
            self._forget()
            raise UsageError(
                f"a backward of step {self.context.step_state.step} ended with an error that was caught, so its gradients were never "
                "exchanged; let the error end the run, or skip the batch before backward on every worker"
            )
        expected = (not self.passes or self.owing) if due else not (self.passes or self.silenced)
        if expected and self.taps and (self.owing or self.context.group.size > 1):
            self._silent = False
            self._close(where)

    def refuse_inside(self, where: str) -> None:
        """Raise `UsageError` if a backward is under way: until it returns, gradients are of this worker alone, or on their way."""
        if torch._C._current_graph_task_id() != -1 and self.taps:
            raise UsageError(
                f"{where} was called inside of loss.backward() (an optimizer in a hook of its parameters), where gradients are not the "
                "mean over all workers yet; take the hook out, and call optimizer.step() after loss.backward()"
            )

    def foreign(self, parameters: Iterable[Any]) -> list[int]:
        """The numbers of those whose p.grad is not the tensor that the last pass has put there."""
        found = []
        for parameter in parameters:
            tap, grad = self._by_id.get(id(parameter)), parameter.grad
            if tap is not None and grad is not None and id(grad) != tap.given:
                found.append(tap.number)
        return found

    def turn(self) -> None:
        """A new turn begins."""
        self.failed = False
        self.passes = 0
        self.silenced = False
        for tap in self.taps:
            tap.owed = None if tap.carry is None or self.context.agreement.recovery is None else tap.carry.clone()


def _cast(tap: ParameterHook, mean: Tensor, error: RuntimeError) -> Exception:
    """Why p.grad can't be the mean: the parameter has become another since it was prepared."""
    here = tap.parameter
    if (here.dtype, here.device, here.shape) == (mean.dtype, mean.device, mean.shape):
        return error
    return UsageError(
        f"the parameter {tap.name} was {list(mean.shape)} {mean.dtype} on {mean.device} in run.prepare, and is {list(here.shape)} "
        f"{here.dtype} on {here.device} now: call model.to(...), .double(), .half() and the like before run.prepare"
    )


def _add(into: Tensor, addend: Tensor) -> Tensor:
    """The sum, in place of `into` where layouts allow (dense or sparse)."""
    if into.is_sparse and not addend.is_sparse:
        return addend.add_(into)
    return into.add_(addend)


def _at_end(callback: Callable[[], None]) -> None:
    Variable._execution_engine.queue_callback(callback)
