"""What comparing replicas takes of a run: a GPT of 0.9 M or 19 M parameters with AdamW.

    python benchmarks/comparing.py [--model medium --workers 2 --batch 4 --steps 60]

Replicas are compared after every second step, and what that takes is timed on each worker, the wait
for the others included. Gives the median step (seconds), the median of a comparison, and its part
of the run if there is one in a hundred steps.
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
from itertools import pairwise
from pathlib import Path

FIRST = 6  # steps that aren't measured
USUAL = 100  # steps between two comparisons, in a usual run


def train(options: argparse.Namespace) -> None:
    """The script of each worker."""
    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl
    from paceline.bench.training import CONTEXT, MODELS, VOCAB, Decoder

    rows = (FIRST + options.steps) * options.batch * options.workers
    tokens = torch.randint(
        0, VOCAB, (rows, CONTEXT + 1), generator=torch.Generator().manual_seed(0)
    )
    torch.manual_seed(0)
    compared, began, ended = [], [], []
    with pl.start(folder=options.out, trace="off", compare=2) as run:
        model = Decoder(*MODELS[options.model])
        optimizer = torch.optim.AdamW(model.parameters())
        loader = DataLoader(TensorDataset(tokens), batch_size=options.batch * options.workers)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        compare = run._comparer.step_ended

        def timed(steps: int) -> None:
            before = time.perf_counter()
            compare(steps)
            compared.append(time.perf_counter() - before)

        run._comparer.step_ended = timed  # type: ignore[method-assign]
        for (x,) in loader:
            began.append(time.perf_counter())
            F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
            ended.append(time.perf_counter())
    # from odd ones, whose end is not compared
    steps = [after - before for before, after in pairwise(began)][FIRST::2]
    count, nbytes = 0, 0
    for parameter in model.parameters():
        tensors = [parameter, *optimizer.state[parameter].values()]
        count, nbytes = count + len(tensors), nbytes + sum(tensor.nbytes for tensor in tensors)
    found = {
        "step": statistics.median(steps),
        "comparison": statistics.median(compared[FIRST + 1 :: 2]),
        "tensors": count,
        "mb": nbytes / 1e6,
    }
    (Path(options.out) / f"found-{run.rank}.json").write_text(json.dumps(found))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="medium", help="small (0.9 M parameters) or medium (19 M)"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=4, help="samples in a step, for each worker")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        train(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        given = [
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
            *given,
            f"--out={folder}",
        ]
        subprocess.run(
            command,
            check=True,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        found = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("found-*.json"))]
    worst = max(found, key=lambda worker: worker["comparison"])
    part = worst["comparison"] / (USUAL * worst["step"] + worst["comparison"])
    print(
        json.dumps(
            {"model": options.model, "workers": options.workers, **worst, "part": round(part, 5)}
        )
    )


if __name__ == "__main__":
    main()
