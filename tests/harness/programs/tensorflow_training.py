"""Trains with TensorFlow on each worker, and writes what came of each part.

tensorflow_training.py OUT     leaves OUT/RANK.json: {part: what came of it}

Each part that has a reference also trains on the whole batches without exchanging anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["KERAS_BACKEND"], os.environ["TF_CPP_MIN_LOG_LEVEL"] = "tensorflow", "3"

import keras  # noqa: E402
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402

import paceline.bridges.horovod.tensorflow as hvd  # noqa: E402
import paceline.bridges.horovod.tensorflow.keras as hvd_keras  # noqa: E402
from paceline.bridges.horovod.tensorflow import host_arrays  # noqa: E402

BATCH, BATCHES, EPOCHS = 12, 4, 2
X = np.random.default_rng(0).normal(size=(BATCH * BATCHES, 3)).astype("float32")
Y = X.sum(1, keepdims=True)
WARM = hvd_keras.callbacks.LearningRateWarmupCallback


def make_model() -> Any:
    keras.utils.set_random_seed(1)
    layers = [keras.Input((3,)), keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(1)]
    return keras.Sequential(layers)


def make_arrays(*, whole: bool) -> tuple[Any, Any]:
    """All samples, or this worker's part of each batch, one batch after the other."""
    share = BATCH // hvd.size()
    kept = range(BATCH) if whole else range(hvd.rank() * share, (hvd.rank() + 1) * share)
    rows = [batch * BATCH + row for batch in range(BATCHES) for row in kept]
    return X[rows], Y[rows]


def train_by_tape(*, whole: bool, graph: bool = True, **options: Any) -> tuple[list[float], Any]:
    """A loop with a tape: the loss of each step, and the weights."""
    model, optimizer = make_model(), keras.optimizers.Adam(0.05)

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        if not whole:
            tape = hvd.DistributedGradientTape(tape, **options)
        variables = model.trainable_variables
        if not whole and hvd.rank() == 1:
            variables = variables[::-1]  # in another order on this worker
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss if whole else hvd.allreduce(loss)

    optimizer.build(model.trainable_variables)
    run_step, losses = tf.function(step) if graph else step, []
    x, y = make_arrays(whole=whole)
    count = len(x) // BATCHES
    for _ in range(EPOCHS):
        for first in range(0, len(x), count):
            part = slice(first, first + count)
            losses.append(float(run_step(tf.constant(x[part]), tf.constant(y[part]))))
    return losses, list_weights(model)


