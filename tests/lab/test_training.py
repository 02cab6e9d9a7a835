"""Training on hosts that are apart: the same weights as one process, and a timeline of all ranks
on one clock.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from paceline.lab.description import Description, Host, Placement
from paceline.lab.hosts import Cluster
from tests.harness import nursery
from tests.harness.libraries import LIBRARIES, check_alike

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import paceline as pl

torch.manual_seed(0)
x = torch.randn(95, 300, dtype=torch.float64)
model = torch.nn.Sequential(torch.nn.Linear(300, 500), torch.nn.Tanh(), torch.nn.Linear(500, 3)).double()
opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(TensorDataset(x, x[:, :3].sin()), batch_size=20, shuffle=True)
with pl.start(seed=1, folder=sys.argv[1], name="test") as run:
    model, opt, loader = run.prepare(model, opt, loader)
    for _ in run.epochs(2):
        for a, b in loader:
            loss = torch.nn.functional.mse_loss(model(a), b)
            loss.backward()
            opt.step()
            opt.zero_grad()
            run.log(loss=loss)
    if run.is_first:
        torch.save(torch.nn.utils.parameters_to_vector(model.parameters()).detach(), sys.argv[1] + "/weights.pt")
"""  # noqa: E501
STEPS = 10
PHASES = {"step", "data", "compute", "exchange", "bucket", "within"}


def weights(folder: Path) -> Any:
    import torch

    return torch.load(folder / "weights.pt", weights_only=True)


def described(workers: Sequence[int], placement: Placement) -> Description:
    """Hosts with so many workers each, on links of 1 Gbit/s."""
    hosts = [
        Host(f"h{number}", count, up=10**9, down=10**9) for number, count in enumerate(workers)
    ]
    return Description("test", tuple(hosts), placement=placement)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights that one process comes to."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "train.py").write_text(SCRIPT)
    assert nursery.run_script(folder / "train.py", folder, str(folder)).returncode == 0
    return weights(folder)


def train(cluster: Cluster, folder: Path, alone: Any) -> None:
    """Train on it; the weights are those of one process."""
    (folder / "train.py").write_text(SCRIPT)
    outcome = cluster.run(folder / "train.py", str(folder), deadline=200)
    assert outcome.code == 0, outcome.output
    assert float((alone - weights(folder)).norm() / alone.norm()) < 1e-9


@pytest.mark.parametrize(
    "workers, placement",
    [
        ((1, 2, 1), "round-robin"),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in (((1, 1, 1), "block"), ((2, 2), "round-robin"))
        ),
    ],
)
def test_hosts_train_the_same_weights_as_one_process(
    workers: tuple[int, ...],
    placement: Placement,
    build: Callable[..., Cluster],
    alone: Any,
    tmp_path: Path,
) -> None:
    train(build(description=described(workers, placement)), tmp_path, alone)
    assert json.loads((tmp_path / "test/summary.json").read_text())["hosts"] == len(workers)


def test_a_step_is_shown_with_all_its_phases_on_one_clock(
    build: Callable[..., Cluster], alone: Any, tmp_path: Path
) -> None:
    train(build(hosts=2, workers=2, bandwidth="1gbit"), tmp_path, alone)
    trace = json.loads((tmp_path / "test/trace.json").read_text())
    ahead, within = trace["otherData"]["clock_ahead_us"], trace["otherData"]["clock_within_us"]
    assert len(ahead) == 4 and ahead[:2] == within[:2] == [0, 0] and within[2:] > [0, 0]
    # the hosts of a lab have one clock
    assert all(abs(found) <= most for found, most in zip(ahead, within, strict=True))
    kinds: dict[int, set[str]] = defaultdict(set)
    exchanges: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for event in trace["traceEvents"]:
        if event["ph"] != "X":
            continue
        kinds[event["pid"]].add(event["cat"])
        if event["cat"] == "bucket":
            exchanges[event["args"]["step"], event["name"]].append(
                (event["ts"], event["ts"] + event["dur"])
            )
    leaders = (0, 2)
    sometimes = {"late", "collection"}
    assert {rank: found - sometimes for rank, found in kinds.items()} == {
        rank: PHASES | ({"between"} if rank in leaders else set()) for rank in range(4)
    }
    assert len(exchanges) >= STEPS
    # nobody has the sum before everybody has sent, also by the clocks of others
    for spans in exchanges.values():
        assert len(spans) == 4
        assert min(end for _, end in spans) > max(start for start, _ in spans) - max(within)


@pytest.mark.soak
def test_libraries_on_torch_distributed_give_what_they_give_on_gloo(
    build: Callable[..., Cluster],
) -> None:
    """DDP, FSDP2, tensor parallelism, a pipeline and torch's own calls, over two hosts, one of
    which has two workers.
    """
    outcome = build(description=described((2, 1), "block")).run(
        LIBRARIES, "gloo", "paceline", deadline=200
    )
    assert outcome.code == 0, outcome.output
    check_alike(outcome.output)
