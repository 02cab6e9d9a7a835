"""The default process group of torch.distributed: libraries that ask it who else there is are
told, and nothing is left of it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.errors import UsageError
from paceline.session.run import Run
from tests.harness.jobs import Jobs
from tests.harness.runs import alone, batches, workers

torchmetrics = pytest.importorskip("torchmetrics")

METRICS = """
import json
import torch.distributed as dist
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import BinaryAUROC, BinaryAccuracy

numbers = torch.Generator().manual_seed(3)
x = torch.rand(19, generator=numbers)
y = (torch.rand(19, generator=numbers) < 0.5).long()

class Asked(TensorDataset):
    def __getitem__(self, index):
        return *super().__getitem__(index), dist.is_initialized()

def metrics():
    return [MeanMetric(), BinaryAUROC(), BinaryAccuracy(), MetricCollection([BinaryAUROC(), BinaryAccuracy(threshold=0.7)])]

def flat(found):
    return [float(value) for one in found for value in (one.values() if isinstance(one, dict) else [one])]

def given(metric, a, b):
    return (a,) if isinstance(metric, MeanMetric) else (a, b)

with pl.start(folder="runs") as run:
    found = {"world": [dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend()]}
    model, optimizer = run.prepare(parted := nn.Linear(1, 1), torch.optim.SGD(parted.parameters(), 0.01))
    for name, batch, readers in (("plain", 5, 1), ("prepared", 6, 0), ("training", 6, 0)):
        loader = run.prepare(DataLoader(Asked(x, y), batch, num_workers=readers), train=name == "training")
        mine = metrics() if name == "plain" else run.prepare(*metrics())
        for a, b, asked in loader:
            assert not readers or not asked.any()  # a reader has no connection of its own
            for metric in mine if len(a) or name != "plain" else ():
                metric(*given(metric, a, b)) if name == "training" else metric.update(*given(metric, a, b))
            if name == "training":
                model(a[:, None]).sum().backward()
                optimizer.step()
        found[name] = flat([metric.compute() for metric in mine])
    whole = metrics()
    for metric in whole:
        for part in metric.values() if isinstance(metric, MetricCollection) else [metric]:
            part.sync_on_compute = False
        metric.update(*given(metric, x, y))
    found["wanted"] = flat([metric.compute() for metric in whole])
    found["steps"] = run.steps
found["after"] = [dist.is_initialized(), "GLOO_SOCKET_IFNAME" in os.environ and os.environ["GLOO_SOCKET_IFNAME"] != "lo"]
with open(f"found-{rank}.json", "w") as file:
    json.dump(found, file)
"""  # noqa: E501


@pytest.mark.slow
def test_metrics_are_those_of_all_workers(job: Jobs, tmp_path: Path) -> None:
    """19 samples: the last batch has one, so there are empty shares of evaluation, and ghosts in
    training.
    """
    size = 3
    ended = job.run(METRICS, size).end()
    assert ended.code == 0, ended.err
    for rank in range(size):
        found = json.loads((tmp_path / f"found-{rank}.json").read_text())
        assert found["world"] == [True, rank, size, "paceline"] and found["steps"] == 4
        for name in ("plain", "prepared", "training"):
            assert found[name] == pytest.approx(found["wanted"], abs=1e-6), name
        assert found["after"] == [False, False]


OWN = """
import torch.distributed as dist
hook = sys.excepthook
with pl.start(folder="runs", name="first") as run:
    numbers = torch.tensor([rank + 1.0])
    dist.all_reduce(numbers)
    pair = dist.new_group([0, 1])                                     # a script's own group of the default one
    dist.all_reduce(numbers, group=pair)
    assert float(numbers) == 6
assert not dist.is_initialized() and sys.excepthook is hook
dist.init_process_group("gloo")
mine = dist.group.WORLD
with pl.start(folder="runs", name="second") as run:
    assert dist.group.WORLD is mine
assert dist.group.WORLD is mine                                       # a script's own stays
dist.destroy_process_group()
run = pl.start(folder="runs", name="third")                           # without `with`: closed at exit
run.barrier()
if sys.argv[1] == "twice":
    dist.init_process_group("gloo")
elif sys.argv[1] == "error":
    dist.barrier()
    run.prepare(7)
"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize("how", ["well", "twice", "error"])
def test_one_that_a_script_makes_before_is_kept_and_one_after_is_told(job: Jobs, how: str) -> None:
    ended = job.run(OWN, 2, args=(how,)).end()
    assert (ended.code != 0) == (how != "well"), ended.err
    assert "Warning" not in ended.err
    assert ("paceline: pl.start has made the default process group" in ended.err) == (
        how == "twice"
    )
    assert ("trying to initialize the default process group twice" in ended.err) == (how == "twice")


