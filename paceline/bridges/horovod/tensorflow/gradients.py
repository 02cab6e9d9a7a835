"""Gradients that are means over all workers: for loops with a tape, and for optimizers of Keras.

Each gradient has the name of its variable, so that workers may list variables in another order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import keras
import tensorflow as tf

from paceline.bridges.horovod.common.process_sets import ProcessSet, global_process_set
from paceline.bridges.horovod.tensorflow.compression import Compressor
from paceline.bridges.horovod.tensorflow.compression import TensorCompression as Compression
from paceline.bridges.horovod.tensorflow.host_arrays import Reduction
from paceline.bridges.horovod.tensorflow.operations import (
    check_devices,
    reduce_slices,
    reduce_tensors,
)
from paceline.bridges.horovod.torch.mpi_ops import Average, Sum
from paceline.errors import UsageError

T = TypeVar("T")


class GradientExchange(NamedTuple):
    """How the gradients of a tape or an optimizer are exchanged."""

    prefix: str
    compression: type[Compressor]
    sparse_as_dense: bool
    reduction: Reduction

    def exchange_gradients(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Reduce gradients over all workers, in one exchange. Collective.

        Variables without a gradient (None) are left out.
        """
        if self.sparse_as_dense:
            gradients = [
                tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g for g in gradients
            ]
        names = [f"{self.prefix}.{name}" for name in name_variables(variables)]
        reduced = list(gradients)
        dense = [
            place
            for place, g in enumerate(gradients)
            if g is not None and not isinstance(g, tf.IndexedSlices)
        ]
        sparse = [place for place, g in enumerate(gradients) if isinstance(g, tf.IndexedSlices)]
        totals = reduce_tensors(
            [gradients[place] for place in dense],
            [names[place] for place in dense],
            self.reduction,
            self.compression,
        )
        totals += reduce_slices(
            [gradients[place] for place in sparse],
            [names[place] for place in sparse],
            self.reduction.op,
            self.reduction.process_set,
        )
        for place, total in zip([*dense, *sparse], totals, strict=True):
            reduced[place] = total
        return reduced


