"""Accelerate on paceline: what it computes, saves and refuses."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import accelerate
import pytest
import torch
import torch.distributed as dist
from accelerate import DataLoaderConfiguration
from accelerate.utils import (
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    set_seed,
)
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from paceline.bridges.accelerate import PacelineAccelerator, refusals
from paceline.errors import CheckpointError, UsageError
from tests.harness.torchrun_workers import run_workers

GLOBAL_BATCH = 6
SIZES = pytest.mark.parametrize("size", [1, 2, 3])


class Trained(NamedTuple):
    """What a training came to: mean losses of global batches, parameters, learning rate."""

    losses: list[float]
    parameters: list[float]
    rate: float


def make_data(count: int = 23) -> TensorDataset:
    drawn = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(count, 4, generator=drawn), torch.randn(count, 1, generator=drawn)
    )


def make_model(*, norm: bool = False) -> nn.Module:
    middle: list[nn.Module] = [nn.BatchNorm1d(8)] if norm else []
    return nn.Sequential(nn.Linear(4, 8, bias=not norm), *middle, nn.Tanh(), nn.Linear(8, 1))


def make_parts(
    batch: int, count: int = 23, *, norm: bool = False
) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader[Any], Any]:
    torch.manual_seed(3)
    model = make_model(norm=norm)
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    order = torch.Generator().manual_seed(1)
    loader = DataLoader(make_data(count), batch, shuffle=True, generator=order)
    return model, optimizer, loader, torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)


def list_values(model: nn.Module) -> list[float]:
    return [float(value) for part in model.parameters() for value in part.detach().flatten()]


def train_alone(
    *, accumulate: int = 1, count: int = 23, rates: int = 1, norm: bool = False, epochs: int = 2
) -> Trained:
    """The same training by torch alone; the scheduler takes `rates` steps for one."""
    model, optimizer, loader, scheduler = make_parts(GLOBAL_BATCH, count, norm=norm)
    losses = []
    for _ in range(epochs):
        for number, (x, y) in enumerate(loader, 1):
            loss = nn.functional.mse_loss(model(x), y)
            (loss / accumulate).backward()
            losses.append(loss.item())
            if number % accumulate == 0 or number == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                for _ in range(rates):
                    scheduler.step()
                optimizer.zero_grad()
    return Trained(losses, list_values(model), optimizer.param_groups[0]["lr"])


def train(
    size: int,
    *,
    accumulate: int = 1,
    count: int = 23,
    norm: bool = False,
    epochs: int = 2,
    **options: Any,
) -> Trained:
    accelerator = PacelineAccelerator(
        cpu=True, gradient_accumulation_steps=accumulate, trace="off", **options
    )
    batch = GLOBAL_BATCH if accelerator.split_batches else GLOBAL_BATCH // size
    parts = make_parts(batch, count, norm=norm)
    if accelerator.process_index:
        with torch.no_grad():  # the first process's values hold
            for parameter in parts[0].parameters():
                parameter.add_(1.0)
    model, optimizer, loader, scheduler = accelerator.prepare(*parts)
    losses = []
    for _ in range(epochs):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return Trained(losses, list_values(model), optimizer.param_groups[0]["lr"])


def check_alike(found: list[Trained], wanted: Trained) -> None:
    for each in found:
        assert each.losses == pytest.approx(wanted.losses, rel=1e-4, abs=1e-5)
        assert each.parameters == pytest.approx(wanted.parameters, rel=1e-3, abs=1e-4)
        assert each.rate == wanted.rate


@SIZES
@pytest.mark.parametrize(("accumulate", "count"), [(1, 23), (2, 23), (3, 25)])
def test_training_equals_one_process_with_the_global_batch(
    size: int, accumulate: int, count: int, tmp_path: Path
) -> None:
    """The last batch is uneven; with 25 samples only one process has a sample of it."""
    body = functools.partial(train, size, accumulate=accumulate, count=count)
    wanted = train_alone(accumulate=accumulate, count=count, rates=size)
    check_alike(run_workers(size, body, tmp_path), wanted)


def test_batches_that_are_split_step_the_scheduler_once(tmp_path: Path) -> None:
    options = {"dataloader_config": DataLoaderConfiguration(split_batches=True)}
    found = run_workers(2, functools.partial(train, 2, **options), tmp_path)
    check_alike(found, train_alone(rates=1))
    assert train_alone(rates=1).rate != train_alone(rates=2).rate


def test_batch_norm_sees_the_global_batch(tmp_path: Path) -> None:
    found = run_workers(2, functools.partial(train, 2, norm=True, accumulate=2), tmp_path)
    check_alike(found, train_alone(norm=True, accumulate=2, rates=2))


@pytest.mark.parametrize(
    ("sync", "equal"),
    [("AllReduce(codec=int8())", False), ("LocalSGD(every=2)", False), ("AllReduce()", True)],
)
def test_strategies_come_as_text(sync: str, equal: bool, tmp_path: Path) -> None:
    found = run_workers(2, functools.partial(train, 2, sync=sync), tmp_path)
    wanted = train_alone(rates=2)
    near = pytest.approx(wanted.losses, rel=1e-4, abs=1e-5)
    assert (found[0].losses == near) is equal
    assert found[0].losses == pytest.approx(wanted.losses, rel=0.5)


def test_shares_may_be_unequal(tmp_path: Path) -> None:
    found = run_workers(2, functools.partial(train, 2, shares=[2, 1]), tmp_path)
    check_alike(found, train_alone(rates=2))


def test_half_precision_computes_in_bfloat16(tmp_path: Path) -> None:
    found = run_workers(2, functools.partial(train, 2, mixed_precision="bf16"), tmp_path)
    wanted = train_alone(rates=2)
    assert found[0].losses != pytest.approx(wanted.losses, rel=1e-5)
    assert found[0].losses == pytest.approx(wanted.losses, rel=0.1)
    assert found[0].parameters == found[1].parameters


def weigh_samples(batch: Any) -> Tensor:
    """Weight of each sample, which differs between workers."""
    return batch[1][:, 0].abs() + 0.1


def train_weighted(batch: int) -> list[float]:
    accelerator = PacelineAccelerator(
        trace="off", name="mine", weigh=lambda batch: float(weigh_samples(batch).sum())
    )
    assert accelerator.run.folder.path.name == "mine"
    model, _, loader, _ = accelerator.prepare(*make_parts(batch))
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), 0.1))
    for x, y in loader:
        weights = weigh_samples((x, y))
        errors = (model(x) - y)[:, 0].square()
        accelerator.backward((errors * weights).sum() / weights.sum())
        accelerator.clip_grad_value_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    return list_values(model)


def test_options_of_a_run_are_honoured(tmp_path: Path) -> None:
    """A loss that is a mean over weights is exact, and so are gradients clipped by value."""
    model, _, loader, _ = make_parts(GLOBAL_BATCH)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for x, y in loader:
        weights = weigh_samples((x, y))
        errors = (model(x) - y)[:, 0].square()
        ((errors * weights).sum() / weights.sum()).backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.2)
        optimizer.step()
        optimizer.zero_grad()
    for found in run_workers(2, functools.partial(train_weighted, 3), tmp_path):
        assert found == pytest.approx(list_values(model), rel=1e-4, abs=1e-5)


def use_collectives() -> dict[str, Any]:
    set_seed(0)
    accelerator = PacelineAccelerator(trace="off")
    rank = accelerator.process_index
    loader = accelerator.prepare(DataLoader(make_data(7), 2))
    model = accelerator.prepare(make_model())
    model.eval()
    rows, names, means, last = [], [], [], []
    for x, _ in loader:
        assert len(x) > 0, "a process without samples gets one"
        rows.append(accelerator.gather_for_metrics(x))
        names += accelerator.gather_for_metrics([f"{value:.3f}" for value in x[:, 0].tolist()])
        means.append(accelerator.reduce(x.mean(), "mean"))
        last.append(accelerator.gradient_state.end_of_dataloader)
    seen = torch.cat(rows)
    data = make_data(7).tensors[0]
    if rank == 0:
        accelerator.set_trigger()
    with accelerator.split_between_processes(list(range(7))) as part:
        parts = accelerator.gather_for_metrics(list(part))
    own = torch.full((rank + 1, 2), float(rank))
    return {
        "backend": dist.get_backend() if dist.is_initialized() else None,
        "rows": torch.equal(seen, data),
        "names": names == [f"{value:.3f}" for value in data[:, 0].tolist()],
        "means": [float(mean) for mean in means],
        "last": last,
        "triggers": [accelerator.check_trigger(), accelerator.check_trigger()],
        "parts": parts,
        "gathered": accelerator.gather(own).shape[0],
        "padded": tuple(accelerator.pad_across_processes(own).shape),
        "sum": accelerator.reduce({"a": torch.tensor(rank + 1)})["a"].item(),
        "max": accelerator.reduce(torch.tensor(rank + 1), "max").item(),
        "steps": accelerator.run.steps,
    }


@SIZES
def test_values_of_all_processes_have_each_sample_once(size: int, tmp_path: Path) -> None:
    data, batch = make_data(7).tensors[0], 2 * size
    wanted = [float(data[at : at + batch].mean()) for at in range(0, 7, batch)]
    for found in run_workers(size, use_collectives, tmp_path):
        assert found["backend"] == (None if size == 1 else "paceline")
        assert found["rows"] and found["names"]
        assert found["means"] == pytest.approx(wanted)
        assert found["last"] == [False] * (len(wanted) - 1) + [True]
        assert found["triggers"] == [True, False]
        assert found["parts"] == list(range(7))
        assert found["gathered"] == size * (size + 1) // 2
        assert found["padded"] == (size, 2)
        assert (found["sum"], found["max"]) == (size * (size + 1) // 2, size)
        assert found["steps"] == 0, "an evaluation takes no step"


class Counter:
    """An object of a script that is saved with the rest."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def train_and_stop(size: int, folder: Path, first: int, last: int, *, skips: bool) -> Any:
    """Train on global batches `first` to `last` of an epoch of 24 samples, then to its end.

    The global batch is 2 samples for each process.
    """
    accelerator = PacelineAccelerator(cpu=True, trace="off")
    model, optimizer, loader, scheduler = accelerator.prepare(*make_parts(2, 24))
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    if first:
        accelerator.load_state(str(folder))
    batches = accelerator.skip_first_batches(loader, first) if skips else loader
    seen: list[float] = []
    for number, (x, y) in enumerate(batches, first + 1):
        accelerator.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen += accelerator.gather_for_metrics(x)[:, 0].tolist()
        counter.count += 1
        if number == last:
            accelerator.save_state(str(folder))
            break
    return seen, counter.count, optimizer.param_groups[0]["lr"], list_values(model)


