"""`model.fit` of Keras on torch, for one worker or several.

Run it with `python examples/bridges/keras_fit.py`, or with
`paceline run --workers 2 examples/bridges/keras_fit.py`. It learns whether a point is inside of a
circle, and the losses are the same for any number of workers. Started again, it goes on.
"""

import argparse
import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import torch
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl
from paceline.bridges.keras import DistributedOptimizer, RunCheckpoint, RunLog, prepare

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--samples", type=int, default=4096)
options = parser.parse_args()

keras.utils.set_random_seed(0)
points = torch.rand(options.samples, 2) * 2 - 1
inside = (points.norm(dim=1) < 0.8).long()  # is the point inside of the circle?
held_out = options.samples // 4
# A batch has 64 samples, of all workers together.
train = DataLoader(TensorDataset(points[held_out:], inside[held_out:]), batch_size=64, shuffle=True)
test = DataLoader(TensorDataset(points[:held_out], inside[:held_out]), batch_size=256)

with pl.start(name="keras_fit") as run:
    model = keras.Sequential(
        [keras.Input((2,)), keras.layers.Dense(64, activation="relu"), keras.layers.Dense(2)]
    )
    model.compile(
        optimizer=DistributedOptimizer(keras.optimizers.AdamW(1e-2)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    train, test = prepare(run, model, train, test)  # this worker's share of each batch
    run.resume()
    history = model.fit(
        train,
        validation_data=test,
        initial_epoch=train.epoch,
        epochs=options.epochs,
        callbacks=[RunCheckpoint(run), RunLog(run)],
        verbose=0,
    )
    run.print("val_loss", *[f"{loss:.5f}" for loss in history.history.get("val_loss", [])])
