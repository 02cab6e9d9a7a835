"""Steps of workers out of lockstep: the scheduler assigns workers to a step, and each of them asks
the servers to make it.

    worker            push ....... decide             close | read                        tick
    all servers       | kept                          | the step, once, whoever closes it
    scheduler                      | this step, by these workers; or too late             | the next
                                   turn may begin

Models differ in their request to the scheduler, and in what a late worker does (`consistency`). In
runs that survive losses each call is repeated after a loss. This is safe: a gradient that is pushed
again replaces the first, the scheduler keeps its decisions, and a server makes a step once.
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
    """Base of the consistency models in which workers are out of lockstep.

    Args:
        link: The connection to the servers.
        rows: Steps of the sparse tables that the same optimizers step.
        bound: Turns that this worker may be ahead of the slowest. Default: any number.
    """

    def __init__(self, link: ServerLink, rows: PerWorkerRowSteps, bound: float = math.inf) -> None:
        self._link, self._rows, self._bound = link, rows, bound
        self.sample_queue = SampleQueueClient(link, self._leave)
        self.recovery: QueueRecovery | None = None
        # By optimizer: gradients of this worker that are in a step, or were dropped.
        self._count: dict[int, int] = {}
        # By optimizer: the scheduler's answer for the next gradient, if it has been asked.
        self._decided: dict[int, StepAssignment] = {}
        self._late = False  # whether a gradient of this turn was dropped

    def survive(self, copies: ServerReplication) -> None:
        self.recovery = QueueRecovery(self._link, copies, self.sample_queue)

    def begin(self) -> None: ...

    def pushing(self, number: int) -> None: ...

    def _leave(self) -> None:
        """Wait until all pushed gradients are in a step, as this worker takes no more turns."""
        for number in range(len(self._link.optimizers)):
            self.pushing(number)

    # ---- a step

    def step(self, number: int) -> None:
        link = self._link
        if not self.sample_queue.open and link.free:
            raise UsageError(
                "with staleness or backup_workers optimizers step inside the loop over a prepared "
                "DataLoader, whose samples are dealt to the workers that are ready for them: "
                "prepare the loader too, or leave both out"
            )
        gradient = self._gradient(number)
        link.context.agreement.retry_after_losses(lambda: self._step(number))
        self._count[number] = gradient
        self._decided.pop(number, None)
        link.factors.pop(number, None)
        self.sample_queue.stepped()

    def _gradient(self, number: int) -> int:
        """Number of this worker's next gradient, from 1 on."""
        return self._count.get(number, 0) + 1

    def _step(self, number: int) -> None:
        assignment = self._decide(number)
        self._link.settle(number)  # raises if p.grad has been changed since run.clip
        if assignment.late:
            self._skip(number, assignment.step)
        else:
            self._close(number, assignment)

    def _decide(self, number: int, *, may_go_on: bool = True) -> StepAssignment:
        """Get the step of the next gradient, and the workers that make it.

        `may_go_on` lets a late worker go on before the step is made, if the model allows it.
        """
        # The gradient must be on all servers before the scheduler counts on it.
        if number not in self._decided:
            self.pushing(number)
            self._link.settle(number)
            self._rows.hold(number)
            self._decided[number] = self._ask(number, may_go_on=may_go_on)
        return self._decided[number]

    def _ask(self, number: int, *, may_go_on: bool) -> StepAssignment:
        """Ask the scheduler for the step of the next gradient, which has been pushed."""
        raise NotImplementedError

    def _call(
        self,
        number: int,
        gradient: int,
        step: int,
        make_request: Callable[[Contribution], Request[StepAssignment]],
    ) -> StepAssignment:
        """Offer a gradient to the scheduler, and wait until it has assigned a step.

        Args:
            number: The optimizer.
            gradient: Number of the gradient.
            step: Step to look for missing workers in, if the wait fails.
            come: Makes the request.
        """
        link, share = self._link, self._link.context.step_state.share_of_step
        contribution = Contribution(
            share, tuple(enumerate(optimizers.settings(link.optimizers[number])))
        )
        with link.connections.waiting():
            sent = send(link.callers[0], make_request(contribution), link.seconds)
            return link.wait(
                sent, f"optimizer.step {gradient}", ListNotArrived(Index(number), step)
            )

    def _weigh(self, assignment: StepAssignment) -> tuple[float, float, bool]:
        """Divisor of a step's sum, factor of its learning rate, and whether late pushes stay."""
        return assignment.parts, assignment.parts, True

    def _close(self, number: int, assignment: StepAssignment, *, read: bool = True) -> None:
        """Make the assigned step on all copies, and with `read` take in the result.

        Each of the step's workers sends the same request, and servers make the step once.
        """
        link, step, units = self._link, assignment.step, self._link.units(number) if read else []
        divisor, part, keep = self._weigh(assignment)
        factor, turn = link.factors.get(number, 1.0) / divisor, link.context.step_state.step
        close = CloseStep(
            Index(number),
            step,
            turn,
            assignment.workers,
            factor,
            assignment.settings,
            decided=True,
            part=part,
            keep=keep,
        )
        closes, reads = link.everywhere(number, close), link.ask_for(units, step)
        closes += self._rows.close(number, step, assignment, part)
        for sent in closes:
            sent.wait(link.seconds)
        if read:
            link.take_in(units, reads)
        link.steps_taken[number] = step

    def _skip(self, number: int, step: int) -> None:
        """Go on from a step for which this worker is too late."""
        raise NotImplementedError

    # ---- clipping

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        return self._link.context.agreement.retry_after_losses(
            lambda: self._ask_norms(numbers, kind, limit)
        )

    def _ask_norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        # With several optimizers the total norm needs all steps, so none may stay open.
        is_single = len(numbers) == 1
        return [self._norm_of_step(number, kind, limit, may_go_on=is_single) for number in numbers]

    def _norm_of_step(self, number: int, kind: float, limit: float, *, may_go_on: bool) -> float:
        """Compute the norm of a step's gradient; of the own gradient if it is too late."""
        assignment = self._decide(number)
        return (
            self._link.norm([number], kind)
            if assignment.late
            else self._norm(number, assignment, kind)
        )

    def _norm(self, number: int, assignment: StepAssignment, kind: float) -> float:
        """Read the norm of the mean gradient of an assigned step."""
        link = self._link
        requests = link.everywhere(
            number,
            ReadNorm(Index(number), assignment.step, assignment.workers, kind, decided=True),
            ask=True,
        )
        norms = [sent.wait(link.seconds).norm for sent in requests]
        # Servers have sums, weighted by shares. Dividing by the total share gives the mean.
        return (
            float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), kind))
            / assignment.parts
        )

    # ---- the end of a turn, and losses

    def commit(self) -> None:
        if not self.sample_queue.open:
            return
        self.sample_queue.tick(self._bound, dropped=self._late)
        self._late = False
        self._follow()

    def _follow(self) -> None:
        """If this worker is too far ahead of the slowest, wait."""

    def abort(self) -> None: ...

    def regroup(self) -> None:
        assert self.recovery is not None
        self.recovery.regroup()
