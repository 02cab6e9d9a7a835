"""Text of a GPT that two workers cut between them, against the whole of it on one of them: the same tokens, in turn, in one run.

    paceline run --workers 2 --threads 1 benchmarks/inference.py [--d 2048 --layers 4 --rounds 9 --check]

Both have the same weights, and their greedy tokens have to be the same. While the first worker writes alone, the other sleeps at a file of
the first. An answer is a prompt of 64 tokens and 16 more. The bar is for the median of ratios over rounds: at most 0.65.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import paceline as pl
from paceline.apps.generation import Sampling, generate
from paceline.apps.gpt import GPT, GPTShape, cuts
from paceline.comm.solo import SoloGroup

BAR = 0.65  # of the time of one worker, at most
SKIPPED = 2  # rounds that aren't counted
SHARP = 4.0  # times the usual weights, so that the likeliest token is clearly the likeliest


class Alone:
    """A run of one worker, as far as text needs it."""

    def __init__(self) -> None:
        self.device, self.group, self.is_first = torch.device("cpu"), SoloGroup(), True

    def forward(self, model: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            return model(x)


def made(options: argparse.Namespace) -> GPT:
    """Make a model whose values are the same in every call."""
    torch.manual_seed(0)
    model = GPT(GPTShape(d=options.d, layers=options.layers, heads=16, context=256)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SHARP)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--d", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the bar is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompt = torch.randint(256, (options.prompt,), generator=torch.Generator().manual_seed(1)).tolist()
    with tempfile.TemporaryDirectory() as folder, pl.start(mesh="tensor", folder=folder, trace="off") as run:
        lone: Any = Alone()
        whole = made(options) if run.is_first else None
        cut = run.prepare(made(options), cut=cuts(["tensor"]))
        seconds: dict[str, list[float]] = {"alone": [], "both": []}
        first: dict[str, list[float]] = {"alone": [], "both": []}
        texts = dict[str, list[int]]()

        def timed(name: str, write: Callable[[], Any]) -> None:
            began, times, found = time.perf_counter(), [], []
            for token in write():
                times.append(time.perf_counter() - began)
                found.append(token)
            seconds[name].append(times[-1])
            first[name].append(times[0])
            if texts.setdefault(name, found) != found or texts["alone"] != found:
                raise RuntimeError(f"tokens differ: {found} of {name}, {texts}")

        for _ in range(options.rounds + SKIPPED):
            if whole is not None:
                timed("alone", lambda: generate(lone, whole, prompt, options.tokens, Sampling(0)))
            else:
                texts["alone"] = []
            run.barrier()
            if whole is None:
                texts["alone"] = list(generate(run, cut, prompt, options.tokens, Sampling(0)))
            else:
                timed("both", lambda: generate(run, cut, prompt, options.tokens, Sampling(0)))
            run.barrier()
        if run.is_first:
            ratios = report(seconds, first, options.tokens)
            if options.check and ratios > BAR:
                raise SystemExit(f"two workers take {ratios:.3f} of the time of one, more than {BAR}")


def report(seconds: dict[str, list[float]], first: dict[str, list[float]], tokens: int) -> float:
    """Print medians, and return the median of ratios."""
    for name in seconds:
        whole, begun = seconds[name][SKIPPED:], first[name][SKIPPED:]
        each = [(a - b) / (tokens - 1) for a, b in zip(whole, begun, strict=True)]
        text = f"answer {statistics.median(whole) * 1e3:8.1f} ms, prompt {statistics.median(begun) * 1e3:8.1f} ms"
        print(f"{name:6} {text}, each further token {statistics.median(each) * 1e3:7.2f} ms", flush=True)
    ratios = sorted(two / one for one, two in zip(seconds["alone"][SKIPPED:], seconds["both"][SKIPPED:], strict=True))
    print(f"two workers take {statistics.median(ratios):.3f} of the time of one ({ratios[0]:.3f} to {ratios[-1]:.3f}), at most {BAR}")
    return statistics.median(ratios)


if __name__ == "__main__":
    main()
