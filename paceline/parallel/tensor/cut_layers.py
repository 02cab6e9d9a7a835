"""How cut layers compute: linear layers by columns or rows, embeddings and heads by vocabulary.

    column   x whole --- copy_input --> x  W[own rows] -----------------> own features
    row      own features ------------> x  W[:, own columns] --- sum_output --> sum + bias

From the column's output to the row's input, random numbers are each worker's own. A layer stays the
same object, with its hooks and the parameters that it has; its class becomes one that is derived
from it.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.parallel.tensor.exchanges import TensorAxis, exclude_from_compile
from paceline.parallel.tensor.vocab import VocabLogits
from paceline.parallel.torch_pytree import tree_map_only


@dataclass(frozen=True)
class LayerCut:
    """How one layer is cut, by which workers, and the layer's name.

    `parts`, `gather` and `split` are those of its style. `sequence` is the dimension that its
    region cuts, if it is in one. `vocabulary` is the number of words over all workers. `dims` says
    for each of its parameters along which dimension it is cut, and in how many parts.
    """

    axis: TensorAxis
    name: str
    parts: int = 1
    gather: bool = False
    split: bool = False
    sequence: int | None = None
    vocabulary: int = 0
    dims: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def prepare_column_input(self, x: Tensor) -> Tensor:
        """Prepare the input of a layer that is cut by columns: whole on each worker."""
        return (
            self.axis.copy_input(x, self.name)
            if self.sequence is None
            else self.axis.gather_input(x, self.sequence, self.name)
        )

    def finish_column_output(self, y: Tensor, training: bool) -> Tensor:
        """Finish the output of a layer that is cut by columns: own features, or all of them."""
        # Each of the parts is joined by itself, as each was cut by itself.
        if self.gather:
            return self.axis.join_output(y.unflatten(-1, (self.parts, -1)), -1, self.name).flatten(
                -2
            )
        if training and self.sequence is None:
            self.axis.enter_zone(y)
        return y

    def prepare_row_input(self, x: Tensor, features: int) -> Tensor:
        """Prepare the input of a layer that is cut by rows, which is cut already, or by `split`."""
        self.axis.forget_input()
        if self.sequence is None:
            self.axis.leave_zone(x)
        if self.split:
            return self.axis.split_input(x, -1, self.name)
        if x.shape[-1] != features:
            hint = (
                "cut the layer before it by column(), "
                "or say row(split=True) where each worker has all of them"
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

    def finish_row_output(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """Finish the output of a layer that is cut by rows. The bias is added to the sum, once."""
        y = (
            self.axis.sum_output(y, self.name)
            if self.sequence is None
            else self.axis.scatter_output(y, self.sequence, self.name)
        )
        return y if bias is None else y + bias.to(y.dtype)


class TensorCutModule(nn.Module):
    """Base class of cut layers."""

    tensor_cut: LayerCut


class ColumnLinear(TensorCutModule):
    """A linear layer whose output features are divided between workers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.tensor_cut.finish_column_output(
            super().forward(self.tensor_cut.prepare_column_input(x)), self.training
        )


class RowLinear(TensorCutModule):
    """An `nn.Linear` whose input features are divided between workers."""

    weight: Tensor
    bias: Tensor | None

    def forward(self, x: Tensor) -> Tensor:
        x = self.tensor_cut.prepare_row_input(x, self.weight.shape[1])
        return self.tensor_cut.finish_row_output(F.linear(x, self.weight), self._bias())

    def _bias(self) -> Tensor | None:
        """The bias. In a region its gradients are summed, as it is added to pieces."""
        if self.bias is None or self.tensor_cut.sequence is None:
            return self.bias
        return self.tensor_cut.axis.share_parameters([self.bias], f"{self.tensor_cut.name}.bias")[0]


class RowConv1D(RowLinear):
    """A `Conv1D` of transformers, a linear layer with transposed weight, cut by input features."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.tensor_cut.prepare_row_input(x, self.weight.shape[0])
        return self.tensor_cut.finish_row_output(x @ self.weight, self._bias())


class CutExperts(TensorCutModule):
    """Experts of a mixture, each with its inner features divided between workers."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        cut = self.tensor_cut
        floating = tree_map_only(
            Tensor,
            lambda x: cut.axis.copy_input(x, cut.name) if x.is_floating_point() else x,
            (args, kwargs),
        )
        out = super().forward(*floating[0], **floating[1])
        cut.axis.forget_input()
        return cut.axis.sum_output(out, cut.name)


