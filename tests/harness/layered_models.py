"""Models whose forwards are more than a chain of layers, and a way to run their parts one after
the other as stages do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.parallel.pipelining.layer_graph import LayerGraph


class Looped(nn.Module):
    """Blocks of a list, added to what came in, with scales that are the model's own and a
    dropout between layers.
    """

    def __init__(self, size: int = 4, blocks: int = 3, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Linear(3, size)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.register_buffer("offset", torch.linspace(-1, 1, size))
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(size, size), nn.ReLU(inplace=True)) for _ in range(blocks)
        )
        self.head = nn.Linear(size, 2)
        self.dropout = dropout

    def forward(self, x: Tensor, *, shift: float = 0.0, mask: Tensor | None = None) -> Tensor:
        first = self.embed(x)
        x = first * self.scale + self.offset
        for block in self.blocks:
            x = x + block(F.dropout(x, self.dropout, self.training))
            x.mul_(0.9)
        if mask is not None:
            x = x * mask
        out: Tensor = self.head(x * self.scale + first) + shift
        return out


class Structured(nn.Module):
    """Layers that take and return several tensors, dicts, numbers and None."""

    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(3, 4), nn.Linear(3, 4)

        def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
            return {
                "pair": (self.left(batch["x"]), self.right(batch["x"])),
                "rest": None,
                "scale": 2.0,
                "keep": batch["keep"],
            }

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(
            self, parts: dict[str, Any], left: Tensor, *, right: Tensor
        ) -> tuple[Tensor, list[Any]]:
            assert parts["rest"] is None
            return self.line(left * parts["scale"] + right), [parts["keep"], left]

    def __init__(self) -> None:
        super().__init__()
        self.split, self.join, self.head = self.Split(), self.Join(), nn.Linear(4, 1)

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Any]:
        parts = self.split(batch)
        mixed, (keep, left) = self.join(parts, parts["pair"][0], right=parts["pair"][1])
        return {
            "y": self.head(mixed) * keep,
            "left": left,
            "mean": parts["pair"][0].mean(dtype=mixed.dtype),
        }


class Twice(nn.Module):
    """One module that is called twice, and a weight that is used outside of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.turn = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        here = self.turn(self.embed(x))
        here = self.turn(self.middle(here).tanh())
        return F.linear(here, self.embed.weight)


class Made(nn.Module):
    """Tensors that the forward makes, of sizes that depend on the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.steps_made = nn.Linear(3, 3), nn.Linear(3, 3), 2

    def forward(self, x: Tensor) -> Tensor:
        count, size = x.shape
        x = self.one(x) * torch.arange(count, device=x.device)[:, None] + torch.ones(
            count, size, dtype=x.dtype
        )
        x = (
            x
            + torch.zeros(size=(count, 1))
            + torch.full((count, size), 2.0)
            + torch.ones(3)
            + self.steps_made
        )
        x = x[..., :size] @ torch.tril(torch.ones(size, size))
        assert count > 0, "no samples"
        out: Tensor = self.two(x)
        return out


class Listed(nn.Module):
    """Blocks, and parameters in a list and in a dict, which are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(
            torch.linspace(0.5, 1.5, 3) * number for number in range(1, 3)
        )
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.shifts = nn.ParameterDict({"end": nn.Parameter(torch.ones(3))})

    def forward(self, x: Tensor) -> Tensor:
        for scale, block in zip(self.scales, self.blocks, strict=True):
            x = torch.tanh(block(x * scale))
        return x + self.shifts["end"]


class Masked(nn.Module):
    """Blocks that all use a mask and rows of a buffer, both made at the beginning, as Llama's
    do; sizes, a device and a dtype too.
    """

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor, turns: Tensor) -> Tensor:
            out: Tensor = x + mask @ self.line(x * turns)
            return out

    def __init__(self, blocks: int = 3, vocab: int = 7) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, 4), nn.Linear(4, vocab)
        self.blocks = nn.ModuleList(self.Block() for _ in range(blocks))
        self.register_buffer("turns", torch.linspace(-1, 1, 36).reshape(9, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        _, count = x.shape
        here = self.embed(x)
        dtype, device, turns = here.dtype, here.device, self.turns[:count]
        mask = torch.full((count, count), 0.5, device=device)
        mask = torch.tril(mask, diagonal=-1).to(dtype)
        for block in self.blocks:
            here = block(here, mask, turns)
        out: Tensor = self.head(here.double().to(dtype)) + torch.ones(1, device=device)
        return out


def run_parts(
    graph: LayerGraph,
    starts: Sequence[int],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Run the parts of a model as stages do, each on tensors that know of no other; return what
    the model returns, and a backward.
    """
    values = graph.bind_inputs(args, kwargs or {})
    records = []
    for start, stop in zip(starts, [*starts[1:], len(graph.layers)], strict=True):
        part = graph.make_part(start, stop)
        taken = {name: tree_map_only(Tensor, _alone, values[name]) for name in part.takes}
        values = part.run_stage(taken)
        assert tuple(values) == part.gives
        records.append((taken, values))
    return next(iter(values.values())), records


def _alone(x: Tensor) -> Tensor:
    return x.detach().clone().requires_grad_(x.requires_grad)


def backward_parts(
    records: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]], loss: Tensor
) -> None:
    """Take the gradients of `loss`, which is made of what the last part gave, back through all
    parts.
    """
    loss.backward()
    for (taken, _), (_, given) in zip(records[:0:-1], records[-2::-1], strict=True):
        grads = [
            leaf.grad if isinstance(leaf, Tensor) else None
            for leaf in tree_leaves([taken[name] for name in given])
        ]
        roots = [
            (leaf, grad)
            for leaf, grad in zip(tree_leaves(list(given.values())), grads, strict=True)
            if grad is not None
        ]
        torch.autograd.backward([leaf for leaf, _ in roots], [grad for _, grad in roots])
