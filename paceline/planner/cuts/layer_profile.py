"""Measured layers of a model as plain data, for pipelines and for activation checkpoints.

Layers are measured with micro-batches of a few sizes. Other sizes lie on the line between the
nearest two.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from paceline.parallel.pipelining.split import LayerCost

# A layer is worth an activation checkpoint if it keeps at least this part of all activations.
LEAST_PART: Final = 0.03


@dataclass(frozen=True)
class LayerSteps:
    """Costs of all layers for a micro-batch.

    Attributes:
        samples: Samples of the micro-batch.
        costs: Cost of each layer, in the order of the forward.
    """

    samples: int
    costs: tuple[LayerCost, ...]


@dataclass(frozen=True)
class CheckpointedLayers:
    """Layers that are worth an activation checkpoint, which computes them again in backward.

    Attributes:
        names: Paths of their modules.
        saved_bytes: Bytes that autograd keeps less of the whole global batch, if the layer that is
            being computed again doesn't count.
    """

    names: tuple[str, ...] = ()
    saved_bytes: int = 0


def choose_checkpointed(costs: Sequence[LayerCost]) -> tuple[str, ...]:
    """Choose the layers that are worth an activation checkpoint.

    The last layer never is, as its backward comes at once.
    """
    total = sum(cost.kept for cost in costs)
    return tuple(cost.name for cost in costs[:-1] if cost.kept >= LEAST_PART * total > 0)


def shorten_names(names: Sequence[str]) -> list[str]:
    """Shorten names of layers that differ in a number: "blocks.0", "blocks.1" to "blocks.*"."""
    patterns = (re.sub(r"\.[0-9]+(?=\.|$)", ".*", name) for name in names)
    return list(dict.fromkeys(patterns))


def find_repeated(names: Sequence[str]) -> tuple[str, ...]:
    """Find patterns of layers of which there are several: ("blocks.*",)."""
    return tuple(
        pattern
        for pattern in shorten_names(names)
        if sum(shorten_names([name]) == [pattern] for name in names) > 1
    )


def predict_layers(steps: Sequence[LayerSteps], samples: float) -> tuple[LayerCost, ...]:
    """Predict the costs of all layers for a micro-batch of `samples` samples."""
    if len(steps) == 1:
        return steps[0].costs
    upper = next((i for i, step in enumerate(steps) if step.samples >= samples), len(steps) - 1)
    low, high = steps[max(upper - 1, 0)], steps[max(upper, 1)]
    way = (samples - low.samples) / (high.samples - low.samples)

    def between(start: float, end: float) -> float:
        return max(start + way * (end - start), 0.0)

    return tuple(
        replace(
            one,
            forward_seconds=between(one.forward_seconds, other.forward_seconds),
            backward_seconds=between(one.backward_seconds, other.backward_seconds),
            kept=round(between(one.kept, other.kept)),
            sends=round(between(one.sends, other.sends)),
            returns=round(between(one.returns, other.returns)),
        )
        for one, other in zip(low.costs, high.costs, strict=True)
    )


def sum_seconds(costs: Sequence[LayerCost]) -> float:
    """Sum up the seconds of layers, forward and backward."""
    return sum(cost.forward_seconds + cost.backward_seconds for cost in costs)


def recompute_layers(
    costs: Sequence[LayerCost], checkpointed: Sequence[str]
) -> tuple[LayerCost, ...]:
    """Change the costs of layers into those with activation checkpoints.

    A checkpointed layer keeps what it takes, and goes forward once more in its backward.
    """
    changed = []
    for index, cost in enumerate(costs):
        if cost.name in checkpointed:
            taken = costs[index - 1].sends if index else 0
            cost = replace(
                cost,
                backward_seconds=cost.backward_seconds + cost.forward_seconds,
                kept=min(taken, cost.kept),
            )
        changed.append(cost)
    return tuple(changed)


def join_layers(measured: Sequence[Sequence[LayerSteps]]) -> tuple[LayerSteps, ...]:
    """Join what several processes measured at the same time: the medians of their seconds."""
    joined = []
    for column in zip(*measured, strict=True):
        costs = tuple(
            replace(
                row[0],
                forward_seconds=statistics.median(each.forward_seconds for each in row),
                backward_seconds=statistics.median(each.backward_seconds for each in row),
            )
            for row in zip(*(each.costs for each in column), strict=True)
        )
        joined.append(LayerSteps(column[0].samples, costs))
    return tuple(joined)
