"""What a rank asks for, as plain data, and the comparison of what several ranks ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

Shape = tuple[int, ...]

# Kinds whose ranks may differ in the first dim, and kinds of which a joined rank takes part.
_UNEVEN_KINDS = ("allgather", "alltoall")
_JOINABLE_KINDS = ("allreduce", "barrier")
# Kinds that make or end a process set: all ranks have to agree on the numbers, too.
SET_KINDS = ("add_process_set", "remove_process_set")


class OperationKey(NamedTuple):
    """What ranks agree on first: operations with equal keys belong together."""

    process_set: int
    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind}.{self.name}"


class OperationRequest(NamedTuple):
    """One operation of one rank.

    Args:
        key: What it is called. The kind is "allreduce", "allgather", "broadcast", "alltoall",
            "reducescatter", "barrier", "join", "add_process_set" or "remove_process_set".
        dtypes: Type of each tensor, such as "float32". A grouped operation has several tensors.
        shapes: Shape of each tensor.
        op: Reduction: "average", "sum", "adasum", "min", "max" or "product"; "" for none.
        root: Global rank whose values are broadcast; -1 for none.
        prescale: Factor before a reduction.
        postscale: Factor after a reduction.
        numbers: Rows for each rank of an alltoall, or the ranks or the id of a process set.
    """

    key: OperationKey
    dtypes: tuple[str, ...] = ()
    shapes: tuple[Shape, ...] = ()
    op: str = ""
    root: int = -1
    prescale: float = 1.0
    postscale: float = 1.0
    numbers: tuple[int, ...] = ()

    @classmethod
    def from_wire(cls, fields: Sequence[Any]) -> OperationRequest:
        """Make a request from the lists that msgpack has made of one."""
        key, dtypes, shapes, op, root, prescale, postscale, numbers = fields
        return cls(
            OperationKey(*key),
            tuple(dtypes),
            tuple(map(tuple, shapes)),
            op,
            root,
            prescale,
            postscale,
            tuple(numbers),
        )


def find_disagreement(
    requests: Mapping[int, OperationRequest], absent: Sequence[int], ranks: Sequence[int]
) -> str:
    """Describe the first thing in which ranks disagree; "" if they agree.

    Args:
        requests: What each rank asks for, by rank. The keys of all are equal.
        absent: Ranks of the process set that have joined, so that they ask for nothing.
        ranks: All ranks of the process set.
    """
    first_rank, first = next(iter(requests.items()))
    kind = first.key.kind
    if absent and kind not in _JOINABLE_KINDS:
        return (
            f"{first.key}: {kind.capitalize()} is not supported with Join at this time: "
            f"{list_ranks(absent)} joined"
        )
    if absent and first.op not in ("", "sum", "average"):
        return f"{first.key}: op {first.op} is not supported with Join: {list_ranks(absent)} joined"
    if kind == "broadcast" and first.root not in ranks:
        return f"{first.key}: root rank {first.root} is not one of {list_ranks(ranks)}"
    if kind in ("allgather", "alltoall", "reducescatter"):
        for rank, request in requests.items():
            if any(not shape for shape in request.shapes):
                return f"{first.key}: Rank {rank} tried to {kind} a rank-zero tensor"
    for rank, request in requests.items():
        for what, ours, theirs in (
            ("number of tensors", len(first.shapes), len(request.shapes)),
            ("data types", first.dtypes, request.dtypes),
            (f"{kind} operations", first.op, request.op),
            (f"{kind} root ranks", first.root, request.root),
            (f"{kind} tensor shapes", _comparable(first), _comparable(request)),
            ("prescale factors", first.prescale, request.prescale),
            ("postscale factors", first.postscale, request.postscale),
            *([("process sets", first.numbers, request.numbers)] if kind in SET_KINDS else []),
        ):
            if ours != theirs:
                return (
                    f"{first.key}: Mismatched {what}: rank {first_rank} has {_format(ours)}, "
                    f"but rank {rank} has {_format(theirs)}"
                )
    return ""


def list_ranks(ranks: Sequence[int]) -> str:
    """Format ranks for a message: "rank 1", "ranks 1, 3"."""
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, ranks))}"


def _comparable(request: OperationRequest) -> list[list[int]]:
    """Get the parts of the shapes that have to be equal on all ranks."""
    start = 1 if request.key.kind in _UNEVEN_KINDS else 0
    return [[len(shape), *shape[start:]] for shape in request.shapes]


def _format(value: object) -> str:
    if isinstance(value, list):  # comparable shapes: the number of dims leads
        return " and ".join(
            str(dims[1:]) if dims[0] < len(dims) else f"[*, {dims[1:]}]" for dims in value
        )
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
