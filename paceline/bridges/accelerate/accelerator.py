"""`PacelineAccelerator`: Accelerate's interface over a run of paceline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import accelerate
import torch
from accelerate.data_loader import SeedableRandomSampler
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import gather_object, recursively_apply
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, RandomSampler

from paceline.bridges.accelerate import checkpoints, refusals
from paceline.bridges.accelerate.batches import GlobalBatches, make_global_loader
from paceline.bridges.accelerate.loader import PacelineDataLoader, SkippedDataLoader
from paceline.bridges.accelerate.windows import AccumulationWindows
from paceline.data.loader import LoaderObserver, Turn
from paceline.errors import UsageError
from paceline.loop import collectives
from paceline.session.gloo_replacement import set_torch_variables
from paceline.session.run import Run, parts_of_run
from paceline.session.start import start

START_OPTIONS: Final = (
    *("sync", "name", "folder", "seed", "deadline", "late_after", "trace", "on_nan"),
    *("total_steps", "compare", "differing", "straggler", "cluster", "report_to"),
)
PREPARE_OPTIONS: Final = ("loss", "weigh", "cost", "shares", "batchnorm")


class PacelineAccelerator(accelerate.Accelerator):
    """An `Accelerator` whose models are kept equal by a run of paceline, and not by DDP.

    >>> accelerator = PacelineAccelerator(sync="AllReduce(codec=int8())")
    >>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    The batch size means what it means to Accelerate: it is that of one process, or of all of them
    with `split_batches=True`. A global batch that is too small for equal parts is dealt unevenly,
    and weighted by samples. No sample is given twice.

    Args:
        run: A run that is open already. Default: a new one by `pl.start`.
        options: Arguments of `accelerate.Accelerator`. Beside them those of `pl.start` (`sync`,
            `name`, `folder`, `seed`, `deadline`, `late_after`, `trace`, `on_nan`, `total_steps`,
            `compare`, `differing`, `straggler`, `cluster`, `report_to`) and of `run.prepare`
            (`loss`, `weigh`, `cost`, `shares`, `batchnorm`).

    Raises:
        UsageError: An option can't be honoured.
    """

    def __init__(self, *, run: Run | None = None, **options: Any) -> None:
        refusals.check_options(options)
        start_options: dict[str, Any] = {
            name: options.pop(name) for name in START_OPTIONS if name in options
        }
        self.flag_tensor: Tensor | None = None
        if run is not None and start_options:
            raise UsageError(
                f"{', '.join(start_options)} belongs to the start of a run, and run= is one that "
                "is open already: give it to pl.start"
            )
        self._prepare_options = {name: options.pop(name, None) for name in PREPARE_OPTIONS}
        # Accelerate looks for torchrun's variables.
        set_torch_variables()
        if options.get("cpu"):
            start_options["device"] = "cpu"
        self.run = start(**start_options) if run is None else run
        self._parts = parts_of_run(self.run)
        refusals.check_run(self._parts)
        # Without a GPU, Accelerate takes each process for the only one, unless it is told.
        if self.run.device.type == "cpu":
            options["cpu"] = True
        # Whether loaders are for training, and the batches of a step, which are read ahead. None:
        # seen by the models, and by Accelerate's own count.
        self._loader_use: tuple[bool, int] | None = None
        self._loader_count = 0
        self._ignores_turn = False
        self._find_factor: Callable[[], float] | None = None
        super().__init__(**options)
        self._given: list[Any] = []  # models and optimizers that the run has
        self.run.keep("accelerate", checkpoints.LoopCount(self))
        if self.scaler is not None:
            self.run.prepare(self.scaler)

    # ---- preparing

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare models, optimizers, loaders and schedulers, in any order.

        Models stay the same objects: there is no wrapper around them.
        """
        # The run takes models and optimizers together, so that it knows whose parameters they are.
        self._give_to_run(*(each for each in args if isinstance(each, nn.Module | Optimizer)))
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self,
        model: nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> nn.Module:
        """Prepare one model; with `evaluation_mode` it is not trained."""
        if not evaluation_mode:
            self._give_to_run(model)
        # Accelerate puts no DDP around a model that is only evaluated.
        ready: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        return ready

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare one optimizer."""
        self._give_to_run(optimizer)
        return super().prepare_optimizer(optimizer, device_placement)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a scheduler.

        It steps once for each process, as Accelerate's schedulers do, or once with
        `split_batches=True`.
        """
        if not getattr(scheduler, "_is_accelerate_prepared", False):
            self.run.prepare(scheduler)
        return super().prepare_scheduler(scheduler)

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Prepare a loader.

        Raises:
            UsageError: The loader cuts its data by rank already, or can't be dealt.
        """
        if isinstance(data_loader, PacelineDataLoader):
            if data_loader not in self._dataloaders:
                self._dataloaders.append(data_loader)
            return data_loader
        if slice_fn_for_dispatch is not None:
            raise UsageError("slice_fn_for_dispatch belongs to dispatch_batches: leave it out")
        refusals.check_loader_options(self.dataloader_config)
        loader, use = self._make_global(data_loader), self._loader_use
        windows: list[AccumulationWindows] = []

        def observe(inner: LoaderObserver) -> AccumulationWindows:
            windows.append(
                AccumulationWindows(
                    inner,
                    self._count_window if use is None else lambda: use[1],
                    reads_ahead=use is not None,
                )
            )
            return windows[0]

        # A process without samples evaluates the first one, as models seldom take 0 rows.
        train = None if use is None else use[0]
        given = {"train": train, "pad": True, "shard": None, "cut": None, "init": None}
        (share,) = self._parts.prepared.prepare(
            (loader,), {**self._prepare_options, **given}, observe=observe
        )
        prepared = PacelineDataLoader(share, windows[0], self._is_training)
        self.run.keep(f"accelerate.loader{self._loader_count}", prepared)
        self._loader_count += 1
        self._dataloaders.append(prepared)
        return prepared

    def _make_global(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        processes = 1 if self.split_batches else self.run.size
        result = make_global_loader(loader, processes)
        sampler = getattr(result.batch_sampler, "sampler", None)
        if self.use_seedable_sampler and type(sampler) is RandomSampler:
            seeded = SeedableRandomSampler(
                data_source=sampler.data_source,
                replacement=sampler.replacement,
                num_samples=sampler._num_samples,
                # Accelerate's sampler makes one as late as in an epoch, and seeds it in each.
                generator=torch.Generator() if sampler.generator is None else sampler.generator,
                data_seed=self.dataloader_config.data_seed,
            )
            assert isinstance(result.batch_sampler, GlobalBatches)
            result.batch_sampler.replace_sampler(seeded)
        return result

    def _give_to_run(self, *objects: Any) -> None:
        new = [
            each
            for each in objects
            if not any(each is other for other in self._given)
            and not isinstance(each, AcceleratedOptimizer)
        ]
        if new:
            self._given += new
            batchnorm = self._prepare_options["batchnorm"]
            self.run.prepare(*new, **({} if batchnorm is None else {"batchnorm": batchnorm}))

    def _is_training(self) -> bool:
        """Whether a loop that begins now trains: some model is in training mode."""
        return not self._models or any(model.training for model in self._models)

    # ---- accumulation

    @contextlib.contextmanager
    def loaders_for(self, *, training: bool, window: int) -> Iterator[None]:
        """Prepare loaders in the block whose use is known.

        Args:
            training: Whether they are for training.
            window: Batches that are accumulated for a step, all read before the first is used.
        """
        self._loader_use = training, window
        try:
            yield
        finally:
            self._loader_use = None

    def _count_window(self) -> int:
        """Count the batches up to the next step of optimizers."""
        steps = self.gradient_state.num_steps
        return int(steps - self.step % steps)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module | None = None) -> Iterator[None]:
        """Accumulate gradients of all models on this process inside of the block."""
        with self.run.no_sync():
            yield

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """Run backward; gradients become the mean over the global batch, weighted by samples.

        Raises:
            UsageError: The loop over the loader began in evaluation mode.
        """
        loader, turn = self._active_loader, self.turn
        if turn is not None and not turn.train:
            raise UsageError(
                "backward in a loop that began as an evaluation, as all models were in evaluation "
                "mode: call model.train() before the loop over the loader"
            )
        if self._find_factor is not None:
            factor = self._find_factor()
        else:
            factor = 1.0 if loader is None else loader.windows.factor
        super().backward(loss if factor == 1.0 else loss * factor, **kwargs)

    @contextlib.contextmanager
    def weigh_loss(self, find_factor: Callable[[], float]) -> Iterator[None]:
        """Multiply losses in the block by the result of a function, called by `backward`."""
        self._find_factor = find_factor
        try:
            yield
        finally:
            self._find_factor = None

    @contextlib.contextmanager
    def join_uneven_inputs(
        self, joinables: Any, even_batches: bool | None = None
    ) -> Iterator[None]:
        """Do nothing: all processes have as many batches, and uneven ones are weighted."""
        yield

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Clip each element of the exchanged gradients.

        Raises:
            UsageError: Optimizers step on servers.
        """
        if self._parts.loop.abilities.remote is not None:
            raise UsageError(
                "clip_grad_value_ needs whole gradients, and servers have them with this strategy: "
                "use clip_grad_norm_, or sync='AllReduce()'"
            )
        self._parts.loop.exchange_due_gradients("clip_grad_value_")
        super().clip_grad_value_(parameters, clip_value)

    # ---- values of all processes

    @property
    def _active_loader(self) -> PacelineDataLoader | None:
        active = self.gradient_state.active_dataloader
        return active if isinstance(active, PacelineDataLoader) else None

    @property
    def turn(self) -> Turn | None:
        """This process's part of the present batch; None outside of loops over loaders."""
        loader = self._active_loader
        return None if loader is None or self._ignores_turn else loader.turn

    @contextlib.contextmanager
    def ignore_turn(self) -> Iterator[None]:
        """Count all processes alike in the block, also one without samples of the present batch."""
        self._ignores_turn = True
        try:
            yield
        finally:
            self._ignores_turn = False

    def gather(self, tensor: Any) -> Any:
        """Gather the rows of all processes, which may have different numbers of them.

        Inside of a loop no sample comes twice, as in `gather_for_metrics`.
        """
        return recursively_apply(self._gather_rows, tensor, error_on_other_type=True)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather predictions, labels or objects of the present global batch, each sample once."""
        turn = self.turn
        try:
            recursively_apply(lambda each: each, input_data, error_on_other_type=True)
        except TypeError:
            use_gather_object = True
        if use_gather_object:
            nothing = turn is not None and turn.ghost
            return gather_object([] if nothing else input_data)
        if turn is None:
            return self.gather(input_data)

        def cut(each: Tensor) -> Tensor:
            return each[: turn.share] if each.dim() else each

        return self.gather(recursively_apply(cut, input_data))

    def _gather_rows(self, tensor: Tensor) -> Tensor:
        turn, axis = self.turn, self._parts.axes.slice
        ghost = turn is not None and turn.ghost
        order = None if turn is None else turn.rows
        return collectives.gather_rows(axis.agreement, axis.group, tensor, ghost=ghost, order=order)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Reduce tensors over all processes.

        Args:
            tensor: Tensors of the same shapes on all processes.
            reduction: "sum", "mean" or "max". Inside of a loop over a loader a mean is weighted by
                samples, and a process without samples doesn't count.
            scale: Refused unless it is 1: it is for TPUs.
        """
        if scale != 1.0:
            raise UsageError(f"reduce got scale={scale:g}, which is for TPUs: multiply the result")
        if reduction not in ("sum", "mean"):
            return super().reduce(tensor, reduction)
        turn, axis = self.turn, self._parts.axes.slice
        ghost = turn is not None and turn.ghost
        weight = 1.0 if turn is None else 0.0 if ghost else turn.weight

        def combine(each: Tensor) -> Any:
            if reduction == "sum":
                return collectives.sum_values(axis.agreement, axis.group, each, ghost=ghost)
            return collectives.average_values(axis.agreement, axis.group, each, weight)

        return recursively_apply(combine, tensor, error_on_other_type=True)

    def check_trigger(self) -> bool:
        """Whether some process has called `set_trigger` since the last check. Collective."""
        flag = 0 if self.flag_tensor is None else int(self.flag_tensor.item())
        axis = self._parts.axes.slice
        if not collectives.sum_values(axis.agreement, axis.group, flag, ghost=False):
            return False
        self.flag_tensor = torch.tensor(0, device=self.device)
        return True

    # ---- checkpoints

    def go_to_batch(self, count: int) -> None:
        """Go on after this number of batches since the last step of optimizers, as was saved."""
        self.step = count

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Save and load these objects with the rest; their state is equal on all processes."""
        first = len(self._custom_objects)
        super().register_for_checkpointing(*objects)
        for number, each in enumerate(objects, first):
            self.run.keep(f"accelerate.object{number}", each)

    def save_model(self, model: nn.Module, *args: Any, **options: Any) -> None:
        """Save the weights of a model, after replicas have become equal. Collective."""
        self._parts.loop.abilities.converge()
        super().save_model(model, *args, **options)

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **options: Any
    ) -> str:
        """Write a checkpoint, which any number of processes can load. Collective.

        Returns:
            The folder.
        """
        return checkpoints.save_state(
            self, output_dir, safe_serialization=safe_serialization, options=options
        )

    def load_state(
        self,
        input_dir: str | None = None,
        load_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Load a checkpoint of `save_state`. Collective.

        Loaders go on where they were. `skip_first_batches` counts from the beginning of the epoch,
        so a script that calls it does the same as one that doesn't.
        """
        checkpoints.load_state(self, input_dir, {**(load_kwargs or {}), **options})

    def register_save_state_pre_hook(self, hook: Any) -> Any:
        """Refuse a hook, which would change a file that this checkpoint doesn't have."""
        raise UsageError(checkpoints.NO_HOOKS)

    register_load_state_pre_hook = register_save_state_pre_hook

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """Make a loader whose next loop begins at a later batch of the epoch."""
        if not isinstance(dataloader, PacelineDataLoader):
            raise UsageError("skip_first_batches takes a loader that prepare has returned")
        return SkippedDataLoader(dataloader, num_batches)

    def end_training(self) -> None:
        """End trackers and the run: the summary is written."""
        super().end_training()
        self.run.close()
