"""A worker's share of a batch in one step of a pipeline, cut into micro-batches by rows.

x  7 rows, 3 micro-batches    rows 0 1 2 | 3 4 | 5 6    losses are weighted by rows: 3/7, 2/7, 2/7
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.comm.group_protocol import piece_bounds
from paceline.errors import UsageError
from paceline.parallel.containers import tree_leaves, tree_map
from paceline.parallel.pipelining.executor import MicroBatch
from paceline.parallel.pipelining.stage_messages import Values

Loss = Callable[[Any, Any], Tensor]
Weigh = Callable[[Any], float]


@dataclass(frozen=True)
class BatchShare:
    """The arguments of `run.step`.

    Tensors of the target with another number of rows than the inputs, such as weights of classes,
    go to the loss of each micro-batch as they are.

    Attributes:
        inputs: Positional arguments of the model.
        options: Keyword arguments of the model.
        target: Second argument of the loss.
        loss: Function of the output and the target. None in a forward alone.
        reduction: "mean" or "sum" over samples, or over the weight that `weigh` gives. Default:
            "mean".
        weigh: Weight of a tuple of inputs and target. Default (None): its number of rows.
        scale: Scale of a GradScaler. Default: 1.
        weight: Weight of the whole share, if it is known; those of micro-batches must add up to it.
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
        """Number of samples: the length of the tensors' first dimension.

        Raises `UsageError` if tensors differ in it.
        """
        shapes = {
            tuple(leaf.shape)[:1]
            for leaf in tree_leaves((self.inputs, dict(self.options)))
            if isinstance(leaf, Tensor)
        }
        sizes = {shape[0] for shape in shapes if shape}
        if len(sizes) > 1:
            raise UsageError(
                f"run.step got tensors of {' and '.join(map(str, sorted(sizes)))} rows, and cuts "
                "all of them into micro-batches"
            )
        return sizes.pop() if sizes else 1

    def loss_weight(self, batch: MicroBatch) -> float:
        """Weight of a micro-batch's loss in the share's loss; 0 for one without own rows."""
        return 0.0 if not batch.rows else 1.0 if self.reduction == "sum" else batch.part

    def compute_loss(self, output: Any, batch: MicroBatch) -> tuple[Tensor, float]:
        """Compute a micro-batch's loss: the tensor for backward, and the loss as a number."""
        assert self.loss is not None
        loss = check_scalar_loss(self.loss(output, batch.target), "run.step")
        worth = self.loss_weight(batch)
        # The mean over no rows is NaN, and must not reach the gradients. They become zeros, so that
        # all workers have the same ones.
        if worth == 0:
            tensors = [
                leaf
                for leaf in tree_leaves(output)
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            nothing = sum((tensor.sum() * 0 for tensor in tensors), torch.zeros(()))
            return nothing, 0.0
        root = loss if worth * self.scale == 1 else loss * (worth * self.scale)
        return root, float(loss.detach())

    def join_outputs(self, outputs: Sequence[Any]) -> Any:
        """Put outputs of micro-batches together, in their order."""
        if len(outputs) == 1:
            return outputs[0]
        rows = zip(*map(tree_leaves, outputs), strict=True)
        joined = iter(
            [torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0] for leaves in rows]
        )
        return tree_map(lambda _: next(joined), outputs[0])


def refuse_loss_class(where: str, loss: Any) -> None:
    """Raise `UsageError` for the class of a loss, such as nn.MSELoss, instead of an instance."""
    if isinstance(loss, type):
        raise UsageError(
            f"{where}: loss={loss.__name__} is the class itself; make one of it: "
            f"loss={loss.__name__}()"
        )


def check_scalar_loss(loss: Any, where: str) -> Tensor:
    """Return a loss that is one number. Raises `UsageError` for any other."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = (
            f"a tensor of shape {list(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"a {type(loss).__qualname__}"
        )
        raise UsageError(
            f"{where}: the loss is {kind}, and has to be one number: "
            "loss=F.cross_entropy, for example"
        )
    return loss


def cut_batch(
    share: BatchShare,
    count: int,
    bind: Callable[[tuple[Any, ...], Mapping[str, Any]], Values] | None,
) -> list[MicroBatch]:
    """Cut a share into `count` micro-batches.

    If it has fewer rows, the last micro-batches are copies of the first row, with weight 0: other
    workers wait for this one in each micro-batch. `bind` names the inputs of the model; it is None
    on workers without the first stage.
    """
    rows = share.rows
    ranges = piece_bounds(rows, min(count, max(rows, 1)))
    ranges += [(0, min(rows, 1))] * (count - len(ranges))
    parts = [
        _slice_rows((share.inputs, dict(share.options), share.target), rows, *ends)
        for ends in ranges
    ]
    # Copies weigh nothing. Others weigh their rows, or what `weigh` says of them.
    weights = [
        float(stop - start) if index < rows else 0.0 for index, (start, stop) in enumerate(ranges)
    ]
    if share.weigh is not None:
        given_weights = [
            float(share.weigh((*inputs, *options.values(), target)))
            for inputs, options, target in parts
        ]
        weights = [weight if index < rows else 0.0 for index, weight in enumerate(given_weights)]
        if any(not 0 <= weight < math.inf for weight in weights):
            raise UsageError(
                f"run.step: weigh gave {weights} for micro-batches; "
                "a weight is a number, zero or more"
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
            stop - start if index < rows else 0,
        )
        for index, ((inputs, options, target), weight, (start, stop)) in enumerate(
            zip(parts, weights, ranges, strict=True)
        )
    ]


def _slice_rows(values: Any, rows: int, start: int, stop: int) -> Any:
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
