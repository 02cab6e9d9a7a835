"""The strategy for Fabric: each call of Fabric goes to a run of paceline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.bridges import foreign_values, worker_states
from paceline.bridges.bridge_run import BridgeRun
from paceline.bridges.fabric.checks import (
    check_devices,
    check_group,
    choose_start_device,
    expect_device,
)
from paceline.bridges.fabric.library import LIGHTNING
from paceline.bridges.fabric.loader import FabricLoader
from paceline.errors import UsageError
from paceline.session.run import Run
from paceline.sync.base import Strategy as SyncStrategy

LIGHTNING.check_version()

# what follows needs the library, whose absence is told in one line above
from lightning.fabric.strategies.strategy import Strategy, _BackwardSyncControl  # noqa: E402
from lightning.fabric.utilities.rank_zero import rank_zero_only  # noqa: E402


class FabricStrategy(Strategy):
    """Trains with the workers that `paceline run` or torchrun has started.

    >>> fabric = Fabric(strategy=PacelineStrategy(sync="AllReduce(codec=int8())"))
    >>> fabric.launch()

    The batch size of a loader is that of all workers together. `fabric.launch` opens the run, and
    starts no processes. Without a launcher there is one worker.

    Args:
        sync: When and how workers exchange, as an object or as text. Default: `AllReduce()`.
            `paceline run --sync` overrides it.
        options: Options of `pl.start`, such as `seed`, `name` or `deadline`, and these of
            `run.prepare`: `shares`, `loss`, `weigh`, `cost`, `batchnorm`, `shard` and `pad`.

    Raises:
        UsageError: An option can't be honoured under Fabric.
    """

    def __init__(self, sync: SyncStrategy | str | None = None, **options: Any) -> None:
        super().__init__()
        self._bridge = BridgeRun("Fabric", {"sync": sync, **options})
        self._num_nodes = 1
        self.parallel_devices: list[torch.device] = []
        self._backward_sync_control = _NoSync(self._bridge)
        rank_zero_only.rank = self.global_rank

    # ---- where this worker is

    @property
    def run(self) -> Run:
        """The run, for all that Fabric has no word for, such as `run.log` or `run.gather`."""
        return self._bridge.run

    @property
    def global_rank(self) -> int:
        """Rank of this worker among all workers."""
        return self.run.rank if self._bridge.is_open else self._bridge.place.rank

    @property
    def local_rank(self) -> int:
        """Rank of this worker among the workers of its host."""
        return self.run.local_rank if self._bridge.is_open else self._bridge.place.local_rank

    @property
    def node_rank(self) -> int:
        """Number of this worker's host, as the launcher counts them."""
        return self._bridge.place.host_rank or 0

    @property
    def world_size(self) -> int:
        """Number of workers."""
        return self.run.size if self._bridge.is_open else self._bridge.place.size

    @property
    def num_nodes(self) -> int:
        """Number of hosts that the script asks for."""
        return self._num_nodes

    @property
    def is_global_zero(self) -> bool:
        """Whether this is the first of all workers."""
        return self.global_rank == 0

    @property
    def root_device(self) -> torch.device:
        """Device of this worker's models and batches."""
        if (device := self._bridge.device) is not None:
            return device
        return expect_device(self.accelerator, self.local_rank)

    # ---- the run

    def setup_environment(self) -> None:
        """Open the run. Collective."""
        check_devices(self, self._bridge)
        self._bridge.open(choose_start_device(self.accelerator))
        rank_zero_only.rank = self.global_rank
        super().setup_environment()

    def close(self) -> None:
        """Close the run together with all workers, before the process exits."""
        self._bridge.close()

    # ---- models, optimizers and loaders

    def module_to_device(self, module: nn.Module) -> None:
        """Move a model to the device of this worker."""
        module.to(self.root_device)

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Prepare a model. Collective."""
        self._bridge.prepare(module, *self._find_scalers())
        return module

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        """Prepare an optimizer. Collective."""
        self._bridge.prepare(optimizer)
        return optimizer

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[Optimizer], Any]:
        """Prepare a model, its optimizers and a scheduler. Collective."""
        schedulers = [] if scheduler is None else [scheduler]
        self._bridge.prepare(module, *optimizers, *schedulers, *self._find_scalers())
        return module, optimizers, scheduler

    def _find_scalers(self) -> list[Any]:
        """The GradScaler of a precision that has one."""
        scaler = getattr(self.precision, "scaler", None)
        return [] if scaler is None else [scaler]

    def process_dataloader(self, dataloader: DataLoader[Any]) -> Any:
        """Prepare a loader, whose batch size is that of all workers. Collective."""
        return FabricLoader(self._bridge.prepare(dataloader), dataloader)

    # ---- the loop

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """Clip gradients to a norm, and return the norm before; 0 in a turn that is dealt again."""
        self._bridge.loop.exchange_due_gradients("fabric.clip_gradients")
        if not self._bridge.loop.is_acting:
            return torch.zeros((), device=self.root_device)
        norm: Tensor = super().clip_gradients_norm(
            module, optimizer, max_norm, norm_type, error_if_nonfinite
        )
        return norm

    def clip_gradients_value(
        self, module: nn.Module, optimizer: Optimizer, clip_val: float
    ) -> None:
        """Clip each element of the gradients."""
        self._bridge.loop.exchange_due_gradients("fabric.clip_gradients")
        if self._bridge.loop.is_acting:
            super().clip_gradients_value(module, optimizer, clip_val)

    # ---- between workers

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor of all workers, in a new first dim if there are several. Collective."""
        check_group(group)
        if sync_grads:
            raise UsageError(
                "all_gather(sync_grads=True) can't be honoured: gradients are exchanged by "
                "backward, and each worker's loss counts its own samples"
            )
        return foreign_values.gather_stacked(self.run, tensor)

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all workers, in place. Collective.

        A mean inside the loop over a loader is weighted by samples.
        """
        check_group(group)
        result = foreign_values.reduce_value(self.run, tensor, reduce_op)
        if isinstance(tensor, Tensor) and result.dtype == tensor.dtype:
            return tensor.data.copy_(result)  # as torch's collectives, unseen by autograd
        return result

    def barrier(self, name: str | None = None) -> None:
        """Wait until all workers have called this."""
        self.run.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all workers the value of the worker `src`. Nothing is pickled. Collective."""
        return foreign_values.broadcast_value(self.run, obj, src)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all workers say yes, or any of them if `all` is false. Collective."""
        yes = int(self.run.sum(int(decision)))
        return yes == self.world_size if all else yes > 0

    # ---- checkpoints

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Write a checkpoint on the first worker, with the state of all workers. Collective."""
        if worker_states.ENTRY in state:
            raise UsageError(f"the key {worker_states.ENTRY!r} of a checkpoint is taken")
        # first, as it makes replicas equal
        entry = worker_states.collect_worker_states(self.run)
        converted = self._convert_stateful_objects_in_state(state, filter=filter or {})
        converted[worker_states.ENTRY] = entry
        if self.is_global_zero:
            self.checkpoint_io.save_checkpoint(converted, path, storage_options=storage_options)

    def load_checkpoint(
        self,
        path: Any,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load a checkpoint on each worker, which all read the same file."""
        remainder: dict[str, Any] = super().load_checkpoint(path, state, strict, weights_only)
        if isinstance(state, dict) and state:
            worker_states.restore_worker_states(self.run, remainder.pop(worker_states.ENTRY, None))
        return remainder


class _NoSync(_BackwardSyncControl):
    """Gradients that stay on their worker: `fabric.no_backward_sync`."""

    def __init__(self, bridge: BridgeRun) -> None:
        self._bridge = bridge

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Exchange no gradients inside the block, if `enabled`."""
        return self._bridge.run.no_sync() if enabled else contextlib.nullcontext()
