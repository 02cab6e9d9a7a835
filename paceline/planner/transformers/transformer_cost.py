"""Seconds of one step of a transformer's layout, and what it consists of.

        rank 0 of the pipeline   F0 F1 .  .  B0 -- F2 B1 -- .  B2 -- | sum of gradients | optimizer
        rank 1                   .  F0 B0 -- F1 B1 -- F2 B2 -- .  .  | over `data`      |

        F = layers of a stage x (products + other kernels + all-reduces along `tensor`)
        B = twice that, and what is computed again

A step takes the time of its pipeline, priced as the schedule that is run; then of the sums of
gradients that didn't fit beside the last backward; then of the optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.planner.transformers.device import DeviceCluster
from paceline.planner.transformers.layer_time import LayerSeconds, time_edges, time_layer
from paceline.planner.transformers.parallel_layout import (
    ParallelLayout,
    check_layout,
    deal_layers,
    list_rank_stages,
)
from paceline.planner.transformers.stage_pipeline import StageSeconds, time_pipeline
from paceline.planner.transformers.transformer import Transformer, count_hidden_bytes
from paceline.planner.transformers.transformer_memory import (
    MIXED_PRECISION,
    StateBytes,
    count_stage_parameters,
)


@dataclass(frozen=True)
class FrameworkTraits:
    """How a framework trains, as far as that changes the time.

    Attributes:
        states: Bytes of a parameter's states.
        overlap: Share of the sums of gradients that may run beside the last backward. Default: 0.9.
        overlap_tensor: Share of the backward's all-reduces along `tensor` that run beside the
            products for weights, without sequence parallelism. Default: 0.
        overlap_sends: Whether messages between stages run beside computing. Default: yes.
        message_seconds: Seconds of the host for each message between stages. Default: 0.
        accumulation_bytes: Bytes read and written for each parameter when the gradients of a
            micro-batch are added to those of others. Default: 6; 0 if the products for weights
            add by themselves.
        optimizer_bytes: Bytes read and written for each parameter by the optimizer, by the norm of
            gradients and by the copies between precisions. Default: 44.
        loss_bytes: Bytes read and written for each logit by the loss. Default: 24.
    """

    states: StateBytes = MIXED_PRECISION
    overlap: float = 0.9
    overlap_tensor: float = 0.0
    overlap_sends: bool = True
    message_seconds: float = 0.0
    accumulation_bytes: float = 6.0
    optimizer_bytes: float = 44.0
    loss_bytes: float = 24.0


DEFAULT_TRAITS = FrameworkTraits()


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step on the device that is busiest, and the bytes that a device sends.

    Attributes:
        seconds: The whole step. All that follows, apart from bytes, adds up to it.
        compute: Forwards and backwards.
        again: Forwards that the backward computes again.
        tensor: All-reduces along `tensor`.
        bubble: Waiting for other stages, and for their messages.
        gradients: Sums of gradients that didn't fit beside the backward, and parameters that are
            gathered.
        optimizer: The optimizer.
        sent_within: Bytes that a device sends to others of its host, at most.
        sent_between: Bytes that a device sends to other hosts, at most.
        bubble_share: Share of all ranks' time in the pipeline in which they are idle.
    """

    seconds: float
    compute: float
    again: float
    tensor: float
    bubble: float
    gradients: float
    optimizer: float
    sent_within: float
    sent_between: float
    bubble_share: float


