"""Admits a host to a running job: any launcher of the job takes it in, once all have agreed on a
view that includes it.

newcomer               a launcher of the job
  offer        ->        waits until the run can be joined, and a view with the newcomer is decided
               <-        running: that view, its number there, and the run
  host n       ->        this one and all others, as at the start

Launchers listen at a port of their own and, where its address is theirs, at the job's meeting
point: the command that started the job joins it later. When the host of the meeting point is gone,
newcomers may be waiting there for others: the launcher that leads looks now and then, and invites
them.
"""

from __future__ import annotations

import contextlib
import secrets as random
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.cluster import network
from paceline.cluster.hosts.channel import Channel, ChannelBroken, call, ready
from paceline.cluster.hosts.handshake import Handshakes
from paceline.cluster.hosts.membership import View
from paceline.errors import PacelineError
from paceline.timings import DEFAULTS, ChannelTimings, MembershipTimings, Timings

Point = tuple[str, int]


class MeetingPoint:
    """The sockets on which a launcher accepts calls.

    `listening`: its own port; `point`: the job's meeting point.
    """

    def __init__(
        self,
        listening: socket.socket,
        secret: bytes,
        point: Point | None = None,
        *,
        timings: Timings = DEFAULTS,
    ) -> None:
        self._sockets, self._point = [listening], point
        mine = (
            []
            if point is None
            else [*filter(network.local, network.resolve(point[0])), listening.getsockname()[0]]
        )
        # names are looked up once: that may take long when a network is cut
        self._addresses = list(dict.fromkeys(mine))
        self._handshakes = Handshakes(secret, timings=timings.channel)
        self._timings = timings.membership
        self._tried_at = 0.0
        self._inviting = (
            None if point is None else Inviter(point, secret, timings=timings.membership)
        )
        listening.setblocking(False)

    def descriptors(self) -> list[int]:
        return [*(each.fileno() for each in self._sockets), *self._handshakes.descriptors()]

    def hear(self, descriptor: int) -> tuple[Channel, dict[str, Any]] | None:
        """Accept a connection, or read a caller's first message, once the caller has proved to
        know the secret.
        """
        for listening in self._sockets:
            if listening.fileno() == descriptor:
                self._handshakes.let_in(listening)
        return self._handshakes.hear(descriptor)

    def tick(self, now: float) -> None:
        """Drop silent callers, and listen at the meeting point as soon as that is possible."""
        self._handshakes.tick(now)
        if (
            self._point is None
            or len(self._sockets) > 1
            or now - self._tried_at < self._timings.visit
        ):
            return
        self._tried_at = now
        for address in self._addresses:
            # a stranger's, or another launcher of this machine listens there
            with contextlib.suppress(OSError):
                self._sockets.append(network.listen(address, self._point[1]))
                self._sockets[-1].setblocking(False)
                return

    def invite(self, view: View, now: float) -> None:
        """Look for newcomers that wait at the meeting point, unless a host of the job listens
        there.
        """
        mine = [listening.getsockname()[0] for listening in self._sockets[1:]]
        others = [
            seat.facts["address"]
            for seat in view.seats
            if seat.facts["address"] not in self._addresses
        ]
        if self._inviting is not None:
            self._inviting.tick(view, now, taken=[*mine, *others])

    def close(self) -> None:
        """Stop accepting calls."""
        self._handshakes.close()
        for listening in self._sockets:
            listening.close()
        self._sockets = []


@dataclass
class _JoiningHost:
    """A host that wants to take part, and is no member yet."""

    channel: Channel
    facts: dict[str, Any]
    proposed: bool = False


class JoiningHosts:
    """The hosts that wait here to be taken in, each with a word of its own by which a view names
    it.
    """

    def __init__(self, *, timings: ChannelTimings = DEFAULTS.channel) -> None:
        self._hosts: dict[str, _JoiningHost] = {}
        self._timings = timings

    def descriptors(self) -> list[int]:
        """List the descriptors on which they may hang up."""
        return [host.channel.fileno() for host in self._hosts.values()]

    def add(self, channel: Channel, facts: dict[str, Any]) -> None:
        """Let a host wait."""
        self._hosts[random.token_hex(8)] = _JoiningHost(channel, facts)

    def hear(self, descriptor: int) -> None:
        """Notice that one of them has hung up; it has nothing more to say."""
        word = next(
            word for word, host in self._hosts.items() if host.channel.fileno() == descriptor
        )
        try:
            self._hosts[word].channel.hear()
        except ChannelBroken:
            self._hosts.pop(word).channel.close()

    def take(self) -> list[tuple[str, dict[str, Any]]]:
        """Take the words and facts of those that have not been proposed to the others, once
        each.
        """
        found = [(word, host) for word, host in self._hosts.items() if not host.proposed]
        for _, host in found:
            host.proposed = True
        return [(word, host.facts) for word, host in found]

    def admit(self, view: View, run: str | None) -> None:
        """Tell those that a view has taken in; they call again, as they call the others."""
        for seat in view.seats:
            if (host := self._hosts.pop(seat.facts.get("word", ""), None)) is not None:
                host.channel.send(
                    {"kind": "running", "view": view.dump(), "host": seat.host, "run": run}
                )
                host.channel.flush(self._timings.flush)
                host.channel.close()

    def refuse(self) -> None:
        """Refuse all of them."""
        for host in self._hosts.values():
            refuse(host.channel, "the job that runs there is at its end", self._timings.flush)
        self._hosts.clear()


def refuse(channel: Channel, why: str, seconds: float) -> None:
    """Tell a launcher why it can't take part, for at most so many `seconds`, and hang up."""
    channel.send({"kind": "refused", "error": "PlaceError", "why": why})
    channel.flush(seconds)
    channel.close()


class Inviter:
    """Tells newcomers at the meeting point where the launchers of the job are.

    Never blocks for longer than a second.
    """

    def __init__(self, point: Point, secret: bytes, *, timings: MembershipTimings) -> None:
        self._point, self._secret, self._timings = point, secret, timings
        self._address = network.resolve(point[0])[0]
        self._connection: socket.socket | None = None
        self._at = 0.0

    def tick(self, view: View, now: float, *, taken: Sequence[str]) -> None:
        """Look for a newcomer at the meeting point, unless the point is one of these addresses."""
        if now - self._at < self._timings.visit:
            return
        self._at = now
        if self._connection is not None:
            self._invite(
                self._connection,
                [(str(seat.facts["address"]), int(seat.facts["port"])) for seat in view.seats],
            )
            self._connection = None
        elif self._address not in taken:
            self._connection = socket.socket(network.family(self._address), socket.SOCK_STREAM)
            self._connection.setblocking(False)
            self._connection.connect_ex((self._address, self._point[1]))  # seen at the next look

    def _invite(self, connection: socket.socket, points: Sequence[Point]) -> None:
        with connection:
            there = bool(
                ready((), 0.0, writing=[connection.fileno()])
            ) and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            # it isn't a launcher that waits, or isn't of this job
            with contextlib.suppress(PacelineError, OSError):
                if there:
                    channel = call(
                        connection,
                        self._secret,
                        f"{self._point[0]}:{self._point[1]}",
                        self._timings.visited,
                    )
                    channel.send({"kind": "invitation", "points": points})
                    channel.flush(self._timings.visited)
