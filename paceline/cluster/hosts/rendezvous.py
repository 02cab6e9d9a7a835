"""Rendezvous: how the launchers of several hosts meet and agree on ranks.

    host A, which owns HOST    listens at HOST:PORT
    host B                     calls it:    offer     ->
    host C                     calls it:    offer     ->
                                            <- begin: the offers of all hosts, and the number of
                                               the host among them

All are given the same HOST:PORT. The first launcher on the machine that owns HOST listens there.
All others call it, also later ones on the same machine. The connections stay open until the job is
over, so when one host ends all others notice, and name it.
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
from paceline.cluster.hosts.channel import (
    MALFORMED,
    Channel,
    ChannelBroken,
    introduce_launcher,
    wait_ready,
)
from paceline.cluster.hosts.fixed import FixedPeers
from paceline.cluster.hosts.handshake import Handshakes
from paceline.cluster.hosts.membership import View
from paceline.cluster.hosts.peers import Offer, read_stop_message
from paceline.cluster.hosts.restart_messages import JobStopped, Links, RestartState
from paceline.cluster.launcher.hints import WaitReminder
from paceline.errors import DeadlineExceeded, Mismatch, PacelineError, PlaceError, SecretError
from paceline.formatting import format_count
from paceline.timings import DEFAULT_TIMINGS, Timings


def _print_message(text: str) -> None:
    print(f"paceline: {text}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Meeting:
    """The terms of a rendezvous: what this host brings, and how many hosts it waits for.

    Args:
        point: Address and port of the meeting point.
        secret: Secret of the job.
        offer: Offer of this host.
        hosts: Number of hosts that meet.
        host_rank: Number that this host wishes for; None for any.
        deadline: Seconds to wait for the other hosts.
        command: Command that starts the job on another host, for messages.
        say: Called with messages that a user should see and that end nothing.
        timings: Waits and deadlines.
        restarts: How far the restarts of the job have come, as this host knows, if it may start
            again.
        links: Connections left from the start before. Launchers at their other ends needn't call,
            and a signal that ends one launcher meanwhile ends all.
    """

    point: tuple[str, int]
    secret: bytes
    offer: Offer
    hosts: int
    host_rank: int | None
    deadline: float
    command: str = "the same command"
    say: Callable[[str], None] = _print_message
    timings: Timings = DEFAULT_TIMINGS
    restarts: RestartState | None = None
    links: Links | None = None

    @property
    def point_text(self) -> str:
        """The meeting point, for messages."""
        return f"{self.point[0]}:{self.point[1]}"

    def make_reminder(self) -> WaitReminder:
        """Make a reminder for a wait of this rendezvous."""
        return WaitReminder(self.say, timings=self.timings.rendezvous)


@dataclass(frozen=True)
class Admission:
    """The place of a host in a running job: the view that has it, its number, and the run."""

    view: View
    host: int
    run: str


def assemble_hosts(meeting: Meeting) -> FixedPeers | Admission:
    """Meet the other hosts, and agree on ranks.

    Returns:
        The connections to the other launchers, with the offers of all hosts and this host's number.
        If an elastic job already runs there, this host's place in it.

    Raises:
        PlaceError: This host, or one that called, can't take part.
        SecretError: The other side has another secret.
        Mismatch: Hosts were started with different options.
        DeadlineExceeded: Not all hosts came in time.
    """
    end = time.monotonic() + meeting.deadline
    own_address = _find_own_address(meeting)
    if (peers := _attend_by_link(meeting, end)) is not None:
        return peers
    retry_seconds, reminder = meeting.timings.rendezvous.shortest_retry, meeting.make_reminder()
    # Until it succeeds, this host tries in turn to listen at the meeting point and to call it: the
    # host that listens may come later, or may have gone.
    while True:
        listening = None if own_address is None else _listen_at_point(own_address, meeting)
        if listening is not None:
            with listening:
                outcome = _MeetingListener(meeting, listening, end).gather_hosts()
                return (
                    outcome if isinstance(outcome, FixedPeers) else seek_admission(outcome, meeting)
                )
        if meeting.links is not None:
            # Another launcher on this machine listens, so all meet there.
            _close_links(meeting.links, meeting.timings.channel.flush)
        channel_or_error = _call_launcher(
            (own_address or network.resolve_host(meeting.point[0])[0], meeting.point[1]),
            meeting,
            end,
        )
        if isinstance(channel_or_error, Channel):
            return _attend_meeting(meeting, channel_or_error, end)
        if time.monotonic() + retry_seconds >= end:
            raise DeadlineExceeded(
                f"the meeting point {meeting.point_text} could not be reached from "
                f"{meeting.offer.name} "
                f"within {meeting.deadline:g} s "
                f"({channel_or_error.strerror or channel_or_error}): "
                "no host that owns this address has started "
                f"`paceline run --join {meeting.point_text}`, or a firewall is between"
            )
        reminder.remind_if_due(partial(_describe_unanswered, meeting, channel_or_error))
        time.sleep(retry_seconds)
        retry_seconds = min(2 * retry_seconds, meeting.timings.rendezvous.longest_retry)


def _attend_by_link(meeting: Meeting, end: float) -> FixedPeers | Admission | None:
    """Take part through the connection that is left from the start before.

    None if there is none, or if the launcher at its other end is gone.
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
        return _attend_meeting(meeting, channel, end)
    except DeadlineExceeded as error:
        if isinstance(error.__cause__, ChannelBroken) and time.monotonic() < end:
            return None  # the other launcher is gone: it didn't just give up
        raise


