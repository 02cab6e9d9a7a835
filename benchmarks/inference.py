"""Compares generating text by two workers, which share the layers of a GPT, with one worker.

    paceline run --workers 2 --threads 1 benchmarks/inference.py \\
        [--d 2048 --layers 4 --rounds 9 --check]

Both variants have the same weights, take turns in the same run, and have to generate the same
greedy tokens. While the first worker generates alone, the other one waits. An answer is the pass
over a prompt and `--tokens` tokens. The bar is for the median ratio over the rounds that other
programs didn't disturb: at most 0.65. With `--patience` each round waits up to that number of
seconds for a quiet moment.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import paceline as pl
from paceline.apps import machine_load
from paceline.apps.generation import Sampling, generate_tokens
from paceline.apps.gpt import GPT, GPTShape, make_cuts
from paceline.cluster.mesh import Mesh
from paceline.comm.solo import SoloGroup

BAR = 0.65  # highest ratio to the time of one worker
QUIET = 0.3  # cores that other programs may keep busy in a round that counts
SHARP = 4.0  # factor of the weights, so that rounding doesn't change the likeliest token


class Alone:
    """The parts of a run that text generation needs, for one worker."""

    def __init__(self) -> None:
        self.device, self.group, self.is_first = torch.device("cpu"), SoloGroup(), True
        self.mesh = Mesh((("data", 1),), (0,))

    def forward(self, model: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            return model(x)


@dataclass
class Round:
    """The measurements of one round.

    Attributes:
        times: By variant, the time of each token in seconds since the answer began.
        processor: By variant, processor seconds of this worker. A worker that waits is busy for the
            first microseconds only.
        texts: By variant, the tokens.
        others: Mean number of cores that other programs kept busy.
    """

    times: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, float] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)
    others: float = 0.0

    def write(self, name: str, tokens: Callable[[], Any]) -> None:
        """Generate an answer, and record its times. `tokens` makes the iterator of tokens."""
        start, processor_start = time.perf_counter(), time.process_time()
        self.times[name], self.texts[name] = [], []
        for token in tokens():
            self.times[name].append(time.perf_counter() - start)
            self.texts[name].append(token)
        self.processor[name] = time.process_time() - processor_start

    @property
    def ratio(self) -> float:
        """Time of two workers, divided by that of one."""
        return self.times["both"][-1] / self.times["alone"][-1]


def made(options: argparse.Namespace) -> GPT:
    """Make a model, with the same weights in each call."""
    torch.manual_seed(0)
    model = GPT(GPTShape(d=options.d, layers=options.layers, heads=16, context=256)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SHARP)
    return model


def quieten(patience: float) -> None:
    """Wait until other programs are quiet for half a second, or until the patience ends."""
    end = time.monotonic() + patience
    while time.monotonic() < end:
        before = machine_load.read_clocks()
        time.sleep(0.5)
        if machine_load.compute_other_load(before, machine_load.read_clocks()) < QUIET:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--d", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=16, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--patience", type=float, default=0.0)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the bar is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Both workers have the same prompt.
    prompt = torch.randint(
        256, (options.prompt,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    with (
        tempfile.TemporaryDirectory() as folder,
        pl.start(mesh="tensor", folder=folder, trace="off", deadline=120 + options.patience) as run,
    ):
        # Only the first worker has the whole model.
        whole, alone, rounds = made(options) if run.is_first else None, Alone(), list[Round]()
        cut = run.prepare(made(options), cut=make_cuts(["tensor"]))
        for _ in range(options.rounds + 1):  # the first round doesn't count
            if run.is_first:
                quieten(options.patience)
            run.barrier()
            current_round, clocks_before, processor_start = (
                Round(),
                machine_load.read_clocks(),
                time.process_time(),
            )
            if whole is not None:
                current_round.write(
                    "alone",
                    lambda: generate_tokens(alone, whole, prompt, options.tokens, Sampling(0)),
                )
            run.barrier()
            current_round.write(
                "both", lambda: generate_tokens(run, cut, prompt, options.tokens, Sampling(0))
            )
            clocks_after = machine_load.read_clocks()
            processor_seconds = float(run.mean(time.process_time() - processor_start)) * run.size
            # The cores were busy for both workers and for other programs. Only the others disturb.
            if clocks_before is not None and clocks_after is not None:
                current_round.others = max(
                    0.0, clocks_after.busy - clocks_before.busy - processor_seconds
                ) / (clocks_after.now - clocks_before.now)
            rounds.append(current_round)
        if run.is_first and report(rounds[1:], options.tokens) > BAR and options.check:
            raise SystemExit(1)


def report(rounds: Sequence[Round], tokens: int) -> float:
    """Print medians, and return the median ratio.

    Raises `RuntimeError` if the tokens of the variants differ. `tokens` is the number of tokens.
    """
    if len({tuple(text) for item in rounds for text in item.texts.values()}) > 1:
        raise RuntimeError(f"tokens differ: {[item.texts for item in rounds]}")
    quiet = [item for item in rounds if item.others <= QUIET]
    # If no round is quiet, all of them count, and the output says so.
    counted = quiet or rounds
    for name in ("alone", "both"):
        answer, first = (
            statistics.median(item.times[name][index] for item in counted) * 1e3
            for index in (-1, 0)
        )
        print(
            f"{name:6} answer {answer:8.1f} ms, prompt {first:8.1f} ms, each further token "
            f"{(answer - first) / (tokens - 1):7.2f} ms"
        )
    ratios = sorted(item.ratio for item in counted)
    basis = (
        f"{len(quiet)} of {len(rounds)} rounds"
        if quiet
        else f"{len(rounds)} rounds, all of them disturbed by other programs"
    )
    median_ratio = statistics.median(ratios)
    print(
        f"two workers take {median_ratio:.3f} of the time of one "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}; {basis}), bar: at most {BAR}"
    )
    work = statistics.median(item.processor["both"] / item.processor["alone"] for item in counted)
    print(
        f"the first worker needs {work:.3f} of the processor time that it needs alone", flush=True
    )
    return median_ratio


if __name__ == "__main__":
    main()
