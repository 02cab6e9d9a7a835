"""Checkpoints of runs come into models in any other layout, each worker reading its part; those
of other models don't.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.checkpoint.files import block_files
from paceline.checkpoint.files.checkpoint import MANIFEST_FILE
from paceline.errors import UsageError
from paceline.prepare.stored import StoredModel
from paceline.session.run import Run
from tests.harness.runs import workers

TENSOR = pl.tensor({"0": pl.column(), "2": pl.row()})
LAYOUTS: dict[str, tuple[int, str | None, list[Any]]] = {
    "one": (1, None, []),
    "tensor": (2, "tensor=2", [TENSOR]),
    "zero 3": (3, "shard=3", [pl.shard("2", zero=3)]),
    "both": (4, "shard=2, tensor=2", [TENSOR, pl.shard("0", zero=2)]),
}


def build() -> nn.Sequential:
    return (
        nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2), nn.BatchNorm1d(2))
        .double()
        .eval()
    )


KNOWN = build()


def network() -> nn.Sequential:
    return copy.deepcopy(KNOWN)  # threads would draw from one generator


def unborn() -> nn.Module:
    with pl.meta():
        model = build()
    return model


def saved(folder: Path, layout: str, *others: nn.Module) -> Path:
    size, mesh, cuts = LAYOUTS[layout]

    def body(run: Run) -> None:
        run.prepare(network(), cut=cuts)
        if others:
            run.prepare(*others)
        run.save()

    workers(size, body, mesh=mesh, folder=folder)
    return folder / "test"


@pytest.mark.parametrize("make", [unborn, build], ids=["without memory", "with values"])
@pytest.mark.parametrize(
    ("before", "after"),
    [("one", "tensor"), ("tensor", "zero 3"), ("both", "one"), ("zero 3", "both")],
)
def test_any_layout_reads_any(
    tmp_path: Path, before: str, after: str, make: Callable[[], nn.Module]
) -> None:
    run_folder = saved(tmp_path, before)
    size, mesh, cuts = LAYOUTS[after]
    x = torch.randn(4, 6, dtype=torch.float64)

    def body(run: Run) -> torch.Tensor:
        answer: torch.Tensor = run.forward(
            run.prepare(make().eval(), cut=cuts, init=str(run_folder)), x
        )
        return answer

    wanted = network()(x).detach()
    for found in workers(size, body, mesh=mesh):
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


def test_no_worker_reads_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder, asked = saved(tmp_path, "one"), list[tuple[str, int]]()
    read = block_files.BlockReader.read_rectangle

    def counted(self: Any, name: str, box: Any = None) -> torch.Tensor:
        found = read(self, name, box)
        asked.append((name, found.numel()))
        return found

    monkeypatch.setattr(block_files.BlockReader, "read_rectangle", counted)
    workers(2, lambda run: run.prepare(unborn(), cut=[TENSOR], init=run_folder), mesh="tensor")
    assert sorted(count for name, count in asked if name.endswith("0.weight")) == [24, 24]


def test_one_of_several_models(tmp_path: Path) -> None:
    other = nn.Linear(3, 3)
    folder = saved(tmp_path, "one", other)
    made = workers(1, lambda run: run.prepare(nn.Linear(3, 3), init=StoredModel(folder, "model1")))[
        0
    ]  # type: ignore[arg-type]
    assert torch.equal(made.weight, other.weight)
    with pytest.raises(UsageError, match=r"has 2 models: give the name of a part"):
        workers(1, lambda run: run.prepare(nn.Linear(3, 3), init=folder))


def test_a_checkpoint_that_is_damaged_is_passed_over(tmp_path: Path) -> None:
    folder, said = saved(tmp_path, "one"), list[str]()
    newest = folder / "checkpoints" / "step-00000007"
    newest.mkdir()
    (newest / MANIFEST_FILE).write_text("{}")
    made = workers(2, lambda run: run.prepare(build(), init=folder), said=said)[1]
    assert torch.equal(made[0].weight, network()[0].weight)
    assert any("step-00000007" in text for text in said)


def test_another_model(tmp_path: Path) -> None:
    folder = saved(tmp_path, "one")
    with pytest.raises(
        UsageError,
        match=(
            r"step-00000000 has weights of another model: 0.weight is \[8, 6\] in it, \[9, 6\] in "
            r"the model"
        ),
    ):
        workers(
            2,
            lambda run: run.prepare(
                nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 2), nn.BatchNorm1d(2)),
                init=folder,
            ),
        )


def test_a_folder_without_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no checkpoint"):
        workers(2, lambda run: run.prepare(network(), init=tmp_path))
