"""The group of one worker, in which nothing has to travel.

Calls are checked as in other groups, so a script's mistakes show with one worker already.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from paceline.comm.fingerprint import (
    all_to_all_call,
    broadcast_call,
    check_calls_agree,
    check_messages_match,
    describe_message,
    exchange_call,
    objects_call,
    reduction_call,
    rows_call,
    subgroup_call,
)
from paceline.comm.group_protocol import (
    FinishedWork,
    Group,
    Op,
    Traffic,
    Work,
    needs_inference_mode,
    resume_mode,
)
from paceline.comm.reduction_rules import check_operation
from paceline.errors import UsageError


class SoloGroup:
    """A `Group` of size 1.

    Args:
        view: Number of the membership that this group was made for. Default: 0.
        rank: Rank of the worker in the group of all workers. Default: 0.
    """

    def __init__(self, *, view: int = 0, rank: int = 0) -> None:
        self.rank, self.size, self.view = 0, 1, view
        self.traffic = Traffic()
        self.waited = 0.0
        self._global_rank = rank

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        """Deliver this rank's messages to itself."""
        call = exchange_call(sends, recvs, tag, 1)
        check_calls_agree([(str(call), call.flaw)])
        check_messages_match(
            [
                [
                    [(to, describe_message(x)) for to, x in sends],
                    [(source, describe_message(x)) for source, x in recvs],
                ]
            ],
            (self._global_rank,),
        )
        # Copy everything first: a tensor to fill may be one of those to send.
        arrived = [x.detach().clone(memory_format=torch.contiguous_format) for _, x in sends]
        with resume_mode(needs_inference_mode(*(into for _, into in recvs))):
            for (_, into), x in zip(recvs, arrived, strict=True):
                into.detach().copy_(x.view(into.shape))
        return FinishedWork()

    def all_reduce(
        self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None
    ) -> Work[Tensor]:
        """Copy `x`, the sum of a single part."""
        _raise_flaw(reduction_call("all_reduce", x, op, name, out).flaw)
        check_operation(op, x.dtype)
        if out is None:
            return FinishedWork(x.detach().clone(memory_format=torch.contiguous_format))
        with resume_mode(needs_inference_mode(out)):
            return FinishedWork(out if out is x else out.copy_(x.detach()))

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        """Return all of `x`, flattened."""
        _raise_flaw(reduction_call("reduce_scatter", x, op, name).flaw)
        check_operation(op, x.dtype)
        return FinishedWork(x.detach().reshape(-1).clone())

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        _raise_flaw(rows_call("all_gather", x, name).flaw)
        return FinishedWork([x.detach().clone(memory_format=torch.contiguous_format)])

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        _raise_flaw(broadcast_call(x, root, 1, name).flaw)
        return FinishedWork(x)

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        _raise_flaw(all_to_all_call(xs, 1, name).flaw)
        return FinishedWork([xs[0].detach().clone(memory_format=torch.contiguous_format)])

    def barrier(self, *, name: str | None = None) -> Work[None]:
        return FinishedWork()

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        text, call = objects_call(obj, name)
        check_calls_agree([(str(call), call.flaw)])
        return [json.loads(text)]

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        return [payload]

    def make_subgroup(self, ranks: Sequence[int]) -> Group | None:
        call = subgroup_call(ranks, 1)
        check_calls_agree([(str(call), call.flaw)])
        return SoloGroup(view=self.view, rank=self._global_rank)

    def global_rank(self, rank: int) -> int:
        return self._global_rank

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate ordinary memory."""
        # It may outlive the evaluation in which it is first used.
        with torch.inference_mode(False):
            return torch.empty(tuple(shape), dtype=dtype)

    def close(self) -> None: ...

    def abort(self) -> None: ...


def _raise_flaw(flaw: str) -> None:
    if flaw:
        raise UsageError(flaw)
