"""The staleness bound for workers out of lockstep: how far each is ahead of the slowest one.

    worker 0   turn turn turn turn        clock 4    two ahead of the slowest: with a bound of 2 it
    worker 1   turn turn turn             clock 3    may begin the next turn
    worker 2   turn turn ...              clock 2    the slowest of the workers with turns to take

A worker that went on before the step with its last gradient was made counts as being before that
turn: its gradient has reached no parameters yet.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from paceline.errors import Mismatch


class WorkerClocks:
    """The turns that each worker has completed.

    `running`: the workers that have turns to take now.
    """

    def __init__(self, clocks: dict[int, int] | None = None) -> None:
        self.of: dict[int, int] = clocks or {}
        # by optimizer and worker that has gone on before its step was made: turns before
        self._open: dict[tuple[int, int], int] = {}

    def check(self, worker: int) -> None:
        """Raise `Mismatch` for a worker that takes no turns, where there are clocks of those
        that do.
        """
        if self.of and worker not in self.of:
            raise Mismatch(f"worker {worker} takes no turns here")

    def tick(self, worker: int, clock: int) -> None:
        """Note that a worker has completed turn `clock`."""
        if clock != self.of[worker] + 1:
            raise Mismatch(
                f"worker {worker} can't come to turn {clock} after turn {self.of[worker]}"
            )
        self.of[worker] = clock

    def lose(self, living: Collection[int]) -> None:
        """Go on with the living alone."""
        self.of = {worker: clock for worker, clock in self.of.items() if worker in living}

    def part(self, optimizer: int, worker: int) -> None:
        """Note that a worker goes on before the step of an optimizer with its gradient is made."""
        self._open[optimizer, worker] = self.of[worker]

    def join(self, optimizer: int, workers: Iterable[int]) -> None:
        """Note that the step of an optimizer with the gradients of these workers is made."""
        for worker in workers:
            self._open.pop((optimizer, worker), None)

    def whole(self, worker: int) -> int:
        """Return the completed turns of a worker of which all is in steps."""
        return min(
            [
                self.of[worker],
                *(before for (_, other), before in self._open.items() if other == worker),
            ]
        )

    def slowest(self, running: Collection[int]) -> int:
        """Return the turns that every running worker has completed."""
        return min(map(self.whole, running), default=max(self.of.values(), default=0))

    def lead(self, worker: int, running: Collection[int]) -> int:
        """Number of turns by which a worker is ahead of the slowest."""
        return self.of[worker] - self.slowest(running)

    def may(self, worker: int, running: Collection[int], bound: float) -> bool:
        """Whether a worker may begin its next turn: it is at most `bound` turns ahead of the
        slowest.
        """
        return self.lead(worker, running) <= bound

    def behind(self, worker: int, running: Collection[int]) -> list[tuple[int, int]]:
        """Return the workers that this one waits for, and the turns that those have completed."""
        slowest = self.slowest(running)
        found = [(other, self.whole(other)) for other in sorted(running) if other != worker]
        return [(other, clock) for other, clock in found if clock == slowest]

    def stuck(self, came: Collection[int], running: Collection[int], bound: float) -> bool:
        """Whether all that have come to a step would be too far ahead of the slowest with it."""
        clocks = {worker: self.whole(worker) + (worker in came) for worker in running}
        slowest = min(clocks.values(), default=0)
        return all(worker in clocks and clocks[worker] - slowest > bound for worker in came)
