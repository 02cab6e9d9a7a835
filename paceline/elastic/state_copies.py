"""Copies of state that a single worker has, in the memory of workers on other hosts.

    host 0   rank 0 ──┐            A rank with such state is an owner. Hosts with owners form a
    host 1   rank 2 <─┘ ──┐        ring, and each keeps the copies of the host before it. If there
    host 2   rank 4     <─┘        is only one host, its owners form a ring.

After Gemini (Wang et al., SOSP 2023). Two hosts may be lost at once, unless one of them keeps the
copies of the other.
"""

from __future__ import annotations

import hashlib
import json
import math
import statistics
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from paceline.errors import CheckpointError, UsageError
from paceline.formatting import describe_unknown_choice
from paceline.state.checksum import compute_checksums
from paceline.state.snapshot import (
    DTYPES,
    Json,
    Snapshot,
    copy_to_tensor,
    make_snapshot,
    view_as_tensor,
    view_cpu_bytes,
)
from paceline.workers.copy_interval import Replicate

LABEL_FORM: Final = 1  # version of a label
BUDGET: Final = 0.10  # part of the time that copies may take
ALIGNMENT: Final = 64  # each tensor begins at a multiple of this number of bytes

# ---- which worker keeps each copy, and how often copies are made


def check_replicate(replicate: Replicate) -> None:
    """Raise `UsageError` for an invalid value of `replicate`."""
    problem = describe_unknown_choice("replicate", replicate, Replicate)
    if problem and (type(replicate) is not int or replicate < 1):
        raise UsageError(f"{problem}; or a number of steps, 1 or more")


def assign_keepers(hosts: Mapping[int, int]) -> dict[int, int]:
    """Assign a keeper to the copy of each owner. Both are ranks.

    `hosts` has the host of each owner, by rank. The result is empty if there is only one owner.
    """
    by_host: dict[int, list[int]] = {}
    for rank in sorted(hosts):
        by_host.setdefault(hosts[rank], []).append(rank)
    ring = [by_host[host] for host in sorted(by_host)]
    if len(ring) == 1:
        (owners,) = ring
        return (
            {rank: owners[(index + 1) % len(owners)] for index, rank in enumerate(owners)}
            if len(owners) > 1
            else {}
        )
    following = [*ring[1:], *ring[:1]]
    return {
        rank: next_owners[index % len(next_owners)]
        for host_owners, next_owners in zip(ring, following, strict=True)
        for index, rank in enumerate(host_owners)
    }


def find_heirs(
    held_steps: Sequence[Mapping[int, int]], lost_owners: Iterable[int]
) -> dict[int, int | None]:
    """Find the rank with the newest copy of each lost owner's state; None if no rank has one.

    `held` has, for each rank, the steps of the copies that it keeps, by owner. If several ranks
    have equally new copies, it is the first of them.
    """
    newest: dict[int, int | None] = {}
    for owner in lost_owners:
        steps = {rank: copies[owner] for rank, copies in enumerate(held_steps) if owner in copies}
        newest[owner] = max(steps, key=lambda rank: (steps[rank], -rank)) if steps else None
    return newest


class ReplicationTimes(NamedTuple):
    """Times that one worker has measured, in seconds."""

    stall: float  # training stands still for a copy
    transfer: float  # sending a copy
    step: float  # a step during which no copy is sent


def compute_cadence(times: Sequence[ReplicationTimes], budget: float = BUDGET) -> int:
    """Compute the steps between two copies, so that copies take at most `budget` of the time.

    This assumes the worst case, in which steps hide nothing of the sending.
    """
    copy_seconds = max(item.stall + item.transfer for item in times)
    return max(
        1, math.ceil(copy_seconds / (budget * statistics.median(item.step for item in times)))
    )


# ---- a copy


