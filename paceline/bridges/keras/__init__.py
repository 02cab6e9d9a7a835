"""Keras 3 on torch: `model.fit` on several workers. See docs/bridges/keras.md.

>>> with pl.start() as run:
...     model.compile(DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
...     train, test = prepare(run, model, train, test)
...     model.fit(train, validation_data=test, epochs=3)
"""

from paceline.bridges.foreign import TestedLibrary

TestedLibrary("keras", (3, 15), (3, 15)).check_version()  # before a module imports it

from paceline.bridges.keras.callbacks import LearningRateWarmup, RunCheckpoint, RunLog  # noqa: E402
from paceline.bridges.keras.optimizer import DistributedOptimizer  # noqa: E402
from paceline.bridges.keras.preparation import prepare  # noqa: E402

__all__ = ["DistributedOptimizer", "LearningRateWarmup", "RunCheckpoint", "RunLog", "prepare"]
