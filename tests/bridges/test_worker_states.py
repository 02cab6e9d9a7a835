"""The state of workers in a checkpoint that another library writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.bridges.worker_states import collect_worker_states, restore_worker_states
from paceline.errors import CheckpointError
from tests.harness.bridge_workers import fork_workers


def test_states_of_all_workers_come_back(tmp_path):
    """Each worker's random generators, and the number of steps, also with fewer workers."""

    def collect(rank: int) -> tuple[int, list[bytes], float]:
        run = pl.start()
        run.prepare(nn.Linear(2, 1))
        torch.manual_seed(rank)
        entry = collect_worker_states(run)
        bodies = [body.numpy().tobytes() for body in entry["workers"]]
        return entry["steps"], bodies, float(torch.rand(()))

    def restore(entry: dict[str, Any]) -> Any:
        def body(_: int) -> tuple[int, float]:
            run = pl.start()
            run.prepare(nn.Linear(2, 1))
            torch.manual_seed(99)
            restore_worker_states(run, {**entry, "steps": 7})
            return run.steps, float(torch.rand(()))

        return body

    (steps, bodies, drawn), (_, none, drawn_by_other) = fork_workers(2, tmp_path, collect)
    assert steps == 0 and len(bodies) == 2 and none == [] and drawn != drawn_by_other
    workers = [torch.frombuffer(bytearray(body), dtype=torch.uint8) for body in bodies]
    entry = {"steps": steps, "workers": workers}
    assert fork_workers(2, tmp_path, restore(entry)) == [(7, drawn), (7, drawn_by_other)]
    assert fork_workers(1, tmp_path, restore(entry)) == [(7, drawn)]


def test_entries_that_are_none(tmp_path):
    def body(_: int) -> None:
        run = pl.start()
        restore_worker_states(run, None)  # of a checkpoint that was written without paceline
        for entry in ({}, {"steps": "many", "workers": []}, {"steps": 1}):
            with pytest.raises(CheckpointError, match="another version of paceline"):
                restore_worker_states(run, entry)

    fork_workers(1, tmp_path, body)
