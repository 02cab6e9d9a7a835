"""Measures the cost of comparing replicas, with a GPT of 0.9 M or 19 M parameters and AdamW.

    python benchmarks/comparing.py [--model medium --workers 2 --batch 4 --steps 60]

Replicas are compared after every second step. The time of a comparison includes the wait for other
workers. The result has the median step in seconds, the median comparison, and the part of a run
that comparisons take if there is one every hundred steps.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

FIRST = 6  # first steps, which aren't measured
USUAL = 100  # steps between two comparisons in a usual run


def train(options: argparse.Namespace) -> None:
    """Train on one worker, and write its measurements to a file."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl
    from paceline.bench.training import CONTEXT, MODELS, VOCAB, Decoder
    from paceline.session.run import parts_of_run

    rows = (FIRST + options.steps) * options.batch * options.workers
    tokens = torch.randint(
        0, VOCAB, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )
    torch.manual_seed(0)
    comparison_seconds, step_starts = [], []
    with pl.start(folder=options.out, trace="off", compare=2) as run:
        model = Decoder(*MODELS[options.model])
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(TensorDataset(tokens), batch_size=options.batch * options.workers)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        parts = parts_of_run(run)
        compare, observers = parts.comparer.step_ended, parts.loop.observers

        def compare_timed(step: int, samples: int, seconds: Mapping[str, float]) -> None:
            before = time.perf_counter()
            compare(step, samples, seconds)
            comparison_seconds.append(time.perf_counter() - before)

        # Replace the comparison among the observers of the loop by the timed one.
        timed_observers = tuple(
            compare_timed if observer == compare else observer for observer in observers.step_ended
        )
        assert compare_timed in timed_observers, "the loop doesn't compare replicas"
        parts.loop.observe(replace(observers, step_ended=timed_observers))
        for (x,) in loader:
            step_starts.append(time.perf_counter())
            F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    # Only steps that end without a comparison.
    steps = [after - before for before, after in pairwise(step_starts)][FIRST::2]
    count, nbytes = 0, 0
    for parameter in model.parameters():
        tensors = [parameter, *optimizer.state[parameter].values()]
        count, nbytes = count + len(tensors), nbytes + sum(tensor.nbytes for tensor in tensors)
    result = {
        "step": statistics.median(steps),
        "comparison": statistics.median(comparison_seconds[FIRST + 1 :: 2]),
        "tensors": count,
        "mb": nbytes / 1e6,
    }
    (Path(options.out) / f"found-{run.rank}.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="medium", help="small (0.9 M parameters) or medium (19 M)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="samples of a step, for each worker")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        train(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        worker_options = [
            f"--{name}={getattr(options, name)}" for name in ("model", "batch", "workers", "steps")
        ]
        command = [
            sys.executable,
            "-m",
            "paceline",
            "run",
            "--workers",
            str(options.workers),
            __file__,
            *worker_options,
            f"--out={folder}",
        ]
        subprocess.run(
            command,
            check=True,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        results = [
            json.loads(path.read_text()) for path in sorted(Path(folder).glob("found-*.json"))
        ]
    slowest = max(results, key=lambda worker: worker["comparison"])
    overhead = slowest["comparison"] / (USUAL * slowest["step"] + slowest["comparison"])
    print(
        json.dumps(
            {
                "model": options.model,
                "workers": options.workers,
                **slowest,
                "part": round(overhead, 5),
            }
        )
    )


if __name__ == "__main__":
    main()
