"""Callbacks of Keras for a run: checkpoints, the record of a run, and the learning rate."""

from __future__ import annotations

from typing import Any

import keras

from paceline.checkpoint.files.manifest import Best
from paceline.errors import UsageError
from paceline.session.run import Run


class RunCheckpoint(keras.callbacks.Callback):
    """Writes a checkpoint of the run at the end of epochs.

    >>> resumed = run.resume()
    >>> model.fit(train, epochs=9, initial_epoch=train.epoch, callbacks=[RunCheckpoint(run)])

    It holds the model, the optimizer and the position in the data, and can be resumed by any number
    of workers.

    Args:
        run: The run.
        every: Number of epochs between two checkpoints. Default: 1.
        keep: Number of newest checkpoints that stay. Default: 3.
        monitor: Name in the logs by which the best checkpoint is chosen, such as "val_loss".
            Default: none.
        best: Which `monitor` is the best: "min" (default) or "max".
    """

    def __init__(
        self,
        run: Run,
        *,
        every: int = 1,
        keep: int = 3,
        monitor: str | None = None,
        best: Best = "min",
    ) -> None:
        super().__init__()
        if every < 1:
            raise UsageError(f"every={every} epochs is no interval; give 1 or more")
        self._run, self._every, self._keep = run, every, keep
        self._monitor, self._best = monitor, best

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save after every so many epochs."""
        if (epoch + 1) % self._every:
            return
        if self._monitor is None:
            self._run.save(keep=self._keep)
            return
        if self._monitor not in (logs or {}):
            raise UsageError(
                f"there is no {self._monitor!r} to choose the best checkpoint by; "
                f"the logs have {', '.join(logs or {})}"
            )
        assert logs is not None
        self._run.save(keep=self._keep, metric=float(logs[self._monitor]), best=self._best)


class RunLog(keras.callbacks.Callback):
    """Records the logs of each epoch in the run's folder and trackers, as `run.log` does.

    Args:
        run: The run.
    """

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Record loss and metrics, which are the same on all workers."""
        self._run.log(**{name: float(value) for name, value in (logs or {}).items()})


class LearningRateWarmup(keras.callbacks.Callback):
    """Raises the learning rate from near 0 to the optimizer's own, linearly over the first steps.

    Step `i` of `steps` has the rate times (i + 1) / steps. After Goyal et al., "Accurate, Large
    Minibatch SGD" (2017), section 2.2.

    Args:
        steps: Number of steps, counted by the optimizer. Default: none, it has to be given.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        if steps < 1:
            raise UsageError(f"steps={steps} is no length of a warm-up; give 1 or more")
        self._steps, self._rate = steps, 0.0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Note the rate of the optimizer."""
        optimizer = self.model.optimizer
        # `learning_rate` of a schedule is a function of the step, and can't be set.
        if isinstance(optimizer._learning_rate, keras.optimizers.schedules.LearningRateSchedule):
            raise UsageError(
                "the optimizer has a schedule of its learning rate, which a warm-up would "
                "override: let the schedule begin with one, as CosineDecay(warmup_steps=...) does"
            )
        self._rate = float(optimizer.learning_rate)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate of the next step."""
        step = int(self.model.optimizer.iterations)
        if step < self._steps:
            self.model.optimizer.learning_rate = self._rate * (step + 1) / self._steps
