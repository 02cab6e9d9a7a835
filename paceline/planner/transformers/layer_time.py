"""Seconds of one layer, of the embedding and of the loss, on one device, for one micro-batch.

time
 |      kernels of the device  [products][softmax]...[norm]     a phase takes as long as its
 |      launches of the host   [1][2][3][4][5][6]...            kernels, or as their launches
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from paceline.planner.transformers.device import Accelerator
from paceline.planner.transformers.parallel_layout import Recompute
from paceline.planner.transformers.transformer import (
    HALF,
    Matmul,
    Transformer,
    count_hidden_bytes,
    list_attention_matmuls,
    list_layer_matmuls,
    make_head_matmul,
)

# Kernels of a layer besides its products (norms, activation, dropouts with sums, copies, biases),
# forward and backward, and those of the embedding and of the loss.
FORWARD_KERNELS, BACKWARD_KERNELS, EDGE_KERNELS = 11, 24, 10


@dataclass(frozen=True)
class LayerSeconds:
    """Seconds of one micro-batch in one layer on one device, without messages.

    Attributes:
        forward_seconds: Of the forward.
        input_seconds: Of the backward's half for inputs, with what is computed again.
        weight_seconds: Of its half for weights.
        again_seconds: The part of `input_seconds` that computes again.
    """

    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    again_seconds: float


@lru_cache(maxsize=50_000)
def time_layer(
    model: Transformer,
    device: Accelerator,
    tensor: int,
    micro_batch: int,
    *,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    accumulation_bytes: float = 6.0,
) -> LayerSeconds:
    """Time one layer on one of `tensor` devices.

    Args:
        model: The transformer.
        device: The device.
        tensor: Workers along `tensor`.
        micro_batch: Samples of the micro-batch.
        sequence_parallel: Whether norms and dropouts are divided along the sequence. Default: no.
        recompute: What the backward computes again. Default: nothing.
        accumulation_bytes: As in `FrameworkTraits`. Default: 6.
    """
    products = list_layer_matmuls(model, tensor, micro_batch)
    linear = [*products[:1], *products[3:]]
    memory = _count_layer_traffic(model, tensor, micro_batch, sequence_parallel)
    added = accumulation_bytes * model.layer_parameters / tensor
    scores = _time_scores(model, device, micro_batch * model.heads // tensor)
    forward = _time_phase(
        device,
        sum(map(device.time_matmul, linear)) + scores.forward_seconds,
        memory.forward_bytes,
        len(linear) + scores.kernels + FORWARD_KERNELS,
    )
    inputs = _time_phase(
        device,
        sum(device.time_matmul(Matmul(one.rows, one.inner, one.columns)) for one in linear)
        + scores.backward_seconds,
        memory.input_bytes,
        len(linear) + 2 * scores.kernels + BACKWARD_KERNELS - len(linear),
    )
    weights = _time_phase(
        device,
        sum(device.time_matmul(Matmul(one.inner, one.columns, one.rows)) for one in linear),
        memory.weight_bytes + added,
        2 * len(linear),
    )
    again = {"none": 0.0, "selective": scores.forward_seconds, "full": forward}[recompute]
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

    forward_bytes: float
    input_bytes: float
    weight_bytes: float


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
        forward_bytes=11 * outside + 2 * inside + (3 if model.gated else 2) * wide,
        input_bytes=19 * outside + 2 * projected + (5 if model.gated else 3) * wide,
        # Sums of the gradients of biases.
        weight_bytes=2 * outside + projected + wide,
    )


@dataclass(frozen=True)
class _ScoreSeconds:
    forward_seconds: float
    backward_seconds: float
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


@lru_cache(maxsize=10_000)
def time_edges(
    model: Transformer, device: Accelerator, tensor: int, micro_batch: int, loss_bytes: float
) -> tuple[LayerSeconds, LayerSeconds]:
    """Time the embedding, and the logits with the loss, on one of `tensor` devices.

    Args:
        model: The transformer.
        device: The device.
        tensor: Workers along `tensor`.
        micro_batch: Samples of the micro-batch.
        loss_bytes: Bytes that the loss reads and writes for each logit.
    """
    hidden = count_hidden_bytes(model, micro_batch)
    # Gradients of a vocabulary are as large as it is: they are zeroed, written and summed.
    table = HALF * model.vocabulary / tensor * model.hidden
    first = LayerSeconds(
        _time_phase(device, 0.0, 6 * hidden, EDGE_KERNELS),
        0.0,
        _time_phase(device, 0.0, 3 * hidden + 4 * table, EDGE_KERNELS),
        0.0,
    )
    product = make_head_matmul(model, tensor, micro_batch)
    logits = product.rows * product.columns * loss_bytes
    last = LayerSeconds(
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
        0.0,
    )
    return first, last
