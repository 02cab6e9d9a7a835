"""Bytes on a device for a transformer's layout: states, activations, buffers; and whether it fits.

Letters are those of `transformer.py`; formulas are those of Korthikanti et al. 2022, "Reducing
Activation Recomputation in Large Transformer Models", and of Rajbhandari et al. 2020, "ZeRO".
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.planner.transformers.device import DeviceCluster
from paceline.planner.transformers.parallel_layout import (
    ParallelLayout,
    deal_layers,
    list_rank_stages,
)
from paceline.planner.transformers.stage_pipeline import count_kept_stages
from paceline.planner.transformers.transformer import HALF, Transformer, count_hidden_bytes

# What a process has on a device before the first tensor: the driver's context, kernels, buffers of
# collectives. And the share of the memory that an allocator can't use because of gaps.
CONTEXT_BYTES, GAPS = 1.5 * 2**30, 0.04


@dataclass(frozen=True)
class StateBytes:
    """Bytes of each parameter with Adam in mixed precision.

    Attributes:
        parameters: Of the parameter in half precision. Default: 2.
        gradients: Of its gradient. Default: 2; 4 where gradients are summed in single precision.
        optimizer: Of the copy in single precision and of both moments. Default: 12.
    """

    parameters: int = 2
    gradients: int = 2
    optimizer: int = 12


MIXED_PRECISION = StateBytes()


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the device that needs the most.

    Attributes:
        parameters: Parameters.
        gradients: Gradients.
        optimizer: State of the optimizer.
        activations: Activations that are kept for backwards.
        buffers: The largest tensors that are needed only for a moment.
    """

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float

    @property
    def total(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.buffers

    def fits(self, capacity: float) -> bool:
        """Whether a device with `capacity` bytes has room for it."""
        return self.total + CONTEXT_BYTES <= capacity * (1 - GAPS)


def count_state_bytes(
    parameters: float, data: int, sharding: int, each: StateBytes = MIXED_PRECISION
) -> tuple[float, float, float]:
    """Bytes of parameters, gradients and the optimizer's state on one of `data` devices.

    That is table 1 of ZeRO: 16 bytes a parameter; 4 + 12/N, 2 + 14/N and 16/N with sharding 1 to 3.

    Args:
        parameters: Parameters of the whole model, or of the part that these devices share.
        data: Devices that divide states among themselves.
        sharding: 0 to 3, as in `ParallelLayout`.
        each: Bytes of a parameter.
    """
    return (
        parameters * each.parameters / (data if sharding > 2 else 1),
        parameters * each.gradients / (data if sharding > 1 else 1),
        parameters * each.optimizer / (data if sharding > 0 else 1),
    )


def count_layer_activations(model: Transformer, layout: ParallelLayout) -> float:
    """Bytes that one layer keeps of one micro-batch for its backward.

        none              sbh (10 + 24/t + 5 as/ht)        selective        sbh (10 + 24/t)
        with sequence parallelism 10 becomes 10/t          full             2 sbh

    That is table 2 of Korthikanti et al. 2022, for ffn = 4h and equal heads of keys; other widths
    are put in. Flash attention keeps no scores either. With full recomputation each worker along
    `tensor` keeps the whole input of the layer, or its part with sequence parallelism.
    """
    t, h = layout.tensor, model.hidden
    values = layout.micro_batch * model.sequence  # tokens
    undivided = t if layout.sequence_parallel else 1
    if layout.recompute == "full":
        return HALF * values * h / undivided
    # Inputs of both norms and of both first matrices (8 bytes), and two masks of dropout.
    outside = 10 * h / undivided
    # Queries, keys and values, the input of the projection, and the feed-forward block: input and
    # output of its activation, and with a gate the second input.
    widths = h + 2 * model.kv_width + h + (3 if model.gated else 2) * model.ffn
    inside = HALF * widths / t
    # Scores after the softmax, their mask, and scores after dropout.
    scores = 5 * model.heads * model.sequence / t
    if layout.recompute == "selective" or model.attention == "flash":
        scores = 0.0
    return values * (outside + inside + scores)


def count_stage_parameters(model: Transformer, layout: ParallelLayout, rank: int) -> float:
    """Parameters on one device of a rank along the pipeline."""
    dealt = deal_layers(model.layers, layout)
    stages = list_rank_stages(layout, rank)
    parameters = sum(dealt[stage] for stage in stages) * model.layer_parameters
    if 0 in stages:
        parameters += model.embedding_parameters
    if len(dealt) - 1 in stages:
        parameters += 0 if model.tied and 0 in stages else model.head_parameters
    return parameters / layout.tensor


def count_activations(model: Transformer, layout: ParallelLayout, rank: int = 0) -> float:
    """Bytes of activations that a rank along the pipeline keeps at once, at most.

    Korthikanti et al. 2022, section 4.2: the first rank keeps as many micro-batches as there are
    ranks, and with interleaving 1 + (p - 1) / pm times as much.
    """
    layer = count_layer_activations(model, layout)
    if layout.pipeline == 1:
        return layer * model.layers
    n = layout.count_micro_batches(model)
    kept = count_kept_stages(layout.schedule, layout.pipeline, n, layout.chunks, rank)
    dealt = deal_layers(model.layers, layout)
    stages = list_rank_stages(layout, rank)
    return kept * layer * sum(dealt[stage] for stage in stages) / len(stages)


def count_buffers(model: Transformer, layout: ParallelLayout) -> float:
    """Bytes of the largest tensors that are needed only for a moment, on the last rank.

    Logits in single precision with their gradients (4 sbV/t), or one layer that is computed again.
    """
    tokens = layout.micro_batch * model.sequence
    logits = 4 * tokens * model.vocabulary / layout.tensor
    again = 0.0
    if layout.recompute == "full":
        whole = ParallelLayout(
            layout.tensor,
            micro_batch=layout.micro_batch,
            sequence_parallel=layout.sequence_parallel,
        )
        again = count_layer_activations(model, whole)
    elif layout.recompute == "selective" and model.attention == "standard":
        again = 5 * tokens * model.heads * model.sequence / layout.tensor
    # Parameters that are gathered for one layer.
    gathered = HALF * model.layer_parameters / layout.tensor if layout.sharding > 2 else 0.0
    return max(logits, again) + 2 * gathered + 2 * count_hidden_bytes(model, layout.micro_batch)


def count_device_memory(
    model: Transformer, layout: ParallelLayout, each: StateBytes = MIXED_PRECISION
) -> DeviceMemory:
    """Count the bytes on the device that needs the most.

    Args:
        model: The transformer.
        layout: How it is divided.
        each: Bytes of a parameter's states.
    """
    candidates = []
    buffers = count_buffers(model, layout)
    # The first rank keeps the most micro-batches, but may have a layer less than the second.
    for rank in sorted({0, min(1, layout.pipeline - 1), layout.pipeline - 1}):
        states = count_state_bytes(
            count_stage_parameters(model, layout, rank), layout.data, layout.sharding, each
        )
        activations = count_activations(model, layout, rank)
        candidates.append(DeviceMemory(*states, activations, buffers))
    return max(candidates, key=lambda memory: memory.total)


def fits_cluster(memory: DeviceMemory, cluster: DeviceCluster) -> bool:
    """Whether the devices of a cluster have room."""
    return memory.fits(cluster.device.memory_bytes)
