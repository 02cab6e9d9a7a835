"""The main path of training: what happens between two turns of a loader, at a backward, and at an optimizer's step.

    turn begins     my weight in the global batch, is it a ghost, is it exchanged yet
      backward      (sync/backward.py) exchanges; p.grad is final when it returns
      step          joins the exchange if backward touched nothing here, then the user's own step
    turn ends       joins, restores what a ghost has touched, counts the step, hands the records over about once a second
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from paceline.data.loader import ShareLoader, Turn
from paceline.parallel.batchnorm import is_synchronous
from paceline.session.folder import PARTS
from paceline.sync.backward import Backward
from paceline.sync.base import Scene, Slot


class Beat(Protocol):
    """Who wants to know of each finished step."""

    def step_ended(self, turn: Turn, seconds: dict[str, float]) -> None:
        """Step `turn` of a training loader is over; where its time went."""
        ...


class Turns:
    """Follows the loaders of a run (their `Watcher`) and keeps the `Moment` of the scene."""

    def __init__(self, scene: Scene, backward: Backward, beat: Beat) -> None:
        self.scene, self.backward, self.beat = scene, backward, beat
        self.turn: Turn | None = None
        self.loader: ShareLoader | None = None
        self.steps = 0
        self.samples = 0
        self.quiet = 0  # depth of no_sync
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)  # of the whole run: data, exchange, wait, compute
        self.models: list[nn.Module] = []
        self.frozen: list[Slot] = []
        self._buffers: list[tuple[Tensor, Tensor]] = []
        self._step: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._asked = self._began = time.perf_counter()
        self._exposed = self._waited = 0.0
        self._announced = False

    # ---- the loader's calls

    def epoch_begins(self, loader: ShareLoader) -> None:
        """See `Watcher`."""
        self._asked = time.perf_counter()

    def turn_begins(self, loader: ShareLoader, turn: Turn) -> None:
        """See `Watcher`."""
        now = time.perf_counter()
        self.turn, self.loader = turn, loader
        self._begin_clock(now)
        if not turn.train:
            return
        moment = self.scene.moment
        moment.scale, moment.ghost = turn.scale, turn.ghost
        moment.silent = not turn.last_micro or self.quiet > 0
        self.backward.ran = False
        if turn.micro == 0:
            self.backward.turn()
            self.thaw()
        if turn.ghost:
            self._buffers = [(buffer, buffer.detach().clone()) for buffer in self._touchable()]

    def turn_ends(self, loader: ShareLoader) -> None:
        """See `Watcher`."""
        turn = self.turn
        if turn is None:
            return
        if turn.train:
            for buffer, kept in self._buffers:
                buffer.detach().copy_(kept)
            self._buffers = []
            if turn.last_micro:
                self.backward.join("the next batch")
        self._stop_clock()
        self.turn = None
        if turn.train and turn.last_micro:
            self.steps += 1
            self.samples += turn.global_batch
            self.scene.moment.step = self.scene.trace.step = self.steps
            self.backward.sync.commit()
            seconds, self._step = self._step, dict.fromkeys(PARTS, 0.0)
            self.beat.step_ended(turn, seconds)
        self._asked = time.perf_counter()

    def epoch_ends(self, loader: ShareLoader) -> None:
        """See `Watcher`."""
        self.scene.moment.silent = self.quiet > 0
        self.scene.moment.ghost = False
        self.scene.moment.scale = 1.0 / self.scene.group.size

    # ---- an optimizer's calls

    @property
    def acting(self) -> bool:
        """Whether step, scheduler.step and the like act: not within the micro-batches before the last, nor for a batch without weight."""
        turn = self.turn
        if turn is None or not turn.train:
            return True
        if turn.total == 0 and self.backward.scene.group.size >= 1:
            if not self._announced:
                self._announced = True
                self.scene.say(f"all weights of step {self.steps} are zero: no update is made for such a batch")
            return False
        return turn.last_micro

    @property
    def clearing(self) -> bool:
        """Whether zero_grad acts: before backward on the first micro-batch, after backward on the last."""
        turn = self.turn
        if turn is None or not turn.train:
            return True
        return turn.last_micro if self.backward.ran else turn.micro == 0

    def ready(self, where: str) -> None:
        """Gradients are about to be used: take part in the exchange if backward has touched nothing here."""
        if self.turn is None or self.turn.train:
            self.backward.join(where)

    def thaw(self) -> None:
        """Take parameters in that were frozen at prepare and are not any more."""
        if self.frozen and any(slot.parameter.requires_grad for slot in self.frozen):
            self.backward.watch([slot for slot in self.frozen if slot.parameter.requires_grad])
            self.frozen = [slot for slot in self.frozen if not slot.parameter.requires_grad]

    def place(self, steps: int) -> None:
        """Stand at this step (after a resume)."""
        self.steps = self.scene.moment.step = self.scene.trace.step = steps

    def finish(self) -> None:
        """The run ends: close the turn that a `break` left open."""
        if self.turn is not None and self.loader is not None:
            self.turn_ends(self.loader)

    # ---- clocks

    def _begin_clock(self, now: float) -> None:
        data = now - self._asked
        self._add("data", data)
        self.scene.trace.record("data", "data", int(self._asked * 1e9), int(now * 1e9))
        self._began = now
        self._exposed, self._waited = self.backward.seconds, self.scene.group.waited

    def _stop_clock(self) -> None:
        now = time.perf_counter()
        whole = now - self._began
        waited = min(self.scene.group.waited - self._waited, whole)
        exchange = min(max(self.backward.seconds - self._exposed - waited, 0.0), whole - waited)
        self._add("wait", waited)
        self._add("exchange", exchange)
        self._add("compute", whole - waited - exchange)
        self.scene.trace.record("turn", "step", int(self._began * 1e9), int(now * 1e9))

    def _add(self, kind: str, seconds: float) -> None:
        self._step[kind] += seconds
        self.seconds[kind] += seconds

    def _touchable(self) -> Sequence[Tensor]:
        """Float buffers that a ghost's forward may change; those of synchronous BatchNorm are right on a ghost too."""
        found = []
        for model in self.models:
            for module in model.modules():
                if not is_synchronous(module):
                    found += [b for b in module.buffers(recurse=False) if b.is_floating_point() or b.dtype == torch.int64]
        return found


