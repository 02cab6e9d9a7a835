"""The launchers of a job that survives: they agree on who takes part, and tell their workers.

launcher 0 ------ launcher 1      connections between all of them; `membership` decides over these, by majorities
     \\              /
      launcher 2 --               each hears of its own workers at once, and of others when nothing is heard of their launcher
"""

from __future__ import annotations

import select
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from paceline.cluster.channel import Caller, Channel, Gone, call, hear_from
from paceline.cluster.meeting import Offer
from paceline.cluster.membership import Membership, View
from paceline.cluster.orders import Member, Roster
from paceline.cluster.peers import Failure
from paceline.errors import DeadlineExceeded, SecretError

BEAT_SECONDS, SILENT_SECONDS = 0.5, 2.5
_FLUSH_SECONDS = 1.0
_LOOK_SECONDS = 0.25
_LONGEST_TAIL = 8_000  # characters


def connect_all(table: Sequence[Offer], host: int, listening: socket.socket, secret: bytes, deadline: float) -> dict[int, Channel]:
    """Connections to the launchers of all hosts: each calls those before it, and is called by those after it.

    Raises `DeadlineExceeded` naming who doesn't come.
    """
    end = time.monotonic() + deadline
    channels: dict[int, Channel] = {}
    for other, offer in enumerate(table[:host]):
        try:
            connection = socket.create_connection((offer.address, offer.agent_port), timeout=max(0.1, end - time.monotonic()))
            channels[other] = call(connection, secret, f"{offer.address}:{offer.agent_port}")
        except OSError as error:
            raise DeadlineExceeded(
                f"the launcher on {offer.name} can't be reached at {offer.address}:{offer.agent_port}: {error}"
            ) from error
        channels[other].send({"kind": "host", "host": host})
    callers: list[Caller] = []
    while len(channels) < len(table) - 1:
        waiting: list[socket.socket | Channel] = [listening, *(caller.channel for caller in callers)]
        ready = select.select(waiting, [], [], min(_LOOK_SECONDS, max(0.0, end - time.monotonic())))[0]
        if time.monotonic() > end:
            absent = ", ".join(offer.name for other, offer in enumerate(table) if other not in {*channels, host})
            raise DeadlineExceeded(f"{absent} did not call {table[host].name} within {deadline:g} s: is a firewall between them?")
        if listening in ready:
            connection, address = listening.accept()
            callers.append(Caller(connection, secret, str(address[0])))
        for caller in list(callers):
            try:
                message = caller.step()
            except (Gone, SecretError):
                callers.remove(caller)
                continue
            if message is not None and message.get("kind") == "host":
                callers.remove(caller)
                channels[int(message["host"])] = caller.channel
    return channels


