"""Delta encoding of a unit: a server decodes the pushes of its workers, and sends them only what they don't know yet, coded.

    value    v0 --step--> v1 --step--> v2 ...            the parameters themselves
    sent     t0 = v0      t1           t2                t1 = t0 + decoded(encoded(v1 - t0)): what workers have, bit for bit
    number   1            2            3                 a worker that has number n gets the message that makes n + 1 of it; others get all

What was lost is in the next difference, so nothing else has to be kept. In lockstep all of this follows from what was pushed and closed,
not from which worker has read it: it is the same on all replicas that get the same messages in the same order.

Out of lockstep each worker reads when it comes, and gets what is new since it did so last: that is kept for each of them, on the server
that they ask. Another one that is asked in its place knows nothing of it, and gives all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from paceline.codec.coding import Coding, nbytes, parts, room, seeded
from paceline.comm.bucket_layout import Bucket
from paceline.errors import Mismatch
from paceline.server.codings import Phases, at


class DeltaEncoder:
    """The values of one unit as its workers know them. `phases`: the codings that the unit travels in; `seed`: of random draws."""

    def __init__(self, phases: Phases, bucket: Bucket, seed: int) -> None:
        self._phases, self._bucket, self._seed = phases, bucket, seed
        self._sent: Tensor | None = None  # None: the value itself
        self._number = 0
        self._message: Tensor | None = None  # makes of the value before it the one that is sent now
        self._turn: int | None = None  # in which the message was encoded
        self._due: int | None = None  # a step of this turn has not been sent yet
        self._apart: dict[int, tuple[int, Tensor]] = {}  # by worker that is not in lockstep: the value that it has, and its number

    def decode(self, given: Tensor, used: bytes, turn: int) -> Tensor:
        """Decode a worker's push, as it lies in the unit; zeros where it has not `used` a piece. Raises `Mismatch` for another size."""
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
        """Encode what is due before the value changes; what has been sent stays as it is."""
        flat = self._bucket.flat
        if self._sent is None:
            self._sent = flat.clone()
        if self._due is None:
            return
        turn, self._due = self._due, None
        coding = at(self._phases, turn).coding
        self._turn = turn if coding is not None else None
        if coding is None:
            self._sent.copy_(flat)
            return
        self._message = self._news(coding, self._sent, turn)

    def _news(self, coding: Coding, announced: Tensor, turn: int, worker: int = 0) -> Tensor:
        """Encode the difference to `announced`, and let that become what workers make of it."""
        left = self._bucket.flat.sub(announced).float()
        whole, message = room(coding, left.numel())  # a new one each time: the one before may be on its way still
        coding.encode(left, message, seeded(turn, self._seed, worker))
        if announced.dtype == torch.float32:
            coding.add(message, announced)
        else:
            coding.decode(message, left)
            announced.add_(left.to(announced.dtype))
        return whole

    def stepped(self, turn: int) -> None:
        """Note that the value has changed, after `settle`."""
        self._number += 1
        self._due = turn

    def level(self) -> None:
        """Send the value itself from now on."""
        self._sent = self._message = self._turn = self._due = None
        self._number += 1

    def read(self, has: int | None) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Return what a worker with number `has` (None: nothing) lacks: the number, the turn if it is coded; and the tensors, if any."""
        if self._sent is not None:
            self.settle()
        if has == self._number:
            return {"number": self._number, "turn": None}, ()
        if self._message is not None and self._turn is not None and has == self._number - 1:
            return {"number": self._number, "turn": self._turn}, (self._message,)
        announced = self._bucket.flat if self._sent is None else self._sent
        return {"number": self._number, "turn": None}, (announced.clone(),)

    def read_apart(self, worker: int, has: int | None, turn: int) -> tuple[dict[str, Any], tuple[Tensor, ...]]:
        """Read for a worker that is not in lockstep, in this turn of its own. Raises `Mismatch` for a turn that is no number."""
        if type(turn) is not int:
            raise Mismatch(f"a unit is read in turn {turn!r}, which is no number")
        number, announced = self._apart.get(worker, (0, None))
        coding = at(self._phases, turn).coding
        if announced is None or has != number or coding is None:
            announced = self._bucket.flat.clone()
            self._apart[worker] = number + 1, announced
            return {"number": number + 1, "turn": None}, (announced,)
        message = self._news(coding, announced, turn, worker)  # it has the one before, so that is not on its way any more
        self._apart[worker] = number + 1, announced
        return {"number": number + 1, "turn": turn}, (message,)

    def forget(self, living: Collection[int]) -> None:
        """Forget what was sent to workers that are not among the living."""
        self._apart = {worker: copy for worker, copy in self._apart.items() if worker in living}

    @property
    def nbytes(self) -> int:
        """Bytes that this object holds."""
        kept = [self._sent, self._message, *(announced for _, announced in self._apart.values())]
        return sum(x.nbytes for x in kept if x is not None)

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a replica needs."""
        if self._sent is not None:
            self.settle()
        return {"told": self._sent, "number": self._number, "message": self._message, "turn": self._turn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` gave."""
        self._sent, self._message = (None if state[name] is None else state[name].clone() for name in ("told", "message"))
        self._number, self._turn, self._due = state["number"], state["turn"], None