def name_variables(variables: Iterable[Any]) -> list[str]:
    """Name variables as TensorFlow or Keras names them; equal names get a number.

    >>> name_variables([tf.Variable(0.0), tf.Variable(0.0)])
    ['Variable:0', 'Variable:0.1']
    """
    seen = Counter[str]()
    names = []
    for variable in variables:
        name = str(getattr(variable, "path", None) or getattr(variable, "name", "tensor"))
        names.append(f"{name}.{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return names


def make_exchange(
    prefix: str,
    *,
    compression: type[Compressor],
    sparse_as_dense: bool,
    op: Any,
    gradient_predivide_factor: float,
    process_set: ProcessSet,
) -> GradientExchange:
    """Make the exchange of Horovod's options.

    Raises `UsageError` for an option that can't be honoured.
    """
    if op not in (Average, Sum):
        raise UsageError(f"gradients are reduced by Average or Sum, and op is {op!r}")
    if gradient_predivide_factor != 1.0 and op != Average:
        raise UsageError("gradient_predivide_factor divides a mean: it needs op=Average")
    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        raise UsageError(
            f"this is inside of a {type(strategy).__name__}, which exchanges gradients itself: "
            "leave the strategy out; paceline run starts a process for each worker"
        )
    factor = gradient_predivide_factor
    return GradientExchange(
        prefix, compression, sparse_as_dense, Reduction(op, 1.0 / factor, factor, process_set)
    )


class _Tape:
    """A `tf.GradientTape` whose gradients are reduced over all workers."""

    def __init__(self, tape: Any, exchange: GradientExchange) -> None:
        self._tape, self._exchange = tape, exchange

    def __enter__(self) -> _Tape:
        self._tape.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._tape.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        if name == "_tape":
            raise AttributeError(name)  # copying asks before it is set
        return getattr(self._tape, name)

    def gradient(self, target: Any, sources: Any, **options: Any) -> Any:
        """Compute gradients as the tape does, and reduce them. Collective."""
        # `tf.nest` takes None and `tf.IndexedSlices` for leaves.
        gradients = tf.nest.flatten(self._tape.gradient(target, sources, **options))
        reduced = self._exchange.exchange_gradients(gradients, tf.nest.flatten(sources))
        return tf.nest.pack_sequence_as(sources, reduced)


def DistributedGradientTape(  # noqa: PLR0917  in Horovod's order
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: Any = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Let a `tf.GradientTape` give gradients that are means over all workers.

    >>> tape = hvd.DistributedGradientTape(tape)
    >>> gradients = tape.gradient(loss, model.trainable_variables)

    Args:
        gradtape: The tape.
        device_dense: Refused unless it is empty: exchanges run on the host.
        device_sparse: As `device_dense`.
        compression: How gradients are made smaller. Default: they aren't.
        sparse_as_dense: Whether `tf.IndexedSlices` are made dense before. Default: False.
        op: Average (default) or Sum.
        gradient_predivide_factor: Part of the mean's division that is done before the sum, against
            overflow. Default: 1, all of it is done after.
        process_set: Workers that take part. Default: all.
    """
    check_devices(device_dense, device_sparse)
    exchange = make_exchange(
        "tape",
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    return _Tape(gradtape, exchange)


class _ExchangingOptimizer:
    """What `DistributedOptimizer` puts before the class of a Keras optimizer."""

    _horovod_exchange: GradientExchange

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Reduce the gradients over all workers, and step."""
        own: Any = self
        every = own._trainable_variables if trainable_variables is None else trainable_variables
        variables, gradients = list(every), list(grads)
        own_apply: Callable[..., None] = super().apply  # type: ignore[misc]
        own_apply(self._horovod_exchange.exchange_gradients(gradients, variables), variables)


def DistributedOptimizer(  # noqa: PLR0917  in Horovod's order
    optimizer: T,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = Average,
    backward_passes_per_step: int = 1,
    process_set: ProcessSet = global_process_set,
) -> T:
    """Let an optimizer of Keras step with gradients that are means over all workers.

    >>> model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(1e-3)), loss="mse")

    Args:
        optimizer: The optimizer, for Keras on TensorFlow.
        name: Prefix of the names by which workers find each other. Default: the optimizer's name.
        device_dense: Refused unless it is empty: exchanges run on the host.
        device_sparse: As `device_dense`.
        compression: How gradients are made smaller. Default: they aren't.
        sparse_as_dense: Whether `tf.IndexedSlices` are made dense before. Default: False.
        gradient_predivide_factor: Part of the mean's division that is done before the sum.
            Default: 1, all of it is done after.
        op: Average (default) or Sum.
        backward_passes_per_step: Refused unless it is 1 (default).
        process_set: Workers that take part. Default: all.

    Returns:
        The same object. Its class has another `apply`, and the same name.
    """
    check_devices(device_dense, device_sparse)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise UsageError(
            f"DistributedOptimizer got a {type(optimizer).__module__}."
            f"{type(optimizer).__qualname__}; give it an optimizer of keras.optimizers"
        )
    if (backend := keras.backend.backend()) != "tensorflow":
        raise UsageError(
            f"Keras runs on {backend} here: set the environment variable "
            "KERAS_BACKEND=tensorflow before Keras is imported (for torch there is "
            "paceline.bridges.keras)"
        )
    if backward_passes_per_step != 1:
        raise UsageError(
            f"backward_passes_per_step={backward_passes_per_step} can't be honoured: give the "
            "optimizer gradient_accumulation_steps, which Keras has for this"
        )
    own: Any = optimizer
    exchange = make_exchange(
        name or own.name,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        op=op,
        gradient_predivide_factor=gradient_predivide_factor,
        process_set=process_set,
    )
    if not isinstance(own, _ExchangingOptimizer):
        # Keras writes the module and the name of the class into its files, so both stay.
        kind = type(own)
        body = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        object.__setattr__(
            own, "__class__", type(kind.__name__, (_ExchangingOptimizer, kind), body)
        )
    object.__setattr__(own, "_horovod_exchange", exchange)
    return optimizer
