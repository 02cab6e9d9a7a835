"""Training as scripts do it, with layers on several workers: what optimizers, scalers, clipping,
averages and strategies see.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, spectral_norm
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

import paceline as pl
from paceline.apps.gpt import GPT, GPTShape
from paceline.errors import UsageError
from paceline.parallel.pipeline import pipeline
from paceline.session.run import Run
from tests.harness.models import fill
from tests.harness.pipelines import LAYERS, TENSOR, Sentences, gpt, next_tokens, same, trained
from tests.harness.runs import Numbered, workers
from tests.harness.sharded import put_together

X, Y = torch.zeros(4, 5, dtype=torch.long), torch.zeros(4, 5, dtype=torch.long)


def untied() -> nn.Module:
    return gpt(tied=False)


def test_averages_of_parameters_are_those_of_the_model() -> None:
    def body(run: Run, cut: Any) -> list[float]:
        model = untied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        model, optimizer = run.prepare(model, optimizer, cut=cut)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))  # type: ignore[no-untyped-call]
        for _ in range(3):
            optimizer.zero_grad()
            run.step(model, X, Y, loss=next_tokens)
            optimizer.step()
            average.update_parameters(model)
        if cut is not None:
            with pytest.raises(
                UsageError,
                match=(
                    r"this is a copy of a model that has layers on other workers "
                    r".*run.forward\(model, x\)"
                ),
            ):
                run.forward(average.module, X)
        with torch.no_grad():
            for mine, averaged in zip(model.parameters(), average.module.parameters(), strict=True):
                mine.copy_(averaged)
        return [float(value) for value in run.forward(model, X)[0, 0]]

    wanted = workers(1, lambda run: body(run, None))[0]
    for found in workers(
        2, lambda run: body(run, pipeline(LAYERS, micro_batches=2)), mesh="stage=2"
    ):
        assert found == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize(
    ("mesh", "schedule"), [("stage=2", "zero-bubble"), ("data=2, stage=2", "1f1b")]
)
def test_gradients_are_scaled_and_overflows_of_one_stage_skip_the_step_of_all(
    mesh: str, schedule: str
) -> None:
    def body(run: Run, cut: Any) -> list[float]:
        model = untied()
        optimizer, scaler = (
            torch.optim.SGD(model.parameters(), lr=0.5),
            torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2),
        )
        model, optimizer, scaler, loader = run.prepare(
            model, optimizer, scaler, DataLoader(Sentences(24), batch_size=8), cut=cut
        )
        seen = list[float]()
        for _ in run.epochs(2):
            for x, y in loader:
                factor = math.inf if run.steps == 2 else 1.0
                optimizer.zero_grad()
                loss = run.step(
                    model, x, y, loss=lambda out, y, factor=factor: next_tokens(out, y) * factor
                )
                scaler.unscale_(optimizer)
                run.clip(model, 0.5)
                scaler.step(optimizer)
                scaler.update()
                seen += [run.mean(float(loss)), scaler.get_scale()]
        return seen

    wanted = workers(1, lambda run: body(run, None))[0]
    assert wanted[1::2] == [256.0, 512.0, 256.0, 256.0, 512.0, 512.0]
    cut = pipeline(LAYERS, schedule=schedule, micro_batches=2)
    for found in workers(4 if "data" in mesh else 2, lambda run: body(run, cut), mesh=mesh):
        assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("schedule", "zero"), [("zero-bubble", 2), ("zbv", 3)])
def test_a_backward_in_two_halves_takes_pieces_that_are_whole_while_used(
    schedule: str, zero: Any
) -> None:
    same(
        "shard=2, stage=2",
        [pipeline(LAYERS, schedule=schedule, micro_batches=4), pl.shard("blocks.*", zero=zero)],
    )


@pytest.mark.parametrize("params", [None, "bfloat16"])
def test_units_are_released_between_two_halves_and_after_them(params: Any) -> None:
    def body(run: Run) -> list[int]:
        model, seen = gpt().float(), list[int]()
        run.prepare(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            cut=[
                pipeline(LAYERS, schedule="zero-bubble", micro_batches=4),
                pl.shard("blocks.*", zero=3, params=params),
            ],
        )
        memories = [
            bucket.memory for source in run._prepared.cuts.sources for bucket in source.buckets
        ]  # type: ignore[attr-defined]
        block = next(
            block for block in list(model.blocks)[1:3] if any(p.numel() for p in block.parameters())
        )  # type: ignore[arg-type]
        block.register_forward_pre_hook(
            lambda *_: seen.append(sum(memory.is_whole for memory in memories if memory.unit))
        )
        run.step(model, X, Y, loss=next_tokens)
        assert not any(memory.is_whole for memory in memories)
        assert all(
            torch.isfinite(p.grad).all()
            for p in model.parameters()
            if p.numel() and p.grad is not None
        )
        return seen

    for seen in workers(4, body, mesh="shard=2, stage=2"):
        assert seen == [1] * 4  # micro-batches: the block that runs


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble"])
def test_a_script_may_unfreeze_layers_while_it_trains(schedule: str) -> None:
    def body(run: Run, cut: Any) -> torch.Tensor:
        model = untied()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("blocks" not in name)
        run.prepare(model, optimizer, cut=cut)
        for step in range(4):
            if step == 2:
                model.requires_grad_(True)
            optimizer.zero_grad()
            run.step(model, X, Y, loss=next_tokens)
            optimizer.step()
        return torch.cat(
            [
                parameter.detach().reshape(-1)
                for name, parameter in model.named_parameters()
                if parameter.numel()
            ]
        )

    wanted = workers(1, lambda run: body(run, None))[0]
    found = torch.cat(
        workers(
            2,
            lambda run: body(run, pipeline(LAYERS, schedule=schedule, micro_batches=2)),
            mesh="stage=2",
        )
    )
    assert torch.allclose(found, wanted, rtol=0, atol=1e-10)


class Turned(nn.Module):
    """Two layers that are each used twice, by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = torch.tanh(self.two(torch.tanh(self.one(x))))
        return x


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_a_backward_in_two_halves_goes_through_layers_that_are_used_twice(schedule: str) -> None:
    def build() -> nn.Module:
        return fill(nn.Sequential(nn.Linear(6, 6), Turned(), Turned(), nn.Linear(6, 2)).double())

    same(
        "stage=2",
        pipeline("0, 1, 2, 3", schedule=schedule, micro_batches=4),
        build=build,
        data=Numbered,
        loss=F.mse_loss,
    )


