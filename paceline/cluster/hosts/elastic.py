r"""The launchers of an elastic job, which survives losses and takes in new hosts.

    launcher 0 ------ launcher 1      each is connected with all others; `membership` decides over
         \            /               these connections, by majorities
           launcher 2

Each launcher reports the deaths of its own workers at once. The workers of another launcher count
as lost when that launcher falls silent.
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
from paceline.cluster.hosts.admission import JoiningHosts, MeetingPoint, Point, refuse_launcher
from paceline.cluster.hosts.channel import (
    MALFORMED,
    Channel,
    close_channels,
    introduce_launcher,
    read_channel,
    wait_ready,
)
from paceline.cluster.hosts.handshake import Handshakes
from paceline.cluster.hosts.membership import Membership, View
from paceline.cluster.hosts.peers import (
    Failure,
    LateCall,
    Offer,
    note_late_call,
    read_late_call,
    read_stop_message,
)
from paceline.errors import DeadlineExceeded, PacelineError
from paceline.timings import DEFAULT_TIMINGS, ChannelTimings, Timings

_LONGEST_TAIL = 8_000  # characters
# The refusal of a host that was started without --min-workers
_REFUSAL_WITHOUT_MIN_WORKERS = (
    "a job that survives losses runs there: join it with the command that it was started with "
    "(--min-workers)"
)


def connect_all_launchers(
    table: Sequence[Offer],
    host: int,
    listening: socket.socket,
    secret: bytes,
    deadline: float,
    *,
    timings: ChannelTimings = DEFAULT_TIMINGS.channel,
) -> dict[int, Channel]:
    """Connect to the launchers of all hosts, before the job starts.

    Each launcher calls those before it in the table, and is called by those after it.

    Args:
        table: Offers of all hosts.
        host: Number of this host among them.
        listening: Socket on which this launcher is called.
        secret: Secret of the job.
        deadline: Seconds until all must be connected.
        timings: Waits of a channel.

    Returns:
        The channels, by host number.

    Raises:
        DeadlineExceeded: It names the hosts that are missing.
    """
    end = time.monotonic() + deadline
    channels: dict[int, Channel] = {}
    for other_host, offer in enumerate(table[:host]):
        seconds_left = max(0.1, end - time.monotonic())
        try:
            channels[other_host] = _call_launcher(
                (offer.address, offer.agent_port), host, secret, seconds_left, timings.hello
            )
        except OSError as error:
            raise DeadlineExceeded(
                f"the launcher on {offer.name} can't be reached at "
                f"{offer.address}:{offer.agent_port}: {error}"
            ) from error
    # The hosts after this one call it. Strangers may call too: they are dropped.
    listening.setblocking(False)
    with contextlib.closing(Handshakes(secret, timings=timings)) as handshakes:
        missing_hosts = {*range(host + 1, len(table))}
        while missing_hosts:
            descriptors = wait_ready(
                [listening.fileno(), *handshakes.list_descriptors()],
                min(timings.look, end - time.monotonic()),
            )
            if time.monotonic() > end:
                absent = ", ".join(table[other_host].name for other_host in sorted(missing_hosts))
                raise DeadlineExceeded(
                    f"{absent} did not call {table[host].name} within {deadline:g} s: "
                    "is a firewall between them?"
                )
            first_messages = map(handshakes.receive_first_message, descriptors)
            for channel, message in filter(None, first_messages):
                caller = message.get("host") if message.get("kind") == "host" else None
                # `True` would count as the number 1.
                if type(caller) is int and caller in missing_hosts:
                    channels[caller] = channel
                    missing_hosts.remove(caller)
                else:
                    channel.close()
            if listening.fileno() in descriptors:
                handshakes.accept_callers(listening)
            handshakes.drop_late_callers()
    return channels


def connect_joining_host(
    view: View, host: int, secret: bytes, *, timings: Timings = DEFAULT_TIMINGS
) -> dict[int, Channel]:
    """Connect to the launchers of a view in which this host is new.

    A launcher that can't be reached is noticed later, as a silent one.
    """
    channels: dict[int, Channel] = {}
    for seat in view.seats:
        if seat.host == host:
            continue
        point = (str(seat.facts["address"]), int(seat.facts["port"]))
        with contextlib.suppress(OSError, PacelineError):
            channels[seat.host] = _call_launcher(
                point, host, secret, timings.membership.silence, timings.channel.hello
            )
    return channels


def _call_launcher(
    point: Point, host: int, secret: bytes, connect_seconds: float, hello_seconds: float
) -> Channel:
    """Call another launcher, and tell it the number of this host."""
    connection = socket.create_connection(point, timeout=connect_seconds)
    channel = introduce_launcher(connection, secret, f"{point[0]}:{point[1]}", hello_seconds)
    channel.send({"kind": "host", "host": host})
    return channel


class ElasticPeers:
    """One launcher's part in an elastic job: `Peers` that go on when hosts are lost.

    `rosters` are the views in the form that workers get. `is_cut_off` tells that this host stopped
    because it reached too few others.

    Invariants: every member of the view but this host has a channel in `_channels`, or is in
    `_uncalled_hosts` and counts as silent after a while. A joining host is in `_joining_hosts`
    until a view has it. Then it calls again, and gets a channel. `is_closing` stays true once it is
    set.

    Args:
        host: Number of this host.
        view: The present view. Its number is 1 at the start of a job.
        channels: Connections to the other launchers, by host number.
        point: Where this launcher is called. Default: nowhere, so no host can join.
        run: Facts of the run, as workers have reported them (JSON). Default: not known yet. No host
            is taken in before.
        timings: Waits and deadlines.
    """

    def __init__(
        self,
        host: int,
        view: View,
        channels: dict[int, Channel],
        point: MeetingPoint | None = None,
        *,
        run: str | None = None,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> None:
        self.host, self.run_facts = host, run
        self.is_closing = False  # workers have ended their run: no host is let in any more
        self.is_cut_off = False
        self.is_leaving = False  # this host leaves
        self.has_joined_late = view.number > 1  # this host joined a running job
        self.verdict: Failure | None = None
        self.stop_request: tuple[int, str] | None = None
        self.all_finished = False
        self.rosters: list[Roster] = []
        self.late_calls: dict[int, LateCall] = {}
        self.membership = Membership(host, view, now=time.monotonic(), timings=timings.membership)
        self._timings, self._flush_seconds, self._linger_seconds = (
            timings.membership,
            timings.channel.flush,
            timings.channel.linger,
        )
        self._channels, self._meeting_point = channels, point
        for channel in channels.values():
            # Nothing was sent while all waited for the last host, so silence counts from now on.
            channel.count_silence()
        self._joining_hosts = JoiningHosts(timings=timings.channel)
        self._uncalled_hosts: dict[int, float] = {}  # hosts that must call this one, and since when
        self._finished_hosts: set[int] = set()
        self._leaving_hosts: set[int] = set()  # hosts that have announced that they leave
        # Hosts that have confirmed that they go on without this one, which leaves
        self._confirming_hosts: set[int] = set()
        self._beat_at = 0.0

    @property
    def view(self) -> View:
        """The present view of the job."""
        return self.membership.view

    # ---- events on this host

    def report_lost_workers(self, workers: list[int]) -> None:
        """Report that workers of this host are dead."""
        self.membership.note_lost_workers(workers, time.monotonic())
        self._send_outbox()

    def report_new_workers(self, workers: list[int]) -> None:
        """Report that new workers of this host are ready."""
        self.membership.note_new_workers(workers, time.monotonic())
        self._send_outbox()

    def request_renewal(self, number: int) -> None:
        """Ask for a new view: connections have broken in this one, though all workers are alive."""
        self.membership.request_renewal(number, time.monotonic())
        self._send_outbox()

    def announce_leaving(self) -> None:
        """Report that this host leaves. None of its workers is left."""
        self.is_leaving = True
        self._tell_all({"kind": "leaving"})
        self.membership.announce_leaving(time.monotonic())
        self._send_outbox()

    @property
    def has_parted(self) -> bool:
        """Whether this host can go, as the others do without it.

        Each host that can still be reached must have confirmed that.
        """
        if self.membership.is_expelled:
            return {*self.view.hosts} & {*self._channels} <= self._confirming_hosts
        return self.membership.is_stranded or self.view.hosts == (self.host,)

    @property
    def launcher_points(self) -> list[Point]:
        """Addresses at which the launchers of the other hosts are called."""
        return [
            (str(seat.facts["address"]), int(seat.facts["port"]))
            for seat in self.view.seats
            if seat.host != self.host
        ]

    def tell_closing(self) -> None:
        """Tell the others that workers of this host have ended their run."""
        if not self.is_closing:
            self.is_closing = True
            self._tell_all({"kind": "closing"})

    def tell_late(self, late: LateCall) -> None:
        """Tell the others that workers of this host wait for others in a call."""
        note_late_call(self.late_calls, late)
        self._tell_all({"kind": "late", "late": late})

    # ---- the other launchers

    def list_descriptors(self) -> list[int]:
        own_descriptors = (
            [] if self._meeting_point is None else self._meeting_point.list_descriptors()
        )
        return [
            *own_descriptors,
            *self._joining_hosts.list_descriptors(),
            *(channel.fileno() for channel in self._channels.values()),
        ]

    def read_messages(self, descriptor: int) -> None:
        """Read the messages that have come on a descriptor."""
        if self._meeting_point is not None and descriptor in self._meeting_point.list_descriptors():
            if (first_message := self._meeting_point.receive_first_message(descriptor)) is not None:
                self._receive_call(*first_message)
        elif descriptor in self._joining_hosts.list_descriptors():
            self._joining_hosts.drop_hung_up(descriptor)
        elif (
            hung_up := read_channel(self._channels, descriptor, self._handle_message)
        ) is not None:
            self._channels.pop(hung_up[0]).close()
            self.membership.note_silent_host(hung_up[0], time.monotonic())
        self._send_outbox()

    def run_timers(self) -> None:
        """Send heartbeats, notice silent hosts, and repeat unanswered messages."""
        now = time.monotonic()
        is_beat_due = now - self._beat_at > self._timings.beat
        self._beat_at = now if is_beat_due else self._beat_at
        for host, channel in list(self._channels.items()):
            if is_beat_due:
                channel.send({"kind": "beat"})
            channel.flush()
            if now - channel.heard_at > self._timings.silence:
                self.membership.note_silent_host(host, now)
            else:
                self.membership.note_heard_host(host)
        self._admit_hosts(now)
        self.membership.run_timers(now)
        self._send_outbox()
        # Hosts in the minority must stop, as the others go on without them.
        if (
            self.membership.is_stranded
            and not self.all_finished
            and not self.is_leaving
            and self.verdict is None
        ):
            seat = self.view.find_seat(self.host)
            name = "this host" if seat is None else seat.facts["name"]
            self.is_cut_off = True
            reason = (
                "the others went on without it"
                if self.membership.is_expelled
                else "fewer than half of the hosts are within reach"
            )
            self.verdict = Failure(
                None, name, 1, f"was cut off from the other hosts: {reason}, so it stops here"
            )

    def _send_outbox(self) -> None:
        """Send the messages of `membership`, and take out the views that it has decided."""
        outbox, self.membership.outbox = self.membership.outbox, []
        for host, message in outbox:
            if host in self._channels:
                self._channels[host].send({"kind": "membership", "message": message})
        for view in self.membership.decided_views:
            self.rosters.append(_make_roster(view))
            self._joining_hosts.admit_hosts(view, self.run_facts)
            self._confirm_leaving()
        self.membership.decided_views.clear()

    def _confirm_leaving(self) -> None:
        """Confirm to hosts that leave that they aren't in the view any more."""
        for host in self._leaving_hosts - {*self.view.hosts}:
            if host in self._channels:
                self._channels[host].send({"kind": "parted"})
            self._leaving_hosts.discard(host)

    # ---- hosts that join

    def _receive_call(self, channel: Channel, message: dict[str, Any]) -> None:
        """Read the first message of a launcher that has called. Hang up if it is malformed."""
        try:
            self._welcome_caller(channel, message)
        except MALFORMED:
            channel.close()

    def _welcome_caller(self, channel: Channel, message: dict[str, Any]) -> None:
        """Add the channel of a member, or let a new host wait for its admission."""
        if message.get("kind") == "host":
            host = message["host"]
            if type(host) is not int or host < 0 or host == self.host:
                raise ValueError("there is no such host")
            if host in self._channels:
                self._channels.pop(host).close()
            self._channels[host] = channel
            self._uncalled_hosts.pop(host, None)
            # It may have missed these two messages.
            if self.host in self._finished_hosts:
                channel.send({"kind": "finished"})
            if self.is_closing:
                channel.send({"kind": "closing"})
        elif message.get("kind") == "offer" and message["offer"].get("numbers"):
            self._joining_hosts.add_host(channel, Offer.load(message["offer"]).seat_facts)
        else:
            refuse_launcher(
                channel, _REFUSAL_WITHOUT_MIN_WORKERS, self._flush_seconds
            ) if message.get("kind") == "offer" else channel.close()

    def _admit_hosts(self, now: float) -> None:
        """Propose joining hosts for the next view, and notice members that don't call."""
        if self._meeting_point is not None:
            self._meeting_point.run_timers(now)
            if self.run_facts is not None and self.membership.leading_host == self.host:
                self._meeting_point.invite_hosts(self.view, now)
        if self.is_closing or self.verdict is not None or self.stop_request is not None:
            self._joining_hosts.refuse_all()
        for word, facts in (
            self._joining_hosts.take_unproposed() if self.run_facts is not None else ()
        ):
            self.membership.note_joining_host(word, (), facts, now)
        # New members call the others. One that doesn't counts as silent after a while.
        absent = {*self.view.hosts} - {self.host, *self._channels}
        self._uncalled_hosts = {host: self._uncalled_hosts.get(host, now) for host in absent}
        for host, since in self._uncalled_hosts.items():
            if now - since > self._timings.call:
                self.membership.note_silent_host(host, now)

    def _handle_message(self, host: int, message: dict[str, Any]) -> None:
        """Handle a message of another launcher."""
        kind = message.get("kind")
        if kind == "membership":
            self.membership.handle_message(host, _check_facts(message["message"]), time.monotonic())
        elif kind == "failed":
            failure = Failure.load(message["failure"])
            self.verdict = self.verdict or failure
        elif kind == "late":
            note_late_call(self.late_calls, read_late_call(message["late"]))
        elif kind == "stopped":
            self.stop_request = self.stop_request or read_stop_message(message)
        elif kind == "closing":
            self.is_closing = True
        elif kind == "leaving":
            self._leaving_hosts.add(host)
            self._confirm_leaving()
        elif kind == "parted":
            self._confirming_hosts.add(host)
        elif kind == "finished":
            self._finished_hosts.add(host)
            self._update_finished()

    def _tell_all(self, message: dict[str, Any]) -> None:
        for channel in self._channels.values():
            channel.send(message)

    # ---- the end of the job

    def tell_failed(self, failure: Failure) -> None:
        """Tell the others that the job can't go on."""
        failure = replace(failure, tail=failure.tail[-_LONGEST_TAIL:])
        self.verdict = self.verdict or failure
        self._tell_all({"kind": "failed", "failure": asdict(failure)})

    def tell_stopped(self, number: int) -> None:
        """Tell the others that this launcher was asked to end the job."""
        seat = self.view.find_seat(self.host)
        self._tell_all(
            {
                "kind": "stopped",
                "number": number,
                "host": seat.facts["name"] if seat else signal.Signals(number).name,
            }
        )

    def tell_finished(self) -> None:
        """Tell the others that the workers of this host have ended well."""
        if self.host not in self._finished_hosts:
            self._finished_hosts.add(self.host)
            self._tell_all({"kind": "finished"})
            self._update_finished()

    def _update_finished(self) -> None:
        """Note whether all hosts of the view have finished."""
        self.all_finished = {*self.view.hosts} <= self._finished_hosts

    def close(self) -> None:
        """Close all connections."""
        self._joining_hosts.refuse_all()
        close_channels(self._channels.values(), self._linger_seconds)
        self._channels.clear()
        if self._meeting_point is not None:
            self._meeting_point.close()


def _make_roster(view: View) -> Roster:
    """Make the roster of a view, which workers get."""
    members = [
        Member(worker, seat.host, seat.facts["name"], seat.facts["address"])
        for seat in view.seats
        for worker in seat.workers
    ]
    return Roster(view.number, tuple(members), view.is_renewed)


def _check_facts(message: dict[str, Any]) -> dict[str, Any]:
    """Check that the facts about hosts in a message are usable, as they may be used much later.

    Returns the message. Raises one of `channel.MALFORMED` if they aren't.
    """
    views = [View.load(value) for value in (message.get("view"), message.get("value")) if value]
    all_facts = [seat.facts for view in views for seat in view.seats]
    all_facts += [
        joining_facts for _, joining_facts in message.get("wishes", {}).get("joining", {}).values()
    ]
    for seat_facts in all_facts:
        ipaddress.ip_address(str(seat_facts["address"]).partition("%")[0])
        if not (
            type(seat_facts["name"]) is type(seat_facts.get("word", "")) is str
            and type(seat_facts["port"]) is int
        ):
            raise TypeError("a host has a name, an address and a port")
    return message
