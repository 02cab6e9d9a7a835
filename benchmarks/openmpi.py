"""The Open MPI peer of allreduce.py.

mpirun starts it in an environment that has numpy and mpi4py, but no torch.
"""

from __future__ import annotations

import time

import numpy as np
from harness import Message, serve
from mpi4py import MPI


class Peer:
    """A worker. It reduces the rows of its memory in place, as the other peers do."""

    def __init__(self) -> None:
        self.all_workers = MPI.COMM_WORLD
        self.memory = self.own_data = self.sum = np.zeros(0, np.float32)

    def handle(self, message: Message) -> Message:
        return (
            self.measure()
            if "variant" in message
            else self.prepare(message["count"], message["rows"])
        )

    def prepare(self, count: int, rows: int) -> Message:
        """Make data and memory for tensors of `count` values, `rows` in a batch.

        The data differ between ranks. They are whole numbers, so sums are exact in any order.
        """
        parts = [
            np.random.default_rng(rank).integers(-1000, 1000, count).astype(np.float32)
            for rank in range(self.all_workers.size)
        ]
        self.own_data, self.sum = parts[self.all_workers.rank], np.sum(parts, axis=0)
        self.memory = np.empty((rows, count), np.float32)
        return {}

    def measure(self) -> Message:
        """Reduce a batch. Returns the seconds of an all-reduce, and whether all sums are right."""
        self.memory[:] = self.own_data
        self.all_workers.Barrier()
        start = time.perf_counter()
        for row in self.memory:
            self.all_workers.Allreduce(MPI.IN_PLACE, row)
        seconds = (time.perf_counter() - start) / len(self.memory)
        return {"seconds": seconds, "right": bool((self.memory == self.sum).all())}


if __name__ == "__main__":
    serve(MPI.COMM_WORLD.rank, Peer().handle)
