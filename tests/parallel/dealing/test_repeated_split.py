"""Layers that move between workers while a pipeline trains leave the numbers of one process as they are."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import paceline as pl
from paceline.errors import UsageError
from paceline.parallel.dealing import repeated_split
from paceline.parallel.pipeline import pipeline
from paceline.parallel.pipelining.chain import LayerGraph
from paceline.parallel.pipelining.measuring import measure_layers
from paceline.parallel.pipelining.split import LayerCost
from paceline.session.run import Run
from tests.harness.models import fill
from tests.harness.pipelines import LAYERS, TENSOR, Sentences, gpt, next_tokens
from tests.harness.runs import Numbered, alone, workers
from tests.harness.sharded import put_together

EPOCHS = 3  # with two moves


@pytest.fixture
def heavy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers that are measured as heavy are the first ones, then the last ones, and so on: each epoch has another split."""
    calls, lock = dict[int, int](), threading.Lock()

    def measure(graph: LayerGraph, args: Any, kwargs: Any = None, *, loss: Any = None, around: Any = None) -> list[LayerCost]:
        measure_layers(graph, args, kwargs, loss=loss, repeats=0, around=around)  # it leaves everything as it was
        with lock:
            number = calls[threading.get_ident()] = calls.get(threading.get_ident(), -1) + 1
        count = len(graph.layers)
        return [LayerCost(name, 8.0 if (at < count // 2) == (number % 2 == 0) else 1.0, 1.0) for at, name in enumerate(graph.layers)]

    monkeypatch.setattr(repeated_split, "measure_layers", measure)


def trained(
    cut: Any,
    build: Callable[[], nn.Module] = gpt,
    *,
    data: Callable[[], Any] = Sentences,
    loss: Callable[[Any, Tensor], Tensor] = next_tokens,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
    clear: Callable[[int], bool] = lambda step: True,
    none: bool = True,
    hook: Callable[[Tensor], Tensor] | None = None,
) -> Callable[[Run], tuple[list[float], Tensor, list[Tensor], list[Any]]]:
    """What trains some epochs; gives losses, parameters, buffers, and bounds by epoch. `clear`: in which steps gradients are cleared."""

    def body(run: Run) -> tuple[list[float], Tensor, list[Tensor], list[Any]]:
        model = build()
        stepping = optimizer(model.parameters())
        scheduler = StepLR(stepping, step_size=3, gamma=0.5)
        model, stepping, scheduler, loader = run.prepare(model, stepping, scheduler, DataLoader(data(), batch_size=8), cut=cut)
        stages = run._prepared.cuts.pipeline_of(model)
        kept = list(model.parameters())
        for parameter in kept if hook is not None else ():
            if parameter.requires_grad:
                parameter.register_hook(hook)
        losses, bounds = [], []
        for _ in run.epochs(EPOCHS):
            for x, y in loader:
                if clear(run.steps):
                    stepping.zero_grad(set_to_none=none)
                value = run.step(model, x, y, loss=loss)
                run.clip(model, 1.0)
                stepping.step()
                scheduler.step()
                losses.append(run.mean(float(value)))
            bounds.append(None if stages is None else stages.split.bounds)
        assert all(one is other for one, other in zip(kept, model.parameters(), strict=True))
        if stages is not None:
            stages.share_buffers()
        cuts = run._prepared.cuts
        return losses, put_together(model, run.group, cuts.placements, cuts.trained), [b.clone() for b in model.buffers()], bounds

    return body


def same(mesh: str, size: int, cut: Any, *, bound: float = 1e-9, other: Any = None, **terms: Any) -> None:
    """Workers end where one process does, or those of an `other` cut, whose split stays."""
    losses, parameters, buffers, _ = (
        alone(trained(None, **terms)) if other is None else workers(size, trained(other, **terms), mesh=mesh)[0]
    )
    for mine, values, others, bounds in workers(size, trained(cut, **terms), mesh=mesh):
        assert len(set(bounds)) == 2 and all(one != two for one, two in itertools.pairwise(bounds)), bounds
        assert max(abs(one - two) for one, two in zip(mine, losses, strict=True)) < bound
        assert float((values - parameters).abs().max()) < bound
        assert all(float((one - two).abs().max()) < bound for one, two in zip(others, buffers, strict=True))


CUT = pipeline(LAYERS, micro_batches=4, split="auto", again=True)


@pytest.mark.usefixtures("heavy")
@pytest.mark.parametrize(
    ("mesh", "cut"),
    [
        ("stage=2", CUT),
        ("stage=4", pipeline(LAYERS, schedule="zero-bubble", micro_batches=4, split="auto", again=True)),
        ("stage=2", pipeline(LAYERS, schedule="interleaved", micro_batches=2, split="auto", again=True)),
        pytest.param("data=2, stage=2", CUT, marks=pytest.mark.soak),  # as gradients move along, in the next test
        ("tensor=2, stage=2", [CUT, TENSOR]),
    ],
)
def test_a_tied_model_ends_where_one_process_does(mesh: str, cut: Any) -> None:
    same(mesh, 4 if "2, " in mesh or "4" in mesh else 2, cut)


@pytest.mark.usefixtures("heavy")
@pytest.mark.parametrize(("mesh", "none"), [("stage=2", False), ("data=2, stage=2", True)])
def test_gradients_move_along_where_they_add_up_from_epoch_to_epoch(mesh: str, none: bool) -> None:
    def momentum(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, nesterov=True)

    same(mesh, 4 if "data" in mesh else 2, CUT, clear=lambda step: step % 3 == 2, none=none, optimizer=momentum)


@pytest.mark.usefixtures("heavy")
def test_hooks_of_parameters_and_frozen_layers_stay() -> None:
    def build() -> nn.Module:
        model = gpt(tied=False)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(("blocks.1", "norm")))
        return model

    same("stage=2", 2, CUT, build=build, hook=lambda grad: grad * 0.5)


def normed() -> nn.Module:
    parts = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4)]
    return fill(nn.Sequential(*parts, nn.Linear(6, 2)).double())


