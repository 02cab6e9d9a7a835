"""Rendezvous: how the launchers of several hosts meet, agree on ranks, and stay in touch until the
job is over.

All are given the same HOST:PORT. The first whose machine owns HOST listens there, the others call
it (so do later ones of the same machine). It hands out one table of hosts; the connections stay
open, so that the end of one host is the end of all, and is named.
"""

from __future__ import annotations

import errno
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

from paceline.cluster import network
from paceline.cluster.hosts.channel import SENSELESS, Channel, ChannelBroken, call, ready
from paceline.cluster.hosts.fixed import FixedPeers
from paceline.cluster.hosts.handshake import Handshakes
from paceline.cluster.hosts.membership import View
from paceline.cluster.hosts.peers import Offer, said_stopped
from paceline.cluster.hosts.restart_messages import JobStopped, Links, RestartState
from paceline.cluster.launcher.hints import WaitReminder
from paceline.errors import DeadlineExceeded, Mismatch, PacelineError, PlaceError, SecretError
from paceline.formatting import counted
from paceline.timings import DEFAULTS, Timings


def _tell(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Meeting:
    """The terms of a rendezvous: what this host brings, and for how many it waits.

    `restarts` is how far the restarts of the job have come, as this host knows, if it may start
    again. `links` are the connections that are left of the start before: those at their other ends
    need not call, and the signal that ends a launcher meanwhile ends all.
    """

    point: tuple[str, int]
    secret: bytes
    offer: Offer
    hosts: int
    host_rank: int | None  # wished for
    deadline: float  # seconds
    command: str = "the same command"  # that starts it on another host
    # called with news that ends nothing and that a user should know
    say: Callable[[str], None] = _tell
    timings: Timings = DEFAULTS
    restarts: RestartState | None = None
    links: Links | None = None

    @property
    def where(self) -> str:
        return f"{self.point[0]}:{self.point[1]}"

    def reminder(self) -> WaitReminder:
        """Make the reminder of a wait of this rendezvous."""
        return WaitReminder(self.say, timings=self.timings.rendezvous)


@dataclass(frozen=True)
class Admission:
    """The place of a host in a job that runs already: the view that has it, its number there,
    and the facts of the run.
    """

    view: View
    host: int
    run: str


def assemble(meeting: Meeting) -> FixedPeers | Admission:
    """Meet the other hosts; return the table of all, this host's number in it, and the connections
    to the others.

    Where a job that survives losses runs already, gives this host's place in it.

    Raises `PlaceError`, `SecretError`, `Mismatch`, or `DeadlineExceeded` when not all came in time.
    """
    end = time.monotonic() + meeting.deadline
    own = _own(meeting)
    if (again := _attend_again(meeting, end)) is not None:
        return again
    nap, reminder = meeting.timings.rendezvous.shortest_retry, meeting.reminder()
    while True:
        listening = None if own is None else _listen(own, meeting)
        if listening is not None:
            with listening:
                outcome = _Listener(meeting, listening, end).gather()
                return outcome if isinstance(outcome, FixedPeers) else seek(outcome, meeting)
        if meeting.links is not None:
            # another launcher of this machine listens: all meet there
            _leave(meeting.links, meeting.timings.channel.flush)
        called = _call(
            (own or network.resolve(meeting.point[0])[0], meeting.point[1]), meeting, end
        )
        if isinstance(called, Channel):
            return _attend(meeting, called, end)
        if time.monotonic() + nap >= end:
            raise DeadlineExceeded(
                f"the meeting point {meeting.where} could not be reached from {meeting.offer.name} "
                f"within {meeting.deadline:g} s "
                f"({called.strerror or called}): no host that owns this address has started "
                f"`paceline run --join {meeting.where}`, or a firewall is between"
            )
        reminder.turn(partial(_unanswered, meeting, called))
        time.sleep(nap)
        nap = min(2 * nap, meeting.timings.rendezvous.longest_retry)


def _attend_again(meeting: Meeting, end: float) -> FixedPeers | Admission | None:
    """Take part through the connection that is left of the start before; None where there is
    none, or the other launcher is gone.
    """
    links = meeting.links
    channel = (
        None
        if links is None or links.host == links.server
        else links.channels.pop(links.server, None)
    )
    if channel is None:
        return None
    try:
        return _attend(meeting, channel, end)
    except DeadlineExceeded as error:
        if isinstance(error.__cause__, ChannelBroken) and time.monotonic() < end:
            return None  # it didn't give up itself
        raise


def _leave(links: Links, seconds: float) -> None:
    """Hang up.

    If one of the others was asked to end the job, tell the rest within so many `seconds`, and raise
    its `JobStopped`.
    """
    try:
        for channel in links.channels.values():
            for message in _heard(channel) or ():
                _stop_with(message)
    except JobStopped as stop:
        links.stop(stop, seconds)
        raise
    links.close()


def _unanswered(meeting: Meeting, error: OSError) -> str:
    why = error.strerror or error
    return (
        f"nobody answers at {meeting.where} yet ({why}); on the host with that address, run: "
        f"{meeting.command}"
    )


def seek(points: Sequence[tuple[str, int]], meeting: Meeting) -> Admission:
    """Get a place in a job that runs, from any of its launchers at these points.

    Raises as `assemble` does.
    """
    end = time.monotonic() + meeting.deadline
    nap = meeting.timings.rendezvous.shortest_retry
    while time.monotonic() < end:
        for point in points:
            try:
                called = _call(point, meeting, end)
                admission = _attend(meeting, called, end) if isinstance(called, Channel) else None
            except DeadlineExceeded:
                continue  # it hung up, as those do that have been cut off themselves
            if isinstance(admission, Admission):
                return admission
        time.sleep(min(nap, max(0.0, end - time.monotonic())))
        nap = min(2 * nap, meeting.timings.rendezvous.longest_retry)
    where = ", ".join(f"{address}:{port}" for address, port in points)
    raise DeadlineExceeded(
        f"none of the job's launchers ({where}) took {meeting.offer.name} in within "
        f"{meeting.deadline:g} s"
    )


def _own(meeting: Meeting) -> str | None:
    """Return the address to listen on, if the meeting point is on this machine."""
    host = meeting.point[0]
    mine = [address for address in network.resolve(host) if network.local(address)]
    if not mine:
        return None
    if network.loopback(mine[0]) and not network.literal(host):
        # On this machine its own name means loopback (a line in /etc/hosts): the others would never
        # get here.
        if network.loopback(meeting.offer.address):
            raise PlaceError(
                f"on {meeting.offer.name} the name {host} means {mine[0]}, which other hosts can't "
                f"reach: {network.advice()}"
            )
        return meeting.offer.address
    return mine[0]


def _listen(address: str, meeting: Meeting) -> socket.socket | None:
    """Listen at the meeting point, unless another process already does."""
    try:
        return network.listen(address, meeting.point[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise PlaceError(
            f"can't listen on {address}:{meeting.point[1]} ({error.strerror}): "
            "choose another port for --join"
        ) from error


def _call(point: tuple[str, int], meeting: Meeting, end: float) -> Channel | OSError:
    try:
        connection = socket.create_connection(
            point, timeout=max(0.1, min(meeting.timings.rendezvous.connect, end - time.monotonic()))
        )
        return call(
            connection, meeting.secret, f"{point[0]}:{point[1]}", meeting.timings.channel.hello
        )
    except OSError as error:
        return error


def _attend(meeting: Meeting, channel: Channel, end: float) -> FixedPeers | Admission:
    """Take part as a host that called: offer, wait for the table, or for a place in a job that
    runs already.
    """
    reminder, late = meeting.reminder(), end + meeting.timings.rendezvous.verdict
    restarts = None if meeting.restarts is None else meeting.restarts.dump()
    terms = {
        "offer": asdict(meeting.offer),
        "hosts": meeting.hosts,
        "host_rank": meeting.host_rank,
        "restarts": restarts,
    }
    try:
        channel.send({"kind": "offer", **terms})
        # The one that listens gives up first, and says why.
        answer = channel.wait(
            late,
            lambda: reminder.turn(
                lambda: f"has come to {meeting.where}, and waits there for the other hosts"
            ),
        )
    except JobStopped as stop:
        channel.send(stop.dump())
        channel.flush(meeting.timings.channel.flush)
        channel.close()
        raise
    except ChannelBroken as error:
        channel.close()
        raise DeadlineExceeded(
            f"the launcher at {meeting.where} left before all "
            f"{meeting.hosts} hosts had come ({error})"
        ) from error
    try:
        return _placed(meeting, channel, answer)
    except SENSELESS as error:
        channel.close()
        if isinstance(error, PacelineError):
            raise
        raise PlaceError(
            f"the launcher at {meeting.where} answers with what makes no sense here "
            f"({type(error).__name__}: {error}): install the same version of paceline on all hosts"
        ) from error


def _placed(meeting: Meeting, channel: Channel, answer: dict[str, Any]) -> FixedPeers | Admission:
    """Interpret the answer to an offer; if it makes no sense, raise one of `channel.SENSELESS`."""
    if answer.get("kind") == "refused":
        raise _KINDS.get(str(answer.get("error")), PlaceError)(str(answer.get("why")))
    if answer.get("kind") == "stopped":
        raise JobStopped(*said_stopped(answer))
    if answer.get("kind") == "begin":
        table, mine, server = (
            tuple(Offer.load(offer) for offer in answer["table"]),
            answer["host_rank"],
            answer["server"],
        )
        if {mine, server} - {*range(len(table))} or table[mine] != meeting.offer:
            raise ValueError("this host is not in the table")
        state = None if answer.get("restarts") is None else RestartState.load(answer["restarts"])
        return FixedPeers(
            table, mine, {server: channel}, server=server, state=state, timings=meeting.timings
        )
    channel.close()
    if answer.get("kind") == "invitation":
        return seek(_points(answer), meeting)
    return Admission(View.load(answer["view"]), int(answer["host"]), str(answer["run"]))


def _points(message: dict[str, Any]) -> list[tuple[str, int]]:
    return [(str(address), int(port)) for address, port in message["points"]]


_KINDS: dict[str, type[PacelineError]] = {
    kind.__name__: kind for kind in (PlaceError, SecretError, Mismatch, DeadlineExceeded)
}


class _Newcomer(NamedTuple):
    """A host that has come: its connection, what it brings, the number that it wishes for, and
    what it knows of restarts.
    """

    channel: Channel
    offer: Offer
    wish: int | None
    restarts: RestartState | None


class _Listener:
    """The host that listens, until all have come."""

    def __init__(self, meeting: Meeting, listening: socket.socket, end: float) -> None:
        self._meeting, self._listening, self._end = meeting, listening, end
        self._timings = meeting.timings
        self._handshakes, self._reminder = (
            Handshakes(meeting.secret, meeting.say, timings=self._timings.channel),
            meeting.reminder(),
        )
        self._newcomers: list[_Newcomer] = []
        # that have not come yet
        self._known: list[Channel] = (
            [] if meeting.links is None else [*meeting.links.channels.values()]
        )
        self._invited: list[tuple[str, int]] = []  # to a job that runs already
        elastic = meeting.hosts == 1 and bool(meeting.offer.numbers)
        # A job that doesn't wait for others begins then.
        self._alone = time.monotonic() + (self._timings.rendezvous.invitation if elastic else 0.0)
        listening.setblocking(False)

    def gather(self) -> FixedPeers | list[tuple[str, int]]:
        """Wait for all hosts, and tell each its place; when that fails, tell all that came why.

        Returns the points of a job that runs already, where its launchers have called.
        """
        try:
            while (
                len(self._newcomers) < self._meeting.hosts - 1 or time.monotonic() < self._alone
            ) and not self._invited:
                self._turn()
            if not self._invited:
                return self._assign_numbers()
            self._dismiss(
                [newcomer.channel for newcomer in self._newcomers],
                {"kind": "invitation", "points": self._invited},
            )
            return self._invited
        except (PacelineError, JobStopped) as error:
            refusal = {"kind": "refused", "error": type(error).__name__, "why": str(error)}
            came = [newcomer.channel for newcomer in self._newcomers]
            self._dismiss(
                [*came, *self._known, *self._handshakes.trusted()],
                error.dump() if isinstance(error, JobStopped) else refusal,
            )
            raise
        finally:
            self._handshakes.close()

    def _dismiss(self, channels: Sequence[Channel], message: dict[str, Any]) -> None:
        for channel in channels:
            channel.send(message)
            channel.flush(self._timings.channel.flush)
            channel.close()

    def _turn(self) -> None:
        now = time.monotonic()
        if now > self._end:
            raise self._incomplete()
        newcomers = [
            *(newcomer.channel.fileno() for newcomer in self._newcomers),
            *(channel.fileno() for channel in self._known),
        ]
        descriptors = ready(
            [self._listening.fileno(), *self._handshakes.descriptors(), *newcomers],
            min(self._timings.channel.look, self._end - now),
        )
        for descriptor in descriptors & {*self._handshakes.descriptors()}:
            if (came := self._handshakes.hear(descriptor)) is not None:
                self._receive(*came)
        for newcomer in [
            newcomer for newcomer in self._newcomers if newcomer.channel.fileno() in descriptors
        ]:
            if (messages := _heard(newcomer.channel)) is None:  # it gave up, and may come back
                newcomer.channel.close()
                self._newcomers.remove(newcomer)
            for message in messages or ():
                _stop_with(message)
        for channel in [channel for channel in self._known if channel.fileno() in descriptors]:
            self._hear_known(channel)
        if self._listening.fileno() in descriptors:
            self._handshakes.let_in(self._listening)
        self._handshakes.tick(now)
        if self._meeting.hosts > 1:
            self._reminder.turn(self._awaited)

    def _hear_known(self, channel: Channel) -> None:
        """Hear a launcher that is connected since the start before, and has not come to this one
        yet.
        """
        messages = _heard(channel)
        if messages is None:  # it is gone: another one may come in its place
            self._known.remove(channel)
            channel.close()
        for message in messages or ():
            if message.get("kind") == "offer" and channel in self._known:
                self._known.remove(channel)
                self._receive(channel, message)
            else:
                _stop_with(message)

    def _awaited(self) -> str:
        """Return the missing hosts, in words."""
        here = ", ".join(
            [self._meeting.offer.name, *(newcomer.offer.name for newcomer in self._newcomers)]
        )
        left = counted(self._meeting.hosts - 1 - len(self._newcomers), "host")
        return (
            f"waits at {self._meeting.where} for {left} more, {self._end - time.monotonic():.0f} s "
            f"at most (here: {here}); there, run: {self._meeting.command}"
        )

    def _receive(self, channel: Channel, message: dict[str, Any]) -> None:
        """Handle a message of a launcher that has the secret; hang up if it makes no sense."""
        try:
            if message.get("kind") == "offer":
                restarts = (
                    None
                    if message.get("restarts") is None
                    else RestartState.load(message["restarts"])
                )
                self._take(
                    _Newcomer(
                        channel, Offer.load(message["offer"]), message["host_rank"], restarts
                    ),
                    message["hosts"],
                )
                return
            if message.get("kind") == "invitation" and self._meeting.offer.numbers:
                self._invited = _points(message)
        except SENSELESS:
            pass
        channel.close()

    def _take(self, newcomer: _Newcomer, hosts: Any) -> None:
        """Let a host take part. Raises `Mismatch` if it was started otherwise."""
        offer, wish, meeting = newcomer.offer, newcomer.wish, self._meeting
        if type(hosts) is not int or type(wish) not in (int, type(None)):
            raise TypeError("numbers of hosts are whole")
        self._newcomers.append(newcomer)
        if hosts != self._meeting.hosts:
            raise Mismatch(
                f"{offer.name} was started with --hosts {hosts}, "
                f"and {self._meeting.offer.name} with "
                f"--hosts {self._meeting.hosts}: use the same command on all hosts"
            )
        if wish is not None and not 0 <= wish < hosts:
            raise Mismatch(
                f"{offer.name} was started with --host-rank {wish}, and --hosts {hosts} leaves 0 "
                f"to {hosts - 1}"
            )
        theirs, ours = offer.placement, self._meeting.offer.placement
        if theirs != ours:
            raise Mismatch(
                f"{offer.name} was started with --placement {theirs}, and "
                f"{self._meeting.offer.name} with "
                f"--placement {ours}: use the same command on all hosts"
            )
        restarts, wanted = (
            0 if state is None else state.allowed for state in (newcomer.restarts, meeting.restarts)
        )
        if restarts != wanted:
            raise Mismatch(
                f"{offer.name} was started with --restarts {restarts}, and {meeting.offer.name} "
                f"with --restarts {wanted}: without --min-workers they are those of the whole job, "
                "so use the same command on all hosts"
            )

    def _assign_numbers(self) -> FixedPeers:
        """Assign the wished numbers as wished; the others in the order of coming, this host
        first.
        """
        everyone = [
            (None, self._meeting.offer, self._meeting.host_rank),
            *(newcomer[:3] for newcomer in self._newcomers),
        ]
        wishes = [wish for _, _, wish in everyone if wish is not None]
        if len(set(wishes)) < len(wishes):
            double = next(wish for wish in wishes if wishes.count(wish) > 1)
            names = " and ".join(offer.name for _, offer, wish in everyone if wish == double)
            raise Mismatch(
                f"{names} both say --host-rank {double}: give each host its own, or leave it out"
            )
        free = iter([host_rank for host_rank in range(len(everyone)) if host_rank not in wishes])
        places = [next(free) if wish is None else wish for _, _, wish in everyone]
        seats = sorted(zip(places, everyone, strict=True), key=lambda seat: seat[0])
        table = tuple(offer for _, (_, offer, _) in seats)
        if len({offer.machine for offer in table}) > 1:
            lost = [offer.name for offer in table if network.loopback(offer.address)]
            if lost:
                raise PlaceError(
                    f"{lost[0]} comes from a loopback address, which other hosts can't reach: "
                    f"{network.advice()}"
                )
        channels = {
            host_rank: channel for host_rank, (channel, _, _) in seats if channel is not None
        }
        known = [
            state
            for state in (
                self._meeting.restarts,
                *(newcomer.restarts for newcomer in self._newcomers),
            )
            if state is not None
        ]
        latest = max(known, key=lambda state: state.progress, default=None)
        begin = {"kind": "begin", "table": [asdict(offer) for offer in table], "server": places[0]}
        for host_rank, channel in channels.items():
            channel.send(
                {
                    **begin,
                    "host_rank": host_rank,
                    "restarts": None if latest is None else latest.dump(),
                }
            )
        for channel in self._known:
            channel.close()  # others have come in the place of these
        return FixedPeers(
            table,
            places[0],
            channels,
            server=places[0],
            state=latest,
            timings=self._meeting.timings,
        )

    def _incomplete(self) -> DeadlineExceeded:
        meeting = self._meeting
        came = ", ".join(
            [meeting.offer.name, *(newcomer.offer.name for newcomer in self._newcomers)]
        )
        hint = f". {self._handshakes.wrong}" if self._handshakes.wrong else ""
        if network.literal(meeting.point[0]):
            hint += (
                f". {meeting.point[0]} is loopback, which no other machine reaches: "
                "give --join an address of this one"
            )
        return DeadlineExceeded(
            f"{1 + len(self._newcomers)} of {meeting.hosts} hosts came to {meeting.where} within "
            f"{meeting.deadline:g} s ({came}): "
            f"start the same command on the others, or look at their output{hint}"
        )


def _heard(channel: Channel) -> list[dict[str, Any]] | None:
    """Return the messages of a launcher that have come; None if it is gone and has said nothing
    before.
    """
    messages: list[dict[str, Any]] = []
    try:
        while (message := channel.hear()) is not None:
            messages.append(message)
    except ChannelBroken:
        return messages or None  # it is heard of again
    return messages


def _stop_with(message: dict[str, Any]) -> None:
    """Raise `JobStopped` if this says that a launcher was asked to end the job."""
    if message.get("kind") == "stopped":
        try:
            stop = JobStopped(*said_stopped(message))
        except SENSELESS:
            return
        raise stop
