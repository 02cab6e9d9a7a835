"""What all programs train, and how it is timed and checked; needs only torch, so that it can be
imported in every peer's environment.

A program makes a `Job` from its arguments, trains on the batches that `Job.turns` hands it, and
calls `Job.finish`, which writes what this worker saw to OUT/rank-R.json. A step lasts from one turn
of the loader to the next.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

Batch = tuple[Tensor, ...]  # x and y
SAMPLES = 2048  # of the data sets that are made up


@dataclass(frozen=True)
class Work:
    """A model to train: samples that each worker has of a step, and the learning rate of its
    SGD.
    """

    batch: int
    rate: float


WORKS = {
    "digits-cnn": Work(batch=16, rate=0.1),
    "gpt-0.9m": Work(batch=12, rate=0.2),
    "gpt-19m": Work(batch=2, rate=0.05),
    "mlp-25m": Work(batch=4, rate=0.05),
}


def build(name: str, seed: int) -> nn.Module:
    """The model, the same in every process that gives the same seed."""
    torch.manual_seed(seed)
    if name == "digits-cnn":
        convolutions = (
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        return nn.Sequential(
            *convolutions, nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10)
        )
    if name == "mlp-25m":
        wide = (
            nn.Linear(1024, 3072),
            nn.ReLU(),
            nn.Linear(3072, 3072),
            nn.ReLU(),
            nn.Linear(3072, 3072),
            nn.ReLU(),
        )
        return nn.Sequential(*wide, nn.Linear(3072, 1024))
    from paceline.apps import gpt

    model: nn.Module = gpt.GPT(gpt.SMALL if name == "gpt-0.9m" else gpt.MEDIUM)
    return model


def dataset(name: str, seed: int, digits: Path | None) -> TensorDataset:
    """All samples, in the order in which they are trained."""
    generator = torch.Generator().manual_seed(seed + 1)
    if name == "digits-cnn":
        if digits is None:
            raise SystemExit(
                "digits-cnn needs --digits FILE, scikit-learn's digits as the driver wrote them"
            )
        kept = torch.load(digits, weights_only=True)
        order = torch.randperm(len(kept["target"]), generator=generator)
        return TensorDataset((kept["images"][order] / 16).unsqueeze(1), kept["target"][order])
    if name == "mlp-25m":
        return TensorDataset(
            torch.randn(SAMPLES, 1024, generator=generator),
            torch.randint(1024, (SAMPLES,), generator=generator),
        )
    text = torch.randint(256, (SAMPLES, 65), generator=generator)
    return TensorDataset(text[:, :-1], text[:, 1:])


def loss_of(outputs: Tensor, y: Tensor) -> Tensor:
    """Mean cross entropy, over tokens too where there are any."""
    return F.cross_entropy(outputs.flatten(0, -2), y.flatten())


def flat(model: nn.Module) -> Tensor:
    """All parameters in one tensor."""
    return torch.cat([p.detach().reshape(-1).float() for p in model.parameters()])


def distance(w: Tensor, reference: Tensor) -> float:
    """|w - reference| / |reference|, summed in double precision."""
    return float((w - reference).double().norm() / reference.double().norm())


def sent() -> tuple[int, int]:
    """Bytes that this network namespace has sent so far: over its links, and over loopback."""
    counts = {}
    for line in Path("/proc/self/net/dev").read_text().splitlines()[2:]:
        name, _, columns = line.partition(":")
        counts[name.strip()] = int(columns.split()[8])
    inside = counts.pop("lo", 0)
    return sum(counts.values()), inside


def leave() -> None:
    """End this process here and now.

    A Python that ends takes DDP's Gloo group down while it holds the interpreter, and may wait for
    ever for the group's thread, which waits for the interpreter (torch 2.13, small models; the
    results are written by then).
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all programs take."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--model", choices=list(WORKS), required=True)
    arguments.add_argument(
        "--workers", type=int, required=True, help="workers that should be there"
    )
    arguments.add_argument("--steps", type=int, default=8, help="timed steps (default %(default)s)")
    arguments.add_argument(
        "--warm", type=int, default=3, help="steps before those (default %(default)s)"
    )
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument(
        "--digits", type=Path, help="scikit-learn's digits, as the driver wrote them"
    )
    arguments.add_argument(
        "--reference",
        type=Path,
        help="weights that one process has before and after the timed steps",
    )
    arguments.add_argument("--out", type=Path, required=True, help="folder for rank-R.json")
    return arguments


