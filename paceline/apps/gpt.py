"""A small GPT: the decoder of Radford et al. (2019) with pre-normalised blocks."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import paceline as pl
from paceline.parallel.cut import ModelCut


@dataclass(frozen=True)
class GPTShape:
    """The sizes of a GPT: width `d`, layers, heads, tokens seen at once, different tokens;
    `tied` shares the two embeddings.
    """

    d: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64
    vocab: int = 256
    dropout: float = 0.0
    tied: bool = False


MAX_PARAMETERS = 1 << 32  # parameters of a model that a file describes
SMALL = GPTShape()  # 0.9 M parameters
MEDIUM = GPTShape(d=512, layers=6, heads=8)  # 19 M parameters


class KeyValueCache:
    """The keys and values of the tokens so far, of each attention layer: (batch, heads that this
    worker has, context, d / heads).

    Each worker has those of its layers, and all count the same tokens.
    """

    def __init__(self, context: int) -> None:
        self.length = 0  # tokens that all layers have
        self._context = context
        self._layer_tensors: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._extended_layers: set[nn.Module] = set()  # since tokens were counted

    def extend_layer(self, layer: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add those of new tokens to what a layer has, and return all of them."""
        if layer not in self._layer_tensors or (
            not self.length
            and layer not in self._extended_layers
            and len(self._layer_tensors[layer][0]) != len(keys)
        ):
            empty = (*keys.shape[:2], self._context, keys.shape[3])
            self._layer_tensors[layer] = keys.new_empty(empty), values.new_empty(empty)
        stop = self.length + keys.shape[2]
        if layer not in self._extended_layers and len(self._layer_tensors[layer][0]) != len(keys):
            raise pl.UsageError(
                f"{len(self._layer_tensors[layer][0])} rows have tokens so far, and {len(keys)} "
                "came: "
                "call clear() before others come"
            )
        for kept, new in zip(self._layer_tensors[layer], (keys, values), strict=True):
            if layer in self._extended_layers and not torch.equal(
                kept[:, :, self.length : stop], new
            ):
                raise pl.UsageError(
                    "layers were called with other rows before tokens were counted (micro-batches "
                    "of a pipeline): give one row at a time "
                    "to a GPT that keeps keys and values over stages"
                )
            kept[:, :, self.length : stop] = new
        self._extended_layers.add(layer)
        return self._layer_tensors[layer][0][:, :, :stop], self._layer_tensors[layer][1][
            :, :, :stop
        ]

    def count_tokens(self, count: int) -> None:
        """Count tokens that all layers have been given."""
        self.length += count
        self._extended_layers.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self.length = 0
        self._extended_layers.clear()


class Positions(nn.Embedding):
    """A vector for each place; places are counted from the tokens so far, while text is
    generated.
    """

    cache: KeyValueCache | None = None

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if self.cache is None else input + self.cache.length)


def draw_weights(layer: nn.Linear | nn.Embedding, *, added: int = 0) -> None:
    """Draw the weights of a layer, smaller ones where it is one of the two of each of `added`
    blocks that add to the residual stream.
    """
    nn.init.normal_(layer.weight, std=0.02 / (math.sqrt(2 * added) if added else 1.0))
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)


class Attention(nn.Module):
    """Causal self-attention of every token to those before it; (batch, tokens, d) in and out."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads, self.dropout, self.layers = shape.heads, shape.dropout, shape.layers
        self.qkv = nn.Linear(shape.d, 3 * shape.d)
        self.out = nn.Linear(shape.d, shape.d)
        self.cache: KeyValueCache | None = None  # while text is generated

    def reset_parameters(self) -> None:
        """Draw the weights."""
        draw_weights(self.qkv)
        draw_weights(self.out, added=self.layers)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.cache is not None:
            return self._attend_cached(q, *self.cache.extend_layer(self, k, v))
        mixed = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0
        )
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out

    def _attend_cached(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Let the newest tokens, whose queries are `q`, look at all so far, whose keys and
        values are `k` and `v`.
        """
        new, there = q.shape[2], k.shape[2]
        mask = (
            torch.ones(new, there, dtype=torch.bool, device=q.device).tril(there - new)
            if new > 1
            else None
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention, then a two-layer perceptron, each added to what came in."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.before_attention, self.before_perceptron = nn.LayerNorm(shape.d), nn.LayerNorm(shape.d)
        self.attention = Attention(shape)
        self.up, self.down = nn.Linear(shape.d, 4 * shape.d), nn.Linear(4 * shape.d, shape.d)
        self.layers = shape.layers
        self.dropout = nn.Dropout(shape.dropout)

    def reset_parameters(self) -> None:
        """Draw the weights, those of the attention first."""
        self.attention.reset_parameters()
        draw_weights(self.up)
        draw_weights(self.down, added=self.layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before_attention(x)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.before_perceptron(x)))))
        return out


