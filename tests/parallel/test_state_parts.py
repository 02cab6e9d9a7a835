"""A `state_dict` of a cut model is refused by a worker that has other parts, and taken by all
that have the same ones.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import paceline as pl
from paceline.errors import UsageError
from paceline.session.run import Run
from tests.harness.runs import batches, workers

CUTS = {
    "tensor": pl.tensor({"0": pl.column(), "2": pl.row()}),
    "shard": pl.shard(("0", "2"), zero=3),
}


def model() -> nn.Module:
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)).double()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
    return net


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("axis", CUTS)
def test_parts_of_another_worker_are_refused(axis: str) -> None:
    files: dict[int, Any] = {}

    def body(run: Run) -> str:
        net = model()
        net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1), cut=CUTS[axis])
        files[run.rank] = through_a_file(net.state_dict())
        run.barrier()
        net.load_state_dict(files[run.rank])
        net.load_state_dict(dict(net.state_dict()))  # built anew, without marks
        with pytest.raises(UsageError) as raised:
            net.load_state_dict(files[1 - run.rank])
        return str(raised.value)

    for text in workers(2, body, mesh=axis):
        assert text.startswith(
            "this state_dict has another worker's part of 0.weight: where a model is cut, "
        )


def test_replicas_of_a_part_take_each_others() -> None:
    files: dict[int, Any] = {}

    def body(run: Run) -> None:
        net = model()
        net, _, _ = run.prepare(
            net, torch.optim.SGD(net.parameters(), 0.1), batches(), cut=CUTS["tensor"]
        )
        files[run.rank] = through_a_file(net.state_dict())
        run.barrier()
        net.load_state_dict(files[(run.rank + 2) % 4])

    workers(4, body, mesh="data=2, tensor=2")


def test_a_model_that_is_whole_has_no_marks() -> None:
    def body(run: Run) -> list[Any]:
        net = model()
        net, _ = run.prepare(net, torch.optim.SGD(net.parameters(), 0.1), cut=pl.shard(zero=1))
        return [sorted(metadata) for metadata in net.state_dict()._metadata.values()]  # type: ignore[attr-defined]

    assert workers(2, body, mesh="shard")[0] == [
        sorted(metadata) for metadata in model().state_dict()._metadata.values()
    ]  # type: ignore[attr-defined]
