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
from paceline.servers.process.scheduler import Part
from paceline.servers.protocol.message import R, Request, SentRequest, call, send
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
from paceline.servers.worker.units import letters, packed

T = TypeVar("T")
NONE: Part = (-1, -1)


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
        self._link, self._leaving = link, leaving
        self.clock = 0  # turns that this worker has completed
        self.open = False  # whether an epoch is under way
        self.part: Part = NONE  # epoch and first sample of the present part of an epoch
        self.times = 0  # how often this part was resumed after all workers had paused
        self.paused = False  # whether all workers have stopped taking pieces, to meet
        self._asked: Part = NONE  # the part in which this worker has asked for a pause
        self._taken = 0
        self._stepped = False
        self._left = False  # whether the scheduler knows that this worker takes no more pieces
        self._owes = False
        self._tick = CompleteTurn(0, False, False, math.inf)
        self._going: SentRequest[StepsDecided] | None = None
        self._had = self._letters = 0  # notes received in the last answer, and notes sent

    def _lasting(self, act: Callable[[], T]) -> T:
        return self._link.context.agreement.retry_after_losses(act)

    def _call(self, request: Request[R]) -> R:
        link = self._link
        return self._lasting(lambda: call(link.callers[0], request, link.seconds))

    def _wait(self, act: Callable[[], T]) -> T:
        with self._link.connections.waiting():
            return self._lasting(act)

    # ---- samples

    def begin(self, epoch: int, first: int, sizes: Sequence[int]) -> None:
        link, tensor = self._link, torch.tensor(sizes, dtype=torch.int64)
        # The count tells the scheduler a part that goes on after a pause from one that is dealt
        # anew. A call that is repeated after a loss keeps its count.
        times = (
            self.times + 1
            if self.paused
            else self.times
            if self.part in (NONE, (epoch, first))
            else 0
        )

        def act() -> Clock:
            return call(
                link.callers[0],
                DealSamples(epoch, first, tuple(link.workers), times, tensor),
                link.seconds,
            )

        self.go()
        self.clock = self._lasting(act).clock
        self.part, self.times, self.open = (epoch, first), times, True
        self._stepped = self._left = self.paused = False

    def take(self, most: int) -> tuple[int, int, int] | None:
        link = self._link

        def act() -> Samples:
            return link.wait(
                send(link.callers[0], TakeSamples(most, self._taken + 1), link.seconds),
                "the next batch",
                ListBehind(),
            )

        # The request has the number of the piece, so that a repeated one gets the same piece.
        samples = self._wait(act)
        self._left, self.paused = samples.over, samples.paused
        self._taken += samples.piece is not None
        return samples.piece

    def leave(self) -> None:
        link = self._link
        if self.open and link.callers:
            has_left, self._left = self._left, True
            # A run that fails comes here, too. Its own error is the one to show.
            with contextlib.suppress(PacelineError):
                self._leaving()  # else the last gradients might be in no step
                if not has_left:
                    call(link.callers[0], LeaveEpoch(), link.seconds)

    def rest(self) -> None:
        """End the epoch: all workers are in lockstep until the next one."""
        self.open = False

    def pause(self) -> None:
        # Only runs that survive losses let workers join, and so need a pause.
        if self._link.context.survives and self._asked != self.part:
            self._asked = self.part
            self._call(PauseDealing())

    def stepped(self) -> None:
        """Note that an optimizer has stepped.

        The samples of this turn, and of earlier ones, are then in a step or dropped.
        """
        self._stepped = True

    # ---- turns

    def tick(self, bound: float, *, dropped: bool) -> None:
        """Report the end of this worker's turn, which had the oldest piece.

        Args:
            bound: Turns that the next turn may be ahead of the slowest worker.
            dropped: Whether the samples of the piece are in no step.
        """
        self.go()
        self.clock, self._owes = self.clock + 1, True
        self._tick = CompleteTurn(self.clock, dropped, not self._stepped, bound)
        self._stepped = False
        self._lasting(self._send)

    def _send(self) -> None:
        """Send the report of the last turn, unless it is under way or answered."""
        link = self._link
        if self._owes and self._going is None:
            self._going = send(link.callers[0], self._tick, link.seconds)

    def go(self) -> dict[int, int]:
        """Wait until this worker may begin the next turn.

        Returns the last step of each optimizer that was decided; nothing if the worker did not
        have to wait.
        """
        link = self._link

        def act() -> StepsDecided | None:
            self._send()
            if self._going is None:
                return None
            return link.wait(self._going, f"turn {self.clock + 1}", ListBehind())

        if not self._owes:
            return {}
        decided = self._wait(act)
        self._owes, self._going = False, None
        return {} if decided is None else dict(decided.made)

    # ---- notes

    def together(self) -> AbstractContextManager[None]:
        return self._link.context.agreement.lockstep.all_entered()

    def post(self, body: bytes, *, stop: bool = False) -> list[tuple[int, bytes]]:
        link = self._link
        self._letters += bool(body)

        def act() -> Notes:
            collect = link.context.group.rank == 0
            return call(
                link.callers[0],
                PostNote(self._letters, stop, collect, self._had, packed(body)),
                link.seconds,
            )

        notes = self._lasting(act)
        self._had = len(notes.notes)
        return letters(notes)

    # ---- losses, and workers that join

    def join(self, times: int) -> None:
        """Take over the other workers' count of resumptions of this part of the epoch."""
        self.times = times

    def resume(self) -> None:
        """Forget the request under way: after a loss its answer doesn't come any more."""
        self._going = None
