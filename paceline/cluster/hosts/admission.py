"""Admits new hosts to a running job.

Any launcher of the job takes a host in, once all have agreed on a view that includes it:

    new host               a launcher of the job
      offer        ->        waits until the run can be joined, and a view with the host is decided
                   <-        running: that view, the host's number in it, and the run
      host n       ->        this launcher and all others, as at the start of a job

Each launcher listens at a port of its own. It also listens at the job's meeting point if that
address is its own, so the command that started the job can also join it later. If the host of the
meeting point is gone, new hosts may wait there for each other: the launcher that leads looks there
now and then, and invites them.
"""

from __future__ import annotations

import contextlib
import secrets as random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.cluster import network
from paceline.cluster.hosts.channel import Channel, ChannelBroken, introduce_launcher, wait_ready
from paceline.cluster.hosts.handshake import Handshakes
from paceline.cluster.hosts.membership import View
from paceline.errors import PacelineError
from paceline.timings import DEFAULT_TIMINGS, ChannelTimings, MembershipTimings, Timings

Point = tuple[str, int]  # address and port


class MeetingPoint:
    """The sockets on which a launcher accepts calls.

    Args:
        listening: Socket of its own port.
        secret: Secret of the job.
        point: The job's meeting point. Default: none, so only this launcher's own port is open.
        timings: Waits of channels and of membership.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: bytes,
        point: Point | None = None,
        *,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> None:
        self._sockets, self._point = [listening], point
        own_addresses = (
            []
            if point is None
            else [
                *filter(network.is_own_address, network.resolve_host(point[0])),
                listening.getsockname()[0],
            ]
        )
        # Names are looked up once, as that may take long when a network is cut.
        self._addresses = list(dict.fromkeys(own_addresses))
        self._handshakes = Handshakes(secret, timings=timings.channel)
        self._timings = timings.membership
        self._listening_tried_at = 0.0
        self._inviter = (
            None if point is None else Inviter(point, secret, timings=timings.membership)
        )
        listening.setblocking(False)

    def list_descriptors(self) -> list[int]:
        return [*(each.fileno() for each in self._sockets), *self._handshakes.list_descriptors()]

    def receive_first_message(self, descriptor: int) -> tuple[Channel, dict[str, Any]] | None:
        """Accept a connection, or read on from a caller.

        Returns:
            A channel and its first message, once its caller has proved that it knows the secret.
        """
        for listening in self._sockets:
            if listening.fileno() == descriptor:
                self._handshakes.accept_callers(listening)
        return self._handshakes.receive_first_message(descriptor)

    def run_timers(self, now: float) -> None:
        """Drop slow callers, and listen at the meeting point as soon as that is possible."""
        self._handshakes.drop_late_callers(now)
        if (
            self._point is None
            or len(self._sockets) > 1
            or now - self._listening_tried_at < self._timings.visit
        ):
            return
        self._listening_tried_at = now
        for address in self._addresses:
            # The address isn't on this machine any more, or another process listens there.
            with contextlib.suppress(OSError):
                self._sockets.append(network.open_listener(address, self._point[1]))
                self._sockets[-1].setblocking(False)
                return

    def invite_hosts(self, view: View, now: float) -> None:
        """Invite hosts that wait at the meeting point, unless a host of the job listens there."""
        own_addresses = [listening.getsockname()[0] for listening in self._sockets[1:]]
        other_addresses = [
            seat.facts["address"]
            for seat in view.seats
            if seat.facts["address"] not in self._addresses
        ]
        if self._inviter is not None:
            self._inviter.visit_meeting_point(view, now, taken=[*own_addresses, *other_addresses])

    def close(self) -> None:
        """Stop accepting calls."""
        self._handshakes.close()
        for listening in self._sockets:
            listening.close()
        self._sockets = []


@dataclass
class _JoiningHost:
    """A host that wants to take part, and isn't a member yet."""

    channel: Channel
    facts: dict[str, Any]
    is_proposed: bool = False


