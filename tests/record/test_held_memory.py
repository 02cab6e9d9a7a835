"""What a run says of bytes: predicted by formula, measured of the tensors that are held, and
equal where nothing is padded.
"""

from __future__ import annotations

import json
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
from paceline.record.held_memory import predict_optimizer_nbytes
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from tests.harness.jobs import Jobs
from tests.harness.runs import batches, workers

# bytes of all parameters, their number, bytes of a counter of steps
P, PARAMETERS, STEPS = 8 * (6 * 8 + 8 + 8 * 2 + 2), 4, 4
LAYERS = tensor({"0": column(), "2": row()})


class Peeking(torch.optim.SGD):
    """An optimizer with a step of its own, which is not tried."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class Counting(torch.optim.Optimizer):
    """An optimizer of a script's own that keeps a copy of each parameter, and counts its steps."""

    steps_made = 0

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> Any:
        Counting.steps_made += 1
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["copy"] = torch.empty_like(parameter)


def train(kind: type[torch.optim.Optimizer], cuts: list[Any], **options: Any) -> Any:
    def body(run: Run) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()
        model, optimizer, loader = run.prepare(
            model, kind(model.parameters(), **options), batches(24, 8), cut=cuts
        )
        for x, y in loader:
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

    return body


def held(
    folder: Path, *arguments: Any, mesh: str = "data=1", **options: Any
) -> list[dict[str, Any]]:
    strategy = {"strategy": options.pop("strategy")} if "strategy" in options else {}
    workers(
        prod(size or 1 for size in parse_mesh(mesh).values()),
        train(*arguments, **options),
        mesh=mesh,
        folder=folder,
        **strategy,
    )
    found: list[dict[str, Any]] = json.loads((folder / "test" / "summary.json").read_text())[
        "memory"
    ]
    return found


@pytest.mark.parametrize(
    # of parameters, of gradients, and of what AdamW keeps beside counters
    ("mesh", "cuts", "wanted"),
    [
        ("data=1", [], (P, P, 2 * P)),
        ("data=2", [], (P, P, 2 * P)),
        ("shard=2", [shard(zero=1)], (P, P + P // 2, P)),
        ("shard=2", [shard(zero=2)], (P, P // 2, P)),
        ("shard=2", [shard("2", zero=3)], (P // 2, P // 2, P)),
        # the bias of the last layer is whole
        ("tensor=2", [LAYERS], (P // 2 + 8, P // 2 + 8, P + 16)),
        ("data=2, tensor=2", [LAYERS], (P // 2 + 8, P // 2 + 8, P + 16)),
    ],
)
def test_bytes_are_those_of_the_formula(
    tmp_path: Path, mesh: str, cuts: list[Any], wanted: tuple[int, int, int]
) -> None:
    parameters, gradients, kept = wanted
    for each in held(tmp_path, torch.optim.AdamW, cuts, mesh=mesh):
        assert each["measured"] == {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": kept + PARAMETERS * STEPS,
        }
        assert each["predicted"] == each["measured"] and each["peak"] > 50 << 20  # torch alone


def test_padding_is_measured_and_not_predicted(tmp_path: Path) -> None:
    """74 numbers over 4 workers: 19 for each, and 2 are padding."""
    found = held(tmp_path, torch.optim.SGD, [shard(zero=3)], mesh="shard=4", lr=0.1)
    assert [each["measured"]["parameters"] for each in found] == [8 * 19] * 4
    assert [each["predicted"]["parameters"] for each in found] == [8 * 19] * 3 + [8 * 17]


def test_an_optimizer_with_a_step_of_its_own_is_not_predicted(tmp_path: Path) -> None:
    (each,) = held(tmp_path, Peeking, [], lr=0.1, momentum=0.9)
    assert (
        each["predicted"] == {"parameters": P, "gradients": P, "optimizer": None}
        and each["measured"]["optimizer"] == P
    )


def test_what_was_tried_is_not_tried_again_and_other_settings_are() -> None:
    def kept(
        shape: int, kind: type[torch.optim.Optimizer] = torch.optim.RMSprop, **options: Any
    ) -> list[int]:
        found = predict_optimizer_nbytes(
            kind(
                [nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(2, shape))],
                lr=0.25,
                **options,
            )
        )
        return [*(found or {}).values()]

    squares = [4 * 3 + STEPS, 4 * 6 + STEPS]
    for _ in range(2):
        assert kept(3) == squares
        assert kept(3, momentum=0.5) == [2 * count - STEPS for count in squares]
        assert kept(3, momentum=0.5, centered=True) == [3 * count - 2 * STEPS for count in squares]
        assert kept(3, Counting) == [4 * 3, 4 * 6]
    assert Counting.steps_made == 4  # a script's own may do otherwise each time
    assert kept(5) == [4 * 5 + STEPS, 4 * 10 + STEPS]


def test_what_servers_keep_is_not_here(tmp_path: Path) -> None:
    for each in held(tmp_path, torch.optim.AdamW, [], mesh="data=2", strategy=ParameterServer()):
        assert each["predicted"]["optimizer"] == each["measured"]["optimizer"] == 0


JOB = """
cuts = {"zero1": pl.shard(zero=1), "zero2": pl.shard(zero=2), "zero3": pl.shard("2", zero=3)}
for name, cut in cuts.items():
    with pl.start(name=name, mesh="shard") as run:
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(TensorDataset(torch.ones(64, 4), torch.ones(64, 2)), batch_size=8)
        model, optimizer, loader = run.prepare(model, optimizer, loader, cut=cut)
        for x, y in loader:
            if run.rank == 1 and run.steps == 3:
                torch.ones(50 << 20).sum()  # 200 MiB, for a moment
            step(run, model, optimizer, x, y)
"""


def test_processes_hold_what_was_predicted_and_tell_their_peak(job: Jobs, tmp_path: Path) -> None:
    ended = job.run(JOB, 2).end()
    assert ended.code == 0, ended.err
    whole = 4 * (4 * 8 + 8 + 8 * 2 + 2)
    wanted = {
        "zero1": (whole, whole + whole // 2),
        "zero2": (whole, whole // 2),
        "zero3": (whole // 2, whole // 2),
    }
    for name, (parameters, gradients) in wanted.items():
        first, second = json.loads((tmp_path / "runs" / name / "summary.json").read_text())[
            "memory"
        ]
        assert first["predicted"] == first["measured"] == second["predicted"] == second["measured"]
        assert first["measured"] == {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer": whole + PARAMETERS * STEPS,
        }
        assert second["peak"] - first["peak"] > 100 << 20
