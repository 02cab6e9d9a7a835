"""How layers compute where workers cut them between them: linear layers by columns or rows,
embeddings and heads by vocabulary, regions.

    column   x whole --- copy --> x  W[my rows] -----------------> my features       ( random
                                     numbers of my own from here ... )
    row      my features ------------------> x  W[:, my columns] --- total --> sum + bias     ( ...
                                                to here )

A layer stays the object that it is, with its hooks and the parameters that are its own: its class
becomes one that is derived from it.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from paceline.errors import UsageError
from paceline.parallel.tensor.functions import TensorAxis, eager
from paceline.parallel.tensor.vocab import VocabLogits


@dataclass(frozen=True)
class LayerCut:
    """How one layer is cut: the workers that do it, the layer's name, and what is special.

    `sequence`: the dimension that its region cuts; `vocabulary`: the number of words of all
    workers; `dims`: along which dimension each of its parameters is cut, and in how many parts.
    """

    axis: TensorAxis
    name: str
    parts: int = 1
    gather: bool = False
    split: bool = False
    sequence: int | None = None
    vocabulary: int = 0
    dims: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def into(self, x: Tensor) -> Tensor:
        """Take the input of a layer that is cut by columns."""
        return (
            self.axis.copy(x, self.name)
            if self.sequence is None
            else self.axis.gather(x, self.sequence, self.name)
        )

    def features(self, y: Tensor, training: bool) -> Tensor:
        """Give on the output of a layer that is cut by columns: my features, or all of them in
        their order.
        """
        if self.gather:
            return self.axis.join(y.unflatten(-1, (self.parts, -1)), -1, self.name).flatten(-2)
        if training and self.sequence is None:
            self.axis.enter(y)
        return y

    def part(self, x: Tensor, features: int) -> Tensor:
        """Take the input of a layer that is cut by rows, which is cut already but for `split`."""
        self.axis.forget()
        if self.sequence is None:
            self.axis.leave(x)
        if self.split:
            return self.axis.split(x, -1, self.name)
        if x.shape[-1] != features:
            hint = (
                "cut the layer before it by column(), or say row(split=True) where each worker has "
                "all of them"
            )
            if self.sequence is not None:
                hint += (
                    "; inside of sequence(), sizes are those of what a layer returns, and not "
                    "those of its input"
                )
            raise UsageError(
                f"{self.name} is cut by rows and takes {features} features of each worker, not "
                f"{x.shape[-1]}; {hint}"
            )
        return x

    def sum(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Give on the output of a layer that is cut by rows. The bias is added to the sum, once."""
        y = (
            self.axis.total(y, self.name)
            if self.sequence is None
            else self.axis.scatter(y, self.sequence, self.name)
        )
        return y if bias is None else y + bias.to(y.dtype)


class TensorCutModule(nn.Module):
    """What the classes of cut layers have in common."""

    tensor_cut: LayerCut


class Column(TensorCutModule):
    """A linear layer of which each worker has some of the output features."""

    def forward(self, x: Tensor) -> Tensor:
        return self.tensor_cut.features(super().forward(self.tensor_cut.into(x)), self.training)


class RowLinear(TensorCutModule):
    """An `nn.Linear` of which each worker has some of the input features."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        x = self.tensor_cut.part(x, self.weight.shape[1])
        return self.tensor_cut.sum(F.linear(x, self.weight), self._bias())

    def _bias(self) -> Tensor | None:
        """Return the bias; what each worker adds to its piece of a sequence gets a part of the
        gradient there.
        """
        if self.bias is None or self.tensor_cut.sequence is None:
            return self.bias
        return self.tensor_cut.axis.shared([self.bias], f"{self.tensor_cut.name}.bias")[0]


class RowConv1D(RowLinear):
    """A `Conv1D` of transformers, which is a linear layer with its weight transposed, of which
    each worker has some input features.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = self.tensor_cut.part(x, self.weight.shape[0])
        return self.tensor_cut.sum(x @ self.weight, self._bias())


