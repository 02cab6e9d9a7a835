"""What `paceline layout` says of bytes is what a worker holds once it has trained."""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from paceline.cluster.mesh import parse_mesh
from paceline.parallel.shard import shard
from paceline.parallel.tensor.styles import column, row
from paceline.parallel.tensor.tensor_cut import tensor
from paceline.record.folder import LAYOUT_FILE
from paceline.record.layout import ModelLayout
from paceline.session.run import Run
from tests.harness.jobs import Ended, Jobs
from tests.harness.runs import batches, workers

LAYERS = tensor({"0": column(), "2": row()})
PLAIN = 8 * (6 * 8 + 8 + 8 * 2 + 2)  # bytes of all parameters


def nbytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 0


def layout_and_truth(
    run: Run, cuts: list[Any], kind: type, folder: Path, **options: Any
) -> tuple[dict[str, Any], dict[str, int]]:
    """What the file says, and what this worker holds after an epoch."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    optimizer = kind(model.parameters(), **options)
    model, optimizer, loader = run.prepare(model, optimizer, batches(24, 8), cut=cuts)
    with pytest.raises(SystemExit) as ended:
        ModelLayout(run._prepared, run._axes, folder).write_and_exit()
    # which has one from the beginning
    assert ended.value.code == 0 and (kind is torch.optim.Adagrad) == bool(optimizer.state)
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    held = defaultdict(
        int,
        parameters=sum(map(nbytes, model.parameters())),
        gradients=sum(nbytes(p.grad) for p in stepped),
    )
    held["optimizer"] = sum(
        nbytes(value) for state in optimizer.state.values() for value in state.values()
    )
    run.barrier()
    return json.loads((folder / LAYOUT_FILE).read_text()), held


SGD, MOMENTUM, ADAMW, ADAGRAD = (
    (torch.optim.SGD, 0.0),
    (torch.optim.SGD, 0.9),
    (torch.optim.AdamW, None),
    (torch.optim.Adagrad, None),
)


@pytest.mark.parametrize(
    ("mesh", "cuts", "kind"),
    [
        ("data=1", [], ADAGRAD),
        ("data=2", [], MOMENTUM),
        ("shard=2", [shard(zero=2)], ADAMW),
        ("shard=3", [shard()], MOMENTUM),
        ("tensor=2", [LAYERS], ADAMW),
        ("shard=2, tensor=2", [LAYERS, shard()], SGD),
    ],
)
def test_bytes_are_those_that_training_takes(
    tmp_path: Path, mesh: str, cuts: list[Any], kind: tuple[type, float | None]
) -> None:
    optimizer, momentum = kind
    options = {} if momentum is None else {"lr": 0.1, "momentum": momentum}

    def body(run: Run) -> tuple[dict[str, Any], dict[str, int]]:
        return layout_and_truth(run, cuts, optimizer, tmp_path, **options)

    for rank, (said, held) in enumerate(workers(prod(parse_mesh(mesh).values()), body, mesh=mesh)):
        assert said["workers"][rank] == held
        assert [row["name"] for row in said["rows"]] == ["0.weight", "0.bias", "2.weight", "2.bias"]


def test_buckets_that_are_kept_count(tmp_path: Path) -> None:
    """With zero=1 the gradients of all parameters stay in memory, padded to a multiple of the
    workers.
    """

    def body(run: Run) -> dict[str, Any]:
        return layout_and_truth(run, [shard(zero=1)], torch.optim.AdamW, tmp_path)[0]

    said = workers(4, body, mesh="shard")[0]
    padded = -(-PLAIN // 8 // 4) * 4 * 8
    assert sum(worker["gradients"] for worker in said["workers"]) == PLAIN + 4 * padded
    assert all(worker["parameters"] == PLAIN for worker in said["workers"])
    assert "after each step" in said["cuts"][0]["travels"]


class Peeking(torch.optim.SGD):
    """An optimizer that has to see numbers."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                assert float(parameter.grad.sum()) < 1e9
        return super().step(closure)


def test_an_optimizer_that_looks_at_numbers_is_not_counted(tmp_path: Path) -> None:
    said, _ = workers(1, lambda run: layout_and_truth(run, [], Peeking, tmp_path, lr=0.1))[0]
    assert [row["optimizer"] for row in said["rows"]] == [None] * 4


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import paceline as pl
with pl.start(seed=1) as run:
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 1)), batch_size=16)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    for x, y in loader:
        raise AssertionError("it trains")
"""


def test_the_command_shows_it_and_leaves_nothing(job: Jobs) -> None:
    def layout(name: str, script: str) -> Ended:
        (job.folder / name).write_text(script)
        return job.start(
            [
                sys.executable,
                *job.launcher,
                "layout",
                "--workers",
                "2",
                "--cut",
                "shard(zero=3)",
                name,
            ]
        ).end()

    ended = layout("train.py", SCRIPT)
    assert ended.code == 0, ended
    assert "2 workers, mesh shard=2" in ended.out and "321 of 512" in ended.out
    assert "shard(): parameters are gathered before each forward" in ended.out
    ended = layout("empty.py", "")
    assert ended.code == 2 and "empty.py ended before it trained" in ended.err, ended
    assert sorted(path.name for path in job.folder.iterdir()) == ["empty.py", "train.py"]
