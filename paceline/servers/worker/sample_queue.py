"""One worker's end of the sample queue: it asks the scheduler for samples, and when to go on.

    take 4   take 6   take 7   tick   take 9   tick

Each tick (`complete_turn`) reports that the turn of the oldest piece is over. In runs that survive
losses each call is repeated after a loss, and does nothing twice.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

import torch

from paceline.errors import PacelineError
from paceline.servers.process.scheduler import EpochPart
from paceline.servers.protocol.message import R, Request, SentRequest, call_server, send_request
from paceline.servers.protocol.samples import (
    Clock,
    CompleteTurn,
    DealSamples,
    LeaveEpoch,
    ListBehind,
    Notes,
    PauseDealing,
    PostNote,
    Samples,
    StepsDecided,
    TakeSamples,
)
from paceline.servers.worker.link import ServerLink
from paceline.servers.worker.transfer_units import bytes_to_tensor, unpack_notes

T = TypeVar("T")
NO_PART: EpochPart = (-1, -1)


class SampleQueueClient:
    """Asks the scheduler for samples, and when to begin the next turn.

    A turn ends in two halves: `complete_turn` sends `_turn_report`, and `wait_for_turn` waits for
    the answer. Between them `_awaits_next_turn` is set. `_turn_permit` is the request under way; a
    loss clears it, and the report is sent again. `_has_stepped` is of the present turn,
    `_pieces_taken` of all epochs.

    Args:
        link: The connection to the servers. The first server has the scheduler.
        leaving: Called before this worker takes no more turns.
    """

    def __init__(self, link: ServerLink, leaving: Callable[[], None] = lambda: None) -> None:
        self._link, self._before_leaving = link, leaving
        self.clock = 0  # turns that this worker has completed
        self.open = False  # whether an epoch is under way
        self.epoch_part: EpochPart = (
            NO_PART  # epoch and first sample of the present part of an epoch
        )
        self.resumptions = 0  # how often this part was resumed after all workers had paused
        self.paused = False  # whether all workers have stopped taking pieces, to meet
        self._pause_requested_in: EpochPart = (
            NO_PART  # the part in which this worker has asked for a pause
        )
        self._pieces_taken = 0
        self._has_stepped = False
        self._has_left = False  # whether the scheduler knows that this worker takes no more pieces
        self._awaits_next_turn = False
        self._turn_report = CompleteTurn(0, False, False, math.inf)
        self._turn_permit: SentRequest[StepsDecided] | None = None
        self._received_notes = self._sent_notes = (
            0  # notes received in the last answer, and notes sent
        )

    def _retry_after_losses(self, act: Callable[[], T]) -> T:
        return self._link.context.agreement.retry_after_losses(act)

    def _ask_scheduler(self, request: Request[R]) -> R:
        link = self._link
        return self._retry_after_losses(
            lambda: call_server(link.primaries[0], request, link.deadline)
        )

    def _wait_and_count(self, act: Callable[[], T]) -> T:
        with self._link.connections.count_waiting():
            return self._retry_after_losses(act)

    # ---- samples

    def begin(self, epoch: int, first: int, sizes: Sequence[int]) -> None:
        link, tensor = self._link, torch.tensor(sizes, dtype=torch.int64)
        # The count tells the scheduler a part that goes on after a pause from one that is dealt
        # anew. A call that is repeated after a loss keeps its count.
        times = (
            self.resumptions + 1
            if self.paused
            else self.resumptions
            if self.epoch_part in (NO_PART, (epoch, first))
            else 0
        )

        def act() -> Clock:
            return call_server(
                link.primaries[0],
                DealSamples(epoch, first, tuple(link.worker_numbers), times, tensor),
                link.deadline,
            )

        self.wait_for_turn()
        self.clock = self._retry_after_losses(act).clock
        self.epoch_part, self.resumptions, self.open = (epoch, first), times, True
        self._has_stepped = self._has_left = self.paused = False

    def take(self, most: int) -> tuple[int, int, int] | None:
        link = self._link

        def act() -> Samples:
            return link.await_reply(
                send_request(
                    link.primaries[0], TakeSamples(most, self._pieces_taken + 1), link.deadline
                ),
                "the next batch",
                ListBehind(),
            )

        # The request has the number of the piece, so that a repeated one gets the same piece.
        samples = self._wait_and_count(act)
        self._has_left, self.paused = samples.over, samples.paused
        self._pieces_taken += samples.piece is not None
        return samples.piece

    def leave(self) -> None:
        link = self._link
        if self.open and link.primaries:
            has_left, self._has_left = self._has_left, True
            # A run that fails comes here, too. Its own error is the one to show.
            with contextlib.suppress(PacelineError):
                self._before_leaving()  # else the last gradients might be in no step
                if not has_left:
                    call_server(link.primaries[0], LeaveEpoch(), link.deadline)

    def end_epoch(self) -> None:
        """End the epoch: all workers are in lockstep until the next one."""
        self.open = False

    def pause(self) -> None:
        # Only runs that survive losses let workers join, and so need a pause.
        if self._link.context.survives and self._pause_requested_in != self.epoch_part:
            self._pause_requested_in = self.epoch_part
            self._ask_scheduler(PauseDealing())

    def note_step(self) -> None:
        """Note that an optimizer has stepped.

        The samples of this turn, and of earlier ones, are then in a step or dropped.
        """
        self._has_stepped = True

    # ---- turns

    def complete_turn(self, bound: float, *, dropped: bool) -> None:
        """Report the end of this worker's turn, which had the oldest piece.

        Args:
            bound: Turns that the next turn may be ahead of the slowest worker.
            dropped: Whether the samples of the piece are in no step.
        """
        self.wait_for_turn()
        self.clock, self._awaits_next_turn = self.clock + 1, True
        self._turn_report = CompleteTurn(self.clock, dropped, not self._has_stepped, bound)
        self._has_stepped = False
        self._retry_after_losses(self._send_turn_report)

    def _send_turn_report(self) -> None:
        """Send the report of the last turn, unless it is under way or answered."""
        link = self._link
        if self._awaits_next_turn and self._turn_permit is None:
            self._turn_permit = send_request(link.primaries[0], self._turn_report, link.deadline)

    def wait_for_turn(self) -> dict[int, int]:
        """Wait until this worker may begin the next turn.

        Returns the last step of each optimizer that was decided; nothing if the worker did not
        have to wait.
        """
        link = self._link

        def act() -> StepsDecided | None:
            self._send_turn_report()
            if self._turn_permit is None:
                return None
            return link.await_reply(self._turn_permit, f"turn {self.clock + 1}", ListBehind())

        if not self._awaits_next_turn:
            return {}
        decided = self._wait_and_count(act)
        self._awaits_next_turn, self._turn_permit = False, None
        return {} if decided is None else dict(decided.made)

    # ---- notes

    def together(self) -> AbstractContextManager[None]:
        return self._link.context.agreement.lockstep.all_entered()

    def post(self, body: bytes, *, stop: bool = False) -> list[tuple[int, bytes]]:
        link = self._link
        self._sent_notes += bool(body)

        def act() -> Notes:
            collect = link.context.group.rank == 0
            return call_server(
                link.primaries[0],
                PostNote(
                    self._sent_notes, stop, collect, self._received_notes, bytes_to_tensor(body)
                ),
                link.deadline,
            )

        notes = self._retry_after_losses(act)
        self._received_notes = len(notes.notes)
        return unpack_notes(notes)

    # ---- losses, and workers that join

    def join_epoch(self, times: int) -> None:
        """Take over the other workers' count of resumptions of this part of the epoch."""
        self.resumptions = times

    def forget_requests(self) -> None:
        """Forget the request under way: after a loss its answer doesn't come any more."""
        self._turn_permit = None