LOST = """
import torch.distributed as dist
with pl.start(folder="runs") as run:
    print("world", dist.is_initialized())
    try:
        run.prepare(__import__("torchmetrics").MeanMetric())
    except pl.UsageError as error:
        print("refused", "--min-workers" in str(error))
"""


@pytest.mark.slow
def test_there_is_none_where_workers_may_be_lost_and_none_for_one_worker(job: Jobs) -> None:
    ended = job.run(LOST, 2, "--min-workers", "1").end()
    assert ended.code == 0, ended.err
    assert sorted(ended.out.splitlines()) == [
        "[0] refused True",
        "[0] world False",
        "[1] refused True",
        "[1] world False",
    ]
    ended = job.run(LOST, 1).end()
    assert ended.code == 0, ended.err
    assert "world False" in ended.out


@pytest.mark.slow
def test_an_interface_that_is_not_there_is_one_message(job: Jobs) -> None:
    ended = job.run("pl.start(folder='runs')", 2, GLOO_SOCKET_IFNAME="nosuch0").end()
    assert (
        ended.code == 1
        and (
            "paceline.errors.PlaceError: torch.distributed can't listen on "
            "GLOO_SOCKET_IFNAME=nosuch0"
        )
        in ended.err
    )


# ---- what a ghost is given


def accuracy(run: Run, metric: Any, *, prepare: bool) -> tuple[int, int]:
    """Over one epoch of training with a ghost, the rows that it was given, and that it has
    counted.
    """
    metric = run.prepare(metric) if prepare else metric
    given = 0
    for x, _ in run.prepare(batches(9, 4)):
        metric.update(x[:, 0])
        metric(x[:, 0])
        given += 2 * len(x)
    return given, int(metric.weight)


def test_a_ghost_does_not_count() -> None:
    counting = lambda run: accuracy(  # noqa: E731
        run, torchmetrics.MeanMetric(sync_on_compute=False), prepare=True
    )
    assert alone(counting) == (18, 18)
    found = workers(3, counting)
    assert sum(counted for _, counted in found) == 18 < sum(given for given, _ in found)
    bare = workers(
        3, lambda run: accuracy(run, torchmetrics.MeanMetric(sync_on_compute=False), prepare=False)
    )
    assert sum(counted for _, counted in bare) > 18  # or there was no ghost at all


@pytest.mark.parametrize(
    ("samples", "prepare", "lines"), [(9, False, 1), (9, True, 0), (8, False, 0)]
)
def test_a_metric_that_may_count_ghosts_is_told(samples: int, prepare: bool, lines: int) -> None:
    said: list[str] = []

    def body(run: Run) -> None:
        model = torch.nn.Linear(6, 2).double()
        model, opt, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), 0.01), batches(samples, 4)
        )
        metric = torchmetrics.MeanMetric(sync_on_compute=False)
        metric = run.prepare(metric) if prepare else metric
        for _ in range(2):
            for x, y in loader:
                torch.nn.functional.mse_loss(model(x), y).backward()
                opt.step()
                metric.update(x[:, 0])

    workers(3, body, said=said)
    assert len([text for text in said if "(a ghost), and torchmetrics is in use" in text]) == lines


def test_a_metric_in_a_model_counts_no_ghost_either() -> None:
    class Measured(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(6, 2).double()
            self.seen = torchmetrics.MetricCollection(
                {"mean": torchmetrics.MeanMetric(sync_on_compute=False)}
            )

    def body(run: Run) -> int:
        model = run.prepare(Measured())
        for x, _ in run.prepare(batches(9, 4)):
            assert model.seen(x[:, 0]).keys() == {"mean"}  # on a ghost, too
            model.seen.update(x[:, 0])
        return int(model.seen["mean"].weight)

    assert sum(workers(3, body)) == 18


def test_a_metric_is_no_model_and_gets_its_methods_back() -> None:
    metrics = []

    def body(run: Run) -> None:
        metric = torchmetrics.MeanMetric()
        metrics.append((metric, metric.update))
        assert run.prepare(metric) is metric and run.prepare(metric) is metric
        assert not run._prepared.models and "forward" in vars(metric)

    workers(2, body)
    assert all(
        metric.update == before and "forward" not in vars(metric) for metric, before in metrics
    )


def test_a_metric_that_would_exchange_in_each_step_is_refused() -> None:
    with pytest.raises(UsageError, match="dist_sync_on_step=True"):
        workers(2, lambda run: run.prepare(torchmetrics.MeanMetric(dist_sync_on_step=True)))