def _close_links(links: Links, seconds: float) -> None:
    """Close the connections that are left from the start before.

    If one of the other launchers was asked to end the job, tell the rest for at most `seconds`, and
    raise its `JobStopped`.
    """
    try:
        for channel in links.channels.values():
            for message in _read_messages(channel) or ():
                _raise_if_stopped(message)
    except JobStopped as stop:
        links.stop_job(stop, seconds)
        raise
    links.close()


def _describe_unanswered(meeting: Meeting, error: OSError) -> str:
    """The reminder that the meeting point doesn't answer yet."""
    reason = error.strerror or error
    return (
        f"nobody answers at {meeting.point_text} yet ({reason}); on the host with that address, "
        "run: "
        f"{meeting.command}"
    )


def seek_admission(points: Sequence[tuple[str, int]], meeting: Meeting) -> Admission:
    """Get a place in a running job from any of its launchers, which are called at these points.

    Raises the same errors as `assemble_hosts`.
    """
    end = time.monotonic() + meeting.deadline
    retry_seconds = meeting.timings.rendezvous.shortest_retry
    while time.monotonic() < end:
        for point in points:
            try:
                channel_or_error = _call_launcher(point, meeting, end)
                admission = (
                    _attend_meeting(meeting, channel_or_error, end)
                    if isinstance(channel_or_error, Channel)
                    else None
                )
            except DeadlineExceeded:
                continue  # it hung up: it may have been cut off from the job itself
            if isinstance(admission, Admission):
                return admission
        time.sleep(min(retry_seconds, max(0.0, end - time.monotonic())))
        retry_seconds = min(2 * retry_seconds, meeting.timings.rendezvous.longest_retry)
    where = ", ".join(f"{address}:{port}" for address, port in points)
    raise DeadlineExceeded(
        f"none of the job's launchers ({where}) took {meeting.offer.name} in within "
        f"{meeting.deadline:g} s"
    )


