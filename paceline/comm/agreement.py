"""Brings all workers together at named calls. A worker that makes another call is found and named.

Nothing moves before all workers have come to the same call at the same step.

If losses are survived (`recovery` is set), the remaining workers make a call again in which a
worker was lost. No call ends before all have begun it, so two workers never differ by more than
one completed call. A worker that was cut off in a call gets its result from one that completed it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import msgpack

from paceline import callsite
from paceline.comm.group_protocol import Group
from paceline.comm.sightings import SKIPPED, Sightings
from paceline.errors import (
    RECOVERABLE_ERRORS,
    DeadlineExceeded,
    Mismatch,
    PacelineError,
    WorkerLost,
)

T = TypeVar("T")


class CallDiscarded(PacelineError):
    """A call was discarded on all workers, because one of them was lost during it."""


class CallResult(Generic[T]):
    """The result of a call, made here or by another worker."""

    def __init__(self, value: T) -> None:
        self.value = value


# Brings the remaining workers together in a new group after an error. It returns the result of the
# call under way if another worker completed it, else None.
Recovery = Callable[[PacelineError], CallResult[Any] | None]


class Lockstep:
    """Whether workers make the same calls at the same time.

    Servers of some consistency models let workers leave lockstep. `entering` then brings them
    together before a call of all workers; in lockstep it is None.
    """

    def __init__(self) -> None:
        self.entering: Callable[[], None] | None = None

    @contextlib.contextmanager
    def all_entered(self) -> Iterator[None]:
        """Mark that all workers are here, so the block may make a call of all workers.

        They are not in lockstep outside of the block.
        """
        entering, self.entering = self.entering, None
        try:
            yield
        finally:
            self.entering = entering

    def leave_lockstep(self, entering: Callable[[], None]) -> None:
        """Leave lockstep. `entering` then brings workers together before the next call of all."""
        self.entering = entering

    def bring_together(self) -> None:
        """Bring workers together if they are not in lockstep."""
        if self.entering is not None:
            self.entering()

    def resume_lockstep(self) -> None:
        """Note that all workers are in lockstep from now on."""
        self.entering = None


class Agreement:
    """Brings all workers together at named calls, over the control channel of a group.

    `calls` counts completed calls, the same on all workers but for the call under way. During a
    call `_is_inside_call` is true: calls made in it are parts of it, and are neither counted nor
    repeated by themselves.
    `since` is set while this worker waits for others; `what` is that call in words.

    Args:
        group: All workers.
        step: Gives the current step.
        hosts: Name of each rank's host, for messages. Default: unknown.
    """

    def __init__(
        self, group: Group, *, step: Callable[[], int] = lambda: 0, hosts: tuple[str, ...] = ()
    ) -> None:
        self.group = group
        self._step = step
        self._sightings = Sightings(hosts, _global_ranks(group))
        # Rank of each member at the start. A worker that joins later gets a new number.
        self.origins = tuple(range(group.size))
        self.highest = group.size - 1  # the highest origin ever given; no origin is given twice
        self.calls = 0
        self.last: Any = None  # result of the last call, if losses are survived
        self.recovery: Recovery | None = None
        self.since: float | None = None  # time.monotonic() at the begin of the wait
        self.what = ""
        self.ended: deque[float] = deque(maxlen=64)  # time.monotonic() at the end of the last calls
        self._is_inside_call = False
        # Gives the step, and the numbers of optimizer steps in the last step and in this one.
        self._tally: Callable[[], list[int | None]] | None = None
        # What goes with the next meeting, and the function that gets the notes of all ranks.
        self._note: tuple[bytes, Callable[[list[bytes]], None]] | None = None
        self.lockstep = Lockstep()

    @property
    def hosts(self) -> tuple[str, ...]:
        """Name of the host of each rank."""
        return self._sightings.hosts

    @property
    def host(self) -> str:
        """Name of this rank's host, for messages."""
        return self.hosts[self.group.rank] if self.hosts else "an unknown host"

    @property
    def is_alone(self) -> bool:
        """Whether there is no other worker to tell anything."""
        return self.group.size == 1

    def gather_alike(self, what: str, body: bytes) -> list[bytes]:
        """Gather, as `meet` does, from every worker that runs this script on the same data."""
        return self.meet(what, body)

    def attempt_call(self, act: Callable[[], T], what: str = "") -> T:
        """Make a call of all workers, and return its result.

        After a loss `act` is called again in the new group, unless another worker has completed the
        call and hands over its result.

        Args:
            act: Makes the call.
            what: Name of the call, if `act` doesn't begin with a meeting. Default: none.
        """
        # A call inside of a call is a part of it.
        if self._is_inside_call:
            return act()
        if self.lockstep.entering is not None:
            self.lockstep.entering()
        self._name_call(what)
        if self.recovery is None:
            return self._make_call(act)
        while (result := self._attempt_once(act)) is None:
            continue
        self._count_call(result.value)
        return result.value

    def settle_call(self, act: Callable[[], T], what: str = "", *, apart: bool = False) -> T:
        """Make a call whose result can't be handed over, and whose `act` can't be called twice.

        All workers meet once more after `act`. If this returns, `act` has returned on all of them.

        Args:
            act: Makes the call.
            what: Name of the call, if `act` doesn't begin with a meeting. Default: none.
            apart: Whether `act` itself doesn't wait for other workers. Default: no.

        Raises:
            CallDiscarded: A worker was lost before all had met. Raised on all remaining workers.
        """
        results: list[T] = []

        def act_and_meet() -> None:
            results[:] = [act()]
            self._meet("settled", b"", "")

        if self.recovery is None and apart:
            # `act` doesn't wait, so only the meeting tells that all workers are done.
            self.attempt_call(act_and_meet, what)
            return results[0]
        if self.recovery is None or self._is_inside_call:
            return self.attempt_call(act, what)
        self._name_call(what)
        if self._attempt_once(act_and_meet) is None:
            # Not counted: for a worker that joins later, the call has not been made.
            raise CallDiscarded("a worker was lost in this call")
        self._count_call(None)
        return results[0]

    def repeat_until_settled(
        self, act: Callable[[], T], discard: Callable[[], None] = lambda: None, what: str = ""
    ) -> T:
        """Make a call as `settle_call` does, again after each loss. `discard` is called in between.

        Args:
            act: Makes the call.
            discard: Undoes what `act` has done on this worker. Default: nothing.
            what: Name of the call, if `act` doesn't begin with a meeting. Default: none.
        """
        while True:
            try:
                return self.settle_call(act, what)
            except CallDiscarded:
                discard()

    def wait_for_some(self, act: Callable[[], T], what: str) -> T:
        """Run `act`, which waits for some of the workers only; observers see the wait."""
        if self._is_inside_call:
            return act()
        self._name_call(what)
        self.since = time.monotonic()
        try:
            return act()
        finally:
            self.since = None

    def retry_after_losses(self, act: Callable[[], T]) -> T:
        """Run `act`, which waits for some workers only, and begin it anew after each loss."""
        while True:
            try:
                return act()
            except RECOVERABLE_ERRORS as error:
                if self.recovery is None or self._is_inside_call:
                    raise
                # While workers recover this one waits for none of them.
                since, self.since = self.since, None
                result = self.recovery(error)
                assert result is None, (
                    "a worker outside of all calls can't have been cut off in one"
                )
                self.since = None if since is None else time.monotonic()

    def compare_steps(self, tally: Callable[[], list[int | None]]) -> None:
        """Compare `tally()` at each meeting, so that replicas that part are found.

        It gives the step, and the numbers of optimizer steps in the last step and in this one.
        """
        self._tally = tally

    def send_note(self, note: bytes, receive: Callable[[list[bytes]], None]) -> None:
        """Send a note to all ranks with the next meeting, so that it needs no meeting of its own.

        Collective: all workers call this between the same two meetings.

        Args:
            note: Bytes for all ranks.
            receive: Called in the next meeting with the note of every rank, in rank order.
        """
        self._note = note, receive

    def survive_losses_by(self, recovery: Recovery) -> None:
        """Survive losses from now on. `recovery` brings the remaining workers together."""
        self.recovery = recovery

    def skip_calls(self, calls: int) -> None:
        """Count `calls` as completed: others made them before this worker joined."""
        self.calls = calls

    def _name_call(self, what: str) -> None:
        if what:
            self.what = f"{what} of step {self._step()}"

    def _make_call(self, act: Callable[[], T]) -> T:
        """Make a call in a run that ends with its first loss."""
        self._is_inside_call, self.since = True, time.monotonic()
        try:
            result = act()
        finally:
            self._is_inside_call, self.since = False, None
        self._count_call(None)
        return result

    def _attempt_once(self, act: Callable[[], T]) -> CallResult[T] | None:
        """Make a call once. None if a worker was lost and no worker completed the call."""
        assert self.recovery is not None
        self._is_inside_call, self.since = True, time.monotonic()
        try:
            return CallResult(act())
        except RECOVERABLE_ERRORS as error:
            self.since = None
            return self.recovery(error)
        finally:
            self._is_inside_call, self.since = False, None

    def _count_call(self, result: Any) -> None:
        self.calls += 1
        self.last = result
        self.ended.append(time.monotonic())

    def regroup(self, group: Group, hosts: tuple[str, ...], origins: tuple[int, ...]) -> None:
        """Use another group from now on.

        Args:
            group: The remaining workers.
            hosts: Name of each rank's host.
            origins: Origin of each rank.
        """
        self.group, self.origins, self._sightings = (
            group,
            origins,
            Sightings(hosts, _global_ranks(group)),
        )
        self.highest = max(self.highest, *origins)
        self._note = None  # the others may have met already, or not

    def meet(self, what: str, body: bytes = b"", *, where: str = "") -> list[bytes]:
        """Wait for all ranks to come to the call `what` of this step, and gather their `body`.

        Args:
            what: Name of the call.
            body: Bytes for all ranks. Default: none.
            where: How this rank got here, for messages. It is not compared. Default: nothing.

        Returns:
            The `body` of every rank, in rank order.

        Raises:
            Mismatch: Some ranks came to another call or step; raised on all.
        """
        return self.attempt_call(lambda: self._meet(what, body, where))

    def _meet(self, what: str, body: bytes, where: str) -> list[bytes]:
        (note, receive), self._note = self._note or (b"", None), None
        if self.group.size == 1:
            if receive is not None:
                receive([note])
            return [body]
        step = self._step()
        if what != "settled":  # the name of the call that is settled says more
            self.what = f"{what} of step {step}"
        try:
            tally = None if self._tally is None else self._tally()
            answers = self.group.gather_bytes(msgpack.packb((what, step, where, body, tally, note)))
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                self._sightings.describe_missing(self.group.rank, what, step, error.missing),
                error.missing,
            ) from error
        # All workers see the same heads, so all of them raise, or none.
        heads = [msgpack.unpackb(answer) for answer in answers]
        if any(head[0] != what or head[1] != step for head in heads):
            raise Mismatch(self._sightings.describe_apart(heads, self._gather_places()))
        # Steps agree, but optimizers may have stepped on some workers only.
        if any(head[4] != tally for head in heads) and (
            text := self._sightings.describe_unequal_steps(heads)
        ):
            raise Mismatch(f"replicas part: {text}. {SKIPPED}")
        self._sightings.note_meeting(heads)
        if receive is not None:
            receive([head[5] for head in heads])
        return [head[3] for head in heads]

    def tell_everyone(self, what: str, make: Callable[[], bytes]) -> bytes:
        """Call `make` on the first worker alone, and return its result on every worker.

        An error of `make` is raised on the first worker, and `Mismatch` on the others.
        """
        return self.attempt_call(lambda: self._tell_everyone(what, make))

    def _tell_everyone(self, what: str, make: Callable[[], bytes]) -> bytes:
        if self.group.size == 1:
            return make()
        # The first byte says whether `make` gave a result (+) or failed (-).
        if self.group.rank != 0:
            answer = self._meet(what, b"", "")[0]
            if answer[:1] != b"+":
                raise Mismatch(
                    f"the first worker failed at {what} with {answer[1:].decode()}; "
                    "its own traceback says more"
                )
            return answer[1:]
        try:
            self.since = None  # others wait for this worker; it waits for none of them
            body = make()
            self.since = time.monotonic()
        except Exception as error:
            self._meet(what, b"-" + f"{type(error).__qualname__}: {error}".encode(), "")
            raise
        self._meet(what, b"+" + body, "")
        return body

    def add_whereabouts(self, error: BaseException | None, wider: Agreement | None = None) -> None:
        """Add a note to the error of a wait: the step, and where the missing ranks were last seen.

        `wider`: an agreement of more workers, for ranks that are not of this one. Default: none.
        """
        absent = (
            error.missing
            if isinstance(error, DeadlineExceeded)
            else error.ranks
            if isinstance(error, WorkerLost)
            else ()
        )
        if wider is not None and not self._sightings.knows_ranks(absent):
            wider.add_whereabouts(error)
        elif error is not None and absent and not isinstance(error.__cause__, DeadlineExceeded):
            error.add_note(
                f"This was at step {self._step()}: {self._sightings.describe_whereabouts(absent)}"
            )

    def _gather_places(self) -> list[str]:
        """Gather the line of the script of every rank, after all have seen that they differ."""
        own_place = callsite.find_user_line()
        try:
            return [answer.decode() for answer in self.group.gather_bytes(own_place.encode())]
        except PacelineError:  # a worker has gone meanwhile
            return [own_place if rank == self.group.rank else "" for rank in range(self.group.size)]


