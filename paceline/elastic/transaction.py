"""The transaction of a step in a run that survives losses: it rolls a failed turn back.

All workers do so, as if the turn had never begun.

exchange    a pass in which a worker was lost ends with zeros in p.grad, and the turn has failed;
            after that no pass of the turn is exchanged (`StepState.exchange_closed`)
step        a step on servers in which a worker was lost is made on no worker
collective  rows come from all workers, now or when the turn is dealt again
rollback    gradients, buffers, generators and tables are restored as of the beginning of the turn
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from paceline.comm.agreement import CallDiscarded
from paceline.elastic.rollback import Rollback
from paceline.errors import RECOVERABLE_ERRORS, PacelineError, WorkerLost
from paceline.loop.open_turns import OpenTurns
from paceline.servers.run_tables import RunTables
from paceline.sync.autograd import GradientTracker
from paceline.sync.transaction import Addends, Deliver, PlainTransaction

T = TypeVar("T")


class RecoverableTransaction(PlainTransaction):
    """The transaction of a run that goes on when workers are lost.

    Invariants: `failed` is set on all workers or on none, as it follows from calls of all workers.
    `_loss_in_pass` has the loss of the pass under way, until all workers learn of it together.
    """

    recovers = True

    def __init__(
        self, turns: OpenTurns, backward: GradientTracker, rollback: Rollback, tables: RunTables
    ) -> None:
        super().__init__(backward.sync, backward.context)
        self._turns, self._backward = turns, backward
        self._rollback, self._tables = rollback, tables
        self._step_state = backward.context.step_state
        self.failed = False
        self._loss_in_pass: PacelineError | None = None  # a loss in the pass under way
        self._grads_before_turn: dict[
            int, Tensor
        ] = {}  # by parameter, before the first pass of the turn
        # By parameter, the gradients that passes without exchange had left when the turn began.
        self._carried_before_turn: dict[int, Tensor] = {}

    def begin_turn(self, *, leads: bool, passes: int) -> None:
        self.failed = False
        self._carried_before_turn = (
            self._backward.watched.copy_unsent() if self._survives_losses else {}
        )
        if leads:
            self._rollback.begin_turn(passes)
            self._tables.begin_turn()

    @property
    def _survives_losses(self) -> bool:
        """Whether losses are survived yet. They are from the first epoch on."""
        return self._agreement.recovery is not None

    @property
    def _exchanges_nothing(self) -> bool:
        """Whether this turn exchanges nothing more."""
        return self._step_state.exchange_closed and self._sync.exchanges_in_backward

    # ---- a backward pass

    def gradient_receiver(self) -> Deliver:
        return self._deliver_gradient

    def _deliver_gradient(self, number: int, grad: Tensor, scale: float) -> None:
        if self._loss_in_pass is not None or self._exchanges_nothing:
            return
        try:
            self._sync.take_gradient(number, grad, scale)
        except RECOVERABLE_ERRORS as error:
            if not self._survives_losses:
                raise
            # It is raised later, in `exchange`, so that all workers learn of it together.
            self._loss_in_pass = error

    def end_backward(self, act: Callable[[], Addends]) -> Addends:
        if self._survives_losses and not self._backward.passes and not self.failed:
            self._grads_before_turn = self._backward.watched.copy_priors()
        if not self._sync.exchanges_in_backward:
            if self._survives_losses:
                self._loss_in_pass = None  # the strategy finds out when the optimizer steps
            return act()
        if not self._exchanges_nothing:
            try:
                return self._agreement.settle_call(lambda: self._act_unless_lost(act), "backward")
            except CallDiscarded as error:
                self._check_repeatable(error)
        self._loss_in_pass = None
        self._fail_turn()
        return self._backward.watched.make_zeros()

    def _act_unless_lost(self, act: Callable[[], Addends]) -> Addends:
        lost, self._loss_in_pass = self._loss_in_pass, None
        if lost is not None:
            raise lost
        return act()

    def _check_repeatable(self, error: CallDiscarded) -> None:
        """Raise `WorkerLost` if the turn can't be dealt again."""
        if not self._step_state.exchange_closed:
            text = (
                "gradients that were exchanged outside of a loop "
                "over a prepared loader can't be computed again"
            )
            raise WorkerLost(f"a worker was lost, and {text}: resume from a checkpoint") from error

    def _fail_turn(self) -> None:
        """Note that this turn can't be completed, on any worker."""
        self.failed = True
        self._sync.abort()

    # ---- a step

    def note_step(self, *, remote: bool) -> None:
        if self._turns.leader is not None:
            self._rollback.prepare_step(elsewhere=remote)

    def step_remotely(
        self, act: Callable[[], T], what: str, *, last: bool = False, apart: bool = False
    ) -> T | None:
        if apart or not self._survives_losses:
            result = super().step_remotely(act, what, apart=apart)
        else:
            try:
                result = act()  # it makes several calls
            except CallDiscarded as error:
                self._check_repeatable(error)
                if not self.failed:
                    self._fail_turn()
                return None
        if last and self._turns.leader is not None:
            self._rollback.note_step()
        return result

    # ---- rows

    def gather_rows(self, act: Callable[[], Tensor], nothing: Tensor) -> Tensor:
        progress = self._turns.innermost
        if progress is None or not self._survives_losses:
            return super().gather_rows(act, nothing)
        leads = progress is self._turns.leader
        if not progress.needs_rows() or self.failed:
            return nothing
        if leads and self._is_dealt_again:
            return nothing
        try:
            rows = self._agreement.settle_call(act)
        except CallDiscarded:
            if not leads:
                progress.discard()
                return nothing
            return nothing if self._is_dealt_again else self._agreement.attempt_call(act)
        progress.keep_rows()
        return rows

    @property
    def _is_dealt_again(self) -> bool:
        """Whether the turn under way will be dealt again."""
        return self._step_state.exchange_closed and not self._backward.passes

    # ---- the end

    def roll_back(self) -> None:
        if self.failed:
            self.failed = False
            self._backward.restore_gradients(self._grads_before_turn, self._carried_before_turn)
        self._rollback.restore_turn()
        self._tables.undo_turn()
