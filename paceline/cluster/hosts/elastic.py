r"""The launchers of an elastic job, which survives losses: they agree on the members of a view.

launcher 0 ------ launcher 1      each is connected with all others; `membership` decides over
     \              /             these connections, by majorities
      launcher 2 --

Each hears of its own workers at once, and of other workers when their launcher falls silent.
"""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.cluster.control.commands import Member, Roster
from paceline.cluster.hosts.admission import JoiningHosts, MeetingPoint, Point, refuse
from paceline.cluster.hosts.channel import SENSELESS, Channel, call, hang_up, hear_from, ready
from paceline.cluster.hosts.handshake import Handshakes
from paceline.cluster.hosts.membership import Membership, View
from paceline.cluster.hosts.peers import Failure, LateCall, Offer, note, said_late, said_stopped
from paceline.errors import DeadlineExceeded, PacelineError
from paceline.timings import DEFAULTS, ChannelTimings, Timings

_LONGEST_TAIL = 8_000  # characters
_OTHERWISE = (
    "a job that survives losses runs there: join it with the command that it was started with "
    "(--min-workers)"
)


def connect_all(
    table: Sequence[Offer],
    host: int,
    listening: socket.socket,
    secret: bytes,
    deadline: float,
    *,
    timings: ChannelTimings = DEFAULTS.channel,
) -> dict[int, Channel]:
    """Connect to the launchers of all hosts: each calls those before it, and is called by those
    after it.

    Raises `DeadlineExceeded` naming the missing hosts.
    """
    end = time.monotonic() + deadline
    channels: dict[int, Channel] = {}
    for other, offer in enumerate(table[:host]):
        try:
            connection = socket.create_connection(
                (offer.address, offer.agent_port), timeout=max(0.1, end - time.monotonic())
            )
            channels[other] = call(
                connection, secret, f"{offer.address}:{offer.agent_port}", timings.hello
            )
        except OSError as error:
            raise DeadlineExceeded(
                f"the launcher on {offer.name} can't be reached at "
                f"{offer.address}:{offer.agent_port}: {error}"
            ) from error
        channels[other].send({"kind": "host", "host": host})
    listening.setblocking(False)
    with contextlib.closing(Handshakes(secret, timings=timings)) as handshakes:
        while len(channels) < len(table) - 1:
            descriptors = ready(
                [listening.fileno(), *handshakes.descriptors()],
                min(timings.look, end - time.monotonic()),
            )
            if time.monotonic() > end:
                absent = ", ".join(
                    offer.name
                    for other, offer in enumerate(table)
                    if other not in {*channels, host}
                )
                raise DeadlineExceeded(
                    f"{absent} did not call {table[host].name} within {deadline:g} s: "
                    "is a firewall between them?"
                )
            for channel, message in [
                came
                for descriptor in descriptors
                if (came := handshakes.hear(descriptor)) is not None
            ]:
                later = message.get("host")
                if (
                    message.get("kind") == "host"
                    and type(later) is int
                    and host < later < len(table)
                    and later not in channels
                ):
                    channels[later] = channel
                else:
                    channel.close()
            if listening.fileno() in descriptors:
                handshakes.let_in(listening)
            handshakes.tick()
    return channels


def enter(
    view: View, host: int, secret: bytes, *, timings: Timings = DEFAULTS
) -> dict[int, Channel]:
    """Connect to the launchers of a view in which this host is new.

    An unreachable one is noticed later, as silent.
    """
    channels: dict[int, Channel] = {}
    for seat in view.seats:
        if seat.host == host:
            continue
        point = (str(seat.facts["address"]), int(seat.facts["port"]))
        with contextlib.suppress(OSError, PacelineError):
            connection = socket.create_connection(point, timeout=timings.membership.silence)
            channels[seat.host] = call(
                connection, secret, f"{point[0]}:{point[1]}", timings.channel.hello
            )
            channels[seat.host].send({"kind": "host", "host": host})
    return channels


