"""Where messages wait for those who receive them, and those who receive for messages."""

from __future__ import annotations

import copy
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from paceline.comm.p2p.message import PairMessage, moved
from paceline.errors import DeadlineExceeded, PacelineError

TICK = 0.05  # seconds between two looks whether a message can still come
SLICE = 2e-3  # seconds that a receive sleeps where other work may have to be pushed meanwhile


class PairLink(Protocol):
    """The way by which the messages of one worker come."""

    name: int  # of the worker, among all
    host: str

    def look(self, *, last: bool = False) -> None:
        """Take in what has come.

        If another thread does so, go on without, unless this is the `last` look.
        """
        ...

    def rest(self, work: ReceiveWork, seconds: float) -> None:
        """Return when `work` has its message, or may have it after another `look`; after so many
        seconds in any case.
        """
        ...

    def gone(self) -> PacelineError | None:
        """Return why nothing more comes this way, if so."""
        ...


class PairInbox:
    """The messages that have come to one worker: first in, first out, for each source and lane.

    For any thread.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._arrived: defaultdict[tuple[int, int], deque[PairMessage]] = defaultdict(deque)
        self._wanted: defaultdict[tuple[int, int], deque[ReceiveWork]] = defaultdict(deque)

    def put(self, source: int, lane: int, message: PairMessage) -> None:
        """Hand a message to the first that waits for it, or keep it for who will."""
        place = source, lane
        with self.changed:
            if place in self._wanted:
                self._wanted[place].popleft().end(message)
                _tidy(self._wanted, place)
            else:
                self._arrived[place].append(message)
            self.changed.notify_all()

    def ask(self, source: int, lane: int, work: ReceiveWork) -> None:
        """Give `work` the next message of this source and lane, now or when it comes."""
        place = source, lane
        with self.changed:
            if place in self._arrived:
                work.end(self._arrived[place].popleft())
                _tidy(self._arrived, place)
            else:
                self._wanted[place].append(work)

    def rest(
        self, work: ReceiveWork, seconds: float, needed: Callable[[], bool] = lambda: True
    ) -> None:
        """Wait until `work` has its message, or something has changed, if that is `needed`; at
        most so long.
        """
        with self.changed:
            if not work.came and needed():
                self.changed.wait(seconds)

    def notify(self) -> None:
        """Wake up all that wait: something else has changed."""
        with self.changed:
            self.changed.notify_all()


def _tidy(places: dict[tuple[int, int], deque[Any]], place: tuple[int, int]) -> None:
    """Forget a lane on which nothing is left: callers may use a lane only once."""
    if not places[place]:
        del places[place]


class ReceiveTerms(NamedTuple):
    """What all receives of one worker share: what it is called, how long a wait may take, where
    tensors are to lie, and what ends them.
    """

    me: str
    deadline: float  # seconds
    device: torch.device
    broken: Callable[[], PacelineError | None]


class ReceiveWork:
    """A message that is to come (a `Work`). `what` is what errors call it."""

    def __init__(self, link: PairLink, what: str, terms: ReceiveTerms) -> None:
        self._link, self._what, self._terms = link, what, terms
        self._message: PairMessage | None = None
        self._landed: PairMessage | None = None  # where it is asked for
        self._error: PacelineError | None = None

    @property
    def came(self) -> bool:
        """Whether the message is here."""
        return self._message is not None

    def end(self, message: PairMessage) -> None:
        """Take the message."""
        self._message = message

    def wait(self, timeout: float | None = None) -> PairMessage:
        """Wait for the message. `DeadlineExceeded` ends this wait alone; other errors stay."""
        began = time.monotonic()
        seconds = self._terms.deadline if timeout is None else timeout
        while not self.done():
            left = began + seconds - time.monotonic()
            if left <= 0:
                raise DeadlineExceeded(
                    f"{self._missing()} within {seconds:g} s", (self._link.name,)
                )
            self._link.rest(self, min(left, TICK))
        if self._error is not None:
            raise copy.copy(self._error)
        assert self._message is not None
        if self._landed is None:
            self._landed = moved(self._message, self._terms.device)
        return self._landed

    def done(self) -> bool:
        if self.came or self._error is not None:
            return True
        self._link.look()
        if self.came:
            return True
        error = self._terms.broken() or self._link.gone()
        if error is None:
            return False
        self._link.look(last=True)  # at what came before the end
        if not self.came:
            self._error = self._explained(error)
        return True

    def exception(self) -> BaseException | None:
        return self._error if self.done() else None

    def _explained(self, error: PacelineError) -> PacelineError:
        told = copy.copy(error)
        told.args = (f"{error}: {self._missing()}",)
        return told

    def _missing(self) -> str:
        return (
            f"{self._terms.me} has not received {self._what} from rank {self._link.name} on "
            f"{self._link.host}"
        )
