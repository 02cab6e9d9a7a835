"""Layers cut between workers against one process that has all of them: losses, parameters, and
what is exchanged for it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.cluster.mesh import Mesh
from paceline.parallel.tensor.tensor_cut import tensor
from paceline.session.run import Run
from tests.harness.compiling import COMPILES
from tests.harness.runs import workers
from tests.harness.tensor_cuts import (
    PIECES,
    SHAPE,
    WHOLE,
    adamw,
    batches,
    compare,
    context_of,
    cut_training,
    distance,
    gpt,
    loss_of,
    sgd,
    train,
    whole,
)
from tests.harness.thread_groups import ThreadGroup, spawn

torch.set_num_threads(1)
Parts = list[tuple[Any, Tensor]]
BOTH = "data=2, tensor=2"
CUTS = pytest.mark.parametrize("cut", [WHOLE, PIECES], ids=["whole", "pieces"])


@pytest.mark.each_choice
@pytest.mark.parametrize("size", [2, 4])
@CUTS
def test_gpt_with_tied_weights_equals_one_process(size: int, cut: tensor) -> None:
    for dtype, optimizer, steps, limit in (
        (torch.float32, sgd, 1, 5e-7),
        (torch.float64, adamw, 20, 1e-9),
    ):
        alone, data = gpt(dtype), batches(steps)
        losses, parameters = cut_training(size, copy.deepcopy(alone), cut, data, optimizer)
        wanted, _ = train(alone, data, optimizer)
        assert all(found == losses[0] for found in losses)
        assert losses[0] == pytest.approx(wanted, rel=1e-6 if dtype == torch.float32 else 1e-10)
        assert distance(parameters, alone) < limit


@pytest.mark.parametrize("reentrant", [False, True])
@CUTS
def test_activation_checkpointing_exchanges_again_in_the_same_order(
    reentrant: bool, cut: tensor
) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        h = model.tokens(x) + model.positions(torch.arange(x.shape[1]))
        if cut is PIECES:
            h = checkpoint(model.blocks, h, use_reentrant=reentrant)
        else:
            for block in model.blocks:
                h = checkpoint(block, h, use_reentrant=reentrant)
        logits = (
            model.head(model.norm(h))
            if reentrant
            else checkpoint(lambda h: model.head(model.norm(h)), h, use_reentrant=False)
        )
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    compare(gpt(), cut, batches(3), loss=loss)


@COMPILES
@pytest.mark.alike(1)
@CUTS
def test_compiled_blocks(cut: tensor) -> None:
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        # runs them as they are: compiling takes seconds
        plain = model is alone or threading.current_thread().name != "rank 0"
        for block in () if plain else model.blocks:
            if not hasattr(block, "compiled"):
                block.compiled = True
                block.compile(backend="aot_eager" if cut is WHOLE else "eager")
        return loss_of(model, x, y)

    shape = type(SHAPE)(d=16, layers=1, heads=2, context=8, vocab=8)
    alone = gpt(shape=shape)
    compare(alone, cut, batches(1, shape), loss=loss)


@CUTS
def test_bfloat16_autocast_and_a_scaled_loss(cut: tensor) -> None:
    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            found = loss_of(model, x, y)
        assert found.dtype == torch.float32
        return found * 1024

    data, alone = batches(1), gpt()
    losses, parameters = cut_training(2, copy.deepcopy(alone), cut, data, tiny, loss=loss)
    wanted, _ = train(alone, data, tiny, loss)
    assert losses[0] == losses[1] == pytest.approx(wanted, rel=3e-3)
    start = dict(gpt().named_parameters())
    moved = {
        name: (parameters[name] - start[name].detach(), p.detach() - start[name].detach())
        for name, p in alone.named_parameters()
    }
    assert all((one - two).norm() < 0.05 * two.norm() for one, two in moved.values())


def tiny(parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def test_replicas_of_a_cut_model_with_other_samples() -> None:
    """Four workers, data=2, tensor=2: gradients of the parts are averaged over `data` alone."""
    mesh = Mesh((("data", 2), ("tensor", 2)), (0, 1, 2, 3))
    model, ((x, y), *_) = gpt(torch.float64), batches(1)

    def body(group: ThreadGroup) -> Any:
        mine, context = copy.deepcopy(model), context_of(group, mesh)
        WHOLE.apply(mine, context)
        half = slice(0, 2) if mesh.coordinates(group.rank)["data"] == 0 else slice(2, 4)
        loss_of(mine, x[half], y[half]).backward()
        over = context.groups.group_along("data")
        grads = [
            over.all_reduce(p.grad, op="mean").wait()
            for p in mine.parameters()
            if p.grad is not None
        ]
        return [
            (context.placements.placement_of(p, name), grad)
            for (name, p), grad in zip(mine.named_parameters(), grads, strict=True)
        ]

    found = whole(spawn(4, body))
    loss_of(model, x, y).backward()
    assert all(
        torch.allclose(found[name], p.grad, rtol=1e-9, atol=1e-12)
        for name, p in model.named_parameters()
        if p.grad is not None
    )


# ---- in a run: replicas of a cut model on other samples


def loader(batch: int = 8) -> DataLoader[Any]:
    """An epoch whose last batch is smaller."""
    ((x, y),) = batches(1, SHAPE, 21)
    return DataLoader(
        TensorDataset(x, y),
        batch_size=batch,
        shuffle=True,
        generator=torch.Generator().manual_seed(3),
    )


def training(*cuts: Any, clip: float = 0.0, **options: Any) -> Callable[[Run], Parts]:
    def body(run: Run) -> Parts:
        model = copy.deepcopy(MODEL)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, data = run.prepare(model, optimizer, loader(8), cut=list(cuts), **options)
        for _ in run.epochs(2):
            for x, y in data:
                optimizer.zero_grad()
                F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
                if clip:
                    run.clip(model, clip)
                optimizer.step()
        return [
            (run._prepared.cuts.placements.placement_of(p, name), p.detach())
            for name, p in model.named_parameters()
        ]

    return body


MODEL = gpt(torch.float64)


def together(parts: list[Parts]) -> dict[str, Tensor]:
    """What all workers have, put together: equal to the last bit where several have it."""
    return whole(parts)


def model_of(parts: Parts) -> Any:
    model = copy.deepcopy(MODEL)
    model.load_state_dict({placement.name: value for placement, value in parts}, strict=False)
    return model


@pytest.mark.parametrize(
    ("cut", "options"),
    [(WHOLE, {}), (PIECES, {"shares": [3, 1]}), (WHOLE, {"clip": 0.05})],
    ids=["plain", "pieces-shares", "clip"],
)
def test_replicas_of_a_cut_model_equal_one_worker(cut: Any, options: dict[str, Any]) -> None:
    (alone,) = workers(
        1, training(**{name: value for name, value in options.items() if name != "shares"})
    )
    found = together(workers(4, training(cut, **options), mesh=BOTH))
    assert distance(found, model_of(alone)) < 1e-9
    assert distance(found, MODEL) > 1e-2


@pytest.mark.parametrize(
    "strategy", [pl.LocalSGD(3), pl.AllReduce(via="ring"), pl.Gossip()], ids=repr
)
def test_a_strategy_between_replicas_does_what_it_does_between_whole_ones(strategy: Any) -> None:
    whole_ones = workers(2, training(), strategy=strategy)
    cut_ones = workers(4, training(WHOLE), mesh=BOTH, strategy=strategy)
    for replica, alone in enumerate(whole_ones):
        assert distance(together(cut_ones[2 * replica : 2 * replica + 2]), model_of(alone)) < 1e-9


@pytest.mark.alike(1)
@pytest.mark.parametrize("codec", [pl.int8(), pl.topk(0.1), pl.powersgd(2)], ids=repr)
def test_a_codec_between_replicas_leaves_whole_parameters_alike_everywhere(codec: Any) -> None:
    found = together(workers(4, training(WHOLE), mesh=BOTH, strategy=pl.AllReduce(codec=codec)))
    assert distance(found, MODEL) > 1e-2