@pytest.mark.usefixtures("heavy")
def test_running_statistics_move_along() -> None:
    cuts = [pipeline("0, 1, 2, 3, 4", micro_batches=2, split="auto" if again else [3, 2], again=again) for again in (True, False)]
    same("stage=2", 2, cuts[0], other=cuts[1], build=normed, data=lambda: Numbered(24), loss=F.mse_loss)


def test_what_gains_little_stays_and_the_loss_of_the_steps_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    times, losses = itertools.cycle([1.0]), list[float]()

    def measure(graph: LayerGraph, args: Any, kwargs: Any = None, *, loss: Any = None, around: Any = None) -> list[LayerCost]:
        losses.append(-1.0 if loss is None else float(loss(torch.zeros(2, 5, 11)).detach()))
        return [LayerCost(name, next(times) + 0.02 * (at == 0), 1.0) for at, name in enumerate(graph.layers)]

    monkeypatch.setattr(repeated_split, "measure_layers", measure)
    said = list[str]()
    found = workers(2, trained(pipeline(LAYERS, micro_batches=4, split="auto", again=True)), mesh="stage=2", said=said)
    assert len({bounds for *_, each in found for bounds in each}) == 1
    assert losses[:2] == [-1.0] * 2 and losses[2:] == [pytest.approx(float(torch.tensor(11.0).log()))] * 2 * (EPOCHS - 1)
    assert not any("from here on" in text for text in said)


@pytest.mark.usefixtures("heavy")
def test_it_is_said_and_noted() -> None:
    said = list[str]()

    def body(run: Run) -> list[str]:
        trained(CUT)(run)
        return [event["what"] for event in run.events if "split" in event["what"]]

    first, second = workers(2, body, mesh="stage=2", said=said)
    assert len(first) == EPOCHS - 1 and first == second
    assert "steps are predicted to be 1." in first[0] and "have moved)" in first[0]
    assert any(text.startswith(first[0]) and "stage  worker  layers" in text for text in said)


@pytest.mark.usefixtures("heavy")
def test_a_checkpoint_of_after_a_move_is_that_of_the_model(tmp_path: Any) -> None:
    def body(run: Run, cut: Any, until: int) -> list[float]:
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(Sentences(16), batch_size=8), cut=cut)
        run.resume()
        losses = []
        for _ in run.epochs(4):
            for x, y in loader:
                optimizer.zero_grad()
                losses.append(run.mean(float(run.step(model, x, y, loss=next_tokens))))
                optimizer.step()
            if run.steps == until:
                run.save()
                break
        return losses

    wanted = alone(lambda run: body(run, None, 8))
    for again in (CUT, pipeline(LAYERS, micro_batches=2, split=[1, 7]), None):
        folder = tmp_path / str(again)[-9:].strip(")]")
        first = workers(2, lambda run: body(run, CUT, 4), mesh="stage=2", folder=folder)[0]
        rest = workers(1 if again is None else 2, lambda run, cut=again: body(run, cut, 8), mesh=again and "stage=2", folder=folder)[0]  # type: ignore[misc]
        assert first + rest == pytest.approx(wanted, rel=1e-9)


