"""What a server has told its workers of a unit: what comes is decoded, and what goes out is what they don't know yet, coded.

    value    v0 --step--> v1 --step--> v2 ...            the parameters themselves
    told     t0 = v0      t1           t2                t1 = t0 + decoded(encoded(v1 - t0)): what workers have, bit for bit
    number   1            2            3                 who has told number n gets the message that makes n + 1 of it; others get all of it

What was lost is in the next difference, so nothing else has to be kept. In lockstep all of this follows from what was pushed and closed,
not from who has read it: it is the same on all replicas that are told the same in the same order.

Out of lockstep each worker reads when it comes, and is told what is new since it did so last: that is kept for each of them, on the server
that they ask. Another one that is asked in its place knows nothing of it, and gives all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.codec.coding import Coding, nbytes, parts, room
from paceline.comm.buckets import Bucket
from paceline.errors import Mismatch
from paceline.server.codings import Phases, at


class DeltaEncoder:
    """One unit of a server. `phases`: the codings that it travels in; `seed`: of what is drawn by chance."""

    def __init__(self, phases: Phases, bucket: Bucket, seed: int) -> None:
        self._phases, self._bucket, self._seed = phases, bucket, seed
        self._told: Tensor | None = None  # None: the value itself
        self._number = 0
        self._message: Tensor | None = None  # makes of the one before what is told now
        self._turn: int | None = None  # in which the message was encoded
        self._due: int | None = None  # a step of this turn has not been told yet
        self._apart: dict[int, tuple[int, Tensor]] = {}  # by worker that is not in lockstep: the number of what it was told, and that

    def decode(self, given: Tensor, used: bytes, turn: int) -> Tensor:
        """What a worker has pushed, as it lies in the unit; zeros where it has not `used` a piece. Raises `Mismatch` for another size."""
        coding = at(self._phases, turn).coding
        if coding is None:
            return given
        flat = self._bucket.flat
        want = nbytes(coding, flat.numel())
        if given.dtype != torch.uint8 or given.shape != (want,):
            raise Mismatch(f"{coding!r} of {flat.numel()} elements is uint8 [{want}], and not {given.dtype} {list(given.shape)}")
        out = torch.empty(flat.numel(), dtype=torch.float32)
        coding.decode(parts(coding, flat.numel(), given), out)
        for view, reached in zip(self._bucket.over(out), used, strict=True):
            if not reached:
                view.zero_()
        return out.to(flat.dtype)

    def settle(self) -> None:
        """Before the value changes: what is due is encoded, and what has been told stays as it is."""
        flat = self._bucket.flat
        if self._told is None:
            self._told = flat.clone()
        if self._due is None:
            return
        turn, self._due = self._due, None
        coding = at(self._phases, turn).coding
        self._turn = turn if coding is not None else None
        if coding is None:
            self._told.copy_(flat)
            return
        self._message = self._news(coding, self._told, turn)

    def _news(self, coding: Coding, told: Tensor, turn: int, worker: int = 0) -> Tensor:
        """The message with what is new since `told`, which becomes what that makes of it."""
        left = self._bucket.flat.sub(told).float()
        whole, message = room(coding, left.numel())  # a new one each time: the one before may be on its way still
        draw = torch.Generator().manual_seed(((turn * 1_000_003 + self._seed) * 65_537 + worker) % (1 << 63))
        coding.encode(left, message, draw)
        if told.dtype == torch.float32:
            coding.add(message, told)
        else:
            coding.decode(message, left)
            told.add_(left.to(told.dtype))
        return whole

    def stepped(self, turn: int) -> None:
        """The value has changed, after `settle`."""
        self._number += 1
        self._due = turn

    def level(self) -> None:
        """The value itself is what is told from now on."""
        self._told = self._message = self._turn = self._due = None
        self._number += 1

    def read(self, has: int | None) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """What a worker lacks that has the told number `has` (None: nothing): its number, its turn if it is coded; and it, if anything."""
        if self._told is not None:
            self.settle()
        if has == self._number:
            return {"number": self._number, "turn": None}, ()
        if self._message is not None and self._turn is not None and has == self._number - 1:
            return {"number": self._number, "turn": self._turn}, (self._message,)
        told = self._bucket.flat if self._told is None else self._told
        return {"number": self._number, "turn": None}, (told.clone(),)

    def read_apart(self, worker: int, has: int | None, turn: int) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """The same for a worker that is not in lockstep, in this turn of its own. Raises `Mismatch` for a turn that is no number."""
        if type(turn) is not int:
            raise Mismatch(f"a unit is read in turn {turn!r}, which is no number")
        number, told = self._apart.get(worker, (0, None))
        coding = at(self._phases, turn).coding
        if told is None or has != number or coding is None:
            told = self._bucket.flat.clone()
            self._apart[worker] = number + 1, told
            return {"number": number + 1, "turn": None}, (told,)
        message = self._news(coding, told, turn, worker)  # it has the one before, so that is not on its way any more
        self._apart[worker] = number + 1, told
        return {"number": number + 1, "turn": turn}, (message,)

    def forget(self, living: Collection[int]) -> None:
        """What other workers were told is of no use any more."""
        self._apart = {worker: found for worker, found in self._apart.items() if worker in living}

    @property
    def nbytes(self) -> int:
        """What this takes."""
        kept = [self._told, self._message, *(told for _, told in self._apart.values())]
        return sum(x.nbytes for x in kept if x is not None)

    def state_dict(self) -> dict[str, Any]:
        """What a replica has to have."""
        if self._told is not None:
            self.settle()
        return {"told": self._told, "number": self._number, "message": self._message, "turn": self._turn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` gave."""
        self._told, self._message = (None if state[name] is None else state[name].clone() for name in ("told", "message"))
        self._number, self._turn, self._due = state["number"], state["turn"], None
