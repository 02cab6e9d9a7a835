"""`run.save(metric=..., best=...)`: workers mean one number by it, and the best is kept through
resumes, restarts and cuts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import paceline as pl
from paceline.checkpoint.best import choose_metric, parse_metric
from paceline.checkpoint.files import earlier_best
from paceline.checkpoint.files.manifest import Best, Metric
from paceline.cluster.discover import JobStart
from paceline.errors import CheckpointError, Mismatch, UsageError
from paceline.session.run import Run
from tests.harness.measured_checkpoints import names
from tests.harness.runs import batches, workers

NAN = float("nan")


# What a script may give
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "metric",
    [
        1,
        1.0,
        torch.tensor(1.0),
        torch.ones(1, 1, requires_grad=True),
        torch.tensor(1),
        np.float32(1),
    ],
)
def test_one_number(metric: Any) -> None:
    assert parse_metric(metric, "max") == Metric(1.0, "max")


def test_nothing() -> None:
    assert parse_metric(None, None) is None


@pytest.mark.parametrize(
    ("metric", "best", "words"),
    [
        (
            1.0,
            None,
            "run.save got metric alone; give best='min' or best='max', too",
        ),
        (None, "min", "run.save got best alone; give metric=a number, too"),
        (
            1.0,
            "least",
            (
                "run.save: best='least' is unknown; possible: max, min; give 'min' if a smaller "
                "metric is better"
            ),
        ),
        (
            torch.ones(2),
            "min",
            (
                r"a metric of shape \(2,\) \(torch.float32\); give one number, such as "
                r"run.mean\(loss\)"
            ),
        ),
        (torch.ones(1, dtype=torch.complex64), "min", "a metric of shape"),
        ("0.5", "min", r"the metric '0.5' \(str\); give one number"),
        ([1.0], "min", r"the metric \[1.0\] \(list\); give one number"),
        (np.ones(2), "min", "give one number"),
        (10**400, "min", "give one number"),
    ],
)
def test_something_else(metric: Any, best: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_metric(metric, best)


def test_rounding_is_no_difference_and_a_part_of_the_data_is_one() -> None:
    here = Metric(0.5, "min")
    assert choose_metric([here, Metric(0.5000001, "min")]) == (here, "")
    assert choose_metric([None, None]) == (None, "")
    nothing, odd = choose_metric([Metric(NAN, "min"), Metric(NAN, "min")])
    assert nothing is not None and math.isnan(nothing.value) and odd == ""
    found, odd = choose_metric([here, here, Metric(0.7, "min")])
    assert (
        found == here
        and "is 0.5 on rank 0 and 0.7 on rank 2: the one of rank 0 counts. Give run.mean(metric)"
        in odd
    )
    assert "nan on rank 1" in choose_metric([here, Metric(NAN, "min")])[1]


@pytest.mark.parametrize("other", [None, Metric(0.5, "max")])
def test_workers_that_mean_something_else_are_named(other: Metric | None) -> None:
    with pytest.raises(
        UsageError, match=r"rank 0 calls run.save\(metric=..., best='min'\), rank 1 run.save\("
    ):
        choose_metric([Metric(0.5, "min"), other])


# Runs
# --------------------------------------------------------------------------------------------------

Each = Callable[[Run, int], Any]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 2, dtype=torch.float64))


def training(each: Each, *, resume: bool = False) -> Callable[[Run], int]:
    """Five steps on batches that are dealt, with a call at the end of each."""

    def body(run: Run) -> int:
        model = network()
        # threads share torch's generator, so nothing is drawn from it
        for parameter in model.parameters():
            parameter.data = torch.linspace(
                -0.5, 0.5, parameter.numel(), dtype=torch.float64
            ).reshape(parameter.shape)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        cut = None if run.mesh.axis_size("shard") == 1 else pl.shard("0", zero=3)
        model, optimizer, loader = run.prepare(model, optimizer, batches(), cut=cut)
        began = run.steps if resume and run.resume() else 0
        for x, y in loader:
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            run.log(loss=0.0)
            each(run, run.steps + 1)
        return began

    return body


def saving(*values: float | None, best: Best = "min", **options: Any) -> Each:
    """Save after each step that has a value, which differs between workers by rounding; the
    newest alone is kept beside the best.
    """

    def each(run: Run, step: int) -> None:
        value = values[step - 1] if step <= len(values) else None
        if value is not None:
            run.save(
                metric=torch.tensor(value * (1 + 1e-6 * run.rank)),
                best=best,
                **({"keep": 1} | options),
            )

    return each


def kept(folder: Path) -> list[str]:
    return names(folder / "checkpoints")


def summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text())["checkpoints"]


@pytest.mark.each_choice
@pytest.mark.parametrize(("size", "mesh"), [(1, None), (2, None), (2, "shard=2")])
@pytest.mark.parametrize("background", [False, True])
def test_the_best_stays_and_can_be_had(
    tmp_path: Path, size: int, mesh: str | None, background: bool
) -> None:
    said: list[str] = []
    workers(
        size,
        training(saving(0.5, 0.2, NAN, 0.2, 0.3, background=background)),
        folder=tmp_path,
        said=said,
        mesh=mesh,
    )
    run = tmp_path / "test"
    assert kept(run) == ["step-00000002", "step-00000005"]
    assert summary(run)["best"] == {
        "checkpoint": "step-00000002",
        "step": 2,
        "metric": pytest.approx(0.2),
        "best": "min",
    }
    assert [text for text in said if "best" in text] == [
        "step 2 is the best so far: 0.2, after 0.5 at step 1"
    ]
    workers(
        size,
        training(lambda run, step: step == 2 and run.save()),
        folder=tmp_path / "apart",
        mesh=mesh,
    )
    wanted, found, last = (
        pl.state_dict(tmp_path / "apart" / "test"),
        pl.state_dict(run, best=True),
        pl.state_dict(run),
    )
    assert torch.equal(found["0.weight"], wanted["0.weight"]) and not torch.equal(
        found["0.weight"], last["0.weight"]
    )


def test_the_largest_and_saves_without_a_metric(tmp_path: Path) -> None:
    def each(run: Run, step: int) -> None:
        if step in (2, 3):
            run.save(keep=1, metric=float(-step), best="max")
        else:
            run.save(keep=1)

    workers(2, training(each), folder=tmp_path)
    assert kept(tmp_path / "test") == ["step-00000002", "step-00000005"]
    assert summary(tmp_path / "test")["best"]["metric"] == -2.0


def test_a_run_that_resumes_takes_the_best_along(tmp_path: Path) -> None:
    said: list[str] = []
    workers(2, training(saving(0.5, 0.2, 0.4)), folder=tmp_path)
    assert workers(
        2, training(saving(None, None, None, 0.3, 0.25), resume=True), folder=tmp_path, said=said
    ) == [3, 3]
    assert kept(tmp_path / "test-2") == ["step-00000002", "step-00000005"]
    assert [text for text in said if "best" in text] == []
    assert summary(tmp_path / "test-2")["best"]["step"] == 2
    assert torch.equal(
        pl.state_dict(tmp_path / "test-2", best=True)["0.weight"],
        pl.state_dict(tmp_path / "test", best=True)["0.weight"],
    )
    workers(1, training(lambda run, step: None, resume=True), folder=tmp_path, said=said)
    assert any(
        text.startswith("resumed from")
        and text.endswith("test-2/checkpoints/step-00000005 at step 5")
        for text in said
    )


def test_a_better_one_is_said_with_the_best_of_the_run_before(tmp_path: Path) -> None:
    said: list[str] = []
    workers(1, training(saving(0.5, 0.2, 0.4)), folder=tmp_path)
    workers(
        1, training(saving(None, None, None, 0.3, 0.1), resume=True), folder=tmp_path, said=said
    )
    assert kept(tmp_path / "test-2") == ["step-00000005"]
    assert [text for text in said if "best" in text] == [
        "step 5 is the best so far: 0.1, after 0.2 at step 2"
    ]


def test_a_job_that_starts_again_knows_its_best(tmp_path: Path) -> None:
    workers(2, training(saving(0.2, 0.3)), folder=tmp_path, start=JobStart())
    again = JobStart(str(tmp_path / "test"), 1, 0.0, ((0.0, "rank 1 was killed"),))
    workers(
        2, training(saving(None, None, 0.3, 0.25, 0.2), resume=True), folder=tmp_path, start=again
    )
    assert kept(tmp_path / "test") == ["step-00000001", "step-00000005"]


def test_what_cannot_be_taken_along_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    workers(1, training(saving(0.2, 0.4)), folder=tmp_path)

    def refuse(source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(earlier_best, "_link_or_copy", refuse)
    workers(1, training(saving(None, None, 0.3), resume=True), folder=tmp_path, said=said)
    assert kept(tmp_path / "test-2") == ["step-00000003"]
    assert [text for text in said if "best checkpoint so far" in text and "No space left" in text]


@pytest.mark.parametrize("background", [False, True])
def test_another_direction_is_an_error_on_all(tmp_path: Path, background: bool) -> None:
    errors: list[str] = []

    def each(run: Run, step: int) -> None:
        if step == 1:
            run.save(metric=0.5, best="min", background=background)
        if step == 2:
            with pytest.raises((UsageError, Mismatch)) as caught:
                run.save(metric=0.5, best="max", background=background)
            errors.append(str(caught.value))

    workers(2, training(each), folder=tmp_path)
    assert len(errors) == 2 and all(
        "run.save got best='max', and checkpoints in" in error for error in errors
    )
    assert kept(tmp_path / "test") == ["step-00000001"]


def test_a_metric_on_one_worker_alone_is_an_error_on_all(tmp_path: Path) -> None:
    def each(run: Run, step: int) -> None:
        with pytest.raises(
            UsageError,
            match=r"rank 0 calls run.save\(metric=..., best='max'\), rank 1 run.save\(\)",
        ):
            run.save(**({"metric": 1.0, "best": "max"} if run.is_first else {}))

    workers(2, training(each), folder=tmp_path)
    assert not (tmp_path / "test" / "checkpoints").exists()


def test_a_metric_of_ones_own_part_is_said_once(tmp_path: Path) -> None:
    said: list[str] = []
    workers(
        2,
        training(lambda run, step: run.save(metric=step + 3 * run.rank, best="min")),
        folder=tmp_path,
        said=said,
    )
    assert [text for text in said if "rank 0 counts" in text] == [
        (
            "the metric of run.save is 1 on rank 0 and 4 on rank 1: the one of rank 0 counts. "
            "Give run.mean(metric) for the mean of all workers"
        )
    ]


def test_the_best_where_there_is_none(tmp_path: Path) -> None:
    workers(1, training(lambda run, step: step == 2 and run.save()), folder=tmp_path)
    assert "best" not in summary(tmp_path / "test")
    with pytest.raises(CheckpointError, match="none was saved with a metric"):
        pl.state_dict(tmp_path / "test", best=True)
    with pytest.raises(
        UsageError, match="is one checkpoint: give the folder of its run to get the best"
    ):
        pl.state_dict(tmp_path / "test" / "checkpoints" / "step-00000002", best=True)
    with pytest.raises(UsageError, match="none was saved with a metric"):
        pl.load(tmp_path / "test", network, best=True)


def test_load_takes_it(tmp_path: Path) -> None:
    workers(1, training(saving(0.2, 0.4)), folder=tmp_path)
    with pl.load(tmp_path / "test", network, best=True) as loaded:
        assert torch.equal(
            loaded.model.get_parameter("0.weight"),
            pl.state_dict(tmp_path / "test", best=True)["0.weight"],
        )
    with pl.load(tmp_path / "test", network) as loaded:
        assert torch.equal(
            loaded.model.get_parameter("0.weight"), pl.state_dict(tmp_path / "test")["0.weight"]
        )