@pytest.mark.usefixtures("heavy")
def test_averages_that_are_kept_move_along() -> None:
    def body(run: Run, cut: Any) -> tuple[Tensor, list[Any]]:
        model = normed()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(Numbered(24), batch_size=8), cut=cut)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)  # type: ignore[no-untyped-call]
        run.keep("average", average)
        bounds = []
        for _ in run.epochs(EPOCHS):
            for x, y in loader:
                optimizer.zero_grad()
                run.step(model, x, y, loss=F.mse_loss)
                optimizer.step()
                average.update_parameters(model)
            bounds.append(str(run._prepared.cuts.splits()))
        run._prepared.cuts.level()
        copy = average.module
        values = put_together(copy, run.group, run._prepared.cuts.placements, lambda parameter: parameter)
        return torch.cat([values, *(b.double().reshape(-1) for b in copy.buffers())]), bounds

    cuts = [pipeline("0, 1, 2, 3, 4", micro_batches=2, split="auto" if again else [3, 2], again=again) for again in (True, False)]
    wanted = workers(2, lambda run: body(run, cuts[1]), mesh="stage=2")[0][0]
    for found, bounds in workers(2, lambda run: body(run, cuts[0]), mesh="stage=2"):
        assert len(set(bounds)) == 2
        assert float((found - wanted).abs().max()) < 1e-9


class Rows(torch.optim.SGD):
    """Keeps the norm of each row of its parameters."""

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            if parameter.dim() == 2:
                self.state[parameter]["rows"] = parameter.detach().norm(dim=1)
        return super().step(closure)


def keeping(parameters: Any) -> torch.optim.Optimizer:
    return Rows(parameters, lr=0.1)


@pytest.mark.usefixtures("heavy")
@pytest.mark.parametrize("mesh", ["stage=2", "data=2, stage=2"])
def test_what_an_optimizer_keeps_and_cant_move_keeps_the_split(mesh: str) -> None:
    losses, parameters, _, _ = alone(trained(None, optimizer=keeping))
    said, noted = list[str](), list[list[str]]()

    def body(run: Run) -> tuple[list[float], Tensor, list[Tensor], list[Any]]:
        found = trained(CUT, optimizer=keeping)(run)
        noted.append([event["what"] for event in run.events if "split" in event["what"]])
        return found

    found = workers(4 if "data" in mesh else 2, body, mesh=mesh, said=said)
    for mine, values, _, bounds in found:
        assert len(set(bounds)) == 1
        assert mine == pytest.approx(losses, abs=1e-9)
        assert float((values - parameters).abs().max()) < 1e-9
    line = "the split stays as it is, and isn't found again: the Rows keeps rows of "
    assert len(noted) == len(found) and all(len(each) == 1 and each[0].startswith(line) for each in noted)
    assert len({each[0] for each in noted}) == 1
    assert sum(text.startswith(line) for text in said) == 1


class Scaled(nn.Module):
    """A layer with a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 6), nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale


def scaled() -> nn.Module:
    return fill(nn.Sequential(*[Scaled() for _ in range(4)], nn.Linear(6, 2)).double())


@pytest.mark.usefixtures("heavy")
def test_parameters_that_are_one_number_move_along() -> None:
    cut = pipeline("0, 1, 2, 3, 4", micro_batches=2, split="auto", again=True)
    same("stage=2", 2, cut, build=scaled, data=lambda: Numbered(24), loss=F.mse_loss)


@pytest.mark.usefixtures("heavy")
@pytest.mark.parametrize(
    ("mesh", "strategy", "act", "words"),
    [
        (
            "data=2, stage=2",
            pl.AllReduce(codec=pl.error_feedback(pl.topk(0.05))),
            trained(CUT),
            r"what the codec keeps of their gradients, such as residuals, can't go along",
        ),
        ("data=2, stage=2", pl.LocalSGD(2), trained(CUT), r"this strategy keeps copies of them: use AllReduce"),
        ("shard=2, stage=2", None, trained([CUT, pl.shard("blocks.*")]), r"shard\(\) cuts them into pieces that can't move"),
    ],
)
def test_what_cant_move_is_refused_on_all(mesh: str, strategy: Any, act: Callable[[Run], Any], words: str) -> None:
    refusals = list[str]()

    def body(run: Run) -> None:
        try:
            act(run)
        except UsageError as error:
            refusals.append(str(error))
            raise

    size = 4 if "2, " in mesh else 2
    with pytest.raises(UsageError, match=words):
        workers(size, body, mesh=mesh, strategy=strategy)
    assert len(refusals) == size


def test_a_split_that_is_written_stays() -> None:
    for make in (lambda split: pipeline(LAYERS, split=split, again=True), lambda split: pl.layers(LAYERS, split=split, again=True)):
        for split in ("even", [3, 5]):
            with pytest.raises(UsageError, match=r"again=True\) measures the split again at the end of each epoch: say split='auto'"):
                make(split)
    with pytest.raises(UsageError, match=r"not between devices of one"):
        pl.layers(LAYERS, split="auto", again=True, devices=["cpu", "cpu"])
