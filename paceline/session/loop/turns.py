"""The main path of training: what happens between two turns of a loader, at a backward, and at an optimizer's step.

    turn begins     my weight in the global batch, is it a ghost, is it exchanged yet
      backward      (sync/autograd.py) exchanges; p.grad is final when it returns
      step          joins the exchange if backward touched nothing here, then the user's own step
    turn ends       joins, restores what a ghost has touched, counts the step, hands the records over about once a second

Several loaders may be under way at once. The training loader whose turn began while no other trained leads: its turns are the steps.

    train  |--- turn 0 ----------------|--- turn 1 ---      for x in train:
    test         |--|--|--|                                     for v in test: ...        evaluation inside a turn
    other      |-----------------------|--------------          u = next(others)          a second training loader
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from paceline.cluster.control.progress import Page
from paceline.comm.agreement import CallDiscarded
from paceline.comm.group import Traffic
from paceline.data.loader import ShareLoader, Turn
from paceline.errors import UsageError
from paceline.session.loop.batch_use import BatchUse
from paceline.session.loop.ghost import buffers, level, put_back
from paceline.session.loop.idle_epochs import IdleEpochs, StepListener
from paceline.session.loop.iteration import LoaderProgress, check_beside, explain, innermost
from paceline.session.loop.loss_scale import loss_scale
from paceline.session.loop.rollback import Rollback
from paceline.session.loop.step_clock import StepClock
from paceline.session.tables import RunTables
from paceline.sync.abilities import Abilities
from paceline.sync.autograd import GradientTracker
from paceline.sync.base import Slot
from paceline.sync.context import SyncContext

T = TypeVar("T")


class TrainingLoop:
    """Follows the loaders of a run (their `LoaderObserver`) and keeps the `StepState` of the scene."""

    def __init__(
        self, context: SyncContext, backward: GradientTracker, abilities: Abilities, beat: StepListener, page: Page | None = None
    ) -> None:
        self.context, self.backward, self.abilities, self.beat, self._page = context, backward, abilities, beat, page
        self.steps = 0
        self.quiet = 0  # depth of no_sync
        self.over = False  # all have agreed to stop: training loaders give no more steps
        self.models: list[nn.Module] = []
        self.scalers: list[Any] = []
        self.frozen: list[Slot] = []
        self._clock = StepClock(context, backward)
        self.bound: list[Callable[[], None]] = []  # undo what was set on a user's objects
        self._courses: dict[int, LoaderProgress] = {}  # by id of the loader
        self._open: list[LoaderProgress] = []  # those with a turn, in the order in which the turns began
        self._leader: LoaderProgress | None = None
        self.batch_use = BatchUse(context, self._open, self._courses)
        self.idle_epochs = IdleEpochs(self, context, backward, page)
        self._calls = 0
        self._part = 0.0  # of the step under way, mine
        self._announced = False
        self.undo: Rollback | None = None  # where losses are survived
        self.tables = RunTables(context, backward)
        self.committed: Callable[[int], None] = lambda step: None  # told of each step that counts, when the strategy has been
        self.generation_of: Callable[[ShareLoader], int] = lambda loader: 0
        self.asked: Callable[[ShareLoader], None] = lambda loader: None
        self.leads: Callable[[ShareLoader], None] = lambda loader: None  # told at each step whose turn it is
        self.apart = False  # workers are not in lockstep
        self.parting: Callable[[], None] = lambda: None  # told that an epoch of training begins
        self.cut_off = 0  # the turn, from 1 on, in which nothing more can be exchanged: a worker was lost in it
        backward.begins = self._weigh
        context.step_state.loss_scale = lambda: loss_scale(self.scalers)

    # ---- where we are

    @property
    def turn(self) -> Turn | None:
        """The innermost turn under way. One that was left by `break` counts only where no other is."""
        return innermost(self._open)

    @property
    def training(self) -> Turn | None:
        """The turn that backward passes and optimizers belong to: the innermost training one, else the innermost."""
        if len(self._open) < 2:
            return innermost(self._open)
        return innermost([course for course in self._open if course.turn is not None and course.turn.train]) or innermost(self._open)

    @property
    def led(self) -> Turn | None:
        """The turn of the leading training loader: the step under way."""
        return None if self._leader is None else self._leader.turn

    def cut_turn(self, number: int) -> None:
        """A worker was lost in this turn, which may be the next one here: what of it has not been exchanged can't be any more."""
        self.cut_off = number
        self.context.step_state.exchange_closed = self.led is not None and number == self.steps + 1

    def settle(self) -> None:
        """Set the moment by the turn that trains."""
        turn, step_state = self.training, self.context.step_state
        if turn is None:
            step_state.scale, step_state.ghost, step_state.defer_exchange = 1.0 / self.context.group.size, False, self.quiet > 0
            step_state.share_of_step = step_state.scale
        else:
            step_state.share_of_step = self._part
            step_state.scale, step_state.ghost, step_state.defer_exchange = (
                turn.scale,
                turn.ghost,
                self.quiet > 0 or (turn.train and not turn.last_micro),
            )

    @property
    def sent(self) -> Traffic:
        """In steps; see `StepClock`."""
        return self._clock.sent

    # ---- the loader's calls

    def epoch_asked(self, loader: ShareLoader) -> None:
        self.asked(loader)
        self.idle_epochs.asked(loader)

    def generation(self, loader: ShareLoader) -> int:
        return self.generation_of(loader)

    def epoch_begins(self, loader: ShareLoader) -> None:
        self._calls += 1
        if not loader.terms.training:
            self.abilities.converge()  # replicas are evaluated as one
        course = self._courses.setdefault(id(loader), LoaderProgress(loader))
        course.epoch_at = self._calls
        if loader.terms.training:
            self.end_broken()
            self.batch_use.epoch_begins(course)
            self.idle_epochs.begins(course)
            if self.over:
                loader.finish()
            self.parting()
        self._clock.ask()

    def turn_begins(self, loader: ShareLoader, turn: Turn) -> None:
        now = time.perf_counter()
        self._calls += 1
        course = self._courses[id(loader)]
        course.turn, course.turn_at, course.passed = turn, self._calls, 0
        if turn.train:
            self.batch_use.begins(course)
            if self._leader is None:
                self._leader = course
                self.leads(loader)
            self._part = (self._part if turn.micro else 0.0) + (turn.weight / turn.total if turn.total and not turn.ghost else 0.0)
            if turn.micro == 0:
                course.outer = self.backward.passes, self.backward.silenced
                passes = self.backward.passes
                self.backward.turn()
                self.context.step_state.exchange_closed = self.led is not None and self.cut_off == self.steps + 1
                self.thaw()
                if self.undo is not None and course is self._leader:
                    self.undo.begin(passes)
                    self.tables.begin()
            elif turn.last_micro and not self.quiet:
                self.backward.silenced = False  # this one is exchanged by all
            self.backward.ran = False
            if turn.source is not None:
                course.kept = buffers(self.models)
        self._open.append(course)
        self.settle()
        if course is self._leader:
            self._clock.begin(now)
            if self._page is not None and turn.micro == 0:
                self._clock.hold(self._page.reach(self.steps))

    def turn_ends(self, loader: ShareLoader) -> None:
        course = self._courses[id(loader)]
        turn, course.turn = course.turn, None
        if turn is None:
            return
        inner, leads = self._open[-1] is course, course is self._leader
        if turn.train:
            self.batch_use.ends(course, turn.index)
            kept, course.kept = course.kept, []
            if turn.ghost:
                put_back(kept)
            if turn.last_micro and (inner or leads):
                self.backward.join("the next batch")
                if inner and len(self._open) > 1:
                    self.backward.passes, self.backward.silenced = course.outer
        failed = course.void or (leads and turn.last_micro and self.backward.failed)
        if turn.train and not failed:
            self.idle_epochs.note(course, self._open, last=turn.last_micro and (inner or leads))
        if turn.train and turn.source is not None and not failed:
            level(kept, self.context.agreement, ghost=turn.ghost)
        self._open.remove(course)
        self.settle()
        if leads:
            self._clock.stop()
            if failed:
                self._fail()
            elif turn.last_micro:
                self._count(course, turn)
            self._clock.ask()
        if failed:
            loader.again()
        elif turn.last_micro:
            course.gathered = 0
        course.void = False

    def _fail(self) -> None:
        """The turn can't be completed, on all workers: as if it had never been."""
        assert self.undo is not None
        self.cut_off = 0
        self.undo.back()
        self.tables.back()

    def epoch_ends(self, loader: ShareLoader) -> None:
        course = self._courses[id(loader)]
        if self._leader is course:
            self._leader = None
        if loader.terms.training:
            self.batch_use.epoch_ends(course)
            self.idle_epochs.ends(course, whole=loader.ran_through)
        if self.apart and self.context.agreement.entering is not None:
            self.context.agreement.entering()  # workers come together, with the same parameters

    def end_broken(self) -> None:
        """End the turns, and the lead, of training loops that were left by `break`. All workers come here at the same place."""
        for course in [course for course in self._open if course.loader.terms.training and not course.loader.under_way]:
            self.turn_ends(course.loader)
            self.idle_epochs.flush(course)
        if self._leader is not None and not self._leader.loader.under_way:
            self._leader = None

    def _count(self, course: LoaderProgress, turn: Turn) -> None:
        self.steps += 1
        self.context.trace.step = self.steps
        if not self.apart:
            self.context.step_state.step = self.steps  # by which all are at the same call
        if self._page is not None:
            self._page.passed(self.steps)
        self._clock.settle(self._commit)
        self.idle_epochs.count(course, self.steps, turn, self._clock.take())

    def _commit(self) -> None:
        self.backward.sync.commit()
        self.tables.commit()
        self.committed(self.steps)

    # ---- a backward, and an optimizer's calls

    def _weigh(self) -> None:
        """A backward begins: it has one weight, so where training loaders are under way side by side, both must give the same."""
        if self.batch_use.fresh:
            self.batch_use.use(None)
        self.settle()
        if len(self._open) > 1:
            check_beside(self._open)

    @property
    def acting(self) -> bool:
        """Whether step, scheduler.step and the like act: not within the micro-batches before the last, nor for a batch without weight."""
        turn = self.training
        if turn is None or not turn.train:
            return True
        if turn.total == 0:
            if not self._announced:
                self._announced = True
                self.context.announce(f"all weights of step {self.steps} are zero: no update is made for such a batch")
            return False
        return turn.last_micro and not self.backward.failed

    @property
    def training_now(self) -> bool:
        """Whether the loop over a training loader is under way."""
        return any(course.loader.terms.training and course.loader.under_way for course in self._open)

    @property
    def broken(self) -> bool:
        """Whether the training loop was left by `break` between two micro-batches."""
        return any(course.loader.terms.training and not course.loader.under_way for course in self._open)

    @property
    def clearing(self) -> bool:
        """Whether zero_grad acts: before backward on the first micro-batch, after backward on the last."""
        turn = self.training
        if turn is None or not turn.train:
            return True
        return turn.last_micro if self.backward.ran else turn.micro == 0

    def ready(self, where: str) -> None:
        """Gradients are about to be used: exchange what has not been, and take part if backward has touched nothing here."""
        turn = self.training
        if turn is not None and turn.train and not turn.last_micro:
            return
        if self.quiet:
            raise UsageError(f"{where} inside run.no_sync() would use gradients before their exchange; call it outside of the block")
        if turn is None or turn.train:
            self.backward.join(where, due=True)

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        self.quiet += 1
        self.idle_epochs.acted = True
        self.backward.silenced = self.backward.owing = True
        self.settle()
        try:
            yield
        finally:
            self.quiet -= 1
            self.settle()

    def stepping(self, *, elsewhere: bool = False) -> None:
        """An optimizer is about to step."""
        if self.undo is not None and self._leader is not None:
            self.undo.stepping(elsewhere=elsewhere)

    def elsewhere(self, optimizer: Any) -> bool:
        """Whether this optimizer steps on servers."""
        remote = self.abilities.remote
        return remote is not None and remote.steps(optimizer)

    def give(self, optimizer: Any, *, whole: bool) -> None:
        """Have servers know what the next step of its tables is made of. `whole`: nothing else of its step can fail."""
        tables = self.tables
        if tables.lasting is None or not tables.has(optimizer):
            tables.give(optimizer)
        else:
            self._settle(lambda: tables.give(optimizer), stepped=whole)

    def step_elsewhere(self, optimizer: Any) -> None:
        """Have it step there; all workers do."""
        remote = self.abilities.remote
        assert remote is not None
        began = time.perf_counter()
        self._settle(lambda: remote.step(optimizer))
        self.backward.seconds += time.perf_counter() - began

    def _settle(self, act: Callable[[], Any], *, stepped: bool = True) -> None:
        """A call that an optimizer's step is settled by; `stepped`: that step can't fail any more then."""
        settled = self._call(lambda: [act()], "optimizer.step") is not None
        if settled and stepped and self.undo is not None and self._leader is not None:
            self.undo.stepped()

    def clip(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        remote = self.abilities.remote
        if remote is None or not remote.attached:
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        found = self._call(lambda: remote.clip(parameters, max_norm, norm_type), "run.clip")
        return torch.zeros(()) if found is None else found

    def _call(self, act: Callable[[], T], what: str) -> T | None:
        """A call of all workers, if they are in lockstep; None where it can't be made any more, as the turn comes again."""
        agreement = self.context.agreement
        if self.apart:
            return agreement.wait(act, what)
        if agreement.recovery is None:
            return agreement.attempt(act, what)
        try:
            return act()  # which is of several calls
        except CallDiscarded as error:
            self.backward.void(error)
            return None

    def gather(self, act: Callable[[], Tensor], nothing: Tensor) -> Tensor:
        """The rows that `act` brings together, once for each batch: `nothing` where they were had before, or are to come again."""
        course = next((course for course in reversed(self._open) if course.turn is self.turn), None)
        agreement = self.context.agreement
        if course is None or agreement.recovery is None:
            return agreement.attempt(act)
        course.passed += 1
        if course.passed <= course.gathered or course.void or self.backward.failed:
            return nothing
        if course is self._leader and self.context.step_state.exchange_closed and not self.backward.passes:
            return nothing  # of a turn that is dealt again
        try:
            found = agreement.settle(act)
        except CallDiscarded:
            if course is not self._leader:
                course.void = True
                return nothing
            return nothing if self.context.step_state.exchange_closed and not self.backward.passes else agreement.attempt(act)
        course.gathered = course.passed
        return found

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped; in a loop without a loader this is where the next turn begins."""
        self.idle_epochs.acted = True
        if self.abilities.observer is not None:
            self.abilities.observer.stepped(optimizer)
        if not self._open:
            self.backward.turn()

    def forward(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """A model is about to be run."""
        self.thaw()
        if not torch.compiler.is_compiling() and self.batch_use.fresh and torch.is_grad_enabled():
            self.batch_use.use((*args, *options.values()))
        if len(self._open) > 1:
            self.settle()  # an inner loop may have been left by `break` since

    def thaw(self) -> None:
        """Take parameters in that were frozen at prepare and are not any more."""
        if self.frozen and any(slot.parameter.requires_grad for slot in self.frozen):
            self.backward.watch([slot for slot in self.frozen if slot.parameter.requires_grad])
            self.frozen = [slot for slot in self.frozen if not slot.parameter.requires_grad]

    def place(self, steps: int) -> None:
        """Stand at this step (after a resume)."""
        self.steps = self.context.step_state.step = self.context.trace.step = steps

    def release(self) -> None:
        """Give the user's objects their own methods back."""
        while self.bound:
            self.bound.pop()()

    def explain(self, error: BaseException | None) -> None:
        """Note on what ends the run what the turns under way have to do with it."""
        explain(error, self._open)

    def finish(self) -> None:
        """The run ends: close the turns that a `break` left open, and let replicas be equal."""
        for course in list(self._open):
            self.turn_ends(course.loader)
            self.idle_epochs.flush(course)
        self.abilities.converge()
