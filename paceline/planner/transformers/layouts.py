"""All layouts of a transformer on a cluster, each with its price and its memory, best first.

>>> best = plan_transformer(model, cluster)[0]
>>> best.layout.describe(), best.seconds, best.fits
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from paceline.errors import UsageError
from paceline.planner.transformers.device import DeviceCluster
from paceline.planner.transformers.parallel_layout import (
    ParallelLayout,
    Recompute,
    explain_impossible,
)
from paceline.planner.transformers.transformer import Transformer
from paceline.planner.transformers.transformer_cost import (
    DEFAULT_TRAITS,
    FrameworkTraits,
    StepCost,
    price_layout,
)
from paceline.planner.transformers.transformer_memory import (
    DeviceMemory,
    count_device_memory,
    fits_cluster,
)

# Schedules that are tried, with their stages on each worker.
TRIED_SCHEDULES = (
    ("1f1b", 1),
    ("interleaved", 2),
    ("interleaved", 3),
    ("interleaved", 4),
    ("zero-bubble", 1),
    ("zbv", 2),
)
LARGEST_MICRO_BATCH = 64
REFINED = 50  # layouts that are priced exactly
# Mean error of seconds on published tables, see docs/planner-validation.md: 5 % on one host; on
# several hosts it is 2 to 4 %, but with settings that were chosen with those tables in sight.
TYPICAL_ERROR = 0.05
Keep = Callable[[ParallelLayout], bool]


@dataclass(frozen=True)
class ScoredLayout:
    """A layout with what it costs.

    Attributes:
        layout: The layout.
        cost: Seconds of a step with their parts, and bytes sent.
        memory: Bytes on the device that needs the most.
        fits: Whether the device has room for them.
        samples_per_second: Samples of all devices together.
    """

    layout: ParallelLayout
    cost: StepCost
    memory: DeviceMemory
    fits: bool
    samples_per_second: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return self.cost.seconds

    @property
    def uncertainty(self) -> float:
        """Seconds by which a step may be shorter or longer, as a mean over published tables."""
        return TYPICAL_ERROR * self.seconds

    @property
    def shares(self) -> Mapping[str, float]:
        """Share of the step that the busiest device spends on each thing. They add up to 1."""
        cost = self.cost
        parts = {
            "compute": cost.compute,
            "recompute": cost.again,
            "tensor exchange": cost.tensor,
            "waiting for stages": cost.bubble,
            "gradient exchange": cost.gradients,
            "optimizer": cost.optimizer,
        }
        return {name: seconds / cost.seconds for name, seconds in parts.items()}


def list_layouts(model: Transformer, devices: int) -> Iterator[ParallelLayout]:
    """List all possible layouts on so many devices.

    Micro-batches are those of the model, or else all powers of two that divide the batch.
    """
    for tensor in _list_divisors(devices):
        for pipeline in _list_divisors(devices // tensor):
            data = devices // (tensor * pipeline)
            if explain_impossible(model, ParallelLayout(tensor, pipeline, data)):
                continue
            yield from _list_variants(model, tensor, pipeline, data)


def _list_variants(
    model: Transformer, tensor: int, pipeline: int, data: int
) -> Iterator[ParallelLayout]:
    """List the layouts with given numbers of workers."""
    schedules = TRIED_SCHEDULES if pipeline > 1 else TRIED_SCHEDULES[:1]
    for micro_batch in _list_micro_batches(model, data):
        for schedule, chunks in schedules:
            for recompute in get_args(Recompute):
                for sequence_parallel in (False, True):
                    for sharding in range(4):
                        layout = ParallelLayout(
                            tensor,
                            pipeline,
                            data,
                            micro_batch,
                            schedule,
                            chunks,
                            recompute,
                            sequence_parallel,
                            sharding,
                        )
                        if not explain_impossible(model, layout):
                            yield layout


def _list_micro_batches(model: Transformer, data: int) -> list[int]:
    """List the micro-batches that divide a copy's part of the batch."""
    own = model.global_batch // data
    if model.micro_batch is not None:
        return [] if own % model.micro_batch else [model.micro_batch]
    sizes = [2**power for power in range(LARGEST_MICRO_BATCH.bit_length())]
    return [size for size in sizes if own % size == 0]


@lru_cache(maxsize=1024)
def _list_divisors(number: int) -> tuple[int, ...]:
    return tuple(size for size in range(1, number + 1) if number % size == 0)


def score_layout(
    model: Transformer,
    cluster: DeviceCluster,
    layout: ParallelLayout,
    traits: FrameworkTraits = DEFAULT_TRAITS,
    *,
    exact: bool = True,
) -> ScoredLayout:
    """Score a layout: its price, and its memory. Arguments are those of `price_layout`."""
    cost = price_layout(model, cluster, layout, traits, exact=exact)
    memory = count_device_memory(model, layout, traits.states)
    return ScoredLayout(
        layout, cost, memory, fits_cluster(memory, cluster), model.global_batch / cost.seconds
    )


def plan_transformer(
    model: Transformer,
    cluster: DeviceCluster,
    traits: FrameworkTraits = DEFAULT_TRAITS,
    *,
    keep: Keep | None = None,
) -> tuple[ScoredLayout, ...]:
    """Score all layouts of a transformer on a cluster.

    Args:
        model: The transformer.
        cluster: The devices. All of them are used.
        traits: How the framework trains.
        keep: Says of a layout whether it is tried. Default: all are.

    Returns:
        Layouts that fit, the fastest first; then those that don't, the smallest first. Pipelines of
        the first 50 are gone through to the last micro-batch, others are up to a few per cent off.

    Raises:
        UsageError: No layout is possible.

    Example:
        >>> model = Transformer(4096, 32, 32, 2048, 50304, global_batch=512)
        >>> cluster = DeviceCluster(find_accelerator("a100-80gb"), 8, 4, LinkSpeed(1e-5, 200e9))
        >>> plan_transformer(model, cluster, keep=lambda layout: layout.tensor <= 8)
    """
    scored = [
        score_layout(model, cluster, layout, traits, exact=False)
        for layout in list_layouts(model, cluster.devices)
        if keep is None or keep(layout)
    ]
    if not scored:
        raise UsageError(
            f"no layout of {model.name} is possible on {cluster.devices} devices: heads="
            f"{model.heads}, layers={model.layers} and global_batch={model.global_batch} have to "
            "be divisible by parts of that number"
        )
    scored.sort(key=_rank_layout)
    # An exact price may be higher than the quick one, and then another layout takes its place.
    exact: set[ParallelLayout] = set()
    while quick := [one.layout for one in scored[:REFINED] if one.layout not in exact]:
        exact.update(quick)
        scored[:REFINED] = [
            score_layout(model, cluster, one.layout, traits) if one.layout in quick else one
            for one in scored[:REFINED]
        ]
        scored.sort(key=_rank_layout)
    return tuple(scored)


def _rank_layout(scored: ScoredLayout) -> tuple[bool, float, float]:
    """Order layouts: those that fit by seconds, then the others by bytes."""
    if scored.fits:
        return False, scored.seconds, scored.memory.total
    return True, scored.memory.total, scored.seconds
