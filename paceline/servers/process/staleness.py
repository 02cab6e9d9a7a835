"""The staleness bound of workers that are not in lockstep: how far each is ahead of the slowest.

    worker 0   turn turn turn turn        clock 4    two ahead of the slowest: with a bound of 2 it
    worker 1   turn turn turn             clock 3    may begin the next turn
    worker 2   turn turn ...              clock 2    the slowest of the workers with turns to take

A clock is the number of turns that a worker has completed. If a worker went on before the step with
its last gradient was made, the turn of that gradient doesn't count yet: the gradient has reached no
parameters so far.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline.errors import Mismatch


class WorkerClocks:
    """The number of turns that each worker has completed (`completed_turns`).

    Many methods take `running`, the workers with turns to take now.
    """

    def __init__(self, clocks: dict[int, int] | None = None) -> None:
        self.of: dict[int, int] = clocks or {}
        # By optimizer and worker that went on while its step was open: its turns before that one.
        self._open: dict[tuple[int, int], int] = {}

    def check(self, worker: int) -> None:
        """Raise `Mismatch` for a worker that takes no turns, if other workers take turns."""
        if self.of and worker not in self.of:
            raise Mismatch(f"worker {worker} takes no turns here")

    def tick(self, worker: int, clock: int) -> None:
        """Record that a worker has completed turn `clock`."""
        if clock != self.of[worker] + 1:
            raise Mismatch(
                f"worker {worker} can't come to turn {clock} after turn {self.of[worker]}"
            )
        self.of[worker] = clock

    def lose(self, survivors: Collection[int]) -> None:
        """Go on with the survivors alone."""
        self.of = {worker: clock for worker, clock in self.of.items() if worker in survivors}

    def part(self, optimizer: int, worker: int) -> None:
        """Record that a worker goes on before the optimizer's step with its gradient is made."""
        self._open[optimizer, worker] = self.of[worker]

    def join(self, optimizer: int, workers: Iterable[int]) -> None:
        """Record that the optimizer's step with the gradients of these workers is made."""
        for worker in workers:
            self._open.pop((optimizer, worker), None)

    def whole(self, worker: int) -> int:
        """Count the turns of a worker whose gradients are all in steps."""
        return min(
            [
                self.of[worker],
                *(before for (_, other), before in self._open.items() if other == worker),
            ]
        )

    def slowest(self, running: Collection[int]) -> int:
        """Get the smallest clock among the running workers."""
        return min(map(self.whole, running), default=max(self.of.values(), default=0))

    def lead(self, worker: int, running: Collection[int]) -> int:
        """Count the turns by which a worker is ahead of the slowest."""
        return self.of[worker] - self.slowest(running)

    def may(self, worker: int, running: Collection[int], bound: float) -> bool:
        """Whether a worker is at most `bound` turns ahead, so that it may begin its next turn."""
        return self.lead(worker, running) <= bound

    def behind(self, worker: int, running: Collection[int]) -> list[tuple[int, int]]:
        """List the slowest of the other workers, which this one waits for, with their clocks."""
        slowest = self.slowest(running)
        others = [(other, self.whole(other)) for other in sorted(running) if other != worker]
        return [(other, clock) for other, clock in others if clock == slowest]

    def stuck(self, arrived: Collection[int], running: Collection[int], bound: float) -> bool:
        """Whether every worker that has arrived at a step would exceed the bound with that step."""
        # Once the step is made, each of its workers has one more turn in steps.
        clocks = {worker: self.whole(worker) + (worker in arrived) for worker in running}
        slowest = min(clocks.values(), default=0)
        return all(worker in clocks and clocks[worker] - slowest > bound for worker in arrived)
