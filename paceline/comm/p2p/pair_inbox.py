"""Brings messages and receives of one worker together, whichever of them comes first."""

from __future__ import annotations

import copy
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from paceline.comm.p2p.pair_message import PairMessage, move_message
from paceline.errors import DeadlineExceeded, PacelineError

TICK = 0.05  # seconds between two looks whether a message can still come
SLICE = 2e-3  # seconds that a receive sleeps while other operations may need to be advanced


class PairLink(Protocol):
    """The link over which the messages of one worker come."""

    name: int  # rank of that worker among all workers
    host: str

    def look_for_messages(self, *, last: bool = False) -> None:
        """Move messages that have come into the inbox.

        If another thread is doing that, return at once, unless this is the `last` look.
        """
        ...

    def rest_until(self, work: ReceiveWork, seconds: float) -> None:
        """Sleep until `work` has its message, or another look may find it, or `seconds` pass."""
        ...

    def find_loss(self) -> PacelineError | None:
        """Return the reason why no more messages come over this link; None if they may."""
        ...


class PairInbox:
    """Messages that have come to one worker, and receives that wait for one. For any thread.

    Each source and lane is a queue of its own. At most one of `_arrived` and `_wanted` has an entry
    for a lane, and an entry is never empty.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._arrived: defaultdict[tuple[int, int], deque[PairMessage]] = defaultdict(deque)
        self._wanted: defaultdict[tuple[int, int], deque[ReceiveWork]] = defaultdict(deque)

    def put_message(self, source: int, lane: int, message: PairMessage) -> None:
        """Hand a message to the first receive that waits for it, or store it for a later one."""
        place = source, lane
        with self.changed:
            if place in self._wanted:
                self._wanted[place].popleft().take_message(message)
                _drop_empty_lane(self._wanted, place)
            else:
                self._arrived[place].append(message)
            self.changed.notify_all()

    def request_message(self, source: int, lane: int, work: ReceiveWork) -> None:
        """Give `work` the next message of a source and lane, now or when it comes."""
        place = source, lane
        with self.changed:
            if place in self._arrived:
                work.take_message(self._arrived[place].popleft())
                _drop_empty_lane(self._arrived, place)
            else:
                self._wanted[place].append(work)

    def wait_for_change(
        self, work: ReceiveWork, seconds: float, needed: Callable[[], bool] = lambda: True
    ) -> None:
        """Sleep until `work` has its message, something changes, or `seconds` pass.

        `needed` is asked while the lock is held, so no change can be missed: False returns at once.
        """
        with self.changed:
            if not work.has_come and needed():
                self.changed.wait(seconds)

    def wake_waiters(self) -> None:
        """Wake all threads that wait: something other than a message has changed."""
        with self.changed:
            self.changed.notify_all()


def _drop_empty_lane(places: dict[tuple[int, int], deque[Any]], place: tuple[int, int]) -> None:
    """Forget a lane without entries: callers may use a lane only once."""
    if not places[place]:
        del places[place]


class ReceiveTerms(NamedTuple):
    """Terms that all receives of one worker share."""

    me: str  # words for this worker in errors
    deadline: float  # seconds that a wait may take
    device: torch.device  # where tensors come out
    broken: Callable[[], PacelineError | None]  # gives the error that has ended the group


class ReceiveWork:
    """A message to come (a `Work`). `what`: words for it in errors."""

    def __init__(self, link: PairLink, what: str, terms: ReceiveTerms) -> None:
        self._link, self._what, self._terms = link, what, terms
        self._message: PairMessage | None = None
        self._landed: PairMessage | None = None  # the message with its tensors on the device
        self._error: PacelineError | None = None

    @property
    def has_come(self) -> bool:
        """Whether the message is here."""
        return self._message is not None

    def take_message(self, message: PairMessage) -> None:
        """Take the message: it has come."""
        self._message = message

    def wait(self, timeout: float | None = None) -> PairMessage:
        """Wait for the message. `DeadlineExceeded` ends this wait alone; other errors stay."""
        began = time.monotonic()
        seconds = self._terms.deadline if timeout is None else timeout
        while not self.done():
            seconds_left = began + seconds - time.monotonic()
            if seconds_left <= 0:
                raise DeadlineExceeded(
                    f"{self._describe_missing()} within {seconds:g} s", (self._link.name,)
                )
            self._link.rest_until(self, min(seconds_left, TICK))
        if self._error is not None:
            raise copy.copy(self._error)
        assert self._message is not None
        # Tensors move in the waiting thread, not where messages arrive.
        if self._landed is None:
            self._landed = move_message(self._message, self._terms.device)
        return self._landed

    def done(self) -> bool:
        if self.has_come or self._error is not None:
            return True
        # Look before asking for errors: a message that came before the end still counts.
        self._link.look_for_messages()
        if self.has_come:
            return True
        error = self._terms.broken() or self._link.find_loss()
        if error is None:
            return False
        # The message may have come between the look above and the end.
        self._link.look_for_messages(last=True)
        if not self.has_come:
            self._error = self._explain_error(error)
        return True

    def exception(self) -> BaseException | None:
        return self._error if self.done() else None

    def _explain_error(self, error: PacelineError) -> PacelineError:
        explained = copy.copy(error)
        explained.args = (f"{error}: {self._describe_missing()}",)
        return explained

    def _describe_missing(self) -> str:
        return (
            f"{self._terms.me} has not received {self._what} from rank {self._link.name} on "
            f"{self._link.host}"
        )