class Experts(TensorCutModule):
    """Experts of a mixture, of each of which a worker has some of the inner features."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        cut = self.tensor_cut
        floating = tree_map_only(
            Tensor,
            lambda x: cut.axis.copy(x, cut.name) if x.is_floating_point() else x,
            (args, kwargs),
        )
        out = super().forward(*floating[0], **floating[1])
        cut.axis.forget()
        return cut.axis.total(out, cut.name)


class VocabEmbedding(TensorCutModule, nn.Embedding):
    """An embedding of which each worker has some of the rows: others are zeros, and the sum over
    workers is the row.
    """

    def forward(self, input: Tensor) -> Tensor:
        cut, rows, index = self.tensor_cut, self.weight.shape[0], input
        first = cut.axis.rank * rows
        _in_range(index, cut)
        local = index - first
        outside = (local < 0) | (local >= rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < rows else None
        found = F.embedding(local.masked_fill(outside, 0), self.weight, padding)
        return cut.axis.total(found.masked_fill(outside.unsqueeze(-1), 0), cut.name)


class VocabHead(TensorCutModule):
    """A linear layer to logits, of which each worker has those of some words."""

    def forward(self, x: Tensor) -> Tensor:
        cut = self.tensor_cut
        local = super().forward(cut.into(x))
        cut.axis.forget()
        return VocabLogits.of(local, cut.axis, cut.vocabulary, cut.name)


class Summed(TensorCutModule):
    """A module with whole parameters that each worker uses on its part of the activations: their
    gradients are summed over workers.
    """

    @eager
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        own = self._parameters
        trained = {
            name: parameter
            for name, parameter in own.items()
            if parameter is not None and parameter.requires_grad
        }
        if not trained or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        shared = self.tensor_cut.axis.shared(list(trained.values()), self.tensor_cut.name)
        # the module finds them under their names
        self.__dict__["_parameters"] = {**own, **dict(zip(trained, shared, strict=True))}
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_parameters"] = own


class SequenceRegion(TensorCutModule):
    """A module inside of which each worker has a piece of the sequence.

    What comes in and what goes out is whole.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        axis, dim, name = self.tensor_cut.axis, self.tensor_cut.sequence or 0, self.tensor_cut.name
        if not args or not isinstance(args[0], Tensor) or args[0].dim() <= dim:
            raise UsageError(
                f"{name} is a region of sequence(dim={dim}): its first argument has to be a tensor "
                "with that dimension"
            )
        x = axis.split(args[0], dim, name)
        if self.training:
            axis.enter(x)
        out = super().forward(x, *args[1:], **kwargs)
        axis.forget()
        axis.leave(x)
        if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
            return (axis.join(out[0], dim, name), *out[1:])
        if not isinstance(out, Tensor):
            raise UsageError(
                f"{name} is a region of sequence() and returns {type(out).__name__}; "
                "it has to return a tensor, or a tuple with one first"
            )
        return axis.join(out, dim, name)


def become(module: nn.Module, kind: type[TensorCutModule], cut: LayerCut) -> None:
    """Let a module compute as `kind` does, and stay what it is otherwise."""
    module.__class__ = _derived(cast(Hashable, kind), cast(Hashable, type(module)))
    module.tensor_cut = cut  # type: ignore[assignment]


def uncut_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before it was cut."""
    kinds: Any = type(module).__bases__ if isinstance(module, TensorCutModule) else [type(module)]
    found: type[nn.Module] = next(kind for kind in kinds if not issubclass(kind, TensorCutModule))
    return found


@functools.cache
def _derived(kind: Any, of: Any) -> type[nn.Module]:
    name = f"{kind.__name__}{of.__name__}" if of.__name__ not in kind.__name__ else kind.__name__
    # What an embedding's own class does, such as to scale the rows, is done to what `kind` looks
    # up.
    bases = (of, kind) if issubclass(of, nn.Embedding) and of is not nn.Embedding else (kind, of)
    found: type[nn.Module] = type(name, bases, {})
    return found


@eager
def _in_range(index: Tensor, cut: LayerCut) -> None:
    """Raise for what is no row of the whole embedding: each worker would take it for another's."""
    if index.device.type != "cpu":
        torch._assert_async(((index >= 0) & (index < cut.vocabulary)).all())
    elif index.numel():
        low, high = torch.aminmax(index)
        if int(low) < 0 or int(high) >= cut.vocabulary:
            raise UsageError(
                f"{cut.name}: index {int(low if low < 0 else high)} is out of range; "
                f"it has {cut.vocabulary} rows"
            )
