"""Seconds of one step of a transformer's layout, and what it consists of.

        rank 0 of the pipeline   F0 F1 .  .  B0 -- F2 B1 -- .  B2 -- | sum of gradients | optimizer
        rank 1                   .  F0 B0 -- F1 B1 -- F2 B2 -- .  .  | over `data`      |

        F = layers of a stage x (products + other kernels + all-reduces along `tensor`)
        B = twice that, and what is computed again

A step takes the time of its pipeline, priced as the schedule that is run; then of the sums of
gradients that didn't fit beside the last backward; then of the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from paceline.plan.device import Accelerator, DeviceCluster
from paceline.plan.parallel_layout import ParallelLayout, Recompute, check_layout, deal_layers
from paceline.plan.stage_pipeline import StageSeconds, time_pipeline
from paceline.plan.transformer import (
    HALF,
    Matmul,
    Transformer,
    count_hidden_bytes,
    list_attention_matmuls,
    list_layer_matmuls,
    make_head_matmul,
)
from paceline.plan.transformer_memory import StateBytes, count_stage_parameters

# Kernels of a layer besides its products (norms, activation, dropouts with sums, copies, biases),
# forward and backward, and those of the embedding and of the loss.
FORWARD_KERNELS, BACKWARD_KERNELS, EDGE_KERNELS = 11, 24, 10


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

    states: StateBytes = field(default_factory=StateBytes)
    overlap: float = 0.9
    overlap_tensor: float = 0.0
    overlap_sends: bool = True
    message_seconds: float = 0.0
    accumulation_bytes: float = 6.0
    optimizer_bytes: float = 44.0
    loss_bytes: float = 24.0


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one micro-batch in one layer on one device, without messages.

    Attributes:
        forward: Of the forward.
        inputs: Of the backward's half for inputs, with what is computed again.
        weights: Of its half for weights.
        again: The part of `inputs` that computes again.
    """

    forward: float
    inputs: float
    weights: float
    again: float


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


