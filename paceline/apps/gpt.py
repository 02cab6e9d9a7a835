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
    """The sizes of a GPT.

    Attributes:
        d: Width of the residual stream.
        layers: Number of blocks.
        heads: Number of attention heads in each block. It divides `d`.
        context: Largest number of tokens that the model sees at once.
        vocab: Number of different tokens.
        dropout: Probability of dropout.
        tied: Whether the embedding of tokens and the last layer share their weights.
    """

    d: int = 128
    layers: int = 4
    heads: int = 4
    context: int = 64
    vocab: int = 256
    dropout: float = 0.0
    tied: bool = False


MAX_PARAMETERS = 1 << 32  # most parameters of a model that a file may describe
SMALL = GPTShape()  # 0.9 M parameters
MEDIUM = GPTShape(d=512, layers=6, heads=8)  # 19 M parameters


class KeyValueCache:
    """The keys and values of all tokens so far, for each attention layer.

    Tensors are (batch, heads of this worker, context, d / heads). Each worker has those of its own
    layers. All workers count the same tokens.

    Attributes:
        length: Number of tokens that all layers have.
    """

    def __init__(self, context: int) -> None:
        self.length = 0
        self._context = context
        self._layer_tensors: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        self._extended_layers: set[nn.Module] = set()  # since the last `count_tokens`

    def extend_layer(self, layer: nn.Module, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add the keys and values of new tokens to a layer.

        Args:
            layer: The attention layer.
            keys: Keys of the new tokens, (batch, heads, new tokens, d / heads).
            values: Values of the new tokens, of the same shape.

        Returns:
            Keys and values of all tokens so far.

        Raises:
            UsageError: The number of rows has changed, or the layer is called twice for the same
                tokens with different rows.
        """
        # Allocate memory for the whole context. A cache that is empty may get another batch size.
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
                "came: call clear() before the number of rows changes"
            )
        # A layer may be called again for the same tokens, but only with the same keys and values.
        for cached, new in zip(self._layer_tensors[layer], (keys, values), strict=True):
            if layer in self._extended_layers and not torch.equal(
                cached[:, :, self.length : stop], new
            ):
                raise pl.UsageError(
                    "a layer was called twice for the same tokens, with different rows "
                    "(micro-batches of a pipeline): give one row at a time "
                    "to a GPT that caches keys and values on several stages"
                )
            cached[:, :, self.length : stop] = new
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
    """A vector for each position.

    While text is generated, positions are counted from the number of cached tokens.
    """

    cache: KeyValueCache | None = None

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input if self.cache is None else input + self.cache.length)


def draw_weights(layer: nn.Linear | nn.Embedding, *, added: int = 0) -> None:
    """Draw the weights of a layer from a normal distribution.

    Args:
        layer: The layer.
        added: Number of blocks, if the layer is one of the two in each block whose output is added
            to the residual stream. Their weights are smaller, so that the sum doesn't grow with the
            number of blocks. Default: the layer is none of them.
    """
    nn.init.normal_(layer.weight, std=0.02 / (math.sqrt(2 * added) if added else 1.0))
    if isinstance(layer, nn.Linear) and layer.bias is not None:
        nn.init.zeros_(layer.bias)


class Attention(nn.Module):
    """Causal self-attention: each token attends to itself and to earlier ones.

    Input and output are (batch, tokens, d).
    """

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.heads, self.dropout, self.layers = shape.heads, shape.dropout, shape.layers
        self.qkv = nn.Linear(shape.d, 3 * shape.d)
        self.out = nn.Linear(shape.d, shape.d)
        self.cache: KeyValueCache | None = None  # only while text is generated

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
        """Attend from the newest tokens to all tokens so far.

        Args:
            q: Queries of the newest tokens.
            k: Keys of all tokens so far.
            v: Values of all tokens so far.
        """
        new, total = q.shape[2], k.shape[2]
        # The newest token sees all others, the one before it all but the newest, and so on.
        mask = (
            torch.ones(new, total, dtype=torch.bool, device=q.device).tril(total - new)
            if new > 1
            else None
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class Block(nn.Module):
    """Attention and a two-layer perceptron. The output of each is added to its input."""

    def __init__(self, shape: GPTShape) -> None:
        super().__init__()
        self.before_attention, self.before_perceptron = nn.LayerNorm(shape.d), nn.LayerNorm(shape.d)
        self.attention = Attention(shape)
        self.up, self.down = nn.Linear(shape.d, 4 * shape.d), nn.Linear(4 * shape.d, shape.d)
        self.layers = shape.layers
        self.dropout = nn.Dropout(shape.dropout)

    def reset_parameters(self) -> None:
        """Draw the weights of the attention, then those of the perceptron."""
        self.attention.reset_parameters()
        draw_weights(self.up)
        draw_weights(self.down, added=self.layers)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.before_attention(x)))
        out: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.before_perceptron(x)))))
        return out


class GPT(nn.Module):
    """A GPT: tokens (batch, tokens) in, logits of the next tokens (batch, tokens, vocab) out.

    `tensor_plan` is the plan of `pl.tensor("auto")`. It costs each block two sums in the forward
    pass and two in the backward pass. No worker has all logits.
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
        """Draw the weights outside of the blocks. Each block draws its own."""
        for layer in (self.tokens, self.positions, self.head):
            draw_weights(layer)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        logits: Tensor = self.head(self.norm(self.blocks(x)))
        return logits

    @contextlib.contextmanager
    def cache_tokens(self) -> Iterator[KeyValueCache]:
        """Cache keys and values inside of the `with` block, in eval mode.

        A call of the model in the block gets new tokens only. Tell the cache their number with
        `count_tokens`, so that the next call continues after them.
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
    """Make a function that builds a GPT.

    Args:
        fields: Fields of a `GPTShape`, as the folder of a run has them.

    Raises:
        ValueError: A value is impossible, or the model is too large.
        TypeError: A name is unknown.
    """
    shape = GPTShape(**fields)
    # The fields come from a file, so types and values are checked.
    types = {
        name: (int, float) if name == "dropout" else (type(default),)
        for name, default in vars(SMALL).items()
    }
    wrong_names = [
        name for name, value in vars(shape).items() if type(value) not in types[name] or value < 0
    ]
    if (
        wrong_names
        or not all((shape.d, shape.layers, shape.heads, shape.context, shape.vocab))
        or shape.d % shape.heads
        or not shape.dropout < 1
    ):
        raise ValueError(f"no GPT can have these sizes: {shape}")
    # A block has about 12 * d * d parameters.
    if (12 * shape.layers * shape.d + shape.context + shape.vocab) * shape.d > MAX_PARAMETERS:
        raise ValueError(f"{shape} has more than {MAX_PARAMETERS:,} parameters, which is the limit")
    return lambda: GPT(shape)


def make_cuts(axes: Collection[str]) -> list[ModelCut]:
    """Make the cuts of a GPT along these axes of a mesh."""
    stages = pl.pipeline("tokens, positions, blocks.*, norm, head")
    cut_by_axis: dict[str, ModelCut] = {
        "tensor": pl.tensor("auto"),
        "stage": stages,
        "shard": pl.shard("blocks.*"),
    }
    return [cut for axis, cut in cut_by_axis.items() if axis in axes]


def next_token_loss(logits: Tensor, y: Tensor) -> Tensor:
    """Compute the mean cross entropy, in nats.

    Args:
        logits: Logits of the model, (batch, tokens, vocab).
        y: Tokens that came next, (batch, tokens).
    """
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())
