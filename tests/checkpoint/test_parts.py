"""Checkpoints of cut models: saved in one layout, they go on in any other, as one process would."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.checkpoint.files import checkpoint, disk, export
from paceline.checkpoint.layout import StateLayout
from paceline.checkpoint.parts import CutParts
from paceline.checkpoint.saving import CheckpointSaver, SaveRequest
from paceline.checkpoint.state import WorkerState
from paceline.cluster.mesh import Mesh
from paceline.comm.agreement import Agreement
from paceline.comm.group_protocol import Group
from paceline.errors import CheckpointError
from paceline.parallel.placement import Placement, Placements, chunk_range
from paceline.record.history import RunHistory
from paceline.session.run import Run
from paceline.state.versioned import GeneratorStates, VersionedState, WorkerGenerator
from tests.harness.cuts import network
from tests.harness.runs import batches
from tests.harness.runs import workers as run_workers
from tests.harness.thread_groups import spawn

torch.set_num_threads(1)
PLAIN = "data=1"
LAYOUTS = [
    "data=1",
    "data=2",
    "tensor=2",
    "shard=3",
    "data=2, tensor=2",
    "data=2, shard=2",
    "shard=2, tensor=2",
]


def mesh(text: str) -> Mesh:
    axes = tuple((name, int(size)) for name, size in (part.split("=") for part in text.split(", ")))
    count = 1
    for _, size in axes:
        count *= size
    return Mesh(axes, tuple(range(count)))


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model in one process that has made some steps: tied weights, a buffer, and parameters
    that aren't cut.
    """
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(8, 4),
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.Linear(6, 4),
        nn.Linear(4, 8, bias=False),
    )
    model[4].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.tensor([step, 1, 5])).square().sum().backward()
        optimizer.step()
    return model, optimizer


ONCE = trained()


def logical() -> tuple[nn.Module, torch.optim.Optimizer]:
    return copy.deepcopy(ONCE)


def cut(model: nn.Module, optimizer: torch.optim.Optimizer, grid: Mesh, rank: int) -> Placements:
    """Leave a worker its part, as a cut would: layers by rows along tensor, all that remains by
    flat pieces along shard.
    """
    at, placements, states = (
        grid.coordinates(rank),
        Placements(),
        copy.deepcopy(optimizer.state_dict()),
    )
    for number, (name, parameter) in enumerate(model.named_parameters()):
        placement, size = Placement.whole(name, parameter.shape), grid.axis_size("tensor")
        if size > 1 and parameter.shape[0] % size == 0 and not name.startswith("2."):
            placement = placement.cut_dim(
                0, [chunk_range(parameter.shape[0], at["tensor"], size)], "tensor"
            )
        if grid.axis_size("shard") > 1:
            placement = placement.cut_flat(
                *chunk_range(placement.numel, at["shard"], grid.axis_size("shard")), "shard"
            )
        if placement.axes:
            for key, value in states["state"].get(number, {}).items():
                states["state"][number][key] = (
                    placement.copy_part(value) if value.shape == parameter.shape else value
                )
            parameter.data = placement.copy_part(parameter.data)
            placements.add_placement(parameter, placement)
    optimizer.load_state_dict(states)
    return placements


class Quiet:
    """Stands for a strategy that has state of its own."""

    replicas_diverge = False

    def __init__(self, residual: float = 0.0) -> None:
        self.residual, self.came = residual, list[Any]()

    def state_dict(self) -> dict[str, Any]:
        return {"residual": self.residual}

    def load_state_dicts(self, states: list[Any]) -> None:
        self.came = [state["residual"] for state in states]


