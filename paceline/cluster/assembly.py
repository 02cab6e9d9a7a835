"""The launchers of a job that survives: they agree on who takes part, and tell their workers.

launcher 0 ------ launcher 1      connections between all of them; `membership` decides over these, by majorities
     \\              /
      launcher 2 --               each hears of its own workers at once, and of others when nothing is heard of their launcher
"""

from __future__ import annotations

import signal
import time
from dataclasses import asdict, replace
from typing import Any

from paceline.cluster.channel import Channel, Gone
from paceline.cluster.membership import Membership, View
from paceline.cluster.orders import Member, Roster
from paceline.cluster.peers import Failure

BEAT_SECONDS, SILENT_SECONDS = 0.5, 2.5
_FLUSH_SECONDS = 1.0
_LONGEST_TAIL = 8_000  # characters


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

    # ---- the other launchers

    def descriptors(self) -> list[int]:
        return [channel.fileno() for channel in self._channels.values()]

    def hear(self, descriptor: int) -> None:
        """Take what has come from one of the others."""
        for host, channel in list(self._channels.items()):
            if channel.fileno() != descriptor:
                continue
            try:
                while (message := channel.hear()) is not None:
                    self._take(host, message)
            except Gone:
                self._channels.pop(host).close()
                self.membership.silent(host, time.monotonic())
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
