"""Fabric on paceline: the losses of one process, its collectives, its checkpoints, its refusals."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import io
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from paceline.errors import DataError, UsageError
from tests.harness.bridge_workers import fork_workers
from tests.harness.jobs import ROOT, Jobs

pytestmark = pytest.mark.xdist_group("lightning")
LIBRARY = "lightning.fabric", "paceline.bridges.fabric"
SAMPLES, BATCH = 22, 7  # the last batch has one sample, so there are ghosts


def make_parts(*, shuffle: bool = False) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(
        torch.randn(SAMPLES, 4, generator=generator), torch.randn(SAMPLES, 1, generator=generator)
    )
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return model, optimizer, DataLoader(data, batch_size=BATCH, shuffle=shuffle)


def open_fabric(**options: Any) -> Any:
    from lightning.fabric import Fabric

    from paceline.bridges.fabric import PacelineStrategy

    fabric = Fabric(accelerator="cpu", strategy=PacelineStrategy(**options))
    fabric.launch()
    return fabric


def set_up(fabric: Any, **options: Any) -> tuple[Any, Any, Any]:
    model, optimizer, loader = make_parts(**options)
    return *fabric.setup(model, optimizer), fabric.setup_dataloaders(loader)


def flatten(model: nn.Module) -> list[float]:
    """All weights; as numbers, which a process can send and end."""
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def close(found: list[float], expected: list[float]) -> bool:
    return found == pytest.approx(expected, rel=1e-4, abs=1e-5)


def train(fabric: Any, epochs: int = 2, **options: Any) -> tuple[list[float], list[float]]:
    """Losses, as means over workers, and weights in the end."""
    model, optimizer, loader = set_up(fabric, **options)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            loss = ((model(x) - y) ** 2).mean()
            fabric.backward(loss)
            losses.append(float(fabric.all_reduce(loss.detach().clone())))
            optimizer.step()
            optimizer.zero_grad()
    return losses, flatten(model)


def train_plainly(epochs: int = 2) -> tuple[list[float], list[float]]:
    """The same loop without Fabric and paceline."""
    torch.manual_seed(0)
    model, optimizer, loader = make_parts()
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            loss = ((model(x) - y) ** 2).mean()
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return losses, flatten(model)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_losses_are_those_of_one_process(size, tmp_path):
    expected, weights = train_plainly()
    for losses, found in fork_workers(size, tmp_path, lambda _: train(open_fabric()), *LIBRARY):
        assert losses == pytest.approx(expected, rel=1e-4)
        assert close(found, weights)


def test_shuffled_samples_are_the_same_for_any_number_of_workers(tmp_path):
    """The batch size is that of all workers, and each epoch has an order of its own."""

    def body(_: int) -> tuple[list[float], tuple[int, int, int]]:
        fabric = open_fabric(seed=3)
        losses, _ = train(fabric, shuffle=True)
        *_, loader = set_up(fabric)
        return losses, (loader.batch_size, len(loader), len(loader.dataset))

    (alone, facts), (pair, facts_of_pair), _ = (
        fork_workers(size, tmp_path, body, *LIBRARY)[0] for size in (1, 2, 2)
    )
    assert pair == pytest.approx(alone, rel=1e-4)
    assert facts == facts_of_pair == (BATCH, 4, SAMPLES)
    assert alone[:4] != pytest.approx(train_plainly()[0][:4], rel=1e-4)


def accumulate(fabric: Any, clip: dict[str, float]) -> list[float]:
    model, optimizer, loader = set_up(fabric)
    for index, (x, y) in enumerate(loader):
        with fabric.no_backward_sync(model, enabled=index % 2 == 0):
            fabric.backward(((model(x) - y) ** 2).mean())
            if index % 2 == 0 and fabric.world_size > 1:  # these stay on their worker
                own = next(model.parameters()).grad.clone()
                assert not torch.equal(own, fabric.all_gather(own)[1 - fabric.global_rank])
        if index % 2:
            fabric.clip_gradients(model, optimizer, **clip)
            optimizer.step()
            optimizer.zero_grad()
    return flatten(model)


@pytest.mark.parametrize("clip", [{"max_norm": 0.2}, {"clip_val": 0.1}], ids=["norm", "value"])
def test_accumulation_and_clipping(clip, tmp_path):
    torch.manual_seed(0)
    model, optimizer, loader = make_parts()
    for index, (x, y) in enumerate(loader):
        ((model(x) - y) ** 2).mean().backward()
        if index % 2:
            if "max_norm" in clip:
                assert nn.utils.clip_grad_norm_(model.parameters(), 0.2) > 0.2
            else:
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()

    for found in fork_workers(2, tmp_path, lambda _: accumulate(open_fabric(), clip), *LIBRARY):
        assert close(found, flatten(model))


def test_mean_of_a_batch_is_weighted_by_samples_and_outside_it_is_not(tmp_path):
    """The shares of a batch of 7 are 4 and 3, and of the last batch 1 and a ghost."""

    def body(rank: int) -> list[Any]:
        fabric = open_fabric()
        *_, loader = set_up(fabric)
        rows = []
        for _ in loader:
            own = float(rank + 1)
            rows.append([float(fabric.all_reduce(own, reduce_op=op)) for op in ("mean", "sum")])
        kept = torch.tensor([2.0 * rank, 1.0])
        fabric.all_reduce(kept, reduce_op="mean")
        extremes = [
            fabric.all_reduce(torch.tensor([rank, -rank]), reduce_op=op).tolist()
            for op in ("max", torch.distributed.ReduceOp.MIN)
        ]
        return [rows, kept.tolist(), extremes]

    for rows, kept, extremes in fork_workers(2, tmp_path, body, *LIBRARY):
        assert rows[0] == [pytest.approx((4 * 1 + 3 * 2) / 7), 3.0]
        assert rows[-1] == [1.0, 1.0]
        assert kept == [1.0, 1.0], "Fabric reduces in place"
        assert extremes == [[1, 0], [0, -1]]


def test_calls_between_workers(tmp_path):
    def body(rank: int) -> dict[str, Any]:
        fabric = open_fabric()
        gathered = fabric.all_gather({"x": torch.tensor([rank, 7])})["x"]
        marks = []
        with fabric.rank_zero_first():
            marks.append(rank)
        fabric.barrier()
        assert fabric.is_global_zero == (rank == 0) and fabric.strategy.run.size == 2
        return {
            "gathered": gathered.tolist(),
            "sent": fabric.broadcast({"path": Path("a"), "n": rank} if rank > 9 else [rank], 1),
            "path": fabric.broadcast(Path(f"of-{rank}")),
            "all": fabric.strategy.reduce_boolean_decision(rank == 0),
            "any": fabric.strategy.reduce_boolean_decision(rank == 0, all=False),
            "place": (fabric.global_rank, fabric.local_rank, fabric.node_rank, fabric.world_size),
        }

    for rank, found in enumerate(fork_workers(2, tmp_path, body, *LIBRARY)):
        assert found == {
            "gathered": [[0, 7], [1, 7]],
            "sent": [1],
            "path": Path("of-0"),
            "all": False,
            "any": True,
            "place": (rank, rank, 0, 2),
        }


def train_in_parts(path: Path, parts: tuple[int, ...], part: int, **options: Any) -> list[float]:
    """Train until batch `parts[part]` of two epochs, from a checkpoint of the part before."""
    fabric = open_fabric(**options)
    model, optimizer, loader = set_up(fabric)
    state = {"model": model, "optimizer": optimizer, "loader": loader, "done": 0}
    if part:
        assert fabric.load(path, state) == {}
        assert state["done"] == parts[part - 1] == fabric.strategy.run.steps
    while state["done"] < parts[part]:
        for x, y in loader:
            fabric.backward(((model(x) - y) ** 2).mean())
            optimizer.step()
            optimizer.zero_grad()
            state["done"] += 1
            if state["done"] == parts[part]:
                fabric.save(path, state)
                break
    fabric.strategy.close()
    return flatten(model)


def test_a_checkpoint_goes_on_with_another_number_of_workers(tmp_path):
    """In the middle of the first epoch, with 2 workers, then 3, then 1."""
    path, parts = tmp_path / "a.ckpt", (2, 5, 8)
    found = [
        fork_workers(size, tmp_path, lambda _, p=part: train_in_parts(path, parts, p), *LIBRARY)
        for part, size in enumerate((2, 3, 1))
    ]
    assert close(found[-1][0], train_plainly()[1])


def test_a_checkpoint_holds_the_state_of_the_strategy(tmp_path):
    """Residuals of a codec: stopping and going on changes no bit."""
    options: dict[str, Any] = {"sync": "AllReduce(codec=int8())", "seed": 1}

    def once(_: int) -> list[float]:
        return train_in_parts(tmp_path / "b.ckpt", (8,), 0, **options)

    def parted(part: int) -> Any:
        path = tmp_path / "a.ckpt"
        return lambda _: train_in_parts(path, (3, 8), part, **options)

    whole = fork_workers(2, tmp_path, once, *LIBRARY)
    fork_workers(2, tmp_path, parted(0), *LIBRARY)
    resumed = fork_workers(2, tmp_path, parted(1), *LIBRARY)
    assert whole == resumed
    assert whole[0] != pytest.approx(train_plainly()[1], rel=1e-6), "the codec is in use"


def test_options_of_the_strategy_reach_the_run(tmp_path):
    def body(_: int) -> tuple[int, int, str]:
        fabric = open_fabric(sync="LocalSGD(every=4)", shares=[2, 1], seed=5, name="named")
        *_, loader = set_up(fabric)
        sizes = [len(x) for x, _ in loader]
        return sizes[0], fabric.strategy.run.seed, fabric.strategy.run.folder.path.name

    found = fork_workers(2, tmp_path, body, *LIBRARY)
    assert found == [(5, 5, "named"), (2, 5, "named")]


def test_a_grad_scaler_of_the_precision_is_prepared(tmp_path):
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import MixedPrecision

    from paceline.bridges.fabric import PacelineStrategy

    def body(_: int) -> tuple[float, list[float]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
        fabric = Fabric(accelerator="cpu", strategy=PacelineStrategy(), plugins=[plugin])
        fabric.launch()
        return scaler.get_scale(), train(fabric)[1]

    (scale, one), (_, other) = fork_workers(2, tmp_path, body, *LIBRARY)
    assert scale == 8.0 and one == other
    assert one == pytest.approx(train_plainly()[1], rel=0.1, abs=0.05)


SURVIVING = """
import signal
from lightning.fabric import Fabric
from paceline.bridges.fabric import PacelineStrategy

