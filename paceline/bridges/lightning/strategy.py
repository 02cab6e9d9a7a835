"""The strategy for the Trainer: each call of Lightning goes to a run of paceline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from paceline.bridges import foreign_values, worker_states
from paceline.bridges.bridge_run import BridgeRun
from paceline.bridges.fabric.library import LIGHTNING
from paceline.errors import UsageError
from paceline.session.run import Run, parts_of_run
from paceline.sync.base import Strategy as SyncStrategy

LIGHTNING.check_version()

# what follows needs the library, whose absence is told in one line above
from lightning.fabric.utilities.rank_zero import rank_zero_only  # noqa: E402
from lightning.pytorch.strategies import ParallelStrategy, StrategyRegistry  # noqa: E402
from lightning.pytorch.trainer.states import RunningStage, TrainerFn  # noqa: E402

from paceline.bridges.fabric.checks import (  # noqa: E402
    check_devices,
    check_group,
    choose_start_device,
    expect_device,
)
from paceline.bridges.lightning.batch_ends import BatchEnds  # noqa: E402
from paceline.bridges.lightning.environment import WorkersEnvironment  # noqa: E402
from paceline.bridges.lightning.loader import LightningLoader  # noqa: E402
from paceline.bridges.lightning.results import count_samples_only  # noqa: E402

NAME = "paceline"
LOADER_ENTRY = "loader"  # of the training loader, in the entry of a checkpoint


class LightningStrategy(ParallelStrategy):
    """Trains with the workers that `paceline run` or torchrun has started.

    >>> trainer = Trainer(strategy=PacelineStrategy(sync="AllReduce(codec=int8())"))

    The batch size of a loader is that of all workers together. Without a launcher there is one
    worker. One run serves all calls of a trainer (`fit`, `validate`, `test`).

    Args:
        sync: When and how workers exchange, as an object or as text. Default: `AllReduce()`.
            `paceline run --sync` overrides it.
        options: Options of `pl.start`, such as `seed`, `name` or `deadline`, and these of
            `run.prepare`: `shares`, `loss`, `weigh`, `cost`, `batchnorm` and `shard`.

    Raises:
        UsageError: An option can't be honoured under Lightning.
    """

    strategy_name = NAME

    def __init__(self, sync: SyncStrategy | str | None = None, **options: Any) -> None:
        self._bridge = BridgeRun("Lightning", {"sync": sync, **options})
        super().__init__(cluster_environment=WorkersEnvironment(self._bridge))
        self.num_nodes = 1
        self._batch_ends = BatchEnds(self._bridge)
        self._loaders: list[tuple[DataLoader[Any], LightningLoader]] = []
        # the entry of the checkpoint that is loaded, until all of it is in use
        self._loaded: dict[str, Any] = {}
        self._order: dict[str, Any] = {}  # of samples, before the sanity check
        self._collected: dict[str, Any] = {}  # the entry of the checkpoint that is being made
        rank_zero_only.rank = self.global_rank

    # ---- where this worker is

    @property
    def run(self) -> Run:
        """The run, for all that Lightning has no word for, such as `run.gather`."""
        return self._bridge.run

    @property
    def root_device(self) -> torch.device:
        """Device of this worker's models and batches."""
        device = self._bridge.device
        return expect_device(self.accelerator, self.local_rank) if device is None else device

    @property
    def is_distributed(self) -> bool:
        """Whether `self.log(sync_dist=True)` reduces: always."""
        return True

    # ---- the run

    def setup_environment(self) -> None:
        """Open the run. Collective."""
        check_devices(self, self._bridge)
        self._bridge.open(choose_start_device(self.accelerator))
        self._loaded = {}  # of an earlier call
        rank_zero_only.rank = self.global_rank
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """Prepare the model, its optimizers and its schedulers. Collective."""
        self._check_trainer(trainer)
        # As `Trainer(use_distributed_sampler=False)`: workers get shares of the same batches. If
        # this private attribute of Lightning moves, loaders come with a DistributedSampler, and
        # run.prepare refuses them.
        trainer._accelerator_connector.use_distributed_sampler = False
        super().setup(trainer)
        self._check_schedulers()
        assert self.model is not None
        schedulers = [
            config.scheduler
            for config in self.lr_scheduler_configs
            if isinstance(config.scheduler, LRScheduler | ReduceLROnPlateau)
        ]
        scaler = getattr(self.precision_plugin, "scaler", None)
        scalers = [] if scaler is None else [scaler]
        self._bridge.prepare(self.model, *self.optimizers, *schedulers, *scalers)
        self._batch_ends.join_trainer(trainer)
        count_samples_only(trainer, self._is_ghost)
        self._note_order()

    def model_to_device(self) -> None:
        """Move the model to the device of this worker."""
        assert self.model is not None
        self.model.to(self.root_device)

    def close(self) -> None:
        """Close the run together with all workers, before the process exits."""
        self._bridge.close()

    def _is_ghost(self) -> bool:
        turn = self._bridge.loop.turn
        return turn is not None and turn.ghost

    def _check_trainer(self, trainer: Any) -> None:
        """Raise `UsageError` for options of a Trainer that can't be honoured."""
        if trainer.state.fn == TrainerFn.PREDICTING and self.world_size > 1:
            raise UsageError(
                "trainer.predict can't be honoured with several workers, as Lightning doesn't join "
                "their predictions: run it with one worker, or run.gather in a test_step"
            )
        if trainer.reload_dataloaders_every_n_epochs:
            raise UsageError(
                "reload_dataloaders_every_n_epochs can't be honoured: the order of samples, and "
                "the position in a checkpoint, belong to one loader"
            )
        if self._layer_sync is not None and self._bridge.has_local_batchnorm:
            raise UsageError(
                'sync_batchnorm=True and PacelineStrategy(batchnorm="local") don\'t go together'
            )

    def _check_schedulers(self) -> None:
        """Raise `UsageError` for a scheduler that would step for a batch that is dealt again."""
        if self._bridge.survives and any(
            config.reduce_on_plateau and config.interval == "step"
            for config in self.lr_scheduler_configs
        ):
            raise UsageError(
                'ReduceLROnPlateau with interval="step" can\'t be honoured with --min-workers: it '
                'would step for a batch that is dealt again; say interval="epoch"'
            )

    # ---- loaders

    def process_dataloader(self, dataloader: object) -> object:
        """Prepare a loader, whose batch size is that of all workers. Collective."""
        module = self.lightning_module
        assert module is not None
        if not isinstance(dataloader, DataLoader):
            if self.world_size == 1:
                return dataloader
            raise UsageError(
                f"a {type(dataloader).__qualname__} in place of a DataLoader would give each of "
                f"{self.world_size} workers all of its batches: give a DataLoader"
            )
        stage = module.trainer.state.stage
        if stage == RunningStage.PREDICTING:
            return dataloader
        is_training = stage == RunningStage.TRAINING
        loader = self._find_loader(dataloader, is_training=is_training)
        if loader.shares.length is None and not isinstance(self._find_limit(stage), int):
            raise UsageError(
                "Lightning reads a stream without a length one batch ahead, and a batch must be "
                "used in its own turn: give the data set a __len__, or say "
                f"Trainer(limit_{RunningStage(stage).dataloader_prefix}_batches=k)"
            )
        if is_training and (state := self._loaded.pop(LOADER_ENTRY, None)) is not None:
            loader.load_state_dict(state)
        return loader

    def _find_limit(self, stage: Any) -> Any:
        """Number, or part, of the batches of a stage that the Trainer takes at most."""
        assert self.lightning_module is not None
        return getattr(
            self.lightning_module.trainer, f"limit_{RunningStage(stage).dataloader_prefix}_batches"
        )

    def _find_loader(self, dataloader: DataLoader[Any], *, is_training: bool) -> LightningLoader:
        """Prepare a loader once, also if several calls of the trainer are given it."""
        for known, loader in self._loaders:
            if known is dataloader and loader.shares.terms.train is is_training:
                return loader
        options = {"train": is_training, "pad": True}
        loader = LightningLoader(self._bridge.prepare(dataloader, **options))
        self._loaders.append((dataloader, loader))
        return loader

    # ---- the loop

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step: what is logged from here on belongs to this batch."""
        self._batch_ends.begin_batch()
        return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step: what is logged from here on belongs to this batch."""
        self._batch_ends.begin_batch()
        return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's step: what is logged from here on belongs to this batch."""
        self._batch_ends.begin_batch()
        return super().test_step(*args, **kwargs)

    def _note_order(self) -> None:
        """Note the order of samples, which Lightning's sanity check must not move."""
        self._order = dict(parts_of_run(self.run).prepared.order.state_dict())

    def on_train_start(self) -> None:
        """Refuse several loaders at once: one loss can't be weighted by shares of two batches."""
        assert self.lightning_module is not None
        parts_of_run(self.run).prepared.order.load_state_dict(self._order)
        combined = self.lightning_module.trainer.fit_loop._combined_loader
        count = 0 if combined is None else len(combined.flattened)
        if count != 1:
            raise UsageError(
                f"there are {count} training loaders, and one loss can't be weighted by samples of "
                "two batches: join the data sets in one DataLoader (torch's StackDataset)"
            )

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Note how far the Trainer has counted, in case the batch is dealt again."""
        assert self.lightning_module is not None
        self._batch_ends.note_batch(self.lightning_module.trainer)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Exchange no gradients inside the block: `accumulate_grad_batches`."""
        with self.run.no_sync():
            yield

    # ---- between workers

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over all workers. Collective.

        A mean of a value of the present batch is weighted by samples.
        """
        check_group(group)
        of_batch = self._batch_ends.in_batch
        return foreign_values.reduce_value(self.run, tensor, reduce_op, of_batch=of_batch)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor of all workers, in a new first dim if there are several. Collective."""
        check_group(group)
        if sync_grads:
            raise UsageError(
                "all_gather(sync_grads=True) can't be honoured: gradients are exchanged by "
                "backward, and each worker's loss counts its own samples"
            )
        return foreign_values.gather_stacked(self.run, tensor)

    def barrier(self, name: str | None = None) -> None:
        """Wait until all workers have called this."""
        if self._bridge.is_open:
            self.run.barrier()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Give all workers the value of the worker `src`. Nothing is pickled. Collective."""
        return foreign_values.broadcast_value(self.run, obj, src) if self._bridge.is_open else obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Whether all workers say yes, or any of them if `all` is false. Collective."""
        yes = int(self.run.sum(int(decision)))
        return yes == self.world_size if all else yes > 0

    # ---- checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """State of the model, once replicas are equal. Collective: a checkpoint begins with it."""
        self._collected = worker_states.collect_worker_states(self.run)
        trained = [loader for _, loader in self._loaders if loader.shares.terms.train]
        if trained:
            self._collected[LOADER_ENTRY] = trained[-1].state_dict()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint on the first worker, with the state of all workers."""
        entry, self._collected = self._collected, {}
        if "optimizer_states" in checkpoint:  # else it is for the weights alone
            checkpoint[worker_states.ENTRY] = entry
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint on each worker, which all read the same file."""
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        self._loaded = dict(checkpoint.get(worker_states.ENTRY) or {})
        return checkpoint

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore optimizers, then the state of the workers."""
        super().load_optimizer_state_dict(checkpoint)
        worker_states.restore_worker_states(self.run, checkpoint.get(worker_states.ENTRY))
        self._note_order()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Make `Trainer(strategy="paceline")` known."""
        strategy_registry.register(
            NAME, cls, description="Exchanges by a strategy of paceline", override=True
        )


LightningStrategy.register_strategies(StrategyRegistry)