def _find_own_address(meeting: Meeting) -> str | None:
    """The address to listen on, if the meeting point is on this machine; else None."""
    host = meeting.point[0]
    own_addresses = [
        address for address in network.resolve_host(host) if network.is_own_address(address)
    ]
    if not own_addresses:
        return None
    if network.is_loopback(own_addresses[0]) and not network.is_written_as_local(host):
        # A line in /etc/hosts maps the machine's own name to loopback, which other hosts can't
        # reach. So this listens on the address from which this host reaches the others.
        if network.is_loopback(meeting.offer.address):
            raise PlaceError(
                f"on {meeting.offer.name} the name {host} means {own_addresses[0]}, "
                f"which other hosts can't reach: {network.format_interface_advice()}"
            )
        return meeting.offer.address
    return own_addresses[0]


def _listen_at_point(address: str, meeting: Meeting) -> socket.socket | None:
    """Listen at the meeting point, unless another process already does."""
    try:
        return network.open_listener(address, meeting.point[1])
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return None
        raise PlaceError(
            f"can't listen on {address}:{meeting.point[1]} ({error.strerror}): "
            "choose another port for --join"
        ) from error


def _call_launcher(point: tuple[str, int], meeting: Meeting, end: float) -> Channel | OSError:
    """Call a launcher at this point. Returns the channel, or the error of the network."""
    try:
        connection = socket.create_connection(
            point, timeout=max(0.1, min(meeting.timings.rendezvous.connect, end - time.monotonic()))
        )
        return introduce_launcher(
            connection, meeting.secret, f"{point[0]}:{point[1]}", meeting.timings.channel.hello
        )
    except OSError as error:
        return error


