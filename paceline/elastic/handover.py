"""Hands the result of the last call, or the whole state, to workers that don't have it.

rank 0   state -------------> rank 2 (new)     each new worker gets the state from a near worker
rank 1   hash of its state    hash?            its hash must be that of most workers
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from paceline.comm.agreement import CallResult
from paceline.comm.group_protocol import Group
from paceline.elastic.recovery_plan import RecoveryPlan
from paceline.errors import Mismatch
from paceline.replicas.majority import find_majority, pick_nearest_source
from paceline.state.snapshot import copy_to_tensor, make_snapshot, snapshot_from_bytes


class StateOwner(Protocol):
    """Packs and loads all of a worker's state."""

    def pack_state(self) -> tuple[bytes, str]:
        """Pack all of the state, and hash the part that must be equal on all workers."""
        ...

    def load_state(self, state: bytes) -> str:
        """Load a packed state, and return the hash of the part that must be equal."""
        ...


def hand_over_state(group: Group, hosts: Sequence[int], old: int, owner: StateOwner) -> list[int]:
    """Send the state to all new workers. Collective.

    Args:
        group: Group of all workers, old and new.
        hosts: Host of each rank.
        old: Number of old workers. New workers have the ranks from `old` on.
        owner: Packs and loads the state of this worker.

    Returns:
        Ranks of the old workers whose hash differs from that of most workers.

    Raises:
        Mismatch: This worker is new, and the state that it got hasn't the hash of most workers.
    """
    senders = {
        rank: pick_nearest_source(rank, range(old), hosts) for rank in range(old, group.size)
    }
    body, digest = owner.pack_state() if group.rank < old else (b"", "")
    own_body = body if group.rank in senders.values() else b""
    headers = [
        json.loads(header)
        for header in group.gather_bytes(json.dumps([len(own_body), digest]).encode())
    ]
    # All workers know all lengths and hashes now. One exchange sends the states.
    sends = [
        (rank, copy_to_tensor(own_body)) for rank, sender in senders.items() if sender == group.rank
    ]
    received = (
        torch.empty(headers[senders[group.rank]][0], dtype=torch.uint8)
        if group.rank in senders
        else None
    )
    group.exchange(sends, [] if received is None else [(senders[group.rank], received)]).wait()
    majority_hash, odd_ranks = find_majority({rank: headers[rank][1] for rank in range(old)})
    if received is not None and owner.load_state(received.numpy().tobytes()) != majority_hash:
        raise Mismatch(
            f"the state that rank {senders[group.rank]} handed over differs from that of most "
            "workers; start this worker again"
        )
    return list(odd_ranks)


def hand_over_result(group: Group, plan: RecoveryPlan, last: Any) -> CallResult[Any] | None:
    """Hand the result of the last call to the workers that were cut off in it. Collective.

    Returns None on all other workers.
    """
    if not plan.behind:
        return None
    worker = plan.members[group.rank]
    body = make_snapshot([last]).to_bytes() if worker == plan.result_sender else b""
    packed = group.gather_bytes(body)[plan.members.index(plan.result_sender)]
    return (
        CallResult(snapshot_from_bytes(packed).unpack_state()[0]) if worker in plan.behind else None
    )
