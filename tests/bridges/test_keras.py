"""`model.fit` of Keras on torch: each worker has its share, and losses are those of one process."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from paceline.codec.dense import int8
from paceline.errors import UsageError
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce
from paceline.sync.localsgd.strategy import LocalSGD
from tests.harness import runs

pytestmark = pytest.mark.bridges
if importlib.util.find_spec("keras") is not None:
    os.environ.setdefault("KERAS_BACKEND", "torch")
    import keras

    import paceline.bridges.keras as bridge
    from paceline.bridges.keras import batches, preparation

BATCH, EPOCHS = 8, 3
X = torch.randn(60, 3, generator=torch.Generator().manual_seed(1))
Y = (X.sum(1) > 0).long()
LOSS = 1e-5  # how far losses of several workers are from those of one, at most


def make_model(optimizer: Any, metrics: tuple[Any, ...] = ("accuracy",), **options: Any) -> Any:
    """A compiled model with the same weights in every call."""
    keras.utils.set_random_seed(0)
    first = keras.initializers.RandomNormal(stddev=0.5, seed=1)
    second = keras.initializers.RandomNormal(stddev=0.5, seed=2)
    model = keras.Sequential(
        [
            keras.layers.Dense(8, activation="tanh", kernel_initializer=first),
            keras.layers.Dense(2, kernel_initializer=second),
        ]
    )
    loss = options.pop("loss", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.compile(optimizer, loss=loss, metrics=list(metrics), **options)
    return model


def adam(**options: Any) -> Any:
    return keras.optimizers.Adam(1e-2, **options)


def training(count: int = 41) -> DataLoader[Any]:
    """With 41 samples the last batch has one, so that other workers are ghosts in it."""
    return DataLoader(TensorDataset(X[:count], Y[:count]), batch_size=BATCH)


def evaluation() -> DataLoader[Any]:
    return DataLoader(TensorDataset(X[41:], Y[41:]), batch_size=6)


def fit_plain(make: Callable[[], Any] = adam, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """Train on one process, without paceline: the history, and the weights."""
    model = make_model(make(), **options)
    model.test_on_batch(X[:1], Y[:1])
    done = model.fit(
        training(), validation_data=evaluation(), epochs=EPOCHS, verbose=0, shuffle=False
    )
    return done.history, model.get_weights()


def fit_shared(
    run: Run, make: Callable[[], Any] = adam, **options: Any
) -> tuple[dict[str, Any], list[Any]]:
    """The same by the bridge."""
    model = make_model(bridge.DistributedOptimizer(make()), **options)
    train, test = bridge.prepare(run, model, training(), evaluation())
    done = model.fit(train, validation_data=test, epochs=EPOCHS, verbose=0)
    return done.history, model.get_weights()


def assert_alike(one: dict[str, Any], other: dict[str, Any], bound: float = LOSS) -> None:
    assert one.keys() == other.keys()
    for name, series in one.items():
        assert series == pytest.approx(other[name], abs=bound), name


@pytest.mark.parametrize("size", [1, 2, 3])
def test_losses_metrics_and_weights_are_those_of_one_process(size: int) -> None:
    history, weights = fit_plain()
    answers = runs.workers(size, fit_shared)
    for own, values in answers:
        assert_alike(own, history)
        for value, expected, first in zip(values, weights, answers[0][1], strict=True):
            assert value == pytest.approx(expected, abs=LOSS)
            assert (value == first).all()  # to the bit on all workers


@pytest.mark.parametrize(
    "options",
    [
        {"global_clipnorm": 0.1},
        {"clipvalue": 0.01},
        {"weight_decay": 0.1},
        {"gradient_accumulation_steps": 2},
        {"use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 2},
        {"loss_scale_factor": 8.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_the_optimizer_act_on_the_mean_of_all(options: dict[str, Any]) -> None:
    def make() -> Any:
        return adam(**options)

    history, _ = fit_plain(make)
    other, _ = fit_plain()
    if "loss_scale_factor" not in options:  # which changes nothing by itself
        assert abs(history["loss"][-1] - other["loss"][-1]) > 10 * LOSS
    for own, _ in runs.workers(2, lambda run: fit_shared(run, make)):
        assert_alike(own, history)


def test_metrics_that_are_no_means_are_those_of_all_samples() -> None:
    def metrics() -> tuple[Any, ...]:
        return (keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score(), "mae")

    def make(optimizer: Any) -> tuple[Any, Any, Any]:
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer="ones")])
        model.compile(optimizer, loss="mse", metrics=list(metrics()))
        data = TensorDataset(X[:41], X[:41, :1] * 2 + 1)
        return model, DataLoader(data, batch_size=BATCH), DataLoader(data, batch_size=6)

    model, train, test = make(adam())
    plain = model.fit(train, validation_data=test, epochs=2, verbose=0, shuffle=False).history
    plain_end = model.evaluate(test, verbose=0)

    def body(run: Run) -> Any:
        model, train, test = make(bridge.DistributedOptimizer(adam()))
        shared, tested = bridge.prepare(run, model, train, test)
        done = model.fit(shared, validation_data=tested, epochs=2, verbose=0)
        return done.history, model.evaluate(tested, verbose=0)

    for own, end in runs.workers(3, body):
        assert_alike(own, plain)
        assert end == pytest.approx(plain_end, abs=LOSS)


class Noted(Dataset[Any]):
    """Samples that note who reads them."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return X[index], Y[index]


