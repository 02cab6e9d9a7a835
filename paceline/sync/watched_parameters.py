"""Parameters whose gradients a strategy exchanges, and their `p.grad` around a backward pass.

                 before the pass          while it runs             at its end
    p.grad       prior                    None, filled by autograd  prior + mean over all workers
                 (set apart first)        (handed on at once)
    under        prior + unsent           None, filled by autograd  prior + unsent
    no_sync      (shown to the script)    (added to unsent)         (shown to the script)

`prior` is final and never exchanged again. `unsent` is this worker's weighted sum of the passes
under `run.no_sync()`; the next pass outside of it exchanges the sum.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from paceline.comm.bucket_layout import add_gradients
from paceline.errors import UsageError
from paceline.state.tensor_version import version_of
from paceline.sync.base import Slot
from paceline.sync.gradient_guard import GradientGuard, explain_changed
from paceline.sync.mixed_weights import MixedWeights
from paceline.sync.transaction import Addends

Overwrites = Callable[[int, Tensor], bool]


class WatchedParameter:
    """One parameter, and what is known of its gradient.

    Attributes:
        index: Place in the list of slots that the strategy has.
        node: The AccumulateGrad node of autograd's graph, which adds to `p.grad`.
        handles: Hooks that were set on the parameter and on its node.
        touched: Whether the pass under way has reached the parameter.
        prior: Content of `p.grad` before the pass. None if it held nothing.
        unsent: Weighted sum of silent passes, which is not exchanged yet.
        shown: The tensor that a silent pass left in `p.grad`, at `version`.
        lent_id: id of `p.grad` if it lies in memory of the strategy, which may write there again;
            else 0. An id doesn't count as a reference, and the strategy counts references.
    """

    __slots__ = (
        *("handles", "index", "lent_id", "name", "node"),
        *("parameter", "prior", "shown", "touched", "unsent", "version"),
    )

    def __init__(self, index: int, name: str, parameter: Parameter) -> None:
        self.index, self.name, self.parameter = index, name, parameter
        # autograd keeps one such node for each leaf, and finds it by a view of the leaf
        self.node: Any = parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        self.handles: list[Any] = []
        self.touched = False
        self.prior: Tensor | None = None
        self.unsent: Tensor | None = None
        self.shown: Tensor | None = None
        self.version: int | None = 0
        self.lent_id = 0

    def set_apart(self, *, silent: bool, overwrites: Overwrites) -> None:
        """Keep what `p.grad` holds, before the pass adds to it."""
        if self.touched:
            return
        grad = self.parameter.grad
        if self.shown is not None:
            self._reclaim(grad)
        elif grad is not None:
            # memory of the strategy is about to be written again: keep a copy
            lent = id(grad) == self.lent_id if silent else overwrites(self.index, grad)
            self.prior, self.lent_id = (grad.clone(), self.lent_id) if lent else (grad, 0)
        self.parameter.grad = None

    def _reclaim(self, grad: Tensor | None) -> None:
        """Find out if the script has changed `p.grad` since a silent pass showed its sum there."""
        shown, self.shown = self.shown, None
        if grad is shown and shown is not None and version_of(shown) == self.version:
            return
        if grad is shown and self.prior is None:
            self.unsent = grad  # changed in place (zeroed, clipped): the sum is what it is now
        elif grad is None or not bool(grad.any()):
            self.prior, self.unsent = grad, None
        else:
            raise UsageError(
                f"p.grad of {self.name} was changed between passes under run.no_sync(), after a "
                "pass without it had been exchanged; "
                "call zero_grad() first, or leave it alone until the exchange"
            )

    def keep_own(self, grad: Tensor, *, lent: bool) -> None:
        """Keep a `p.grad` that the pass hasn't reached; `lent`: the exchange writes over it."""
        if lent:
            self.parameter.grad = grad.clone()
        else:
            self.lent_id = 0

    def take_unsent(self) -> Tensor:
        """Give the sum of silent passes away, to be exchanged with the pass under way."""
        assert self.unsent is not None
        unsent, self.unsent, self.touched = self.unsent, None, True
        return unsent

    def keep_unsent(self, total: Tensor | None) -> None:
        """Set the sum of silent passes in a pass that reaches the parameter."""
        self.unsent, self.touched = total, True

    def show(self) -> None:
        """Let `p.grad` show the sum of silent passes, and what it held before."""
        if self.unsent is None:
            self.parameter.grad, self.prior, self.shown = self.prior, None, None
            return
        shown = (
            self.unsent if self.prior is None else add_gradients(self.unsent.clone(), self.prior)
        )
        self.parameter.grad = self.shown = shown
        self.version = version_of(shown)

    def set_mean(self, mean: Tensor) -> None:
        """Set `p.grad` to a tensor in the strategy's memory.

        Raises:
            UsageError: The parameter is of another shape, type or device than at `run.prepare`.
        """
        try:
            self.parameter.grad = mean
        except RuntimeError as error:
            raise explain_changed(self.name, self.parameter, mean, error) from error
        self.lent_id = id(mean)

    def take_prior(self) -> Tensor | None:
        """Give away what `p.grad` held before the pass."""
        before, self.prior = self.prior, None
        return self.parameter.grad if before is None and not self.touched else before

    def add_mean(self, before: Tensor | None, mean: Tensor) -> None:
        """Set `p.grad` to the mean plus what it held before."""
        if before is not None and not self.lent_id and not (before.is_sparse or mean.is_sparse):
            # the script's own tensor: added to in place, as torch does
            self.parameter.grad = before.add_(mean)
        else:
            self.set_mean(mean if before is None else add_gradients(mean, before))

    def end_pass(self) -> None:
        """Be outside of a pass; `p.grad` has what it held before if the pass gave no mean."""
        self.touched = False
        if self.prior is not None and self.shown is None:
            if self.parameter.grad is None:
                self.parameter.grad = self.prior
            self.prior = None

    def restore(self, prior: Tensor | None, unsent: Tensor | None) -> None:
        """Set `p.grad`, and the sum of silent passes, to what they were before."""
        self.parameter.grad, self.unsent, self.shown = prior, unsent, None

    def forget(self) -> None:
        """Forget a pass that has failed, and the silent ones before it."""
        self.prior = self.unsent = self.shown = None
        self.touched = False


