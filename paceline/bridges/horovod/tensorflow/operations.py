"""Horovod's operations on tensors of TensorFlow, eager or in a graph.

In a graph an operation is a call of Python on the host (`tf.numpy_function`). TensorFlow runs such
calls one after another, in the order of the script; `grouped_allreduce` sends all of its tensors
before it waits, so only there the order may differ between workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from paceline.bridges.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.bridges.horovod.tensorflow import host_arrays
from paceline.bridges.horovod.tensorflow.compression import Compressor
from paceline.bridges.horovod.tensorflow.compression import TensorCompression as Compression
from paceline.bridges.horovod.tensorflow.host_arrays import Reduction
from paceline.bridges.horovod.torch import mpi_ops
from paceline.bridges.horovod.torch.mpi_ops import Adasum, Average, ReductionOp, Sum
from paceline.errors import UsageError


def allreduce(  # noqa: PLR0917  in Horovod's order
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Reduce a tensor over all workers. Collective.

    The gradient of the result is reduced in the same way.

    Args:
        tensor: A tensor, a variable, or `tf.IndexedSlices`, of the same shape on all workers.
        average: Older form of `op`: True for Average, False for Sum.
        device_dense: Refused unless it is empty: exchanges run on the host.
        device_sparse: As `device_dense`.
        compression: How the tensor is made smaller. Default: it isn't.
        op: Average (default), Sum, Min, Max or Product.
        prescale_factor: Factor before the reduction. Default: 1.
        postscale_factor: Factor after the reduction. Default: 1.
        name: Name by which workers find each other. Default: the number of the call.
        process_set: Workers that take part. Default: all.
    """
    check_devices(device_dense, device_sparse)
    op = choose_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        if prescale_factor != 1.0 or postscale_factor != 1.0:
            raise UsageError(
                "prescale_factor and postscale_factor are for dense tensors: make the "
                "tf.IndexedSlices dense with tf.convert_to_tensor"
            )
        return reduce_slices([tensor], [name], op, process_set)[0]
    reduction = Reduction(op, prescale_factor, postscale_factor, process_set)
    return reduce_tensors([tf.convert_to_tensor(tensor)], [name], reduction, compression)[0]


