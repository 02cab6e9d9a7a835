"""How near pipelines come to one process: in single precision after one step, and in double
precision after twenty.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import paceline as pl
from paceline.parallel.pipeline import pipeline
from paceline.sync.allreduce import AllReduce
from tests.harness.pipelines import LAYERS, Sentences, gpt, same, trained
from tests.harness.runs import distance, workers

ONE_STEP = {"data": lambda: Sentences(7), "epochs": 1, "clip": None}  # 7 samples in 4 micro-batches


def single() -> nn.Module:
    return gpt().float()


def descent(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def stepped(size: int, cut: Any, **options: Any) -> list[Tensor]:
    """The parameters of each worker after one step of SGD in single precision."""
    found = workers(size, trained(cut, build=single, optimizer=descent, **ONE_STEP), **options)  # type: ignore[arg-type]
    return [parameters for _, parameters, _ in found]


def started() -> Tensor:
    return torch.cat(
        [parameter.detach().double().reshape(-1) for parameter in single().parameters()]
    )


@pytest.mark.each_choice
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble", "zbv"])
def test_every_schedule_makes_the_step_of_one_process(schedule: str, size: int) -> None:
    (wanted,) = stepped(1, None)
    assert distance(wanted, started()) > 1e-2
    for found in stepped(
        size, pipeline(LAYERS, schedule=schedule, micro_batches=4), mesh=f"stage={size}"
    ):
        assert distance(found, wanted) < 5e-7


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    ("mesh", "schedule"),
    [("stage=4", "zero-bubble"), ("data=2, stage=2", "1f1b"), ("stage=2", "interleaved")],
)
def test_twenty_steps_of_adamw_end_where_one_process_does(mesh: str, schedule: str) -> None:
    same(mesh, pipeline(LAYERS, schedule=schedule, micro_batches=4), epochs=10)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_replicas_of_stages_make_the_step_of_one_process_up_to_what_a_codec_loses(
    schedule: str,
) -> None:
    (wanted,) = stepped(1, None)
    cut = pipeline(LAYERS, schedule=schedule, micro_batches=4)
    assert all(distance(found, wanted) < 5e-7 for found in stepped(4, cut, mesh="data=2, stage=2"))
    for found in stepped(4, cut, mesh="data=2, stage=2", strategy=AllReduce(codec=pl.int8())):
        lost = float((found - wanted).norm() / (wanted - started()).norm())
        assert 1e-5 < lost < 0.04  # each number in 127 steps of the largest of its block


def test_replicas_of_stages_that_part_are_those_of_whole_models() -> None:
    def moved(size: int, cut: Any, codec: Any = None, **options: Any) -> list[Tensor]:
        # it averages after the second step, the last one
        strategy = pl.LocalSGD(2) if codec is None else pl.LocalSGD(2, codec=codec)
        terms = {**ONE_STEP, "epochs": 2, "build": single, "optimizer": descent}
        return [
            parameters
            for _, parameters, _ in workers(
                size, trained(cut, **terms), strategy=strategy, **options
            )
        ]

    cut = pipeline(LAYERS, micro_batches=2)
    wanted = moved(2, None)[0]
    assert all(distance(found, wanted) < 1e-6 for found in moved(4, cut, mesh="data=2, stage=2"))
    for found in moved(4, cut, pl.int8(), mesh="data=2, stage=2"):
        assert 1e-5 < float((found - wanted).norm() / (wanted - started()).norm()) < 0.04