def time_stages(
    model: Transformer,
    cluster: DeviceCluster,
    layout: ParallelLayout,
    traits: FrameworkTraits = DEFAULT_TRAITS,
) -> StageSeconds:
    """Time one micro-batch in each stage of a layout, with all-reduces along `tensor`."""
    layer = _time_layout_layer(model, cluster, layout, traits)
    forward_sums, backward_sums = _time_layer_sums(model, cluster, layout, traits)
    first, last = time_edges(
        model, cluster.device, layout.tensor, layout.micro_batch, traits.loss_bytes
    )
    transfer = 0.0
    if layout.pipeline > 1:
        nbytes = count_hidden_bytes(model, layout.micro_batch)
        stride = layout.tensor * layout.data
        transfer = cluster.time_send(nbytes, layout.pipeline, stride, layout.tensor)
        transfer += traits.message_seconds
    # A device that sends before it computes on is busy for that time.
    sending = 0.0 if traits.overlap_sends else transfer
    dealt = deal_layers(model.layers, layout)
    forwards = [count * (layer.forward_seconds + forward_sums) + sending for count in dealt]
    inputs = [count * (layer.input_seconds + backward_sums) + sending for count in dealt]
    weights = [count * layer.weight_seconds for count in dealt]
    # The last stage sends nothing forward, and the first one nothing back.
    forwards[-1] += last.forward_seconds - sending
    inputs[0] += first.input_seconds - sending
    forwards[0] += first.forward_seconds
    inputs[-1] += last.input_seconds
    weights[0] += first.weight_seconds
    weights[-1] += last.weight_seconds
    if layout.schedule == "zbv" and layout.pipeline > 1:
        # The tip of the V sends to itself.
        forwards[layout.pipeline - 1] -= sending
        inputs[layout.pipeline] -= sending
    return StageSeconds(tuple(forwards), tuple(inputs), tuple(weights), transfer - sending)


def _time_layout_layer(
    model: Transformer, cluster: DeviceCluster, layout: ParallelLayout, traits: FrameworkTraits
) -> LayerSeconds:
    """Time one layer of a layout."""
    return time_layer(
        model,
        cluster.device,
        layout.tensor,
        layout.micro_batch,
        sequence_parallel=layout.sequence_parallel,
        recompute=layout.recompute,
        accumulation_bytes=traits.accumulation_bytes,
    )


def _time_layer_sums(
    model: Transformer, cluster: DeviceCluster, layout: ParallelLayout, traits: FrameworkTraits
) -> tuple[float, float]:
    """Time a layer's all-reduces along `tensor`: two forward; two backward, and those done again.

    With sequence parallelism each is a reduce-scatter and an all-gather, which take as long.
    """
    one = cluster.time_all_reduce(count_hidden_bytes(model, layout.micro_batch), layout.tensor, 1)
    exposed = 2.0 if layout.sequence_parallel else 2 * (1 - traits.overlap_tensor)
    return 2 * one, (exposed + (2 if layout.recompute == "full" else 0)) * one


def price_layout(
    model: Transformer,
    cluster: DeviceCluster,
    layout: ParallelLayout,
    traits: FrameworkTraits = DEFAULT_TRAITS,
    *,
    exact: bool = True,
) -> StepCost:
    """Price one step of a layout.

    Args:
        model: The transformer.
        cluster: The devices.
        layout: How the transformer is divided.
        traits: How the framework trains.
        exact: Whether all micro-batches of the pipeline are gone through; see `time_pipeline`.

    Raises:
        UsageError: The layout is impossible.
    """
    check_layout(model, layout)
    n, p = layout.count_micro_batches(model), layout.pipeline
    times = time_stages(model, cluster, layout, traits)
    if p == 1:
        seconds = n * (sum(times.forwards) + sum(times.inputs) + sum(times.weights))
        idle = 0.0
    else:
        seconds, idle = time_pipeline(layout.schedule, p, n, layout.chunks, times, exact=exact)
    # The parts of the rank with the most work; the rest of the time it waits.
    work = [
        sum(row[stage] for row in (times.forwards, times.inputs, times.weights))
        for stage in range(len(times.forwards))
    ]
    busiest = max(range(p), key=lambda rank: _sum_rank(work, layout, rank))
    busy = n * _sum_rank(work, layout, busiest)
    layers = _sum_rank(deal_layers(model.layers, layout), layout, busiest)
    sums = n * layers * sum(_time_layer_sums(model, cluster, layout, traits))
    again = n * layers * _time_layout_layer(model, cluster, layout, traits).again_seconds
    # The rank with the most parameters has the longest sum of gradients and optimizer.
    held = max(count_stage_parameters(model, layout, rank) for rank in {0, min(1, p - 1), p - 1})
    gradients, sent = _price_gradients(
        cluster,
        layout,
        traits,
        held,
        layers=max(1, int(layers)),
        micro_batches=n,
        last_seconds=busy / n,
    )
    if model.tied and p > 1:
        # The first and the last rank sum the gradients of the matrix that both have.
        table = traits.states.gradients * model.head_parameters / layout.tensor
        gradients += cluster.time_all_reduce(table, 2, layout.tensor * layout.data * (p - 1))
    share = held / (layout.data if layout.sharding else 1)
    optimizer = share * traits.optimizer_bytes / cluster.device.memory_bandwidth
    within, between = _count_messages(model, cluster, layout, n, layers)
    return StepCost(
        seconds + gradients + optimizer,
        compute=busy - sums - again,
        again=again,
        tensor=sums,
        bubble=seconds - busy,
        gradients=gradients,
        optimizer=optimizer,
        sent_within=within + sent[0],
        sent_between=between + sent[1],
        bubble_share=idle,
    )


