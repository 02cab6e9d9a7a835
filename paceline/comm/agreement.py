"""Calls that all workers have to make, compared by name: a worker that makes another call is named
before anything moves.

Where losses are survived (`recovery` is set), the living make a call again in which a worker was
lost. No call ends before all have begun it, so two workers never differ by more than one completed
call: the result that one has got is handed to those that were cut off.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgpack

from paceline import callsite
from paceline.comm.group import Group
from paceline.comm.sightings import SKIPPED, Sightings
from paceline.errors import LOSSES, DeadlineExceeded, Mismatch, PacelineError, WorkerLost

T = TypeVar("T")


class CallDiscarded(PacelineError):
    """A call was discarded on all workers, because one of them was lost in it."""


class CallResult(Generic[T]):
    """The result of a call, from here or from another worker."""

    def __init__(self, value: T) -> None:
        self.value = value


# brings the living together in a new group; what others got, if any did
Recovery = Callable[[PacelineError], CallResult[Any] | None]


class Lockstep:
    """Whether workers make the same calls at the same time.

    `entering`, where they don't, brings them together before a call of all.
    """

    def __init__(self) -> None:
        self.entering: Callable[[], None] | None = None

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Mark that all workers are here, though they are not in lockstep: the code inside may
        make a call of all.
        """
        entering, self.entering = self.entering, None
        try:
            yield
        finally:
            self.entering = entering

    def part(self, entering: Callable[[], None]) -> None:
        """Let workers leave lockstep: `entering` is called before the next call of all, and
        brings them together.
        """
        self.entering = entering

    def enter(self) -> None:
        """Bring workers together that are not in lockstep."""
        if self.entering is not None:
            self.entering()

    def come_together(self) -> None:
        """Note that all workers are in lockstep again."""
        self.entering = None