fabric = Fabric(accelerator="cpu", strategy=PacelineStrategy(name="kept", seed=1))
fabric.launch()
torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 4), torch.arange(48.0))
model = nn.Linear(4, 1)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), 1e-3))
loader = fabric.setup_dataloaders(DataLoader(data, batch_size=6))
for epoch in range(2):
    for x, y in loader:
        if rank == 1 and fabric.strategy.run.steps == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        fabric.backward(((model(x).squeeze(1) - y) ** 2).mean())
        optimizer.step()
        optimizer.zero_grad()
if fabric.is_global_zero:
    print("END", fabric.strategy.run.steps, fabric.world_size, model.weight.tolist()[0])
"""


def test_a_killed_worker_is_survived(job: Jobs):
    """Its batch is dealt again: the weights are those of one process."""
    ended = job.run(SURVIVING, 3, "--min-workers", "2").end()
    (found,) = re.findall(r"END (\d+) (\d+) \[(.*)\]", ended.out)
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(48, 4), torch.arange(48.0))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for x, y in [*DataLoader(data, batch_size=6)] * 2:
        ((model(x).squeeze(1) - y) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert found[:2] == ("16", "2"), ended
    weights = [float(word) for word in found[2].split(",")]
    assert weights == pytest.approx(model.weight[0].tolist(), rel=1e-4)


class TestRefusals:
    """One process each: the message says what to do."""

    def refuse(self, message: str, **options: Any) -> None:
        from lightning.fabric import Fabric

        from paceline.bridges.fabric import PacelineStrategy

        fabric_options = {
            name: options.pop(name) for name in ("devices", "num_nodes") if name in options
        }
        with pytest.raises(UsageError, match=re.escape(message)):
            Fabric(
                accelerator="cpu", strategy=PacelineStrategy(**options), **fabric_options
            ).launch()

    @pytest.mark.parametrize(
        "options, message",
        [
            ({"cut": "shard(zero=3)"}, "cut can't be honoured under Fabric"),
            ({"mesh": "data=2"}, "mesh can't be honoured under Fabric"),
            ({"device": "cpu"}, "the accelerator chooses the device"),
            ({"devices": 2}, "devices=2, and this host has 1 workers"),
            ({"num_nodes": 2}, "num_nodes=2, and the workers are on 1 hosts"),
            ({"sync": "ParameterServer()"}, "ParameterServer keeps optimizers on servers"),
        ],
        ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
    )
    def test_options(self, options, message, tmp_path, monkeypatch):
        fork_workers(1, tmp_path, lambda _: self.refuse(message, **options), *LIBRARY)

    def test_objects(self, tmp_path):
        def body(_: int) -> None:
            fabric = open_fabric()
            model, optimizer, loader = make_parts()
            sampler = DistributedSampler(loader.dataset, 2, 0)
            with pytest.raises(DataError, match="DistributedSampler"):
                fabric.setup_dataloaders(DataLoader(loader.dataset, sampler=sampler))
            with pytest.raises(UsageError, match="wrapped in DataParallel already"):
                fabric.setup(nn.DataParallel(model), optimizer)
            for call, message in (
                (lambda: fabric.all_gather(torch.ones(1), sync_grads=True), "sync_grads"),
                (lambda: fabric.all_reduce(1.0, group=object()), "group of some workers"),
                (lambda: fabric.all_reduce(1.0, reduce_op="product"), "reduce_op='product'"),
                (lambda: fabric.broadcast(1, src=1), "there are 1 workers"),
                (lambda: fabric.save("x.ckpt", {"paceline": 1}), "is taken"),
            ):
                with pytest.raises(UsageError, match=message):
                    call()

        fork_workers(1, tmp_path, body, *LIBRARY)

    def test_two_runs_with_one_model(self, tmp_path):
        def body(_: int) -> None:
            first = open_fabric()
            model, optimizer, _ = make_parts()
            first.setup(model, optimizer)
            second = open_fabric()
            with pytest.raises(UsageError, match="part of another run that is still open"):
                second.setup(model, optimizer)
            first.strategy.close()
            second.setup(model, optimizer)

        fork_workers(2, tmp_path, body, *LIBRARY)

    def test_shapes_that_differ(self, tmp_path):
        def body(rank: int) -> None:
            fabric = open_fabric()
            with pytest.raises(UsageError, match=r"rank 0: \(1,\) .*; rank 1: \(2,\)"):
                fabric.all_gather(torch.ones(1 + rank))

        fork_workers(2, tmp_path, body, *LIBRARY)

    def test_a_missing_extra(self, monkeypatch):
        def missing(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        # first, as this imports the bridge
        found = importlib.util.find_spec("paceline.bridges.fabric.library")
        monkeypatch.setattr(importlib.metadata, "version", missing)
        assert found is not None and found.origin is not None
        path = Path(found.origin).with_name("strategy.py")
        spec = importlib.util.spec_from_file_location("strategy_without_lightning", path)
        assert spec is not None and spec.loader is not None
        with pytest.raises(UsageError, match=r"pip install 'paceline\[lightning\]'"):
            spec.loader.exec_module(importlib.util.module_from_spec(spec))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_example(size, tmp_path):
    """It learns as well with any number of workers."""

    def body(_: int) -> str:
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            runpy.run_path(str(ROOT / "examples" / "bridges" / "fabric.py"), run_name="__main__")
        return said.getvalue()

    first, *others = fork_workers(size, tmp_path, body, *LIBRARY)
    assert float(re.findall(r"accuracy (\S+)", first)[-1]) > 0.9 and not any(others), first