class Worker:
    """One worker of a run with a cut model, without the rest of the session."""

    def __init__(
        self,
        group: Group,
        layout: str,
        *,
        fresh: bool = False,
        change: Callable[[nn.Module], nn.Module] = lambda m: m,
    ) -> None:
        self.model, self.optimizer = logical()
        self.model = change(self.model)
        grid, rank = mesh(layout), group.rank
        if fresh:  # as at the start of a program
            for tensor in self.model.state_dict().values():
                tensor.zero_()
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.5)
        placements = cut(self.model, self.optimizer, grid, rank)
        self.said, self.history, self.sync = (
            list[str](),
            RunHistory(0, 0.0, print),
            Quiet(float(rank)),
        )
        agreement = Agreement(group)
        context: Any = SimpleNamespace(agreement=agreement, group=group, announce=self.said.append)
        state_layout = StateLayout(grid, rank, placements)
        self.state = VersionedState(model=self.model, optimizer=self.optimizer)
        abilities: Any = SimpleNamespace(converge=lambda: None)
        sync: Any = self.sync
        mine: Any = (
            GeneratorStates(),
            sync,
            abilities,
            [self.optimizer],
            state_layout,
            self.said.append,
        )
        own = WorkerState(*mine, generator=WorkerGenerator(0, rank, torch.device("cpu")))
        self.saving = CheckpointSaver(
            self.state,
            own,
            context,
            self.history,
            SimpleNamespace(measure_loss=lambda kind: contextlib.nullcontext()),  # type: ignore[arg-type]
            parts=CutParts(agreement, state_layout, 30.0),
            tables=SimpleNamespace(tables=[], is_waiting=False, discard_prefetched=lambda: None),  # type: ignore[arg-type]
            deadline=30.0,
            pinned=False,
        )

    def tensors(self) -> dict[str, Tensor]:
        found = {
            f"model.{name}": tensor.clone() for name, tensor in self.model.state_dict().items()
        }
        for number, kept in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{key}": value.clone() for key, value in kept.items()}
        return found


def workers(layout: str, body: Callable[[Worker], Any], **options: Any) -> list[Any]:
    return spawn(mesh(layout).size, lambda group: body(Worker(group, layout, **options)))


def save(folder: Path, layout: str, *, background: bool = False, step: int = 3) -> None:
    def body(worker: Worker) -> Path:
        path = worker.saving.save(SaveRequest(folder, step, 3, background))
        if background:  # training goes on
            with torch.no_grad():
                for tensor in worker.model.state_dict().values():
                    tensor.fill_(-1)
        worker.saving.wait_for_write()
        assert (
            worker.saving.raise_write_error() == b""
            and worker.history.events == []
            and len(worker.history.saves) == 1
        )
        return path

    assert set(workers(layout, body)) == {folder / f"step-{step:08d}"}


def resume(folder: Path, layout: str) -> None:
    """All workers have what `cut` gives to them of the model that was trained in one process."""

    def body(worker: Worker) -> None:
        assert worker.saving.resume_newest([folder]) is not None
        model, optimizer = logical()
        cut(
            model,
            optimizer,
            worker.saving._cut_parts.layout.mesh,
            worker.saving._agreement.group.rank,
        )
        worker_like = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        for number, kept in optimizer.state_dict()["state"].items():
            worker_like |= {f"optimizer.{number}.{key}": value for key, value in kept.items()}
        mine = worker.tensors()
        assert list(mine) == list(worker_like)
        for name, tensor in worker_like.items():
            assert torch.equal(mine[name], tensor), name
        assert worker.optimizer.param_groups[0]["lr"] == 0.1

    workers(layout, body, fresh=True)


@pytest.mark.parametrize("every", [2, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("before", LAYOUTS)
def test_saved_in_one_layout_and_resumed_in_others(tmp_path: Path, before: str, every: int) -> None:
    """A layout with an even number is resumed in those with an odd one, and the other way round;
    in a soak each is in all.
    """
    save(tmp_path, before)
    for after in LAYOUTS[(LAYOUTS.index(before) + 1) % every :: every]:
        resume(tmp_path, after)


@pytest.mark.parametrize("layout", ["tensor=2", "data=2, shard=2"])
def test_in_the_background(tmp_path: Path, layout: str) -> None:
    save(tmp_path, layout, background=True)
    resume(tmp_path, "shard=2")
    resume(tmp_path, PLAIN)


def test_each_block_is_written_once_and_by_several(tmp_path: Path) -> None:
    save(tmp_path, "data=2, tensor=2")
    found = checkpoint.load_checkpoint(tmp_path, say=print, lazy=True)
    files = {block.file for tensor in found.index.values() for block in tensor.blocks}
    assert files == {
        "tensors.safetensors",
        "blocks-00000.safetensors",
        "blocks-00001.safetensors",
    }, "workers 2 and 3 hold the same"
    sizes = {path.name: path.stat().st_size for path in found.path.iterdir()}
    whole = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in found.index.values())
    assert sum(size for name, size in sizes.items() if name in files) < whole + 3 * 4096


def test_a_plain_model_comes_out(tmp_path: Path) -> None:
    save(tmp_path, "shard=2, tensor=2")
    model, _ = logical()
    found = export.state_dict(tmp_path)
    assert list(found) == list(model.state_dict())
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())


