"""Fills new copies of servers and takes them in, in lockstep: between two turns, when no worker sends servers anything.

    first worker    gives a copy what others have ... on ... on ... filled
    the others      wait, and meet with it now and then, as long as that takes

`replication` decides which worker starts them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from paceline.sync.parameterserver.replication import ServerReplication


def renew(copies: ServerReplication) -> None:
    """Take in the copies that have begun since. Collective, if any are being started."""
    if copies.waits:
        copies.take_in(*copies.context.agreement.repeat(lambda: _begun(copies), what=f"{copies.kind}s begin"))


def _begun(copies: ServerReplication) -> tuple[list[Any], list[int]]:
    """Return the copies that have begun, with what all workers need to know, and the numbers of those that were filled."""
    answers = copies.context.agreement.meet(f"{copies.kind}s begin", json.dumps(copies.begun()).encode())
    told = sorted(found for answer in answers for found in json.loads(answer))
    return told, [number for number, found in told if found and _filled(copies, found)]


def _filled(copies: ServerReplication, told: Any) -> bool:
    """Whether the first worker could fill this copy. Collective."""
    first = copies.context.group.rank == 0
    filling = copies.filling(told) if first else iter(())
    seconds = min(copies.context.timings.servers.fill, copies.context.deadline / 4)
    while True:
        word = _slice(filling, seconds) if first else b""
        answer = copies.context.agreement.meet(f"{copies.kind}s are filled", word)[0]
        if answer != b"on":
            return answer == b"filled"


def _slice(filling: Iterator[bool], seconds: float) -> bytes:
    """Fill for a while. Returns b"on" if there is more to do."""
    end = time.monotonic() + seconds
    for alive in filling:
        if not alive:
            return b"lost"
        if time.monotonic() > end:
            return b"on"
    return b"filled"
