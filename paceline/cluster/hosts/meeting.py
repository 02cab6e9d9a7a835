"""The terms of a rendezvous of hosts, and messages that launchers send each other there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.cluster.hosts.channel import MALFORMED, Channel, ChannelBroken
from paceline.cluster.hosts.peers import Offer, read_stop_message
from paceline.cluster.hosts.restart_messages import JobStopped, Links, RestartState
from paceline.cluster.launcher.hints import WaitReminder
from paceline.cluster.launcher.output import print_message
from paceline.timings import DEFAULT_TIMINGS, Timings


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
    say: Callable[[str], None] = print_message
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


def read_points(message: dict[str, Any]) -> list[tuple[str, int]]:
    return [(str(address), int(port)) for address, port in message["points"]]


def read_messages(channel: Channel) -> list[dict[str, Any]] | None:
    """Read the messages that have come from a launcher; None if it is gone without a word."""
    messages: list[dict[str, Any]] = []
    try:
        while (message := channel.receive_message()) is not None:
            messages.append(message)
    except ChannelBroken:
        return messages or None  # the next call notices the end again
    return messages


def raise_if_stopped(message: dict[str, Any]) -> None:
    """Raise `JobStopped` if this message tells that a launcher was asked to end the job."""
    if message.get("kind") == "stopped":
        try:
            stop = JobStopped(*read_stop_message(message))
        except MALFORMED:
            return
        raise stop
