"""Profiles the stages of one worker during training: times of actions and layers, and memory kept.

step       0             1              2, 3, ... 11      20, 30, 40, ...
measured   bytes kept    each layer     all actions       all actions

A step costs two readings of the clock for each action. The actions of the last measured steps are
kept, of the same steps on all workers.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from paceline.comm.axis_meter import AxisMeter
from paceline.comm.group_protocol import Work
from paceline.comm.pairs import PairMessage
from paceline.parallel.pipelining.layer_graph import StagePart, iterate_part_parameters
from paceline.parallel.pipelining.schedule import LETTERS, Action
from paceline.parallel.torch_tensor import storage_key

# No action is measured in the first WARMUP_STEPS steps, all are up to step ALL_MEASURED_UNTIL, and
# those of one in MEASURED_EVERY steps later. The last KEPT_STEPS measured steps are kept.
WARMUP_STEPS, ALL_MEASURED_UNTIL, MEASURED_EVERY, KEPT_STEPS = 2, 12, 10, 24

# Nanoseconds at which an action began, had all that it needs, and ended.
Times = tuple[int, int, int]


class PipelineProfiler:
    """Measures the stages of one worker.

    `meter` shows its waits. `record` takes spans: a name, begin and end in nanoseconds.
    """

    def __init__(self, meter: AxisMeter, record: Callable[[str, int, int], None]) -> None:
        self._meter, self._record = meter, record
        self.reset_profile()

    def reset_profile(self) -> None:
        """Forget all measurements, as the worker has other stages from now on."""
        # Number of the step under way; steps without training don't count.
        self._step_number = -1
        self._training = False
        self._actions: list[Times] = []
        self._layer_seconds: dict[int, list[float]] = {}
        self.kept_nbytes: dict[int, int] = {}
        self.steps: deque[tuple[int, int, list[Times]]] = deque(maxlen=KEPT_STEPS)

    @contextmanager
    def measure_step(self, micro_batches: int, *, train: bool) -> Iterator[None]:
        """Measure a step of `micro_batches` micro-batches inside of the block."""
        self._training, self._actions = train, []
        self._step_number += train
        yield
        step_number = self._step_number
        if (
            train
            and step_number >= WARMUP_STEPS
            and (step_number < ALL_MEASURED_UNTIL or step_number % MEASURED_EVERY == 0)
        ):
            self.steps.append((step_number, micro_batches, self._actions))

    # ---- actions

    def wait_for_message(self, work: Work[PairMessage], what: str) -> PairMessage:
        """Wait for a message, and show the wait if there is one."""
        if work.done():
            return work.wait()
        with self._meter.measure_exchange(what):
            return work.wait()

    def note_action(self, action: Action, began: int, ready: int, ended: int) -> None:
        """Note an action that has ended, and show it without its wait."""
        self._record(
            f"{LETTERS[action.kind]}{action.micro_batch} of stage {action.stage}", ready, ended
        )
        self._actions.append((began, ready, ended))

    # ---- inside of forwards

    def run_forward(
        self,
        stage: int,
        part: StagePart,
        owners: list[int],
        model: nn.Module,
        values: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Run a stage. One step measures the bytes that it keeps, and the next step its layers.

        `owners` has the layer of each of the part's operations.
        """
        if not self._training or self._step_number >= WARMUP_STEPS:
            return part.run_stage(values)
        if self._step_number == 1:
            return self._run_layers(part, owners, values)
        if stage in self.kept_nbytes:
            return part.run_stage(values)
        # By storage: its bytes, and the ranges in it that are kept.
        saved = dict[int, tuple[int, set[tuple[int, int]]]]()

        def keep(x: Tensor) -> tuple[Tensor, int]:
            if x.layout == torch.strided:
                place = int(x.storage_offset()) * x.element_size(), x.numel() * x.element_size()
                saved.setdefault(storage_key(x), (x.untyped_storage().nbytes(), set()))[1].add(
                    place
                )
                # Parameters don't count. Look each time where they are: shard() gathers them for
                # the time of their use.
                for _, parameter in iterate_part_parameters(model, part):
                    saved.pop(storage_key(parameter), None)
            return x, x._version

        with saved_tensors_hooks(keep, _check_unchanged):
            gives = part.run_stage(values)
        # A micro-batch may be some rows in the memory of a whole batch, so count the ranges only.
        self.kept_nbytes[stage] = sum(
            min(whole, sum(nbytes for _, nbytes in places)) for whole, places in saved.values()
        )
        return gives

    def _run_layers(
        self, part: StagePart, owners: list[int], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Run a stage, and add up the seconds between its operations for each layer."""
        took = dict.fromkeys(owners, 0.0)
        clock = [time.perf_counter()]

        def after(place: int) -> None:
            now = time.perf_counter()
            took[owners[place]] += now - clock[0]
            clock[0] = now

        gives = part.run_stage(values, after)
        for layer, seconds in took.items():
            self._layer_seconds.setdefault(layer, []).append(seconds)
        return gives

    @property
    def layer_seconds(self) -> dict[int, float]:
        """Seconds of each layer's forward on this worker: medians over one step's micro-batches."""
        return {layer: statistics.median(seconds) for layer, seconds in self._layer_seconds.items()}


def _check_unchanged(saved: tuple[Tensor, int]) -> Tensor:
    """Return a saved tensor, if it is unchanged: torch doesn't check tensors that hooks saved."""
    x, version = saved
    if x._version != version:
        raise RuntimeError(
            f"a tensor of shape {list(x.shape)} that is needed for a gradient has been modified by "
            f"an inplace operation: it is at version {x._version}, and was kept at {version}"
        )
    return x
