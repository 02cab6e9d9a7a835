"""The handover to workers that have less: the result of the last call, or the whole state.

rank 0   state -------------> rank 2 (new)     each new worker gets it from one that is near,
rank 1   hash of its state    hash?            and has to come to the hash that most of the others
                                               have
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from paceline.comm.agreement import CallResult
from paceline.comm.group_protocol import Group
from paceline.elastic.recover import RecoveryPlan
from paceline.errors import Mismatch
from paceline.replicas.majority import majority, nearest
from paceline.state.snapshot import byte_tensor, loads, pack


class WholeState(Protocol):
    """What has all of a worker's state."""

    def give(self) -> tuple[bytes, str]:
        """Return all of the state, and the hash of what is equal on all workers."""
        ...

    def take(self, state: bytes) -> str:
        """Take over this state. Returns the hash of it."""
        ...


def hand_over_state(group: Group, hosts: Sequence[int], old: int, owner: WholeState) -> list[int]:
    """Give the state to the workers from rank `old` on; return ranks with another hash. Collective.

    The hash of most workers is the right one. `hosts` has the host of each rank. Raises `Mismatch`
    if the state that has come isn't the one that most workers have.
    """
    givers = {rank: nearest(rank, range(old), hosts) for rank in range(old, group.size)}
    body, digest = owner.give() if group.rank < old else (b"", "")
    mine = body if group.rank in givers.values() else b""
    heads = [
        json.loads(head) for head in group.gather_bytes(json.dumps([len(mine), digest]).encode())
    ]
    sends = [(rank, byte_tensor(mine)) for rank, giver in givers.items() if giver == group.rank]
    received = (
        torch.empty(heads[givers[group.rank]][0], dtype=torch.uint8)
        if group.rank in givers
        else None
    )
    group.exchange(sends, [] if received is None else [(givers[group.rank], received)]).wait()
    right, wrong = majority({rank: heads[rank][1] for rank in range(old)})
    if received is not None and owner.take(received.numpy().tobytes()) != right:
        raise Mismatch(
            f"the state that rank {givers[group.rank]} handed over is not what most workers have"
        )
    return list(wrong)


def hand_over_result(group: Group, plan: RecoveryPlan, last: Any) -> CallResult[Any] | None:
    """Hand the result of the last call to the workers that were cut off in it; None for the others.

    Collective.
    """
    if not plan.behind:
        return None
    me = plan.members[group.rank]
    body = pack([last]).dumps() if me == plan.teller else b""
    found = group.gather_bytes(body)[plan.members.index(plan.teller)]
    return CallResult(loads(found).unpack()[0]) if me in plan.behind else None