class Agreement:
    """Brings all workers together at named calls, over the control channel of a group.

    `step` gives the current step and `hosts` the host of each rank, for messages.
    """

    def __init__(
        self, group: Group, *, step: Callable[[], int] = lambda: 0, hosts: tuple[str, ...] = ()
    ) -> None:
        self.group = group
        self._step = step
        self._sightings = Sightings(hosts, _names(group))
        # the members' ranks at the start; a worker that joined later has a number of its own
        self.origins = tuple(range(group.size))
        self.highest = group.size - 1  # of all origins that there have been: none is given twice
        self.calls = 0  # completed
        self.last: Any = None  # what the last of them gave, where losses are survived
        self.recovery: Recovery | None = None
        # when the call under way, or a wait for some of the others, began here
        self.since: float | None = None
        self.what = ""  # the last call, in words
        self.ended: deque[float] = deque(maxlen=64)  # when the last calls were completed
        self._inside = False
        # the step, and how often optimizers stepped in the last and in this
        self._tally: Callable[[], list[int | None]] | None = None
        self.lockstep = Lockstep()

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each rank."""
        return self._sightings.hosts

    @property
    def host(self) -> str:
        """The host of this rank, for messages."""
        return self.hosts[self.group.rank] if self.hosts else "an unknown host"

    @property
    def alone(self) -> bool:
        """Whether no other worker has to be told what this one finds out."""
        return self.group.size == 1

    def compare(self, what: str, body: bytes) -> list[bytes]:
        """Return, as `meet` does, the `body` of every worker that runs the same script on the
        same data.
        """
        return self.meet(what, body)

    def attempt(self, act: Callable[[], T], what: str = "") -> T:
        """Make a call of all workers: `act`, called again in a new group where a worker was lost,
        unless others hand over its result.

        `what`: its name, where `act` doesn't begin with a meeting.
        """
        if self._inside:
            return act()
        if self.lockstep.entering is not None:
            self.lockstep.entering()
        self._name(what)
        if self.recovery is None:
            return self._make(act)
        while (result := self._attempt(act)) is None:
            continue
        self._complete(result.value)
        return result.value

    def settle(self, act: Callable[[], T], what: str = "", *, apart: bool = False) -> T:
        """Make a call whose result is too large to hand over, or can't be made twice: when it
        returns, all have what `act` gave them.

        Raises `CallDiscarded` on all of them where a worker was lost before that. `apart`: `act`
        itself doesn't wait.
        """
        mine: list[T] = []

        def whole() -> None:
            mine[:] = [act()]
            self._meet("settled", b"", "")

        if self.recovery is None and apart:
            self.attempt(whole, what)
            return mine[0]
        if self.recovery is None or self._inside:
            return self.attempt(act, what)
        self._name(what)
        if self._attempt(whole) is None:
            # as if it had not been made: a worker that joins later doesn't make it
            raise CallDiscarded("a worker was lost in this call")
        self._complete(None)
        return mine[0]

    def repeat(
        self, act: Callable[[], T], discard: Callable[[], None] = lambda: None, what: str = ""
    ) -> T:
        """Make a call as `settle` does, again after each loss until it is settled; call
        `discard` before each repetition.
        """
        while True:
            try:
                return self.settle(act, what)
            except CallDiscarded:
                discard()

    def wait(self, act: Callable[[], T], what: str) -> T:
        """Run `act`, which waits for some of the workers and is no call of all; observers see
        the wait while it lasts.
        """
        if self._inside:
            return act()
        self._name(what)
        self.since = time.monotonic()
        try:
            return act()
        finally:
            self.since = None

    def lasting(self, act: Callable[[], T]) -> T:
        """Run `act`, which is no call of all, and begin it anew after each loss."""
        while True:
            try:
                return act()
            except LOSSES as error:
                if self.recovery is None or self._inside:
                    raise
                since, self.since = self.since, None
                result = self.recovery(error)
                assert result is None, "who is in no call of all can't have been cut off in one"
                self.since = None if since is None else time.monotonic()

    def compare_steps(self, tally: Callable[[], list[int | None]]) -> None:
        """Compare at each meeting what `tally` gives: the step, and how often optimizers stepped
        in the last one and in this one.
        """
        self._tally = tally

    def recover_by(self, recovery: Recovery) -> None:
        """Survive losses from now on: `recovery` brings the living together."""
        self.recovery = recovery

    def catch_up(self, calls: int) -> None:
        """Count as completed the calls that the others have made before this worker came."""
        self.calls = calls

    def _name(self, what: str) -> None:
        if what:
            self.what = f"{what} of step {self._step()}"

    def _make(self, act: Callable[[], T]) -> T:
        """Make a call where a loss ends the run."""
        self._inside, self.since = True, time.monotonic()
        try:
            result = act()
        finally:
            self._inside, self.since = False, None
        self._complete(None)
        return result

    def _attempt(self, act: Callable[[], T]) -> CallResult[T] | None:
        """Make the call once; return its result from here or elsewhere, None if a worker was
        lost and no worker completed it.
        """
        assert self.recovery is not None
        self._inside, self.since = True, time.monotonic()
        try:
            return CallResult(act())
        except LOSSES as error:
            self.since = None
            return self.recovery(error)
        finally:
            self._inside, self.since = False, None

    def _complete(self, result: Any) -> None:
        self.calls += 1
        self.last = result
        self.ended.append(time.monotonic())

    def regroup(self, group: Group, hosts: tuple[str, ...], origins: tuple[int, ...]) -> None:
        """Use another group from now on."""
        self.group, self.origins, self._sightings = group, origins, Sightings(hosts, _names(group))
        self.highest = max(self.highest, *origins)

    def meet(self, what: str, body: bytes = b"", *, where: str = "") -> list[bytes]:
        """Return every rank's `body`, once all ranks have come to `what` at the same step; raises
        `Mismatch` on all if some came elsewhere.

        `where` is not compared; it says in messages how this rank got here.
        """
        return self.attempt(lambda: self._meet(what, body, where))

    def _meet(self, what: str, body: bytes, where: str) -> list[bytes]:
        if self.group.size == 1:
            return [body]
        step = self._step()
        if what != "settled":
            self.what = f"{what} of step {step}"
        try:
            taken = None if self._tally is None else self._tally()
            answers = self.group.agree(msgpack.packb((what, step, where, body, taken)))
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                self._sightings.missing(self.group.rank, what, step, error.missing), error.missing
            ) from error
        heads = [msgpack.unpackb(answer) for answer in answers]
        if any(head[0] != what or head[1] != step for head in heads):
            raise Mismatch(self._sightings.apart(heads, self._places()))
        if any(head[4] != taken for head in heads) and (text := self._sightings.unequal(heads)):
            raise Mismatch(f"replicas part: {text}. {SKIPPED}")
        self._sightings.note(heads)
        return [head[3] for head in heads]

    def tell(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Call `make` on the first worker alone, and give its result on every worker; its error
        raises there, `Mismatch` elsewhere.
        """
        return self.attempt(lambda: self._tell(what, make))

    def _tell(self, what: str, make: Callable[[], bytes]) -> bytes:
        if self.group.size == 1:
            return make()
        if self.group.rank != 0:
            answer = self._meet(what, b"", "")[0]
            if answer[:1] != b"+":
                raise Mismatch(
                    f"the first worker failed at {what} with {answer[1:].decode()}; "
                    "its own traceback says more"
                )
            return answer[1:]
        try:
            self.since = None  # the others wait for this worker, and not the other way round
            body = make()
            self.since = time.monotonic()
        except Exception as error:
            self._meet(what, b"-" + f"{type(error).__qualname__}: {error}".encode(), "")
            raise
        self._meet(what, b"+" + body, "")
        return body

    def locate(self, error: BaseException | None, wider: Agreement | None = None) -> None:
        """Add to the error of a wait at which step it happened and where the others were last seen,
        unless it says so already.

        `wider` knows of workers that are not of this agreement.
        """
        absent = (
            error.missing
            if isinstance(error, DeadlineExceeded)
            else error.ranks
            if isinstance(error, WorkerLost)
            else ()
        )
        if wider is not None and not self._sightings.knows(absent):
            wider.locate(error)
        elif error is not None and absent and not isinstance(error.__cause__, DeadlineExceeded):
            error.add_note(
                f"This was at step {self._step()}: {self._sightings.whereabouts(absent)}"
            )

    def _places(self) -> list[str]:
        """Return where in its script each rank is; all ranks know that they have come apart, and
        ask each other.
        """
        mine = callsite.place()
        try:
            return [answer.decode() for answer in self.group.agree(mine.encode())]
        except PacelineError:
            # a worker has gone meanwhile
            return [mine if rank == self.group.rank else "" for rank in range(self.group.size)]


