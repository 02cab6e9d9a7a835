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
        self.completed_turns: dict[int, int] = clocks or {}
        # By optimizer and worker that went on while its step was open: its turns before that one.
        self._turns_before_open_step: dict[tuple[int, int], int] = {}

    def check_takes_turns(self, worker: int) -> None:
        """Raise `Mismatch` for a worker that takes no turns, if other workers take turns."""
        if self.completed_turns and worker not in self.completed_turns:
            raise Mismatch(f"worker {worker} takes no turns here")

    def complete_turn(self, worker: int, clock: int) -> None:
        """Record that a worker has completed turn `clock`."""
        if clock != self.completed_turns[worker] + 1:
            raise Mismatch(
                f"worker {worker} can't come to turn {clock} after turn "
                f"{self.completed_turns[worker]}"
            )
        self.completed_turns[worker] = clock

    def remove_lost_workers(self, survivors: Collection[int]) -> None:
        """Go on with the survivors alone."""
        self.completed_turns = {
            worker: clock for worker, clock in self.completed_turns.items() if worker in survivors
        }

    def leave_step_open(self, optimizer: int, worker: int) -> None:
        """Record that a worker goes on before the optimizer's step with its gradient is made."""
        self._turns_before_open_step[optimizer, worker] = self.completed_turns[worker]

    def record_step(self, optimizer: int, workers: Iterable[int]) -> None:
        """Record that the optimizer's step with the gradients of these workers is made."""
        for worker in workers:
            self._turns_before_open_step.pop((optimizer, worker), None)

    def count_turns_in_steps(self, worker: int) -> int:
        """Count the turns of a worker whose gradients are all in steps."""
        return min(
            [
                self.completed_turns[worker],
                *(
                    before
                    for (_, other), before in self._turns_before_open_step.items()
                    if other == worker
                ),
            ]
        )

    def find_slowest_clock(self, running: Collection[int]) -> int:
        """Get the smallest clock among the running workers."""
        return min(
            map(self.count_turns_in_steps, running),
            default=max(self.completed_turns.values(), default=0),
        )

    def compute_lead(self, worker: int, running: Collection[int]) -> int:
        """Count the turns by which a worker is ahead of the slowest."""
        return self.completed_turns[worker] - self.find_slowest_clock(running)

    def may_begin_turn(self, worker: int, running: Collection[int], bound: float) -> bool:
        """Whether a worker is at most `bound` turns ahead, so that it may begin its next turn."""
        return self.compute_lead(worker, running) <= bound

    def list_slowest_workers(self, worker: int, running: Collection[int]) -> list[tuple[int, int]]:
        """List the slowest of the other workers, which this one waits for, with their clocks."""
        slowest = self.find_slowest_clock(running)
        others = [
            (other, self.count_turns_in_steps(other))
            for other in sorted(running)
            if other != worker
        ]
        return [(other, clock) for other, clock in others if clock == slowest]

    def are_all_blocked(
        self, arrived: Collection[int], running: Collection[int], bound: float
    ) -> bool:
        """Whether every worker that has arrived at a step would exceed the bound with that step."""
        # Once the step is made, each of its workers has one more turn in steps.
        clocks = {
            worker: self.count_turns_in_steps(worker) + (worker in arrived) for worker in running
        }
        slowest = min(clocks.values(), default=0)
        return all(worker in clocks and clocks[worker] - slowest > bound for worker in arrived)
