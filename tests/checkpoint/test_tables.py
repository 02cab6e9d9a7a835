"""Checkpoints of sparse tables: a run goes on as if nothing had been, with other numbers of
workers and servers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.checkpoint import tables
from paceline.checkpoint.files import catalogue, checkpoint
from paceline.errors import CheckpointError
from paceline.servers.tables import client
from paceline.session.run import Run
from tests.harness.runs import distance, workers
from tests.harness.tables import DIM, OPTIMIZERS, Net, everything, loader, one, served


def body(
    run: Run,
    kind: str,
    servers: int,
    *,
    folder: Path | None = None,
    until: int = 0,
    seed: int = 0,
    **options: Any,
) -> Tensor:
    model = Net(served(servers), torch.float64, "mean")
    model.first.seed += seed  # what a checkpoint holds counts
    optimizers = OPTIMIZERS[kind](model)
    model, *optimizers, batches = run.prepare(model, *optimizers, loader())
    if folder is not None:
        model.first.prefetch(torch.tensor([[1, 2]]))
        assert run.resume(folder / "test")
    for _ in run.epochs(3):
        for a, b, y in batches:
            F.mse_loss(model(a, b), y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if run.steps + 1 == until:
                run.save(**options)
                return everything(model)
    return everything(model)


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [("adam", (2, 2), (3, 1)), ("adagrad", (1, 1), (2, 3)), ("groups", (3, 3), (1, 2))],
)
def test_a_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, before: Any, after: Any
) -> None:
    """In parts of a few rows; the other seed in the second run doesn't matter, as the first one
    was saved.
    """
    monkeypatch.setattr(client, "PART_BYTES", 7 * DIM * 8)
    workers(before[0], lambda run: body(run, kind, before[1], until=9), folder=tmp_path)
    (found,) = catalogue.list_newest(tmp_path / "test" / "checkpoints")
    assert len(list(found.glob("table-000-*.safetensors"))) > 4, "part by part"
    resumed = workers(after[0], lambda run: body(run, kind, after[1], folder=tmp_path, seed=5))
    assert distance(resumed[0], one(kind, epochs=3)) < 1e-9 and torch.equal(resumed[0], resumed[-1])


def test_a_save_in_the_background_is_one_at_once(tmp_path: Path) -> None:
    said: list[str] = []
    options = {"until": 9, "background": True}
    workers(2, lambda run: body(run, "adagrad", 2, **options), folder=tmp_path, said=said)
    assert any("written at once, background=True or not" in text for text in said)
    assert (
        distance(
            workers(2, lambda run: body(run, "adagrad", 1, folder=tmp_path))[0],
            one("adagrad", epochs=3),
        )
        < 1e-9
    )


def test_what_is_damaged_is_noticed(tmp_path: Path) -> None:
    workers(1, lambda run: body(run, "sgd", 1, until=5), folder=tmp_path)
    (found,) = catalogue.list_newest(tmp_path / "test" / "checkpoints")
    path = found / "table-001-00001.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"table-001-00001\.safetensors is damaged"):
        workers(1, lambda run: body(run, "sgd", 1, folder=tmp_path))


def test_other_optimizers_are_refused(tmp_path: Path) -> None:
    workers(1, lambda run: body(run, "sgd", 1, until=5), folder=tmp_path)
    with pytest.raises(CheckpointError, match=r"adagrad|Adagrad|optimizer"):
        workers(1, lambda run: body(run, "adagrad", 1, folder=tmp_path))


def test_other_tables_are_refused(tmp_path: Path) -> None:
    workers(1, lambda run: body(run, "sgd", 1, until=5), folder=tmp_path)
    found = checkpoint.load_checkpoint(tmp_path / "test" / "checkpoints", say=print)
    with pytest.raises(
        CheckpointError,
        match=r"the sparse tables first \(60 x 4 float64, SGD\), second .*, and this run has none",
    ):
        tables.restore_tables([], found)
