"""Launchers that talk to each other in one thread."""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from paceline.cluster.hosts.elastic import ElasticPeers

SECRET = b"s" * 32


def run(assemblies: list[ElasticPeers], until: Callable[[], bool], seconds: float = 60.0) -> None:
    """Let them talk until it is so."""
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it never came to that"
        by_descriptor = {
            descriptor: each for each in assemblies for descriptor in each.list_descriptors()
        }
        for descriptor in select.select(list(by_descriptor), [], [], 0.02)[0]:
            by_descriptor[descriptor].read_messages(descriptor)
        for each in assemblies:
            each.run_timers()
