"""`PacelineTrainer`: the Trainer of transformers over a run of paceline.

get_batch_samples     reads all batches of a step, and notes the part that each is of its batch
training_step         weights the loss of one of them, and runs backward
_save_checkpoint      Trainer's own files, and the state of the strategy for each process
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from transformers import trainer as trainer_module

from paceline.bridges.accelerate.accelerator import START_OPTIONS, PacelineAccelerator
from paceline.bridges.accelerate.loader import SkippedDataLoader
from paceline.bridges.transformers.arguments import check_arguments, check_processes
from paceline.data.loader import Turn
from paceline.errors import UsageError
from paceline.session.run import Run, parts_of_run
from paceline.state.snapshot import snapshot_from_bytes

IGNORED = -100  # label that counts in no loss of transformers
RUN_OPTIONS = (*START_OPTIONS, "shares", "batchnorm")


class PacelineMixin:
    """Makes a subclass of `transformers.Trainer` train on paceline.

    >>> class MyTrainer(PacelineMixin, Trainer): ...

    Args:
        run: A run that is open already. Default: a new one by `pl.start`.
        arguments: Arguments of the Trainer. By keyword also those of `pl.start` (`sync`, `name`,
            `folder`, `seed`, ...), `shares` and `batchnorm`.

    Raises:
        UsageError: An argument can't be honoured.
    """

    args: Any
    accelerator: PacelineAccelerator

    def __init__(self, *arguments: Any, run: Run | None = None, **options: Any) -> None:
        self._run_options = {name: options.pop(name) for name in RUN_OPTIONS if name in options}
        self._run = run
        self._turns: deque[Turn] = deque()  # of batches that were read and not used so far
        self._normalised = False  # the last loss was divided by the tokens of all processes
        self._loaders: dict[Any, tuple[Any, Any]] = {}  # of evaluations, with their data sets
        super().__init__(*arguments, **options)

    @property
    def run(self) -> Run:
        """The run of paceline."""
        return self.accelerator.run

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and with it the run."""
        check_arguments(self.args)

        def make(**options: Any) -> PacelineAccelerator:
            # These are `ddp_` arguments, which are refused if the user has set one.
            options.pop("kwargs_handlers", None)
            device = {"cpu": True} if self.args.device.type == "cpu" else {}
            accelerator = PacelineAccelerator(
                run=self._run, **self._run_options, **device, **options
            )
            check_processes(self.args, accelerator.run.size)
            return accelerator

        # Trainer makes its accelerator by this name. If it is gone, this raises AttributeError.
        with mock.patch.object(trainer_module, "Accelerator", make):
            super().create_accelerator_and_postprocess()  # type: ignore[misc]
        if parts_of_run(self.run).loop.abilities.remote is not None:
            raise UsageError(
                "checkpoints of the Trainer hold the state of optimizers, and servers keep it with "
                "ParameterServer: use AllReduce or LocalSGD"
            )

    # ---- data

    def _get_dataloader(self, *, is_training: bool = False, **options: Any) -> Any:
        key = id(options["dataset"]), options["description"], options["batch_size"]
        if not is_training and key in self._loaders:
            return self._loaders[key][1]
        window = self.args.gradient_accumulation_steps if is_training else 1
        with self.accelerator.loaders_for(training=is_training, window=window):
            loader = super()._get_dataloader(  # type: ignore[misc]
                is_training=is_training, **options
            )
        # A run keeps each loader, so an evaluation that comes again uses the same one.
        if not is_training:
            self._loaders[key] = options["dataset"], loader
        return loader

    def _run_epoch(self, *arguments: Any, **options: Any) -> Any:
        self._turns.clear()
        # Trainer skips batches of a resumed epoch by this function of Accelerate, which makes a
        # plain loader. If the name is gone, this raises AttributeError.
        with mock.patch.object(trainer_module, "skip_first_batches", SkippedDataLoader):
            result = super()._run_epoch(*arguments, **options)  # type: ignore[misc]
        # Trainer drops its iterator with the last batch, so that its step is still under way.
        parts_of_run(self.run).prepared.epochs.end_left()
        return result

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Read the batches of a step, and count the items of all processes in them."""
        self._turns.clear()
        batches = []
        for batch in islice(epoch_iterator, num_batches):
            turn = self.accelerator.turn
            assert turn is not None, "a loader that the accelerator has prepared is under way"
            self._turns.append(turn)
            batches.append(batch)
        return batches, self._get_num_items_in_batch(batches, device)

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        # A process without samples has a sample of another one, which is counted there.
        turns = self._turns if self._turns else [self.accelerator.turn] * len(batch_samples)
        counted = [
            _ignore_labels(batch) if turn is not None and turn.ghost else batch
            for batch, turn in zip(batch_samples, turns, strict=True)
        ]
        with self.accelerator.ignore_turn():
            return super()._get_num_items_in_batch(counted, device)  # type: ignore[misc]

    # ---- training and evaluation

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
    ) -> Tensor:
        """Run forward and backward of one batch, weighted by samples or by tokens.

        Returns:
            The loss. The plain mean over processes, which Trainer logs, is that of all samples.
        """
        turn, size = self._turns.popleft(), self.run.size
        scale = parts_of_run(self.run).axes.slice.step_state.scale  # of the turn of all batches
        accelerator = self.accelerator

        # Autograd multiplies by `scale`. What the loss was divided by is known once it is there.
        def find_factor() -> float:
            if turn.ghost:
                return 0.0
            return (1.0 / size if self._normalised else turn.scale) / scale

        with accelerator.weigh_loss(find_factor):
            loss: Tensor = super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        return loss * find_factor() * scale * size

    def compute_loss(
        self,
        model: nn.Module,
        inputs: Any,
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Compute the loss as Trainer does, and note what it was divided by."""
        owner: Any = self
        self._normalised = bool(
            self.args.average_tokens_across_devices
            and (owner.model_accepts_loss_kwargs or owner.compute_loss_func)
            and num_items_in_batch is not None
        )
        return super().compute_loss(  # type: ignore[misc]
            model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items_in_batch
        )

    def prediction_step(self, *arguments: Any, **options: Any) -> Any:
        """Evaluate one batch; the losses of all its samples have the mean over its tokens."""
        loss, logits, labels = super().prediction_step(*arguments, **options)  # type: ignore[misc]
        turn = self.accelerator.turn
        if loss is not None and self._normalised and turn is not None and turn.share:
            # Trainer counts this loss once for each sample of this process.
            loss = loss * (turn.global_batch / (self.run.size * turn.share))
        return loss, logits, labels

    # ---- checkpoints

    def save_model(self, *arguments: Any, **options: Any) -> None:
        """Save the model, after replicas have become equal. Collective."""
        parts_of_run(self.run).loop.abilities.converge()
        super().save_model(*arguments, **options)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]
        state = parts_of_run(self.run).own.pack_snapshot()
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        Path(output_dir, f"paceline_{self.run.rank}.bin").write_bytes(state.to_bytes())
        # The first process may name or remove the folder next.
        self.run.barrier()

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        paths = [] if checkpoint is None else sorted(Path(checkpoint).glob("paceline_*.bin"))
        if paths:
            snapshots = {
                int(path.stem.rpartition("_")[2]): snapshot_from_bytes(path.read_bytes())
                for path in paths
            }
            parts_of_run(self.run).own.load_worker_states(self.run.rank, snapshots)


class PacelineTrainer(PacelineMixin, transformers.Trainer):
    """A `Trainer` whose models are kept equal by a run of paceline.

    >>> trainer = PacelineTrainer(model, args, train_dataset=data, sync="AllReduce(codec=int8())")
    >>> trainer.train()
    """


def _ignore_labels(batch: Any) -> Any:
    """Copy a batch with labels that count in no loss."""
    return {
        name: torch.full_like(value, IGNORED) if name in ("labels", "shift_labels") else value
        for name, value in batch.items()
    }