def read_samples(run: Run, **options: Any) -> list[int]:
    data = Noted()
    model = make_model(bridge.DistributedOptimizer("sgd"))
    train = bridge.prepare(run, model, DataLoader(data, batch_size=BATCH), **options)
    data.read.clear()
    model.fit(train, verbose=0)
    return data.read


def test_each_worker_has_a_part_of_each_batch_of_its_own() -> None:
    first, second = runs.workers(2, read_samples)
    assert (first, second) == ([0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15])


def test_shares_are_honoured() -> None:
    first, second = runs.workers(2, lambda run: read_samples(run, shares=[3, 1]))
    assert (len(first), len(second)) == (12, 4)


def test_weigh_is_honoured() -> None:
    """A batch in which only the second half counts gives the gradient of that half."""

    def body(run: Run) -> Any:
        model = make_model(bridge.DistributedOptimizer(keras.optimizers.SGD(0.1)))
        loader = DataLoader(TensorDataset(X[:8], Y[:8]), batch_size=8)
        train = bridge.prepare(
            run, model, loader, weigh=lambda batch: float(len(batch[0])) * run.rank
        )
        model.fit(train, verbose=0)
        return model.get_weights()

    alone = make_model(keras.optimizers.SGD(0.1))
    alone.fit(DataLoader(TensorDataset(X[4:8], Y[4:8]), batch_size=4), verbose=0, shuffle=False)
    for weights in runs.workers(2, body):
        for value, expected in zip(weights, alone.get_weights(), strict=True):
            assert value == pytest.approx(expected, abs=LOSS)


def test_a_batch_without_weight_is_no_step() -> None:
    def body(run: Run) -> int:
        model = make_model(bridge.DistributedOptimizer(adam()))
        train = bridge.prepare(
            run, model, training(16), weigh=lambda batch: float(bool((batch[0] == X[0]).any()))
        )
        model.fit(train, verbose=0)
        return int(model.optimizer.iterations)

    assert runs.workers(2, body) == [1, 1]


@pytest.mark.parametrize(
    "strategy", [AllReduce(codec=int8()), LocalSGD(every=2)], ids=["int8", "LocalSGD"]
)
def test_strategies_are_honoured(strategy: Any) -> None:
    history, _ = fit_plain()
    (own, one), (_, other) = runs.workers(2, fit_shared, strategy=strategy)
    assert abs(own["loss"][-1] - history["loss"][-1]) > 10 * LOSS  # so it isn't plain all-reduce
    assert own["loss"][-1] < own["loss"][0]
    for value, expected in zip(one, other, strict=True):
        assert (value == expected).all()


def test_checkpoints_go_on_with_another_number_of_workers(tmp_path: Path) -> None:
    history, weights = fit_plain()

    def body(run: Run) -> Any:
        model = make_model(bridge.DistributedOptimizer(adam()))
        train, test = bridge.prepare(run, model, training(), evaluation())
        run.resume()
        until = train.epoch + 1
        done = model.fit(
            train,
            validation_data=test,
            initial_epoch=train.epoch,
            epochs=until,
            verbose=0,
            callbacks=[bridge.RunCheckpoint(run)],
        )
        return train.epoch, done.history, model.get_weights()

    for epoch, size in enumerate([2, 3, 1]):
        answers = runs.workers(size, body, folder=tmp_path)
        for reached, own, _ in answers:
            assert reached == epoch + 1
            assert_alike(own, {name: [series[epoch]] for name, series in history.items()})
    for value, expected in zip(answers[0][2], weights, strict=True):
        assert value == pytest.approx(expected, abs=LOSS)


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    def body(run: Run, optimizer: Any) -> None:
        model = make_model(bridge.DistributedOptimizer(optimizer))
        train = bridge.prepare(run, model, training())
        run.resume()
        model.fit(train, verbose=0, callbacks=[bridge.RunCheckpoint(run)])

    runs.workers(1, lambda run: body(run, adam()), folder=tmp_path)
    with pytest.raises(Exception, match="velocity"):
        runs.workers(1, lambda run: body(run, keras.optimizers.SGD(0.1)), folder=tmp_path)


