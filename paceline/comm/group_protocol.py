"""Interface of a group of workers: its collectives, and the handle of an operation under way.

    work = group.all_reduce(x)     begins it; other work can go on meanwhile
    ...
    total = work.wait()            the result, or one of paceline's errors

`Group` is what every kind of group has: `SoloGroup` (one worker), `SharedGroup` (one host),
`TorchGroup` (any hosts) and `HostsGroup` (several hosts, shared memory inside each). The smaller
protocols below it are abilities that only some groups have.
"""

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
    """Number of bytes that this worker has sent: within its host, and to other hosts."""

    within: int = 0
    between: int = 0

    @property
    def as_pair(self) -> tuple[int, int]:
        """Bytes sent within the host, and bytes sent between hosts."""
        return self.within, self.between

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.within + other.within, self.between + other.between)

    def add_sent(self, sent: Traffic) -> None:
        """Add the bytes of `sent` to these, in place."""
        self.within += sent.within
        self.between += sent.between

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.within - other.within, self.between - other.between)


class Work(Protocol[T_co]):
    """Handle of an operation under way.

    Every error is one of paceline's own, and every waiter gets it. A Work may be dropped without
    a wait: the operation goes on, and keeps its buffers alive.
    """

    def wait(self, timeout: float | None = None) -> T_co:
        """Wait for the result, and return it.

        Args:
            timeout: Seconds to wait at most; a wait that they end may be tried again. Default:
                the deadline of the group.
        """
        ...

    def done(self) -> bool:
        """Whether `wait` would end at once. Never blocks, but may advance the operation."""
        ...

    def exception(self) -> BaseException | None:
        """Return the error that ended the operation, or None. Never blocks."""
        ...