@pytest.mark.parametrize("norm", [parametrizations.spectral_norm, spectral_norm])
def test_norms_that_step_in_each_forward_need_one_micro_batch(norm: Any) -> None:
    def build() -> nn.Module:
        model = fill(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double())
        norm(model[0])
        for vector in model.buffers():
            vector.copy_(F.normalize(torch.ones_like(vector), dim=0))
        return model

    with pytest.raises(UsageError, match=r"spectral_norm of 0 .*micro_batches=1"):
        workers(
            2,
            lambda run: run.prepare(build(), cut=pipeline("0, 2", micro_batches=2)),
            mesh="stage=2",
        )
    same("stage=2", pipeline("0, 2", micro_batches=1), build=build, data=Numbered, loss=F.mse_loss)


class Routed(nn.Module):
    """Each row goes through one of three layers, so that some are used in some micro-batches
    alone; run again in backward.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = (
            nn.Linear(6, 3),
            nn.ModuleList([nn.Linear(6, 6) for _ in range(3)]),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = checkpoint(self.route, x, use_reentrant=False)
        return x + added

    def route(self, x: torch.Tensor) -> torch.Tensor:
        chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out


@pytest.mark.parametrize(
    ("mesh", "schedule"), [("stage=2", "zero-bubble"), ("data=2, stage=2", "1f1b")]
)
def test_layers_may_use_their_parameters_in_some_micro_batches_alone(
    mesh: str, schedule: str
) -> None:
    def build() -> nn.Module:
        return fill(nn.Sequential(nn.Linear(6, 6), Routed(), Routed(), nn.Linear(6, 2)).double())

    same(
        mesh,
        pipeline("0, 1, 2, 3", schedule=schedule, micro_batches=4),
        build=build,
        data=Numbered,
        loss=F.mse_loss,
    )


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
def test_norms_count_each_piece_once(norm_type: float) -> None:
    def body(run: Run, cut: Any) -> list[float]:
        model = gpt(layers=2)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), cut=cut)
        run.step(model, X, Y, loss=next_tokens)
        return [float(run.clip(model, 0.1, norm_type=norm_type))]

    wanted = workers(1, lambda run: body(run, None))[0]
    cut = [pipeline(LAYERS), TENSOR, pl.shard("blocks.*")]
    for found in workers(8, lambda run: body(run, cut), mesh="shard=2, stage=2, tensor=2"):
        assert found == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("schedule", ["1f1b", "zero-bubble", "zbv"])
def test_layers_of_whole_stages_may_be_frozen(schedule: str) -> None:
    def build() -> nn.Module:
        model = untied()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("blocks.3", "head")))
        return model

    same(
        "stage=2",
        pipeline(LAYERS, schedule=schedule, micro_batches=4),
        build=build,
        optimizer=trained_alone,
    )


def trained_alone(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [parameter for parameter in parameters if parameter.requires_grad], lr=1e-2
    )


@pytest.mark.parametrize("strategy", [pl.LocalSGD(2), pl.Gossip()])
def test_replicas_of_stages_may_part(strategy: Any) -> None:
    wanted = workers(2, trained(None), strategy=strategy)
    found = workers(
        4, trained(pipeline(LAYERS, micro_batches=2)), mesh="data=2, stage=2", strategy=strategy
    )
    for rank, (losses, parameters, _) in enumerate(found):
        assert losses == pytest.approx(wanted[0][0], rel=1e-9)
        assert float((parameters - wanted[rank // 2][1]).abs().max()) < 1e-9


def test_an_empty_share_goes_through_all_stages() -> None:
    # a last batch of one sample
    same("data=2, stage=2", pipeline(LAYERS, micro_batches=2), data=lambda: Sentences(9))


class Masked(nn.Module):
    """A forward with arguments that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if mask is not None:
            x = x * mask[:, None]
        return self.second(x)  # type: ignore[no-any-return]


