"""A step in one call: forward and backward of a model whose layers may be on several workers.

    loss = run.step(model, x, y, loss=F.cross_entropy)

does the work of `loss = F.cross_entropy(model(x), y); loss.backward()`. It is the only way if the
mesh has an axis `stage`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from paceline.comm.group_protocol import piece_bounds
from paceline.data.spec import Weigh
from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice, format_count
from paceline.loop.cut_models import CutModels
from paceline.loop.ghost import copy_buffers, restore_buffers
from paceline.loop.halving import HalvedSteps, OtherLeaves, StepBatch, find_leaves
from paceline.loop.out_of_memory import is_out_of_memory
from paceline.loop.turns import TrainingLoop
from paceline.parallel.batchnorm import BatchNorm
from paceline.parallel.containers import tree_leaves
from paceline.parallel.pipelining.batches import BatchShare, Loss, refuse_loss_class
from paceline.state.tensor_version import version_of
from paceline.sync.autograd_engine import STEPPED_ATTRIBUTE

MicroBatches = int | Literal["auto"]
UNDIVIDED = "run.step didn't take this batch in halves: {}"


class SteppedModels:
    """Steps of the models of a run."""

    def __init__(self, loop: TrainingLoop, cuts: CutModels) -> None:
        self._loop, self._cuts = loop, cuts
        self._halved = HalvedSteps(lambda: loop.context.group.rank)

    @property
    def _is_uncut(self) -> bool:
        """Whether all of the models is on each worker, and so are their gradients."""
        return not self._cuts.applied and not self._loop.apart

    def take_step(
        self,
        model: nn.Module,
        given: tuple[Any, ...],
        options: Mapping[str, Any],
        loss: Loss | None,
        weigh: Weigh | None,
        *,
        micro_batches: MicroBatches = "auto",
    ) -> Tensor:
        """Run forward with all of `given` but the last, and backward from `loss(output, last)`.

        Returns the loss.
        """
        check_micro_batches(micro_batches)
        refuse_loss_class("run.step", loss)
        if not callable(loss):
            raise UsageError(
                "run.step needs a loss, a function of the output and the target: "
                "run.step(model, x, y, loss=F.cross_entropy)"
            )
        if not given:
            raise UsageError(
                "run.step got no batch: write run.step(model, x, y, loss=...), with the target of "
                "the loss last"
            )
        *inputs, target = given
        pipeline = self._cuts.pipeline_of(model)
        if pipeline is None:
            for observer in self._loop.observers.model_stepped:
                observer(model, given, loss)
            batch = StepBatch(model, given, options)
            return (
                self._step_in_memory(batch, loss, weigh)
                if micro_batches == "auto"
                else self._step_in_parts(batch, loss, weigh, micro_batches)
            )
        if micro_batches != "auto":
            raise UsageError(
                f"run.step(micro_batches={micro_batches}): a pipeline cuts batches by itself; "
                "say pipeline(..., micro_batches=k)"
            )
        loop = self._loop
        loop.prepare_forward(tuple(inputs), dict(options))
        terms, turn = loop.terms, loop.training_turn if torch.is_grad_enabled() else loop.turn
        reduction, counted = ("mean", None) if terms is None else (terms.loss, terms.weigh)
        weight = (
            None
            if turn is None or turn.ghost or weigh is not None or counted is None
            else turn.weight
        )
        scale = (
            self._find_loss_scale(next(model.parameters()).device)
            if torch.is_grad_enabled()
            else 1.0
        )
        checked = functools.partial(self._check_loss, model, loss)
        share = BatchShare(
            tuple(inputs), options, target, checked, reduction, weigh or counted, scale, weight
        )
        self._cuts.level_ties()
        return _mark_stepped(
            torch.tensor(pipeline.run_step(share, loop.backward.join_passes), dtype=torch.float64)
        )

    def _check_loss(self, model: nn.Module, loss: Loss, output: Any, target: Any) -> Tensor:
        """Return the loss of a pipeline's output.

        Raises `UsageError` where it trains something else, which the last stage alone would.
        """
        value = loss(output, target)
        if isinstance(value, Tensor) and value.requires_grad and value.grad_fn is not None:
            ends = [
                leaf.grad_fn
                for leaf in tree_leaves(output)
                if isinstance(leaf, Tensor) and leaf.grad_fn is not None
            ]
            for leaf in find_leaves(value, beside=ends):
                named = [
                    *model.named_parameters(),
                    *((slot.name, slot.parameter) for slot in self._loop.backward.watched.slots),
                ]
                if name := next((name for name, parameter in named if parameter is leaf), ""):
                    raise UsageError(
                        f"run.step: the loss uses the parameter {name} itself, and it is computed "
                        "where the last stage is: others would "
                        "not be in a penalty, or not train it. Let the optimizer do a penalty "
                        "(weight_decay), and make what is trained a layer of the model"
                    )
        return value

    def _step_in_memory(self, batch: StepBatch, loss: Loss, weigh: Weigh | None) -> Tensor:
        halved = self._halved
        if not torch.is_grad_enabled():
            return self._go_backward(_compute_loss(batch, loss))
        first = halved.is_first(self._loop.steps_made)
        if not first and halved.max_rows is None:
            return self._go_backward(_compute_loss(batch, loss))
        apart = None if self._is_uncut else "models are cut, or workers are out of lockstep"
        if obstacle := apart or batch.find_obstacle() or self._find_unknown_weights(weigh):
            return self._step_undivided(batch, loss, obstacle)
        count = batch.count_rows()
        if (halved.max_rows or count) >= count:
            before, saved = (
                self._fingerprint_gradients(batch),
                copy_buffers([batch.model]) if first else [],
            )
            try:
                return self._go_backward(_compute_loss(batch, loss))
            except Exception as error:
                if not (first and halved.may_halve(error, count)):
                    raise
                if self._fingerprint_gradients(batch) != before:
                    error.add_note(
                        UNDIVIDED.format("gradients were on their way when memory ran out")
                    )
                    raise
            restore_buffers(saved)
            halved.halve_rows(count)

        def weights(parts: Sequence[StepBatch]) -> Sequence[float]:
            return self._weigh_parts(
                [part.arguments for part in parts], [part.count_rows() for part in parts], weigh
            )

        value = functools.partial(_compute_loss, loss=loss)
        try:
            return _mark_stepped(
                halved.step_in_parts(
                    batch,
                    count,
                    value,
                    weights,
                    lambda x: self._find_loss_scale(x.device),
                    first=first,
                )
            )
        except OtherLeaves:
            pass  # all that the failed try has held is freed here
        return self._step_undivided(
            batch, loss, "the loss has gradients for tensors that are no parameters of the model"
        )

    def _step_in_parts(
        self, batch: StepBatch, loss: Loss, weigh: Weigh | None, micro_batches: int
    ) -> Tensor:
        """Go forward and back in a number of parts; the last one exchanges the sum of all."""
        call = f"run.step(micro_batches={micro_batches})"
        if reason := self._find_unknown_weights(weigh):
            raise UsageError(f"{call}: {reason}")
        count = batch.count_rows()
        number = min(micro_batches, count)
        if number < micro_batches and self._exchanges_in_forward(batch.model):
            raise UsageError(
                f"{call}: this worker's share of the batch is {format_count(count, 'sample')}, and "
                "workers meet in each forward of a "
                f"{type(batch.model).__name__} that is cut or has BatchNorm: "
                f"say micro_batches={count} or less, or drop_last=True"
            )
        parts = [batch.take_rows(start, stop, count) for start, stop in piece_bounds(count, number)]
        weights = self._weigh_parts(
            [part.arguments for part in parts], [part.count_rows() for part in parts], weigh
        )
        total: Tensor | None = None
        for place, (part, weight) in enumerate(zip(parts, weights, strict=True)):
            quiet = place < number - 1 and torch.is_grad_enabled()
            with self._loop.hold_exchanges() if quiet else contextlib.nullcontext():
                value = _compute_loss(part, loss)
                if value.requires_grad and torch.is_grad_enabled():
                    (value * (weight * self._find_loss_scale(value.device))).backward()
            added = value.detach() * weight
            total = added if total is None else total + added
        assert total is not None
        return _mark_stepped(total)

    def _exchanges_in_forward(self, model: nn.Module) -> bool:
        """Whether workers exchange something in each forward, so all need as many of them."""
        several = self._loop.context.group.size > 1
        return bool(self._cuts.applied) or (
            several
            and any(isinstance(module, BatchNorm) and module.training for module in model.modules())
        )

    def _step_undivided(self, batch: StepBatch, loss: Loss, obstacle: str) -> Tensor:
        try:
            return self._go_backward(_compute_loss(batch, loss))
        except Exception as error:
            if is_out_of_memory(error):
                error.add_note(UNDIVIDED.format(obstacle))
            raise

    def _fingerprint_gradients(self, batch: StepBatch) -> list[Any]:
        """Values that change as soon as a backward comes to a parameter."""
        grads = [parameter.grad for parameter in batch.model.parameters()]
        return [
            self._loop.backward.begun,
            *((id(grad), None if grad is None else version_of(grad)) for grad in grads),
        ]

    def _find_unknown_weights(self, weigh: Weigh | None) -> str | None:
        """Reason why the weights of parts are unknown; None if they are known."""
        terms = self._loop.terms
        if terms is None:
            return (
                "outside of the loop over a prepared loader it isn't known whether the loss is a "
                "mean or a sum"
            )
        if weigh is not None or terms.weigh is None:
            return None
        return (
            "weigh= of run.prepare counts batches of the loader: give run.step(..., weigh=) what "
            "counts its own arguments"
        )

    def _weigh_parts(
        self, parts: Sequence[tuple[Any, ...]], sizes: Sequence[int], weigh: Weigh | None
    ) -> Sequence[float]:
        """Weights of the parts of a batch in its loss: 1 in a sum, else by samples or `weigh`."""
        terms = self._loop.terms
        if terms is not None and terms.loss == "sum":
            return [1.0] * len(parts)
        part_weights = (
            [float(size) for size in sizes]
            if weigh is None
            else [float(weigh(part)) for part in parts]
        )
        return [
            each / math.fsum(part_weights) if any(part_weights) else 0.0 for each in part_weights
        ]

    def _go_backward(self, value: Tensor) -> Tensor:
        if value.requires_grad and torch.is_grad_enabled():
            (value * self._find_loss_scale(value.device)).backward()
        return _mark_stepped(value.detach())

    def _find_loss_scale(self, device: torch.device) -> float:
        """Factor of the loss before backward: the scale of the GradScalers, if there are any."""
        scalers = [scaler for scaler in self._loop.scalers if scaler.is_enabled()]
        for scaler in scalers:
            # a scaler has no state before its first loss
            scaler.scale(torch.zeros((), device=device))
        return self._loop.context.step_state.loss_scale() if scalers else 1.0


def check_micro_batches(micro_batches: Any) -> None:
    """Raise `UsageError` for what is no number of micro-batches."""
    if (
        isinstance(micro_batches, int)
        and not isinstance(micro_batches, bool)
        and micro_batches >= 1
    ):
        return
    if wrong := describe_unknown_choice("micro_batches", micro_batches, MicroBatches):
        raise UsageError(f"{wrong}; or the number of parts, 1 or more")
    if micro_batches != "auto":
        raise UsageError(
            f"micro_batches={micro_batches!r} is no number of parts; give 1 or more, or 'auto'"
        )


def _compute_loss(batch: StepBatch, loss: Loss) -> Tensor:
    """Go forward, and return the loss."""
    *inputs, target = batch.given
    value: Any = loss(batch.model(*inputs, **batch.options), target)
    if not isinstance(value, Tensor) or value.numel() != 1:
        raise UsageError(
            f"run.step: the loss is a {type(value).__qualname__} that isn't one number; give e.g. "
            "loss=F.cross_entropy"
        )
    return value


def _mark_stepped(loss: Tensor) -> Tensor:
    """Mark a loss that nothing is left to go back from."""
    setattr(loss, STEPPED_ATTRIBUTE, True)
    return loss