class SliceAgreement(Agreement):
    """The agreement of a slice of the workers of a mesh.

    All slices run the same script on the same data, and each has its own meetings. A call that the
    first worker answers for all is answered by the first of `everyone`, so all slices get the same.
    """

    def __init__(
        self, group: Group, everyone: Agreement, *, step: Callable[[], int], hosts: tuple[str, ...]
    ) -> None:
        super().__init__(group, step=step, hosts=hosts)
        self._everyone = everyone

    @property
    def is_alone(self) -> bool:
        return self._everyone.is_alone

    def gather_alike(self, what: str, body: bytes) -> list[bytes]:
        return self._everyone.meet(what, body)

    def _tell_everyone(self, what: str, make: Callable[[], bytes]) -> bytes:
        return self._everyone.tell_everyone(what, make)


def act_together(
    agreement: Agreement, what: str, act: Callable[[], bytes], failure: type[PacelineError]
) -> list[bytes]:
    """Let every worker call `act`, and gather the results in rank order. Collective.

    If some workers fail with `failure`, all raise it: a failed worker its own error, the others
    that of the first failed rank.

    Args:
        agreement: All workers.
        what: Name of the call.
        act: Does this worker's part.
        failure: The error that is passed on to all workers. Other errors are raised here only.
    """
    # A worker that fails comes to the meeting as well, with its error in place of a result.
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


def _global_ranks(group: Group) -> tuple[int, ...]:
    """Rank of each member among all workers, by which messages name it."""
    return tuple(group.global_rank(rank) for rank in range(group.size))
