"""Launchers of several hosts in one process: what they bring to a rendezvous, and how they are kept going."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from paceline.cluster.hosts.fixed import FixedPeers
from paceline.cluster.hosts.peers import Offer
from paceline.cluster.hosts.rendezvous import Meeting, assemble

SECRET = b"0123456789abcdef"


def invitation(name: str, port: int, **changes: Any) -> Meeting:
    offer = Offer(name, 2, "127.0.0.1", "machine", 1000, 2000)
    return replace(Meeting(("127.0.0.1", port), SECRET, offer, 2, None, 5.0), **changes)


def gather(*meetings: Meeting, pause: float = 0.0) -> list[Future[FixedPeers]]:
    with ThreadPoolExecutor(len(meetings)) as pool:
        futures = []
        for meeting in meetings:
            futures.append(pool.submit(assemble, meeting))
            time.sleep(pause)
    return futures


def turn(*members: FixedPeers, until: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it never came to that"
        for council in members:
            for descriptor in council.descriptors():
                council.hear(descriptor)
            council.tick()
        time.sleep(0.005)
