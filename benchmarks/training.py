"""Compares training steps of paceline with DDP, and with the same program without an exchange.

All programs run in the same processes, with models of their own that begin equal, and take turns.
The cost of the exchange is (paceline - nothing) / (ddp - nothing). At the end the weights of both
have to agree, and those without an exchange have to differ.

    python benchmarks/training.py [--models gpt-19m gpt-0.9m tiny] [--workers 2]
                                  [--variants nothing ddp paceline]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Crew, Message, Row, arguments, bootstrap, interleave, ratio, report, serve

HERE = Path(__file__).resolve().parent
SAMPLES = 4096  # samples in a data set
LAST = 1e-4  # highest |difference| / |weights| between ddp and paceline after all rounds


@dataclass(frozen=True)
class Setup:
    """Training of a model. Bars are highest ratios.

    Attributes:
        batch: Samples of a step, for each worker.
        steps: Steps of a round.
        added: Bar for the cost of the exchange, relative to that of DDP.
        step: Bar for the step, relative to that of DDP.
        alone: Bar for the step of one worker, relative to the plain loop.
    """

    batch: int
    steps: int
    added: float | None = None
    step: float | None = None
    alone: float | None = None


SETUPS = {
    "gpt-19m": Setup(batch=2, steps=4, added=0.40, alone=1.02),
    "gpt-0.9m": Setup(batch=12, steps=20, step=1.02),
    "tiny": Setup(batch=4, steps=20, step=1.10, alone=1.10),
    "cnn": Setup(batch=16, steps=60),
}


def build(name: str) -> tuple[Any, Callable[[Any, Any], Any], Any]:
    """Make the model, its loss and its data set, the same in each process."""
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset

    from paceline.apps import gpt

    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    if name == "tiny":
        x = torch.randn(SAMPLES, 8, generator=generator)
        return tiny(), nn.functional.mse_loss, TensorDataset(x, x.roll(1, 1))
    if name == "cnn":
        x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
        return (
            cnn(),
            nn.functional.cross_entropy,
            TensorDataset(x, torch.randint(10, (SAMPLES,), generator=generator)),
        )
    shape = gpt.MEDIUM if name == "gpt-19m" else gpt.SMALL
    text = torch.randint(shape.vocab, (SAMPLES, shape.context + 1), generator=generator)
    return gpt.GPT(shape), gpt.next_token_loss, TensorDataset(text[:, :-1], text[:, 1:])


def cnn() -> Any:
    """Make a network of 0.04 M parameters. It shows the fixed cost of a step."""
    from torch import nn

    convolutions = (
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
    return nn.Sequential(*convolutions, nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10))


def tiny() -> Any:
    """Make a model of 1,000 parameters of 64 and 8 values. It shows the cost of each parameter."""
    from torch import Tensor, nn

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(500))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + 0.01 * layer(x)
            return x

    return Residual()


# ---- the programs: each is a model, and an iterator that trains a step for each item


def nothing(
    name: str, rank: int, size: int, options: argparse.Namespace
) -> tuple[Any, Iterator[None]]:
    """Make the loop without an exchange. With one worker it is the plain loop.

    Args:
        name: Name of the model.
        rank: Rank of this worker.
        size: Number of workers.
        options: Arguments of the benchmark.

    Returns:
        The model, and an iterator that trains a step for each item.
    """
    model, loss, data = build(name)
    return model, loop(model, loss, dealt(data, name, rank, size), optimizer_of(model, options))


def ddp(name: str, rank: int, size: int, options: argparse.Namespace) -> tuple[Any, Iterator[None]]:
    """Make the same loop under DistributedDataParallel, as in its tutorial.

    Args:
        name: Name of the model.
        rank: Rank of this worker.
        size: Number of workers.
        options: Arguments of the benchmark.

    Returns:
        The model, and an iterator that trains a step for each item.
    """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model, loss, data = build(name)
    wrapped = DistributedDataParallel(model)
    return model, loop(wrapped, loss, dealt(data, name, rank, size), optimizer_of(wrapped, options))


def paceline(
    name: str, rank: int, size: int, options: argparse.Namespace
) -> tuple[Any, Iterator[None]]:
    """Make the same loop with paceline, as in its README.

    The batch of the loader is the global one.

    Args:
        name: Name of the model.
        rank: Rank of this worker.
        size: Number of workers.
        options: Arguments of the benchmark.

    Returns:
        The model, and an iterator that trains a step for each item.
    """
    from torch.utils.data import DataLoader

    import paceline as pl

    run = pl.start()
    model, loss, data = build(name)
    loader = DataLoader(data, batch_size=SETUPS[name].batch * size)
    model, optimizer, loader = run.prepare(model, optimizer_of(model, options), loader)

    def steps() -> Iterator[None]:
        for _ in run.epochs(10**6):
            for x, y in loader:
                value = loss(model(x), y)
                value.backward()
                optimizer.step()
                optimizer.zero_grad()
                if not options.silent:
                    run.log(loss=value)
                yield

    return model, steps()


PROGRAMS = {"nothing": nothing, "ddp": ddp, "paceline": paceline}


def dealt(data: Any, name: str, rank: int, size: int) -> Any:
    """Make the loader of one worker.

    Args:
        data: The data set.
        name: Name of the model.
        rank: Rank of this worker.
        size: Number of workers.
    """
    from torch.utils.data import DataLoader, DistributedSampler

    sampler = (
        DistributedSampler(data, num_replicas=size, rank=rank, shuffle=False) if size > 1 else None
    )
    return DataLoader(data, batch_size=SETUPS[name].batch, sampler=sampler)


def optimizer_of(model: Any, options: argparse.Namespace) -> Any:
    """Make the optimizer of a model."""
    import torch

    return {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}[options.optimizer](
        model.parameters(), lr=1e-3
    )


def loop(
    model: Any, loss: Callable[[Any, Any], Any], loader: Any, optimizer: Any
) -> Iterator[None]:
    """Train a step whenever the next item is taken.

    Args:
        model: The model.
        loss: Function of the output and the target.
        loader: The loader, which is read again and again.
        optimizer: The optimizer.
    """
    while True:
        for x, y in loader:
            value = loss(model(x), y)
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield


class Worker:
    """A worker with all programs. A message asks for a round of one of them.

    Args:
        name: Name of the model.
        rank: Rank of this worker.
        size: Number of workers.
        options: Arguments of the benchmark.
    """

    def __init__(self, name: str, rank: int, size: int, options: argparse.Namespace) -> None:
        import torch

        torch.set_num_threads(1)
        self.programs = {
            variant: PROGRAMS[variant](name, rank, size, options) for variant in options.variants
        }

    def handle(self, message: Message) -> Message:
        return (
            self.train(message["variant"], message["steps"])
            if "variant" in message
            else self.compare()
        )

    def train(self, variant: str, steps: int) -> Message:
        """Measure the mean seconds of some steps.

        A step before them isn't timed: it warms the caches, and brings the workers together.
        """
        _, program = self.programs[variant]
        next(program)
        start = time.perf_counter()
        for _ in range(steps):
            next(program)
        return {"seconds": (time.perf_counter() - start) / steps}

    def compare(self) -> Message:
        """Compute a hash of each program's weights, and their distance from paceline's."""
        import hashlib

        import torch

        weights = {
            variant: torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
            for variant, (model, _) in self.programs.items()
        }
        ours = weights.get("paceline")
        return {
            variant: {
                "hash": hashlib.sha256(values.numpy().tobytes()).hexdigest(),
                "away": None
                if ours is None
                else float((values - ours).double().norm() / values.double().norm()),
            }
            for variant, values in weights.items()
        }


# ---- the coordinator


def measure(name: str, workers: int, options: argparse.Namespace) -> dict[str, list[float]]:
    """Measure all variants in turn.

    Args:
        name: Name of the model.
        workers: Number of workers.
        options: Arguments of the benchmark.

    Returns:
        Seconds of a step in each round, by variant.

    Raises:
        RuntimeError: The weights at the end are wrong.
    """
    variants = [variant for variant in options.variants if variant != "ddp" or workers > 1]
    flags = [
        "--serve",
        name,
        "--optimizer",
        options.optimizer,
        *["--silent"] * options.silent,
        "--variants",
        *variants,
    ]
    script = [str(HERE / "training.py"), *flags]
    launch = [sys.executable]
    if workers > 1:
        launch += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(workers)]
    # torchrun starts the workers of all programs. A single worker needs no launcher.
    with (
        tempfile.TemporaryDirectory() as folder,
        Crew(name, [[*launch, *script]], workers, folder=folder) as crew,
    ):
        steps = options.steps or SETUPS[name].steps

        def asking(variant: str) -> Callable[[], float]:
            return lambda: max(
                answer["seconds"] for answer in crew.ask(variant=variant, steps=steps)
            )

        samples = interleave(
            {variant: asking(variant) for variant in variants}, options.rounds, warmup=2
        )
        inspect(crew.ask(), workers)
    return samples


def inspect(answers: Sequence[Message], workers: int) -> None:
    """Check the weights of all programs at the end. Raises `RuntimeError` if some are wrong.

    `answers` are those of `Worker.compare`.
    """
    for variant in answers[0]:
        # Workers without an exchange train on different samples, so they have to differ.
        equal = len({answer[variant]["hash"] for answer in answers}) == 1
        if equal != (variant != "nothing" or workers == 1):
            raise RuntimeError(
                f"{variant}: the workers' weights are "
                f"{'equal' if equal else 'different'} after training"
            )
    # paceline is compared with DDP, or with the plain loop if there is one worker.
    reference = "ddp" if "ddp" in answers[0] else "nothing" if workers == 1 else None
    if reference is not None and "paceline" in answers[0] and answers[0][reference]["away"] > LAST:
        raise RuntimeError(
            f"paceline's weights are {answers[0][reference]['away']:.2e} away from {reference}'s, "
            f"more than {LAST:g}"
        )


def judge(name: str, workers: int, samples: dict[str, list[float]]) -> list[Row]:
    """Make a row for each possible comparison.

    Args:
        name: Name of the model.
        workers: Number of workers.
        samples: Seconds of a step in each round, by variant.
    """
    setup, rows = SETUPS[name], []
    seconds = {variant: statistics.median(values) for variant, values in samples.items()}
    what = f"{name}, {workers} worker{'s' if workers > 1 else ''}"
    if "paceline" not in samples:
        return [Row(what, seconds)]
    if workers == 1:
        return [
            Row(
                what,
                seconds,
                "step: paceline / plain loop",
                ratio(samples["paceline"], samples["nothing"]),
                most=setup.alone,
            )
        ]
    if "ddp" in samples and "nothing" in samples:
        # The three medians are drawn together, as they belong to the same rounds.
        added = bootstrap(
            lambda nothing, ddp, paceline: (paceline - nothing) / (ddp - nothing),
            samples["nothing"],
            samples["ddp"],
            samples["paceline"],
        )
        rows.append(
            Row(what, seconds, "what the exchange adds: paceline / ddp", added, most=setup.added)
        )
    if "ddp" in samples:
        rows.append(
            Row(
                what,
                seconds,
                "step: paceline / ddp",
                ratio(samples["paceline"], samples["ddp"]),
                most=setup.step,
            )
        )
    return rows


def main() -> None:
    parser = arguments(__doc__ or "", "training", rounds=30)
    parser.add_argument("--models", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--variants", nargs="+", choices=list(PROGRAMS), default=list(PROGRAMS))
    parser.add_argument("--steps", type=int, help="steps of a round (default: by model)")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument(
        "--silent", action="store_true", help="paceline's loop without run.log(loss=...)"
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        rank, size = place()
        serve(rank, Worker(options.serve, rank, size, options).handle)
        return
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for name in options.models:
        for workers in options.workers:
            samples = measure(name, workers, options)
            raw[f"{name}, {workers}"] = samples
            rows += judge(name, workers, samples)
    if not report("training", rows, options, raw) and options.check:
        sys.exit(1)


def place() -> tuple[int, int]:
    """Read the rank of this worker and the number of workers, as torchrun gives them.

    Without a launcher there is one worker.
    """
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


if __name__ == "__main__":
    main()
