"""Optimizer steps on servers: of all parameters, or of sparse tables alone.

A run of one process doesn't use this.
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
    """Steps and clips on the servers of one run.

    Servers always step the sparse tables. They step all other parameters if the strategy is a
    `ParameterServer`.
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
        """Step an optimizer, on servers and here.

        Args:
            optimizer: The optimizer.
            own_step: Its own step, for parameters that are not on servers.
            closure: Computes the loss again, as for `optimizer.step`.
            args: Arguments of `own_step`.
            kwargs: Keyword arguments of `own_step`.

        Returns:
            The result of `own_step`, or of the closure if servers step.
        """
        loop, tables = self._loop, self._tables
        remote_all = self._sync is not None and self._sync.steps(optimizer)
        remote_rows = tables.steps_tables(optimizer)
        loop.transaction.note_step(
            remote=remote_all or (remote_rows and tables.recoverable_steps is not None)
        )
        if not remote_all and not remote_rows:
            result = own_step(optimizer, *args, **kwargs)
        else:
            result = None
            if closure is not None:
                with torch.enable_grad():
                    result = closure()
            loop.exchange_due_gradients("optimizer.step")
            self._step_on_servers(optimizer, own_step, remote_all=remote_all)
            # A worker was lost: the turn is dealt again, so this step doesn't count.
            if not loop.is_acting:
                return result
        loop.note_optimizer_step(optimizer)
        return result

    def _step_on_servers(self, optimizer: Optimizer, own: OwnStep, *, remote_all: bool) -> None:
        """Step the optimizer's tables on servers, and its other parameters there or here.

        `remote_all`: servers step the other parameters, too. No step happens if the turn is dealt
        again.
        """
        loop, tables = self._loop, self._tables
        if remote_all:
            self._refuse_mixed(optimizer)
        if remote_all and optimizer.state:
            check_memory(optimizer, tables.get_handle_ids())
        # Each part may find that a worker was lost, and `is_acting` is false from then on. Tables
        # step last, once no other part can fail.
        self._push_rows(optimizer, last=not remote_all)
        if loop.is_acting:
            with tables.hide_gradients(optimizer):
                self._step_all(optimizer) if remote_all else own(optimizer)
        if loop.is_acting:
            tables.make_steps(optimizer)

    def _refuse_mixed(self, optimizer: Optimizer) -> None:
        """Raise `UsageError` if p.grad sums passes whose weights differ.

        Servers get one weight with each gradient.
        """
        mixed = self._loop.backward.mixed
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        name = None if mixed is None else mixed.find_mixed(stepped)
        if name is not None:
            raise UsageError(
                f"p.grad of {name} adds up batches in which this worker has shares of different "
                "size, and goes to servers with the weight of the last one: run all backward "
                "passes but the last under run.no_sync(), which weights each batch"
            )

    def _push_rows(self, optimizer: Optimizer, *, last: bool) -> None:
        """Send servers the gradients for the next step of the optimizer's tables.

        `last`: no later part of the step can fail.
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
        """Step all parameters but tables on servers. Collective."""
        loop, sync = self._loop, self._sync
        assert sync is not None
        # Training waits for the servers, so this time counts as exposed communication.
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
        """Clip gradients on servers or here. Returns the norm that they had before."""
        loop, sync, clipping = self._loop, self._sync, self._clipping
        if sync is None or clipping is None or not self.steps_all:
            return nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)
        norm = loop.transaction.step_remotely(
            lambda: clipping.clip(parameters, max_norm, norm_type), "run.clip", apart=loop.apart
        )
        return torch.zeros(()) if norm is None else norm
