"""Steps of workers that are not in lockstep: the scheduler decides by which workers a step is made,
and each of those has servers make it.

    worker            push ....... decide             close | read                        tick
    all servers       | kept                          | the step, once, whoever closes it
    scheduler                      | this step, by these workers; or too late             | the next
                                   turn may begin

Models differ in what they ask the scheduler, and in what a late worker does (`consistency`). Where
losses are survived, each call is begun anew after one: a gradient that is pushed again replaces the
first, a step that is decided stays so, and a server makes it once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from paceline.errors import UsageError
from paceline.servers.process import optimizers
from paceline.servers.protocol.message import Index, Request, send
from paceline.servers.protocol.parameters import CloseStep, ReadNorm
from paceline.servers.protocol.samples import Contribution, ListNotArrived, StepAssignment
from paceline.servers.worker.link import ServerLink
from paceline.servers.worker.recovery import QueueRecovery
from paceline.servers.worker.replication import ServerReplication
from paceline.servers.worker.sample_queue import SampleQueueClient

if TYPE_CHECKING:
    from paceline.servers.tables.steps import PerWorkerRowSteps


class ScheduledSteps:
    """The base of consistency models in which workers are not in lockstep."""

    def __init__(self, link: ServerLink, rows: PerWorkerRowSteps, bound: float = math.inf) -> None:
        self._link, self._rows, self._bound = link, rows, bound
        self.sample_queue = SampleQueueClient(link, self._leave)
        self.recovery: QueueRecovery | None = None
        # by optimizer: how many gradients of this worker are in steps, or were left out
        self._count: dict[int, int] = {}
        # by optimizer: the decision on its next step, where that has been asked for
        self._decided: dict[int, StepAssignment] = {}
        self._late = False  # in this turn, for any optimizer

    def survive(self, copies: ServerReplication) -> None:
        self.recovery = QueueRecovery(self._link, copies, self.sample_queue)

    def begin(self) -> None: ...

    def pushing(self, number: int) -> None: ...

    def _leave(self) -> None:
        """Wait until all that I have pushed is in a step, as I take no more turns."""
        for number in range(len(self._link.optimizers)):
            self.pushing(number)

    # ---- a step

    def step(self, number: int) -> None:
        link = self._link
        if not self.sample_queue.open and link.free:
            raise UsageError(
                "with staleness or backup_workers optimizers step inside the loop over a prepared "
                "DataLoader, whose samples are dealt to "
                "whoever is ready for them: prepare the loader too, or leave both out"
            )
        gradient = self._gradient(number)
        link.context.agreement.retry_after_losses(lambda: self._step(number))
        self._count[number] = gradient
        self._decided.pop(number, None)
        link.factors.pop(number, None)
        self.sample_queue.stepped()

    def _gradient(self, number: int) -> int:
        """Return the number of my next gradient."""
        return self._count.get(number, 0) + 1

    def _step(self, number: int) -> None:
        found = self._decide(number)
        self._link.settle(number)  # raises if p.grad has been changed since run.clip
        if found.late:
            self._skip(number, found.step)
        else:
            self._close(number, found)

    def _decide(self, number: int, *, may_go_on: bool = True) -> StepAssignment:
        """Ask which step I am in, and who makes it.

        `may_go_on`: before it is made, if I am late and the model allows that.
        """
        if number not in self._decided:
            self.pushing(number)
            self._link.settle(number)
            self._rows.hold(number)
            self._decided[number] = self._ask(number, may_go_on=may_go_on)
        return self._decided[number]

    def _ask(self, number: int, *, may_go_on: bool) -> StepAssignment:
        """Ask the scheduler in which step my next gradient is, which has been pushed."""
        raise NotImplementedError

    def _call(
        self,
        number: int,
        gradient: int,
        step: int,
        come: Callable[[Contribution], Request[StepAssignment]],
    ) -> StepAssignment:
        """Come to the scheduler with this gradient, and wait until it is decided in which step
        of an optimizer it is.
        """
        link, part = self._link, self._link.context.step_state.share_of_step
        contribution = Contribution(
            part, tuple(enumerate(optimizers.settings(link.optimizers[number])))
        )
        with link.connections.waiting():
            sent = send(link.callers[0], come(contribution), link.seconds)
            return link.wait(
                sent, f"optimizer.step {gradient}", ListNotArrived(Index(number), step)
            )

    def _weigh(self, found: StepAssignment) -> tuple[float, float, bool]:
        """Divisor of a step's sum, its part of the learning rate, and whether other pushes are
        kept.
        """
        return found.parts, found.parts, True

    def _close(self, number: int, found: StepAssignment, *, read: bool = True) -> None:
        """Let the found workers make this step, on all copies. `read`: take in the result."""
        link, step, units = self._link, found.step, self._link.units(number) if read else []
        divisor, part, keep = self._weigh(found)
        factor, turn = link.factors.get(number, 1.0) / divisor, link.context.step_state.step
        close = CloseStep(
            Index(number),
            step,
            turn,
            found.workers,
            factor,
            found.settings,
            decided=True,
            part=part,
            keep=keep,
        )
        closes, reads = link.everywhere(number, close), link.ask_for(units, step)
        closes += self._rows.close(number, step, found, part)
        for sent in closes:
            sent.wait(link.seconds)
        if read:
            link.take_in(units, reads)
        link.steps_taken[number] = step

    def _skip(self, number: int, step: int) -> None:
        """Go on from this step, which I am too late for."""
        raise NotImplementedError

    # ---- clipping

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        return self._link.context.agreement.retry_after_losses(
            lambda: self._ask_norms(numbers, kind, limit)
        )

    def _ask_norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        alone = len(numbers) == 1  # several are waited for: none goes on before its step is made
        return [self._norm_of_step(number, kind, limit, may_go_on=alone) for number in numbers]

    def _norm_of_step(self, number: int, kind: float, limit: float, *, may_go_on: bool) -> float:
        """Return the norm of the gradients that make the step; of mine, where I am too late."""
        found = self._decide(number)
        return self._link.norm([number], kind) if found.late else self._norm(number, found, kind)

    def _norm(self, number: int, found: StepAssignment, kind: float) -> float:
        """Return the norm of the mean of the gradients of a step that is decided."""
        link = self._link
        asked = link.everywhere(
            number, ReadNorm(Index(number), found.step, found.workers, kind, decided=True), ask=True
        )
        norms = [sent.wait(link.seconds).norm for sent in asked]
        return (
            float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), kind))
            / found.parts
        )

    # ---- the end of a turn, and losses

    def commit(self) -> None:
        if not self.sample_queue.open:
            return
        self.sample_queue.tick(self._bound, dropped=self._late)
        self._late = False
        self._follow()

    def _follow(self) -> None:
        """Wait if I am too far ahead of the slowest."""

    def abort(self) -> None: ...

    def regroup(self) -> None:
        assert self.recovery is not None
        self.recovery.regroup()