class Job:
    """What a program was asked to do; `batch` is the global one, `share` a worker's."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.set_num_threads(1)
        work = WORKS[options.model]
        self.options = options
        self.share, self.batch, self.rate = work.batch, work.batch * options.workers, work.rate
        self.steps, self.warm = options.steps, options.warm
        self.model = build(options.model, options.seed)
        data = dataset(options.model, options.seed, options.digits)
        # no partial batch: peers differ in what they do with one
        whole = len(data) // self.batch * self.batch
        self.data = TensorDataset(*(part[:whole] for part in data.tensors))
        self._times: list[float] = []
        self._losses: list[Tensor] = []
        self._sent = [(0, 0), (0, 0)]
        self.warmed: Tensor | None = None  # the weights before the timed steps

    def optimizer(self, model: nn.Module | None = None) -> torch.optim.SGD:
        """The optimizer that every peer is given."""
        return torch.optim.SGD((model or self.model).parameters(), lr=self.rate)

    def loader(self, batch: int) -> DataLoader[Batch]:
        """Batches in the order of the data."""
        return DataLoader(self.data, batch_size=batch)

    def dealt(self, rank: int, size: int) -> DataLoader[Batch]:
        """A worker's shares of the global batches, as DistributedSampler deals them."""
        from torch.utils.data import DistributedSampler

        sampler: DistributedSampler[Batch] = DistributedSampler(
            self.data, num_replicas=size, rank=rank, shuffle=False
        )
        return DataLoader(self.data, batch_size=self.share, sampler=sampler)

    def turns(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """The batches of all steps, over as many epochs as that takes; notes when each began."""
        total = self.warm + self.steps
        while True:
            for batch in loader:
                if len(self._times) == self.warm:
                    self._sent[0], self.warmed = sent(), flat(self.model)
                self._times.append(time.perf_counter())
                if len(self._times) > total:
                    self._sent[1] = sent()
                    return
                yield batch

    def train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: Iterable[Batch],
        after: Callable[[], object] = lambda: None,
    ) -> None:
        """The plain loop; `after` is called between backward and the optimizer's step."""
        for x, y in self.turns(loader):
            loss = loss_of(model(x), y)
            loss.backward()
            after()
            optimizer.step()
            optimizer.zero_grad()
            self.note(loss)

    def note(self, loss: Tensor) -> None:
        """Remember a step's loss."""
        self._losses.append(loss.detach())

    def finish(
        self, rank: int, size: int, *packages: str, model: nn.Module | None = None, **more: object
    ) -> None:
        """Write what this worker saw; `model` where it isn't the job's own, `packages` whose
        versions are told.
        """
        weights = flat(model or self.model)
        known = (
            None
            if self.options.reference is None
            else torch.load(self.options.reference, weights_only=True)
        )
        seen = {
            "rank": rank,
            "size": size,
            "host": os.readlink("/proc/self/ns/net"),
            "seconds": [
                b - a
                for a, b in zip(
                    self._times[self.warm :], self._times[self.warm + 1 :], strict=False
                )
            ],
            "losses": [float(loss) for loss in self._losses],
            "sent": {
                kind: after - before
                for kind, before, after in zip(("links", "loopback"), *self._sent, strict=True)
            },
            "sha256": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
            "away": None if known is None else distance(weights, known["weights"]),
            "away_warmed": None
            if known is None or self.warmed is None
            else distance(self.warmed, known["warmed"]),
            "versions": {
                package: importlib.metadata.version(package) for package in ("torch", *packages)
            },
            **more,
        }
        written = self.options.out / f".rank-{rank}.{os.getpid()}"
        written.write_text(json.dumps(seen))
        written.rename(self.options.out / f"rank-{rank}.json")
