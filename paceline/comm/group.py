"""The interface of a group of workers: its collectives, and the handle of one that is under way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, dtype

Op = Literal["sum", "mean", "min", "max", "product"]
OPS: tuple[Op, ...] = ("sum", "mean", "min", "max", "product")
T_co = TypeVar("T_co", covariant=True)


@dataclass
class Traffic:
    """Bytes this worker has sent: within its host, and to other hosts."""

    within: int = 0
    between: int = 0

    @property
    def pair(self) -> tuple[int, int]:
        """The bytes within the host, and those between hosts."""
        return self.within, self.between

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.within + other.within, self.between + other.between)

    def count(self, sent: Traffic) -> None:
        """Add what was sent, in place."""
        self.within += sent.within
        self.between += sent.between

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.within - other.within, self.between - other.between)


class Work(Protocol[T_co]):
    """Handle of an operation under way.

    Each waiter gets its error once, one of ours; dropping an unwaited Work keeps its buffers alive.
    """

    def wait(self, timeout: float | None = None) -> T_co:
        """Wait for the result and give it; at most `timeout` seconds (None: the group's
        deadline).
        """
        ...

    def done(self) -> bool:
        """Whether `wait` would return or raise at once.

        Never blocks, and may push the operation forward.
        """
        ...

    def exception(self) -> BaseException | None:
        """Return the error that ended the operation, if one has."""
        ...


class Finished:
    """A Work that has ended already."""

    def __init__(self, result: Any = None, error: BaseException | None = None) -> None:
        self._result, self._error = result, error

    def wait(self, timeout: float | None = None) -> Any:
        if self._error is not None:
            raise self._error
        return self._result

    def done(self) -> bool:
        return True

    def exception(self) -> BaseException | None:
        return self._error


class Group(Protocol):
    """Workers that move in lockstep.

    Every call is collective: all ranks make it, in the same order.

    Calls are checked before anything moves: a difference in operation, name, shape or dtype raises
    `Mismatch` on every rank, with both sides named. A wait past the deadline raises
    `DeadlineExceeded` naming the ranks that are missing.
    """

    rank: int  # of this worker, 0 <= rank < size
    size: int
    view: int  # number of the membership this group was made for

    @property
    def traffic(self) -> Traffic:
        """Bytes that this rank has sent."""
        ...

    @property
    def waited(self) -> float:
        """Seconds spent waiting for ranks that came later."""
        ...

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        """Send each (to, tensor) and fill each (from, tensor); all ranks call it, lists may be
        empty.
        """
        ...

    def all_reduce(
        self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce every rank's `x` (same shape, dtype), bit-equal on all ranks; into `out` (may be
        `x`), else a new tensor.

        This begins it: `all_reduce(x).wait()` is the tensor.
        """
        ...

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        """Reduce `x`, flattened and cut as `pieces(numel, size)` says; return the reduction of
        piece `rank` (1-D).
        """
        ...

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        """Gather every rank's `x`, in rank order.

        Shapes may differ in the first dim; dtypes and the other dims may not.
        """
        ...

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        """Fill `x` on every rank with the root's values, in place; return `x`."""
        ...

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        """Send xs[r] to rank r; return what every rank sent here, in rank order.

        Shapes may differ in the first dim.
        """
        ...

    def barrier(self, *, name: str | None = None) -> Work[None]:
        """Wait until every rank has called it."""
        ...

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        """Gather every rank's `obj` (JSON: dict, list, str, int, float, bool, None), in rank
        order.
        """
        ...

    def agree(self, payload: bytes) -> list[bytes]:
        """Gather every rank's payload (any length, not compared), on a control channel that never
        mixes with tensor traffic.

        Blocks until all have called it. A few microseconds inside a host; safe beside pending
        tensor operations.
        """
        ...

    def sub(self, ranks: Sequence[int]) -> Group | None:
        """Make the group of these ranks (None on the others); all ranks of this group call it
        with the same list.
        """
        ...

    def global_rank(self, rank: int) -> int:
        """Return the rank, in the group of all workers, of `rank` in this group."""
        ...

    def empty(self, shape: Sequence[int], dtype: dtype) -> Tensor:
        """Allocate memory that this group exchanges fastest (registered, shared inside a host);
        collective, same arguments on all ranks.
        """
        ...

    def close(self) -> None:
        """Leave in good order, and free threads, sockets and memory.

        Calling it twice is harmless.
        """
        ...

    def abort(self) -> None:
        """End every pending Work with an error, at once and without the others."""
        ...


