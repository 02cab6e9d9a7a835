"""Keras 3 on torch: `model.fit` on several workers. See docs/bridges/keras.md.

>>> with pl.start() as run:
...     model.compile(DistributedOptimizer(keras.optimizers.Adam()), loss="mse")
...     train, test = prepare(run, model, train, test)
...     model.fit(train, validation_data=test, epochs=3)
"""

from paceline.bridges.keras.callbacks import Checkpoint, LearningRateWarmup, RunLog
from paceline.bridges.keras.optimizer import DistributedOptimizer
from paceline.bridges.keras.preparation import prepare

__all__ = ["Checkpoint", "DistributedOptimizer", "LearningRateWarmup", "RunLog", "prepare"]
