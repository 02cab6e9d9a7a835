"""Steps of optimizers that are put off to the last micro-batch: `zero_grad` goes back to what had been added up when a step was due.

micro-batch 0    zero_grad                 a0   step (put off)     b0        b0: of another loss, which reaches the same parameters
micro-batch 1    zero_grad (a0 is left)    a1   step (a0 + a1)     b1

What counts for an optimizer lies between its own zero_grad and its own step, and each has them at another place of the loop body. What
comes after a step that was put off is added up beside what was there, until zero_grad drops it or the step takes it in.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Protocol

from torch import Tensor

from paceline.comm.bucket_layout import added
from paceline.errors import UsageError

MIXED: Final = (
    "zero_grad() would drop gradients of {} that were added to those of the micro-batches before: a loop body with accumulate has to call "
    "zero_grad and step at the same places in all micro-batches of a batch"
)

AFTER: Final = (
    "a backward reached {} after the step of its optimizer, and zero_grad() doesn't come before the next one: with accumulate that step "
    "takes in what all micro-batches have added up; call zero_grad() between, or step after all backward passes of the loop body"
)

CHANGED: Final = (
    "p.grad of {} was changed by the script in a micro-batch before the last, where it is what this worker has added up so far, and comes "
    "again in the next: with accumulate clip by run.clip or nn.utils.clip_grad_norm_, give a GradScaler to run.prepare and weight decay to "
    "the optimizer, and call zero_grad of the model or the optimizer itself"
)

BETWEEN: Final = (
    "p.grad of {} was changed by the script after the step of a micro-batch before the last, where it is what this worker has added up so "
    "far: with accumulate clear gradients by zero_grad of the model or the optimizer instead of p.grad.zero_(), and clip by run.clip"
)

SET: Final = (
    "p.grad of {} was set by the script in a micro-batch before the last, and only what a backward brings is added up over micro-batches: "
    "with accumulate let loss.backward() make the gradients, or leave accumulate out, with a smaller batch if memory is short"
)


class WaitingSum:
    """What is known of a parameter whose optimizer's step was put off in a turn of `loader` (an id)."""

    __slots__ = ("after", "aside", "cleared", "joined", "kept", "loader", "micro")

    def __init__(self, loader: int, micro: int) -> None:
        self.loader, self.micro = loader, micro  # the number of the micro-batch
        self.aside: tuple[Tensor | None, Tensor | None] | None = None  # what was there, carry and prior, if passes add up beside it
        self.kept = False  # zero_grad has come: passes add to what was there
        self.joined = False  # some have
        self.cleared = False  # none has come since the last zero_grad
        self.after = False  # some came after the step of the same micro-batch, and zero_grad hasn't dropped them

    def come(self, micro: int, *, reached: bool = True) -> None:
        """Note that a pass has come in this micro-batch, and whether it has reached the parameter here."""
        self.after = self.after or (reached and micro == self.micro)
        self.joined, self.cleared = self.joined or (self.kept and reached), False


class SummedParameter(Protocol):
    """What has to be known of a parameter: what passes have added up that is not exchanged yet, and what p.grad held before and shows."""

    name: str
    parameter: Any
    carry: Tensor | None
    prior: Tensor | None
    shown: Tensor | None
    version: int  # of what is shown
    waiting: WaitingSum | None
    touched: bool  # in the pass under way
    latest: int  # the number of the last pass that has added to `carry`
    discards: bool  # the script drops what passes have added up, by a zero_grad without a step

    def show(self) -> None:
        """Let p.grad show what was added up, and what it held before."""
        ...


