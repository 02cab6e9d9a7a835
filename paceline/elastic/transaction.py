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
from paceline.errors import LOSSES, PacelineError, WorkerLost
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
        self._lost: PacelineError | None = None  # a loss in the pass under way
        self._grads: dict[int, Tensor] = {}  # by parameter, before the first pass of the turn
        # By parameter, the gradients that passes without exchange had left when the turn began.
        self._carried: dict[int, Tensor] = {}

    def begin(self, *, leads: bool, passes: int) -> None:
        self.failed = False
        self._carried = self._backward.watched.copy_unsent() if self._armed else {}
        if leads:
            self._rollback.begin(passes)
            self._tables.begin()

    @property
    def _armed(self) -> bool:
        """Whether losses are survived yet. They are from the first epoch on."""
        return self._agreement.recovery is not None

    @property
    def _closed(self) -> bool:
        """Whether this turn exchanges nothing more."""
        return self._step_state.exchange_closed and self._sync.exchanges_in_backward

    # ---- a backward pass

    def deliver(self) -> Deliver:
        return self._take

    def _take(self, number: int, grad: Tensor, scale: float) -> None:
        if self._lost is not None or self._closed:
            return
        try:
            self._sync.ready(number, grad, scale)
        except LOSSES as error:
            if not self._armed:
                raise
            # It is raised later, in `exchange`, so that all workers learn of it together.
            self._lost = error

    def exchange(self, act: Callable[[], Addends]) -> Addends:
        if self._armed and not self._backward.passes and not self.failed:
            self._grads = self._backward.watched.copy_priors()
        if not self._sync.exchanges_in_backward:
            if self._armed:
                self._lost = None  # the strategy finds out when the optimizer steps
            return act()
        if not self._closed:
            try:
                return self._agreement.settle_call(lambda: self._unless_lost(act), "backward")
            except CallDiscarded as error:
                self._check_turn(error)
        self._lost = None
        self._fail()
        return self._backward.watched.make_zeros()

    def _unless_lost(self, act: Callable[[], Addends]) -> Addends:
        lost, self._lost = self._lost, None
        if lost is not None:
            raise lost
        return act()

    def _check_turn(self, error: CallDiscarded) -> None:
        """Raise `WorkerLost` if the turn can't be dealt again."""
        if not self._step_state.exchange_closed:
            text = (
                "gradients that were exchanged outside of a loop "
                "over a prepared loader can't be computed again"
            )
            raise WorkerLost(f"a worker was lost, and {text}: resume from a checkpoint") from error

    def _fail(self) -> None:
        """Note that this turn can't be completed, on any worker."""
        self.failed = True
        self._sync.abort()

    # ---- a step

    def stepping(self, *, remote: bool) -> None:
        if self._turns.leader is not None:
            self._rollback.stepping(elsewhere=remote)

    def step(
        self, act: Callable[[], T], what: str, *, last: bool = False, apart: bool = False
    ) -> T | None:
        if apart or not self._armed:
            result = super().step(act, what, apart=apart)
        else:
            try:
                result = act()  # it makes several calls
            except CallDiscarded as error:
                self._check_turn(error)
                if not self.failed:
                    self._fail()
                return None
        if last and self._turns.leader is not None:
            self._rollback.stepped()
        return result

    # ---- rows

    def collective(self, act: Callable[[], Tensor], nothing: Tensor) -> Tensor:
        progress = self._turns.innermost
        if progress is None or not self._armed:
            return super().collective(act, nothing)
        leads = progress is self._turns.leader
        if not progress.ask_rows() or self.failed:
            return nothing
        if leads and self._comes_again:
            return nothing
        try:
            rows = self._agreement.settle_call(act)
        except CallDiscarded:
            if not leads:
                progress.discard()
                return nothing
            return nothing if self._comes_again else self._agreement.attempt_call(act)
        progress.keep_rows()
        return rows

    @property
    def _comes_again(self) -> bool:
        """Whether the turn under way will be dealt again."""
        return self._step_state.exchange_closed and not self._backward.passes

    # ---- the end

    def rollback(self) -> None:
        if self.failed:
            self.failed = False
            self._backward.restore(self._grads, self._carried)
        self._rollback.back()
        self._tables.back()
