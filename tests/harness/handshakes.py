"""A launcher that waits for others, and what strangers say to it."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from paceline.cluster.hosts.meeting import Meeting
from paceline.cluster.hosts.rendezvous import Admission, FixedPeers, Offer, assemble_hosts
from tests.harness import strangers

SECRET = b"s" * 32
HELLO = {"paceline": 1, "nonce": "0" * 32, "proof": "0" * 64}


def meeting(name: str, port: int, hosts: int = 2, **changes: Any) -> Meeting:
    return replace(
        Meeting(
            ("127.0.0.1", port), SECRET, Offer(name, 2, "127.0.0.1", "m", 1, 2), hosts, None, 300.0
        ),
        **changes,
    )


@contextmanager
def waiting(port: int) -> Iterator[Callable[[], FixedPeers]]:
    """A launcher that waits for another; calling what is given lets that one come."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(assemble_hosts, meeting("a", port))
        strangers.until(lambda: _listens(port), lambda: time.sleep(0.01))
        made: list[FixedPeers | Admission] = []

        def come() -> FixedPeers:
            made.append(pool.submit(assemble_hosts, meeting("b", port)).result())
            made.append(first.result())
            assert isinstance(made[0], FixedPeers) and isinstance(made[1], FixedPeers)
            assert [offer.name for offer in made[0].offers] == ["a", "b"]
            return made[1]

        try:
            yield come
        finally:
            for council in made:
                assert isinstance(council, FixedPeers)
                council.close()


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=60).close()
    except OSError:
        return False
    return True


OFFER = {
    "kind": "offer",
    "offer": asdict(Offer("x", 2, "127.0.0.1", "m", 1, 2, "block", (1, 2), 3)),
    "hosts": 2,
    "host_rank": None,
}


def senseless(
    drawn: random.Random, like: list[dict[str, Any]], accepted: Callable[[dict[str, Any]], bool]
) -> dict[str, Any]:
    """A message like these that isn't one of them."""
    while True:
        message = strangers.bent(drawn, drawn.choice(like))
        if isinstance(message, dict) and not accepted(message):
            return message


def offered(message: dict[str, Any]) -> bool:
    """Whether a launcher could mean that."""
    if message.get("kind") != "offer":
        return False
    try:
        Offer.load(message["offer"])
    except Exception:  # noqa: BLE001
        return False
    return type(message.get("hosts")) is int and "host_rank" in message