class PutOffSteps:
    """The parameters whose optimizers' steps were put off. `reclaim` finds out what a script has made of the p.grad that was shown."""

    def __init__(self, hooks: Mapping[int, SummedParameter], reclaim: Callable[[Any, Tensor | None], None]) -> None:
        self._hooks, self._reclaim = hooks, reclaim
        self.waiting: dict[int, SummedParameter] = {}  # by id of the parameter
        self._others: dict[int, int] = {}  # parameters that are not followed (their ids), and the loader
        self._micro = 0  # micro-batches so far
        self._there: dict[int, tuple[weakref.ref[Tensor], int]] = {}  # by id of the parameter: p.grad that shows no sum, and its version
        self._begun: dict[int, int | None] = {}  # by loader: the passes before its present micro-batch; None in the first of a batch

    def __bool__(self) -> bool:
        return bool(self.waiting or self._others)

    # ---- what an optimizer does

    def put_off(self, parameters: Iterable[Any], loader: int) -> None:
        """Note that the step of an optimizer of these parameters waits for a later micro-batch of the turn."""
        for parameter in parameters:
            hook = self._hooks.get(id(parameter))
            if hook is None:
                self._others[id(parameter)] = loader
                continue
            self._check(hook)
            self._check_own(hook)
            self._look(hook)
            self._join(hook)
            self.waiting[id(parameter)], hook.waiting = hook, WaitingSum(loader, self._micro)
            if hook.carry is None and parameter.grad is None:
                self.set_aside(hook)

    def take(self, parameters: Iterable[Any]) -> bool:
        """Have p.grad of these parameters be all that counts for a step, which is made now; whether some of it was kept apart."""
        apart = False
        for parameter in parameters:
            self._others.pop(id(parameter), None)
            hook = self.waiting.pop(id(parameter), None)
            if hook is not None and hook.waiting is not None:
                self._look(hook)
                self._check(hook)
                self._join(hook)
                apart, hook.waiting = apart or not hook.waiting.kept, None
        return apart

    def clear(self, parameters: Iterable[Any], zero: Callable[[], Any], loader: int | None) -> tuple[Any, bool]:
        """Clear gradients by `zero`, but for what waits for a step, and what earlier micro-batches of the turn of `loader` have left.

        Returns what `zero` returns, and whether something was left.
        """
        found: list[tuple[SummedParameter, Tensor | None, Tensor | None]] = []
        others: list[tuple[Any, Tensor | None]] = []
        dropped: list[SummedParameter] = []
        for parameter in parameters:
            hook = self._hooks.get(id(parameter))
            if hook is None and id(parameter) in self._others:
                others.append((parameter, parameter.grad))
            elif hook is not None and (hook.waiting is not None or self._leaves(hook, loader)):
                self._look(hook)
                shows = hook.carry is None and hook.shown is None and (hook.waiting is None or hook.waiting.aside is None)
                self.go_back(hook)
                found.append((hook, hook.carry, parameter.grad if shows else hook.prior))
            elif hook is not None and hook.carry is not None:
                dropped.append(hook)
        for parameter in [*(hook.parameter for hook, _, _ in found), *(parameter for parameter, _ in others)]:
            parameter.grad = None
        result = zero()
        for hook in dropped:
            hook.carry = hook.prior = hook.shown = None
        for hook, carry, prior in found:
            self._hold(hook, carry, prior)
            if carry is None and prior is None:
                self.set_aside(hook)
        for parameter, grad in others:
            parameter.grad = grad
        return result, bool(found)

    def _leaves(self, hook: SummedParameter, loader: int | None) -> bool:
        """Whether zero_grad leaves what was added up of a parameter that no step waits for: it is all of earlier micro-batches."""
        if hook.carry is None:
            return False
        begun = None if loader is None else self._begun.get(loader)
        if begun is None:
            hook.discards = True
        elif hook.latest > begun:
            raise UsageError(MIXED.format(hook.name))
        return begun is not None

    def begin(self, loader: int, begun: int, *, first: bool) -> bool:
        """Begin a micro-batch, before which so many passes have begun; whether steps of the batch before were never made."""
        self._begun[loader], self._micro = None if first else begun, self._micro + 1
        ended = self._end(loader) if first else False
        self._there.clear()
        for hook in self._hooks.values():
            if not first and hook.discards and hook.waiting is None and hook.carry is not None:
                self.waiting[id(hook.parameter)], hook.waiting = hook, WaitingSum(loader, -1)
            self.note(hook)
        return ended

    def _end(self, loader: int) -> bool:
        """Wait no longer for steps of a turn that is over; whether there were some."""
        ended = {key: hook for key, hook in self.waiting.items() if hook.waiting is not None and hook.waiting.loader == loader}
        for key, hook in ended.items():
            del self.waiting[key]
            self._let_go(hook)
        self._others = {key: other for key, other in self._others.items() if other != loader}
        return bool(ended)

    def _let_go(self, hook: SummedParameter) -> None:
        """Have p.grad be what the script has left there, as the step that it waited for never comes."""
        waiting = hook.waiting
        if waiting is not None and not waiting.cleared and waiting.aside is None:
            hook.waiting = None  # no sum is kept apart: p.grad shows all
        if waiting is None or not waiting.cleared or hook.parameter.grad is not hook.shown:
            self._look(hook)
        if hook.waiting is not None and hook.waiting.cleared:
            self._hold(hook, None, None)
        else:
            self._join(hook)
        hook.waiting = None

    # ---- what passes do

    def set_aside(self, hook: SummedParameter) -> None:
        """Keep what was there apart from what a pass is about to add, as zero_grad may yet drop that."""
        waiting = hook.waiting
        if waiting is not None and waiting.aside is None and not waiting.kept:
            waiting.aside, hook.carry, hook.prior = (hook.carry, hook.prior), None, None

    def go_back(self, hook: SummedParameter) -> None:
        """Drop what has come since the step was put off. Raises `UsageError` where it was added to what was there."""
        waiting = hook.waiting
        if waiting is None:
            return
        if waiting.aside is not None:
            (hook.carry, hook.prior), waiting.aside, waiting.after = waiting.aside, None, False
        elif waiting.joined:
            raise UsageError(MIXED.format(hook.name))
        waiting.kept, waiting.cleared = not hook.discards, True

    def changed(self, hook: SummedParameter) -> None:
        """Take zeros in p.grad for a zero_grad. Raises `UsageError` for any other change of what was shown while a step waits."""
        grad, waiting = hook.parameter.grad, hook.waiting
        lost = waiting is not None and waiting.aside is None and grad is not None and grad is hook.carry  # zeroed is the sum itself
        if lost or _holds_something(grad):
            raise UsageError(BETWEEN.format(hook.name))
        self.go_back(hook)

    def note(self, hook: SummedParameter) -> None:
        """Note that what p.grad holds is of before this micro-batch, if it shows no sum."""
        grad = hook.parameter.grad
        if grad is not None and hook.shown is None:
            self._there[id(hook.parameter)] = weakref.ref(grad), _version(grad)

    def come(self, hook: SummedParameter) -> None:
        """Note that a pass has added to what is not exchanged yet."""
        if hook.waiting is not None:
            hook.waiting.come(self._micro)

    def exchange(self) -> None:
        """Note that a pass ends that is exchanged, with all that was added up."""
        for hook in self.waiting.values():
            if hook.waiting is not None:
                hook.waiting.come(self._micro, reached=hook.touched)

    def forget(self) -> None:
        """Wait for no step, and drop what was kept apart."""
        for hook in self.waiting.values():
            hook.waiting = None
        self.waiting.clear()
        self._others.clear()

    # ---- between them

    def _look(self, hook: SummedParameter) -> None:
        """Find out whether the script has changed the p.grad that was shown."""
        grad, shown = hook.parameter.grad, hook.shown
        if shown is not None and (grad is not shown or shown._version != hook.version):
            self._reclaim(hook, grad)

    def _check(self, hook: SummedParameter) -> None:
        """Raise `UsageError` where the step of a micro-batch would take in what came after that of another one."""
        if hook.waiting is not None and hook.waiting.after and hook.waiting.micro != self._micro:
            raise UsageError(AFTER.format(hook.name))

    def _check_own(self, hook: SummedParameter) -> None:
        """Raise `UsageError` where p.grad holds what no pass has brought, but the script in this micro-batch."""
        grad, shown = hook.parameter.grad, hook.shown
        if grad is None or (shown is not None and grad is shown and grad._version == hook.version):
            return
        there = self._there.get(id(hook.parameter))
        if shown is None and there is not None and there[1] == _version(grad) and there[0]() is grad:
            return
        if grad is shown or _holds_something(grad):
            raise UsageError((SET if shown is None else CHANGED).format(hook.name))

    def _hold(self, hook: SummedParameter, carry: Tensor | None, prior: Tensor | None) -> None:
        hook.carry, hook.prior = carry, prior
        hook.show()
        self.note(hook)

    def _join(self, hook: SummedParameter) -> None:
        """Add what has come since to what was there."""
        if hook.waiting is None or hook.waiting.aside is None:
            return
        (carry, prior), hook.waiting.aside = hook.waiting.aside, None
        grad, carry = hook.parameter.grad, _sum(carry, hook.carry)
        if hook.shown is not None or grad is None:
            self._hold(hook, carry, prior)
        else:  # it was exchanged
            hook.carry, hook.parameter.grad = carry, _sum(prior, grad)


def prior(hook: SummedParameter) -> Tensor | None:
    """Return what p.grad held before the passes of this turn."""
    return hook.prior if hook.waiting is None or hook.waiting.aside is None else hook.waiting.aside[1]


def _version(grad: Tensor) -> int:
    return -1 if grad.is_inference() else grad._version


def _holds_something(grad: Tensor | None) -> bool:
    """Whether a gradient is more than zeros."""
    return grad is not None and bool((grad._values() if grad.is_sparse else grad).any())


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    if one is None or other is None:
        return other if one is None else one
    return added(one, other)
