"""The training loop: between two turns of a loader, at a backward, and at an optimizer's step.

    turn begins     weight of this worker in the global batch; is it a ghost; is it exchanged yet
      backward      (sync/autograd.py) exchanges; p.grad is final when it returns
      step          joins the exchange if backward touched nothing here, then the user's own step
    turn ends       joins, restores buffers of a ghost, counts the step, and hands the records
                    over about once a second

Several loaders may be under way at once. The training loader whose turn began while no other
trained leads: its turns are the steps.

    train  |--- turn 0 ----------------|--- turn 1 ---    for x in train:
    test         |--|--|--|                                   for v in test: evaluation in a turn
    other      |-----------------------|--------------        u = next(others): a second training
                                                              loader
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.cluster.control.progress import Page
from paceline.comm.group_protocol import Traffic
from paceline.data.loader import ShareLoader, Turn
from paceline.data.spec import LoaderSpec
from paceline.errors import UsageError
from paceline.loop.batch_use import BatchUse
from paceline.loop.ghost import buffers, level, put_back
from paceline.loop.idle_epochs import IdleEpochs
from paceline.loop.iteration import LoaderProgress, check_beside, explain, innermost
from paceline.loop.observers import LoopObservers
from paceline.loop.step_clock import AxisTotals, StepClock
from paceline.sync.abilities import Abilities
from paceline.sync.autograd import GradientTracker
from paceline.sync.base import Slot, Sync
from paceline.sync.context import SyncContext
from paceline.sync.transaction import Transaction

_graph_task: Callable[[], int] = torch._C._current_graph_task_id  # -1 outside of it


class TrainingLoop:
    """Follows the loaders of a run (as their `LoaderObserver`), and keeps the context's
    `StepState`.

    Invariants: `_open` has the loaders with a turn, in the order in which their turns began.
    `leader` is one of them, or None. `steps` counts the turns of leaders that have ended. `quiet`
    is the depth of nested `no_sync` blocks.
    """

    def __init__(
        self, sync: Sync, context: SyncContext, abilities: Abilities, page: Page | None = None
    ) -> None:
        self.context, self.abilities, self._page = context, abilities, page
        self.backward = backward = GradientTracker(sync, context, abilities, prepare=self._weigh)
        self.observers = LoopObservers()
        self.steps = 0
        self.quiet = 0  # depth of no_sync
        self.had_ghosts = False  # the latest loop had ghosts
        self.over = False  # all workers have agreed to stop: training loaders give no more steps
        self.models: list[nn.Module] = []
        self.scalers = context.step_state.scalers
        self.frozen: list[Slot] = []
        self.clock = StepClock(context, backward)
        # undo what was set on a user's objects
        self.bound: list[Callable[[], None]] = [self.clock.interruptions.close]
        self._loaders: dict[int, LoaderProgress] = {}  # by id of the loader
        # those with a turn, in the order in which the turns began
        self._open: list[LoaderProgress] = []
        self.leader: LoaderProgress | None = None  # whose turns are the steps
        self.batch_use = BatchUse(context)
        self.acts = 0  # steps of optimizers, and times that no_sync was entered
        self.idle_epochs = IdleEpochs(self, context, backward, page)
        self._calls = 0
        self._part = 0.0  # of the step under way, mine
        self._announced = False
        self.changes = False  # the membership may change
        self._generation_of: Callable[[ShareLoader], int] = lambda loader: 0
        self.apart = False  # workers are not in lockstep
        self.cut_off = 0  # the turn, from 1 on, in which nothing more can be exchanged

    def observe(self, observers: LoopObservers) -> None:
        """Call these observers from now on."""
        self.observers = observers

    # ---- where we are

    @property
    def turn(self) -> Turn | None:
        """The innermost turn under way.

        A turn left by `break` counts only where no other is under way.
        """
        return innermost(self._open)

    @property
    def training(self) -> Turn | None:
        """Turn that backward passes and optimizers belong to.

        It is the innermost training turn, or else the innermost turn.
        """
        if len(self._open) < 2:
            return innermost(self._open)
        training = [
            progress for progress in self._open if progress.turn is not None and progress.turn.train
        ]
        return innermost(training) or innermost(self._open)

    @property
    def terms(self) -> LoaderSpec | None:
        """How the loader of the present turn deals its batches.

        It is the innermost training turn if gradients are on, else the innermost turn.
        """
        turn = self.training if torch.is_grad_enabled() else self.turn
        return next(
            (
                progress.loader.terms
                for progress in self._open
                if turn is not None and progress.turn is turn
            ),
            None,
        )

    @property
    def led(self) -> Turn | None:
        """The turn of the leading training loader: the step under way."""
        return None if self.leader is None else self.leader.turn

    def cut_turn(self, number: int) -> None:
        """Close the exchange of turn `number`, which may be the next turn on this worker."""
        self.cut_off = number
        self.context.step_state.close_exchange(
            closed=self.led is not None and number == self.steps + 1
        )

    @property
    def innermost(self) -> LoaderProgress | None:
        """The loader of the innermost turn; None if no turn is under way."""
        turn = self.turn
        return next((progress for progress in reversed(self._open) if progress.turn is turn), None)

    @property
    def transaction(self) -> Transaction:
        """Makes a step hold on all workers or on none."""
        return self.backward.transaction

    def recover_by(
        self, transaction: Transaction, generation_of: Callable[[ShareLoader], int]
    ) -> None:
        """Deal turns again that fail, which `transaction` rolls back.

        `generation_of`: as `LoaderObserver.generation`.
        """
        self.changes, self._generation_of = True, generation_of
        self.backward.recover_by(transaction)

    def settle(self) -> None:
        """Set the `StepState` by the turn that trains."""
        turn = self.training
        if turn is None:
            self.context.step_state.rest(1.0 / self.context.group.size, silent=self.quiet > 0)
        else:
            self.context.step_state.enter(turn, self._part, silent=self.quiet > 0)

    @property
    def sent(self) -> Traffic:
        """Bytes sent in all steps."""
        return self.clock.sent

    @property
    def axes(self) -> dict[str, AxisTotals]:
        """Totals of exchanges by axis of the mesh; empty if no model is cut."""
        return self.clock.axes

    # ---- the loader's calls

    def epoch_asked(self, loader: ShareLoader) -> None:
        if loader.terms.training:
            self.begin_training()
        self.idle_epochs.asked(loader)

    def begin_training(self) -> None:
        """Tell the observers that all workers are about to train."""
        for observer in self.observers.training_begins:
            observer()

    def generation(self, loader: ShareLoader) -> int:
        return self._generation_of(loader)

    def epoch_begins(self, loader: ShareLoader) -> None:
        self._calls += 1
        if not loader.terms.training:
            self.abilities.converge()  # replicas are evaluated as one
        progress = self._loaders.setdefault(id(loader), LoaderProgress(loader))
        progress.epoch_at = self._calls
        self.had_ghosts = self.had_ghosts and bool(self._open)
        if loader.terms.training:
            self.end_broken()
            self.batch_use.epoch_begins(progress)
            self.idle_epochs.begins(progress.activity)
            if self.over:
                loader.finish()
            for observer in self.observers.epoch_began:
                observer()
        # what was before, as an evaluation, is not of the first step
        self.clock.interruptions.take(0.0)
        self.clock.ask()

    def turn_begins(self, loader: ShareLoader, turn: Turn) -> None:
        now = time.perf_counter()
        self._calls += 1
        progress = self._loaders[id(loader)]
        progress.turn, progress.turn_at, progress.passed = turn, self._calls, 0
        if turn.train:
            if self.leader is None:
                self.leader = progress
                for observer in self.observers.lead_taken:
                    observer(loader)
            self._part = turn.weight / turn.total if turn.total and not turn.ghost else 0.0
            backward, leads = self.backward, progress is self.leader
            progress.outer = before = backward.turn()
            if self.cut_off or self.context.step_state.exchange_closed:
                self.context.step_state.close_exchange(
                    closed=self.cut_off == self.steps + 1 and self.led is not None
                )
            if self.frozen:
                self.thaw()
            if backward.transaction.recovers:
                backward.transaction.begin(leads=leads, passes=before[0])
            if turn.source is not None:
                progress.kept = buffers(self.models)
        self._open.append(progress)
        if len(self._open) == 1:
            self.context.step_state.enter(turn, self._part, silent=self.quiet > 0)
        else:
            self.settle()
        if progress is self.leader:
            self.clock.begin(now, turn.units)
            if self._page is not None:
                self.clock.hold(self._page.reach(self.steps))

    def turn_ends(self, loader: ShareLoader) -> None:
        progress, backward = self._loaders[id(loader)], self.backward
        turn, progress.turn = progress.turn, None
        if turn is None:
            return
        if turn.source is not None and loader.terms.ghosts:
            self.had_ghosts = True
        inner, leads = self._open[-1] is progress, progress is self.leader
        last, kept = inner or leads, progress.kept
        if turn.train:
            self.batch_use.ends(progress, turn.index)
            if kept:
                progress.kept = []
            if kept and turn.ghost:
                put_back(kept)
            if last:
                if (
                    backward.open
                    or _graph_task() != -1
                    or (backward.hooks and not (backward.passes or backward.silenced))
                ):
                    backward.join("the next batch")
                if inner and len(self._open) > 1:
                    backward.go_back(progress.outer)
        failed = progress.discarded or (leads and backward.transaction.failed)
        if turn.train and not failed:
            if not progress.activity.trained or len(self._open) > 1:  # else it is known already
                self.idle_epochs.note(
                    progress.activity, [other.activity for other in self._open], last=last
                )
            if turn.source is not None:
                level(kept, self.context.agreement, ghost=turn.ghost)
        self._open.remove(progress)
        self.settle() if self._open else self.context.step_state.rest(
            1.0 / self.context.group.size, silent=self.quiet > 0
        )
        if leads:
            self._end_step(progress, turn, failed=failed)
        if failed:
            loader.again()
        else:
            progress.gathered = 0
        progress.discarded = False

    def _end_step(self, progress: LoaderProgress, turn: Turn, *, failed: bool) -> None:
        """End a turn of the leading loader, which is a step."""
        clock = self.clock
        clock.stop()
        if failed:
            self.cut_off = 0
            self.backward.transaction.rollback()
        else:
            steps = self.steps = self.context.trace.step = self.steps + 1
            # by which all are at the same call
            self.context.step_state.place(steps, apart=self.apart)
            if self._page is not None:
                self._page.passed(steps)
            began = time.perf_counter()
            self.backward.sync.commit()
            observers = self.observers
            for committed in observers.committed:
                committed(steps)
            seconds = clock.settle(began)
            activity = progress.activity
            if activity.held or (activity.follows and not activity.trained):
                self.idle_epochs.count(activity, steps, turn, seconds)
            else:
                for ended in observers.step_ended:
                    ended(steps, turn.global_batch, seconds)
            if turn.source is not None:
                for observer in observers.ghost_ended:
                    observer()
        clock.ask()

    def epoch_ends(self, loader: ShareLoader) -> None:
        progress = self._loaders[id(loader)]
        if self.leader is progress:
            self.leader = None
        if loader.terms.training:
            self.batch_use.epoch_ends(progress)
            self.idle_epochs.ends(progress.activity, whole=loader.ran_through)
        if self.apart:
            # workers come together, with the same parameters
            self.context.agreement.lockstep.bring_together()

    def end_broken(self) -> None:
        """End the turns, and the lead, of training loops that were left by `break`.

        All workers call it at the same place.
        """
        for progress in [
            progress
            for progress in self._open
            if progress.loader.terms.training and not progress.loader.under_way
        ]:
            self.turn_ends(progress.loader)
            self.idle_epochs.flush(progress.activity)
        if self.leader is not None and not self.leader.loader.under_way:
            self.leader = None

    # ---- a backward, and an optimizer's calls

    def _weigh(self) -> None:
        """Weigh a backward that begins.

        Training loaders under way side by side must give it the same weight.
        """
        if self.batch_use.fresh:
            self.batch_use.use(None)
        if len(self._open) == 1 and (turn := self._open[0].turn) is not None:
            self.context.step_state.enter(turn, self._part, silent=self.quiet > 0)
            return
        self.settle()
        if len(self._open) > 1:
            check_beside(self._open)

    @property
    def acting(self) -> bool:
        """Whether `optimizer.step`, `scheduler.step` and the like act.

        They don't for a batch without weight, nor in a turn that has failed.
        """
        turn = self.training
        if turn is None or not turn.train:
            return True
        if turn.total == 0:
            if not self._announced:
                self._announced = True
                self.context.announce(
                    f"all weights of step {self.steps} are zero: no update is made for such a batch"
                )
            return False
        return not self.transaction.failed

    @property
    def training_now(self) -> bool:
        """Whether the loop over a training loader is under way."""
        return any(
            progress.loader.terms.training and progress.loader.under_way for progress in self._open
        )

    def ready(self, where: str) -> None:
        """Exchange gradients that are about to be used, if they are not exchanged yet.

        This works even if backward touched nothing on this worker.
        """
        turn = self.training
        if self.quiet:
            raise UsageError(
                f"{where} inside run.no_sync() would use gradients before their exchange; "
                "call it outside of the block"
            )
        if turn is None or turn.train:
            self.backward.join(where, due=True)

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        self.quiet += 1
        self.acts += 1
        self.backward.silence(silent=True)
        self.settle()
        try:
            yield
        finally:
            self.quiet -= 1
            self.settle()

    def may_step(self) -> bool:
        """Exchange the rest for an optimizer that is about to step; return whether it acts."""
        turn, under_way, backward = None, self._open, self.backward
        if under_way:
            turn = self.training if len(under_way) > 1 else under_way[0].turn
        if (
            self.quiet
            or backward.open
            or _graph_task() != -1
            or (backward.hooks and (backward.owing or not backward.passes))
        ):
            self.ready("optimizer.step")
        if turn is not None and turn.train and not turn.total:
            return self.acting
        return turn is None or not turn.train or not backward.transaction.failed

    def gather(self, act: Callable[[], Tensor], nothing: Tensor) -> Tensor:
        """Gather rows by `act`, once a batch.

        Returns `nothing` if they were gathered before, or if the turn is dealt again.
        """
        return self.transaction.collective(act, nothing)

    def stepped(self, optimizer: Any) -> None:
        """Note that an optimizer has stepped; without a loader this begins the next turn."""
        self.acts += 1
        for observer in self.observers.stepped:
            observer(optimizer)
        if not self.acts & (self.acts - 1):
            for look in self.observers.doubled:
                look()
        if not self._open:
            backward = self.backward
            passes, _ = backward.turn()
            if backward.transaction.recovers:
                backward.transaction.begin(leads=False, passes=passes)

    def forward(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Prepare for a model to be run on these arguments."""
        self.thaw()
        if not torch.compiler.is_compiling() and self.batch_use.fresh and torch.is_grad_enabled():
            self.batch_use.use((*args, *options.values()))
        if len(self._open) > 1:
            self.settle()  # an inner loop may have been left by `break` since

    def first_step(self, optimizer: Optimizer) -> None:
        """Tell the observers that a prepared optimizer steps for the first time."""
        for observer in self.observers.first_step:
            observer(optimizer)

    def freeze(self, slots: list[Slot]) -> None:
        """Watch out for these parameters, which are not trained so far."""
        self.frozen = slots

    def thaw(self) -> None:
        """Watch parameters that were frozen at prepare and are not any more."""
        if self.frozen and any(slot.parameter.requires_grad for slot in self.frozen):
            self.backward.watch([slot for slot in self.frozen if slot.parameter.requires_grad])
            self.frozen = [slot for slot in self.frozen if not slot.parameter.requires_grad]

    def stop(self) -> None:
        """Give no more steps of training loaders, as all have agreed to stop."""
        self.over = True

    def place(self, steps: int) -> None:
        """Go to step number `steps`, after a resume."""
        self.steps = self.context.trace.step = steps
        self.context.step_state.place(steps)

    def part(self) -> None:
        """Begin to take steps that are not those of all workers."""
        self.apart = True

    def come_together(self, steps: int) -> None:
        """Stand at this step, as all workers do from now on."""
        self.apart = False
        self.place(steps)

    def release(self) -> None:
        """Give the user's objects their own methods back."""
        while self.bound:
            self.bound.pop()()

    def explain(self, error: BaseException | None) -> None:
        """Add to an error that ends the run what the turns under way have to do with it."""
        explain(error, self._open)

    def finish(self) -> None:
        """End the run: close the turns that a `break` left open, and make replicas equal."""
        for progress in list(self._open):
            self.turn_ends(progress.loader)
            self.idle_epochs.flush(progress.activity)
        self.abilities.converge()