def test_early_stopping_ends_all_workers_in_the_same_epoch() -> None:
    def body(run: Run) -> int:
        model = make_model(bridge.DistributedOptimizer(keras.optimizers.SGD(5.0)))
        train, test = bridge.prepare(run, model, training(), evaluation())
        stop = keras.callbacks.EarlyStopping(monitor="val_loss", patience=1)
        done = model.fit(train, validation_data=test, epochs=30, verbose=0, callbacks=[stop])
        return len(done.history["loss"])

    one, other = runs.workers(2, body)
    assert one == other < 30


def test_a_saved_model_needs_no_paceline(tmp_path: Path) -> None:
    model = make_model(bridge.DistributedOptimizer(adam()))
    model.test_on_batch(X[:1], Y[:1])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded.optimizer) is type(adam())


# ---- callbacks


def test_checkpoints_are_written_every_few_epochs_and_the_best_is_known(tmp_path: Path) -> None:
    def body(run: Run) -> Any:
        model = make_model(bridge.DistributedOptimizer(adam()))
        train, test = bridge.prepare(run, model, training(), evaluation())
        saving = bridge.RunCheckpoint(run, every=2, keep=1, monitor="val_loss")
        model.fit(train, validation_data=test, epochs=5, verbose=0, callbacks=[saving])
        return sorted(path.name for path in run.folder.checkpoints.iterdir())

    names, _ = runs.workers(2, body, folder=tmp_path)
    assert [name for name in names if name.startswith("step-")] == ["step-00000024"]


def test_logs_reach_the_record_of_the_run(tmp_path: Path) -> None:
    def body(run: Run) -> Any:
        model = make_model(bridge.DistributedOptimizer(adam()))
        train = bridge.prepare(run, model, training())
        done = model.fit(train, epochs=2, verbose=0, callbacks=[bridge.RunLog(run)])
        return done.history, run.folder.path

    (history, folder), _ = runs.workers(2, body, folder=tmp_path)
    logged = json.loads((folder / "summary.json").read_text())["logged"]
    assert logged["accuracy"] == pytest.approx(history["accuracy"][-1])
    assert logged["loss"] == pytest.approx(history["loss"][-1])


def test_the_warm_up_raises_the_learning_rate() -> None:
    rates: list[float] = []

    class Rates(keras.callbacks.Callback):  # type: ignore[misc,name-defined]
        """Notes the rate of each step."""

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            rates.append(float(self.model.optimizer.learning_rate))

    def body(run: Run) -> None:
        model = make_model(bridge.DistributedOptimizer(keras.optimizers.SGD(0.4)))
        train = bridge.prepare(run, model, training())
        model.fit(train, verbose=0, callbacks=[bridge.LearningRateWarmup(4), Rates()])

    runs.workers(1, body)
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


# ---- refusals


def refuse(message: str, body: Callable[[Run], Any], size: int = 1, **options: Any) -> None:
    with pytest.raises(UsageError, match=message):
        runs.workers(size, body, **options)


def prepare_with(run: Run, **options: Any) -> Any:
    model = make_model(bridge.DistributedOptimizer("sgd"), **options)
    return model, bridge.prepare(run, model, training())


def test_a_step_without_prepare_is_refused() -> None:
    model = make_model(bridge.DistributedOptimizer("sgd"))
    with pytest.raises(UsageError, match=r"call paceline.bridges.keras.prepare"):
        model.fit(X, Y, verbose=0)


def test_another_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(UsageError, match=r"Keras runs on jax here.*KERAS_BACKEND=torch"):
        bridge.DistributedOptimizer("sgd")


def test_optimizers_that_cannot_be_honoured_are_refused() -> None:
    with pytest.raises(UsageError, match=r"got a torch.optim.sgd.SGD"):
        bridge.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(X)], 0.1))
    with pytest.raises(UsageError, match="mixed_bfloat16"):
        bridge.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(adam()))
    plain = make_model("sgd")
    refuse("compiled with SGD: write", lambda run: bridge.prepare(run, plain, training()))


