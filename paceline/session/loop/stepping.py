"""A step of a run in one call: forward and backward of a model, whose layers may be on several workers.

    loss = run.step(model, x, y, loss=F.cross_entropy)

is what `loss = F.cross_entropy(model(x), y); loss.backward()` is, and the only way where the mesh has an axis `stage`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.spec import Weigh
from paceline.errors import UsageError
from paceline.parallel.pipelining.batches import Loss, Share
from paceline.session.loop.turns import TrainingLoop
from paceline.session.prepare.cuts import ModelCuts
from paceline.sync.autograd_engine import STEPPED


class SteppedModels:
    """Steps of the models of a run."""

    def __init__(self, loop: TrainingLoop, cuts: ModelCuts) -> None:
        self._loop, self._cuts = loop, cuts

    def step(self, model: nn.Module, given: tuple[Any, ...], options: Mapping[str, Any], loss: Loss | None, weigh: Weigh | None) -> Tensor:
        """Go forward with all of `given` but the last, and back from `loss(output, last)`; return that."""
        if not callable(loss):
            raise UsageError("run.step needs a loss, a function of the output and the target: run.step(model, x, y, loss=F.cross_entropy)")
        if not given:
            raise UsageError("run.step got no batch: write run.step(model, x, y, loss=...), with the target of the loss last")
        *inputs, target = given
        found = self._cuts.pipeline_of(model)
        if found is None:
            return self._here(model, lambda: loss(model(*inputs, **options), target))
        loop = self._loop
        loop.forward(tuple(inputs), dict(options))
        terms, turn = loop.terms, loop.training if torch.is_grad_enabled() else loop.turn
        reduction, counted = ("mean", None) if terms is None else (terms.loss, terms.weigh)
        weight = None if turn is None or turn.ghost or weigh is not None or counted is None else turn.weight
        scale = self._loss_scale(next(model.parameters()).device) if torch.is_grad_enabled() else 1.0
        share = Share(tuple(inputs), options, target, loss, reduction, weigh or counted, scale, weight)
        if torch.is_grad_enabled() and (loop.backward.replicas_diverge or loop.context.accounts):
            self._cuts.level_ties(found)
        return _stepped(torch.tensor(found.step(share, loop.backward.joined), dtype=torch.float64))

    def _here(self, model: nn.Module, act: Callable[[], Tensor]) -> Tensor:
        value = act()
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise UsageError(f"run.step: the loss is a {type(value).__qualname__} that isn't one number; give e.g. loss=F.cross_entropy")
        if value.requires_grad and torch.is_grad_enabled():
            (value * self._loss_scale(value.device)).backward()
        return _stepped(value.detach())

    def _loss_scale(self, device: torch.device) -> float:
        """Return what a loss is multiplied by before it is gone back from: the scale of the GradScalers, which have one, if any."""
        scalers = [scaler for scaler in self._loop.scalers if scaler.is_enabled()]
        for scaler in scalers:
            scaler.scale(torch.zeros((), device=device))  # a scaler has no state before its first loss
        return self._loop.context.step_state.loss_scale() if scalers else 1.0


def _stepped(loss: Tensor) -> Tensor:
    """Mark a loss that nothing is left to go back from."""
    setattr(loss, STEPPED, True)
    return loss