def train_by_fit(
    *, whole: bool, make: Callable[[Any], Any] = hvd_keras.DistributedOptimizer, **options: Any
) -> tuple[dict[str, Any], Any]:
    """`model.fit`: its history, and the weights."""
    model = make_model()
    if not whole and hvd.rank() > 0:  # the callback makes them equal
        model.set_weights([weight + 1 for weight in model.get_weights()])
    adam = keras.optimizers.Adam(0.05, **options)
    model.compile(adam if whole else make(adam), loss="mse", metrics=["mae"])
    callbacks = [WARM(0.05, 1, steps_per_epoch=BATCHES)]
    if not whole:
        callbacks.insert(0, hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0))
        callbacks.insert(1, hvd_keras.callbacks.MetricAverageCallback())
    x, y = make_arrays(whole=whole)
    options = {"epochs": EPOCHS, "shuffle": False, "verbose": 0, "callbacks": callbacks}
    history = model.fit(x, y, batch_size=len(x) // BATCHES, **options).history
    return history, list_weights(model)


def list_weights(model: Any) -> list[Any]:
    return [weight.tolist() for weight in model.get_weights()]


def train_in_all_ways() -> dict[str, Any]:
    return {
        "fit": [train_by_fit(whole=True), train_by_fit(whole=False)],
        "fit, clipped": [
            train_by_fit(whole=True, global_clipnorm=0.1),
            train_by_fit(whole=False, global_clipnorm=0.1),
        ],
        "tape": [train_by_tape(whole=True), train_by_tape(whole=False)],
        "eager tape": [train_by_tape(whole=True), train_by_tape(whole=False, graph=False)],
        "predivided": train_by_tape(whole=False, gradient_predivide_factor=2.0),
        "summed": train_by_tape(whole=False, op=hvd.Sum),
        "half": train_by_tape(whole=False, compression=hvd.Compression.fp16),
    }


def train_without_exchange() -> Any:
    """A mutant whose reductions give back what they got."""
    kept = mock.Mock(side_effect=lambda arrays, names, reduction: list(arrays))
    with mock.patch.object(host_arrays, "reduce_arrays", kept):
        return train_by_tape(whole=False)


def operate() -> dict[str, Any]:
    """Each operation on small tensors, eager and in a graph."""
    rank = hvd.rank()
    own = tf.constant([float(rank + 1), 2.0])
    operations: dict[str, Callable[[], Any]] = {
        "average": lambda: hvd.allreduce(own),
        "sum": lambda: hvd.allreduce(own, average=False),
        "min": lambda: hvd.allreduce(own, op=hvd.Min),
        "max": lambda: hvd.allreduce(own, op=hvd.Max),
        "product": lambda: hvd.allreduce(own, op=hvd.Product),
        "scaled": lambda: hvd.allreduce(
            own, op=hvd.Sum, prescale_factor=3.0, postscale_factor=10.0
        ),
        "half": lambda: hvd.allreduce(own + 1 / 4096, compression=hvd.Compression.fp16),
        "bfloat16": lambda: tf.cast(
            hvd.allreduce(tf.cast(own, tf.bfloat16), op=hvd.Sum), tf.float32
        ),
        "int64": lambda: hvd.allreduce(tf.cast(own, tf.int64), op=hvd.Sum),
        "group": lambda: hvd.grouped_allreduce([own, own[:1] * 2], op=hvd.Sum, name="both"),
        "slices": lambda: tf.convert_to_tensor(
            hvd.allreduce(tf.IndexedSlices(own[:1], [rank], [hvd.size()]), op=hvd.Sum)
        ),
        "gather": lambda: hvd.allgather(tf.fill([rank + 1], rank)),
        "broadcast": lambda: hvd.broadcast(own, hvd.size() - 1),
        "alltoall": lambda: hvd.alltoall(tf.range(hvd.size()) + 10 * rank),
        "alltoall, uneven": lambda: hvd.alltoall(
            tf.fill([sum(range(hvd.size()))], rank), splits=list(range(hvd.size()))
        ),
    }
    results = {}
    for name, operation in operations.items():
        results[name] = to_lists(operation())
        results[f"{name}, in a graph"] = to_lists(tf.function(operation)())
    return results


def to_lists(value: Any) -> Any:
    return (
        [to_lists(part) for part in value]
        if isinstance(value, list | tuple)
        else (value.numpy().tolist())
    )


def differentiate() -> list[float]:
    x = tf.Variable([1.0, 2.0])
    with tf.GradientTape() as tape:
        y = tf.reduce_sum(hvd.allreduce(x * x, op=hvd.Sum) * float(hvd.rank() + 1))
    gradient: list[float] = tape.gradient(y, x).numpy().tolist()
    return gradient


def train_embedding(*, dense: bool) -> Any:
    """A gradient of slices; whether it is one afterwards, and its dense form."""
    table = tf.Variable(np.ones((4, 1)), name="table")
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [hvd.rank() % 2, 2]))
    gradient = hvd.DistributedGradientTape(tape, sparse_as_dense=dense).gradient(loss, table)
    return isinstance(gradient, tf.IndexedSlices), to_lists(tf.convert_to_tensor(gradient))


def set_rates() -> list[float]:
    """The learning rate of each epoch, by a schedule that begins in the second."""
    model = make_model()
    model.compile(keras.optimizers.SGD(0.5), loss="mse")
    schedule = hvd_keras.callbacks.LearningRateScheduleCallback(
        1.0, 0.5, start_epoch=1, end_epoch=3
    )
    done = model.fit(X, Y, epochs=4, verbose=0, callbacks=[schedule])
    rates: list[float] = done.history["lr"]
    return rates


def join_unevenly() -> list[Any]:
    """The first worker has a step more than the others."""
    steps = [hvd.allreduce(tf.ones(1), name=f"step{step}") for step in range(2 - (hvd.rank() > 0))]
    return [to_lists(steps), hvd.join()]


