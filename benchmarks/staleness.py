"""Simulates the effect of stale gradients on the loss.

Workers that are sometimes slow train the GPT of the demo, all in one process.

    python benchmarks/staleness.py [--workers 4 --steps 300 --bounds 0 3 8 --slow 0.1]

Time is counted, not waited for: a turn takes 1, within one per cent, or 5 if it is slow. The
scheduler of the servers (`servers.process.scheduler`) decides which gradients make a step, and
which workers may go on, so the result is the same each time. With bound 0 all workers wait for each
other, as in lockstep.
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

RATE = 3e-3  # highest learning rate


def rates(steps: int) -> list[float]:
    """List the learning rate of each turn, as the demo plans it.

    A quick worker takes more turns than planned, with the last rate.
    """
    # The schedule needs an optimizer. This one trains nothing.
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=RATE)
    schedule = OneCycleLR(optimizer, max_lr=RATE, total_steps=steps + 1, pct_start=0.1)
    values = []
    for _ in range(steps):
        values.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return values


class Simulation:
    """One simulated run.

    `model` has the parameters of the servers. Each worker computes with the parameters that it has
    read last. A worker goes through these modes:

        take -> turn ---------> come -> gather -> tick -> take
                  +--> join ------^      join: its last gradient isn't in a step yet
        take -> last -> rest             last: the same, at the end of the epoch

    Args:
        workers: Number of workers.
        steps: Number of global batches.
        bound: Number of turns that a worker may be ahead.
        slow: Probability of a slow turn.
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
        self._sent: dict[int, list[Tensor]] = {}  # last gradient of each worker
        self._behind = set[int]()  # workers that went on before their gradient was in a step
        self.steps_made, self.sizes = 0, Counter[int]()

    def _values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.model.parameters()]

    def run(self) -> float:
        """Train, and return the validation loss."""
        while {*self._modes.values()} != {"rest"}:
            # Let workers act until none can go on at this time.
            before: dict[int, str] = {}
            while before != self._modes:
                before = dict(self._modes)
                for worker in before:
                    self._modes[worker] = self._goes_on(worker)
            # Then move on to the next end of a turn, or to the next check of the scheduler.
            next_time = min(
                [
                    *(self._ends[worker] for worker, mode in before.items() if mode == "turn"),
                    self._keeper.next_check,
                ]
            )
            assert next_time < math.inf or {*before.values()} == {"rest"}, (
                f"all workers wait forever: {before}"
            )
            self.now = next_time if next_time < math.inf else self.now
        return self._loss()

    def _goes_on(self, worker: int) -> str:
        """Do the next thing of a worker, if it can, and return its new mode."""
        mode, scheduler = self._modes[worker], self._keeper
        if mode == "take" and (piece := scheduler.deal_piece(worker, self._share)) is not None:
            if not isinstance(piece, SampleSpan):
                return "last" if worker in self._behind else "rest"
            scheduler.begin_turn(worker, self.now)
            self._pieces[worker] = piece
            is_slow = self._chance.random() < self._slow
            self._ends[worker] = self.now + (5.0 if is_slow else 1.0) * self._chance.uniform(
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
        if mode == "gather" and (decision := self._gathers(worker, self._bound > 0)) is not None:
            self._behind |= {worker} if isinstance(decision, OpenStep) else set()
            self._read[worker] = self._values()
            scheduler.complete_turn(worker, self._number[worker])
            return "tick"
        if mode == "tick" and scheduler.may_begin_turn(worker, self._bound):
            scheduler.record_permission(worker, self.now)
            return "take"
        return mode

    def _gathers(self, worker: int, part: bool) -> Any:
        """Give a worker's last gradient to the scheduler, and make the step if it is complete.

        Returns the scheduler's decision, or None if there is none yet. `part`: whether the worker
        may go on before its gradient is in a step.
        """
        note = (self._number[worker], self._pieces[worker])
        decision = self._keeper.record_gradient(
            worker, 0, self._number[worker], note, bound=self._bound, now=self.now, part=part
        )
        if (
            decision is not None
            and not isinstance(decision, OpenStep)
            and decision.number > self.steps_made
        ):
            self.steps_made = decision.number
            self.sizes[len(decision.contributions)] += 1
            self._step(decision.contributions)
        return decision

    def _gradient(self, worker: int) -> list[Tensor]:
        """Compute the gradient of the worker's piece, at the parameters that it has read."""
        piece, server_values = self._pieces[worker], self._values()
        # Batches are read in order, and kept for the workers that get other pieces of them.
        while piece.batch not in self._dealt:
            batch_index, batch = next(self._batches)
            self._dealt[batch_index] = batch
        x, y = (tensor[piece.start : piece.stop] for tensor in self._dealt[piece.batch])
        # Compute with the parameters of the worker, then put those of the servers back.
        self._put(self._read[worker])
        self.model.zero_grad()
        next_token_loss(self.model(x), y).backward()
        self._put(server_values)
        return [
            parameter.grad for parameter in self.model.parameters() if parameter.grad is not None
        ]

    def _put(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.model.parameters(), values, strict=True):
                parameter.copy_(value)

    def _step(self, contributions: dict[int, tuple[int, SampleSpan]]) -> None:
        """Step with the mean of some gradients, clipped.

        The learning rate is in proportion to the part of a batch that they cover.
        """
        counts = {worker: piece.stop - piece.start for worker, (_, piece) in contributions.items()}
        samples = sum(counts.values())
        for index, parameter in enumerate(self.model.parameters()):
            parameter.grad = sum(
                (self._sent[worker][index] * (count / samples) for worker, count in counts.items()),
                torch.zeros(()),
            )
        clip_grad_norm_(self.model.parameters(), 1.0)
        # The learning rate is that of the turn of the first contributing worker.
        turn = contributions[min(contributions)][0] - 1
        self._optimizer.param_groups[0]["lr"] = (
            self._rates[min(turn, len(self._rates) - 1)] * samples / BATCH
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
    parser.add_argument("--steps", type=int, default=300, help="number of global batches")
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 3, 8])
    parser.add_argument(
        "--slow",
        type=float,
        nargs="+",
        default=[0.0, 0.1],
        help="probabilities that a turn takes five times as long",
    )
    options = parser.parse_args()
    for bound in options.bounds:
        for slow in options.slow if bound else options.slow[:1]:
            start = time.perf_counter()
            simulation = Simulation(options.workers, options.steps, bound, slow)
            loss = simulation.run()
            sizes = ", ".join(
                f"{count} by {size}" for size, count in sorted(simulation.sizes.items())
            )
            seconds = time.perf_counter() - start
            print(
                f"bound {bound}, slow {slow:g}: loss {loss:.3f}; "
                f"{simulation.steps_made} steps in {simulation.now:.0f} turns "
                f"({sizes} workers); {seconds:.0f} s"
            )


if __name__ == "__main__":
    main()
