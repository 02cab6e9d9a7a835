"""Layers over devices of one worker: any loop trains them, beside replicas, and a checkpoint is
that of the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader

import paceline as pl
from paceline import notation
from paceline.errors import UsageError
from paceline.parallel.dealing import devices as spreading
from paceline.parallel.dealing import placed_forward
from paceline.parallel.layers import layers
from paceline.parallel.pipelining.layer_graph import LayerGraph
from paceline.parallel.pipelining.split import LayerCost
from paceline.session.run import Run
from tests.harness.jobs import Jobs
from tests.harness.models import fill
from tests.harness.pipelines import LAYERS, Sentences, gpt, next_tokens
from tests.harness.programs import beside_processors
from tests.harness.runs import Numbered, alone, workers

CPUS = ["cpu", "cpu"]


def trained(
    cut: Any, *, steps: bool = False, folder: Path | None = None, until: int = 6
) -> Callable[[Run], tuple[list[float], Any]]:
    """What trains a tied GPT, by `run.step` or a plain loop, and gives losses and parameters; it
    goes on from what is in `folder`.
    """

    def body(run: Run) -> tuple[list[float], Any]:
        model = gpt()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = run.prepare(
            model, optimizer, DataLoader(Sentences(24), batch_size=8), cut=cut
        )
        losses = []
        if folder is not None:
            run.resume()
        for _ in run.epochs(2):
            for x, y in loader:
                if run.steps >= until:
                    continue
                optimizer.zero_grad()
                if steps:
                    loss = run.step(model, x, y, loss=next_tokens)
                else:
                    loss = next_tokens(model(x), y)
                    loss.backward()  # type: ignore[no-untyped-call]
                run.clip(model, 1.0)
                optimizer.step()
                losses.append(run.mean(float(loss.detach())))
                if folder is not None and run.steps == 3:
                    run.save()
        return losses, torch.cat(
            [parameter.detach().reshape(-1).cpu() for parameter in model.parameters()]
        )

    return body


@pytest.mark.each_choice
@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("split", ["even", [5, 3]])
def test_layers_on_two_devices_end_where_the_model_does(
    monkeypatch: pytest.MonkeyPatch, steps: bool, split: Any
) -> None:
    own, moves = placed_forward.move_values, list[Any]()
    monkeypatch.setattr(
        placed_forward,
        "move_values",
        lambda value, device: (moves.append(value), own(value, device))[1],
    )
    wanted, values = alone(trained(None))
    for losses, found in workers(
        2, trained(layers(LAYERS, devices=CPUS, split=split), steps=steps)
    ):
        assert losses == pytest.approx(wanted, rel=1e-9)
        assert float((found - values).abs().max()) < 1e-9
    # workers, steps, and in each the input, what crosses, and the output
    assert len(moves) >= 2 * 6 * 3


def test_a_checkpoint_is_that_of_the_model(tmp_path: Path) -> None:
    cut = layers(LAYERS, devices=CPUS)
    (wanted, values), *_ = workers(2, trained(None))
    first = workers(2, trained(cut, folder=tmp_path, until=4), folder=tmp_path)[0][0]
    losses, found = workers(1, trained(None, folder=tmp_path), folder=tmp_path)[0]
    assert first == pytest.approx(wanted[:4], rel=1e-9)
    assert (
        losses[-1] == pytest.approx(wanted[-1], rel=1e-9)
        and float((found - values).abs().max()) < 1e-9
    )


def test_a_model_without_memory_and_averages_of_it() -> None:
    def body(run: Run, cut: Any) -> Any:
        with pl.meta():
            model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        model = run.prepare(model, cut=cut)
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.7))  # type: ignore[no-untyped-call]
        x = torch.linspace(-1, 1, 24).view(4, 6)
        F.mse_loss(model(x), x[:, :2]).backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad  # type: ignore[arg-type]
        average.update_parameters(model)
        return torch.cat([run.forward(model, x), average.eval()(x)]).detach()

    wanted = workers(2, lambda run: body(run, None))[0]
    for found in workers(2, lambda run: body(run, layers("0, 1, 3", devices=CPUS))):
        assert torch.allclose(found, wanted, rtol=0, atol=1e-6)


def test_the_split_that_is_measured_is_the_same_on_all_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked, said = list[torch.device | None](), list[str]()

    def measure(
        graph: LayerGraph, args: Any, kwargs: Any = None, *, loss: Any = None, around: Any = None
    ) -> Any:
        asked.append(around.args[1])
        output = graph.model(*args)
        last = float(loss(output).detach() * 0) + 6.0  # the loss is given what it takes
        return [
            LayerCost(name, 1.0 if at < 3 else last, 0.0) for at, name in enumerate(graph.layers)
        ]

    monkeypatch.setattr(spreading, "measure_layers", measure)

    def body(run: Run) -> list[int]:
        model = fill(nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)), nn.Linear(6, 2)).double())
        cut = layers("auto", devices=CPUS, split="auto", loss=F.mse_loss)
        run.prepare(model, DataLoader(Numbered(), batch_size=8), cut=cut)
        forward: Any = model.forward
        return [step.place for step in forward._steps if step.operation.kind == "module"]

    assert workers(2, body, said=said) == [[0, 0, 0, 1]] * 2
    assert asked == [torch.device("cpu")] * 2  # a device that is named twice is measured once
    assert any("the split over cpu, cpu that was measured, [3, 1]" in text for text in said)


def test_layers_are_measured_where_they_will_be() -> None:
    model = fill(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).double())

    def body(run: Run) -> Any:
        cut = layers("auto", devices=CPUS, split="auto")
        run.prepare(model, DataLoader(Numbered(), batch_size=8), cut=cut)
        return int(model.get_buffer("1.num_batches_tracked"))

    assert workers(1, body) == [0]


@pytest.mark.parametrize(
    ("cut", "mesh", "words"),
    [
        (
            layers(LAYERS, devices=["cpu", "cuda:7"]),
            None,
            r"no device 'cuda:7', as this machine has",
        ),
        (
            layers(LAYERS, devices=["cpu", "gpu"]),
            None,
            r"'gpu' is not a device for layers; give 'cpu' or 'cuda:0'",
        ),
        (layers(LAYERS, devices=["cpu", "meta"]), None, r"'meta' is not a device for layers"),
        (layers(LAYERS, devices=["cpu"] * 9), None, r"9 devices for 8 layers \(tokens, positions"),
        (
            layers(LAYERS, devices=CPUS, split=[3, 6]),
            None,
            r"split=\[3, 6\] doesn't deal 8 layers to 2 stages",
        ),
        (
            layers(LAYERS, devices=CPUS),
            "stage=2",
            (
                r"the mesh \(stage=2\) has an axis stage.*take stage out of the mesh, or leave out "
                r"devices="
            ),
        ),
        (
            [layers(LAYERS, devices=CPUS), pl.shard("blocks.*")],
            "shard=2",
            r"leaves each worker the whole model, and can't be combined",
        ),
        (layers(LAYERS, devices=CPUS), "shard=2", r"shard"),
    ],
)
def test_what_cant_be_is_refused(cut: Any, mesh: str | None, words: str) -> None:
    def body(run: Run) -> None:
        model = gpt()
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), cut=cut)

    with pytest.raises(UsageError, match=words):
        workers(2, body, mesh=mesh)


def test_one_device_is_none_to_deal_layers_to() -> None:
    for given in (["cuda:0"], "cuda:0", []):
        with pytest.raises(UsageError, match=r"has to name two devices at least"):
            layers(LAYERS, devices=given)
    cut = layers(LAYERS, devices=["cuda:0", "cuda:1"])
    assert notation.parse_cuts(repr(cut)) == (cut,)


def test_backward_is_in_one_thread_until_the_run_is_over(tmp_path: Path) -> None:
    """Threads of two devices would hand gradients over in another order on each worker."""
    with pl.start(folder=str(tmp_path), name="spread") as run:
        run.prepare(
            model := gpt(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            cut=layers(LAYERS, devices=CPUS),
        )
        assert not torch._C._is_multithreading_enabled()
    assert torch._C._is_multithreading_enabled()


def test_workers_that_have_layers_on_devices_end_where_whole_models_do(
    job: Jobs, tmp_path: Path
) -> None:
    """With processors alone; tests/session/test_gpu.py has it, and all other ways to train,
    beside a GPU.
    """
    ended = job.program(
        Path(beside_processors.__file__), args=("devices", str(tmp_path / "out.json"))
    ).end()
    assert ended.code == 0, ended.err
    found = json.loads((tmp_path / "out.json").read_text())
    assert found.keys() == beside_processors.GROUPS["devices"].keys() and all(
        way["weights"] < way["near"] for way in found.values()
    )


@pytest.mark.gpu
@pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="needs two CUDA devices, and this machine has fewer"
)
def test_layers_on_two_gpus_end_where_the_model_does(tmp_path: Path) -> None:
    wanted, values = alone(trained(None))
    cut = layers(LAYERS, devices=["cuda:0", "cuda:1"], split="auto", loss=next_tokens)
    with pl.start(folder=str(tmp_path), name="gpus") as run:
        losses, found = trained(cut)(run)
        assert losses == pytest.approx(wanted, rel=1e-6)
        assert float((found - values).abs().max()) < 1e-6