class Assembly:
    """One launcher's part: a `crew.Peers` that goes on when hosts are lost.

    `channels`: the connections to the other launchers, by host number. `rosters` are the views as workers are to be told of them.
    """

    def __init__(self, host: int, view: View, channels: dict[int, Channel]) -> None:
        self.host = host
        self.verdict: Failure | None = None
        self.stopped: tuple[int, str] | None = None
        self.all_finished = False
        self.rosters: list[Roster] = []
        self.late: dict[int, bool] = {}  # calls in which somebody waits for others; whether those are given up
        self.membership = Membership(host, view, now=time.monotonic())
        self._channels = channels
        self._finished: set[int] = set()
        self._failures: list[Failure] = []
        self._beat_at = 0.0

    @property
    def view(self) -> View:
        """The present view."""
        return self.membership.view

    def roster(self, view: View, *, broken: bool = False) -> Roster:
        """As workers are told."""
        members = [Member(worker, seat.host, seat.facts["name"], seat.facts["address"]) for seat in view.seats for worker in seat.workers]
        return Roster(view.number, tuple(members), broken)

    # ---- what this launcher has seen

    def lost(self, workers: list[int]) -> None:
        """Workers of this host are dead."""
        self.membership.lost(workers, time.monotonic())
        self._send()

    def come(self, workers: list[int]) -> None:
        """New workers of this host are ready."""
        self.membership.come(workers, time.monotonic())
        self._send()

    def renew(self, number: int) -> None:
        """Groups have broken, and all live, in this view: a new one is wanted."""
        self.membership.renew(number, time.monotonic())
        self._send()

    def tell_late(self, call: int, given_up: bool) -> None:
        """Workers of this host wait for others in a call."""
        self.late[call] = self.late.get(call, False) or given_up
        self._tell_all({"kind": "late", "call": call, "given_up": given_up})

    # ---- the other launchers

    def descriptors(self) -> list[int]:
        return [channel.fileno() for channel in self._channels.values()]

    def hear(self, descriptor: int) -> None:
        """Take what has come from one of the others."""
        if (gone := hear_from(self._channels, descriptor, self._take)) is not None:
            self._channels.pop(gone[0]).close()
            self.membership.silent(gone[0], time.monotonic())
        self._send()

    def tick(self) -> None:
        """Say that we live, notice who doesn't, and say again what has had no answer."""
        now = time.monotonic()
        beat = now - self._beat_at > BEAT_SECONDS
        self._beat_at = now if beat else self._beat_at
        for host, channel in list(self._channels.items()):
            if beat:
                channel.send({"kind": "beat"})
            channel.flush()
            if now - channel.heard > SILENT_SECONDS:
                self.membership.silent(host, now)
            else:
                self.membership.heard(host)
        self.membership.tick(now)
        self._send()
        if self.membership.stranded and not self.all_finished and self.verdict is None:
            seat = self.view.seat(self.host)
            name = "this host" if seat is None else seat.facts["name"]
            why = "the others went on without it" if self.membership.expelled else "fewer than half of the hosts are within reach"
            self.verdict = Failure(None, name, 1, f"was cut off from the other hosts: {why}, so it stops here")

    def _send(self) -> None:
        """Give the network what membership has to say, and take out what it has decided."""
        outbox, self.membership.outbox = self.membership.outbox, []
        for host, message in outbox:
            if host in self._channels:
                self._channels[host].send({"kind": "membership", "message": message})
        for view in self.membership.decided:
            self.rosters.append(self.roster(view, broken=view.renewed))
        self.membership.decided.clear()

    def _take(self, host: int, message: dict[str, Any]) -> None:
        kind = message.get("kind")
        if kind == "membership":
            self.membership.hear(host, message["message"], time.monotonic())
        elif kind == "failed":
            self._failures.append(Failure(**message["failure"]))
            self.verdict = self.verdict or self._failures[0]
        elif kind == "late":
            self.late[int(message["call"])] = self.late.get(int(message["call"]), False) or bool(message["given_up"])
        elif kind == "stopped":
            self.stopped = self.stopped or (int(message["number"]), str(message["host"]))
        elif kind == "finished":
            self._finished.add(host)
            self._finish()

    def _tell_all(self, message: dict[str, Any]) -> None:
        for channel in self._channels.values():
            channel.send(message)

    # ---- how the job ends

    def tell_failed(self, failure: Failure) -> None:
        """The job can't go on."""
        failure = replace(failure, tail=failure.tail[-_LONGEST_TAIL:])
        self.verdict = self.verdict or failure
        self._tell_all({"kind": "failed", "failure": asdict(failure)})

    def tell_stopped(self, number: int) -> None:
        """This launcher was asked to end the job."""
        seat = self.view.seat(self.host)
        self._tell_all({"kind": "stopped", "number": number, "host": seat.facts["name"] if seat else signal.Signals(number).name})

    def tell_finished(self) -> None:
        """The workers of this host have ended well."""
        if self.host not in self._finished:
            self._finished.add(self.host)
            self._tell_all({"kind": "finished"})
            self._finish()

    def _finish(self) -> None:
        self.all_finished = {*self.view.hosts} <= self._finished

    def close(self) -> None:
        """Hang up."""
        for channel in self._channels.values():
            channel.flush(_FLUSH_SECONDS)
            channel.close()
        self._channels.clear()
