"""What all runs train: a GPT on the standard library's sources, by AdamW, in an order that only the
seed decides.

Training goes in stretches of so many steps; between two of them the validation loss is taken, while
the clock stands still.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Sampler, Subset

from paceline.apps import source_text
from paceline.apps.gpt import GPT, SMALL, GPTShape, next_token_loss

SHAPES = {"gpt-0.9m": SMALL, "gpt-3.5m": GPTShape(d=256, layers=4)}
WINDOWS = 1024  # of the validation text
CLIP = 1.0
WARM = 20  # steps in which the rate rises

Batch = tuple[Tensor, Tensor]


def arguments(description: str | None) -> argparse.ArgumentParser:
    """What every program takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", choices=list(SHAPES), required=True)
    parser.add_argument(
        "--batch", type=int, required=True, help="samples of a step, of all workers"
    )
    parser.add_argument("--steps", type=int, required=True, help="steps to train at most")
    parser.add_argument("--stretch", type=int, required=True, help="steps between two validations")
    parser.add_argument("--rate", type=float, required=True, help="AdamW's learning rate")
    parser.add_argument(
        "--falling",
        action="store_true",
        help="the rate falls to a tenth by a cosine; default: it stays",
    )
    parser.add_argument(
        "--until", type=float, default=-math.inf, help="end at this validation loss"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="folder for rank-R.json")
    return parser


class Stretches(Sampler[list[int]]):
    """Every iteration gives the next `stretch` batches of `rows`."""

    def __init__(self, rows: list[int], batch: int, stretch: int) -> None:
        self._rows, self._batch, self._stretch, self._at = rows, batch, stretch, 0

    def __len__(self) -> int:
        return self._stretch

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self._stretch):
            start = self._at * self._batch
            self._at += 1
            yield self._rows[start : start + self._batch]


@dataclass
class Course:
    """What a run has come to."""

    rank: int
    size: int
    losses: list[float] = field(default_factory=list)  # of each step, on this worker's share
    seconds: list[float] = field(default_factory=list)  # of the clock, at the end of each stretch
    validation: list[tuple[int, float, float]] = field(default_factory=list)  # steps, seconds, loss
    sent: float = 0.0  # bytes of all workers in a step

    def write(self, out: Path) -> None:
        """As rank-R.json, whole or not at all."""
        hidden = out / f".rank-{self.rank}"
        hidden.write_text(json.dumps(asdict(self)))
        hidden.rename(out / f"rank-{self.rank}.json")


class Task:
    """The model, the optimizer, the schedule and the data that the arguments ask for."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        self.options = options
        shape = SHAPES[options.model]
        train, validation = source_text.make_datasets(shape.context)
        chance = torch.Generator().manual_seed(options.seed)
        rows = torch.randperm(len(train), generator=chance)
        whole = options.steps * options.batch
        self.rows = rows.repeat(-(-whole // len(rows)))[:whole].tolist()
        self.train = train
        held = torch.randperm(len(validation), generator=torch.Generator().manual_seed(0))[:WINDOWS]
        self.held_out: DataLoader[Batch] = DataLoader(
            Subset(validation, held.tolist()), batch_size=128
        )
        torch.manual_seed(options.seed)
        self.model = GPT(shape)

    @property
    def stretches(self) -> int:
        """How many there are at most."""
        return -(-int(self.options.steps) // int(self.options.stretch))

    def sampler(self) -> Stretches:
        """The batches."""
        return Stretches(self.rows, self.options.batch, self.options.stretch)

    def optimizer(self, model: nn.Module | None = None) -> torch.optim.AdamW:
        """AdamW, for all parameters."""
        return torch.optim.AdamW(
            (model or self.model).parameters(), lr=self.options.rate, weight_decay=0.01
        )

    def schedule(self, optimizer: torch.optim.Optimizer) -> LambdaLR:
        """The rate rises, then stays or falls."""
        steps, falls = self.options.steps, self.options.falling

        def factor(step: int) -> float:
            rise = min(1.0, (step + 1) / WARM)
            return rise * (0.55 + 0.45 * math.cos(math.pi * step / steps)) if falls else rise

        return LambdaLR(optimizer, factor)

    def run(
        self, course: Course, stretch: Callable[[], list[Tensor]], evaluate: Callable[[], float]
    ) -> None:
        """Train stretch by stretch, until the end or the loss that was asked for."""
        clock, losses = 0.0, list[Tensor]()
        course.validation.append((0, 0.0, evaluate()))
        for number in range(1, self.stretches + 1):
            began = time.perf_counter()
            losses += stretch()
            clock += time.perf_counter() - began
            course.seconds.append(clock)
            if number == self.stretches or self.options.until > -math.inf:
                course.validation.append((number * self.options.stretch, clock, evaluate()))
                if course.validation[-1][2] <= self.options.until:
                    break
        course.losses = [float(loss) for loss in losses]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The mean loss of a batch."""
    return next_token_loss(model(x), y)
