"""A metric that is logged is that of all samples once: with ghosts, unequal shares, odd last
batches, and workers that part.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from paceline.errors import UsageError
from paceline.record.logged.metric import HeldMetricState, MetricValues, is_metric
from paceline.session.run import Run
from paceline.sync.localsgd.strategy import LocalSGD
from tests.harness.runs import cut, workers

torchmetrics = pytest.importorskip("torchmetrics")
from torchmetrics import (  # noqa: E402
    MaxMetric,
    MeanMetric,
    MetricCollection,
    MetricTracker,
    MinMaxMetric,
    PearsonCorrCoef,
)
from torchmetrics.classification import (  # noqa: E402
    BinaryAUROC,
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MulticlassF1Score,
    MulticlassPrecision,
)
from torchmetrics.wrappers import ClasswiseWrapper  # noqa: E402

GENERATOR = torch.Generator().manual_seed(11)
SCORES, CLASSES = (
    torch.randn(23, 3, generator=GENERATOR),
    torch.randint(0, 3, (23,), generator=GENERATOR),
)
Made = Callable[[], Any]


def classes(metric: Any, scores: Tensor, target: Tensor) -> None:
    metric.update(scores, target)


def binary(metric: Any, scores: Tensor, target: Tensor) -> None:
    # scores outside of 0 to 1 it would squash, batch by batch
    metric.update(scores[:, 0].sigmoid(), (target > 0).long())


def numbers(metric: Any, scores: Tensor, target: Tensor) -> None:
    metric.update(scores[:, 0], scores[:, 1])


def one(metric: Any, scores: Tensor, target: Tensor) -> None:
    metric.update(scores[:, 0])


def together() -> MetricCollection:
    """Metrics that share a state, as they need the same one."""
    return MetricCollection({"precision": MulticlassPrecision(3), "f1": MulticlassF1Score(3)})


METRICS: dict[str, tuple[Made, Callable[..., None]]] = {
    "accuracy": (lambda: MulticlassAccuracy(3, average="micro"), classes),
    "macro": (lambda: MulticlassF1Score(3), classes),
    "of each class": (lambda: MulticlassAccuracy(3, average=None), classes),
    "all scores": (BinaryAUROC, binary),
    "correlation": (PearsonCorrCoef, numbers),
    "mean": (MeanMetric, one),
    "largest": (MaxMetric, one),
    "wrapped": (lambda: ClasswiseWrapper(MulticlassAccuracy(3, average=None)), classes),
    "computed": (lambda: MeanMetric() + 2 * MeanMetric(), one),
    "collection": (together, classes),
}


def whole(made: Made, update: Callable[..., None]) -> dict[str, float]:
    """The value over all samples at once."""
    metric = made()
    update(metric, SCORES, CLASSES)
    values = MetricValues()
    values.register_metric("x", metric)
    return values.compute_values("x", [HeldMetricState(metric).pack_state()])


def lines(folder: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (folder / "test" / "metrics.jsonl").read_text().splitlines()
    ]


def over(
    batch: int, made: Made, update: Callable[..., None], **options: Any
) -> Callable[[Run], None]:
    """One epoch over all samples, whose metric is logged at the end of it."""

    def body(run: Run) -> None:
        metric, loader = run.prepare(
            made(), DataLoader(TensorDataset(SCORES, CLASSES), batch_size=batch), **options
        )
        for scores, target in loader:
            update(metric, scores, target)
        run.log(x=metric)

    return body


@pytest.mark.parametrize("name", METRICS)
def test_it_is_that_of_all_samples_once(name: str, tmp_path: Path) -> None:
    made, update = METRICS[name]
    workers(3, over(4, made, update), folder=tmp_path)  # the last batch has 3 samples
    # and here 1, of which a worker has a ghost
    workers(2, over(11, made, update, shares=cut(10, 1)), folder=tmp_path / "unequal")
    wanted = whole(made, update)
    assert len(wanted) == {"of each class": 3, "wrapped": 3, "collection": 2}.get(name, 1)
    for folder in (tmp_path, tmp_path / "unequal"):
        found = lines(folder)[-1]
        assert {key: found[key] for key in wanted} == pytest.approx(wanted, abs=1e-6)
        assert found["step"] == len(lines(folder)) - 1
        assert json.loads((folder / "test" / "summary.json").read_text())[
            "logged"
        ] == pytest.approx(wanted, abs=1e-6)


def test_workers_that_part_count_together(tmp_path: Path) -> None:
    made, update = METRICS["accuracy"]

    def body(run: Run) -> None:
        model = torch.nn.Linear(3, 3)
        model, opt, metric, loader = run.prepare(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            made(),
            DataLoader(TensorDataset(SCORES, CLASSES), batch_size=4),
        )
        for scores, target in loader:
            torch.nn.functional.cross_entropy(model(scores), target).backward()
            opt.step()
            opt.zero_grad()
            update(metric, scores, target)
            run.log(x=metric)

    workers(2, body, folder=tmp_path, strategy=LocalSGD(every=2))
    found = [line["x"] for line in lines(tmp_path)]
    assert len(found) == 6
    assert found[-1] == pytest.approx(whole(made, update)["x"])


def test_each_step_has_what_was_counted_up_to_it(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        metric, loader = run.prepare(
            MeanMetric(), DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4)
        )
        for (x,) in loader:
            metric.update(x)
            run.log(x=metric)
        metric.reset()
        run.log(y=metric)  # nothing was counted: nothing is logged

    workers(2, body, folder=tmp_path)
    assert [line["x"] for line in lines(tmp_path)] == [1.5, 3.5]
    assert all("y" not in line for line in lines(tmp_path))


def test_the_metric_stays_that_of_its_worker() -> None:
    def body(run: Run) -> tuple[float, float, int]:
        metric, loader = run.prepare(
            MeanMetric(sync_on_compute=False),
            DataLoader(TensorDataset(torch.arange(4.0)), batch_size=4),
        )
        for (x,) in loader:
            metric.update(x)
            run.log(x=metric)
        before = float(metric.compute())
        run.group.barrier()
        run.save()  # writes the log
        return before, float(metric.compute()), metric.update_count

    assert workers(2, body) == [(0.5, 0.5, 1), (2.5, 2.5, 1)]


def test_a_wrapper_keeps_its_own(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        metric = run.prepare(MinMaxMetric(MeanMetric()))
        metric.update(torch.tensor(float(run.rank)))
        run.log(x=metric)

    workers(2, body, folder=tmp_path)
    (line,) = lines(tmp_path)
    assert line["x/raw"] == 0.5


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (MeanMetric, "that was not given to run.prepare"),
        (lambda: MetricTracker(MeanMetric(), maximize=True), r"log the metric that it holds now"),
    ],
)
def test_what_can_not_be_logged_is_refused(made: Made, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        workers(2, lambda run: run.log(x=made()))


def test_a_part_of_what_was_prepared_is_known(tmp_path: Path) -> None:
    def body(run: Run) -> None:
        metrics = run.prepare(together())
        metrics.update(SCORES, CLASSES)
        metrics.update(SCORES, CLASSES)
        run.log(x=metrics["f1"])

    workers(2, body, folder=tmp_path)
    assert lines(tmp_path)[0]["x"] == pytest.approx(float(MulticlassF1Score(3)(SCORES, CLASSES)))


def test_a_value_of_very_many_numbers_is_refused() -> None:
    metric = MulticlassConfusionMatrix(11)
    metric.update(torch.tensor([1]), torch.tensor([1]))
    values = MetricValues()
    values.register_metric("x", metric)
    with pytest.raises(UsageError, match="whose value is 121 numbers"):
        values.compute_values("x", [HeldMetricState(metric).pack_state()])


def test_the_first_worker_has_to_log_it() -> None:
    with pytest.raises(UsageError, match="got a metric on other workers but not on the first one"):
        MetricValues().compute_values("x", [b""])


def test_without_torchmetrics_nothing_is_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_metric(MeanMetric()) and not is_metric(torch.nn.Linear(1, 1))
    monkeypatch.delitem(sys.modules, "torchmetrics")
    assert not is_metric(3.0)