def test_models_and_losses_that_cannot_be_honoured_are_refused() -> None:
    refuse("got a torch.nn", lambda run: bridge.prepare(run, torch.nn.Linear(3, 2), training()))
    refuse(
        "isn't compiled",
        lambda run: bridge.prepare(run, keras.Sequential([keras.layers.Dense(1)]), training()),
    )
    refuse("jit_compile=True", lambda run: prepare_with(run, jit_compile=True))
    total = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    refuse("has the reduction 'sum'", lambda run: prepare_with(run, loss=total))


def test_batchnorm_is_refused_unless_it_is_frozen() -> None:
    def body(run: Run, *, trainable: bool) -> None:
        layer = keras.layers.BatchNormalization(trainable=trainable)
        model = keras.Sequential([layer, keras.layers.Dense(2)])
        model.compile(bridge.DistributedOptimizer("sgd"), loss="mse")
        loader = DataLoader(TensorDataset(X, X[:, :2]), batch_size=BATCH)
        model.fit(bridge.prepare(run, model, loader), verbose=0)

    refuse("takes statistics of one worker's share", lambda run: body(run, trainable=True))
    runs.workers(2, lambda run: body(run, trainable=False))


def test_a_metric_of_an_unknown_kind_is_refused() -> None:
    class Largest(keras.metrics.Metric):  # type: ignore[misc,name-defined]
        """The largest output."""

        def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None: ...

        def result(self) -> Any:
            return 0.0

    class Mine(keras.metrics.Mean):  # type: ignore[misc,name-defined]
        """A mean of one's own."""

        def update_state(self, y: Any, prediction: Any, sample_weight: Any = None) -> None:
            super().update_state(prediction)

    refuse("Largest, of which nobody knows", lambda run: prepare_with(run, metrics=(Largest(),)))
    runs.workers(1, lambda run: prepare_with(run, metrics=(Mine(),)))


def test_data_that_keras_would_not_share_are_refused() -> None:
    def body(run: Run, x: Any = None, **options: Any) -> None:
        model, train = prepare_with(run)
        model.fit(train if x is None else x, verbose=0, **options)

    refuse("fit got a Tensor, and each worker", lambda run: body(run, X, y=Y))
    refuse("fit got class_weight beside", lambda run: body(run, class_weight={0: 1.0, 1: 2.0}))
    refuse("fit got steps_per_epoch beside", lambda run: body(run, steps_per_epoch=2))
    refuse(
        "got a Tensor: put arrays into",
        lambda run: bridge.prepare(run, make_model(bridge.DistributedOptimizer("sgd")), X),
    )


def test_servers_and_cuts_are_refused() -> None:
    from paceline.servers.worker.strategy import ParameterServer

    refuse("can't step on servers", prepare_with, 2, strategy=ParameterServer())
    refuse("can't be cut by paceline", prepare_with, 2, mesh="tensor=2")


def test_a_run_that_survives_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Parts:
        survival = object()

    monkeypatch.setattr(preparation, "parts_of_run", lambda run: Parts)
    refuse("can't train under --min-workers", prepare_with)


def test_warm_up_beside_a_schedule_is_refused() -> None:
    def body(run: Run) -> None:
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 10, 0.9)
        model = make_model(bridge.DistributedOptimizer(keras.optimizers.SGD(rate)))
        train = bridge.prepare(run, model, training())
        model.fit(train, verbose=0, callbacks=[bridge.LearningRateWarmup(2)])

    refuse("has a schedule of its learning rate", body)
    with pytest.raises(UsageError, match="steps=0"):
        bridge.LearningRateWarmup(0)


def test_a_checkpoint_without_its_metric_is_refused() -> None:
    def body(run: Run) -> None:
        model, train = prepare_with(run)
        model.fit(train, verbose=0, callbacks=[bridge.RunCheckpoint(run, monitor="val_loss")])

    refuse("there is no 'val_loss'", body)
    with pytest.raises(UsageError, match="every=0"):
        bridge.RunCheckpoint(None, every=0)  # type: ignore[arg-type]


def test_metrics_of_all_workers_are_summed_and_not_averaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A bridge that leaves the sum out has the metrics of its own share."""
    history, _ = fit_plain()
    monkeypatch.setattr(batches, "sum_metrics", lambda run, model: None)
    own, _ = runs.workers(2, fit_shared)[0]
    assert abs(own["loss"][0] - history["loss"][0]) > 10 * LOSS