def test_batches_may_give_what_a_forward_has_defaults_for() -> None:
    x, mask = (
        torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6),
        torch.tensor([0.0, 1, 2, 3], dtype=torch.float64),
    )

    def body(run: Run, cut: Any) -> float:
        model = fill(Masked().double())
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), cut=cut)
        return float(run.step(model, x, x[:, :2], loss=F.mse_loss, mask=mask))

    wanted = workers(1, lambda run: body(run, None))
    cuts = [
        pipeline("first, second", micro_batches=2, inputs=["x", "mask"]),
        pl.layers("first, second", inputs=["x", "mask"]),
    ]
    for cut in cuts:
        assert workers(2, lambda run, cut=cut: body(run, cut), mesh="stage=2") == pytest.approx(
            wanted * 2, rel=1e-12
        )  # type: ignore[misc]
    with pytest.raises(
        UsageError, match=r"a forward without 'mask'; say pipeline\(..., inputs=\['x', 'mask'\]\)"
    ):
        workers(
            2, lambda run: body(run, pipeline("first, second", micro_batches=2)), mesh="stage=2"
        )


def unborn(*, tied: bool) -> nn.Module:
    with pl.meta():
        return GPT(GPTShape(d=12, layers=4, heads=2, context=5, vocab=11, tied=tied))


def begun(
    cut: Any, *, tied: bool = False, init: Any = None
) -> Callable[[Run], tuple[torch.Tensor, int]]:
    """What prepares a model without memory, and gives all parameters, and how many elements of
    weights linear layers have drawn here.
    """

    def body(run: Run) -> tuple[torch.Tensor, int]:
        drawn = DRAWN.counts = list[int]()
        model = run.prepare(unborn(tied=tied), cut=cut, init=init)
        cuts = run._prepared.cuts
        return put_together(model, run.group, cuts.placements, cuts.trained_tensor), sum(drawn)

    return body


DRAWN = threading.local()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linear layers count what they make, on each thread."""
    own = nn.Linear.reset_parameters

    def reset(layer: nn.Linear) -> None:
        if not layer.weight.is_meta and hasattr(DRAWN, "counts"):
            DRAWN.counts.append(layer.weight.numel())
        own(layer)

    monkeypatch.setattr(nn.Linear, "reset_parameters", reset)


WITHOUT_MEMORY: list[tuple[str, int, Any]] = [
    ("stage=2", 2, pipeline(LAYERS, micro_batches=4)),
    ("stage=3", 3, pipeline(LAYERS, schedule="zero-bubble")),
    ("stage=2, tensor=2", 4, [pipeline(LAYERS), TENSOR]),
    ("data=2, stage=2", 4, pipeline(LAYERS, schedule="zbv", micro_batches=4)),
    ("shard=2, stage=2", 4, [pipeline(LAYERS), pl.shard("blocks.*")]),
]


@pytest.mark.alike(1)
@pytest.mark.parametrize(
    ("tied", "meshes"),
    [(False, WITHOUT_MEMORY[2:]), (True, WITHOUT_MEMORY[:3])],
    ids=["untied", "tied"],
)
def test_models_without_memory_get_the_same_values_and_each_worker_makes_its_stages(
    counted: None, tied: bool, meshes: list[Any]
) -> None:
    ((wanted, whole),) = workers(1, begun(None, tied=tied))
    assert whole > 7000
    for mesh, size, cut in meshes:
        found = workers(size, begun(cut, tied=tied), mesh=mesh)
        assert all(torch.equal(values, wanted) for values, _ in found)
        assert max(made for _, made in found) < 0.8 * whole


def test_each_worker_reads_its_stages_of_a_file(counted: None, tmp_path: Path) -> None:
    model = untied().float()
    safetensors.torch.save_file(
        {name: tensor.clone() for name, tensor in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    wanted = torch.cat(
        [parameter.detach().double().reshape(-1) for parameter in model.parameters()]
    )
    for values, made in workers(
        2, begun(pipeline(LAYERS), init=tmp_path / "model.safetensors"), mesh="stage=2"
    ):
        assert torch.equal(values, wanted) and made == 0
