"""What a worker has for itself in a checkpoint: here the way of exchanges between hosts, on
threads.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from paceline.codec.dense import int8
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce
from paceline.sync.base import Strategy
from paceline.sync.localsgd.strategy import LocalSGD
from paceline.sync.route_choice import RouteFacts
from tests.harness.models import fill
from tests.harness.runs import alone, batches, distance, parameters, workers

HOSTS = (0, 1, 2)
UNEVEN, ALIKE = RouteFacts((1e8, 1e8, 1e7), 1e-4, 4.0), RouteFacts((1e8, 1.1e8, 1e8), 1e-4, 4.0)


def training(run: Run) -> Tensor:
    """Two epochs from the newest checkpoint on, saved after each."""
    model = fill(nn.Linear(6, 2, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer, loader = run.prepare(model, optimizer, batches())
    run.resume()
    for _ in run.epochs(2):
        for x, y in loader:
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        run.save()
    return parameters(model)


@pytest.mark.parametrize("strategy", [AllReduce(), LocalSGD(every=1)])
def test_the_way_is_in_the_summary_and_weights_are_those_of_one_worker(
    tmp_path: Path, strategy: Strategy
) -> None:
    said: list[str] = []
    found = workers(
        3, training, hosts=HOSTS, links=UNEVEN, said=said, folder=tmp_path, strategy=strategy
    )
    assert all(torch.equal(each, found[0]) for each in found)
    if strategy == AllReduce():
        assert distance(found[0], alone(training)) < 1e-12
    route = json.loads((tmp_path / "test" / "summary.json").read_text())["route"]
    assert (
        route["way"] == "uneven"
        and route["parts"] == pytest.approx([0.5, 0.5, 0.0])
        and said.count(route["why"]) == 1
    )


def test_without_a_measured_cluster_there_is_no_way_to_tell_of(tmp_path: Path) -> None:
    workers(3, training, hosts=HOSTS, folder=tmp_path)
    assert json.loads((tmp_path / "test" / "summary.json").read_text())["route"] is None


@pytest.mark.parametrize(
    "strategy", [AllReduce(via="ring"), AllReduce(codec=int8()), LocalSGD(every=2, codec=int8())]
)
def test_a_strategy_with_its_own_way_is_told_of(tmp_path: Path, strategy: Strategy) -> None:
    said: list[str] = []
    workers(3, training, hosts=HOSTS, links=UNEVEN, said=said, folder=tmp_path, strategy=strategy)
    assert (
        said.count(f"cluster.json decides nothing here: {strategy!r} has its own way between hosts")
        == 1
    )
    assert json.loads((tmp_path / "test" / "summary.json").read_text())["route"] is None


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (UNEVEN, UNEVEN, None),
        (None, ALIKE, None),
        (ALIKE, None, None),
        (
            UNEVEN,
            None,
            (
                "went via='uneven' with chunks of 0.5, 0.5, 0 when this was saved, and go the "
                "usual way now"
            ),
        ),
        (
            None,
            UNEVEN,
            (
                "went the usual way when this was saved, "
                "and go via='uneven' with chunks of 0.5, 0.5, 0 now"
            ),
        ),
    ],
)
def test_a_resumed_run_says_that_exchanges_go_another_way(
    tmp_path: Path, before: RouteFacts | None, after: RouteFacts | None, words: str | None
) -> None:
    workers(3, training, hosts=HOSTS, links=before, folder=tmp_path)
    said: list[str] = []
    workers(3, training, hosts=HOSTS, links=after, said=said, folder=tmp_path)
    assert any(line.startswith("resumed from") for line in said)
    warnings = [line for line in said if "sums may differ in their last bits" in line]
    assert len(warnings) == (words is not None) and all(words in line for line in warnings if words)
