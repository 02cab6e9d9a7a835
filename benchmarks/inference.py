"""Text of a GPT that two workers cut between them, against the whole of it on one of them: the same
tokens, in turn, in one run.

    paceline run --workers 2 --threads 1 benchmarks/inference.py \\
        [--d 2048 --layers 4 --rounds 9 --check]

Both have the same weights, and their greedy tokens have to be the same. While the first worker
writes alone, the other waits for it. An answer is the pass over a prompt and so many tokens more.
The bar is for the median of ratios over rounds in which other programs left the processors alone:
at most 0.65. With `--patience` each round waits so many seconds for such a moment.
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

BAR = 0.65  # of the time of one worker, at most
QUIET = 0.3  # cores that others may keep busy in a round that counts
SHARP = 4.0  # times the usual weights, so that the likeliest token is clearly the likeliest


class Alone:
    """A run of one worker, as far as text needs it."""

    def __init__(self) -> None:
        self.device, self.group, self.is_first = torch.device("cpu"), SoloGroup(), True
        self.mesh = Mesh((("data", 1),), (0,))

    def forward(self, model: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            return model(x)


@dataclass
class Round:
    """One round: when each token was there, in seconds since the answer began; tokens; and the
    cores that others kept busy.

    `processor`: seconds that this worker's processor worked for an answer, its waits left out but
    for the first microseconds of each.
    """

    times: dict[str, list[float]] = field(default_factory=dict)
    processor: dict[str, float] = field(default_factory=dict)
    texts: dict[str, list[int]] = field(default_factory=dict)
    others: float = 0.0

    def write(self, name: str, tokens: Callable[[], Any]) -> None:
        """Write an answer."""
        began, worked = time.perf_counter(), time.process_time()
        self.times[name], self.texts[name] = [], []
        for token in tokens():
            self.times[name].append(time.perf_counter() - began)
            self.texts[name].append(token)
        self.processor[name] = time.process_time() - worked

    @property
    def ratio(self) -> float:
        """The time of both workers in that of one."""
        return self.times["both"][-1] / self.times["alone"][-1]


def made(options: argparse.Namespace) -> GPT:
    """Make a model whose values are the same in every call."""
    torch.manual_seed(0)
    model = GPT(GPTShape(d=options.d, layers=options.layers, heads=16, context=256)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(SHARP)
    return model


def quieten(patience: float) -> None:
    """Wait for half a second in which nobody works, for so many seconds at most."""
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
    parser.add_argument("--prompt", type=int, default=16, help="tokens")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--patience", type=float, default=0.0)
    parser.add_argument("--check", action="store_true", help="exit with 1 where the bar is missed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    prompt = torch.randint(
        256, (options.prompt,), generator=torch.Generator().manual_seed(1)
    ).tolist()
    with (
        tempfile.TemporaryDirectory() as folder,
        pl.start(mesh="tensor", folder=folder, trace="off", deadline=120 + options.patience) as run,
    ):
        whole, lone, rounds = made(options) if run.is_first else None, Alone(), list[Round]()
        cut = run.prepare(made(options), cut=make_cuts(["tensor"]))
        for _ in range(options.rounds + 1):  # the first isn't counted
            if run.is_first:
                quieten(options.patience)
            run.barrier()
            one, before, mine = Round(), machine_load.read_clocks(), time.process_time()
            if whole is not None:
                one.write(
                    "alone",
                    lambda: generate_tokens(lone, whole, prompt, options.tokens, Sampling(0)),
                )  # type: ignore[arg-type]
            run.barrier()
            one.write(
                "both", lambda: generate_tokens(run, cut, prompt, options.tokens, Sampling(0))
            )
            after = machine_load.read_clocks()
            ours = float(run.mean(time.process_time() - mine)) * run.size
            if before is not None and after is not None:
                one.others = max(0.0, after.busy - before.busy - ours) / (after.now - before.now)
            rounds.append(one)
        if run.is_first and report(rounds[1:], options.tokens) > BAR and options.check:
            raise SystemExit(1)


def report(rounds: Sequence[Round], tokens: int) -> float:
    """Print medians, and return the median of ratios. Raises `RuntimeError` where tokens differ."""
    if len({tuple(text) for one in rounds for text in one.texts.values()}) > 1:
        raise RuntimeError(f"tokens differ: {[one.texts for one in rounds]}")
    quiet = [one for one in rounds if one.others <= QUIET]
    counted = quiet or rounds
    for name in ("alone", "both"):
        answer, first = (
            statistics.median(one.times[name][at] for one in counted) * 1e3 for at in (-1, 0)
        )
        print(
            f"{name:6} answer {answer:8.1f} ms, prompt {first:8.1f} ms, each further token "
            f"{(answer - first) / (tokens - 1):7.2f} ms"
        )
    ratios = sorted(one.ratio for one in counted)
    which = (
        f"{len(quiet)} of {len(rounds)} rounds"
        if quiet
        else f"{len(rounds)} rounds, all of them disturbed by other programs"
    )
    middle = statistics.median(ratios)
    print(
        f"two workers take {middle:.3f} of the time of one ({ratios[0]:.3f} to {ratios[-1]:.3f}; "
        f"{which}), at most {BAR}"
    )
    work = statistics.median(one.processor["both"] / one.processor["alone"] for one in counted)
    print(f"the first worker's processor works for {work:.3f} of what it does alone", flush=True)
    return middle


if __name__ == "__main__":
    main()