@pytest.mark.parametrize("skips", [True, False])
def test_a_checkpoint_goes_on_with_any_number_of_processes(skips: bool, tmp_path: Path) -> None:
    """2 processes have 4 samples of each batch, 3 have 6, and one has 2."""
    folder, order = tmp_path / "state", []
    # 3 batches of 4, then 1 of 6, then the rest by 2
    for size, first, last in ((2, 0, 3), (3, 2, 3), (1, 9, 100)):
        body = functools.partial(
            train_and_stop, size, folder, first, last, skips=skips and size != 3
        )
        found = run_workers(size, body, tmp_path)
        assert all(each == found[0] for each in found)
        seen, count, rate, _ = found[0]
        order += seen
    assert sorted(order) == pytest.approx(sorted(make_data(24).tensors[0][:, 0].tolist()))
    assert count == 3 + 1 + 3
    # the scheduler has stepped 2 * 3 + 3 * 1 + 1 * 3 times
    assert rate == pytest.approx(0.05 * 0.5**3)
    assert set(load_file(folder / "model.safetensors")) == set(make_model().state_dict())


def train_epochs(size: int, folder: Path, first: int, last: int, *, skips: bool) -> Any:
    """Train in epochs `first` to `last`, and save in the last batch of the last one."""
    accelerator = PacelineAccelerator(cpu=True, trace="off")
    model, optimizer, loader, _ = accelerator.prepare(*make_parts(GLOBAL_BATCH // size, 23))
    if first:
        accelerator.load_state(str(folder))
    losses = []
    for epoch in range(first - skips, last + 1):
        # a script that has saved the number of its batch leaves all of them out
        done = skips and epoch == first - 1
        batches = accelerator.skip_first_batches(loader, len(loader)) if done else loader
        for x, y in batches:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
            if epoch == last and accelerator.gradient_state.end_of_dataloader:
                accelerator.save_state(str(folder))
    return losses


@pytest.mark.parametrize("skips", [True, False])
def test_a_checkpoint_of_the_last_batch_goes_on_with_the_next_epoch(
    skips: bool, tmp_path: Path
) -> None:
    run = functools.partial(train_epochs, folder=tmp_path / "state")
    (wanted,) = run_workers(1, functools.partial(run, 1, first=0, last=1, skips=False), tmp_path)
    before = run_workers(2, functools.partial(run, 2, first=0, last=0, skips=False), tmp_path)
    after = run_workers(3, functools.partial(run, 3, first=1, last=1, skips=skips), tmp_path)
    assert before[0] + after[0] == pytest.approx(wanted, rel=1e-3)


def train_in_evaluation_mode() -> str:
    accelerator = PacelineAccelerator(cpu=True, trace="off")
    model, _, loader, _ = accelerator.prepare(*make_parts(2))
    model.eval()
    x, y = next(iter(loader))
    for x, y in loader:
        with pytest.raises(UsageError) as refused:
            accelerator.backward(nn.functional.mse_loss(model(x), y))
        break
    return str(refused.value)


def test_a_loop_that_begins_as_an_evaluation_trains_nothing(tmp_path: Path) -> None:
    (said,) = run_workers(1, train_in_evaluation_mode, tmp_path)
    assert "call model.train() before the loop" in said


def name_checkpoints(folder: Path) -> list[str]:
    config = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=2)
    accelerator = PacelineAccelerator(cpu=True, trace="off", project_config=config)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    accelerator.prepare(*make_parts(2)[:2])
    for _ in range(3):
        counter.count += 1
        accelerator.save_state()
    counter.count = 0
    accelerator.load_state()
    assert counter.count == 3
    with pytest.raises(CheckpointError, match="has no checkpoint of paceline"):
        accelerator.load_state(str(folder))
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_checkpoints_are_named_and_limited(tmp_path: Path) -> None:
    found = run_workers(2, functools.partial(name_checkpoints, tmp_path), tmp_path)
    assert found == [["checkpoint_1", "checkpoint_2"]] * 2


class Numbers(IterableDataset[Tensor]):
    """A stream, the same on all processes."""

    def __iter__(self) -> Any:
        yield from torch.arange(10.0).unsqueeze(1)


def read_stream() -> tuple[list[float], str]:
    accelerator = PacelineAccelerator(cpu=True, trace="off")
    loader = accelerator.prepare(DataLoader(Numbers(), 2))
    with torch.no_grad():
        seen = [float(x) for batch in loader for x in accelerator.gather_for_metrics(batch)]
    with pytest.raises(UsageError) as refused:
        next(iter(accelerator.skip_first_batches(loader, 1)))
    return seen, str(refused.value)


def test_a_stream_is_dealt_once_to_all(tmp_path: Path) -> None:
    for seen, refusal in run_workers(2, read_stream, tmp_path):
        assert seen == list(map(float, range(10)))
        assert "skip_first_batches can't skip batches of a stream" in refusal


def refuse(kind: str) -> str:
    made: dict[str, Any] = {
        "fsdp": {"fsdp_plugin": accelerate.FullyShardedDataParallelPlugin()},
        "deepspeed": {"deepspeed_plugin": object()},
        "megatron": {"megatron_lm_plugin": object()},
        "fp8": {"mixed_precision": "fp8"},
        "ddp": {"kwargs_handlers": [DistributedDataParallelKwargs()]},
        "group": {"kwargs_handlers": [InitProcessGroupKwargs()]},
        "dispatch": {"dataloader_config": DataLoaderConfiguration(dispatch_batches=True)},
        "compile": {"dynamo_backend": "inductor"},
        "unknown": {"sync": "AllReduce(codec=nothing())"},
    }
    with pytest.raises((UsageError, TypeError)) as refused:
        accelerator = PacelineAccelerator(cpu=True, trace="off", **made.get(kind, {}))
        if kind == "sampler":
            data = make_data()
            sampler = DistributedSampler(data, num_replicas=2, rank=0)
            accelerator.prepare(DataLoader(data, 2, sampler=sampler))
        elif kind == "hook":
            accelerator.register_save_state_pre_hook(print)
        elif kind == "scale":
            accelerator.reduce(torch.ones(1), scale=2.0)
        elif kind == "wrapped":
            accelerator.prepare(nn.DataParallel(make_model()))
        elif kind == "run":
            PacelineAccelerator(run=accelerator.run, sync="AllReduce()")
    assert "\n" not in str(refused.value)
    return str(refused.value)


REFUSALS = {
    "fsdp": "without FSDP: leave it out, or use accelerate.Accelerator under `paceline run",
    "deepspeed": "without DeepSpeed",
    "megatron": "without Megatron-LM",
    "fp8": "mixed_precision='fp8' is not supported: use 'bf16'",
    "ddp": "there is no DDP here",
    "group": "the run makes the process group",
    "dispatch": "dispatch_batches=True reads all data in the first process",
    "compile": "dynamo_backend",
    "unknown": "nothing",
    "sampler": "DistributedSampler, which cuts the data by rank already",
    "hook": "use register_for_checkpointing",
    "scale": "scale=2, which is for TPUs",
    "wrapped": "DataParallel",
    "run": "sync belongs to the start of a run",
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_cannot_be_honoured_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    (said,) = run_workers(1, functools.partial(refuse, kind), tmp_path)
    assert REFUSALS[kind] in said


def test_environments_of_accelerate_launch_are_looked_at() -> None:
    with pytest.raises(UsageError, match="ACCELERATE_USE_FSDP is set"):
        refusals.check_options({}, {"ACCELERATE_USE_FSDP": "true"})
    with pytest.raises(UsageError, match="fp8"):
        refusals.check_options({}, {"ACCELERATE_MIXED_PRECISION": "fp8"})
    refusals.check_options({}, {"ACCELERATE_USE_FSDP": "false"})


def test_runs_that_may_change_are_refused() -> None:
    lasting = SimpleNamespace(survival=None, axes=SimpleNamespace(cut_axes=()))
    refusals.check_run(lasting)
    with pytest.raises(UsageError, match="no worker may be lost: leave out --min-workers"):
        refusals.check_run(SimpleNamespace(**{**vars(lasting), "survival": object()}))
    with pytest.raises(UsageError, match="leave out --mesh and --cut"):
        refusals.check_run(SimpleNamespace(survival=None, axes=SimpleNamespace(cut_axes=("t",))))