class ElasticPeers:
    """One launcher's part in an elastic job: `Peers` that go on when hosts are lost.

    `channels`: the connections to the other launchers, by host number. `rosters` are the views as
    workers are to get them. `run` is what the workers have said of it, as JSON, once it can be
    joined; `cut_off` whether this host stopped as it reached too few others.
    """

    def __init__(
        self,
        host: int,
        view: View,
        channels: dict[int, Channel],
        point: MeetingPoint | None = None,
        *,
        run: str | None = None,
        timings: Timings = DEFAULTS,
    ) -> None:
        self.host, self.run = host, run
        self.closing = False  # workers have ended their run: no host is let in any more
        self.cut_off = False
        self.leaving = False  # this host goes
        self.joined = view.number > 1  # this host has come later
        self.verdict: Failure | None = None
        self.stopped: tuple[int, str] | None = None
        self.all_finished = False
        self.rosters: list[Roster] = []
        self.late: dict[int, LateCall] = {}
        self.membership = Membership(host, view, now=time.monotonic(), timings=timings.membership)
        self._timings, self._flush_seconds, self._linger = (
            timings.membership,
            timings.channel.flush,
            timings.channel.linger,
        )
        self._channels, self._point = channels, point
        for channel in channels.values():
            channel.count_silence()  # nobody has sent anything while the last hosts were waited for
        self._newcomers = JoiningHosts(timings=timings.channel)
        self._awaited: dict[int, float] = {}  # hosts that have not called, and since when
        self._finished: set[int] = set()
        self._leavers: set[int] = set()  # hosts that have said that they go
        # those of the others that know that this one has left: what it says last may be lost
        self._excused: set[int] = set()
        self._beat_at = 0.0

    @property
    def view(self) -> View:
        """The present view."""
        return self.membership.view

    # ---- what this launcher has seen

    def lost(self, workers: list[int]) -> None:
        """Report that workers of this host are dead."""
        self.membership.lost(workers, time.monotonic())
        self._send()

    def come(self, workers: list[int]) -> None:
        """Report that new workers of this host are ready."""
        self.membership.come(workers, time.monotonic())
        self._send()

    def renew(self, number: int) -> None:
        """Ask for a new view: groups have broken in this one, though all live."""
        self.membership.renew(number, time.monotonic())
        self._send()

    def leave(self) -> None:
        """Report that this host goes; none of its workers is left."""
        self.leaving = True
        self._tell_all({"kind": "leaving"})
        self.membership.leave(time.monotonic())
        self._send()

    @property
    def parted(self) -> bool:
        """Whether the others do without this host, as each of them has said that can be asked."""
        if self.membership.expelled:
            return {*self.view.hosts} & {*self._channels} <= self._excused
        return self.membership.stranded or self.view.hosts == (self.host,)

    @property
    def points(self) -> list[Point]:
        """The points where the launchers of the other hosts accept calls."""
        return [
            (str(seat.facts["address"]), int(seat.facts["port"]))
            for seat in self.view.seats
            if seat.host != self.host
        ]

    def tell_closing(self) -> None:
        """Tell the others that workers of this host have ended their run."""
        if not self.closing:
            self.closing = True
            self._tell_all({"kind": "closing"})

    def tell_late(self, late: LateCall) -> None:
        """Tell the others that workers of this host wait for others in a call."""
        note(self.late, late)
        self._tell_all({"kind": "late", "late": late})

    # ---- the other launchers

    def descriptors(self) -> list[int]:
        own = [] if self._point is None else self._point.descriptors()
        return [
            *own,
            *self._newcomers.descriptors(),
            *(channel.fileno() for channel in self._channels.values()),
        ]

    def hear(self, descriptor: int) -> None:
        """Read the messages of one of the others."""
        if self._point is not None and descriptor in self._point.descriptors():
            if (came := self._point.hear(descriptor)) is not None:
                self._receive(*came)
        elif descriptor in self._newcomers.descriptors():
            self._newcomers.hear(descriptor)
        elif (gone := hear_from(self._channels, descriptor, self._take)) is not None:
            self._channels.pop(gone[0]).close()
            self.membership.silent(gone[0], time.monotonic())
        self._send()

    def tick(self) -> None:
        """Send heartbeats, notice silent hosts, and repeat messages that have had no answer."""
        now = time.monotonic()
        beat = now - self._beat_at > self._timings.beat
        self._beat_at = now if beat else self._beat_at
        for host, channel in list(self._channels.items()):
            if beat:
                channel.send({"kind": "beat"})
            channel.flush()
            if now - channel.heard > self._timings.silence:
                self.membership.silent(host, now)
            else:
                self.membership.heard(host)
        self._admit(now)
        self.membership.tick(now)
        self._send()
        if (
            self.membership.stranded
            and not self.all_finished
            and not self.leaving
            and self.verdict is None
        ):
            seat = self.view.seat(self.host)
            name = "this host" if seat is None else seat.facts["name"]
            self.cut_off = True
            why = (
                "the others went on without it"
                if self.membership.expelled
                else "fewer than half of the hosts are within reach"
            )
            self.verdict = Failure(
                None, name, 1, f"was cut off from the other hosts: {why}, so it stops here"
            )

    def _send(self) -> None:
        """Send the outbox of membership, and take out the views that it has decided."""
        outbox, self.membership.outbox = self.membership.outbox, []
        for host, message in outbox:
            if host in self._channels:
                self._channels[host].send({"kind": "membership", "message": message})
        for view in self.membership.decided:
            self.rosters.append(_roster(view))
            self._newcomers.admit(view, self.run)
            self._excuse()
        self.membership.decided.clear()

    def _excuse(self) -> None:
        """Tell leaving hosts that the others do without them by now."""
        for host in self._leavers - {*self.view.hosts}:
            if host in self._channels:
                self._channels[host].send({"kind": "parted"})
            self._leavers.discard(host)

    # ---- hosts that come

    def _receive(self, channel: Channel, message: dict[str, Any]) -> None:
        """Read the first message of a launcher that has called."""
        try:
            self._welcome(channel, message)
        except SENSELESS:
            channel.close()

    def _welcome(self, channel: Channel, message: dict[str, Any]) -> None:
        if message.get("kind") == "host":
            host = message["host"]
            if type(host) is not int or host < 0 or host == self.host:
                raise ValueError("there is no such host")
            if host in self._channels:
                self._channels.pop(host).close()
            self._channels[host] = channel
            self._awaited.pop(host, None)
            if self.host in self._finished:
                channel.send({"kind": "finished"})
            if self.closing:
                channel.send({"kind": "closing"})
        elif message.get("kind") == "offer" and message["offer"].get("numbers"):
            self._newcomers.add(channel, Offer.load(message["offer"]).facts)
        else:
            refuse(channel, _OTHERWISE, self._flush_seconds) if message.get(
                "kind"
            ) == "offer" else channel.close()

    def _admit(self, now: float) -> None:
        """Have joining hosts taken into the view, and notice members that don't call."""
        if self._point is not None:
            self._point.tick(now)
            if self.run is not None and self.membership.leader == self.host:
                self._point.invite(self.view, now)
        if self.closing or self.verdict is not None or self.stopped is not None:
            self._newcomers.refuse()
        for word, facts in self._newcomers.take() if self.run is not None else ():
            self.membership.joining(word, (), facts, now)
        absent = {*self.view.hosts} - {self.host, *self._channels}
        self._awaited = {host: self._awaited.get(host, now) for host in absent}
        for host, since in self._awaited.items():
            if now - since > self._timings.call:
                self.membership.silent(host, now)

    def _take(self, host: int, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "membership":
            self.membership.hear(host, _sound(message["message"]), time.monotonic())
        elif kind == "failed":
            failure = Failure.load(message["failure"])
            self.verdict = self.verdict or failure
        elif kind == "late":
            note(self.late, said_late(message["late"]))
        elif kind == "stopped":
            self.stopped = self.stopped or said_stopped(message)
        elif kind == "closing":
            self.closing = True
        elif kind == "leaving":
            self._leavers.add(host)
            self._excuse()
        elif kind == "parted":
            self._excused.add(host)
        elif kind == "finished":
            self._finished.add(host)
            self._finish()

    def _tell_all(self, message: dict[str, Any]) -> None:
        for channel in self._channels.values():
            channel.send(message)

    # ---- how the job ends

    def tell_failed(self, failure: Failure) -> None:
        """Tell the others that the job can't go on."""
        failure = replace(failure, tail=failure.tail[-_LONGEST_TAIL:])
        self.verdict = self.verdict or failure
        self._tell_all({"kind": "failed", "failure": asdict(failure)})

    def tell_stopped(self, number: int) -> None:
        """Tell the others that this launcher was asked to end the job."""
        seat = self.view.seat(self.host)
        self._tell_all(
            {
                "kind": "stopped",
                "number": number,
                "host": seat.facts["name"] if seat else signal.Signals(number).name,
            }
        )

    def tell_finished(self) -> None:
        """Tell the others that the workers of this host have ended well."""
        if self.host not in self._finished:
            self._finished.add(self.host)
            self._tell_all({"kind": "finished"})
            self._finish()

    def _finish(self) -> None:
        self.all_finished = {*self.view.hosts} <= self._finished

    def close(self) -> None:
        """Close all connections."""
        self._newcomers.refuse()
        hang_up(self._channels.values(), self._linger)
        self._channels.clear()
        if self._point is not None:
            self._point.close()


def _roster(view: View) -> Roster:
    """Write a view as workers get it."""
    members = [
        Member(worker, seat.host, seat.facts["name"], seat.facts["address"])
        for seat in view.seats
        for worker in seat.workers
    ]
    return Roster(view.number, tuple(members), view.renewed)


def _sound(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message if what it says of hosts can be used, perhaps much later; else raise
    one of `channel.SENSELESS`.
    """
    views = [View.load(value) for value in (message.get("view"), message.get("value")) if value]
    facts = [seat.facts for view in views for seat in view.seats]
    facts += [found for _, found in message.get("wishes", {}).get("joining", {}).values()]
    for each in facts:
        ipaddress.ip_address(str(each["address"]).partition("%")[0])
        if not (
            type(each["name"]) is type(each.get("word", "")) is str and type(each["port"]) is int
        ):
            raise TypeError("a host has a name, an address and a port")
    return message
