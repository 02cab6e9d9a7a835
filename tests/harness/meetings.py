"""Launchers of several hosts in one process: what they bring to a rendezvous, and how they are
kept going.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psutil

from paceline.cluster.hosts.fixed import FixedPeers
from paceline.cluster.hosts.meeting import Meeting
from paceline.cluster.hosts.peers import Offer
from paceline.cluster.hosts.rendezvous import assemble_hosts
from paceline.timings import ChannelTimings, Timings
from tests.harness.jobs import PATIENCE, wait_for

SECRET = b"0123456789abcdef"
TIMINGS = Timings(channel=ChannelTimings(hello=PATIENCE))


def invitation(name: str, port: int, **changes: Any) -> Meeting:
    offer = Offer(name, 2, "127.0.0.1", "machine", 1000, 2000)
    return replace(
        Meeting(("127.0.0.1", port), SECRET, offer, 2, None, PATIENCE, timings=TIMINGS), **changes
    )


def gather(*meetings: Meeting, led: bool = False) -> list[Future[FixedPeers]]:
    """Let all meet; where the meeting is `led`, the first one listens, else whoever comes first."""
    with ThreadPoolExecutor(len(meetings)) as pool:
        futures = [pool.submit(assemble_hosts, meetings[0])]
        if led:
            wait_for(lambda: futures[0].done() or _listens(meetings[0].point[1]))
        futures += [pool.submit(assemble_hosts, meeting) for meeting in meetings[1:]]
    return futures


def _listens(port: int) -> bool:
    """Whether this process listens there."""
    connections = psutil.Process().net_connections("tcp")
    return any(
        each.status == psutil.CONN_LISTEN and each.laddr.port == port for each in connections
    )


def turn(*members: FixedPeers, until: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it never came to that"
        for council in members:
            for descriptor in council.list_descriptors():
                council.read_messages(descriptor)
            council.run_timers()
        time.sleep(0.005)
