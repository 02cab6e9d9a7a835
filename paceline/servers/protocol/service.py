"""Messages to the server process: signs of life, the speed of its link, statistics, and its end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.servers.protocol.message import Acknowledged, Message, Request


@dataclass(frozen=True)
class Alive(Message):
    """The reply of a live server, with its clock (`time.perf_counter_ns`)."""

    clock: int


@dataclass(frozen=True)
class CheckAlive(Request[Alive]):
    """Ask whether the server is alive."""


@dataclass(frozen=True)
class Echoed(Message):
    """The tensor that was sent."""

    tensor: Tensor


@dataclass(frozen=True)
class Echo(Request[Echoed]):
    """Send a tensor there and back."""

    tensor: Tensor


@dataclass(frozen=True)
class Facts(Message):
    """Statistics of a server so far, for the summary."""

    facts: Mapping[str, Any]


@dataclass(frozen=True)
class ReadFacts(Request[Facts]):
    """Read the statistics of the server."""


@dataclass(frozen=True)
class Timeline(Message):
    """The last actions of a server, and the number of waiting messages over time.

    `packed` is in msgpack, as uint8.
    """

    packed: Tensor


@dataclass(frozen=True)
class ReadTimeline(Request[Timeline]):
    """Read the server's timeline, as far back as it remembers."""


@dataclass(frozen=True)
class EndServer(Request[Acknowledged]):
    """End the server."""
