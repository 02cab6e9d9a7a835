"""Keeps workers along `stage` and `tensor` alike: same script, samples and random numbers.

tensor 0   batch 17   dropout 0.31 0.77 ...
tensor 1   batch 17   dropout 0.31 0.77 ...      they compute parts of the same result, so both must
                                                 read the same samples and draw the same numbers
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from paceline.comm.axis_meter import AxisMeter
from paceline.comm.group_protocol import Group
from paceline.data import rng
from paceline.data.serialization import pack_value, unpack_value
from paceline.errors import DataError, UsageError
from paceline.state.snapshot import view_cpu_bytes
from paceline.workers.axes import RunAxes

EARLY, OFTEN = 3, 100  # batches that are compared: the first 3, then every 100th


def check_options(options: Mapping[str, Any], axes: RunAxes) -> None:
    """Raise `UsageError` for options of a loader that don't work if workers share samples."""
    if axes.mesh.axis_size("tensor") * axes.mesh.axis_size("stage") == 1:
        return
    if options["shard"] == "mine":
        raise UsageError(
            'shard="mine" lets each rank read its own samples, and workers along `stage` and '
            f"`tensor` of the mesh ({axes.mesh}) need "
            "the same ones: leave it out, so that the whole stream is dealt"
        )


def share_randomness(axes: RunAxes) -> None:
    """Copy the states of torch, Python and numpy generators along `stage` and `tensor`.

    Collective.
    """
    group = axes.groups.group_along("stage", "tensor")
    if group.size > 1:
        # All workers of the group take the state of its first one.
        states = group.gather_bytes(
            pack_value(rng.get_shared_state(), what="the state of random generators")
            if group.rank == 0
            else b""
        )
        rng.set_shared_state(unpack_value(states[0]))


def compare_batches(
    move: Callable[[Any], Any] | None, axes: RunAxes
) -> Callable[[Any], Any] | None:
    """Make a function that moves a batch to its device, and compares some along the two axes."""
    group = axes.groups.group_along("stage", "tensor")
    if group.size == 1:
        return move
    meter = axes.groups.meter_along("tensor" if axes.mesh.axis_size("tensor") > 1 else "stage")
    return BatchComparer(group, meter, move, axes.slice.announce)


def find_tensors(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch that lie in mappings, lists and tuples."""
    if isinstance(batch, Tensor):
        yield batch
        return
    for part in (
        batch.values()
        if isinstance(batch, Mapping)
        else batch
        if isinstance(batch, list | tuple)
        else ()
    ):
        yield from find_tensors(part)


def checksum_batch(batch: Any) -> int:
    """Compute a checksum of a batch's tensors; 0 if there are none."""
    # Shapes and dtypes count as well: tensors of other shapes may have the same bytes.
    total = 0
    for tensor in find_tensors(batch):
        total = zlib.crc32(
            view_cpu_bytes(tensor.detach()).numpy().data,
            zlib.crc32(f"{tuple(tensor.shape)} {tensor.dtype}".encode(), total),
        )
    return total


def check_equal(group: Group, batch: Any, what: str, hint: str) -> None:
    """Raise `DataError` on all workers if a batch differs within a group. Collective.

    Args:
        group: Workers that should have the same batch.
        batch: This worker's batch.
        what: Name of the batch in the error.
        hint: What to do, in the error.
    """
    checksums = [
        int.from_bytes(body, "little")
        for body in group.gather_bytes(checksum_batch(batch).to_bytes(4, "little"))
    ]
    other = next((rank for rank, value in enumerate(checksums) if value != checksums[0]), None)
    if other is not None:
        one, two = group.global_rank(0), group.global_rank(other)
        raise DataError(
            f"{what} is not the same on ranks {one} and {two}, which need the same samples: {hint}"
        )


class BatchComparer:
    """Compares batches between workers that should have the same ones.

    All workers of the group call it for each batch.

    Args:
        group: The workers.
        meter: Measures the time of the comparison.
        move: Moves a batch to its device; None leaves it where it is.
        announce: Called once with a line if a batch can't be compared.
    """

    def __init__(
        self,
        group: Group,
        meter: AxisMeter,
        move: Callable[[Any], Any] | None,
        announce: Callable[[str], None],
    ) -> None:
        self._group, self._meter, self._move, self._announce, self._seen, self._warned = (
            group,
            meter,
            move,
            announce,
            0,
            False,
        )

    def __call__(self, batch: Any) -> Any:
        """Move the batch to its device, and compare it if its turn has come.

        Raises `DataError` on all workers if their batches differ.
        """
        # All workers count the same batches, so they compare the same ones.
        self._seen += 1
        if self._seen <= EARLY or self._seen % OFTEN == 0:
            self._compare_batch(batch)
        return batch if self._move is None else self._move(batch)

    def _compare_batch(self, batch: Any) -> None:
        if not self._warned and next(find_tensors(batch), None) is None:
            self._warned = True
            self._announce(
                f"batch {self._seen} of a loader is a {type(batch).__qualname__} without visible "
                "tensors, so it isn't compared along "
                "`tensor`, whose workers need the same samples: return tensors in dicts, lists or "
                "tuples to have them compared"
            )
        hint = "read and augment samples by a common seed (run.seed), and not by rank or time"
        with self._meter.measure_exchange("the batches"):
            check_equal(self._group, batch, f"batch {self._seen} of a loader", hint)
