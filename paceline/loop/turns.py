"""Where training stands: the step, the turns under way, and whether gradients are exchanged yet.

Other parts of a run ask this. `loop/step.py` moves it on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.cluster.control.progress import ProgressPage
from paceline.comm.backward_pass import current_pass_id
from paceline.data.loader import Turn
from paceline.data.spec import LoaderSpec
from paceline.errors import UsageError
from paceline.loop.batch_use import BatchUse
from paceline.loop.idle_epochs import IdleEpochs
from paceline.loop.observers import LoopObservers
from paceline.loop.open_turns import OpenTurns
from paceline.loop.step_clock import StepClock
from paceline.sync.abilities import Abilities
from paceline.sync.autograd import GradientTracker
from paceline.sync.base import Sync
from paceline.sync.context import SyncContext
from paceline.sync.transaction import Transaction


class TrainingLoop:
    """State of the training loop of a run, and keeper of the context's `StepState`.

    Invariants: `steps` counts the turns of leading loaders that have ended. `quiet` is the depth of
    nested `no_sync` blocks. `share` belongs to the training turn that began last. `cut_off` is the
    number of a turn, from 1 on, in which nothing more can be exchanged, or 0.

    Args:
        begin_backward, end_backward: As of `GradientTracker`.
    """

    def __init__(
        self,
        sync: Sync,
        context: SyncContext,
        abilities: Abilities,
        page: ProgressPage | None = None,
        *,
        begin_backward: Callable[[], None],
        end_backward: Callable[[GradientTracker, str], None],
    ) -> None:
        self.context, self.abilities, self.page = context, abilities, page
        self.backward = GradientTracker(
            sync, context, abilities, begin_backward=begin_backward, end_backward=end_backward
        )
        self.observers = LoopObservers()
        self.turns = OpenTurns()
        self.clock = StepClock(context, self.backward)
        self.batch_use = BatchUse(context)
        self.idle_epochs = IdleEpochs(self, context, self.backward, page)
        self.models: list[nn.Module] = []
        self.scalers = context.step_state.scalers
        # undo what was set on a user's objects
        self.undos: list[Callable[[], None]] = [self.clock.interruptions.close]

        # ---- where training stands
        self.steps_made = 0
        self.share = 0.0  # of this worker in the step under way
        self.actions = 0  # steps of optimizers, and times that no_sync was entered
        self.quiet = 0
        self.had_ghosts = False  # some worker had no samples in a turn of the latest loop
        self.stopped = False  # all workers have agreed to stop: training loaders give no more steps
        self._announced = False

        # ---- if workers may come and go, or leave lockstep
        self.apart = False  # workers are not in lockstep
        self.cut_off = 0

    def observe(self, observers: LoopObservers) -> None:
        """Call these observers from now on."""
        self.observers = observers

    # ---- which turn

    @property
    def turn(self) -> Turn | None:
        """The innermost turn under way (see `OpenTurns.current`)."""
        return self.turns.current

    @property
    def training_turn(self) -> Turn | None:
        """Turn that backward passes and optimizers belong to."""
        return self.turns.training

    @property
    def leading_turn(self) -> Turn | None:
        """The turn of the leading training loader: the step under way."""
        return self.turns.leading

    @property
    def terms(self) -> LoaderSpec | None:
        """How the loader of the present turn deals its batches.

        It is the innermost training turn if gradients are on, else the innermost turn.
        """
        turns = self.turns
        return turns.terms_of(turns.training if torch.is_grad_enabled() else turns.current)

    def settle_state(self) -> None:
        """Set the `StepState` by the turn that trains."""
        under_way, state = self.turns.under_way, self.context.step_state
        if not under_way:
            turn = None
        else:
            turn = under_way[0].turn if len(under_way) == 1 else self.turns.training
        if turn is None:
            state.leave_turns(1.0 / self.context.group.size, silent=self.quiet > 0)
        else:
            state.enter_turn(turn, self.share, silent=self.quiet > 0)

    # ---- which step

    def go_to_step(self, steps: int) -> None:
        """Go to step number `steps`, after a resume."""
        self.steps_made = self.context.trace.step = steps
        self.context.step_state.set_step(steps)

    def leave_lockstep(self) -> None:
        """Begin to take steps that are not those of all workers."""
        self.apart = True

    def come_together(self, steps: int) -> None:
        """Stand at this step, as all workers do from now on."""
        self.apart = False
        self.go_to_step(steps)

    def stop_training(self) -> None:
        """Give no more steps of training loaders, as all have agreed to stop."""
        self.stopped = True

    def note_ghosts(self, *, ghosts: bool) -> None:
        """Note whether some worker had no samples in a turn of the present loop."""
        self.had_ghosts = ghosts

    # ---- steps that hold on all workers or on none

    @property
    def transaction(self) -> Transaction:
        """Makes a step hold on all workers or on none."""
        return self.backward.transaction

    def cut_turn(self, turn: int) -> None:
        """Close the exchange of turn `turn`, which may be the next turn on this worker."""
        self.cut_off = turn
        self.close_exchange()

    def close_exchange(self) -> None:
        """Close the exchange of the turn that is cut off, if it is under way; else open it."""
        closed = self.leading_turn is not None and self.cut_off == self.steps_made + 1
        self.context.step_state.close_exchange(closed=closed)

    def roll_back(self) -> None:
        """Go back to where the turn began, as it has failed on all workers."""
        self.cut_off = 0
        self.transaction.roll_back()

    # ---- gradients, and the steps of optimizers

    @property
    def is_acting(self) -> bool:
        """Whether `optimizer.step`, `scheduler.step` and the like act.

        They don't for a batch without weight, nor in a turn that has failed.
        """
        turn = self.turns.training
        if turn is None or not turn.train:
            return True
        if turn.total == 0:
            if not self._announced:
                self._announced = True
                self.context.announce(
                    f"all weights of step {self.steps_made} are zero: no update is made for such a "
                    "batch"
                )
            return False
        return not self.transaction.failed

    def exchange_due_gradients(self, where: str) -> None:
        """Exchange gradients that are about to be used, if they are not exchanged yet.

        This works even if backward touched nothing on this worker.

        Raises:
            UsageError: Inside of `run.no_sync()`.
        """
        turn = self.turns.training
        if self.quiet:
            raise UsageError(
                f"{where} inside run.no_sync() would use gradients before their exchange; "
                "call it outside of the block"
            )
        if turn is None or turn.train:
            self.backward.join_exchange(where, due=True)

    def may_step(self) -> bool:
        """Exchange the rest for an optimizer that is about to step; return whether it acts.

        This is `ready` and `acting` in one call, as it is made in every step.
        """
        turn, under_way, backward = None, self.turns.under_way, self.backward
        if under_way:
            turn = self.turns.training if len(under_way) > 1 else under_way[0].turn
        if (
            self.quiet
            or backward.open
            or current_pass_id() != -1
            or (backward.watched.parameters and (backward.owing or not backward.passes))
        ):
            self.exchange_due_gradients("optimizer.step")
        if turn is not None and turn.train and not turn.total:
            return self.is_acting
        return turn is None or not turn.train or not backward.transaction.failed

    @contextlib.contextmanager
    def hold_exchanges(self) -> Iterator[None]:
        """Exchange nothing inside of the block (`run.no_sync`)."""
        self.quiet += 1
        self.actions += 1
        self.backward.begin_silence(silent=True)
        self.settle_state()
        try:
            yield
        finally:
            self.quiet -= 1
            self.settle_state()

    def gather_once(self, act: Callable[[], Tensor], nothing: Tensor) -> Tensor:
        """Gather rows by `act`, once a batch.

        Returns `nothing` if they were gathered before, or if the turn is dealt again.
        """
        return self.transaction.gather_rows(act, nothing)

    def note_optimizer_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped; without a loader this begins the next turn."""
        self.actions += 1
        for observer in self.observers.stepped:
            observer(optimizer)
        # once, twice, four times, eight times and so on
        if not self.actions & (self.actions - 1):
            for look in self.observers.doubled:
                look()
        if not self.turns.under_way:
            passes, _ = self.backward.begin_turn()
            if self.transaction.recovers:
                self.transaction.begin_turn(leads=False, passes=passes)

    def prepare_forward(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Prepare for a model to be run on these arguments."""
        self.backward.watch_thawed()
        if not torch.compiler.is_compiling() and self.batch_use.due and torch.is_grad_enabled():
            self.batch_use.check_use((*args, *options.values()))
        if len(self.turns.under_way) > 1:
            self.settle_state()  # an inner loop may have been left by `break` since

    def release_objects(self) -> None:
        """Give the user's objects their own methods back."""
        while self.undos:
            self.undos.pop()()
