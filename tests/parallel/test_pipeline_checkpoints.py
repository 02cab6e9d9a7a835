"""Checkpoints of pipelines: what is saved with layers on several workers comes back in every
other layout, to the last bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import paceline as pl
from paceline.checkpoint.files import checkpoint, export
from paceline.session.run import Run
from tests.harness.models import fill
from tests.harness.runs import workers

LAYERS = "tokens, up, middle, norm, down, head"
COLUMNS = pl.tensor({"up": pl.column(), "middle": pl.row()})


def pipe(schedule: str = "1f1b", split: Any = "even") -> Any:
    return pl.pipeline(LAYERS, schedule=schedule, micro_batches=2, split=split)


class Scaled(nn.Linear):
    """A layer with a parameter that is one number."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Net(nn.Module):
    """Embeddings that may be tied over all layers, a frozen layer, a number, and running
    statistics, where they are asked for.
    """

    def __init__(self, *, tied: bool, statistics: bool = True) -> None:
        super().__init__()
        self.tokens, self.up, self.norm = (
            nn.Embedding(9, 4),
            nn.Linear(4, 6),
            nn.BatchNorm1d(6) if statistics else nn.LayerNorm(6),
        )
        self.middle, self.down, self.head = (
            nn.Linear(6, 6),
            Scaled(6, 4),
            nn.Linear(4, 9, bias=False),
        )
        self.middle.requires_grad_(False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(torch.tanh(self.up(self.tokens(x))))
        return self.head(self.down(torch.tanh(self.norm(x))))  # type: ignore[no-any-return]


class Letters(Dataset[Any]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index * 7 % 9), torch.tensor(index * 5 % 9)


def letters() -> DataLoader[Any]:
    return DataLoader(
        Letters(), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3)
    )


RUNS: dict[str, tuple[int, str | None, list[Any]]] = {
    "one": (1, None, []),
    "replicas": (2, None, []),
    "stages": (2, "stage=2", [pipe()]),
    "two on each": (2, "stage=2", [pipe("interleaved")]),
    "three stages": (3, "stage=3", [pipe("zero-bubble")]),
    "replicas of stages": (4, "data=2, stage=2", [pipe()]),
    "stages of tensors": (4, "stage=2, tensor=2", [pipe(split=[3, 3]), COLUMNS]),
    "stages and zero 1": (4, "shard=2, stage=2", [pipe(), pl.shard(zero=1)]),
    "stages and zero 3": (4, "shard=2, stage=2", [pipe(), pl.shard(["up", "middle"], zero=3)]),
    "tensors and zero 3": (4, "shard=2, tensor=2", [COLUMNS, pl.shard(["up", "middle"], zero=3)]),
}


def train(
    folder: Path,
    layout: str,
    *,
    until: int | None = None,
    tied: bool = False,
    statistics: bool = True,
    background: bool = False,
) -> list[list[float]]:
    """Go on where the folder's run has ended, for two epochs or up to a step (0: none at all),
    and save. Return losses of all workers.
    """
    size, axes, cuts = RUNS[layout]

    def body(run: Run) -> list[float]:
        model = Net(tied=tied, statistics=statistics).double()
        fill(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model, optimizer, loader = run.prepare(model, optimizer, letters(), cut=cuts)
        run.resume()
        losses = list[float]()
        for _ in run.epochs(2) if until != 0 else ():
            for x, y in loader:
                optimizer.zero_grad()
                losses.append(run.mean(float(run.step(model, x, y, loss=F.cross_entropy))))
                optimizer.step()
                if run.steps + 1 == until:
                    run.save(background=background)
                    return losses
        run.save()
        return losses

    return workers(size, body, mesh=axes, folder=folder)


def last(folder: Path) -> Path:
    """The newest run in a folder."""
    return sorted(folder.glob("test*"), key=lambda path: path.stat().st_mtime_ns)[-1]


def saved(folder: Path) -> dict[str, Tensor]:
    """All tensors of the newest checkpoint of the newest run, put together."""
    return checkpoint.load_checkpoint(
        last(folder) / "checkpoints", say=print, own=False
    ).snapshot.tensors


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    ("first", "tied"), [("stages", False), ("replicas of stages", True), ("one", True)]
)
def test_a_state_goes_through_all_layouts_and_stays_the_same(
    tmp_path: Path, first: str, tied: bool
) -> None:
    train(tmp_path, first, until=4, tied=tied)
    wanted = saved(tmp_path)
    assert any("running_var" in name for name in wanted) and len(wanted) > 30
    for layout in (*RUNS, "stages", "one"):
        train(tmp_path, layout, until=0, tied=tied)
        found = saved(tmp_path)
        assert found.keys() == wanted.keys(), layout
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor), (layout, name)


@pytest.mark.parametrize(
    "layout", ["stages", "replicas of stages", "two on each", "stages and zero 3"]
)
def test_a_run_that_was_interrupted_has_the_losses_of_one_that_was_not(
    tmp_path: Path, layout: str
) -> None:
    whole = train(tmp_path / "whole", layout, tied=True)
    first = train(tmp_path / "parts", layout, until=4, tied=True, background=True)
    rest = train(tmp_path / "parts", layout, tied=True)
    assert all(
        len(before) == 4 and before + after == losses
        for losses, before, after in zip(whole, first, rest, strict=True)
    )
    found = saved(tmp_path / "parts")
    assert all(
        torch.equal(found[name], tensor)
        for name, tensor in saved(tmp_path / "whole").items()
        if name.startswith("model/")
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [("stages", "one"), ("one", "three stages"), ("stages of tensors", "replicas of stages")],
)
def test_a_run_goes_on_in_another_layout(tmp_path: Path, before: str, after: str) -> None:
    whole = train(tmp_path / "whole", "one", tied=True, statistics=False)
    first = train(tmp_path / "parts", before, until=4, tied=True, statistics=False)
    rest = train(tmp_path / "parts", after, tied=True, statistics=False)
    assert first[0] + rest[0] == pytest.approx(whole[0], rel=1e-12)


def test_a_plain_model_comes_out(tmp_path: Path) -> None:
    train(tmp_path, "replicas of stages", until=4, tied=True)
    wanted, found = saved(tmp_path), pl.state_dict(last(tmp_path))
    model = Net(tied=True).double()
    model.load_state_dict(found)
    assert torch.equal(model.head.weight, wanted["model/tokens.weight"])
    # 4 steps of 2 micro-batches
    assert (
        float(found["norm.running_mean"].abs().sum()) > 0
        and int(found["norm.num_batches_tracked"]) == 8
    )
    out = tmp_path / "model.safetensors"
    export.export_model(last(tmp_path), out, say=print)
    assert all(
        torch.equal(tensor, found[name])
        for name, tensor in safetensors.torch.load_file(out).items()
    )