@lru_cache(maxsize=50_000)
def time_layer(
    model: Transformer,
    device: Accelerator,
    tensor: int,
    micro_batch: int,
    sequence_parallel: bool,
    recompute: Recompute,
    accumulation_bytes: float = 6.0,
) -> LayerSeconds:
    """Time one layer on one of `tensor` devices.

    Args:
        model: The transformer.
        device: The device.
        tensor: Workers along `tensor`.
        micro_batch: Samples of the micro-batch.
        sequence_parallel: Whether norms and dropouts are divided along the sequence.
        recompute: What the backward computes again.
        accumulation_bytes: As in `FrameworkTraits`.
    """
    products = list_layer_matmuls(model, tensor, micro_batch)
    linear = [*products[:1], *products[3:]]
    memory = _count_layer_traffic(model, tensor, micro_batch, sequence_parallel)
    added = accumulation_bytes * model.layer_parameters / tensor
    scores = _time_scores(model, device, micro_batch * model.heads // tensor)
    forward = _time_phase(
        device,
        sum(map(device.time_matmul, linear)) + scores.forward,
        memory.forward,
        len(linear) + scores.kernels + FORWARD_KERNELS,
    )
    inputs = _time_phase(
        device,
        sum(device.time_matmul(Matmul(one.rows, one.inner, one.columns)) for one in linear)
        + scores.backward,
        memory.inputs,
        len(linear) + 2 * scores.kernels + BACKWARD_KERNELS - len(linear),
    )
    weights = _time_phase(
        device,
        sum(device.time_matmul(Matmul(one.inner, one.columns, one.rows)) for one in linear),
        memory.weights + added,
        2 * len(linear),
    )
    again = {"none": 0.0, "selective": scores.forward, "full": forward}[recompute]
    if model.attention == "flash" and recompute == "selective":
        again = 0.0
    return LayerSeconds(forward, inputs + again, weights, again)


def _time_phase(device: Accelerator, products: float, nbytes: float, kernels: int) -> float:
    """Time kernels that the host launches one after another: no faster than it can launch."""
    busy = products + device.time_memory(nbytes, kernels)
    launch = kernels * device.launch_seconds
    # Some kernels are small even where most are large, so it isn't quite the larger of the two.
    sharp = device.launch_sharpness
    return float((busy**sharp + launch**sharp) ** (1 / sharp))


@dataclass(frozen=True)
class _Traffic:
    """Bytes that kernels other than products read and write in one layer."""

    forward: float
    inputs: float
    weights: float


def _count_layer_traffic(
    model: Transformer, tensor: int, micro_batch: int, sequence_parallel: bool
) -> _Traffic:
    """Count passes of each kernel over its tensors: 2 bytes a value, 1 byte for a mask.

        forward     norm: 2, twice        dropout and sum: 3.5, twice          activation: 2 or 3
        backward    norm: 4, twice        dropout: 2.5, sum: 3, twice each     activation: 3 or 5
    """
    whole = count_hidden_bytes(model, micro_batch)
    outside = whole / (tensor if sequence_parallel else 1)
    inside = whole / tensor
    wide = inside * model.ffn / model.hidden
    projected = inside * (1 + 2 * model.kv_width / model.hidden)
    return _Traffic(
        forward=11 * outside + 2 * inside + (3 if model.gated else 2) * wide,
        inputs=19 * outside + 2 * projected + (5 if model.gated else 3) * wide,
        # Sums of the gradients of biases.
        weights=2 * outside + projected + wide,
    )


@dataclass(frozen=True)
class _ScoreSeconds:
    forward: float
    backward: float
    kernels: int


def _time_scores(model: Transformer, device: Accelerator, heads: int) -> _ScoreSeconds:
    """Time the attention between queries, keys and values, for `heads` heads of one micro-batch."""
    s = model.sequence
    first, second = list_attention_matmuls(model, heads, s)
    if model.attention == "flash":
        # Half of the scores are of future tokens, and are left out. The backward has five products.
        speed = device.peak_flops * device.achievable * device.flash_share
        seconds = (first.flops + second.flops) / 2 / speed + device.kernel_seconds
        return _ScoreSeconds(seconds, 2.5 * seconds, 1)
    scores = HALF * heads * s * s
    # Softmax and dropout read and write the scores; dropout writes a mask as well.
    forward = device.time_matmul(first) + device.time_matmul(second)
    backward = 0.0
    for one in (first, second):
        backward += device.time_matmul(Matmul(one.rows, one.inner, one.columns, one.batch))
        backward += device.time_matmul(Matmul(one.inner, one.columns, one.rows, one.batch))
    return _ScoreSeconds(
        forward + device.time_memory(4.5 * scores, 2),
        backward + device.time_memory(5.5 * scores, 2),
        4,
    )


def _time_edges(
    model: Transformer, device: Accelerator, layout: ParallelLayout, loss_bytes: float
) -> tuple[tuple[float, float, float], tuple[float, float, float]]:
    """Time the embedding, and the logits with the loss: forward, inputs, weights of each."""
    t, b = layout.tensor, layout.micro_batch
    hidden = count_hidden_bytes(model, b)
    # Gradients of a vocabulary are as large as it is: they are zeroed, written and summed.
    table = HALF * model.vocabulary / t * model.hidden
    first = (
        _time_phase(device, 0.0, 6 * hidden, EDGE_KERNELS),
        0.0,
        _time_phase(device, 0.0, 3 * hidden + 4 * table, EDGE_KERNELS),
    )
    product = make_head_matmul(model, t, b)
    logits = product.rows * product.columns * loss_bytes
    last = (
        _time_phase(device, device.time_matmul(product), 0.6 * logits, EDGE_KERNELS),
        _time_phase(
            device,
            device.time_matmul(Matmul(product.rows, product.inner, product.columns)),
            0.4 * logits,
            EDGE_KERNELS,
        ),
        _time_phase(
            device,
            device.time_matmul(Matmul(product.inner, product.columns, product.rows)),
            3 * table,
            EDGE_KERNELS,
        ),
    )
    return first, last


def time_stages(
    model: Transformer,
    cluster: DeviceCluster,
    layout: ParallelLayout,
    traits: FrameworkTraits = FrameworkTraits(),
) -> StageSeconds:
    """Time one micro-batch in each stage of a layout, with all-reduces along `tensor`."""
    layer = time_layer(
        model,
        cluster.device,
        layout.tensor,
        layout.micro_batch,
        layout.sequence_parallel,
        layout.recompute,
        traits.accumulation_bytes,
    )
    forward_sums, backward_sums = _time_layer_sums(model, cluster, layout, traits)
    first, last = _time_edges(model, cluster.device, layout, traits.loss_bytes)
    dealt = deal_layers(model.layers, layout)
    transfer = 0.0
    if layout.pipeline > 1:
        nbytes = count_hidden_bytes(model, layout.micro_batch)
        transfer = cluster.time_send(nbytes, layout.tensor * layout.data, layout.tensor)
        transfer += traits.message_seconds
    # A device that sends before it computes on is busy for that time.
    sending = 0.0 if traits.overlap_sends else transfer
    rows = []
    for index, seconds in enumerate(
        (layer.forward + forward_sums, layer.inputs + backward_sums, layer.weights)
    ):
        row = [count * seconds for count in dealt]
        row[0] += first[index]
        row[-1] += last[index]
        if index == 0:
            row[:-1] = [value + sending for value in row[:-1]]
        elif index == 1:
            row[1:] = [value + sending for value in row[1:]]
        rows.append(tuple(row))
    return StageSeconds(*rows, transfer - sending)


def _time_layer_sums(
    model: Transformer, cluster: DeviceCluster, layout: ParallelLayout, traits: FrameworkTraits
) -> tuple[float, float]:
    """Time a layer's all-reduces along `tensor`: two forward; two backward, and those done again.

    With sequence parallelism each is a reduce-scatter and an all-gather, which take as long.
    """
    one = cluster.time_all_reduce(
        count_hidden_bytes(model, layout.micro_batch), layout.tensor, 1
    )
    exposed = 2.0 if layout.sequence_parallel else 2 * (1 - traits.overlap_tensor)
    return 2 * one, (exposed + (2 if layout.recompute == "full" else 0)) * one


def price_layout(
    model: Transformer,
    cluster: DeviceCluster,
    layout: ParallelLayout,
    traits: FrameworkTraits = FrameworkTraits(),
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
    layers = _sum_rank([float(x) for x in deal_layers(model.layers, layout)], layout, busiest)
    sums = n * layers * sum(_time_layer_sums(model, cluster, layout, traits))
    again = n * layers * time_layer(
        model,
        cluster.device,
        layout.tensor,
        layout.micro_batch,
        layout.sequence_parallel,
        layout.recompute,
        traits.accumulation_bytes,
    ).again
    # The rank with the most parameters has the longest sum of gradients and optimizer.
    held = max(count_stage_parameters(model, layout, rank) for rank in {0, p - 1})
    gradients, sent = _price_gradients(cluster, layout, traits, held, n, busy / n)
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


def _sum_rank(values: list[float], layout: ParallelLayout, rank: int) -> float:
    """Sum the values of the stages that a rank along the pipeline holds."""
    if layout.schedule == "zbv" and layout.pipeline > 1:
        return values[rank] + values[-1 - rank]
    return sum(values[rank :: layout.pipeline])


def _price_gradients(
    cluster: DeviceCluster,
    layout: ParallelLayout,
    traits: FrameworkTraits,
    held: float,
    micro_batches: int,
    last_seconds: float,
) -> tuple[float, tuple[float, float]]:
    """Price what copies exchange: seconds that are not beside computing, and bytes sent.

    Args:
        cluster: The devices.
        layout: The layout.
        traits: How the framework trains.
        held: Parameters of the device.
        micro_batches: Micro-batches of a step.
        last_seconds: Seconds of one micro-batch. Two thirds of them are its backward.
    """
    d, stride = layout.data, layout.tensor
    if d == 1:
        return 0.0, (0.0, 0.0)
    gradients, parameters = held * traits.states.gradients, held * traits.states.parameters
    scatter = cluster.time_all_gather(gradients, d, stride)
    gather = cluster.time_all_gather(parameters, d, stride)
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
        if layout.tensor * layout.data < cluster.devices_per_host:
            within += sent
        else:
            between += sent
    return within, between