class WatchedParameters:
    """All parameters that are exchanged, in the order of the strategy's slots.

    Args:
        overwrites: Whether the exchange of a pass writes over this `p.grad` of this slot.
        set_apart: Called with a parameter whose `p.grad` holds something, before a pass adds to it.
        take_gradient: Called with a parameter when backward has added to its `p.grad`. torch gives
            the parameter's tensor as well.
    """

    def __init__(
        self,
        overwrites: Overwrites,
        set_apart: Callable[[WatchedParameter], None],
        take_gradient: Callable[[WatchedParameter, Tensor], None],
    ) -> None:
        self.parameters: list[WatchedParameter] = []
        self.slots: list[Slot] = []
        self.by_id: dict[int, WatchedParameter] = {}  # by id of the parameter
        self.overwrites = overwrites
        self.guard = GradientGuard(set_apart)
        self._take_gradient = take_gradient
        self.frozen: list[Slot] = []  # prepared, and not trained so far

    def add_slots(self, slots: Sequence[Slot]) -> tuple[bool, bool]:
        """Watch the slots that are new, and note the optimizers of the others.

        Returns whether there were new slots, and whether others have another optimizer now.
        """
        self.guard.start_listening()
        by_id = {id(slot.parameter): slot for slot in slots}
        before = self.slots
        self.slots = [by_id.get(id(slot.parameter), slot) for slot in before]
        other_optimizers = any(
            one.optimizer is not two.optimizer for one, two in zip(before, self.slots, strict=True)
        )
        new = [slot for slot in slots if id(slot.parameter) not in self.by_id]
        for slot in new:
            self._hook_parameter(slot)
        return bool(new), other_optimizers

    def _hook_parameter(self, slot: Slot) -> None:
        parameter = slot.parameter
        watched = WatchedParameter(len(self.parameters), slot.name, parameter)
        # a partial, as a function around it would be one more call for each gradient
        after = functools.partial(self._take_gradient, watched)
        watched.handles = [parameter.register_post_accumulate_grad_hook(after)]
        self.parameters.append(watched)
        self.slots.append(slot)
        self.by_id[id(parameter)] = watched
        self.guard.watch_parameter(watched)

    def remove_hooks(self) -> list[Slot]:
        """Remove all hooks, and return the slots that were watched."""
        self.guard.stop_listening()
        for watched in self.parameters:
            for handle in watched.handles:
                handle.remove()
        self.parameters.clear()
        self.by_id.clear()
        slots, self.slots = self.slots, []
        return slots

    def note_frozen(self, slots: Sequence[Slot]) -> None:
        """Look out for these parameters, which are not trained so far."""
        self.frozen = list(slots)

    def take_thawed(self) -> list[Slot]:
        """Slots that were frozen when they were prepared, and are trained now."""
        thawed = [slot for slot in self.frozen if slot.parameter.requires_grad]
        self.frozen = [slot for slot in self.frozen if not slot.parameter.requires_grad]
        return thawed

    def copy_lent(self) -> None:
        """Take each `p.grad` out of the strategy's memory, which it lays out anew."""
        for watched in self.parameters:
            grad = watched.parameter.grad
            if grad is not None and id(grad) == watched.lent_id:
                watched.parameter.grad, watched.lent_id = grad.clone(), 0

    # ---- at the end of a pass

    def set_gradients(self, means: Addends, mixed: MixedWeights | None, *, uneven: bool) -> None:
        """Set `p.grad` of each parameter to what it held before plus the mean over all workers.

        Args:
            means: Index and mean of each parameter that any worker has used.
            mixed: Notes gradients that add up passes of different weights, if that matters.
            uneven: The pass has another weight than the one before.
        """
        parameters, plain = self.parameters, 0
        mixing = mixed is not None and (uneven or bool(mixed.mixed_numbers))
        for index, mean in means:
            watched = parameters[index]
            if mixing or watched.prior is not None or not watched.touched:
                before = watched.take_prior()
                if mixing and mixed is not None:
                    mixed.record_prior(index, before, uneven=uneven)
                watched.add_mean(before, mean)
                continue
            # written out, as it is done for nearly every gradient (see `set_mean`)
            try:
                watched.parameter.grad = mean
            except RuntimeError as error:
                raise explain_changed(watched.name, watched.parameter, mean, error) from error
            watched.lent_id, watched.touched = id(mean), False
            plain += 1
        if plain < len(parameters):
            self.end_pass()

    def show_sums(self) -> None:
        """Let each `p.grad` show what silent passes have added up on this worker."""
        for watched in self.parameters:
            if watched.touched and watched.unsent is not None:
                watched.show()
        self.end_pass()

    def end_pass(self) -> None:
        """Leave the pass, which has reached some of the parameters."""
        for watched in self.parameters:
            watched.end_pass()

    def forget_pass(self) -> None:
        """Forget a pass that has failed, and silent ones before it."""
        for watched in self.parameters:
            watched.forget()

    # ---- what a transaction keeps of gradients

    def copy_priors(self) -> dict[int, Tensor]:
        """Copy the gradients as they were before the pass that ends, by index."""
        priors = (
            (watched.index, watched.prior if watched.touched else watched.parameter.grad)
            for watched in self.parameters
        )
        return {index: grad.clone() for index, grad in priors if grad is not None}

    def copy_unsent(self) -> dict[int, Tensor]:
        """Copy the sums of silent passes, by index."""
        return {
            watched.index: watched.unsent.clone()
            for watched in self.parameters
            if watched.unsent is not None
        }

    def make_zeros(self) -> Addends:
        """Make the means of a pass that has no result on any worker: zeros."""
        return [
            (watched.index, torch.zeros_like(watched.parameter))
            for watched in self.parameters
            if watched.touched
        ]

    def restore_gradients(self, priors: dict[int, Tensor], unsent: dict[int, Tensor]) -> None:
        """Set gradients and sums of silent passes to these, by index."""
        for watched in self.parameters:
            watched.restore(priors.get(watched.index), unsent.get(watched.index))

    def find_foreign(self, parameters: Iterable[Any]) -> list[int]:
        """Indices of the parameters whose `p.grad` is not the tensor that the last pass has set."""
        indices = []
        for parameter in parameters:
            watched, grad = self.by_id.get(id(parameter)), parameter.grad
            if watched is not None and grad is not None and id(grad) != watched.lent_id:
                indices.append(watched.index)
        return indices
