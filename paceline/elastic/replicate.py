"""Replicas of state that a single worker has, in the memory of workers on other hosts.

    host 0   rank 0 ──┐            A rank that has such state is an owner. The next host that has
    host 1   rank 2 <─┘ ──┐        owners keeps its copy, and the first host keeps the last one's.
    host 2   rank 4     <─┘        On one host, the next owner keeps it.

After Gemini (Wang et al., SOSP 2023). So two hosts may be lost at once, unless one keeps the copy
of the other.
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
from paceline.formatting import unknown
from paceline.state.checksum import checksums
from paceline.state.snapshot import DTYPES, Json, Snapshot, byte_tensor, pack, raw, shaped
from paceline.workers.replicate import Replicate

FORM: Final = 1  # of a label
BUDGET: Final = 0.10  # part of the time that copies may take
ALIGNED: Final = 64  # bytes: each tensor begins at a multiple

# ---- which worker keeps what, and how often


def check(replicate: Replicate) -> None:
    """Raise `UsageError` for an invalid value of `replicate`."""
    wrong = unknown("replicate", replicate, Replicate)
    if wrong and (type(replicate) is not int or replicate < 1):
        raise UsageError(f"{wrong}; or a number of steps, 1 or more")


def keepers(hosts: Mapping[int, int]) -> dict[int, int]:
    """Return the keeper of each owner's copy; `hosts` are the hosts of the owners, by rank.

    None where there is one owner only.
    """
    by_host: dict[int, list[int]] = {}
    for rank in sorted(hosts):
        by_host.setdefault(hosts[rank], []).append(rank)
    ring = [by_host[host] for host in sorted(by_host)]
    if len(ring) == 1:
        (alone,) = ring
        return (
            {rank: alone[(place + 1) % len(alone)] for place, rank in enumerate(alone)}
            if len(alone) > 1
            else {}
        )
    following = [*ring[1:], *ring[:1]]
    return {
        rank: there[place % len(there)]
        for here, there in zip(ring, following, strict=True)
        for place, rank in enumerate(here)
    }


def heirs(held: Sequence[Mapping[int, int]], gone: Iterable[int]) -> dict[int, int | None]:
    """Rank with the newest copy of each lost owner's state; None if no rank has one.

    `held` has for each rank the steps of the copies that it keeps, by owner. Of several ranks it is
    the first.
    """
    newest: dict[int, int | None] = {}
    for owner in gone:
        steps = {rank: copies[owner] for rank, copies in enumerate(held) if owner in copies}
        newest[owner] = max(steps, key=lambda rank: (steps[rank], -rank)) if steps else None
    return newest


class ReplicationTimes(NamedTuple):
    """The times that one worker has measured, in seconds."""

    stall: float  # how long a step stood still for a copy
    transfer: float  # how long a copy was on its way
    step: float  # a step beside which none was


def cadence(figures: Sequence[ReplicationTimes], budget: float = BUDGET) -> int:
    """Steps from one copy to the next, so that copies take at most `budget` of the time.

    This holds even if a step hides none of a copy.
    """
    spent = max(each.stall + each.transfer for each in figures)
    return max(1, math.ceil(spent / (budget * statistics.median(each.step for each in figures))))


# ---- a copy


class CopyLabel(NamedTuple):
    """The label of a copy, sent before its bytes."""

    step: int  # as of which
    tree: Json
    tensors: list[tuple[str, str, list[int]]]  # path, dtype, shape
    sums: list[int]  # of their bytes, as of `state.checksum`

    def dump(self) -> bytes:
        """Write as bytes that `load` reads."""
        return json.dumps([FORM, *self]).encode()

    @classmethod
    def load(cls, data: bytes) -> CopyLabel:
        """Read what `dump` has written.

        Raises `CheckpointError` for a label of another version of paceline.
        """
        form, *fields = json.loads(data)
        if form != FORM:
            raise CheckpointError(
                f"a copy of form {form!r} can't be kept, this version of paceline knows {FORM}"
            )
        step, tree, tensors, sums = fields
        return cls(step, tree, [(path, dtype, shape) for path, dtype, shape in tensors], sums)

    @property
    def _lengths(self) -> list[int]:
        return [math.prod(shape) * DTYPES[dtype].itemsize for _, dtype, shape in self.tensors]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(-(-length // ALIGNED) * ALIGNED for length in self._lengths)

    def pieces(self, room: Tensor) -> list[Tensor]:
        """Return the bytes of each tensor within `room`."""
        views, at = [], 0
        for length in self._lengths:
            views.append(room[at : at + length])
            at += -(-length // ALIGNED) * ALIGNED
        return views

    @property
    def end(self) -> Tensor:
        """The bytes that follow the last tensor, different for each copy."""
        return byte_tensor(hashlib.sha256(self.dump()).digest())

    def whole(self, room: Tensor) -> bool:
        """Whether all bytes in `room` are those of this copy."""
        return checksums(self.pieces(room)) == self.sums

    def unpack(self, room: Tensor) -> Any:
        """Make the state in `room`, as new objects."""
        views = zip(self.tensors, self.pieces(room), strict=True)
        tensors = {
            path: shaped(piece, DTYPES[dtype], shape) for (path, dtype, shape), piece in views
        }
        return Snapshot(self.step, self.tree, tensors).unpack()


def wrap(state: Any, step: int) -> tuple[CopyLabel, list[Tensor]]:
    """Label of a copy of `state` at `step`, and the bytes of its tensors, without copying them."""
    snapshot = pack(state, step, copy=False)
    tensors = snapshot.tensors
    described = [
        (path, str(tensor.dtype).removeprefix("torch."), list(tensor.shape))
        for path, tensor in tensors.items()
    ]
    pieces = [raw(tensor) for tensor in tensors.values()]
    return CopyLabel(step, snapshot.tree, described, checksums(pieces)), pieces


# ---- the copies that one worker keeps


@dataclass
class _CopyPlace:
    """Memory for a copy, and the label of the whole one in it."""

    room: Tensor
    label: CopyLabel | None = None


class CopyShelf:
    """The newest complete copy of each owner that a worker keeps.

    The next copy goes into the memory of the one before. Until it is complete, the newest isn't
    touched.
    """

    def __init__(self) -> None:
        self._places: dict[int, list[_CopyPlace]] = {}  # the newest, and the one for what comes
        self._lock = threading.Lock()

    @property
    def held(self) -> dict[int, int]:
        """The step of the newest copy of each owner."""
        with self._lock:
            labels = {
                owner: [place.label for place in places if place.label is not None]
                for owner, places in self._places.items()
            }
        return {owner: copies[0].step for owner, copies in labels.items() if copies}

    def room(self, owner: int, label: CopyLabel) -> list[Tensor]:
        """Make room for the bytes of the next copy."""
        with self._lock:
            places = self._places.setdefault(
                owner, [_CopyPlace(torch.empty(0, dtype=torch.uint8)) for _ in range(2)]
            )
            places[1].label = None
            if places[1].room.numel() != label.nbytes:
                places[1].room = torch.empty(label.nbytes, dtype=torch.uint8)
            return label.pieces(places[1].room)

    def put(self, owner: int, label: CopyLabel) -> str | None:
        """Accept the copy whose bytes have come; if it is refused, give the reason in words."""
        with self._lock:
            newest, place = self._places[owner]
            if label.whole(place.room):
                place.label = label
                self._places[owner] = [place, newest]
                return None
        kept = (
            "there is no older one"
            if newest.label is None
            else f"the one as of step {newest.label.step} is kept"
        )
        return (
            f"a copy as of step {label.step} was refused, "
            f"its bytes are not those that were sent; {kept}"
        )

    def forfeit(self, owner: int) -> None:
        """Give up the copy under way, and never use its memory again.

        Its bytes won't come, or may come at any time.
        """
        with self._lock:
            self._places[owner][1] = _CopyPlace(torch.empty(0, dtype=torch.uint8))

    def read(self, owner: int, refused: Callable[[str], None]) -> Iterator[tuple[int, Any]]:
        """Read (step, state) of each copy of `owner`, the newest first.

        `refused` is called for a copy that has changed since it came.
        """
        for place in self._places.get(owner, []):
            if place.label is None:
                continue
            if not place.label.whole(place.room):
                refused(
                    f"the copy as of step {place.label.step} has changed in this worker's memory "
                    "since it came: it isn't used"
                )
                continue
            yield place.label.step, place.label.unpack(place.room)

    def keep(self, owners: Iterable[int]) -> None:
        """Keep the copies of these owners, and forget all others."""
        wanted = {*owners}
        with self._lock:
            self._places = {
                owner: places for owner, places in self._places.items() if owner in wanted
            }
