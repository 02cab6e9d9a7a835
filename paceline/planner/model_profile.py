"""The measured cost of a training step of one worker, without any exchange, as plain data.

A step is measured under several conditions: how many processes computed on the machine at the same
time, with how many threads each. Under each condition, steps with several numbers of samples are
measured, as a worker's share of the global batch depends on the number of workers.

    |- data -|-- forward --|------ backward ------|- optimizer -|- other -|
                                 g9 g8  g7 ...  g0              gradients, as fractions of backward
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from paceline.errors import UsageError
from paceline.parallel.pipelining.split import LayerCost
from paceline.planner.cuts.layer_profile import (
    CheckpointedLayers,
    LayerSteps,
    find_repeated,
    join_layers,
)

FORMAT_NAME: Final = "paceline profile"
VERSION: Final = 2
# Of a small GPT, whose activations hardly need more: Linux, torch 2.13.
FIRST_STEP_BYTES: Final = 30e6
TIMED_PARTS: Final = ("data", "forward", "backward", "optimizer", "other", "exchange")


@dataclass(frozen=True)
class StepTimes:
    """Median seconds of the parts of a step with a number of samples.

    Attributes:
        samples: Samples of the step.
        data: Waiting for the whole global batch, from which this worker takes its samples.
        forward: From the batch to the last output of the model.
        backward: From there to the last gradient, the loss included.
        optimizer: Steps of the optimizers.
        other: All else, such as logging.
        spread: Range of the middle half of the steps' times, as a part of the median.
        activation_bytes: Bytes of tensors that autograd kept for backward.
        exchange: Seconds of forward and backward in which the worker exchanged parts of layers.
        exchanged_bytes: Bytes that it sent then.
    """

    samples: int
    data: float
    forward: float
    backward: float
    optimizer: float
    other: float
    spread: float = 0.0
    activation_bytes: float = 0.0
    exchange: float = 0.0
    exchanged_bytes: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.data + self.forward + self.backward + self.optimizer + self.other


@dataclass(frozen=True)
class MeasuredCondition:
    """Steps measured while `processes` processes of `threads` threads computed at the same time.

    Attributes:
        processes: Processes that computed.
        threads: Threads of each.
        flops: Operations per second of one process in products of float32 matrices.
        copied_bytes_per_second: Rate of one process's copies, bytes read and written.
        attended: Part of the time for which the threads of a process had a core.
        steps: Times by number of samples, the fewest first.
        layers: Costs of the layers by size of a micro-batch, the smallest first. Empty: unknown.
    """

    processes: int
    threads: int
    flops: float
    copied_bytes_per_second: float
    attended: float
    steps: tuple[StepTimes, ...]
    layers: tuple[LayerSteps, ...] = ()

    def predict_step(self, samples: float) -> StepTimes:
        """Predict the times of a step: a straight line between the nearest two measured ones.

        Outside of the measured numbers the nearest line goes on, but no time falls below 0.
        """
        steps = self.steps
        if len(steps) == 1 or samples <= 0:
            return steps[0]
        upper = next((i for i, step in enumerate(steps) if step.samples >= samples), len(steps) - 1)
        low, high = steps[max(upper - 1, 0)], steps[max(upper, 1)]
        way = (samples - low.samples) / (high.samples - low.samples)

        def between(name: str) -> float:
            start: float = getattr(low, name)
            end: float = getattr(high, name)
            return max(start + way * (end - start), 0.0)

        names = (*TIMED_PARTS, "spread", "activation_bytes", "exchanged_bytes")
        return StepTimes(round(samples), **{name: between(name) for name in names})


class GradientProfile(NamedTuple):
    """One parameter, in the order in which backward makes the gradients.

    Attributes:
        numel: Number of its elements.
        dtype: Name of its dtype.
        moment: When its gradient is there: 0 at the begin of backward, 1 at its end.
    """

    numel: int
    dtype: str
    moment: float


@dataclass(frozen=True)
class PossibleCuts:
    """The ways in which a script's model can be cut.

    Attributes:
        tensor_sizes: Numbers of workers that can divide its layers by `tensor("auto")`.
        layers: Layers that `pipeline("auto")` can deal to stages. 0: no pipeline is possible.
        samples: Samples of the global batch.
        checkpoints: Whether activation checkpoints can be priced.
        gathered_units: Patterns of layers that `shard(zero=3)` can gather one by one: those of each
            way to do so. Empty: no way.
        schedules: Schedules of pipelines that are tried, with their stages on each worker. None: a
            few.
        micro_batches: Numbers of micro-batches that are tried. None: a few for each worker.
    """

    tensor_sizes: tuple[int, ...] = ()
    layers: int = 0
    samples: int = 0
    checkpoints: bool = False
    gathered_units: tuple[tuple[str, ...], ...] = ()
    schedules: tuple[tuple[str, int], ...] | None = None
    micro_batches: tuple[int, ...] | None = None


@dataclass(frozen=True)
class TensorWorker:
    """What was measured of a worker that has its part of each layer.

    Attributes:
        size: Workers that divide the layers. They ran on one host, and exchanged.
        profile: What was measured of one of them.
    """

    size: int
    profile: ModelProfile


@dataclass(frozen=True)
class ModelProfile:
    """Everything that was measured of a script.

    Attributes:
        script: The script.
        machine: Id of the machine on which it was measured.
        cores: Cores of that machine.
        global_batch: Samples of a step of all workers together.
        gradients: Trained parameters, in the order of their gradients.
        state_bytes: Bytes of parameters and buffers, of gradients, and of optimizer state.
        base_bytes: Bytes of the process without the model: Python, libraries, and data.
        peak_bytes: Most bytes of the process while it trained with the whole batch. 0: not
            measured.
        conditions: What was measured, a condition at a time.
        takes_steps: Whether the script calls `run.step`, as pipelines need.
        tensor_sizes: Numbers of workers that could divide the layers.
        tensor_workers: What was measured of workers that did.
        checkpointed: Layers that are worth an activation checkpoint.
    """

    script: str
    machine: str
    cores: int
    global_batch: int
    gradients: tuple[GradientProfile, ...]
    state_bytes: tuple[int, int, int]
    base_bytes: int
    peak_bytes: int
    conditions: tuple[MeasuredCondition, ...]
    takes_steps: bool = False
    tensor_sizes: tuple[int, ...] = ()
    tensor_workers: tuple[TensorWorker, ...] = ()
    checkpointed: CheckpointedLayers = field(default_factory=CheckpointedLayers)

    @property
    def possible_cuts(self) -> PossibleCuts:
        """Ways in which the model can be cut, and that were measured."""
        layers = min((len(each.layers[0].costs) if each.layers else 0) for each in self.conditions)
        names = [cost.name for cost in self.conditions[0].layers[0].costs] if layers else []
        units = find_repeated(names)
        return PossibleCuts(
            tuple(worker.size for worker in self.tensor_workers),
            layers if self.takes_steps else 0,
            self.global_batch,
            bool(layers and self.checkpointed.names),
            (units,) if units else (),
        )

    @property
    def trained_bytes(self) -> int:
        """Bytes of all gradients."""
        return self.state_bytes[1]

    @property
    def core_flops(self) -> float:
        """Operations per second of a core, in products of float32 matrices. 0: not measured."""
        return max(
            each.flops * max(1.0, each.processes * each.threads / self.cores) / each.threads
            for each in self.conditions
        )

    def predict_passing_bytes(self, samples: float) -> float:
        """Predict the bytes that a step needs for a short time, besides states and activations.

        Buffers of libraries and threads come with the first step of any model. The rest, such as
        gradients of activations, is in proportion to samples.
        """
        activations = self.conditions[0].predict_step(self.global_batch).activation_bytes
        whole = max(0.0, self.peak_bytes - self.base_bytes - sum(self.state_bytes) - activations)
        fixed = min(whole, FIRST_STEP_BYTES)
        return fixed + (whole - fixed) * samples / self.global_batch

    def find_condition(self, processes: int, threads: int) -> MeasuredCondition:
        """Find the condition that is most like the asked one."""

        def distance(each: MeasuredCondition) -> tuple[int, int]:
            return abs(each.threads - threads), abs(each.processes - processes)

        return min(self.conditions, key=distance)


def find_tensor_worker(profile: ModelProfile, size: int) -> TensorWorker:
    """Find what was measured of a worker that divides its layers with `size - 1` others."""
    return next(worker for worker in profile.tensor_workers if worker.size == size)


def format_profile(profile: ModelProfile) -> str:
    """Format a profile as JSON, which `parse_profile` reads."""
    content = {"form": FORMAT_NAME, "version": VERSION, **asdict(profile)}
    return json.dumps(content, indent=1) + "\n"


def parse_profile(text: str, source: str = "the text") -> ModelProfile:
    """Parse JSON of `format_profile`. Raises `UsageError` for anything else."""
    try:
        content: Any = json.loads(text)
        if content.get("form") != FORMAT_NAME or content.get("version") != VERSION:
            raise UsageError(f"{source} isn't a profile of this version: measure the script again")
        return _make_profile(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{source} isn't a profile ({type(error).__name__}: {error}): measure the script again"
        ) from error


def read_profile(path: Path) -> ModelProfile:
    """Read a file of `format_profile`. Raises `UsageError` if it can't be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the profile {path} can't be read: {error}") from error
    return parse_profile(text, str(path))


