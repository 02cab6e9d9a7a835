"""How a transformer is divided among devices, as plain data, and whether that is possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice
from paceline.parallel.pipelining.schedules import CHUNKED_SCHEDULES, FIXED_SCHEDULES
from paceline.planner.transformers.transformer import Transformer

Recompute = Literal["none", "selective", "full"]
"""What the backward computes again: nothing; the scores of the attention; whole layers."""


@dataclass(frozen=True)
class ParallelLayout:
    """A way to divide a transformer among tensor x pipeline x data devices.

    Attributes:
        tensor: Workers that share each matrix.
        pipeline: Stages' workers. Default: 1.
        data: Copies of the model. Default: 1.
        micro_batch: Samples of a micro-batch. Default: 1.
        schedule: Schedule of the pipeline. Default: "1f1b".
        chunks: Stages on each worker of the pipeline. Default: 1.
        recompute: What the backward computes again. Default: "none".
        sequence_parallel: Whether the parts of a layer that `tensor` doesn't divide are divided
            along the sequence (Korthikanti et al. 2022). Default: no.
        sharding: What copies divide among themselves (ZeRO, Rajbhandari et al. 2020): 0 nothing,
            1 the optimizer's state, 2 gradients too, 3 parameters too. Default: 0.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    micro_batch: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    recompute: Recompute = "none"
    sequence_parallel: bool = False
    sharding: int = 0

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline * self.data

    def count_micro_batches(self, model: Transformer) -> int:
        """Number of micro-batches of one step in each copy."""
        return model.global_batch // (self.data * self.micro_batch)

    def describe(self) -> str:
        """Describe the layout in a few words, such as "tensor 8 x stage 4 x data 2, ..."."""
        parts = [f"tensor {self.tensor} x stage {self.pipeline} x data {self.data}"]
        parts.append(f"micro-batch {self.micro_batch}")
        if self.pipeline > 1:
            parts.append(self.schedule + (f" {self.chunks}" if self.chunks > 1 else ""))
        if self.recompute != "none":
            parts.append(f"{self.recompute} recomputation")
        if self.sequence_parallel:
            parts.append("sequence parallel")
        if self.sharding:
            parts.append(f"sharding {self.sharding}")
        return ", ".join(parts)


def explain_impossible(model: Transformer, layout: ParallelLayout) -> str:
    """Say in one line why a layout is impossible for a transformer. Empty if it is possible."""
    t, p, d = layout.tensor, layout.pipeline, layout.data
    for name, number, part in (
        ("heads", model.heads, t),
        ("ffn", model.ffn, t),
        ("hidden", model.hidden, t),
        ("global_batch", model.global_batch, d * layout.micro_batch),
    ):
        if number % part:
            return f"{name}={number} can't be divided by {part}"
    # With fewer heads of keys than workers, each of them would have copies.
    if max(model.kv_heads, t) % min(model.kv_heads, t):
        return f"kv_heads={model.kv_heads} can't be shared by tensor={t}"
    # The embedding and the logits may each be a stage of their own.
    if p > 1 and model.layers < p * layout.chunks - 2:
        return f"layers={model.layers} are too few for {p * layout.chunks} stages"
    if layout.sequence_parallel and (t == 1 or model.sequence % t):
        return f"sequence parallel needs tensor above 1 that divides {model.sequence}: it is {t}"
    if layout.sharding > 1 and p > 1:
        return f"sharding {layout.sharding} isn't possible in a pipeline: take 0 or 1"
    if layout.sharding and d == 1:
        return f"sharding {layout.sharding} needs data above 1"
    return _explain_impossible_schedule(model, layout)


def _explain_impossible_schedule(model: Transformer, layout: ParallelLayout) -> str:
    """Say why the schedule of the pipeline is impossible. Empty if it isn't."""
    name, p, chunks = layout.schedule, layout.pipeline, layout.chunks
    if p == 1:
        return "" if chunks == 1 else f"chunks={chunks} without a pipeline"
    if name in CHUNKED_SCHEDULES:
        if chunks < 2:
            return f"{name} needs chunks of 2 or more: it is {chunks}"
        if layout.count_micro_batches(model) < p:
            return f"{name} needs {p} micro-batches: there are {layout.count_micro_batches(model)}"
    elif name in FIXED_SCHEDULES and chunks != FIXED_SCHEDULES[name][0]:
        return f"{name} has {FIXED_SCHEDULES[name][0]} stages on each worker, not {chunks}"
    return ""


def check_layout(model: Transformer, layout: ParallelLayout) -> None:
    """Raise `UsageError` if a layout is impossible."""
    wrong = (
        describe_unknown_choice("recompute", layout.recompute, Recompute)
        or next(
            (
                f"{name} is {value!r}: it has to be a whole number above 0"
                for name in ("tensor", "pipeline", "data", "micro_batch", "chunks")
                if isinstance(value := getattr(layout, name), bool)
                or not isinstance(value, int)
                or value < 1
            ),
            "",
        )
        or ("" if layout.sharding in range(4) else f"sharding is {layout.sharding!r}: 0, 1, 2 or 3")
        or (
            ""
            if layout.schedule in {*CHUNKED_SCHEDULES, *FIXED_SCHEDULES}
            else f"schedule {layout.schedule!r} is unknown"
        )
        or explain_impossible(model, layout)
    )
    if wrong:
        raise UsageError(f"{layout.describe()} is impossible: {wrong}")


def deal_layers(layers: int, layout: ParallelLayout) -> tuple[int, ...]:
    """Deal layers to stages in order. If they aren't equal, stages in the middle have one more.

    The first stage has the embedding as well, and the last one the logits.
    """
    stages = layout.pipeline * layout.chunks
    small, more = divmod(layers, stages)
    first = (stages - more) // 2
    return tuple(small + (first <= stage < first + more) for stage in range(stages))


def list_rank_stages(layout: ParallelLayout, rank: int) -> list[int]:
    """List the stages that a rank along the pipeline holds: in turn, or in a V under "zbv"."""
    p = layout.pipeline
    if layout.schedule == "zbv" and p > 1:
        return [rank, 2 * p - 1 - rank]
    return list(range(rank, p * layout.chunks, p))
