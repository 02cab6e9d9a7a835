"""Trains models whose layers are on several workers, on threads, and one that has them all: with
the same loop, on the same samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import paceline as pl
from paceline.apps.gpt import GPT, GPTShape
from paceline.cluster.mesh import parse_mesh
from paceline.session.run import Run
from paceline.sync.base import Strategy
from tests.harness.models import fill
from tests.harness.runs import alone, workers
from tests.harness.sharded import put_together

LAYERS = "tokens, positions, blocks.*, norm, head"
TENSOR = pl.tensor(
    {
        "blocks.*.attention.qkv": pl.column(parts=3),
        "blocks.*.attention.out": pl.row(),
        "blocks.*.up": pl.column(),
        "blocks.*.down": pl.row(),
    },
    divide=["blocks.*.attention.heads"],
)
Batches = Callable[[], Dataset[Any]]
Loss = Callable[[Any, Tensor], Tensor]


class Sentences(Dataset[Any]):
    """Random tokens, each followed by the next; in batches of eight the last one has five."""

    def __init__(self, count: int = 13, length: int = 6, vocab: int = 11) -> None:
        self.tokens = torch.randint(
            0, vocab, (count, length), generator=torch.Generator().manual_seed(3)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Any:
        return self.tokens[index, :-1], self.tokens[index, 1:]


def gpt(*, tied: bool = True, layers: int = 4) -> nn.Module:
    """A small GPT in double precision, the same in every call."""
    made = GPT(GPTShape(d=12, layers=layers, heads=2, context=5, vocab=11, tied=tied)).double()
    fill(made)
    return made


def next_tokens(logits: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def trained(
    cut: Any,
    *,
    build: Callable[[], nn.Module] = gpt,
    data: Batches = Sentences,
    loss: Loss = next_tokens,
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda parameters: torch.optim.AdamW(
        parameters, lr=1e-2
    ),
    clip: float | None = 1.0,
    options: dict[str, Any] | None = None,
    epochs: int = 2,
    ended: Callable[[Run, nn.Module], Any] = lambda run, model: None,
) -> Callable[[Run], tuple[list[float], Tensor, Any]]:
    """What trains some epochs by `run.step`, and gives the losses of all workers in each step,
    all parameters, and what `ended` says.
    """

    def body(run: Run) -> tuple[list[float], Tensor, Any]:
        model = build()
        stepping = optimizer(model.parameters())
        model, stepping, loader = run.prepare(
            model, stepping, DataLoader(data(), batch_size=8), cut=cut, **(options or {})
        )
        losses = []
        for _ in run.epochs(epochs):
            for x, y in loader:
                stepping.zero_grad()
                value = run.step(model, x, y, loss=loss)
                if clip is not None:
                    run.clip(model, clip)
                stepping.step()
                losses.append(run.mean(float(value)))
        said = ended(run, model)
        cuts = run._prepared.cuts
        return losses, put_together(model, run.group, cuts.placements, cuts.trained_tensor), said

    return body


def same(
    mesh: str, cut: Any, *, bound: float = 1e-9, strategy: Strategy | None = None, **terms: Any
) -> list[Any]:
    """Workers of a mesh end with the losses and parameters of one process; what `ended` says of
    each.
    """
    whole = {key: value for key, value in terms.items() if key not in ("ended", "options")}
    whole["options"] = {
        key: value for key, value in terms.get("options", {}).items() if key != "shares"
    }
    losses, parameters, _ = alone(trained(None, **whole))
    found = workers(
        math.prod(size or 1 for size in parse_mesh(mesh).values()),
        trained(cut, **terms),
        mesh=mesh,
        strategy=strategy,
    )
    for mine, values, _ in found:
        assert max(abs(one - two) for one, two in zip(mine, losses, strict=True)) < bound
        assert float((values - parameters).abs().max()) < bound
    return [said for _, _, said in found]