def test_what_workers_have_for_themselves(tmp_path: Path) -> None:
    """In the same layout each gets that of the workers that hold the same; in another one it is
    said that it is gone.
    """
    save(tmp_path, "data=2, tensor=2")

    def body(worker: Worker) -> tuple[list[float], list[str]]:
        worker.saving.resume_newest([tmp_path])
        return worker.sync.came, worker.said

    same = workers("data=2, tensor=2", body)
    assert [came for came, _ in same] == [[0, 2], [1, 3], [0, 2], [1, 3]] and all(
        said == [] for _, said in same
    )
    for layout in ("tensor=2", "data=4", "data=2, shard=2"):
        other = workers(layout, body)
        assert all(came == [] for came, _ in other)
        assert all(any("cut in another way" in text for text in said) for _, said in other)


def failing(number: int) -> Callable[..., Any]:
    write = disk.write_file

    def act(path: Path, *args: Any, **options: Any) -> Any:
        if path.name == f"blocks-{number:05d}.safetensors":
            raise OSError(28, "No space left on device")
        return write(path, *args, **options)

    return act


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("background", [False, True])
def test_a_worker_that_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, background: bool
) -> None:
    save(tmp_path, "tensor=2", step=1)
    monkeypatch.setattr(disk, "write_file", failing(number))
    order = SaveRequest(tmp_path, 2, 3, background)

    def body(worker: Worker) -> None:
        with pytest.raises(
            (CheckpointError, Exception),
            match=rf"worker {number} can't write its part: .*No space left",
        ):
            worker.saving.save(order)
            worker.saving.save(order)  # what failed in the background is raised now

    workers("tensor=2", body)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001"]
    monkeypatch.undo()
    save(tmp_path, "tensor=2", step=3)
    resume(tmp_path, "shard=2")


def test_a_folder_that_a_worker_does_not_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Path.is_dir
    blind = threading.local()
    monkeypatch.setattr(Path, "is_dir", lambda path: not getattr(blind, "on", False) and here(path))

    def body(worker: Worker) -> None:
        blind.on = worker.saving._agreement.group.rank == 1
        with pytest.raises(
            CheckpointError,
            match=r"worker 1 doesn't see .*put runs on a file system that all hosts share",
        ):
            worker.saving.save(SaveRequest(tmp_path, 1, 3, False))

    workers("tensor=2", body)
    assert list(tmp_path.iterdir()) == []


def renamed(model: nn.Module) -> nn.Module:
    model.add_module("extra", nn.Linear(1, 1))
    model.add_module("3", nn.Linear(6, 2))
    return model


@pytest.mark.parametrize("layout", ["tensor=2", PLAIN])
def test_another_model_is_refused_before_anything_changes(tmp_path: Path, layout: str) -> None:
    save(tmp_path, "shard=3")

    def body(worker: Worker) -> None:
        before = worker.tensors()
        with pytest.raises(
            CheckpointError, match=r"model.3.weight is .*\[4, 6\] in it, .*\[2, 6\] here"
        ) as raised:
            worker.saving.resume_newest([tmp_path])
        assert "model.extra.weight" in str(raised.value) and "\n" not in str(raised.value)
        assert all(torch.equal(tensor, before[name]) for name, tensor in worker.tensors().items())

    workers(layout, body, fresh=True, change=renamed)


