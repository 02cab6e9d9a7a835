"""Watches every optimizer of this process, and refuses wrong steps before they change anything.

torch calls one hook for all optimizers. Each run has its `OptimizerWatch`, which recognizes the
optimizers of the run by their parameters.

    optimizer.step()   unprepared, and its step would be wrong   raises an error
                       inside of loss.backward()                 raises an error
                       unprepared otherwise                      `strange` is called, once
                       an optimizer of the run                   counted, and its gradients are
                                                                 checked (`ManualGradients`)
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from paceline.comm.backward_pass import current_pass_id
from paceline.errors import UsageError
from paceline.loop.turns import TrainingLoop
from paceline.prepare.registry import Prepared
from paceline.replicas.manual_gradients import FIRST_STEPS, ManualGradients
from paceline.replicas.step_count import StepCount

_REGISTRY: Final = threading.Lock()  # guards torch's hooks, which all threads share


class KnownOptimizer(NamedTuple):
    """Facts about an optimizer. They hold until the optimizer or the run gets more parameters.

    Attributes:
        optimizer: The optimizer.
        groups: Number of its parameter groups.
        slots: Number of slots of the run.
        is_of_run: Whether it is prepared, or has parameters of the run.
        is_prepared: Whether it was given to `run.prepare`.
    """

    optimizer: weakref.ref[Optimizer]
    groups: int
    slots: int
    is_of_run: bool
    is_prepared: bool


class OptimizerWatch:
    """Watches steps of optimizers for one run, from `begin_watching` to `end_watching`.

    Args:
        prepared: The prepared objects of the run.
        loop: The training loop.
        by_hand: Checks gradients that the script sets itself.
        tally: Counts the steps of the run's optimizers.
        strange: Called once for each optimizer that was not prepared, with the optimizer and
            whether it has parameters of the run.
    """

    def __init__(
        self,
        prepared: Prepared,
        loop: TrainingLoop,
        by_hand: ManualGradients,
        tally: StepCount,
        strange: Callable[[Optimizer, bool], None],
    ) -> None:
        self._prepared, self._loop, self._by_hand, self.tally, self._note_unprepared = (
            prepared,
            loop,
            by_hand,
            tally,
            strange,
        )
        self._counts_alike = False  # whether all workers take the same steps
        self._known: dict[int, KnownOptimizer] = {}
        self._own_ids: set[int] = set()
        self._thread = threading.get_ident()

    def begin_watching(self) -> None:
        """Watch from now on, and compare counts of steps if all workers take the same ones."""
        self._counts_alike = (
            not self._loop.backward.sync.replicas_diverge and self._loop.abilities.remote is None
        )
        if self._counts_alike:
            self._prepared.context.agreement.compare_steps(self.tally.get_counts)
        with _REGISTRY:
            hook = next(StepHook.all(), None)
            if hook is None:
                hook = StepHook()
                register_optimizer_step_pre_hook(hook)
            hook.watches = (*hook.watches, self)

    def end_watching(self) -> None:
        """Stop watching. A second call does nothing."""
        with _REGISTRY:
            for hook in StepHook.all():
                hook.watches = tuple(watch for watch in hook.watches if watch is not self)

    def check_step(self, optimizer: Optimizer, *, alone: bool, closure: bool) -> None:
        """Check an optimizer that is about to step.

        Args:
            optimizer: The optimizer.
            alone: Whether this is the only run that watches in this process.
            closure: Whether the step makes its gradients itself, by a closure.
        """
        # An id may belong to another object by now, so the reference is compared as well.
        seen = self._known.get(id(optimizer))
        if (
            seen is None
            or seen.optimizer() is not optimizer
            or seen[1:3] != (len(optimizer.param_groups), len(self._prepared.slots))
        ):
            seen = self._get_to_know(optimizer, seen, alone=alone)
        if not seen.is_of_run:
            return
        loop, tally = self._loop, self.tally
        if current_pass_id() != -1:
            loop.backward.refuse_inside(f"{type(optimizer).__qualname__}.step")
        if not seen.is_prepared:
            self._check_unprepared(optimizer)
        if self._prepared.context.group.size == 1:
            return  # no other worker to compare with
        # Counted here without a call, as it is done in every step.
        if tally.training_step == loop.steps_made:
            tally.optimizer_steps += 1
        else:
            tally.add_step()
        # Gradients that the script has set by hand are compared in the first steps, and then
        # whenever all workers meet anyway.
        if self._counts_alike and not closure and loop.backward.watched.parameters:
            leader = loop.turns.leader
            within = (
                leader is not None and loop.steps_made >= FIRST_STEPS and leader.turn is not None
            )
            if not within or loop.steps_made + 1 >= self._by_hand.meetings.next_step:
                self._by_hand.check_gradients(optimizer)

    def _get_to_know(
        self, optimizer: Optimizer, before: KnownOptimizer | None, *, alone: bool
    ) -> KnownOptimizer:
        """Find out the facts about an optimizer that is new, or has changed since `before`."""
        self._own_ids = {id(slot.parameter) for slot in self._prepared.slots}
        is_prepared = any(optimizer is other for other in self._prepared.optimizers)
        is_of_run = is_prepared or any(
            id(p) in self._own_ids for group in optimizer.param_groups for p in group["params"]
        )
        if is_of_run:
            self._prepared.cuts.refuse_whole_optimizers([optimizer])
        seen = KnownOptimizer(
            weakref.ref(optimizer),
            len(optimizer.param_groups),
            len(self._prepared.slots),
            is_of_run,
            is_prepared,
        )
        self._known[id(optimizer)] = seen
        is_new = before is None or before.optimizer() is not optimizer
        # All runs of the process see each step. An optimizer without parameters of a run may belong
        # to another run, unless it steps on this run's thread.
        if (
            is_new
            and not is_prepared
            and (is_of_run or alone or threading.get_ident() == self._thread)
        ):
            self._note_unprepared(optimizer, is_of_run)
        return seen

    def _check_unprepared(self, optimizer: Optimizer) -> None:
        """Raise `UsageError` if an optimizer that wasn't prepared would step wrongly."""
        loop, name = self._loop, type(optimizer).__qualname__
        has_watched, handle_ids = (
            bool(loop.backward.watched.parameters),
            self._prepared.tables.get_handle_ids(),
        )
        why = ""
        if has_watched and loop.abilities.remote is not None:
            why = (
                "with ParameterServer optimizers step on servers, and this one steps on one "
                "worker's share"
            )
        elif loop.transaction.recovers:
            why = "when a worker is lost (--min-workers), it would step twice for one step"
        elif any(id(p) in handle_ids for group in optimizer.param_groups for p in group["params"]):
            why = "it has sparse tables, and only a prepared optimizer steps their rows"
        flat_name = self._prepared.cuts.find_flat_parameter(optimizer)
        # The inner optimizer of a prepared one (SAM) is part of that one's step.
        outer = self._find_outer_optimizer() if why or flat_name else None
        if not (why or flat_name) or outer is not None:
            return
        if flat_name:
            self._prepared.cuts.refuse_late_optimizers([optimizer])
        else:
            raise UsageError(
                f"{name} steps on parameters of a prepared model and was not given to run.prepare: "
                f"{why}; give it to run.prepare"
            )

    def _find_outer_optimizer(self) -> Optimizer | None:
        """Find the prepared optimizer whose step has called this one's (SAM, Lookahead)."""
        # The outer optimizer is the `self` of a calling method. `sys._getframe` is private to
        # CPython. If an outer optimizer names its `self` otherwise, the inner one is refused.
        frame, prepared = (
            sys._getframe(2),
            {id(optimizer): optimizer for optimizer in self._prepared.optimizers},
        )
        while frame.f_back is not None:
            frame = frame.f_back
            if (outer := prepared.get(id(frame.f_locals.get("self")))) is not None:
                return outer
        return None


class StepHook:
    """The hook that torch calls before each step.

    One hook serves all runs, and it stays after they have ended. If it were removed while a step of
    another thread goes through torch's hooks, that step would fail.
    """

    def __init__(self) -> None:
        self.watches: tuple[OptimizerWatch, ...] = ()

    @staticmethod
    def all() -> Iterator[StepHook]:
        """Yield the hooks of this class that torch calls."""
        # This dict is private to torch. If it goes, this raises an AttributeError. The hook can't
        # be remembered in this module instead, which has no state of its own.
        return (
            hook
            for hook in torch_optimizer._global_optimizer_pre_hooks.values()
            if isinstance(hook, StepHook)
        )

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # The tuple is replaced as a whole, so a run that ends meanwhile does no harm.
        watches = self.watches
        for watch in watches:
            # The arguments are the optimizer and, if there is one, the closure.
            watch.check_step(
                optimizer, alone=len(watches) == 1, closure=len(args) > 1 or bool(kwargs)
            )
