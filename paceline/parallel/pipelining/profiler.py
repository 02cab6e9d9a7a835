"""Profiles the stages of one worker while it trains: what their actions take and wait for, what
layers take, and what stages keep.

step       0             1              2, 3, ... 11      20, 30, 40, ...
measured   bytes kept    each layer     all actions       all actions

A step costs two readings of the clock for each action. Of the steps whose actions are kept the last
ones are, the same on all workers.
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
from paceline.comm.group import Work
from paceline.comm.pairs import PairMessage
from paceline.parallel.pipelining.chain import StagePart, part_parameters
from paceline.parallel.pipelining.schedule import Action, Kind

LETTERS: dict[Kind, str] = {"forward": "F", "backward": "B", "input": "I", "weight": "W"}
# steps: that come before, those that are all kept, one in so many then, at most
WARM, FIRST, EVERY, KEPT = 2, 12, 10, 24

Times = tuple[int, int, int]  # nanoseconds: an action began, had all that it needs, and ended


class PipelineProfiler:
    """Measures the stages of one worker.

    `meter` shows its waits; `record` takes what it has done from when to when.
    """

    def __init__(self, meter: AxisMeter, record: Callable[[str, int, int], None]) -> None:
        self._meter, self._record = meter, record
        self.begin()

    def begin(self) -> None:
        """Forget what was measured, as the worker has other stages from now on."""
        self._steps = -1  # the number of the step under way, of those that train
        self._training = False
        self._actions: list[Times] = []
        self._layer_seconds: dict[int, list[float]] = {}
        self.kept: dict[int, int] = {}
        self.steps: deque[tuple[int, int, list[Times]]] = deque(maxlen=KEPT)

    @contextmanager
    def step(self, micro_batches: int, *, train: bool) -> Iterator[None]:
        """Measure a step of so many micro-batches inside of the block."""
        self._training, self._actions = train, []
        self._steps += train
        yield
        number = self._steps
        if train and number >= WARM and (number < FIRST or number % EVERY == 0):
            self.steps.append((number, micro_batches, self._actions))

    # ---- actions

    def wait(self, work: Work[PairMessage], what: str) -> PairMessage:
        """Wait for a message, and show the wait where there is one."""
        if work.done():
            return work.wait()
        with self._meter.exchange(what):
            return work.wait()

    def acted(self, action: Action, began: int, ready: int, ended: int) -> None:
        """Note an action that is over, and show it without its wait."""
        self._record(
            f"{LETTERS[action.kind]}{action.micro_batch} of stage {action.stage}", ready, ended
        )
        self._actions.append((began, ready, ended))

    # ---- inside of forwards

    def forward(
        self,
        stage: int,
        part: StagePart,
        owners: list[int],
        model: nn.Module,
        values: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Run a stage.

        In one step it is measured what it keeps, in the next what its layers take; `owners`: those
        of its operations.
        """
        if not self._training or self._steps >= WARM:
            return part.run(values)
        if self._steps == 1:
            return self._run_layers(part, owners, values)
        if stage in self.kept:
            return part.run(values)
        # by storage: its bytes, and the places in it that are kept
        found = dict[int, tuple[int, set[tuple[int, int]]]]()

        def keep(x: Tensor) -> tuple[Tensor, int]:
            if x.layout == torch.strided:
                place = int(x.storage_offset()) * x.element_size(), x.numel() * x.element_size()
                found.setdefault(_storage(x), (x.untyped_storage().nbytes(), set()))[1].add(place)
                # where they lie now: shard() gathers them while they are used
                for _, parameter in part_parameters(model, part):
                    found.pop(_storage(parameter), None)
            return x, x._version

        with saved_tensors_hooks(keep, _unchanged):
            gives = part.run(values)
        # a micro-batch may be rows of a batch in the memory of all of it
        self.kept[stage] = sum(
            min(whole, sum(nbytes for _, nbytes in places)) for whole, places in found.values()
        )
        return gives

    def _run_layers(
        self, part: StagePart, owners: list[int], values: Mapping[str, Any]
    ) -> dict[str, Any]:
        took = dict.fromkeys(owners, 0.0)
        clock = [time.perf_counter()]

        def after(place: int) -> None:
            now = time.perf_counter()
            took[owners[place]] += now - clock[0]
            clock[0] = now

        gives = part.run(values, after)
        for layer, seconds in took.items():
            self._layer_seconds.setdefault(layer, []).append(seconds)
        return gives

    @property
    def layer_seconds(self) -> dict[int, float]:
        """The seconds that the forward of each layer of this worker takes, by its number:
        medians over the micro-batches of one step.
        """
        return {layer: statistics.median(seconds) for layer, seconds in self._layer_seconds.items()}


def _unchanged(kept: tuple[Tensor, int]) -> Tensor:
    """Return a tensor that was kept for a backward; torch doesn't look at what hooks keep."""
    x, version = kept
    if x._version != version:
        raise RuntimeError(
            f"a tensor of shape {list(x.shape)} that is needed for a gradient has been modified by "
            "an inplace operation: it is at version "
            f"{x._version}, and was kept at {version}"
        )
    return x


def _storage(x: Tensor) -> int:
    found: int = x.untyped_storage()._cdata
    return found
