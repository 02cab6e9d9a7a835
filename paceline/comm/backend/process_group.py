"""paceline as a backend of torch.distributed: a process group that is made of our groups.

    dist.init_process_group("paceline")
        dist.all_reduce, DDP, fully_shard, DTensor, pipelining    call a `GroupBackend`
            collectives    a Group: shared memory inside a host, one copy per host between hosts
            send, recv     Gloo, connected when they are first used

An operation is compared on all ranks before anything moves. Workers that make different calls get
a `Mismatch` that shows both sides.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from paceline.comm.backend.base import only_tensor, root_rank
from paceline.comm.backend.reducing_backend import ReducingBackend
from paceline.comm.backend.uncompiled import mark_uncompiled
from paceline.comm.backend.work import BackendWork, PairWork
from paceline.comm.group_protocol import Group, Work, gather_into
from paceline.errors import UsageError

SHORTEST = 1e-3  # seconds of the shortest wait


@mark_uncompiled
class GroupBackend(ReducingBackend):
    """A process group of torch.distributed over a `Group`, made at the first operation."""

    # ---- gathering and dealing
    #
    # Torch's C++ calls one overload of each method, with lists that hold one tensor.

    # torch calls one of the overloads
    def allgather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        """Gather the tensors of all ranks into a list. They may differ in the first dim."""
        x, outs = only_tensor(inputs, "all_gather"), only_tensor(outputs, "all_gather")
        if len(outs) != self._size:
            raise UsageError(
                f"all_gather: {len(outs)} tensors for the results of {self._size} ranks; "
                "give one for each rank"
            )
        return self._all_gather(outs, x, opts, outs)

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        """Gather several tensors, each from all ranks. `outputs`: a list for each rank."""
        works = [
            self._all_gather([outs[i] for outs in outputs], x, opts, outputs)
            for i, x in enumerate(inputs)
        ]
        return self._join_works(works, opts, outputs)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None) -> BackendWork:
        """Gather the tensors of all ranks into one tensor, one after another."""
        if output.numel() != source.numel() * self._size or output.dtype != source.dtype:
            sizes = f"{source.dtype} {list(source.shape)} into {output.dtype} {list(output.shape)}"
            raise UsageError(
                f"all_gather over {self._size} ranks can't put {sizes}: "
                "the output holds the inputs of all ranks"
            )
        if output.is_contiguous():
            return self._all_gather(
                list(output.view(self._size, *source.shape).unbind()), source, opts, [output]
            )

        def finish(parts: list[Tensor]) -> None:
            output.copy_(torch.stack(parts).view(output.shape))

        return self._begin_operation(lambda group: group.all_gather(source), finish, opts, [output])

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        """Gather several tensors as `all_gather_single` does."""
        return self._join_works(
            [self.all_gather_single(out, x, opts) for out, x in zip(outputs, inputs, strict=True)],
            opts,
            outputs,
        )

    _allgather_base = all_gather_single  # type: ignore[assignment]  # name before torch 2.13
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def _all_gather(
        self, outs: Sequence[Tensor], x: Tensor, opts: Any, outputs: Any
    ) -> BackendWork:
        # The group writes into `outs` if they are laid out as it sends.
        fit = (
            all(
                out.shape == x.shape and out.dtype == x.dtype and out.is_contiguous()
                for out in outs
            )
            and not x.is_complex()
        )

        def call(group: Group) -> Work[Any]:
            return gather_into(group, x, outs) if fit else group.all_gather(x)

        return self._begin_operation(call, lambda parts: _copy_all(outs, parts), opts, outputs)

    # torch calls one of the overloads
    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> BackendWork:  # type: ignore[override]
        """Give all ranks the values of the root rank, in place."""
        x, root = only_tensor(tensors, "broadcast"), root_rank(opts)
        return self._begin_operation(lambda group: group.broadcast(x, root=root), None, opts, [x])

    # torch calls one of the overloads
    def gather(  # type: ignore[override]
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        """Gather the tensors of all ranks on the root rank."""
        x, root, me = only_tensor(inputs, "gather"), root_rank(opts), self._rank
        if me != root:
            return self._begin_operation(
                lambda group: group.exchange([(root, x)], []), None, opts, outputs
            )
        outs = only_tensor(outputs, "gather")
        if len(outs) != self._size:
            raise UsageError(
                f"gather: {len(outs)} tensors for the results of {self._size} ranks; "
                "give one for each rank"
            )
        outs[me].copy_(x)
        return self._begin_operation(
            lambda group: group.exchange([], [(r, out) for r, out in enumerate(outs) if r != me]),
            None,
            opts,
            outs,
        )

    # torch calls one of the overloads
    def scatter(  # type: ignore[override]
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> BackendWork:
        """Give each rank its tensor of the list that the root rank has."""
        out, root, me = only_tensor(outputs, "scatter"), root_rank(opts), self._rank
        if me != root:
            return self._begin_operation(
                lambda group: group.exchange([], [(root, out)]), None, opts, outputs
            )
        parts = only_tensor(inputs, "scatter")
        if len(parts) != self._size:
            raise UsageError(
                f"scatter: {len(parts)} tensors for {self._size} ranks; give one for each rank"
            )
        out.copy_(parts[me])
        return self._begin_operation(
            lambda group: group.exchange(
                [(r, part) for r, part in enumerate(parts) if r != me], []
            ),
            None,
            opts,
            outputs,
        )

    def alltoall(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> BackendWork:
        """Send one tensor of a list to each rank. Shapes may differ."""
        return self._all_to_all(outputs, inputs, opts, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        source: Tensor,
        output_splits: list[int],
        input_splits: list[int],
        opts: Any = None,
    ) -> BackendWork:
        """Cut a tensor in its first dim, evenly or by the splits, and send a part to each rank."""
        outs, parts = (
            _split_rows(output, output_splits, self._size),
            _split_rows(source, input_splits, self._size),
        )
        return self._all_to_all(outs, parts, opts, [output])

    alltoall_base = all_to_all_single  # type: ignore[assignment]  # the name of torch before 2.13

    def _all_to_all(
        self, outs: list[Tensor], parts: list[Tensor], opts: Any, outputs: Any
    ) -> BackendWork:
        if len(parts) != self._size or len(outs) != self._size:
            raise UsageError(
                f"all_to_all: {len(parts)} tensors into {len(outs)}, and there are {self._size} "
                "ranks; give one for each rank"
            )
        flat = [part.reshape(-1) for part in parts]
        return self._begin_operation(
            lambda group: group.all_to_all(flat),
            lambda received: _copy_all(outs, received),
            opts,
            outputs,
        )

    # ---- barriers

    def barrier(self, opts: Any = None) -> BackendWork:
        """Wait for all ranks."""
        return self._begin_operation(lambda group: group.barrier(), None, opts, [])

    def monitored_barrier(
        self, timeout: timedelta | float | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks.

        Args:
            timeout: How long to wait; a float is in seconds. Default: the deadline of the group.
            wait_all_ranks: Ignored. `DeadlineExceeded` always names all missing ranks.
        """
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        options = dist.BarrierOptions()
        # Not in the background: the completer's wait could not be interrupted after `seconds` to
        # name the missing ranks.
        options.asyncOp = False
        barrier = self.barrier(options)
        try:
            barrier.wait_and_raise(None if seconds is None else max(seconds, SHORTEST))
        finally:
            if not barrier.ended:  # ranks that come later still meet this one
                self._completer.add_work(barrier)

    # ---- between two ranks

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> BackendWork:
        """Send a tensor to one rank."""
        name = self._ranks[to]
        work = PairWork(
            self._pairs.send(tensors, to, tag),
            f"rank {name} has not received what was sent to it",
            name,
        )
        return self._wrap_message(work, tensors)

    def recv(self, tensors: list[Tensor], source: int, tag: int = 0) -> BackendWork:
        """Receive a tensor from one rank."""
        name = self._ranks[source]
        work = PairWork(
            self._pairs.recv(tensors, source, tag),
            f"rank {name} has not sent what is awaited from it",
            name,
        )
        return self._wrap_message(work, tensors)

    def recv_anysource(self, tensors: list[Tensor], tag: int = 0) -> Any:
        """Receive a tensor from the rank that sends first. The Work gives its rank."""
        return self._pairs.recv_anysource(tensors, tag)


def _split_rows(x: Tensor, splits: list[int], size: int) -> list[Tensor]:
    """Cut a tensor in its first dim: as the splits say, or evenly into `size` parts."""
    if splits:
        return list(x.split(splits))
    if x.shape[0] % size:
        raise UsageError(
            f"all_to_all: {x.shape[0]} rows can't be dealt evenly to {size} ranks; give splits"
        )
    return list(x.split(x.shape[0] // size)) if x.shape[0] else [x] * size


def _copy_all(outs: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    for out, part in zip(outs, parts, strict=True):
        if out.data_ptr() != part.data_ptr():
            out.copy_(part.view(out.shape))
