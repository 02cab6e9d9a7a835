"""A Lightning Trainer whose gradients paceline exchanges.

Run it with `python examples/bridges/lightning_trainer.py`, or with
`paceline run --workers 2 examples/bridges/lightning_trainer.py`: the losses are the same. It learns
whether a point is inside of a circle.
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from paceline.bridges.lightning import PacelineStrategy


class Circle(LightningModule):
    """Learns whether a point is inside of a circle."""

    def __init__(self):
        super().__init__()
        hidden = torch.nn.Linear(2, 64)
        self.network = torch.nn.Sequential(hidden, torch.nn.ReLU(), torch.nn.Linear(64, 2))

    def training_step(self, batch, index):
        x, y = batch  # this worker's share of each global batch
        loss = F.cross_entropy(self.network(x), y)
        self.log("loss", loss, sync_dist=True)  # the mean over workers, weighted by samples
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        right = (self.network(x).argmax(1) == y).float()
        self.log("accuracy", right.mean(), sync_dist=True)  # of all samples of the epoch

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


torch.manual_seed(0)
points = torch.rand(1100, 2) * 2 - 1
inside = (points.norm(dim=1) < 0.8).long()
train, validate = (
    TensorDataset(points[:1000], inside[:1000]),
    TensorDataset(points[1000:], inside[1000:]),
)
trainer = Trainer(
    accelerator="cpu",
    strategy=PacelineStrategy(sync="AllReduce()"),  # "paceline" is short for PacelineStrategy()
    max_epochs=3,
    gradient_clip_val=1.0,
    callbacks=[ModelCheckpoint("circle", monitor="accuracy", mode="max")],
    logger=False,
    enable_progress_bar=False,
)
# A step has 64 samples, of all workers together.
loaders = DataLoader(train, batch_size=64, shuffle=True), DataLoader(validate, batch_size=64)
trainer.fit(Circle(), *loaders)
if trainer.is_global_zero:
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.2f}")