class JoiningHosts:
    """The hosts that wait here to be taken in.

    Each has a random word, by which a view names it before it has a number.
    """

    def __init__(self, *, timings: ChannelTimings = DEFAULT_TIMINGS.channel) -> None:
        self._host_by_word: dict[str, _JoiningHost] = {}
        self._timings = timings

    def list_descriptors(self) -> list[int]:
        """List the descriptors on which they may hang up."""
        return [host.channel.fileno() for host in self._host_by_word.values()]

    def add_host(self, channel: Channel, facts: dict[str, Any]) -> None:
        """Let a host wait."""
        self._host_by_word[random.token_hex(8)] = _JoiningHost(channel, facts)

    def drop_hung_up(self, descriptor: int) -> None:
        """Drop the host of this descriptor if it has hung up. It has nothing else to say."""
        word = next(
            word for word, host in self._host_by_word.items() if host.channel.fileno() == descriptor
        )
        try:
            self._host_by_word[word].channel.receive_message()
        except ChannelBroken:
            self._host_by_word.pop(word).channel.close()

    def take_unproposed(self) -> list[tuple[str, dict[str, Any]]]:
        """Take the words and facts of the hosts that have not been proposed yet, once each."""
        unproposed = [
            (word, host) for word, host in self._host_by_word.items() if not host.is_proposed
        ]
        for _, host in unproposed:
            host.is_proposed = True
        return [(word, host.facts) for word, host in unproposed]

    def admit_hosts(self, view: View, run: str | None) -> None:
        """Tell the hosts that this view has taken in.

        They hang up, and call all launchers as members.
        """
        for seat in view.seats:
            if (host := self._host_by_word.pop(seat.facts.get("word", ""), None)) is not None:
                host.channel.send(
                    {"kind": "running", "view": view.dump(), "host": seat.host, "run": run}
                )
                host.channel.flush(self._timings.flush)
                host.channel.close()

    def refuse_all(self) -> None:
        """Refuse all of them."""
        for host in self._host_by_word.values():
            refuse_launcher(
                host.channel, "the job that runs there is at its end", self._timings.flush
            )
        self._host_by_word.clear()


def refuse_launcher(channel: Channel, reason: str, seconds: float) -> None:
    """Tell a launcher why it can't take part, for at most `seconds`, and hang up."""
    channel.send({"kind": "refused", "error": "PlaceError", "why": reason})
    channel.flush(seconds)
    channel.close()


class Inviter:
    """Tells new hosts at the meeting point where the launchers of the job are.

    It connects in one turn and looks at the outcome in a later one, so it never blocks for longer
    than a second.
    """

    def __init__(self, point: Point, secret: bytes, *, timings: MembershipTimings) -> None:
        self._point, self._secret, self._timings = point, secret, timings
        self._address = network.resolve_host(point[0])[0]
        self._connection: socket.socket | None = None
        self._visited_at = 0.0

    def visit_meeting_point(self, view: View, now: float, *, taken: Sequence[str]) -> None:
        """Look for a new host at the meeting point, unless that is one of the `taken` addresses."""
        if now - self._visited_at < self._timings.visit:
            return
        self._visited_at = now
        if self._connection is not None:
            self._send_invitation(
                self._connection,
                [(str(seat.facts["address"]), int(seat.facts["port"])) for seat in view.seats],
            )
            self._connection = None
        elif self._address not in taken:
            self._connection = socket.socket(
                network.address_family(self._address), socket.SOCK_STREAM
            )
            self._connection.setblocking(False)
            # The outcome is looked at in the next turn.
            self._connection.connect_ex((self._address, self._point[1]))

    def _send_invitation(self, connection: socket.socket, points: Sequence[Point]) -> None:
        """Send these points to the other side, if it is a launcher of the job that waits."""
        with connection:
            is_connected = bool(
                wait_ready((), 0.0, writing=[connection.fileno()])
            ) and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            # The other side may be no launcher, or one of another job.
            with contextlib.suppress(PacelineError, OSError):
                if is_connected:
                    channel = introduce_launcher(
                        connection,
                        self._secret,
                        f"{self._point[0]}:{self._point[1]}",
                        self._timings.visited,
                    )
                    channel.send({"kind": "invitation", "points": points})
                    channel.flush(self._timings.visited)
