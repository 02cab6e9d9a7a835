"""The same script on a GPU: the losses of the plain loop, at its speed, without a wait for the
device in a step.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import paceline as pl
from tests.harness.jobs import Jobs
from tests.harness.programs import beside_processors
from tests.harness.runs import Numbered, distance, parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs a CUDA device, and this machine has none"
    ),
]

SLOWER = 1.02  # a step on one worker, against the plain loop


def net(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))


def data(count: int = 256, batch: int = 16) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(3)
    return DataLoader(
        Numbered(count, dtype=torch.float32),
        batch_size=batch,
        shuffle=True,
        generator=generator,
        pin_memory=True,
    )


def plain(width: int = 32) -> tuple[list[float], Tensor]:
    model = net(width).cuda()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, loader = list[float](), data()
    for _ in range(2):
        for x, y in loader:
            loss = F.mse_loss(model(x.cuda()), y.cuda())
            loss.backward()
            opt.step()
            opt.zero_grad()
            losses.append(float(loss.detach()))
    return losses, parameters(model).cpu()


def test_one_worker_has_the_losses_of_the_plain_loop(tmp_path: Path) -> None:
    wanted, weights = plain()
    with pl.start(folder=str(tmp_path), name="gpu") as run:
        assert run.device.type == "cuda"
        model = net()
        model, opt, loader = run.prepare(
            model, torch.optim.Adam(model.parameters(), lr=0.01), data()
        )
        for _ in run.epochs(2):
            for x, y in loader:
                assert x.is_cuda and y.is_cuda and next(model.parameters()).is_cuda
                loss = F.mse_loss(model(x), y)
                loss.backward()
                opt.step()
                opt.zero_grad()
                run.log(loss=loss)
        found = parameters(model).cpu()
    lines = [json.loads(line) for line in (tmp_path / "gpu/metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == pytest.approx(wanted, rel=1e-6)
    assert distance(found, weights) < 1e-6


def test_a_step_does_not_wait_for_the_device(tmp_path: Path) -> None:
    with pl.start(folder=str(tmp_path)) as run:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        model, opt, loader = run.prepare(model, opt, data())
        for number, (x, y) in enumerate(loader):
            # the first steps make the layout
            torch.cuda.set_sync_debug_mode("error" if number >= 8 else "default")
            try:
                loss = F.mse_loss(model(x), y)
                loss.backward()
                run.clip(model, 1.0)
                opt.step()
                opt.zero_grad()
                run.log(loss=loss)
            finally:
                torch.cuda.set_sync_debug_mode("default")


def test_optimizer_state_made_before_prepare_follows_its_parameters(tmp_path: Path) -> None:
    model = net()
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    model(torch.ones(2, 6)).sum().backward()
    opt.step()
    with pl.start(folder=str(tmp_path)) as run:
        model, opt = run.prepare(model, opt)
        model(torch.ones(2, 6, device=run.device)).sum().backward()
        opt.step()
        assert all(state["exp_avg"].is_cuda for state in opt.state.values())


@pytest.mark.parametrize("background", [False, True])
def test_save_and_resume(tmp_path: Path, background: bool) -> None:
    def train(save: bool) -> tuple[bool, Tensor, int]:
        with pl.start(folder=str(tmp_path), name="saved") as run:
            model = net()
            model, opt, loader = run.prepare(
                model, torch.optim.Adam(model.parameters(), lr=0.01), data()
            )
            resumed = run.resume()
            for _ in run.epochs(2):
                for x, y in loader:
                    opt.zero_grad()
                    F.mse_loss(F.dropout(model(x), 0.1), y).backward()
                    opt.step()
                    if save and run.steps + 1 == 20:
                        run.save(background=background)
            return resumed, parameters(model).cpu(), run.steps

    first, second = train(True), train(False)
    assert not first[0] and second[0] and first[2] == second[2] == 32
    assert torch.equal(first[1], second[1])


def seconds(step: Callable[[], None], count: int = 20) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


@pytest.mark.slow
def test_a_step_of_one_worker_costs_what_the_plain_one_does(tmp_path: Path) -> None:
    def maker(width: int = 2048) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(8))
        ).cuda()
        return (
            model,
            torch.optim.SGD(model.parameters(), lr=1e-4),
            torch.randn(4096, width, device="cuda"),
        )

    def stepping(model: nn.Module, opt: torch.optim.Optimizer, x: Tensor) -> Callable[[], None]:
        def step() -> None:
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        return step

    with pl.start(folder=str(tmp_path)) as run:
        bare = stepping(*maker())
        model, opt, x = maker()
        model, opt = run.prepare(model, opt)
        ours = stepping(model, opt, x)
        for step in (bare, ours):
            seconds(step)
        ratios = [seconds(ours) / seconds(bare) for _ in range(9)]
    assert statistics.median(ratios) < SLOWER, ratios


SHARING = """
def weights(model):
    return [float(p.detach().double().sum()) for p in model.parameters()] + [float(p.detach().double().norm()) for p in model.parameters()]

