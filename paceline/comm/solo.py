"""The group of one worker, in which nothing has to travel."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.fingerprint import (
    choosing,
    compare,
    dealing,
    exchanging,
    matching,
    objects,
    parcel,
    reducing,
    rooted,
    rows,
)
from paceline.comm.group import Finished, Group, Op, Traffic, Work, as_begun, begun
from paceline.comm.reduction import admit
from paceline.errors import UsageError


class SoloGroup:
    """A `Group` of size 1."""

    def __init__(self, *, view: int = 0, rank: int = 0) -> None:
        self.rank, self.size, self.view = 0, 1, view
        self.traffic = Traffic()
        self.waited = 0.0
        self._global = rank

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        """Deliver messages to oneself."""
        call = exchanging(sends, recvs, tag, 1)
        compare([(str(call), call.flaw)])
        matching(
            [[[(to, parcel(x)) for to, x in sends], [(source, parcel(x)) for source, x in recvs]]],
            (self._global,),
        )
        arrived = [x.detach().clone(memory_format=torch.contiguous_format) for _, x in sends]
        with as_begun(begun(*(into for _, into in recvs))):
            for (_, into), x in zip(recvs, arrived, strict=True):
                into.detach().copy_(x.view(into.shape))
        return Finished()

    def all_reduce(
        self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None
    ) -> Work[Tensor]:
        """Copy `x`, which is the sum of one."""
        _check(reducing("all_reduce", x, op, name, out).flaw)
        admit(op, x.dtype)
        if out is None:
            return Finished(x.detach().clone(memory_format=torch.contiguous_format))
        with as_begun(begun(out)):
            return Finished(out if out is x else out.copy_(x.detach()))

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        """Return all of `x`, flattened."""
        _check(reducing("reduce_scatter", x, op, name).flaw)
        admit(op, x.dtype)
        return Finished(x.detach().reshape(-1).clone())

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        _check(rows("all_gather", x, name).flaw)
        return Finished([x.detach().clone(memory_format=torch.contiguous_format)])

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        _check(rooted(x, root, 1, name).flaw)
        return Finished(x)

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        _check(dealing(xs, 1, name).flaw)
        return Finished([xs[0].detach().clone(memory_format=torch.contiguous_format)])

    def barrier(self, *, name: str | None = None) -> Work[None]:
        return Finished()

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        text, call = objects(obj, name)
        compare([(str(call), call.flaw)])
        return [json.loads(text)]

    def agree(self, payload: bytes) -> list[bytes]:
        return [payload]

    def sub(self, ranks: Sequence[int]) -> Group | None:
        call = choosing(ranks, 1)
        compare([(str(call), call.flaw)])
        return SoloGroup(view=self.view, rank=self._global)

    def global_rank(self, rank: int) -> int:
        return self._global

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate ordinary memory."""
        with torch.inference_mode(False):  # it may outlive an evaluation that it is first used in
            return torch.empty(tuple(shape), dtype=dtype)

    def close(self) -> None: ...

    def abort(self) -> None: ...


def _check(flaw: str) -> None:
    if flaw:
        raise UsageError(flaw)