def _sum_rank(values: Sequence[float], layout: ParallelLayout, rank: int) -> float:
    """Sum the values of the stages that a rank along the pipeline holds."""
    return sum(values[stage] for stage in list_rank_stages(layout, rank))


def _price_gradients(
    cluster: DeviceCluster,
    layout: ParallelLayout,
    traits: FrameworkTraits,
    held: float,
    *,
    layers: int,
    micro_batches: int,
    last_seconds: float,
) -> tuple[float, tuple[float, float]]:
    """Price what copies exchange: seconds that are not beside computing, and bytes sent.

    Args:
        cluster: The devices.
        layout: The layout.
        traits: How the framework trains.
        held: Parameters of the device.
        layers: Layers of the device. With sharding 3 each is gathered by itself.
        micro_batches: Micro-batches of a step.
        last_seconds: Seconds of one micro-batch. Two thirds of them are its backward.
    """
    d, stride = layout.data, layout.tensor
    if d == 1:
        return 0.0, (0.0, 0.0)
    gradients, parameters = held * traits.states.gradients, held * traits.states.parameters
    messages = layers if layout.sharding > 2 else 1
    scatter = cluster.time_all_gather(gradients, d, stride, messages=messages)
    gather = cluster.time_all_gather(parameters, d, stride, messages=messages)
    sent = [cluster.count_sent_bytes(x, d, stride, rounds=1) for x in (gradients, parameters)]
    # How often gradients and parameters go round, and the backward beside which that is done.
    times, beside = (2.0, 0.0), last_seconds * 2 / 3
    if layout.sharding == 1:
        times = (1.0, 1.0)
    elif layout.sharding == 2:
        times, beside = (float(micro_batches), 1.0), beside * micro_batches
    elif layout.sharding == 3:
        # Parameters are gathered for the forward and for the backward of each micro-batch.
        times, beside = (float(micro_batches), 2.0 * micro_batches), last_seconds * micro_batches
    whole = times[0] * scatter + times[1] * gather
    exposed = whole - min(traits.overlap * whole, beside)
    within, between = (times[0] * sent[0][i] + times[1] * sent[1][i] for i in (0, 1))
    return exposed, (within, between)


def _count_messages(
    model: Transformer, cluster: DeviceCluster, layout: ParallelLayout, n: int, layers: float
) -> tuple[float, float]:
    """Count the bytes that a device sends in all-reduces along `tensor`, and to other stages."""
    nbytes = count_hidden_bytes(model, layout.micro_batch)
    within, between = cluster.count_sent_bytes(nbytes, layout.tensor, 1)
    rounds = n * layers * (6 if layout.recompute == "full" else 4)
    within, between = within * rounds, between * rounds
    if layout.pipeline > 1:
        # To the next stage and back, for each stage on the device.
        sent = 2 * n * layout.chunks * nbytes / layout.tensor
        if cluster.crosses_hosts(layout.pipeline, layout.tensor * layout.data):
            between += sent
        else:
            within += sent
    return within, between
