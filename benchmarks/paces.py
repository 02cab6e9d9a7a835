"""Measures the speed of a parameter server whose workers are sometimes slow.

    python benchmarks/paces.py [--workers 4 --turns 150 --milliseconds 60 --repeats 1 --rows 0]

A turn of a worker takes `--milliseconds`. The worker sleeps, so the processors of this machine
don't matter. There are two cases: each worker is five times slower in a random tenth of its turns,
or the last worker is four times slower all the time.

The result is the number of samples a second that were used, divided by the sum of the workers' own
speeds. These are measured in the same run, without waits and exchanges: a worker that never waits
has 1. With a backup worker, in the second case, the slow worker is left out of the sum. With
`--rows` the model has a sparse table with this number of rows, and each sample uses eight of them.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import paceline as pl

SHARE = 4  # samples in a turn
CASES = {
    "now and then": "each 5 times slower in a tenth of its turns",
    "one": "the last 4 times slower, all the time",
}
PACES = {
    "BSP": "ParameterServer(servers=1)",
    "SSP, s=3": "ParameterServer(servers=1, staleness=3)",
    "SSP, s=8": "ParameterServer(servers=1, staleness=8)",
    "ASP": "ParameterServer(servers=1, staleness=inf)",
    "1 backup worker": "ParameterServer(servers=1, backup_workers=1)",
}


def sleeps(case: str, rank: int, size: int, base: float) -> Any:
    """Yield the seconds of each turn of a worker.

    Args:
        case: Key of `CASES`.
        rank: Rank of the worker.
        size: Number of workers.
        base: Seconds of a quick turn.
    """
    generator = random.Random(rank)
    while True:
        if case == "one":
            yield base * (4 if rank == size - 1 else 1)
        else:
            yield base * (5 if generator.random() < 0.1 else 1)


class Model(nn.Module):
    """A layer, and a sparse table if there are rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.table = pl.SparseEmbedding(rows, 16, "sum", servers=1) if rows else None
        self.top = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor, pulled: torch.Tensor | None) -> torch.Tensor:
        return self.top(x if pulled is None else x + pulled)


def worker(sync: str, case: str, turns: int, base: float, out: str, *, rows: int) -> None:
    """Train on one worker, and write its times to a file.

    Args:
        sync: Strategy.
        case: Key of `CASES`.
        turns: Turns of each worker, if all were equally fast.
        base: Seconds of a quick turn.
        out: Folder for the file.
        rows: Rows of the sparse table. 0: no table.
    """
    torch.set_num_threads(1)
    with pl.start(sync, folder=out) as run:
        model, count = Model(rows), turns * run.size * SHARE
        data = TensorDataset(
            torch.randn(count, 16), torch.randn(count, 1), torch.randint(max(rows, 1), (count, 8))
        )
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, SHARE * run.size))
        pauses, busy_seconds, samples = sleeps(case, run.rank, run.size, base), 0.0, 0
        run.barrier()
        start = time.time()
        for x, y, ids in loader:
            # The wait for rows of the table is not part of the worker's own time.
            table_rows = None if model.table is None else model.table(ids)
            turn_start = time.perf_counter()
            time.sleep(next(pauses))
            loss = ((model(x, table_rows) - y) ** 2).mean()
            loss.backward()
            busy_seconds += time.perf_counter() - turn_start
            samples += len(x)
            optimizer.step()
            optimizer.zero_grad()
        end = time.time()
        run.barrier()
    Path(out, f"{run.rank}.json").write_text(
        json.dumps({"began": start, "ended": end, "busy": busy_seconds, "samples": samples})
    )


def measure(pace: str, case: str, options: argparse.Namespace) -> float:
    """Measure one pace in one case, and return the part of the speeds that is left.

    Args:
        pace: Key of `PACES`.
        case: Key of `CASES`.
        options: Arguments of the benchmark.
    """
    with tempfile.TemporaryDirectory() as folder:
        worker_arguments = [
            PACES[pace],
            case,
            str(options.turns),
            str(options.milliseconds / 1000),
            str(options.rows),
            folder,
        ]
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            "--workers",
            str(options.workers),
            __file__,
            "--worker",
            *worker_arguments,
        ]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
        reports = [
            json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(options.workers)
        ]
        summary = json.loads(next(Path(folder).glob("*/summary.json")).read_text())
    # Samples of gradients that came too late did not count.
    dropped = summary["servers"][0]["dropped"]["samples"]
    seconds = max(report["ended"] for report in reports) - min(
        report["began"] for report in reports
    )
    # A backup worker lets the others go on without the slow one.
    counted = reports[:-1] if "backup" in pace and case == "one" else reports
    own_speed = sum(report["samples"] / report["busy"] for report in counted)
    return float((sum(report["samples"] for report in reports) - dropped) / seconds / own_speed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--worker", nargs=6, help=argparse.SUPPRESS)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--turns", type=int, default=150, help="turns of each worker, if all were equally fast"
    )
    parser.add_argument("--milliseconds", type=float, default=60.0, help="time of a turn")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--rows", type=int, default=0, help="rows of a sparse table (0: no table)")
    parser.add_argument("--json", type=Path, help="file for the results")
    options = parser.parse_args()
    if options.worker:
        sync, case, turns, base, rows, out = options.worker
        worker(sync, case, int(turns), float(base), out, rows=int(rows))
        return
    results: dict[str, dict[str, list[float]]] = {
        case: {pace: [] for pace in PACES} for case in CASES
    }
    for _ in range(options.repeats):
        for case, by_pace in results.items():
            for pace, ratios in by_pace.items():
                ratios.append(measure(pace, case, options))
    for case, text in CASES.items():
        print(f"{options.workers} workers, {text}:")
        for pace, ratios in results[case].items():
            print(
                f"    {pace:<16} {statistics.median(ratios):.2f}   "
                f"({', '.join(f'{ratio:.3f}' for ratio in ratios)})"
            )
    if options.json:
        options.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