def test_an_optimizer_whose_state_is_not_of_its_parameters_shape(tmp_path: Path) -> None:
    def body(worker: Worker) -> None:
        parameter = worker.model[1].weight  # type: ignore[index]
        worker.optimizer.state[parameter]["rows"] = torch.ones(5)
        with pytest.raises(
            CheckpointError,
            match=(
                r"rows that optimizer keeps for 1.weight has the shape \[5\], and the parameter "
                r"has \[3, 4\]"
            ),
        ):
            worker.saving.save(SaveRequest(tmp_path, 1, 3, False))

    workers("tensor=2", body)
    assert list(tmp_path.iterdir()) == []


# Whole runs
# --------------------------------------------------------------------------------------------------


COLUMNS = pl.tensor({"0": pl.column(), "2": pl.row()})
RUNS: dict[str, tuple[int, str | None, list[Any]]] = {
    "one": (1, None, []),
    "replicas": (3, None, []),
    "tensor": (2, "tensor=2", [COLUMNS]),
    "zero 1": (2, "shard=2", [pl.shard(zero=1)]),
    "zero 2": (4, "data=2, shard=2", [pl.shard(zero=2)]),
    "zero 3 of replicas": (4, "data=2, shard=2", [pl.shard(zero=3)]),
    "zero 3": (3, "shard=3", [pl.shard("2", zero=3)]),
    "both": (4, "shard=2, tensor=2", [COLUMNS, pl.shard("0", zero=3)]),
    "both, zero 1": (4, "shard=2, tensor=2", [COLUMNS, pl.shard(zero=1)]),
}


def train(
    folder: Path,
    layout: str,
    *,
    until: int | None = None,
    background: bool = False,
    strategy: Any = None,
) -> list[str]:
    """Train two epochs of six steps, and save at the end, or after a number of steps in all."""
    size, axes, cuts = RUNS[layout]
    said: list[str] = []

    def body(run: Run) -> None:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        model, optimizer, schedule, loader = run.prepare(
            model, optimizer, schedule, batches(43, 8), cut=cuts
        )
        run.resume()
        for _ in run.epochs(2):
            for x, y in loader:
                optimizer.zero_grad()
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                schedule.step()
                if run.steps + 1 == until:
                    run.save(background=background)
                    return
        run.save()

    run_workers(size, body, mesh=axes, folder=folder, said=said, strategy=strategy)
    return said


def last(folder: Path) -> dict[str, Tensor]:
    """The model of the newest checkpoint of the newest run."""
    runs = sorted(folder.glob("test*"), key=lambda path: path.stat().st_mtime_ns)
    return export.state_dict(runs[-1])


PAIRS = [
    ("both", "zero 3"),
    ("zero 3", "replicas"),
    ("zero 1", "tensor"),
    ("zero 2", "both"),
    ("tensor", "one"),
    ("replicas", "zero 2"),
    ("one", "both, zero 1"),
    ("both, zero 1", "zero 1"),
]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    folder = tmp_path_factory.mktemp("one")
    train(folder, "one")
    return last(folder)


@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_a_run_goes_on_in_another_layout(
    tmp_path: Path, before: str, after: str, uninterrupted: dict[str, Tensor]
) -> None:
    train(tmp_path, before, until=4, background=before in ("both", "zero 1"))
    said = train(tmp_path, after)
    assert any("resumed from" in text and "step 4" in text for text in said), said
    found = last(tmp_path)
    for name, tensor in uninterrupted.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-12), name


def test_replicas_of_pieces_that_differ_are_saved_as_the_pieces_are(tmp_path: Path) -> None:
    """With LocalSGD whole parameters follow their pieces at the next forward, and a checkpoint
    comes before that.
    """
    for layout in ("zero 2", "zero 3 of replicas"):
        train(tmp_path / layout, layout, until=4, strategy=pl.LocalSGD(2))
    pieces, wholes = last(tmp_path / "zero 3 of replicas"), last(tmp_path / "zero 2")
    assert all(
        torch.allclose(wholes[name], tensor, rtol=0, atol=1e-12) for name, tensor in pieces.items()
    )