def grouped_allreduce(  # noqa: PLR0917  in Horovod's order
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce several tensors over all workers, all at once. Collective.

    The arguments are those of `allreduce`, for dense tensors.
    """
    check_devices(device_dense, device_sparse)
    if any(isinstance(tensor, tf.IndexedSlices) for tensor in tensors):
        raise UsageError(
            "grouped_allreduce takes dense tensors: make tf.IndexedSlices dense with "
            "tf.convert_to_tensor, or give them to allreduce"
        )
    names = [None if name is None else f"{name}.{place}" for place in range(len(tensors))]
    reduction = Reduction(choose_op(op, average), prescale_factor, postscale_factor, process_set)
    return reduce_tensors(list(map(tf.convert_to_tensor, tensors)), names, reduction, compression)


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Gather the rows (dim 0) of all workers, whose number may differ. Collective.

    The result has no gradient.
    """
    own = tf.convert_to_tensor(tensor)
    return gather_tensors([own], [name], process_set)[0]


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of the worker `root_rank` on all workers. Collective.

    The result has no gradient.
    """
    own = tf.convert_to_tensor(tensor)
    return broadcast_tensors([own], [name], root_rank, process_set)[0]


def broadcast_variables(
    variables: Any, root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Give variables the values of the worker `root_rank`. Collective.

    Args:
        variables: Variables of TensorFlow or Keras, in the same order on all workers.
        root_rank: The worker whose values are taken.
        process_set: Workers that take part. Default: all.
    """
    every = list(variables)
    values = [tf.convert_to_tensor(variable) for variable in every]
    names = [f"broadcast_variables.{place}" for place in range(len(every))]
    for variable, value in zip(
        every, broadcast_tensors(values, names, root_rank, process_set), strict=True
    ):
        variable.assign(value)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each worker some rows of a tensor, and return those that are for this worker.

    Collective. The result has no gradient.

    Args:
        tensor: The rows (dim 0), first those for rank 0.
        splits: Number of rows for each worker. Default: as many for each.
        name: Name by which workers find each other. Default: the number of the call.
        process_set: Workers that take part. Default: all.

    Returns:
        The rows; with `splits` a pair of the rows and their number from each worker.
    """
    own = tf.convert_to_tensor(tensor)
    counts = [] if splits is None else [tf.cast(splits, tf.int32)]

    def exchange(array: Any, given: Any = None) -> list[Any]:
        return list(host_arrays.exchange_rows(array, given, name, process_set))

    shapes = [[None, *own.shape[1:]], [None]]
    rows, received = call_on_host(exchange, [own, *counts], [own.dtype, tf.int32], shapes)
    return rows if splits is None else (rows, received)


# ---- beneath them


def choose_op(op: Any, average: bool | None) -> ReductionOp:
    """Choose the reduction of `op` and the older `average`. Raises `UsageError` for Adasum."""
    chosen = mpi_ops.choose_op(op, average)
    if chosen == Adasum:
        raise UsageError("Adasum is for torch only here: use Average or Sum")
    return chosen


def check_devices(*devices: str) -> None:
    """Raise `UsageError` if an exchange is wanted on a device."""
    if any(devices):
        raise UsageError(
            f"device_dense and device_sparse ({', '.join(filter(None, devices))}) can't be "
            "honoured: exchanges run on the host, so leave them out"
        )


def call_on_host(
    function: Callable[..., list[Any]], tensors: list[Any], dtypes: list[Any], shapes: list[Any]
) -> list[Any]:
    """Call a function of arrays now, or as a part of the graph that is being made."""
    if tf.executing_eagerly():
        return [tf.convert_to_tensor(array) for array in function(*[x.numpy() for x in tensors])]
    results = tf.numpy_function(function, tensors, dtypes)
    for result, shape in zip(results, shapes, strict=True):
        result.set_shape(shape)
    return list(results)


def reduce_tensors(
    tensors: list[Any],
    names: Sequence[str | None],
    reduction: Reduction,
    compression: type[Compressor],
) -> list[Any]:
    """Reduce dense tensors at once, with a gradient. Collective."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce_all(*inputs: Any) -> Any:
        packed = [compression.compress(tensor) for tensor in inputs]
        small = [tensor for tensor, _ in packed]
        totals = call_on_host(
            lambda *arrays: host_arrays.reduce_arrays(arrays, names, reduction),
            small,
            [tensor.dtype for tensor in small],
            [tensor.shape for tensor in small],
        )
        results = [
            compression.decompress(total, context)
            for total, (_, context) in zip(totals, packed, strict=True)
        ]

        def differentiate(*gradients: Any) -> list[Any]:
            if reduction.op not in (Average, Sum):
                raise UsageError(f"only Average and Sum have a gradient, not {reduction.op.name}")
            again = [None if name is None else f"{name}.gradient" for name in names]
            return reduce_tensors(list(gradients), again, reduction, compression)

        return results, differentiate

    return list(reduce_all(*tensors)) if tensors else []


def gather_tensors(
    tensors: list[Any], names: Sequence[str | None], process_set: ProcessSet
) -> list[Any]:
    """Gather the rows of several tensors at once. Collective."""
    return call_on_host(
        lambda *arrays: host_arrays.gather_arrays(arrays, names, process_set),
        tensors,
        [tensor.dtype for tensor in tensors],
        [[None, *tensor.shape[1:]] for tensor in tensors],
    )


def broadcast_tensors(
    tensors: list[Any], names: Sequence[str | None], root_rank: int, process_set: ProcessSet
) -> list[Any]:
    """Copy several tensors of one worker at once. Collective."""
    return call_on_host(
        lambda *arrays: host_arrays.broadcast_arrays(arrays, names, root_rank, process_set),
        tensors,
        [tensor.dtype for tensor in tensors],
        [tensor.shape for tensor in tensors],
    )


def reduce_slices(
    slices: list[Any], names: Sequence[str | None], op: ReductionOp, process_set: ProcessSet
) -> list[Any]:
    """Sum or average sparse tensors: the slices of all workers, one after the other. Collective."""
    if op not in (Average, Sum):
        raise UsageError(f"tf.IndexedSlices can be summed or averaged, and op is {op.name}")
    if not slices:
        return []
    parts = [*(each.values for each in slices), *(each.indices for each in slices)]
    parts = list(map(tf.convert_to_tensor, parts))
    own_names = [
        None if name is None else f"{name}.{part}"
        for part in ("values", "indices")
        for name in names
    ]
    gathered = gather_tensors(parts, own_names, process_set)
    count = process_set.size() or 1
    return [
        tf.IndexedSlices(
            values if op == Sum else values / tf.cast(count, values.dtype),
            indices,
            each.dense_shape,
        )
        for values, indices, each in zip(
            gathered[: len(slices)], gathered[len(slices) :], slices, strict=True
        )
    ]