class GPT(nn.Module):
    """Tokens (batch, tokens) to the logits of the next ones (batch, tokens, vocab).

    `tensor_plan` is what `pl.tensor("auto")` cuts: two sums forward and two backward for each
    block; no worker has all logits.
    """

    tensor_plan = pl.tensor(
        {
            **{"tokens": pl.vocab(), "head": pl.vocab()},
            **{"blocks.*.attention.qkv": pl.column(parts=3), "blocks.*.attention.out": pl.row()},
            **{"blocks.*.up": pl.column(), "blocks.*.down": pl.row()},
        },
        divide=["blocks.*.attention.heads"],
    )

    def __init__(self, shape: GPTShape = SMALL) -> None:
        super().__init__()
        if shape.d % shape.heads:
            raise ValueError(
                f"d = {shape.d} can't be cut in {shape.heads} heads: choose a d that the number of "
                "heads divides"
            )
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocab, shape.d)
        self.positions = Positions(shape.context, shape.d)
        blocks = [Block(shape) for _ in range(shape.layers)]
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.LayerNorm(shape.d)
        self.head = nn.Linear(shape.d, shape.vocab, bias=False)
        draw_weights(self.tokens)
        draw_weights(self.positions)
        for block in blocks:
            block.reset_parameters()
        draw_weights(self.head)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def reset_parameters(self) -> None:
        """Draw the weights that are in no block; each block draws its own."""
        for layer in (self.tokens, self.positions, self.head):
            draw_weights(layer)

    def forward(self, x: Tensor) -> Tensor:
        here = torch.arange(x.shape[1], device=x.device)
        logits: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.positions(here))))
        return logits

    @contextlib.contextmanager
    def cache_tokens(self) -> Iterator[KeyValueCache]:
        """Keep keys and values inside of the block: a call there goes on from the tokens that
        the cache `took`, in eval mode.
        """
        layers = [module for module in self.modules() if isinstance(module, Attention | Positions)]
        cache = KeyValueCache(self.shape.context)
        try:
            for layer in layers:
                layer.cache = cache
            yield cache
        finally:
            for layer in layers:
                layer.cache = None


def make_builder(fields: Mapping[str, Any]) -> Callable[[], GPT]:
    """Make a function that builds the GPT of these fields of a `GPTShape`, as a run's folder has
    them.

    Raises ValueError, or TypeError.
    """
    shape = GPTShape(**fields)
    kinds = {
        name: (int, float) if name == "dropout" else (type(usual),)
        for name, usual in vars(SMALL).items()
    }
    odd = [
        name for name, value in vars(shape).items() if type(value) not in kinds[name] or value < 0
    ]
    if (
        odd
        or not all((shape.d, shape.layers, shape.heads, shape.context, shape.vocab))
        or shape.d % shape.heads
        or not shape.dropout < 1
    ):
        raise ValueError(f"no GPT is {shape}")
    if (12 * shape.layers * shape.d + shape.context + shape.vocab) * shape.d > MAX_PARAMETERS:
        raise ValueError(
            f"{shape} has more parameters than the {MAX_PARAMETERS:,} that programs here train"
        )
    return lambda: GPT(shape)


def make_cuts(axes: Collection[str]) -> list[ModelCut]:
    """Cuts of a GPT along these axes of a mesh."""
    stages = pl.pipeline("tokens, positions, blocks.*, norm, head")
    known: dict[str, ModelCut] = {
        "tensor": pl.tensor("auto"),
        "stage": stages,
        "shard": pl.shard("blocks.*"),
    }
    return [cut for axis, cut in known.items() if axis in axes]


def next_token_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Return the mean cross entropy of logits (batch, tokens, vocab) against the tokens `y`
    (batch, tokens) that came next, in nats.
    """
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())
