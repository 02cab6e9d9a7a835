"""The Open MPI peer of allreduce.py: run by mpirun, in an environment with numpy and mpi4py but
without torch.
"""

from __future__ import annotations

import time

import numpy as np
from harness import Message, serve
from mpi4py import MPI


class Peer:
    """Reduces the rows of its memory in place, as the others do."""

    def __init__(self) -> None:
        self.everybody = MPI.COMM_WORLD
        self.memory = self.mine = self.sum = np.zeros(0, np.float32)

    def handle(self, message: Message) -> Message:
        return (
            self.measure()
            if "variant" in message
            else self.prepare(message["count"], message["rows"])
        )

    def prepare(self, count: int, rows: int) -> Message:
        """Data that differ from rank to rank, whole numbers so that sums are exact in any order."""
        parts = [
            np.random.default_rng(r).integers(-1000, 1000, count).astype(np.float32)
            for r in range(self.everybody.size)
        ]
        self.mine, self.sum = parts[self.everybody.rank], np.sum(parts, axis=0)
        self.memory = np.empty((rows, count), np.float32)
        return {}

    def measure(self) -> Message:
        """Seconds per all-reduce of one batch, and whether all of its results are right."""
        self.memory[:] = self.mine
        self.everybody.Barrier()
        start = time.perf_counter()
        for row in self.memory:
            self.everybody.Allreduce(MPI.IN_PLACE, row)
        seconds = (time.perf_counter() - start) / len(self.memory)
        return {"seconds": seconds, "right": bool((self.memory == self.sum).all())}


if __name__ == "__main__":
    serve(MPI.COMM_WORLD.rank, Peer().handle)
