"""One worker's end of the sample queue: it asks the scheduler for samples, and whether to go on.

    take 4   take 6   take 7   tick   take 9   tick

Each tick says that the turn of the oldest piece is over. If losses are survived, each call is begun
anew after a loss, and does nothing twice.
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
    """Asks the scheduler for samples, and whether to go on.

    `leaving` is called before this worker takes no more turns.
    """

    def __init__(self, link: ServerLink, leaving: Callable[[], None] = lambda: None) -> None:
        self._link, self._leaving = link, leaving
        self.clock = 0  # turns that are over
        self.open = False  # an epoch is under way
        self.part: Part = NONE
        self.times = 0  # how many times this part of an epoch was resumed after all had paused
        self.paused = False  # all workers have stopped taking pieces, to meet
        self._asked: Part = NONE  # the part in which this worker asked for a pause
        self._taken = 0  # pieces
        self._stepped = False  # an optimizer has stepped in this turn
        self._left = False
        self._owes = False  # a turn is over, and this worker may not begin the next yet
        # what the scheduler is told of my last turn
        self._tick = CompleteTurn(0, False, False, math.inf)
        # the request that is answered when it may
        self._going: SentRequest[StepsDecided] | None = None
        self._had = self._letters = 0  # how many letters came last, and how many were sent

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

        found = self._wait(act)
        self._left, self.paused = found.over, found.paused
        self._taken += found.piece is not None
        return found.piece

    def leave(self) -> None:
        link = self._link
        if self.open and link.callers:
            left, self._left = self._left, True
            with contextlib.suppress(PacelineError):  # a run that fails, too, comes here
                self._leaving()  # or what was pushed last might be in no step
                if not left:
                    call(link.callers[0], LeaveEpoch(), link.seconds)

    def rest(self) -> None:
        """Note that all workers have ended the epoch, and are in lockstep until the next."""
        self.open = False

    def pause(self) -> None:
        if self._link.context.survives and self._asked != self.part:  # elsewhere nobody is let in
            self._asked = self.part
            self._call(PauseDealing())

    def stepped(self) -> None:
        """Note that an optimizer has stepped: samples of this turn, and of those before it, are
        in a step, or were left out.
        """
        self._stepped = True

    # ---- turns

    def tick(self, bound: float, *, dropped: bool) -> None:
        """End my turn, that of the oldest piece.

        `bound`: how many turns I may be ahead of the slowest in the next.

        `dropped`: the samples of the piece are in no step.
        """
        self.go()
        self.clock, self._owes = self.clock + 1, True
        self._tick = CompleteTurn(self.clock, dropped, not self._stepped, bound)
        self._stepped = False
        self._lasting(self._send)

    def _send(self) -> None:
        """Tell the scheduler that my turn is over, unless that message is under way."""
        link = self._link
        if self._owes and self._going is None:
            self._going = send(link.callers[0], self._tick, link.seconds)

    def go(self) -> dict[int, int]:
        """Wait until I may begin the next turn; return the last step that was decided of each
        optimizer, if that had to be asked.
        """
        link = self._link

        def act() -> StepsDecided | None:
            self._send()
            if self._going is None:
                return None
            return link.wait(self._going, f"turn {self.clock + 1}", ListBehind())

        if not self._owes:
            return {}
        found = self._wait(act)
        self._owes, self._going = False, None
        return {} if found is None else dict(found.made)

    # ---- letters

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

        found = self._lasting(act)
        self._had = len(found.notes)
        return letters(found)

    # ---- losses, and workers that join

    def join(self, times: int) -> None:
        """Take up how often the part of the epoch was resumed, as the others count it."""
        self.times = times

    def resume(self) -> None:
        """Go on after a loss, in which what was asked has been forgotten here."""
        self._going = None
