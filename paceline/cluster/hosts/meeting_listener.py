"""The launcher that listens at the meeting point: it collects offers, and assigns numbers."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from paceline.cluster import network
from paceline.cluster.hosts.channel import MALFORMED, Channel, wait_ready
from paceline.cluster.hosts.fixed import FixedPeers
from paceline.cluster.hosts.handshake import Handshakes
from paceline.cluster.hosts.meeting import Meeting, raise_if_stopped, read_messages, read_points
from paceline.cluster.hosts.peers import Offer
from paceline.cluster.hosts.restart_messages import JobStopped, RestartState
from paceline.errors import DeadlineExceeded, Mismatch, PacelineError, PlaceError
from paceline.formatting import format_count


class _Newcomer(NamedTuple):
    """A host that has come.

    It has a connection, its offer, the number that it wishes for, and how far the restarts have
    come by its knowledge.
    """

    channel: Channel
    offer: Offer
    wished_number: int | None
    restarts: RestartState | None


class MeetingListener:
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
            messages = read_messages(newcomer.channel)
            if messages is None:  # it gave up, and may come back
                newcomer.channel.close()
                self._newcomers.remove(newcomer)
            for message in messages or ():
                raise_if_stopped(message)
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
        messages = read_messages(channel)
        if messages is None:  # it is gone: another one may come in its place
            self._known_channels.remove(channel)
            channel.close()
        for message in messages or ():
            if message.get("kind") == "offer" and channel in self._known_channels:
                self._known_channels.remove(channel)
                self._receive_message(channel, message)
            else:
                raise_if_stopped(message)

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
                self._invited_points = read_points(message)
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
