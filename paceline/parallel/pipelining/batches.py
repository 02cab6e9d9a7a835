"""The share of a batch that a pipeline gets in one step, cut into micro-batches along the first
dimension of its tensors.

x  7 rows, 3 micro-batches        rows 0 1 2 | 3 4 | 5 6        the loss of each counts by its rows:
                                                                3/7, 2/7, 2/7
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group import pieces
from paceline.errors import UsageError
from paceline.parallel.containers import tree_leaves, tree_map
from paceline.parallel.pipelining.executor import MicroBatch
from paceline.parallel.pipelining.values import Values

Loss = Callable[[Any, Any], Tensor]
Weigh = Callable[[Any], float]


@dataclass(frozen=True)
class Share:
    """What `run.step` was given.

    `reduction`: "mean" or "sum" over samples, or over what `weigh` counts; `scale`: that of a
    GradScaler.

    `weight` is what all of the share weighs, where it is known: micro-batches have to add up to it.
    Tensors of the target that have other than the inputs' rows, such as weights of classes, go to
    the loss of each micro-batch whole.
    """

    inputs: tuple[Any, ...]
    options: Mapping[str, Any]
    target: Any
    loss: Loss | None
    reduction: str = "mean"
    weigh: Weigh | None = None
    scale: float = 1.0
    weight: float | None = None

    @property
    def rows(self) -> int:
        """The samples: the length of the first dimension of the tensors.

        Raises `UsageError` where these differ.
        """
        found = {
            tuple(leaf.shape)[:1]
            for leaf in tree_leaves((self.inputs, dict(self.options)))
            if isinstance(leaf, Tensor)
        }
        sizes = {shape[0] for shape in found if shape}
        if len(sizes) > 1:
            raise UsageError(
                f"run.step got tensors of {' and '.join(map(str, sorted(sizes)))} rows, and cuts "
                "all of them into micro-batches"
            )
        return sizes.pop() if sizes else 1

    def worth(self, batch: MicroBatch) -> float:
        """Return what the loss of a micro-batch counts in that of the share; nothing, for one
        without rows of its own.
        """
        return 0.0 if not batch.rows else 1.0 if self.reduction == "sum" else batch.part

    def criterion(self, output: Any, batch: MicroBatch) -> tuple[Tensor, float]:
        """Return what is gone back from, and the loss of a micro-batch as a number."""
        assert self.loss is not None
        loss = one_number(self.loss(output, batch.target), "run.step")
        worth = self.worth(batch)
        if worth == 0:  # a mean over nothing is no number, and must not reach the gradients
            tensors = [
                leaf
                for leaf in tree_leaves(output)
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            nothing = sum((tensor.sum() * 0 for tensor in tensors), torch.zeros(()))
            return nothing, 0.0
        root = loss if worth * self.scale == 1 else loss * (worth * self.scale)
        return root, float(loss.detach())

    def whole(self, outputs: Sequence[Any]) -> Any:
        """Put outputs of micro-batches together, in their order."""
        if len(outputs) == 1:
            return outputs[0]
        rows = zip(*map(tree_leaves, outputs), strict=True)
        joined = iter(
            [torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0] for leaves in rows]
        )
        return tree_map(lambda _: next(joined), outputs[0])


def refuse_class(where: str, loss: Any) -> None:
    """Raise `UsageError` for the class of a loss, such as nn.MSELoss, which a call would make
    one of.
    """
    if isinstance(loss, type):
        raise UsageError(
            f"{where}: loss={loss.__name__} is the class itself; make one of it: "
            f"loss={loss.__name__}()"
        )


def one_number(loss: Any, where: str) -> Tensor:
    """Return a loss as it is. Raises `UsageError` where it isn't one number."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = (
            f"a tensor of shape {list(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"a {type(loss).__qualname__}"
        )
        raise UsageError(
            f"{where}: the loss is {kind}, and has to be one number: loss=F.cross_entropy, for "
            "example"
        )
    return loss


def cut_batch(
    share: Share, count: int, bind: Callable[[tuple[Any, ...], Mapping[str, Any]], Values] | None
) -> list[MicroBatch]:
    """Cut a share into `count` micro-batches, which count nothing beyond its rows.

    `bind` names the inputs of the model, on the worker that has the first stage.
    """
    rows = share.rows
    ranges = pieces(rows, min(count, max(rows, 1)))
    ranges += [(0, min(rows, 1))] * (count - len(ranges))  # copies of the first row
    parts = [
        _slice((share.inputs, dict(share.options), share.target), rows, *ends) for ends in ranges
    ]
    weights = [
        float(stop - start) if number < rows else 0.0 for number, (start, stop) in enumerate(ranges)
    ]
    if share.weigh is not None:
        found = [
            float(share.weigh((*inputs, *options.values(), target)))
            for inputs, options, target in parts
        ]
        weights = [weight if number < rows else 0.0 for number, weight in enumerate(found)]
        if any(not 0 <= weight < math.inf for weight in weights):
            raise UsageError(
                f"run.step: weigh gave {weights} for micro-batches; a weight is a number, zero or "
                "more"
            )
        if share.weight is not None and not math.isclose(
            math.fsum(weights), share.weight, rel_tol=1e-6
        ):
            raise UsageError(
                f"run.step: the loader's weigh gives {share.weight:g} for the batch, and "
                f"{math.fsum(weights):g} for its micro-batches, "
                "which are tuples of all that run.step gets, the target last: "
                "say run.step(..., weigh=function of such a tuple)"
            )
    whole = math.fsum(weights) or 1.0
    return [
        MicroBatch(
            {} if bind is None else bind(inputs, options),
            target,
            weight / whole,
            stop - start if number < rows else 0,
        )
        for number, ((inputs, options, target), weight, (start, stop)) in enumerate(
            zip(parts, weights, ranges, strict=True)
        )
    ]


def _slice(values: Any, rows: int, start: int, stop: int) -> Any:
    if stop - start == rows:
        return values
    return tree_map(
        lambda leaf: (
            leaf[start:stop]
            if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows
            else leaf
        ),
        values,
    )
