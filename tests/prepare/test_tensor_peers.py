"""Workers that differ along `tensor` alone have the same samples and the same random numbers,
and a difference is found.
"""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from paceline.comm.axis_meter import AxisMeter
from paceline.errors import DataError
from paceline.prepare.tensor_peers import BatchComparer, checksum_batch
from paceline.session.run import Run
from tests.harness.cuts import columns
from tests.harness.jobs import Jobs
from tests.harness.runs import Numbered, workers
from tests.harness.thread_groups import ThreadGroup, spawn


def test_batches_that_differ_along_tensor_are_found() -> None:
    class Apart(Numbered):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.x = self.x + rank

    def body(run: Run) -> None:
        model = nn.Sequential(nn.Linear(6, 8)).double()
        loader = DataLoader(Apart(run.rank), batch_size=4)
        model, loader = run.prepare(model, loader, cut=columns())
        for x, _ in loader:
            model(x)

    with pytest.raises(
        DataError,
        match="batch 1 of a loader is not the same on ranks 0 and 1, which need the same samples",
    ):
        workers(2, body, mesh="tensor=2")


def test_batches_in_mappings_of_other_kinds_are_compared() -> None:
    class Apart(Numbered):
        def __init__(self, rank: int) -> None:
            super().__init__()
            self.x = self.x + rank

    def named(samples: Any) -> UserDict[str, Tensor]:
        x, y = default_collate(samples)
        return UserDict({"x": x, "y": y})

    def body(run: Run) -> None:
        model = nn.Sequential(nn.Linear(6, 8)).double()
        loader = DataLoader(Apart(run.rank), batch_size=4, collate_fn=named)
        model, loader = run.prepare(model, loader, cut=columns())
        for batch in loader:
            model(batch["x"])

    with pytest.raises(DataError, match="batch 1 of a loader is not the same on ranks 0 and 1"):
        workers(2, body, mesh="tensor=2")


def test_batches_without_tensors_are_announced_once() -> None:
    @dataclass
    class Sample:
        x: Tensor

    def body(group: ThreadGroup) -> list[str]:
        said: list[str] = []
        compare = BatchComparer(group, AxisMeter("tensor"), None, said.append)
        for _ in range(2):
            compare(Sample(torch.full((2,), float(group.rank))))
        return said

    for said in spawn(2, body):
        assert (
            len(said) == 1
            and "batch 1 of a loader is a " in said[0]
            and "Sample without visible tensors" in said[0]
        )


def test_a_batch_is_known_by_its_tensors_wherever_they_are() -> None:
    x = torch.arange(6.0)
    assert checksum_batch({"x": [x, ("name", x + 1)]}) == checksum_batch(
        {"x": [x.clone(), ("other", x + 1)]}
    )
    assert (
        len(
            {
                checksum_batch(x),
                checksum_batch(x.view(2, 3)),
                checksum_batch(x.double()),
                checksum_batch(x + 1),
                checksum_batch([x, x]),
            }
        )
        == 5
    )
    assert checksum_batch("words") == checksum_batch(None) == 0


def test_random_numbers_after_prepare_are_those_of_the_first_along_tensor(job: Jobs) -> None:
    body = """
import random
import numpy as np
from tests.harness.cuts import columns

with pl.start(mesh="data=2, tensor=2") as run:
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(run.rank)
    model = nn.Sequential(nn.Linear(4, 8))
    run.prepare(model, torch.optim.SGD(model.parameters(), 0.1), cut=columns())
    drawn = [float(torch.rand(())), random.random(), float(np.random.rand())]
    found = run.group.gather_objects(drawn)
    assert found[0] == found[1] != found[2] == found[3], found
"""
    ended = job.run(body, 4).end()
    assert ended.code == 0, ended.err