def _make_profile(content: dict[str, Any]) -> ModelProfile:
    checkpointed = content["checkpointed"]
    return ModelProfile(
        content["script"],
        content["machine"],
        int(content["cores"]),
        int(content["global_batch"]),
        tuple(GradientProfile(*each) for each in content["gradients"]),
        tuple(content["state_bytes"]),
        int(content["base_bytes"]),
        int(content["peak_bytes"]),
        tuple(_make_condition(each) for each in content["conditions"]),
        bool(content["takes_steps"]),
        tuple(content["tensor_sizes"]),
        tuple(
            TensorWorker(int(each["size"]), _make_profile(each["profile"]))
            for each in content["tensor_workers"]
        ),
        CheckpointedLayers(tuple(checkpointed["names"]), int(checkpointed["saved_bytes"])),
    )


def _make_condition(content: dict[str, Any]) -> MeasuredCondition:
    steps = tuple(StepTimes(**each) for each in content["steps"])
    if not steps or any(step.samples < 1 for step in steps):
        raise ValueError("a condition has no steps")
    layers = tuple(
        LayerSteps(int(each["samples"]), tuple(LayerCost(**cost) for cost in each["costs"]))
        for each in content["layers"]
    )
    return MeasuredCondition(**{**content, "steps": steps, "layers": layers})


def join_processes(measured: Sequence[MeasuredCondition]) -> MeasuredCondition:
    """Join what several processes measured at the same time: the medians of their times."""
    first = measured[0]
    middle = len(measured) // 2

    def median(values: Sequence[float]) -> float:
        ordered = sorted(values)
        return (ordered[middle] + ordered[(len(ordered) - 1) // 2]) / 2

    steps = []
    for column in zip(*(each.steps for each in measured), strict=True):
        names = [name for name in StepTimes.__dataclass_fields__ if name != "samples"]
        joined = {name: median([getattr(step, name) for step in column]) for name in names}
        steps.append(StepTimes(column[0].samples, **joined))
    return MeasuredCondition(
        first.processes,
        first.threads,
        median([each.flops for each in measured]),
        median([each.copied_bytes_per_second for each in measured]),
        median([each.attended for each in measured]),
        tuple(steps),
        join_layers([each.layers for each in measured]),
    )
