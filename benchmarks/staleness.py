"""What staleness does to the loss: the GPT of the demo, trained by workers that are slow now and
then, in one process.

    python benchmarks/staleness.py [--workers 4 --steps 300 --bounds 0 3 8 --slow 0.1]

Time is counted, not waited for: a turn takes 1, give or take a hundredth, or 5 where it is slow.
Who makes a step, who goes on, and with which parameters, is decided by the scheduler that servers
have (`servers.process.scheduler`), so what comes out is the same each time. With bound 0 all wait
for all, as in lockstep.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import OneCycleLR

from paceline.apps.gpt import next_token_loss
from paceline.apps.pretrain import BATCH, make_task
from paceline.servers.process.late_gradients import OpenStep
from paceline.servers.process.sample_spans import SampleSpan
from paceline.servers.process.scheduler import SampleScheduler

RATE = 3e-3


def rates(steps: int) -> list[float]:
    """The learning rate of each turn, as the demo plans it; a quick worker takes some more
    turns, at the last one.
    """
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=RATE)
    schedule = OneCycleLR(optimizer, max_lr=RATE, total_steps=steps + 1, pct_start=0.1)
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


class Simulation:
    """One run.

    What servers have are the parameters of `model`; each worker computes with what it has read
    last.
    """

    def __init__(self, workers: int, steps: int, bound: int, slow: float) -> None:
        self.model, self._train, self._held_out = make_task(steps)
        self._optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.01)
        self._rates, self._bound, self._slow, self._chance = (
            rates(steps),
            bound,
            slow,
            random.Random(0),
        )
        self._keeper, self._share, self.now = SampleScheduler(), BATCH // workers, 0.0
        self._keeper.begin_dealing(0, 0, [BATCH] * steps, range(workers))
        self._batches, self._dealt = enumerate(self._train), dict[int, Any]()
        self._modes = dict.fromkeys(range(workers), "take")
        self._ends = dict.fromkeys(range(workers), 0.0)
        self._number = dict.fromkeys(range(workers), 0)
        self._pieces: dict[int, SampleSpan] = {}
        self._read = {worker: self._values() for worker in range(workers)}
        self._sent: dict[int, list[Tensor]] = {}  # by worker: its last gradient
        self._behind = set[int]()  # who has gone on before its gradient was in a step
        self.steps_made, self.sizes = 0, Counter[int]()

    def _values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def run(self) -> float:
        """Train; the validation loss."""
        while {*self._modes.values()} != {"rest"}:
            before: dict[int, str] = {}
            while before != self._modes:
                before = dict(self._modes)
                for worker in before:
                    self._modes[worker] = self._goes_on(worker)
            after = min(
                [
                    *(self._ends[worker] for worker, mode in before.items() if mode == "turn"),
                    self._keeper.next_check,
                ]
            )
            assert after < math.inf or {*before.values()} == {"rest"}, (
                f"nobody would come any more: {before}"
            )
            self.now = after if after < math.inf else self.now
        return self._loss()

    def _goes_on(self, worker: int) -> str:
        """What a worker does next."""
        mode, scheduler = self._modes[worker], self._keeper
        if mode == "take" and (found := scheduler.deal_piece(worker, self._share)) is not None:
            if not isinstance(found, SampleSpan):
                return "last" if worker in self._behind else "rest"
            scheduler.begin_turn(worker, self.now)
            self._pieces[worker] = found
            slow = self._chance.random() < self._slow
            self._ends[worker] = self.now + (5.0 if slow else 1.0) * self._chance.uniform(
                0.99, 1.01
            )
            return "turn"
        if mode == "turn" and self._ends[worker] <= self.now:
            return "join" if worker in self._behind else "come"
        if mode in {"join", "last"} and self._gathers(worker, False):
            self._behind.remove(worker)
            return "come" if mode == "join" else "rest"
        if mode == "come":
            self._number[worker] += 1
            self._sent[worker] = self._gradient(worker)
            return "gather"
        if mode == "gather" and (told := self._gathers(worker, self._bound > 0)) is not None:
            self._behind |= {worker} if isinstance(told, OpenStep) else set()
            self._read[worker] = self._values()
            scheduler.complete_turn(worker, self._number[worker])
            return "tick"
        if mode == "tick" and scheduler.may_begin_turn(worker, self._bound):
            scheduler.record_permission(worker, self.now)
            return "take"
        return mode

    def _gathers(self, worker: int, part: bool) -> Any:
        said = (self._number[worker], self._pieces[worker])
        found = self._keeper.record_gradient(
            worker, 0, self._number[worker], said, bound=self._bound, now=self.now, part=part
        )
        if found is not None and not isinstance(found, OpenStep) and found.number > self.steps_made:
            self.steps_made = found.number
            self.sizes[len(found.contributions)] += 1
            self._step(found.contributions)
        return found

    def _gradient(self, worker: int) -> list[Tensor]:
        """Of its piece, at the parameters that it has."""
        piece, mine = self._pieces[worker], self._values()
        while piece.batch not in self._dealt:
            number, batch = next(self._batches)
            self._dealt[number] = batch
        x, y = (tensor[piece.start : piece.stop] for tensor in self._dealt[piece.batch])
        self._put(self._read[worker])
        self.model.zero_grad()
        next_token_loss(self.model(x), y).backward()
        self._put(mine)
        return [
            parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
        ]

    def _put(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), values, strict=True):
                parameter.copy_(value)

    def _step(self, came: dict[int, tuple[int, SampleSpan]]) -> None:
        """With the mean of these gradients, clipped, by their part of a batch."""
        counts = {worker: piece.stop - piece.start for worker, (_, piece) in came.items()}
        whole = sum(counts.values())
        for number, parameter in enumerate(self.model.parameters()):
            parameter.grad = sum(
                (self._sent[worker][number] * (count / whole) for worker, count in counts.items()),
                torch.zeros(()),
            )
        clip_grad_norm_(self.model.parameters(), 1.0)
        turn = came[min(came)][0] - 1
        self._optimizer.param_groups[0]["lr"] = (
            self._rates[min(turn, len(self._rates) - 1)] * whole / BATCH
        )
        self._optimizer.step()

    @torch.no_grad()
    def _loss(self) -> float:
        self.model.eval()
        losses = [
            F.cross_entropy(self.model(x).transpose(1, 2), y, reduction="none").mean(1)
            for x, y in self._held_out
        ]
        return torch.cat(losses).mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300, help="global batches")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 3, 8])
    parser.add_argument(
        "--slow",
        type=float,
        nargs="+",
        default=[0.0, 0.1],
        help="part of the turns that take five times as long",
    )
    options = parser.parse_args()
    for bound in options.bounds:
        for slow in options.slow if bound else options.slow[:1]:
            began, made = (
                time.perf_counter(),
                Simulation(options.workers, options.steps, bound, slow),
            )
            loss, by = (
                made.run(),
                ", ".join(f"{count} by {size}" for size, count in sorted(made.sizes.items())),
            )
            seconds = time.perf_counter() - began
            print(
                f"bound {bound}, slow {slow:g}: loss {loss:.3f}; "
                f"{made.steps_made} steps in {made.now:.0f} turns ({by}); {seconds:.0f} s"
            )


if __name__ == "__main__":
    main()