@runtime_checkable
class UncheckedAllReduce(Protocol):
    """A group that can all-reduce what all ranks are known to agree on, without comparing it
    first: buckets, whose layout was agreed.
    """

    def all_reduce_agreed(
        self, x: Tensor, *, op: Op = "sum", out: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce as `Group.all_reduce` does, without finding differences between ranks."""
        ...


@runtime_checkable
class UncheckedReduceScatter(Protocol):
    """A group that compares calls while it waits for all ranks, and can reduce-scatter what they
    are known to agree on without that.
    """

    def reduce_scatter_agreed(self, x: Tensor, *, op: Op = "sum") -> Work[Tensor]:
        """Reduce as `Group.reduce_scatter` does, without finding differences between ranks.

        Never blocks.
        """
        ...


@runtime_checkable
class ConnectsAhead(Protocol):
    """A group that makes connections at the first call that needs them, if ranks wait for each
    other in it, or when it is told to.
    """

    def connect(self) -> None:
        """Make them, for calls in which ranks don't wait.

        Collective; not needed, as those calls have a longer way without them.
        """
        ...


@runtime_checkable
class WritesResults(Protocol):
    """A group that can write what it gathers and reduces into tensors that the caller has
    already, without a copy between.
    """

    def all_gather_into(
        self, x: Tensor, outs: Sequence[Tensor], *, name: str | None = None
    ) -> Work[list[Tensor]]:
        """Gather every rank's `x` into `outs`, one contiguous tensor for each rank, of the shape
        and dtype of `x`.
        """
        ...

    def reduce_scatter_into(
        self, x: Tensor, out: Tensor, *, op: Op = "sum", name: str | None = None
    ) -> Work[Tensor]:
        """Reduce `x` and write piece `rank` to `out`, contiguous and 1-D, as long as `pieces`
        says.
        """
        ...


@runtime_checkable
class MovesMemory(Protocol):
    """A group that reduces in place fastest where it may move the memory of tensors, which keep
    their storage.
    """

    def all_reduce_moving(self, x: Tensor, *, op: Op = "sum", may_move: bool) -> Work[Tensor]:
        """Reduce `x` in place as `Group.all_reduce` does; all ranks call this one, or all of them
        that.

        Its memory may move where `may_move` is true on all ranks: nobody else has its address.
        """
        ...


def begun(*written: Tensor) -> bool:
    """Whether an operation that begins here, and writes to these tensors, has to go on in inference
    mode.

    It may go on in another thread, or in a wait after the mode has ended; torch lets nothing write
    to tensors of that mode outside of it.
    """
    return torch.is_inference_mode_enabled() or any(x.is_inference() for x in written)


def as_begun(inference: bool) -> AbstractContextManager[Any]:
    """Go on with an operation, without gradients, in the mode that `begun` gave: what is new
    belongs to that mode, too.
    """
    return (
        torch.no_grad() if inference == torch.is_inference_mode_enabled() else _in_mode(inference)
    )


@contextmanager
def _in_mode(inference: bool) -> Iterator[None]:
    # in this order: the first alone brings gradients back
    with torch.inference_mode(inference), torch.no_grad():
        yield


def gather_into(
    group: Group, x: Tensor, outs: Sequence[Tensor], *, name: str | None = None
) -> Work[list[Tensor]]:
    """Gather every rank's `x` into `outs`, as `WritesResults` has it, if the group can write
    there; else the result lies elsewhere.
    """
    return (
        group.all_gather_into(x, outs, name=name)
        if isinstance(group, WritesResults)
        else group.all_gather(x, name=name)
    )


def pieces(numel: int, size: int) -> list[tuple[int, int]]:
    """Cut `numel` elements into (start, stop) of each rank's piece: contiguous, sizes differ by
    at most one, the first ones are larger.
    """
    base, extra = divmod(numel, size)
    starts = [r * base + min(r, extra) for r in range(size + 1)]
    return list(pairwise(starts))
