"""Watches every optimizer of this process, and refuses wrong steps before they change anything.

torch calls one hook for all optimizers. Each run has its `OptimizerWatch`, which knows its own
optimizers by their parameters.

    optimizer.step()   unprepared, and steps on its gradients are wrong   raises
                       inside of loss.backward()                          raises
                       unprepared otherwise                               `strange` is called, once
                       one of the run's                                   counted, and checked
                                                                          (`ManualGradients`)
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

_REGISTRY: Final = threading.Lock()  # of what torch keeps for all threads


class KnownOptimizer(NamedTuple):
    """What is known of an optimizer, as long as nothing is added to it or to the run."""

    optimizer: weakref.ref[Optimizer]
    groups: int
    slots: int
    is_of_run: bool  # some of its parameters are the run's
    is_prepared: bool


class OptimizerWatch:
    """Sees optimizers step on behalf of one run, from `begin` to `end`.

    `strange` is called once for each that was not prepared, and told whether it has parameters of
    the run.
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
        self._counts_alike = False  # all workers take the same steps
        self._known: dict[int, KnownOptimizer] = {}
        self._own_ids: set[int] = set()
        self._thread = threading.get_ident()

    def begin_watching(self) -> None:
        """Watch from now on, and compare counts of steps where all workers take the same ones."""
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
        """Stop watching. Calling it twice is harmless."""
        with _REGISTRY:
            for hook in StepHook.all():
                hook.watches = tuple(watch for watch in hook.watches if watch is not self)

    def check_step(self, optimizer: Optimizer, *, alone: bool, closure: bool) -> None:
        """Check an optimizer that is about to step.

        `alone`: this is the only run that watches in this process; `closure`: the gradients are
        made inside of the step.
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
        self._own_ids = {id(slot.parameter) for slot in self._prepared.slots}
        prepared = any(optimizer is other for other in self._prepared.optimizers)
        ours = prepared or any(
            id(p) in self._own_ids for group in optimizer.param_groups for p in group["params"]
        )
        if ours:
            self._prepared.cuts.refuse_whole_optimizers([optimizer])
        seen = KnownOptimizer(
            weakref.ref(optimizer),
            len(optimizer.param_groups),
            len(self._prepared.slots),
            ours,
            prepared,
        )
        self._known[id(optimizer)] = seen
        new = before is None or before.optimizer() is not optimizer
        if new and not prepared and (ours or alone or threading.get_ident() == self._thread):
            self._note_unprepared(optimizer, ours)
        return seen

    def _check_unprepared(self, optimizer: Optimizer) -> None:
        """Raise `UsageError` where an optimizer that wasn't prepared can't be right."""
        loop, name = self._loop, type(optimizer).__qualname__
        watched, handles = (
            bool(loop.backward.watched.parameters),
            self._prepared.tables.get_handle_ids(),
        )
        why = ""
        if watched and loop.abilities.remote is not None:
            why = (
                "with ParameterServer optimizers step on servers, and this one steps on one "
                "worker's share"
            )
        elif loop.transaction.recovers:
            why = "when a worker is lost (--min-workers), it would step twice for one step"
        elif any(id(p) in handles for group in optimizer.param_groups for p in group["params"]):
            why = "it has sparse tables, whose rows are stepped by a prepared optimizer alone"
        flat = self._prepared.cuts.find_flat_parameter(optimizer)
        around = self._find_outer_optimizer() if why or flat else None
        if not (why or flat) or around is not None:
            return
        if flat:
            self._prepared.cuts.refuse_late_optimizers([optimizer])
        else:
            raise UsageError(
                f"{name} steps on parameters of a prepared model and was not given to run.prepare: "
                f"{why}; give it to run.prepare"
            )

    def _find_outer_optimizer(self) -> Optimizer | None:
        """Prepared optimizer that is stepping and contains this one (SAM, Lookahead)."""
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

    One serves all runs, and stays when they are over.

    Torch fails where its list of hooks changes while another thread's step goes through it.
    """

    def __init__(self) -> None:
        self.watches: tuple[OptimizerWatch, ...] = ()

    @staticmethod
    def all() -> Iterator[StepHook]:
        """Yield the hooks that torch calls."""
        return (
            hook
            for hook in torch_optimizer._global_optimizer_pre_hooks.values()
            if isinstance(hook, StepHook)
        )

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watches = self.watches
        for watch in watches:
            watch.check_step(
                optimizer, alone=len(watches) == 1, closure=len(args) > 1 or bool(kwargs)
            )