def _attend_meeting(meeting: Meeting, channel: Channel, end: float) -> FixedPeers | Admission:
    """Send this host's offer to the launcher that listens, and wait for its answer."""
    # Hosts may come minutes apart, so the user is reminded of the wait.
    reminder, answer_deadline = meeting.make_reminder(), end + meeting.timings.rendezvous.verdict
    restarts = None if meeting.restarts is None else meeting.restarts.dump()
    terms = {
        "offer": asdict(meeting.offer),
        "hosts": meeting.hosts,
        "host_rank": meeting.host_rank,
        "restarts": restarts,
    }
    try:
        channel.send({"kind": "offer", **terms})
        # This waits longer than the launcher that listens, which gives up first and says why.
        answer = channel.wait_for_message(
            answer_deadline,
            lambda: reminder.remind_if_due(
                lambda: f"has come to {meeting.point_text}, and waits there for the other hosts"
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
            f"the launcher at {meeting.point_text} left before all "
            f"{meeting.hosts} hosts had come ({error})"
        ) from error
    try:
        return _interpret_answer(meeting, channel, answer)
    except MALFORMED as error:
        channel.close()
        if isinstance(error, PacelineError):
            raise
        raise PlaceError(
            f"the launcher at {meeting.point_text} answers with what makes no sense here "
            f"({type(error).__name__}: {error}): install the same version of paceline on all hosts"
        ) from error


def _interpret_answer(
    meeting: Meeting, channel: Channel, answer: dict[str, Any]
) -> FixedPeers | Admission:
    """Interpret the answer to an offer. Raises one of `channel.MALFORMED` if it is malformed."""
    if answer.get("kind") == "refused":
        raise _ERROR_TYPES.get(str(answer.get("error")), PlaceError)(str(answer.get("why")))
    if answer.get("kind") == "stopped":
        raise JobStopped(*read_stop_message(answer))
    if answer.get("kind") == "begin":
        # The table must have this host's own offer at its number, else the answer isn't for it.
        offers = tuple(Offer.load(offer) for offer in answer["table"])
        host_rank, server = answer["host_rank"], answer["server"]
        if {host_rank, server} - {*range(len(offers))} or offers[host_rank] != meeting.offer:
            raise ValueError("this host is not in the table")
        state = None if answer.get("restarts") is None else RestartState.load(answer["restarts"])
        places = (offers, host_rank, {server: channel})
        return FixedPeers(*places, server=server, state=state, timings=meeting.timings)
    channel.close()
    if answer.get("kind") == "invitation":
        return seek_admission(_read_points(answer), meeting)
    return Admission(View.load(answer["view"]), int(answer["host"]), str(answer["run"]))


def _read_points(message: dict[str, Any]) -> list[tuple[str, int]]:
    return [(str(address), int(port)) for address, port in message["points"]]


_ERROR_TYPES: dict[str, type[PacelineError]] = {
    kind.__name__: kind for kind in (PlaceError, SecretError, Mismatch, DeadlineExceeded)
}


class _Newcomer(NamedTuple):
    """A host that has come.

    It has a connection, its offer, the number that it wishes for, and how far the restarts have
    come by its knowledge.
    """

    channel: Channel
    offer: Offer
    wished_number: int | None
    restarts: RestartState | None


class _MeetingListener:
    """The launcher that listens at the meeting point, until all hosts have come.

    Invariants: each connected launcher is in one of three places. `_handshakes` has those that
    haven't proved themselves yet. `_known_channels` has those from the start before that haven't
    sent a new offer. `_newcomers` has those with an offer. `_invited_points` is set once, by
    launchers of a running job, and ends the wait.
    """

    def __init__(self, meeting: Meeting, listening: socket.socket, end: float) -> None:
        self._meeting, self._listening, self._deadline = meeting, listening, end
        self._timings = meeting.timings
        self._handshakes, self._reminder = (
            Handshakes(meeting.secret, meeting.say, timings=self._timings.channel),
            meeting.make_reminder(),
        )
        self._newcomers: list[_Newcomer] = []
        # From the start before: they haven't sent a new offer yet.
        self._known_channels: list[Channel] = (
            [] if meeting.links is None else [*meeting.links.channels.values()]
        )
        self._invited_points: list[tuple[str, int]] = []
        elastic = meeting.hosts == 1 and bool(meeting.offer.numbers)
        # A job of one host could begin at once. But it may be meant to join a running job, so it
        # waits a moment for an invitation.
        self._alone_until = time.monotonic() + (
            self._timings.rendezvous.invitation if elastic else 0.0
        )
        listening.setblocking(False)

    def gather_hosts(self) -> FixedPeers | list[tuple[str, int]]:
        """Wait for all hosts, and tell each its place, or the reason if that fails.

        Returns:
            The connections; or the points of a running job, if its launchers have called.
        """
        try:
            while (
                len(self._newcomers) < self._meeting.hosts - 1
                or time.monotonic() < self._alone_until
            ) and not self._invited_points:
                self._handle_events()
            if not self._invited_points:
                return self._assign_numbers()
            self._dismiss_launchers(
                [newcomer.channel for newcomer in self._newcomers],
                {"kind": "invitation", "points": self._invited_points},
            )
            return self._invited_points
        except (PacelineError, JobStopped) as error:
            refusal = {"kind": "refused", "error": type(error).__name__, "why": str(error)}
            channels = [newcomer.channel for newcomer in self._newcomers]
            self._dismiss_launchers(
                [*channels, *self._known_channels, *self._handshakes.list_trusted_channels()],
                error.dump() if isinstance(error, JobStopped) else refusal,
            )
            raise
        finally:
            self._handshakes.close()

    def _dismiss_launchers(self, channels: Sequence[Channel], message: dict[str, Any]) -> None:
        """Send a last message on each channel, and close it."""
        for channel in channels:
            channel.send(message)
            channel.flush(self._timings.channel.flush)
            channel.close()

    def _handle_events(self) -> None:
        """Wait until something happens, and handle it."""
        now = time.monotonic()
        if now > self._deadline:
            raise self._make_deadline_error()
        channel_fds = [
            *(newcomer.channel.fileno() for newcomer in self._newcomers),
            *(channel.fileno() for channel in self._known_channels),
        ]
        descriptors = wait_ready(
            [self._listening.fileno(), *self._handshakes.list_descriptors(), *channel_fds],
            min(self._timings.channel.look, self._deadline - now),
        )
        for descriptor in descriptors & {*self._handshakes.list_descriptors()}:
            if (first_message := self._handshakes.receive_first_message(descriptor)) is not None:
                self._receive_message(*first_message)
        # A newcomer has nothing more to say, unless it gives up or was asked to end the job.
        for newcomer in [*self._newcomers]:
            if newcomer.channel.fileno() not in descriptors:
                continue
            messages = _read_messages(newcomer.channel)
            if messages is None:  # it gave up, and may come back
                newcomer.channel.close()
                self._newcomers.remove(newcomer)
            for message in messages or ():
                _raise_if_stopped(message)
        for channel in [
            channel for channel in self._known_channels if channel.fileno() in descriptors
        ]:
            self._read_known_channel(channel)
        if self._listening.fileno() in descriptors:
            self._handshakes.accept_callers(self._listening)
        self._handshakes.drop_late_callers(now)
        if self._meeting.hosts > 1:
            self._reminder.remind_if_due(self._describe_missing)

    def _read_known_channel(self, channel: Channel) -> None:
        """Read from a launcher that is connected since the start before.

        It becomes a newcomer when its offer comes.
        """
        messages = _read_messages(channel)
        if messages is None:  # it is gone: another one may come in its place
            self._known_channels.remove(channel)
            channel.close()
        for message in messages or ():
            if message.get("kind") == "offer" and channel in self._known_channels:
                self._known_channels.remove(channel)
                self._receive_message(channel, message)
            else:
                _raise_if_stopped(message)

    def _describe_missing(self) -> str:
        """The reminder of the hosts that are missing."""
        present = ", ".join(
            [self._meeting.offer.name, *(newcomer.offer.name for newcomer in self._newcomers)]
        )
        missing = format_count(self._meeting.hosts - 1 - len(self._newcomers), "host")
        return (
            f"waits at {self._meeting.point_text} for {missing} more, "
            f"{self._deadline - time.monotonic():.0f} s at most (here: {present}); "
            f"there, run: {self._meeting.command}"
        )

    def _receive_message(self, channel: Channel, message: dict[str, Any]) -> None:
        """Handle a message of a launcher that knows the secret. Hang up if it is malformed."""
        try:
            if message.get("kind") == "offer":
                dumped = message.get("restarts")
                restarts = None if dumped is None else RestartState.load(dumped)
                offer, wish = Offer.load(message["offer"]), message["host_rank"]
                self._take_in(_Newcomer(channel, offer, wish, restarts), message["hosts"])
                return
            if message.get("kind") == "invitation" and self._meeting.offer.numbers:
                self._invited_points = _read_points(message)
        except MALFORMED:
            pass
        channel.close()

    def _take_in(self, newcomer: _Newcomer, hosts: Any) -> None:
        """Let a host take part. Raises `Mismatch` if it was started with other options."""
        offer, wish, meeting = newcomer.offer, newcomer.wished_number, self._meeting
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
        other_placement, own_placement = offer.placement, self._meeting.offer.placement
        if other_placement != own_placement:
            raise Mismatch(
                f"{offer.name} was started with --placement {other_placement}, and "
                f"{self._meeting.offer.name} with "
                f"--placement {own_placement}: use the same command on all hosts"
            )
        other_restarts, own_restarts = (
            0 if state is None else state.allowed for state in (newcomer.restarts, meeting.restarts)
        )
        if other_restarts != own_restarts:
            raise Mismatch(
                f"{offer.name} was started with --restarts {other_restarts}, and "
                f"{meeting.offer.name} with --restarts {own_restarts}: without --min-workers they "
                "are those of the whole job, so use the same command on all hosts"
            )

    def _assign_numbers(self) -> FixedPeers:
        """Assign a number to each host, and tell each its number.

        Wishes come first. The other hosts get the free numbers in the order of arrival, this host
        before the others.
        """
        own_place = (None, self._meeting.offer, self._meeting.host_rank)
        hosts = [own_place, *(newcomer[:3] for newcomer in self._newcomers)]
        # Two hosts can't have the same number.
        wishes = [wish for _, _, wish in hosts if wish is not None]
        if len(set(wishes)) < len(wishes):
            contested = next(wish for wish in wishes if wishes.count(wish) > 1)
            names = " and ".join(offer.name for _, offer, wish in hosts if wish == contested)
            raise Mismatch(
                f"{names} both say --host-rank {contested}: give each host its own, or leave it out"
            )
        free_numbers = iter([number for number in range(len(hosts)) if number not in wishes])
        numbers = [next(free_numbers) if wish is None else wish for _, _, wish in hosts]
        seats = sorted(zip(numbers, hosts, strict=True), key=lambda seat: seat[0])
        offers = tuple(offer for _, (_, offer, _) in seats)
        _check_reachable(offers)
        channels = {
            host_rank: channel for host_rank, (channel, _, _) in seats if channel is not None
        }
        known_states = [newcomer.restarts for newcomer in self._newcomers]
        states = [state for state in (self._meeting.restarts, *known_states) if state is not None]
        # A host that joined later knows less of earlier restarts, so the furthest state counts.
        latest = max(states, key=lambda state: state.sort_key, default=None)
        begin = {
            "kind": "begin",
            "table": [asdict(offer) for offer in offers],
            "server": numbers[0],
            "restarts": None if latest is None else latest.dump(),
        }
        for host_rank, channel in channels.items():
            channel.send({**begin, "host_rank": host_rank})
        for channel in self._known_channels:
            channel.close()  # other hosts have come in the place of these
        places = (offers, numbers[0], channels)
        return FixedPeers(*places, server=numbers[0], state=latest, timings=self._meeting.timings)

    def _make_deadline_error(self) -> DeadlineExceeded:
        """The error for hosts that haven't come in time."""
        meeting = self._meeting
        present = ", ".join(
            [meeting.offer.name, *(newcomer.offer.name for newcomer in self._newcomers)]
        )
        hint = (
            f". {self._handshakes.last_secret_error}" if self._handshakes.last_secret_error else ""
        )
        if network.is_written_as_local(meeting.point[0]):
            hint += (
                f". {meeting.point[0]} is loopback, which no other machine reaches: "
                "give --join an address of this one"
            )
        return DeadlineExceeded(
            f"{1 + len(self._newcomers)} of {meeting.hosts} hosts came to {meeting.point_text} "
            "within "
            f"{meeting.deadline:g} s ({present}): "
            f"start the same command on the others, or look at their output{hint}"
        )


def _check_reachable(offers: Sequence[Offer]) -> None:
    """Raise `PlaceError` if hosts of several machines have met, and one has a loopback address."""
    if len({offer.machine for offer in offers}) == 1:
        return
    unreachable = [offer.name for offer in offers if network.is_loopback(offer.address)]
    if unreachable:
        raise PlaceError(
            f"{unreachable[0]} comes from a loopback address, which other hosts can't "
            f"reach: {network.format_interface_advice()}"
        )


def _read_messages(channel: Channel) -> list[dict[str, Any]] | None:
    """Read the messages that have come from a launcher; None if it is gone without a word."""
    messages: list[dict[str, Any]] = []
    try:
        while (message := channel.receive_message()) is not None:
            messages.append(message)
    except ChannelBroken:
        return messages or None  # the next call notices the end again
    return messages


def _raise_if_stopped(message: dict[str, Any]) -> None:
    """Raise `JobStopped` if this message tells that a launcher was asked to end the job."""
    if message.get("kind") == "stopped":
        try:
            stop = JobStopped(*read_stop_message(message))
        except MALFORMED:
            return
        raise stop
