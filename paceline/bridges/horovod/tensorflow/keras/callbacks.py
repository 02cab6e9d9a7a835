"""Horovod's callbacks of Keras: equal first weights, averaged metrics, and learning rates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from paceline.bridges.horovod.common.basics import rank, size
from paceline.bridges.horovod.common.process_sets import global_process_set
from paceline.bridges.horovod.tensorflow import host_arrays
from paceline.bridges.horovod.tensorflow.operations import broadcast_variables
from paceline.bridges.horovod.torch.mpi_ops import Average
from paceline.errors import UsageError


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):
    """Gives all workers the variables of one: before the first step, or after it.

    A model that is built has them before the first step. The variables of another one exist after
    it only, and the steps of the other workers are lost then.

    Args:
        root_rank: The worker whose variables are taken.
    """

    def __init__(self, root_rank: int) -> None:
        super().__init__()
        self._root_rank, self._done = root_rank, False

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast, if the model is built."""
        optimizer = self.model.optimizer
        if self.model.built and not optimizer.built:
            optimizer.build(self.model.trainable_variables)
        if self.model.built:
            self._broadcast_once()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Broadcast after the first step, if there was nothing to broadcast before it."""
        self._broadcast_once()

    def _broadcast_once(self) -> None:
        if not self._done:
            self._done = True
            every = [*self.model.variables, *self.model.optimizer.variables]
            broadcast_variables(every, self._root_rank)


class MetricAverageCallback(keras.callbacks.Callback):
    """Averages the metrics of an epoch over all workers, each of which counts alike.

    Put it before other callbacks that read metrics.
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the values in `logs`, in the order of their names."""
        if not logs:
            return
        names = sorted(logs)
        reduction = host_arrays.Reduction(Average, 1.0, 1.0, global_process_set)
        values = [np.array(float(logs[name])) for name in names]
        means = host_arrays.reduce_arrays(values, [f"metric.{name}" for name in names], reduction)
        logs.update((name, float(mean)) for name, mean in zip(names, means, strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):
    """Sets the learning rate to `initial_lr` times a factor, from one epoch to another.

    Args:
        initial_lr: The learning rate that is multiplied.
        multiplier: Function from the epoch to a factor; a number is raised to the power of the
            epochs since `start_epoch`.
        start_epoch: First epoch of the schedule. Default: 0.
        end_epoch: First epoch after it. Default: none.
        staircase: Whether the rate changes at the beginning of epochs only. Otherwise the epoch of
            `multiplier` has a fraction, and the rate changes in each step. Default: True.
        momentum_correction: Refused (True, as in Horovod) for an optimizer with momentum: Keras 3
            compiles its momentum as a constant.
        steps_per_epoch: Steps of an epoch. Default: as Keras knows it.
    """

    def __init__(  # noqa: PLR0917  in Horovod's order
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        self._initial_rate, self._staircase = initial_lr, staircase
        self._factor: Callable[[float], float] = (
            multiplier
            if callable(multiplier)
            else lambda epoch: float(multiplier ** (epoch - start_epoch))
        )
        self._epochs = (start_epoch, end_epoch)
        self._momentum_correction, self._epoch = momentum_correction, 0
        self.steps_per_epoch = steps_per_epoch

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check what can't be honoured, and find the number of steps."""
        if (
            self._momentum_correction
            and hasattr(self.model.optimizer, "momentum")
            and (self.model.optimizer.momentum)
        ):
            raise UsageError(
                "momentum_correction=True can't be honoured, as Keras 3 compiles the momentum of "
                "an optimizer as a constant: say momentum_correction=False"
            )
        self.steps_per_epoch = self.steps_per_epoch or self.params.get("steps")
        if not self._staircase and not self.steps_per_epoch:
            raise UsageError(
                f"{type(self).__name__} doesn't know how many steps an epoch has; give "
                "steps_per_epoch"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the epoch."""
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the learning rate of the next step."""
        first, after = self._epochs
        if self._epoch < first or (after is not None and self._epoch >= after):
            return
        if not self._staircase:
            assert self.steps_per_epoch is not None
            self._set_rate(self._epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set_rate(self._epoch)

    def _set_rate(self, epoch: float) -> None:
        self.model.optimizer.learning_rate = self._initial_rate * self._factor(epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the logs, as `lr`."""
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr` / size to `initial_lr`, in each step.

    After Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2.

    Args:
        initial_lr: The rate that is reached, such as that of one worker times the number of
            workers.
        warmup_epochs: Epochs that it takes. Default: 5.
        momentum_correction: As in `LearningRateScheduleCallback`.
        steps_per_epoch: Steps of an epoch. Default: as Keras knows it.
        verbose: Whether the first worker says when it has ended: 0 (default) or 1.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def warm_up(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            done = (epoch + 1.0 / self.steps_per_epoch) / warmup_epochs
            return (1.0 + done * (size() - 1)) / size()

        super().__init__(
            initial_lr,
            warm_up,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self._last_epoch, self._verbose = warmup_epochs - 1, verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the logs, and say that the warm-up is over."""
        super().on_epoch_end(epoch, logs)
        if epoch == self._last_epoch and self._verbose and rank() == 0:
            print(f"epoch {epoch + 1}: the learning rate has warmed up")