class SliceAgreement(Agreement):
    """The agreement of a slice of the workers of a mesh: all slices run the same script on the same
    data, and each meets by itself.

    What one worker tells all is told by the first of `everyone`, so that it is the same in all
    slices.
    """

    def __init__(
        self, group: Group, everyone: Agreement, *, step: Callable[[], int], hosts: tuple[str, ...]
    ) -> None:
        super().__init__(group, step=step, hosts=hosts)
        self._everyone = everyone

    @property
    def alone(self) -> bool:
        return self._everyone.alone

    def compare(self, what: str, body: bytes) -> list[bytes]:
        return self._everyone.meet(what, body)

    def _tell(self, what: str, make: Callable[[], bytes]) -> bytes:
        return self._everyone.tell(what, make)


def act_together(
    agreement: Agreement, what: str, act: Callable[[], bytes], failure: type[PacelineError]
) -> list[bytes]:
    """Let every worker `act`, and return what all have got, by rank. Collective.

    Where some fail with `failure`, all raise it: those their own, and the others the one of the
    first of them.
    """
    own: PacelineError | None = None
    try:
        answer = b"+" + act()
    except failure as error:
        own, answer = error, b"-" + str(error).encode()
    answers = agreement.meet(what, answer)
    failed = next((rank for rank, body in enumerate(answers) if body.startswith(b"-")), None)
    if failed is not None:
        raise own or failure(f"rank {failed}: {answers[failed][1:].decode()}")
    return [body[1:] for body in answers]


def _names(group: Group) -> tuple[int, ...]:
    """Return what the ranks of a group are called in messages: their numbers among all workers."""
    return tuple(group.global_rank(rank) for rank in range(group.size))
