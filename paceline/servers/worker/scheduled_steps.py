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
from paceline.servers.protocol.message import Index, Request, send_request
from paceline.servers.protocol.parameters import CloseStep, ReadNorm
from paceline.servers.protocol.samples import Contribution, ListNotArrived, StepAssignment
from paceline.servers.worker.link import ServerLink
from paceline.servers.worker.recovery import QueueRecovery
from paceline.servers.worker.replication import ServerReplication
from paceline.servers.worker.sample_queue import SampleQueueClient

if TYPE_CHECKING:
    from paceline.servers.tables.row_steps import PerWorkerRowSteps


class ScheduledSteps:
    """Base of the consistency models in which workers are out of lockstep.

    Args:
        link: The connection to the servers.
        rows: Steps of the sparse tables that the same optimizers step.
        bound: Turns that this worker may be ahead of the slowest. Default: any number.
    """

    def __init__(self, link: ServerLink, rows: PerWorkerRowSteps, bound: float = math.inf) -> None:
        self._link, self._row_steps, self._staleness_bound = link, rows, bound
        self.sample_queue = SampleQueueClient(link, self._finish_pushes)
        self.recovery: QueueRecovery | None = None
        # By optimizer: gradients of this worker that are in a step, or were dropped.
        self._gradient_counts: dict[int, int] = {}
        # By optimizer: the scheduler's answer for the next gradient, if it has been asked.
        self._assignments: dict[int, StepAssignment] = {}
        self._is_late = False  # whether a gradient of this turn was dropped

    def enable_recovery(self, copies: ServerReplication) -> None:
        self.recovery = QueueRecovery(self._link, copies, self.sample_queue)

    def begin_steps(self) -> None: ...

    def prepare_push(self, number: int) -> None: ...

    def _finish_pushes(self) -> None:
        """Wait until all pushed gradients are in a step, as this worker takes no more turns."""
        for number in range(len(self._link.optimizers)):
            self.prepare_push(number)

    # ---- a step

    def make_step(self, number: int) -> None:
        link = self._link
        if not self.sample_queue.open and link.is_out_of_lockstep:
            raise UsageError(
                "with staleness or backup_workers optimizers step inside the loop over a prepared "
                "DataLoader, whose samples are dealt to the workers that are ready for them: "
                "prepare the loader too, or leave both out"
            )
        gradient = self._get_gradient_number(number)
        link.context.agreement.retry_after_losses(lambda: self._attempt_step(number))
        self._gradient_counts[number] = gradient
        self._assignments.pop(number, None)
        link.clip_factors.pop(number, None)
        self.sample_queue.note_step()

    def _get_gradient_number(self, number: int) -> int:
        """Number of this worker's next gradient, from 1 on."""
        return self._gradient_counts.get(number, 0) + 1

    def _attempt_step(self, number: int) -> None:
        assignment = self._get_assignment(number)
        self._link.push_final_gradients(number)  # raises if p.grad has been changed since run.clip
        if assignment.late:
            self._skip_step(number, assignment.step)
        else:
            self._close_step(number, assignment)

    def _get_assignment(self, number: int, *, may_go_on: bool = True) -> StepAssignment:
        """Get the step of the next gradient, and the workers that make it.

        `may_go_on` lets a late worker go on before the step is made, if the model allows it.
        """
        # The gradient must be on all servers before the scheduler counts on it.
        if number not in self._assignments:
            self.prepare_push(number)
            self._link.push_final_gradients(number)
            self._row_steps.push_gradients(number)
            self._assignments[number] = self._request_assignment(number, may_go_on=may_go_on)
        return self._assignments[number]

    def _request_assignment(self, number: int, *, may_go_on: bool) -> StepAssignment:
        """Ask the scheduler for the step of the next gradient, which has been pushed."""
        raise NotImplementedError

    def _send_contribution(
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
            share, tuple(enumerate(optimizers.read_settings(link.optimizers[number])))
        )
        with link.connections.count_waiting():
            sent = send_request(link.primaries[0], make_request(contribution), link.deadline)
            return link.await_reply(
                sent, f"optimizer.step {gradient}", ListNotArrived(Index(number), step)
            )

    def _compute_weights(self, assignment: StepAssignment) -> tuple[float, float, bool]:
        """Divisor of a step's sum, factor of its learning rate, and whether late pushes stay."""
        return assignment.parts, assignment.parts, True

    def _close_step(self, number: int, assignment: StepAssignment, *, read: bool = True) -> None:
        """Make the assigned step on all copies, and with `read` take in the result.

        Each of the step's workers sends the same request, and servers make the step once.
        """
        link, step, units = (
            self._link,
            assignment.step,
            self._link.list_units(number) if read else [],
        )
        divisor, part, keep = self._compute_weights(assignment)
        factor, turn = link.clip_factors.get(number, 1.0) / divisor, link.context.step_state.step
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
        closes, reads = link.send_to_shards(number, close), link.request_units(units, step)
        closes += self._row_steps.close_step(number, step, assignment, part)
        for sent in closes:
            sent.wait_for_reply(link.deadline)
        if read:
            link.receive_units(units, reads)
        link.steps_taken[number] = step

    def _skip_step(self, number: int, step: int) -> None:
        """Go on from a step for which this worker is too late."""
        raise NotImplementedError

    # ---- clipping

    def compute_norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        return self._link.context.agreement.retry_after_losses(
            lambda: self._compute_norms_once(numbers, kind, limit)
        )

    def _compute_norms_once(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        # With several optimizers the total norm needs all steps, so none may stay open.
        is_single = len(numbers) == 1
        return [
            self._compute_step_norm(number, kind, limit, may_go_on=is_single) for number in numbers
        ]

    def _compute_step_norm(
        self, number: int, kind: float, limit: float, *, may_go_on: bool
    ) -> float:
        """Compute the norm of a step's gradient; of the own gradient if it is too late."""
        assignment = self._get_assignment(number)
        return (
            self._link.compute_own_norm([number], kind)
            if assignment.late
            else self._read_step_norm(number, assignment, kind)
        )

    def _read_step_norm(self, number: int, assignment: StepAssignment, kind: float) -> float:
        """Read the norm of the mean gradient of an assigned step."""
        link = self._link
        requests = link.send_to_shards(
            number,
            ReadNorm(Index(number), assignment.step, assignment.workers, kind, decided=True),
            ask=True,
        )
        norms = [sent.wait_for_reply(link.deadline).norm for sent in requests]
        # Servers have sums, weighted by shares. Dividing by the total share gives the mean.
        return (
            float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), kind))
            / assignment.parts
        )

    # ---- the end of a turn, and losses

    def commit_turn(self) -> None:
        if not self.sample_queue.open:
            return
        self.sample_queue.complete_turn(self._staleness_bound, dropped=self._is_late)
        self._is_late = False
        self._wait_for_slowest()

    def _wait_for_slowest(self) -> None:
        """If this worker is too far ahead of the slowest, wait."""

    def abort_turn(self) -> None: ...

    def regroup(self) -> None:
        assert self.recovery is not None
        self.recovery.regroup()
