"""The ways in which a module is cut between workers, as they are written: `column(parts=3)`,
`row()`.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.formatting import spell


class Style:
    """A way to cut one module."""


@dataclass(frozen=True)
class column(Style):
    """Each worker has some of a linear layer's output features, and gives them on to a layer that
    is cut by rows.

    >>> pl.tensor({"blocks.*.attention.qkv": pl.column(parts=3), "blocks.*.attention.out": pl.row()})

    `parts`: a fused projection, such as that of queries, keys and values, has so many parts, and
    each is cut by itself. `gather`: workers put their features side by side, and go on with all of
    them.
    """  # noqa: E501

    __repr__ = spell
    parts: int = 1
    gather: bool = False

    def __post_init__(self) -> None:
        if self.parts < 1:
            raise UsageError(f"column(parts={self.parts}): a layer has 1 part or more")


@dataclass(frozen=True)
class row(Style):
    """Each worker has some of a linear layer's input features, and the results are summed over
    workers. The bias is added to the sum.

    >>> pl.tensor({"blocks.*.up": pl.column(), "blocks.*.down": pl.row()})

    `split`: all workers have all features, and each takes its own.
    """

    __repr__ = spell
    split: bool = False


@dataclass(frozen=True)
class vocab(Style):
    """Each worker has some of the words: of an embedding, or of the linear layer that makes logits.

    >>> pl.tensor({"tokens": pl.vocab(), "head": pl.vocab()})

    Logits look whole, and `F.cross_entropy` of them exchanges a few numbers per token; what else is
    done with them gathers them first.
    """

    __repr__ = spell


@dataclass(frozen=True)
class sequence(Style):
    """Inside of this module each worker has a piece of the sequence, which is dimension `dim` of
    its first argument and of its result.

    >>> pl.tensor({"blocks": pl.sequence(), "blocks.*.up": pl.column(), "blocks.*.down": pl.row()})

    Layers that are cut by columns gather it, those that are cut by rows give pieces on. Everything
    else in it works on pieces: norms, dropout and other layers that treat each position by itself.
    """

    __repr__ = spell
    dim: int = 1

    def __post_init__(self) -> None:
        if self.dim < 0:
            raise UsageError(
                f"sequence(dim={self.dim}): count dimensions from the first, which is 0"
            )


@dataclass(frozen=True)
class summed(Style):
    """The module stays whole, and each worker uses it on its part of the activations: gradients of
    its parameters are summed.

    >>> pl.tensor({"blocks.*.query": pl.column(), "blocks.*.query_norm": pl.summed(), "blocks.*.out": pl.row()})

    That is what norms of single heads need, between a layer cut by columns and one cut by rows.
    """  # noqa: E501

    __repr__ = spell


@dataclass(frozen=True)
class experts(Style):
    """The experts of a mixture, as transformers has them: each worker has some inner features of
    every expert.
    """

    __repr__ = spell
