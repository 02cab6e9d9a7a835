"""The ways to cut a module between workers, as a script writes them: `column(parts=3)`, `row()`."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.formatting import format_as_call


class Style:
    """A way to cut one module."""


@dataclass(frozen=True)
class column(Style):
    """Divide a linear layer's output features; a layer that is cut by rows takes them on.

    >>> pl.tensor({"*.attention.qkv": pl.column(parts=3), "*.attention.out": pl.row()})

    Args:
        parts: Number of parts of a fused projection, such as 3 for queries, keys and values. Each
            part is cut by itself. Default: 1.
        gather: Whether workers put their features side by side, and go on with all of them.
            Default: False.
    """

    __repr__ = format_as_call
    parts: int = 1
    gather: bool = False

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise UsageError(f"column(parts={self.parts}): a layer has 1 part or more")


@dataclass(frozen=True)
class row(Style):
    """Divide a linear layer's input features, and sum its results over workers.

    >>> pl.tensor({"blocks.*.up": pl.column(), "blocks.*.down": pl.row()})

    The bias is added to the sum, once.

    Args:
        split: Whether all workers have all features, and each takes its own. Default: False, for
            features that a layer cut by columns has divided.
    """

    __repr__ = format_as_call
    split: bool = False


@dataclass(frozen=True)
class vocab(Style):
    """Divide the words of an embedding, or of the linear layer that computes logits.

    >>> pl.tensor({"tokens": pl.vocab(), "head": pl.vocab()})

    Logits look whole. `F.cross_entropy` of them exchanges a few numbers per token; other functions
    gather them first.
    """

    __repr__ = format_as_call


@dataclass(frozen=True)
class sequence(Style):
    """Divide the sequence inside of this module between workers.

    >>> pl.tensor({"blocks": pl.sequence(), "blocks.*.up": pl.column(), "blocks.*.down": pl.row()})

    Layers that are cut by columns gather the sequence. Layers that are cut by rows give pieces on.
    All other layers in the module work on pieces: norms, dropout and other layers that treat each
    position by itself.

    Args:
        dim: Dimension of the sequence in the module's first argument and in its result. Default: 1.
    """

    __repr__ = format_as_call
    dim: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise UsageError(
                f"sequence(dim={self.dim}): count dimensions from the first, which is 0"
            )


@dataclass(frozen=True)
class summed(Style):
    """Keep a module whole where activations are divided; gradients of its parameters are summed.

    >>> pl.tensor({"*.query": pl.column(), "*.query_norm": pl.summed(), "*.out": pl.row()})

    Norms of single heads need that, between a layer cut by columns and one cut by rows.
    """

    __repr__ = format_as_call


@dataclass(frozen=True)
class experts(Style):
    """Divide the inner features of every expert of a mixture, as transformers implements them."""

    __repr__ = format_as_call