with pl.start(name=sys.argv[1]) as run:
    assert run.device.type == "cuda"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)).double()
    data = TensorDataset(torch.randn(203, 4).double(), torch.randn(203, 1).double())
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1), pin_memory=True)
    shares = [1, 3] if run.size == 2 else None
    model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), loader, shares=shares)
    for epoch in run.epochs(2):
        for x, y in loader:
            step(run, model, optimizer, x, y)
    everyone = run.group.gather_objects(weights(model))
    rows = sum(len(run.gather(x)) for x, _ in loader)
    run.save()
    if run.is_first:
        import json
        json.dump([everyone, rows], open(sys.argv[1] + ".json", "w"))
"""  # noqa: E501


@pytest.mark.real_processes
def test_two_workers_that_share_a_gpu_have_the_weights_of_one(job: Jobs, tmp_path: Path) -> None:
    for count in (1, 2):
        ended = job.run(SHARING, count, args=(f"w{count}",)).end()
        assert ended.code == 0, ended.err
        assert ("several workers share a GPU" in ended.err) == (
            count == 2 and torch.cuda.device_count() == 1
        )
    one, two = (json.loads((tmp_path / f"w{count}.json").read_text()) for count in (1, 2))
    assert (
        two[0][0] == two[0][1]
        and two[0][0] == pytest.approx(one[0][0], rel=1e-9)
        and one[1] == two[1] == 203
    )


@pytest.mark.real_processes
@pytest.mark.parametrize("group", beside_processors.GROUPS)
def test_every_way_to_train_ends_where_it_does_on_processors(
    group: str, job: Jobs, tmp_path: Path
) -> None:
    ended = job.program(
        Path(beside_processors.__file__),
        4 if group == "four" else 2,
        args=(group, str(tmp_path / "out.json")),
    ).end()
    assert ended.code == 0 and "current CUDA context" not in ended.err, ended.err
    for way, found in json.loads((tmp_path / "out.json").read_text()).items():
        assert found["weights"] < found["near"] and found["losses"] < 10 * found["near"], (
            way,
            found,
        )
        assert found.get("resumed", 0.0) < 1e-9, (way, found)


def test_rows_of_sparse_tables_come_to_the_gpu(tmp_path: Path) -> None:
    """And their gradients go back; beside the plain loop with an EmbeddingBag."""
    ids = torch.randint(50, (64, 3), generator=torch.Generator().manual_seed(3))

    with pl.start(folder=str(tmp_path), name="gpu") as run:
        table = pl.SparseEmbedding(50, 4, seed=1)
        optimizer = torch.optim.Adagrad(table.parameters(), 0.1)
        table, optimizer, loader = run.prepare(table, optimizer, DataLoader(ids, 16))
        bag = nn.EmbeddingBag(50, 4, _weight=table.lookup(torch.arange(50)).clone(), mode="mean")
        other = torch.optim.Adagrad(bag.parameters(), 0.1)
        for x in loader:
            for module, stepped in ((table, optimizer), (bag, other)):
                y = module(x)
                assert y.is_cuda
                y.square().mean().backward()
                stepped.step()
                stepped.zero_grad()
        assert (
            distance(
                table.lookup(torch.arange(50)).cpu().flatten(), bag.weight.detach().cpu().flatten()
            )
            < 1e-5
        )