class FinishedWork:
    """A Work that has ended before it is returned."""

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
    """Workers that move in lockstep: all ranks make every call, in the same order.

    Calls are compared before anything moves. If ranks differ in the operation, name, shape or
    dtype, `Mismatch` is raised on every rank and shows both sides. A wait past the deadline raises
    `DeadlineExceeded`, which names the missing ranks. A call that can't be honoured raises
    `UsageError` on every rank.

    `name` of a collective is the caller's word for it. It is part of the comparison, and stands
    in errors.
    """

    rank: int  # of this worker, 0 <= rank < size
    size: int
    view: int  # number of the membership this group was made for

    @property
    def traffic(self) -> Traffic:
        """Number of bytes that this rank has sent."""
        ...

    @property
    def waited(self) -> float:
        """Seconds that this rank has spent waiting for slower ranks."""
        ...

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        """Send tensors to some ranks and receive tensors from some, all at once.

        Args:
            sends: Pairs (rank, tensor to send to it). May be empty.
            recvs: Pairs (rank, tensor to fill with what it sends). May be empty. Each send needs
                a receive of the same shape and dtype on the other side.
            tag: Number that tells exchanges under way at the same time apart. Default: 0.

        Returns:
            A Work that is done when everything has been received and may be written to again.
        """
        ...

    def all_reduce(
        self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None
    ) -> Work[Tensor]:
        """Begin to reduce every rank's `x`. The result has the same bits on all ranks.

        Args:
            x: A tensor of the same shape and dtype on all ranks.
            op: "sum" (default), "mean", "min", "max" or "product".
            name: The caller's word for this call. Default: none.
            out: Where the result goes; may be `x`. Default: a new tensor.

        Returns:
            A Work that gives `out`, or the new tensor.

        Example:
            >>> group.all_reduce(torch.ones(2)).wait()  # on three ranks
            tensor([3., 3.])
        """
        ...

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        """Reduce `x`, and give each rank one piece of the result.

        Args:
            x: A tensor of the same shape and dtype on all ranks. It is flattened and cut into
                `piece_bounds(x.numel(), size)`.
            op: "sum" (default), "mean", "min", "max" or "product".
            name: The caller's word for this call. Default: none.

        Returns:
            A Work that gives the reduction of piece `rank`, of one dim.
        """
        ...

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        """Gather every rank's `x`, in rank order. Only the first dim may differ between ranks."""
        ...

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        """Fill `x` on every rank with the values of rank `root`, in place, and return `x`."""
        ...

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        """Send `xs[r]` to rank r, and return the tensors sent here, in rank order.

        Shapes may differ in the first dim.
        """
        ...

    def barrier(self, *, name: str | None = None) -> Work[None]:
        """Wait until every rank has made this call."""
        ...

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        """Gather every rank's `obj`, in rank order. It must be JSON: dict, list, str, int, ..."""
        ...

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        """Gather every rank's `payload`, in rank order. Blocks until all ranks have called it.

        Payloads may have any length, and are not compared. They go over a control channel of
        their own, so this is safe while tensor operations are pending. It takes a few
        microseconds inside a host.
        """
        ...

    def make_subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Make the group of these ranks; None on the others. All ranks pass the same list."""
        ...

    def global_rank(self, rank: int) -> int:
        """Return the rank in the group of all workers of a rank of this group."""
        ...

    def empty(self, shape: Sequence[int], dtype: dtype) -> Tensor:
        """Allocate a tensor in the memory that this group exchanges fastest.

        Inside a host it is shared memory that all ranks have mapped. Collective: all ranks pass the
        same arguments.
        """
        ...

    def close(self) -> None:
        """Leave in good order, and free threads, sockets and memory. May be called twice."""
        ...

    def abort(self) -> None:
        """End every pending Work with an error, at once, without a word from the other ranks."""
        ...


@runtime_checkable
class UncheckedAllReduce(Protocol):
    """A group that can all-reduce without comparing the call first.

    For buckets of gradients: all ranks have agreed on their layout once, so comparing each call
    again would only cost time.
    """

    def all_reduce_agreed(
        self, x: Tensor, *, op: Op = "sum", out: Tensor | None = None
    ) -> Work[Tensor]:
        """Reduce as `Group.all_reduce` does, but without a check that ranks agree."""
        ...


@runtime_checkable
class UncheckedReduceScatter(Protocol):
    """A group that can reduce-scatter without comparing the call first.

    A comparison blocks until all ranks have come; this call never does.
    """

    def reduce_scatter_agreed(self, x: Tensor, *, op: Op = "sum") -> Work[Tensor]:
        """Reduce as `Group.reduce_scatter` does, but without a check that ranks agree."""
        ...


@runtime_checkable
class ConnectsAhead(Protocol):
    """A group that makes some connections late: at the first compared call that needs them."""

    def connect(self) -> None:
        """Make these connections now. Collective.

        Calls that are not compared can't make them, as ranks don't wait for each other there. They
        work without connections as well, but are slower.
        """
        ...


@runtime_checkable
class WritesResults(Protocol):
    """A group that can write results into tensors of the caller, without a copy in between."""

    def all_gather_into(
        self, x: Tensor, outs: Sequence[Tensor], *, name: str | None = None
    ) -> Work[list[Tensor]]:
        """Gather every rank's `x` into `outs`.

        Args:
            x: A tensor of the same shape and dtype on all ranks.
            outs: One contiguous tensor for each rank, of the shape and dtype of `x`.
            name: The caller's word for this call. Default: none.

        Returns:
            A Work that gives `outs`.
        """
        ...

    def reduce_scatter_into(
        self, x: Tensor, out: Tensor, *, op: Op = "sum", name: str | None = None
    ) -> Work[Tensor]:
        """Reduce `x`, and write piece `rank` to `out`.

        Args:
            x: A tensor of the same shape and dtype on all ranks.
            out: A contiguous tensor of one dim, as long as piece `rank` of `piece_bounds`.
            op: As in `Group.reduce_scatter`. Default: "sum".
            name: The caller's word for this call. Default: none.
        """
        ...


@runtime_checkable
class MovesMemory(Protocol):
    """A group that reduces in place fastest if it may move the memory of tensors.

    A moved tensor keeps its storage object; only the address behind it changes.
    """

    def all_reduce_moving(self, x: Tensor, *, op: Op = "sum", may_move: bool) -> Work[Tensor]:
        """Reduce `x` in place. All ranks make this call; it does not match `Group.all_reduce`.

        Args:
            x: A tensor of the same shape and dtype on all ranks.
            op: As in `Group.all_reduce`. Default: "sum".
            may_move: Whether nothing else holds the address of `x`. Its memory moves only if this
                is true on all ranks.
        """
        ...


def needs_inference_mode(*written: Tensor) -> bool:
    """Whether an operation that begins here has to go on in inference mode.

    It may go on in another thread, or in a wait after the mode has ended. Torch lets nothing write
    to a tensor that was made in inference mode outside of that mode, so the tensors that the
    operation writes to count as well.
    """
    return torch.is_inference_mode_enabled() or any(x.is_inference() for x in written)


def resume_mode(inference: bool) -> AbstractContextManager[Any]:
    """Go on with an operation without gradients, in the mode that `needs_inference_mode` gave.

    Tensors that are made here then belong to that mode, too.
    """
    return (
        torch.no_grad()
        if inference == torch.is_inference_mode_enabled()
        else _in_inference_mode(inference)
    )


@contextmanager
def _in_inference_mode(inference: bool) -> Iterator[None]:
    # In this order: leaving inference mode alone would switch gradients on again.
    with torch.inference_mode(inference), torch.no_grad():
        yield


def gather_into(
    group: Group, x: Tensor, outs: Sequence[Tensor], *, name: str | None = None
) -> Work[list[Tensor]]:
    """Gather every rank's `x`, into `outs` if the group can write there, else elsewhere.

    The caller compares addresses: the result is `outs` only for groups with `WritesResults`.
    """
    return (
        group.all_gather_into(x, outs, name=name)
        if isinstance(group, WritesResults)
        else group.all_gather(x, name=name)
    )


def piece_bounds(numel: int, size: int) -> list[tuple[int, int]]:
    """Cut `numel` elements into the (start, stop) of each rank's piece.

    Pieces are contiguous, and their sizes differ by one at most. The first ones are the larger.

    >>> piece_bounds(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    base, extra = divmod(numel, size)
    starts = [rank * base + min(rank, extra) for rank in range(size + 1)]
    return list(pairwise(starts))
