"""The surrogate: cut or not, by any number of workers, it learns what one learns; and the
program does, and says how well.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

import paceline as pl
from paceline.apps import surrogate
from paceline.apps.advection import Advection, SolvedSamples
from paceline.apps.unet import UNetShape
from paceline.session.run import Run
from tests.harness import nursery
from tests.harness.jobs import Jobs
from tests.harness.runs import alone, workers

EQUATION, STEPS = Advection(grid=16), 8
UNITS = ("enter", "down.*", "middle", "up.*")


def trained(
    size: int, norm: str = "group", cut: Any = None, **options: Any
) -> list[dict[str, float]]:
    """What each worker says of the errors before and after a few steps with uneven shares."""
    # threads share torch's generator
    models = [
        surrogate.build_model(UNetShape(width=4, levels=2, norm=norm), seed=0) for _ in range(size)
    ]

    def body(run: Run) -> dict[str, float]:
        optimizer = torch.optim.AdamW(models[run.rank].parameters(), lr=0.01)
        schedule = OneCycleLR(optimizer, max_lr=0.01, total_steps=STEPS + 1)
        loaders = (
            SolvedSamples(EQUATION, run.seed, 0, STEPS * 9).make_loader(9),
            SolvedSamples(EQUATION, run.seed, surrogate.HELD_OUT, 21).make_loader(10),
        )
        model, optimizer, schedule, batches, held_out = run.prepare(
            models[run.rank], optimizer, schedule, *loaders, cut=cut
        )
        before = surrogate.evaluate_errors(run, held_out, {"before": model})
        surrogate.train_model(run, model, optimizer, schedule, batches)
        model.eval()
        return before | surrogate.evaluate_errors(
            run, held_out, {"after": model, "unchanged": surrogate.predict_unchanged}
        )

    return workers(size, body, **options) if size > 1 else [alone(body)]


@pytest.fixture(scope="module")
def wanted() -> dict[str, dict[str, float]]:
    """What one worker learns."""
    return {norm: trained(1, norm)[0] for norm in ("group", "batch")}


@pytest.mark.each_choice
@pytest.mark.parametrize(
    ("size", "mesh", "zero", "norm"),
    [
        (3, None, None, "group"),
        (3, None, None, "batch"),
        (2, "shard", 2, "group"),
        (4, "data=2, shard=2", 3, "batch"),
    ],
)
def test_all_layouts_learn_the_same(
    size: int, mesh: str | None, zero: Any, norm: str, wanted: dict[str, dict[str, float]]
) -> None:
    found = trained(size, norm, pl.shard(UNITS, zero=zero) if zero else None, mesh=mesh)
    assert all(each == pytest.approx(wanted[norm], rel=1e-4) for each in found)
    assert wanted[norm]["after"] < 0.95 * wanted[norm]["before"]


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    "strategy",
    [
        pl.LocalSGD(every=3),
        pl.Gossip(graph="ring"),
        pl.ParameterServer(),
        pl.AllReduce(codec=pl.int8()),
    ],
)
def test_strategies_learn(strategy: Any) -> None:
    found = trained(2, strategy=strategy)
    assert found[0]["after"] < 0.95 * found[0]["before"]


@pytest.mark.slow
def test_the_program(job: Jobs, tmp_path: Path) -> None:
    """Two workers, and a cut of the command line: errors are much less than if nothing were
    predicted.
    """
    given = (
        "--grid",
        "16",
        "--width",
        "8",
        "--levels",
        "1",
        "--steps",
        "100",
        "--batch",
        "16",
        "--rate",
        "0.01",
        "--held-out",
        "50",
    )
    ended = job.program(
        Path(surrogate.__file__), 2, "--cut", f"shard({UNITS})", args=(*given, "--name", "cut")
    ).end()
    assert ended.code == 0, ended
    summary = json.loads((job.folder / "runs" / "cut" / "summary.json").read_text())
    results = summary["results"]
    assert (summary["workers"], summary["samples"]) == (2, 1600)
    assert f"{results['error_after']:.3f} after it" in ended.err + ended.out
    assert results["error_after"] < 0.6 * results["error_unchanged"] < 0.6 * results["error_before"]


@pytest.mark.slow
def test_the_program_alone(tmp_path: Path) -> None:
    given = (
        "--grid",
        "32",
        "--width",
        "4",
        "--norm",
        "batch",
        "--steps",
        "3",
        "--held-out",
        "20",
        "--seed",
        "7",
        "--name",
        "x",
    )
    answer = nursery.run_script(Path(surrogate.__file__), tmp_path, *given)
    assert answer.returncode == 0, answer.stderr
    results = json.loads((tmp_path / "runs" / "x" / "summary.json").read_text())["results"]
    assert 0 < results["error_coarse_solver"] < 0.2 < results["error_unchanged"]
    refused = nursery.run_script(
        Path(surrogate.__file__), tmp_path, "--grid", "36", "--levels", "3"
    )
    assert (
        refused.returncode == 2
        and "--grid 36 with --levels 3: give 16 or more, divisible by 16" in refused.stderr
    )