class VocabEmbedding(TensorCutModule, nn.Embedding):
    """An embedding whose rows are divided. A row is the sum of one worker's row and zeros."""

    def forward(self, input: Tensor) -> Tensor:
        cut, rows, index = self.tensor_cut, self.weight.shape[0], input
        first = cut.axis.rank * rows
        _check_indices(index, cut)
        local = index - first
        # Rows of other workers are looked up at row 0, and set to zero afterwards.
        outside = (local < 0) | (local >= rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < rows else None
        embedded = F.embedding(local.masked_fill(outside, 0), self.weight, padding)
        return cut.axis.sum_output(embedded.masked_fill(outside.unsqueeze(-1), 0), cut.name)


class VocabHead(TensorCutModule):
    """A linear layer to logits, whose words are divided between workers."""

    def forward(self, x: Tensor) -> Tensor:
        cut = self.tensor_cut
        local = super().forward(cut.prepare_column_input(x))
        cut.axis.forget_input()
        return VocabLogits.wrap_part(local, cut.axis, cut.vocabulary, cut.name)


class SummedModule(TensorCutModule):
    """A module with whole parameters that each worker uses on its part of activations."""

    @exclude_from_compile
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        # `_parameters` is private to torch: the dict in which `nn.Module.__getattr__` looks
        # parameters up. While it is replaced, the module finds tensors whose gradients are summed.
        own = self._parameters
        trained = {
            name: parameter
            for name, parameter in own.items()
            if parameter is not None and parameter.requires_grad
        }
        if not trained or not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        shared = self.tensor_cut.axis.share_parameters(list(trained.values()), self.tensor_cut.name)
        self.__dict__["_parameters"] = {**own, **dict(zip(trained, shared, strict=True))}
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.__dict__["_parameters"] = own


class SequenceRegion(TensorCutModule):
    """A module that works on a piece of the sequence; its inputs and outputs are whole."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        axis, dim, name = self.tensor_cut.axis, self.tensor_cut.sequence or 0, self.tensor_cut.name
        if not args or not isinstance(args[0], Tensor) or args[0].dim() <= dim:
            raise UsageError(
                f"{name} is a region of sequence(dim={dim}): its first argument has to be a tensor "
                "with that dimension"
            )
        x = axis.split_input(args[0], dim, name)
        if self.training:
            axis.enter_zone(x)
        out = super().forward(x, *args[1:], **kwargs)
        axis.forget_input()
        axis.leave_zone(x)
        if isinstance(out, tuple) and out and isinstance(out[0], Tensor):
            return (axis.join_output(out[0], dim, name), *out[1:])
        if not isinstance(out, Tensor):
            raise UsageError(
                f"{name} is a region of sequence() and returns {type(out).__name__}; "
                "it has to return a tensor, or a tuple with one first"
            )
        return axis.join_output(out, dim, name)


def change_class(module: nn.Module, kind: type[TensorCutModule], cut: LayerCut) -> None:
    """Let a module compute as `kind` does. Otherwise it stays as it is."""
    module.__class__ = _derive_class(cast(Hashable, kind), cast(Hashable, type(module)))
    module.tensor_cut = cut  # type: ignore[assignment]


def find_uncut_class(module: nn.Module) -> type[nn.Module]:
    """Find the class that a module had before it was cut."""
    kinds: Any = type(module).__bases__ if isinstance(module, TensorCutModule) else [type(module)]
    original: type[nn.Module] = next(
        kind for kind in kinds if not issubclass(kind, TensorCutModule)
    )
    return original


@functools.cache
def _derive_class(kind: Any, of: Any) -> type[nn.Module]:
    """Derive a class from `of` that computes as `kind` does."""
    name = f"{kind.__name__}{of.__name__}" if of.__name__ not in kind.__name__ else kind.__name__
    # A subclass of an embedding, such as one that scales rows, works on the rows that `kind` looks
    # up.
    bases = (of, kind) if issubclass(of, nn.Embedding) and of is not nn.Embedding else (kind, of)
    derived: type[nn.Module] = type(name, bases, {})
    return derived


@exclude_from_compile
def _check_indices(index: Tensor, cut: LayerCut) -> None:
    """Raise `UsageError` for an index that is no row of the whole embedding.

    Every worker would take it for a row of another one. On a GPU, a private function of torch
    checks that without waiting for the device; a failure there ends the process.
    """
    if index.device.type != "cpu":
        torch._assert_async(((index >= 0) & (index < cut.vocabulary)).all())
    elif index.numel():
        low, high = torch.aminmax(index)
        if int(low) < 0 or int(high) >= cut.vocabulary:
            raise UsageError(
                f"{cut.name}: index {int(low if low < 0 else high)} is out of range; "
                f"it has {cut.vocabulary} rows"
            )
