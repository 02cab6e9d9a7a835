"""Classifies images of shapes with a small CNN.

Run it with `paceline run --workers 2 examples/image_classification.py`.

It is the loop of any image classifier: batch statistics of the global batch, a schedule of the
learning rate, and an accuracy over the whole validation set. Each worker sees a part of it.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import paceline as pl

SHAPES, SIZE = ("disc", "square", "cross"), 16


class Shapes(Dataset):
    """Noisy images of one shape each: (1, SIZE, SIZE), and the index of the shape.

    Image n is the same each time it is read.
    """

    def __init__(self, first: int, count: int) -> None:
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        kind = (self.first + index) % len(SHAPES)
        row, column = torch.randint(5, SIZE - 5, (2,), generator=generator).tolist()
        down, right = torch.arange(SIZE)[:, None] - row, torch.arange(SIZE)[None] - column
        distance = torch.maximum(down.abs(), right.abs())
        is_inside = (
            down**2 + right**2 <= 12,
            distance <= 3,
            (distance <= 4) & ((down.abs() <= 1) | (right.abs() <= 1)),
        )[kind]
        return (is_inside + 0.3 * torch.randn(SIZE, SIZE, generator=generator))[None], kind


def classifier() -> nn.Sequential:
    layers: list[nn.Module] = []
    for inside, outside in ((1, 16), (16, 32)):
        layers += [
            nn.Conv2d(inside, outside, 3, padding=1, bias=False),
            nn.BatchNorm2d(outside),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, len(SHAPES)))


torch.manual_seed(0)
model = classifier()
# A step has 64 images, of all workers together.
epochs, train = 3, DataLoader(Shapes(0, 768), batch_size=64, shuffle=True)
validation = DataLoader(Shapes(10_000, 300), batch_size=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.OneCycleLR(
    optimizer, max_lr=1e-2, total_steps=epochs * len(train)
)

with pl.start() as run:
    model, optimizer, schedule, train, validation = run.prepare(
        model, optimizer, schedule, train, validation
    )
    for _ in run.epochs(epochs):
        model.train()
        for images, kinds in train:
            loss = F.cross_entropy(model(images), kinds)
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            run.log(loss=loss, rate=schedule.get_last_lr()[0])
        model.eval()
        with torch.no_grad():  # each image counts once, on any number of workers
            is_right = torch.cat(
                [run.gather(model(images).argmax(1) == kinds) for images, kinds in validation]
            )
        run.results["accuracy"] = is_right.float().mean().item()  # goes to summary.json
        run.print(f"accuracy {run.results['accuracy']:.3f} on {len(is_right)} images")
