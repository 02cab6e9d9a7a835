"""Models begin with the same values in every layout, whether their modules or a file give them,
and nobody makes more than its part.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.checkpoint.files import export
from paceline.errors import UsageError
from paceline.prepare import initial
from paceline.session.run import Run
from tests.harness.runs import batches, workers

TENSOR = pl.tensor({"0": pl.column(), "2": pl.row()})
LAYOUTS: dict[str, tuple[int, str | None, list[Any]]] = {
    "one": (1, None, []),
    "replicas": (2, None, []),
    "tensor": (2, "tensor=2", [TENSOR]),
    "zero 1": (2, "shard=2", [pl.shard(zero=1)]),
    "zero 3": (3, "shard=3", [pl.shard("2", zero=3)]),
    "both": (4, "shard=2, tensor=2", [TENSOR, pl.shard("0", zero=2)]),
}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2), nn.BatchNorm1d(2)).double()


def unborn() -> nn.Module:
    with pl.meta():
        model = network()
    return model


def trained(
    folder: Path, layout: str, make: Callable[[], nn.Module], init: Any = None, steps: int = 3
) -> dict[str, Tensor]:
    """The model after some steps, by an optimizer that was made before `prepare`."""
    size, axes, cuts = LAYOUTS[layout]

    def body(run: Run) -> None:
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, loader = run.prepare(
            model, optimizer, batches(43, 8), cut=cuts, init=init
        )
        assert not any(parameter.is_meta for parameter in model.parameters())
        for x, y in loader:
            if run.steps == steps:
                break
            optimizer.zero_grad()
            F.mse_loss(model(x), y).backward()
            optimizer.step()
        run.save()

    workers(size, body, mesh=axes, folder=folder)
    return export.state_dict(folder / "test")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, Tensor]]:
    known: dict[int, dict[str, Tensor]] = {}

    def of(steps: int) -> dict[str, Tensor]:
        if steps not in known:
            known[steps] = trained(tmp_path_factory.mktemp("one"), "one", unborn, steps=steps)
        return known[steps]

    return of


@pytest.mark.each_choice
@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "one"])
@pytest.mark.parametrize("steps", [0, 3])
def test_all_layouts_begin_and_go_on_alike(
    tmp_path: Path, layout: str, steps: int, alone: Callable[[int], dict[str, Tensor]]
) -> None:
    found = trained(tmp_path, layout, unborn, steps=steps)
    for name, tensor in alone(steps).items():
        assert (
            torch.equal(found[name], tensor)
            if steps == 0
            else torch.allclose(found[name], tensor, rtol=0, atol=1e-12)
        ), name
    assert not torch.equal(alone(0)["0.weight"], alone(3)["0.weight"])


def weights() -> dict[str, Tensor]:
    numbers = torch.Generator().manual_seed(4)
    return {
        name: torch.rand(value.shape, generator=numbers).to(value.dtype)
        for name, value in network().state_dict().items()
    }


@pytest.mark.parametrize("make", [unborn, network], ids=["without memory", "with values"])
@pytest.mark.parametrize("layout", ["replicas", "tensor", "zero 3", "both"])
def test_weights_of_a_file_come_into_any_layout(
    tmp_path: Path, layout: str, make: Callable[[], nn.Module]
) -> None:
    path = tmp_path / "weights.safetensors"
    safetensors.torch.save_file(weights(), path)
    found = trained(tmp_path, layout, make, str(path), steps=0)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights().items())


def small(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.uniform_(module.weight, 0.5, 0.6)


def test_a_function_of_a_module(tmp_path: Path) -> None:
    one = trained(tmp_path / "one", "one", unborn, small, steps=0)
    both = trained(tmp_path / "both", "both", unborn, small, steps=0)
    assert all(torch.equal(both[name], tensor) for name, tensor in one.items())
    assert 0.5 <= float(one["0.weight"].min()) <= float(one["0.weight"].max()) <= 0.6


def preparing(
    make: Callable[[], Any], init: Any = None, *, again: bool = False
) -> Callable[[Run], None]:
    def body(run: Run) -> None:
        made = make()
        models = made if isinstance(made, tuple) else (made,)
        run.prepare(
            *models, **({} if again else {"init": init(run.rank) if isinstance(init, Of) else init})
        )
        if again:
            run.prepare(*models, init=init)

    return body


class Of:
    """What each rank gives."""

    def __init__(self, give: Callable[[int], Any]) -> None:
        self.give = give

    def __call__(self, rank: int) -> Any:
        return self.give(rank)


REFUSED: list[tuple[Callable[[Run], None], str]] = [
    (
        preparing(network, small),
        (
            r"init=function gives values to models that were built under pl.meta\(\), and these "
            r"have values already"
        ),
    ),
    (
        preparing(lambda: (network(), network()), weights()),
        r"init= has weights of one model, and this call prepares 2 models",
    ),
    (
        preparing(network, weights(), again=True),
        r"init= is for models that are prepared for the first time",
    ),
    (
        preparing(network, "nowhere.safetensors"),
        r"there is no file nowhere.safetensors with weights",
    ),
    (
        preparing(network, Of(lambda rank: weights() if rank else "nowhere.pt")),
        r"there is no file nowhere.pt with weights",
    ),
    (
        preparing(network, Of(lambda rank: {k: v + rank for k, v in weights().items()})),
        r"ranks 0 and 1 were given different weights by init=",
    ),
    (
        preparing(network, {"0.weight": torch.ones(8, 6)}),
        r"the dict has weights of another model: 0.bias \[8\] is not in it",
    ),
]


@pytest.mark.parametrize(("body", "why"), REFUSED, ids=[why[:30] for _, why in REFUSED])
def test_what_cannot_be_given_is_said_on_all_workers(body: Callable[[Run], None], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        workers(2, body)


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_workers_with_different_files_of_the_same_shapes(tmp_path: Path, kind: str) -> None:
    paths = [tmp_path / f"{rank}.{kind}" for rank in range(2)]
    for rank, path in enumerate(paths):
        values = {name: value + rank for name, value in weights().items()}
        safetensors.torch.save_file(values, path) if kind == "safetensors" else torch.save(
            values, path
        )
    with pytest.raises(UsageError, match=r"ranks 0 and 1 were given different weights by init="):
        workers(2, preparing(network, Of(lambda rank: paths[rank])))


def test_a_file_that_one_worker_cannot_read_after_all_is_said_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, reasons = tmp_path / "weights.safetensors", dict[int, str]()
    safetensors.torch.save_file(weights(), path)
    opening = initial.open_weights

    @contextlib.contextmanager
    def breaking(source: Any, say: Any) -> Iterator[Any]:
        def read(name: str, box: Any) -> Tensor:
            raise OSError(5, "Input/output error")

        with opening(path, say) as found:
            yield found if source == str(path) else dataclasses.replace(found, read=read)

    monkeypatch.setattr(initial, "open_weights", breaking)

    def body(run: Run) -> None:
        with pytest.raises(UsageError) as raised:
            run.prepare(network(), init="of rank 1" if run.rank == 1 else str(path))
        reasons[run.rank] = str(raised.value)
        assert len(run.gather(torch.ones(1))) == 3

    workers(3, body)
    text = "0.weight can't be read from weights.safetensors: [Errno 5] Input/output error"
    assert reasons == {0: f"rank 1: {text}", 1: text, 2: f"rank 1: {text}"}


def test_workers_of_which_one_has_no_memory_have_different_models() -> None:
    with pytest.raises((UsageError, pl.Mismatch), match=r"without memory"):
        workers(2, lambda run: run.prepare(unborn() if run.rank else network()))
