"""The launchers of a job of fixed size while it runs: they all end together.

      launcher 1 ----+
      launcher 2 ----+---- launcher 0, the server of the rendezvous: it passes messages on, decides
      launcher 3 ----+                 which failure was first, and whether the job starts again

A host that falls silent counts as a failure.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from paceline.cluster.hosts.channel import Channel, close_channels, read_channel
from paceline.cluster.hosts.peers import (
    Failure,
    LateCall,
    Offer,
    note_late_call,
    read_late_call,
    read_stop_message,
)
from paceline.cluster.hosts.restart_messages import HostReport, Links, RestartState, Sequel
from paceline.timings import DEFAULT_TIMINGS, Timings

_LONGEST_TAIL = 8_000  # characters


class FixedPeers:
    """One launcher's part in a job of fixed size: `RestartPeers` over a star of connections.

    The launcher that served the rendezvous is in the middle, as the server. It decides which
    failure was first. Once all have ended their workers, it also decides whether the job starts
    again. If it is gone, each of the others decides for itself.

    Args:
        table: Offers of all hosts.
        host_rank: Number of this host among them.
        channels: Connections by host number: to all others on the server, else to the server alone.
        server: Number of the server.
        state: How far the restarts of the job have come. Default: it has none.
        timings: Waits and deadlines.
    """

    def __init__(
        self,
        table: tuple[Offer, ...],
        host_rank: int,
        channels: dict[int, Channel],
        *,
        server: int,
        state: RestartState | None = None,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> None:
        self.offers, self.host_rank = table, host_rank
        self.verdict: Failure | None = None
        self.stop_request: tuple[int, str] | None = None
        self.all_finished = False
        self.late_calls: dict[int, LateCall] = {}
        self.state = state
        self.sequel: Sequel | None = None
        self._channels = channels  # by host rank
        for channel in channels.values():
            # Nothing was sent while all waited for the last host, so silence counts from now on.
            channel.count_silence()
        self._timings, self._linger_seconds = timings.rendezvous, timings.channel.linger
        self._server = server
        self._finished_hosts: set[int] = set()
        self._host_reports: dict[int, HostReport] = {}
        self._is_stopping = False
        # Failures, and when they happened on the clock of this host
        self._failure_reports: list[tuple[float, Failure]] = []
        self._first_report_at = 0.0
        self._beat_at = 0.0

    def list_descriptors(self) -> list[int]:
        return [channel.fileno() for channel in self._channels.values()]

    def read_messages(self, descriptor: int) -> None:
        """Read the messages that have come on a descriptor."""
        if (hung_up := read_channel(self._channels, descriptor, self._handle_message)) is not None:
            self._lose_host(hung_up[0], f"is gone: {hung_up[1]}")

    def run_timers(self) -> None:
        """Send heartbeats, notice silent hosts, and decide on the first failure when it is time."""
        now = time.monotonic()
        is_beat_due = now - self._beat_at > self._timings.beat
        if is_beat_due:
            self._beat_at = now
        for host, channel in list(self._channels.items()):
            if is_beat_due:
                channel.send({"kind": "beat"})
            channel.flush()
            if now - channel.heard_at > self._timings.silence:
                self._lose_host(
                    host,
                    f"is gone: nothing was heard of its launcher for {self._timings.silence:g} s",
                )
        # The report of the first failure may come late: another host may have noticed an echo of it
        # before.
        if self._is_server and self._failure_reports and self.verdict is None:
            _, first = min(self._failure_reports, key=lambda report: (report[1].is_echo, report[0]))
            if now - self._first_report_at > (
                self._timings.echo if first.is_echo else self._timings.culprit
            ):
                self.verdict = first
                self._tell_all({"kind": "end", "failure": asdict(first)})

    def tell_failed(self, failure: Failure) -> None:
        failure = replace(failure, tail=failure.tail[-_LONGEST_TAIL:])
        if self._is_server:
            self._add_failure(failure)
        else:
            self._tell_all({"kind": "failed", "failure": asdict(failure)})

    def tell_stopped(self, number: int) -> None:
        self._is_stopping = True
        self._tell_all(
            {"kind": "stopped", "number": number, "host": self.offers[self.host_rank].name}
        )

    def tell_finished(self) -> None:
        if self.host_rank in self._finished_hosts:
            return
        self._finished_hosts.add(self.host_rank)
        if self._is_server:
            self._update_finished()
        else:
            self._tell_all({"kind": "finished"})

    def tell_late(self, late: LateCall) -> None:
        note_late_call(self.late_calls, late)
        self._tell_all({"kind": "late", "late": late})

    @property
    def host_reports(self) -> Mapping[int, HostReport] | None:
        awaited = (
            self._channels.keys() if self._is_server else self._channels.keys() & {self._server}
        )
        is_complete = self._host_reports.keys() >= {self.host_rank, *awaited}
        return self._host_reports if is_complete and self.sequel is None else None

    def tell_ended(self, report: HostReport) -> None:
        self._host_reports[self.host_rank] = report
        if not self._is_server:
            self._tell_all({"kind": "ended", "report": report.dump()})

    def tell_sequel(self, sequel: Sequel) -> None:
        self.sequel = sequel
        if self._is_server:
            self._tell_all({"kind": "sequel", "sequel": sequel.dump()})

    def hand_over_links(self) -> Links | None:
        channels, self._channels = self._channels, {}
        return Links(self.host_rank, self._server, len(self.offers), channels)

    def close(self) -> None:
        if self.sequel is not None and self.sequel.state is not None and not self._is_stopping:
            return  # the connections are needed for the next start
        close_channels(self._channels.values(), self._linger_seconds)
        self._channels.clear()

    @property
    def _is_server(self) -> bool:
        """Whether this host is the server."""
        return self._server == self.host_rank

    def _handle_message(self, host: int, message: dict[str, Any]) -> None:
        """Handle a message of another launcher. Those for the other role are ignored."""
        kind = message.get("kind")
        if kind == "failed" and self._is_server:
            self._add_failure(Failure.load(message["failure"]))
        elif kind == "finished" and self._is_server:
            self._finished_hosts.add(host)
            self._update_finished()
        elif kind == "end" and not self._is_server:
            self.verdict = Failure.load(message["failure"])
        elif kind == "over" and not self._is_server:
            self.all_finished = True
        elif kind == "ended" and self._is_server:
            self._host_reports[host] = HostReport.load(message["report"])
        elif kind == "sequel" and not self._is_server:
            self.sequel = Sequel.load(message["sequel"])
        elif kind in ("late", "stopped"):
            if kind == "late":
                note_late_call(self.late_calls, read_late_call(message["late"]))
            else:
                self.stop_request = self.stop_request or read_stop_message(message)
            # The others are connected with the server alone, so it passes the message on.
            if self._is_server:
                self._tell_all(message)

    def _tell_all(self, message: dict[str, Any]) -> None:
        for channel in self._channels.values():
            channel.send(message)

    def _add_failure(self, failure: Failure) -> None:
        """Add a failure. The first one by time becomes the verdict."""
        now = time.monotonic()
        self._first_report_at = self._first_report_at if self._failure_reports else now
        self._failure_reports.append((now - failure.age, failure))

    def _update_finished(self) -> None:
        """End the job well once all hosts have finished."""
        if len(self._finished_hosts) == len(self.offers):
            self.all_finished = True
            self._tell_all({"kind": "over"})

    def _lose_host(self, host: int, words: str) -> None:
        """Count a host as lost, for this reason in words."""
        self._channels.pop(host).close()
        if self.all_finished or self.verdict is not None or self.stop_request is not None:
            return
        lost = Failure(None, self.offers[host].name, 1, words)
        if self._is_server:
            self._add_failure(lost)
        else:
            self.verdict = lost