class CopyLabel(NamedTuple):
    """The label of a copy, sent before its bytes."""

    step: int  # step after which the copy was made
    tree: Json
    tensors: list[tuple[str, str, list[int]]]  # path, dtype, shape
    tensor_checksums: list[int]  # checksum of each tensor's bytes (`state.checksum`)

    def encode_label(self) -> bytes:
        """Encode as bytes, for `decode_label`."""
        return json.dumps([LABEL_FORM, *self]).encode()

    @classmethod
    def decode_label(cls, data: bytes) -> CopyLabel:
        """Decode the bytes of `encode_label`.

        Raises `CheckpointError` for a label from another version of paceline.
        """
        form, *fields = json.loads(data)
        if form != LABEL_FORM:
            raise CheckpointError(
                f"a copy of form {form!r} can't be kept, this version of paceline knows "
                f"{LABEL_FORM}"
            )
        step, tree, tensors, sums = fields
        return cls(step, tree, [(path, dtype, shape) for path, dtype, shape in tensors], sums)

    @property
    def _tensor_nbytes(self) -> list[int]:
        return [math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in self.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, with their alignment."""
        return sum(-(-length // ALIGNMENT) * ALIGNMENT for length in self._tensor_nbytes)

    def slice_memory(self, memory: Tensor) -> list[Tensor]:
        """Slice `memory` into the bytes of each tensor."""
        views, begin = [], 0
        for length in self._tensor_nbytes:
            views.append(memory[begin : begin + length])
            begin += -(-length // ALIGNMENT) * ALIGNMENT
        return views

    @property
    def end_marker(self) -> Tensor:
        """Bytes that follow the last tensor, and show that all before them have arrived.

        They are different for each copy.
        """
        return copy_to_tensor(hashlib.sha256(self.encode_label()).digest())

    def is_complete(self, memory: Tensor) -> bool:
        """Whether `memory` has exactly the bytes of this copy."""
        return compute_checksums(self.slice_memory(memory)) == self.tensor_checksums

    def unpack_state(self, memory: Tensor) -> Any:
        """Unpack the state from the bytes in `memory`, as new objects."""
        views = zip(self.tensors, self.slice_memory(memory), strict=True)
        tensors = {
            path: view_as_tensor(piece, DTYPES[dtype], shape)
            for (path, dtype, shape), piece in views
        }
        return Snapshot(self.step, self.tree, tensors).unpack_state()


def pack_copy(state: Any, step: int) -> tuple[CopyLabel, list[Tensor]]:
    """Make the label of a copy of `state`, and views of the bytes of its tensors (no copies)."""
    snapshot = make_snapshot(state, step, copy=False)
    tensors = snapshot.tensors
    descriptions = [
        (path, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for path, tensor in tensors.items()
    ]
    pieces = [view_cpu_bytes(tensor) for tensor in tensors.values()]
    return CopyLabel(step, snapshot.tree, descriptions, compute_checksums(pieces)), pieces


# ---- the copies that one worker keeps


@dataclass
class _CopySlot:
    """Memory for a copy. It has a label if the copy in it is complete."""

    memory: Tensor
    label: CopyLabel | None = None


class CopyStore:
    """The copies that one worker keeps: the newest complete one of each owner.

    Each owner has two slots, used in turn. An incoming copy goes into the older one, so the newest
    complete copy isn't touched. The training thread and the thread of the replicator use this.
    """

    def __init__(self) -> None:
        self._slots: dict[int, list[_CopySlot]] = {}  # by owner: newest, incoming
        self._lock = threading.Lock()

    @property
    def held_steps(self) -> dict[int, int]:
        """Step of the newest copy of each owner."""
        with self._lock:
            labels = {
                owner: [slot.label for slot in slots if slot.label is not None]
                for owner, slots in self._slots.items()
            }
        return {owner: copies[0].step for owner, copies in labels.items() if copies}

    def prepare_memory(self, owner: int, label: CopyLabel) -> list[Tensor]:
        """Prepare memory for the bytes of an incoming copy."""
        with self._lock:
            slots = self._slots.setdefault(
                owner, [_CopySlot(torch.empty(0, dtype=torch.uint8)) for _ in range(2)]
            )
            slots[1].label = None
            if slots[1].memory.numel() != label.nbytes:
                slots[1].memory = torch.empty(label.nbytes, dtype=torch.uint8)
            return label.slice_memory(slots[1].memory)

    def accept_copy(self, owner: int, label: CopyLabel) -> str | None:
        """Accept the copy that has arrived. Returns a message if it is refused."""
        with self._lock:
            newest, incoming = self._slots[owner]
            if label.is_complete(incoming.memory):
                incoming.label = label
                self._slots[owner] = [incoming, newest]
                return None
        older_text = (
            "there is no older one"
            if newest.label is None
            else f"the one as of step {newest.label.step} is kept"
        )
        return (
            f"a copy as of step {label.step} was refused, "
            f"its bytes are not those that were sent; {older_text}"
        )

    def abandon_copy(self, owner: int) -> None:
        """Give up the incoming copy, and never use its memory again.

        After an error its bytes may still be written to this memory at any time.
        """
        with self._lock:
            self._slots[owner][1] = _CopySlot(torch.empty(0, dtype=torch.uint8))

    def read_copies(self, owner: int, refused: Callable[[str], None]) -> Iterator[tuple[int, Any]]:
        """Read (step, state) of each copy of `owner`, the newest first.

        `refused` is called with a message for a copy that has changed since it arrived.
        """
        for slot in self._slots.get(owner, []):
            if slot.label is None:
                continue
            if not slot.label.is_complete(slot.memory):
                refused(
                    f"the copy as of step {slot.label.step} has changed in this worker's memory "
                    "since it came: it isn't used"
                )
                continue
            yield slot.label.step, slot.label.unpack_state(slot.memory)

    def keep_only(self, owners: Iterable[int]) -> None:
        """Keep the copies of these owners, and forget all others."""
        wanted = {*owners}
        with self._lock:
            self._slots = {
                owner: places for owner, places in self._slots.items() if owner in wanted
            }
