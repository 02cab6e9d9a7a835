"""Messages to a server as a process: whether it lives, how fast the way to it is, what it has
done, and its end.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.servers.protocol.message import Acknowledged, Message, Request


@dataclass(frozen=True)
class Alive(Message):
    """A server lives, and its clock (`time.perf_counter_ns`) is there."""

    clock: int


@dataclass(frozen=True)
class CheckAlive(Request[Alive], kind="alive"):
    """Ask whether the server lives."""


@dataclass(frozen=True)
class Echoed(Message):
    """The tensor that was sent."""

    tensor: Tensor


@dataclass(frozen=True)
class Echo(Request[Echoed], kind="echo"):
    """Send a tensor there and back."""

    tensor: Tensor


@dataclass(frozen=True)
class Facts(Message):
    """What a server has done so far, for the summary."""

    facts: Mapping[str, Any]


@dataclass(frozen=True)
class ReadFacts(Request[Facts], kind="facts"):
    """Ask what the server has done so far."""


@dataclass(frozen=True)
class Timeline(Message):
    """When a server did what, and how many messages waited: in msgpack, as uint8."""

    packed: Tensor


@dataclass(frozen=True)
class ReadTimeline(Request[Timeline], kind="timeline"):
    """Ask when the server did what, as far as it remembers."""


@dataclass(frozen=True)
class EndServer(Request[Acknowledged], kind="end"):
    """End the server."""
