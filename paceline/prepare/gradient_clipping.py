"""Clips the exchanged gradients of a run, for `run.clip` and for torch's functions.

usually                 gradients that are not exchanged yet are exchanged, and torch clips
if servers step         servers clip by the norm, as only they have all gradients
if models are cut       the norm is taken over all workers
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from paceline.errors import UsageError
from paceline.loop.turns import TrainingLoop
from paceline.parallel.clipping import (
    check_norm_is_finite,
    compute_local_norm,
    register_clipper,
    unregister_clipper,
)
from paceline.prepare import clipping
from paceline.prepare.cuts import ModelCuts
from paceline.prepare.remote import RemoteSteps
from paceline.workers.axes import RunAxes

CALL = "call nn.utils.clip_grad_norm_(model.parameters(), max_norm) or run.clip(model, max_norm)"


class GradientClipping:
    """Clips gradients of one run (a `GradientClipper`)."""

    def __init__(
        self, loop: TrainingLoop, cuts: ModelCuts, axes: RunAxes, remote: RemoteSteps
    ) -> None:
        self._loop, self._cuts, self._axes, self._remote = loop, cuts, axes, remote
        self._followed_ids: set[int] = set()  # ids of parameters
        # Parameters that are not trained themselves, because pieces of them are.
        self._whole_parameters: list[weakref.ref[Parameter]] = []

    def follow_parameters(self, parameters: Iterable[Tensor]) -> None:
        """Clip the gradients of these parameters in torch's place, until the run ends."""
        new = [parameter for parameter in parameters if id(parameter) not in self._followed_ids]
        if new:
            self._followed_ids.update(map(id, new))
            register_clipper(new, self, cut=bool(self._axes.cut_axes))
            # With shard(zero=1) and (zero=2) the model has whole parameters, which are not trained.
            replaced = [
                parameter
                for parameter in new
                if isinstance(parameter, Parameter)
                and self._cuts.replacement_of(parameter) is not None
            ]
            self._whole_parameters += map(weakref.ref, replaced)
            self._loop.undos.append(functools.partial(unregister_clipper, new))

    def clip_gradients(
        self, parameters: list[Tensor], max_norm: float, norm_type: float, *, finite: bool = False
    ) -> Tensor:
        """Clip exchanged gradients on the workers or servers that have them.

        Args:
            parameters: Parameters whose gradients are clipped.
            max_norm: Largest norm that is left as it is.
            norm_type: Exponent of the norm.
            finite: Whether a norm that is not finite raises `RuntimeError` on all workers.
                Default: no.

        Returns:
            The norm before.
        """
        # Each worker has a part of the gradients, so the norm is taken over all workers.
        if self._axes.cut_axes:
            act = functools.partial(
                clipping.clip_gradients,
                parameters,
                max_norm,
                norm_type,
                finite=finite,
                cuts=self._cuts,
                axes=self._axes,
            )
            return self._axes.slice.agreement.attempt_call(act, "run.clip")
        norm = self._remote.clip_gradients(parameters, max_norm, norm_type)
        if finite:
            check_norm_is_finite(float(norm), norm_type)
        return norm

    def clip_norm(
        self,
        parameters: list[Tensor],
        max_norm: float,
        norm_type: float,
        own: Callable[[], Tensor],
        *,
        finite: bool = False,
    ) -> Tensor:
        """Clip by the norm, in place of torch's function.

        Args:
            parameters: Parameters whose gradients are clipped.
            max_norm: Largest norm that is left as it is.
            norm_type: Exponent of the norm.
            own: Calls torch's function as the script called it.
            finite: Whether a norm that is not finite raises `RuntimeError`. Default: no.

        Returns:
            The norm before.
        """
        loop = self._loop
        loop.exchange_due_gradients("clip_grad_norm_")
        if not (self._axes.cut_axes or self._remote.steps_all):
            return own()
        if loop.is_acting:
            return self.clip_gradients(parameters, max_norm, norm_type, finite=finite)
        # No step follows, so a norm without any exchange is good enough for the script to print.
        return compute_local_norm(
            [parameter.grad for parameter in parameters if parameter.grad is not None], norm_type
        )

    def clip_each(self, name: str, own: Callable[[], Any]) -> Any:
        """Clip each gradient by itself, by torch's function `name`.

        Raises `UsageError` if only servers have the gradients of a step.
        """
        loop = self._loop
        if self._remote.steps_all and loop.abilities.sample_queue is None:
            raise UsageError(
                f"{name} would clip this worker's own gradients, but with ParameterServer only "
                "servers have the gradients of all workers, which a step uses: call "
                "run.clip(model, max_norm), or use AllReduce"
            )
        loop.exchange_due_gradients(name)
        own()

    def check_norm(self, parameters: list[Tensor]) -> None:
        """Raise `UsageError` if workers have parts of these parameters, or different layers."""
        for parameter in parameters:
            placement = (
                self._cuts.placements.placement_of(parameter)
                if isinstance(parameter, Parameter)
                else None
            )
            along = (
                [name for name in placement.axes if name in self._axes.cut_axes]
                if placement is not None
                else []
            )
            if placement is not None and along:
                raise UsageError(
                    f"get_total_norm of the gradient of {placement.name} would be the norm of "
                    f"this worker's part alone, as the model is cut along `{along[0]}`: {CALL}, "
                    "which take the norm over all workers"
                )

    def check_idle(self, name: str) -> None:
        """Raise `UsageError` if pieces have gradients but their whole parameters have none."""
        pieces = [
            self._cuts.replacement_of(parameter)
            for ref in self._whole_parameters
            if (parameter := ref()) is not None and parameter.grad is None
        ]
        if any(piece is not None and piece.grad is not None for piece in pieces):
            raise UsageError(
                f"{name} was given no gradient and would do nothing: "
                "a model is cut by shard(zero=1) or (zero=2), and its pieces have the gradients; "
                f"{CALL}, which find them"
            )
