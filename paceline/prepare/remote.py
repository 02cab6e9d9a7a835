"""Optimizers that step on servers, for all parameters or for sparse tables alone.

Optimizers of one process never come here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.loop.turns import TrainingLoop
from paceline.prepare.checks import check_memory
from paceline.servers.run_tables import RunTables

OwnStep = Callable[..., Any]


class RemoteSteps:
    """Steps and clips on servers for one run: `tables`, and all parameters if the strategy says
    so.
    """

    def __init__(self, loop: TrainingLoop, tables: RunTables) -> None:
        self._loop, self._sync, self._clipping, self._tables = (
            loop,
            loop.abilities.remote,
            loop.abilities.clipping,
            tables,
        )

    def step(
        self,
        optimizer: Optimizer,
        own_step: OwnStep,
        closure: Callable[[], Any] | None,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Make a step of `optimizer`; `own_step` is its own step, for what isn't on servers."""
        loop, tables = self._loop, self._tables
        whole, rows = (
            self._sync is not None and self._sync.steps(optimizer),
            tables.steps_tables(optimizer),
        )
        loop.transaction.note_step(remote=whole or (rows and tables.recoverable_steps is not None))
        if not whole and not rows:
            result = own_step(optimizer, *args, **kwargs)
        else:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            loop.exchange_due_gradients("optimizer.step")
            self._step_on_servers(optimizer, own_step, whole=whole)
            if not loop.is_acting:
                return result
        loop.note_optimizer_step(optimizer)
        return result

    def _step_on_servers(self, optimizer: Optimizer, own: OwnStep, *, whole: bool) -> None:
        """Make a step of tables, of everything else (`whole`), or of both.

        Nothing of it is made where the turn is dealt again.
        """
        loop, tables = self._loop, self._tables
        if whole:
            self._refuse_mixed(optimizer)
        if whole and optimizer.state:
            check_memory(optimizer, tables.get_handle_ids())
        self._push_rows(optimizer, last=not whole)
        if loop.is_acting:
            with tables.hide_gradients(optimizer):
                self._step_all(optimizer) if whole else own(optimizer)
        if loop.is_acting:
            tables.make_steps(optimizer)

    def _refuse_mixed(self, optimizer: Optimizer) -> None:
        """Raise `UsageError` if p.grad sums passes that need separate weights on the way to
        servers.
        """
        mixed = self._loop.backward.mixed
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        name = None if mixed is None else mixed.find_mixed(stepped)
        if name is not None:
            raise UsageError(
                f"p.grad of {name} adds up batches that this worker has different parts of, and "
                "goes to servers with the weight "
                "of the last: add them up under run.no_sync(), all but the last, which weights each"
            )

    def _push_rows(self, optimizer: Optimizer, *, last: bool) -> None:
        """Give servers the gradients for the next step of the optimizer's tables.

        `last`: nothing else of the step can fail.
        """
        loop, tables = self._loop, self._tables
        if tables.recoverable_steps is None or not tables.steps_tables(optimizer):
            tables.push_gradients(optimizer)
        else:
            loop.transaction.step_remotely(
                lambda: tables.push_gradients(optimizer),
                "optimizer.step",
                last=last,
                apart=loop.apart,
            )

    def _step_all(self, optimizer: Optimizer) -> None:
        """Step everything but tables on servers. Collective."""
        loop, sync = self._loop, self._sync
        assert sync is not None
        began = time.perf_counter()
        loop.transaction.step_remotely(
            lambda: sync.step(optimizer), "optimizer.step", last=True, apart=loop.apart
        )
        loop.backward.meter.expose(time.perf_counter() - began)

    @property
    def steps_all(self) -> bool:
        """Whether servers step all parameters but tables."""
        return self._sync is not None and self._sync.attached

    def clip_gradients(self, parameters: list[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip gradients where they are, and return their norm before."""
        loop, sync, clipping = self._loop, self._sync, self._clipping
        if sync is None or clipping is None or not self.steps_all:
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        norm = loop.transaction.step_remotely(
            lambda: clipping.clip(parameters, max_norm, norm_type), "run.clip", apart=loop.apart
        )
        return torch.zeros(()) if norm is None else norm
