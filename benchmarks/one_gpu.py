"""Compares the steps of one worker on a GPU with those of the plain loop.

It shows the cost of paceline if there is nothing to exchange. Both train models of their own that
begin equal, in one process, and take turns. At the end their weights have to be equal.

    python benchmarks/one_gpu.py [--device cuda] [--rounds 11]
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from harness import Row, arguments, interleave, ratio, report
from torch import Tensor, nn

import paceline as pl
from paceline.apps.gpt import GPT, MEDIUM, SMALL, GPTShape, next_token_loss

Build = Callable[[], tuple[nn.Module, Tensor]]


class Case(NamedTuple):
    """A model to train.

    Attributes:
        build: Makes the model and its input.
        loss: Function of the model and the input.
        optimizer: Makes an optimizer of parameters.
        steps: Steps of a round.
    """

    build: Build
    loss: Callable[[nn.Module, Tensor], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    steps: int


class Chain(nn.Sequential):
    """A thousand tiny layers, one after the other."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(8, 8, bias=False) for _ in range(1000)))


class Digits(nn.Sequential):
    """A small CNN with batch norm."""

    def __init__(self) -> None:
        first = (nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
        second = (
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
        )
        super().__init__(*first, *second, nn.Flatten(), nn.Linear(32, 10))


def gpt(shape: GPTShape) -> Build:
    return lambda: (GPT(shape), torch.randint(shape.vocab, (32, shape.context)))


def next_token(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        return next_token_loss(model(x), x)


def square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-4, fused=True)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-4, foreach=True)


CASES = {
    "GPT, 19 M parameters, bfloat16": Case(gpt(MEDIUM), next_token, adam, 20),
    "GPT, 0.9 M parameters, bfloat16": Case(gpt(SMALL), next_token, adam, 40),
    "1,000 tiny parameters": Case(lambda: (Chain(), torch.randn(16, 8)), square, sgd, 10),
    "CNN": Case(lambda: (Digits(), torch.randn(64, 3, 32, 32)), square, sgd, 100),
}


def made(case: Case, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer, Tensor]:
    torch.manual_seed(0)
    model, x = case.build()
    return model.to(device), case.optimizer(model.parameters()), x.to(device)


def seconds(case: Case, model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> float:
    """Measure the mean seconds of a step, over a round.

    Args:
        case: The case.
        model: Its model.
        optimizer: Its optimizer.
        x: Its input.
    """
    wait_for_device = torch.cuda.synchronize if x.is_cuda else lambda: None
    # Work on a GPU is queued. It has to end before the clock is read.
    wait_for_device()
    start = time.perf_counter()
    for _ in range(case.steps):
        case.loss(model, x).backward()
        optimizer.step()
        optimizer.zero_grad()
    wait_for_device()
    return (time.perf_counter() - start) / case.steps


def measure(case: Case, device: torch.device, rounds: int) -> dict[str, list[float]]:
    """Measure steps with paceline and with the plain loop, in turn.

    Args:
        case: The case.
        device: Device of the models.
        rounds: Number of rounds.

    Returns:
        Seconds of a step in each round, by variant.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        pl.start(folder=folder, device=str(device)) as run,
    ):
        plain, (model, optimizer, x) = made(case, device), made(case, device)
        ours = (*run.prepare(model, optimizer), x)
        samples = interleave(
            {"plain": lambda: seconds(case, *plain), "paceline": lambda: seconds(case, *ours)},
            rounds,
        )
        # Sums on a GPU may round differently, so weights are close and not equal.
        for plain_parameter, parameter in zip(
            plain[0].parameters(), ours[0].parameters(), strict=True
        ):
            if not torch.allclose(plain_parameter, parameter, rtol=1e-2, atol=1e-4):
                raise RuntimeError("the weights of paceline and the plain loop differ")
    return samples


def main() -> None:
    parser = arguments(__doc__.splitlines()[0], "one_gpu", rounds=11)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no GPU: give --device cpu to measure on the processor")
    rows, raw = [], {}
    for name, case in CASES.items():
        raw[name] = samples = measure(case, torch.device(options.device), options.rounds)
        medians = {
            variant: sorted(step_seconds)[len(step_seconds) // 2]
            for variant, step_seconds in samples.items()
        }
        rows.append(
            Row(
                name,
                medians,
                "paceline / plain",
                ratio(samples["paceline"], samples["plain"]),
                most=1.02,
            )
        )
    are_bars_kept = report("one_gpu", rows, options, raw)
    sys.exit(0 if are_bars_kept or not options.check else 1)


if __name__ == "__main__":
    main()