def average_in_a_set() -> Any:
    """Only the first worker and the last of three average; of two, the last one is alone."""
    if hvd.size() == 1:
        return None
    members = hvd.add_process_set([0, 2] if hvd.size() > 2 else [1])
    own = tf.constant([float(hvd.rank())])
    mean = to_lists(hvd.allreduce(own, process_set=members)) if members.included() else None
    refused = "" if members.included() else refuse(lambda: hvd.allreduce(own, process_set=members))
    hvd.remove_process_set(members)
    return [mean, refused]


def save_and_load(folder: Path) -> str:
    model = make_model()
    model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
    path = folder / f"{hvd.rank()}.keras"
    model.save(path)
    return type(keras.models.load_model(path).optimizer).__mro__[0].__name__ + str(
        hasattr(keras.models.load_model(path).optimizer, "_horovod_exchange")
    )


def refuse(act: Callable[[], Any]) -> str:
    """The kind and the text of the error of `act`."""
    try:
        act()
    except Exception as error:  # noqa: BLE001  it is the result
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refuse_all() -> dict[str, str]:
    sgd, one = keras.optimizers.SGD, tf.ones(1)
    uneven = tf.zeros(2 + hvd.rank())
    slices = tf.IndexedSlices(one, [0], [1])

    def fit_with_momentum() -> None:
        model = make_model()
        model.compile(sgd(0.1, momentum=0.9), loss="mse")
        model.fit(X, Y, verbose=0, callbacks=[WARM(0.1)])

    with replicas():
        strategy = refuse(lambda: hvd.DistributedOptimizer(sgd()))
    return {
        "shapes": refuse(lambda: hvd.allreduce(uneven, name="uneven")),
        "shapes in a graph": refuse(tf.function(lambda: hvd.allreduce(uneven, name="uneven"))),
        "dtypes": refuse(
            lambda: hvd.allreduce(tf.cast(one, [tf.int32, tf.int64][hvd.rank() % 2]), name="kind")
        ),
        "roots": refuse(lambda: hvd.broadcast(one, hvd.rank() % 2, name="root")),
        "root": refuse(lambda: hvd.broadcast(one, 9)),
        "splits": refuse(lambda: hvd.alltoall(one, splits=[2] * hvd.size())),
        "rows": refuse(lambda: hvd.alltoall(tf.ones(hvd.size() + 1))),
        "device": refuse(lambda: hvd.allreduce(one, device_dense="/gpu:0")),
        "op and average": refuse(lambda: hvd.allreduce(one, average=True, op=hvd.Sum)),
        "slices": refuse(lambda: hvd.allreduce(slices, op=hvd.Max)),
        "scaled slices": refuse(lambda: hvd.allreduce(slices, prescale_factor=2.0)),
        "group of slices": refuse(lambda: hvd.grouped_allreduce([slices])),
        "gradient op": refuse(lambda: hvd.DistributedGradientTape(None, op=hvd.Max)),
        "predivided sum": refuse(
            lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Sum, gradient_predivide_factor=2.0)
        ),
        "passes": refuse(lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2)),
        "optimizer": refuse(lambda: hvd.DistributedOptimizer(object())),
        "strategy": strategy,
        "set": refuse(lambda: hvd.allreduce(one, process_set=hvd.ProcessSet([0]))),
        "momentum": refuse(fit_with_momentum),
    }


@contextlib.contextmanager
def replicas() -> Iterator[None]:
    """A strategy of TensorFlow with two replicas on this process."""
    cpu = tf.config.list_physical_devices("CPU")
    assert len(cpu) == 1
    with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
        yield


def main(folder: Path) -> None:
    configuration = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0], [configuration] * 2
    )
    hvd.init()
    hvd.init()  # a second call does nothing
    results = {
        "place": [hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(), hvd.cross_size()],
        **train_in_all_ways(),
        "mutant": train_without_exchange(),
        "operations": operate(),
        "gradient": differentiate(),
        "sparse": train_embedding(dense=False),
        "sparse as dense": train_embedding(dense=True),
        "rates": set_rates(),
        "join": join_unevenly(),
        "set": average_in_a_set(),
        "objects": [
            hvd.allgather_object({"rank": hvd.rank()}),
            hvd.broadcast_object(hvd.rank(), 0),
        ],
        "saved": save_and_load(folder),
        "refused": refuse_all(),
    }
    hvd.barrier()
    (folder / f"{hvd.rank()}.json").write_text(json.dumps(results))
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
