"""Compares samples of unequal length, dealt by count and dealt by cost.

Samples have 32 to 512 tokens, evenly distributed. The result is the part of the workers' own speeds
that is left.

    python benchmarks/lengths.py [--quick] [--check]

Eight hosts of a lab have one worker and a fifth of a core each, and four samples of each batch of
32. The model takes each sample by itself, so its work is linear in tokens, and nothing is padded.
It passes through its layers several times. So the exchange between eight slow hosts is small beside
the work. The ideal time is the number of tokens, divided by the sum of the workers' own speeds. A
worker's own speed is measured in the same run: samples one by one, by a copy of the model that
exchanges nothing. Epochs of all ways take turns.

`padded` is a second case without a bar: the samples of a worker are one batch, padded to the
longest, with `cost=pl.padded(len)`. Padding is work as well, so no way of dealing comes near the
ideal time.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Row, arguments, bootstrap, report

WORKERS, PROCESSORS, EACH = 8, 0.2, 4
SHORTEST, LONGEST, WIDTH, PASSES = 32, 512, 192, 12
WAYS = {"equal counts": False, "cost=": True}
BARS: dict[str, dict[str, float]] = {"equal counts": {"most": 0.75}, "cost=": {"least": 0.92}}
CASES = ("by itself", "padded")
WARMUP = 1


def serve(options: argparse.Namespace) -> None:
    """Run a worker of the lab: measure all rounds, and write the seconds into the folder."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    import paceline as pl

    torch.set_num_threads(1)
    count = options.steps * WORKERS * EACH
    # The same lengths on all workers.
    lengths = torch.randint(
        SHORTEST, LONGEST + 1, (count,), generator=torch.Generator().manual_seed(1)
    ).tolist()

    class Sentences(Dataset[Any]):
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> Any:
            return torch.randn(
                lengths[index], WIDTH, generator=torch.Generator().manual_seed(index)
            )

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
            )

        def forward(self, x: Any) -> Any:
            for _ in range(PASSES):
                x = torch.tanh(x + self.layers(x))
            return x

    def loss(model: nn.Module, batch: Sequence[Any], *, padded: bool) -> Any:
        if padded:
            longest = max(map(len, batch))
            x = torch.stack([F.pad(row, (0, 0, 0, longest - len(row))) for row in batch])
            return model(x).square().mean((1, 2)).mean()
        return torch.stack([model(row).square().mean() for row in batch]).mean()

    def loader() -> Any:
        return DataLoader(
            Sentences(),
            WORKERS * EACH,
            collate_fn=list,
            shuffle=True,
            generator=torch.Generator().manual_seed(2),
        )

    torch.manual_seed(0)
    model = Recurrent()
    plain = copy.deepcopy(model)
    seconds: dict[str, list[list[float]]] = {name: [] for name in WAYS}
    ideal: dict[str, list[list[list[float]]]] = {name: [] for name in WAYS}
    with pl.start(folder=str(options.serve), name="lengths", trace="off") as run:
        model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), 1e-3))
        cost = pl.padded(len) if options.case == "padded" else len
        loaders = {
            name: run.prepare(loader(), cost=cost if by_cost else None)
            for name, by_cost in WAYS.items()
        }
        for _ in range(options.rounds + WARMUP):
            for name, loader_of_way in loaders.items():
                step_seconds, alone_steps = [], []
                for batch in loader_of_way:
                    run.barrier()
                    start = time.perf_counter()
                    loss(model, batch, padded=options.case == "padded").backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    run.barrier()
                    step_seconds.append(time.perf_counter() - start)
                    start = time.perf_counter()
                    # Then the same samples alone, for the worker's own speed.
                    loss(plain, batch, padded=False).backward()
                    alone_steps.append([float(sum(map(len, batch))), time.perf_counter() - start])
                seconds[name].append(step_seconds)
                ideal[name].append(alone_steps)
    (options.serve / f"{run.rank}.json").write_text(
        json.dumps({"seconds": seconds, "ideal": ideal})
    )


def measure(options: argparse.Namespace, case: str) -> dict[str, list[tuple[float, float]]]:
    """Measure all ways in one case.

    Returns, for each way and round, the mean seconds of a step, and the ideal ones without waits.
    """
    from paceline import lab

    with tempfile.TemporaryDirectory() as folder:
        words = (
            "--serve",
            folder,
            "--rounds",
            str(options.rounds),
            "--steps",
            str(options.steps),
            "--case",
            case,
        )
        with lab.cluster(hosts=WORKERS, workers=1, processors=PROCESSORS) as cluster:
            outcome = cluster.run(__file__, *words, environ={"OMP_NUM_THREADS": "1"}, deadline=3600)
        if outcome.code != 0:
            raise SystemExit(outcome.output)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(WORKERS)]
    # Own speeds are means over all rounds, as they don't depend on the way.
    speeds = [
        _speed([step for rounds in rank["ideal"].values() for steps in rounds for step in steps])
        for rank in ranks
    ]
    seconds_by_way: dict[str, list[tuple[float, float]]] = {}
    for name in WAYS:
        rows = []
        for round_number in range(WARMUP, options.rounds + WARMUP):
            tokens = [sum(step[0] for step in rank["ideal"][name][round_number]) for rank in ranks]
            # A step takes as long as on the slowest worker.
            step_seconds = statistics.mean(
                max(step)
                for step in zip(
                    *(rank["seconds"][name][round_number] for rank in ranks), strict=True
                )
            )
            rows.append((step_seconds, sum(tokens) / options.steps / sum(speeds)))
        seconds_by_way[name] = rows
    return seconds_by_way


def _speed(steps: Sequence[Sequence[float]]) -> float:
    """Compute the number of tokens that a worker trains by itself in a second."""
    return sum(tokens for tokens, _ in steps) / sum(seconds for _, seconds in steps)


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "", "lengths", rounds=5)
    parser.add_argument(
        "--steps", type=int, default=12, help="steps of a round (default %(default)s)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="two rounds of four steps, to check that it runs"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help="only this case")
    options = parser.parse_args(words)
    if options.quick:
        options.rounds, options.steps = 2, 4
    if options.serve is not None:
        serve(options)
        return
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for case in CASES if options.case is None else (options.case,):
        samples = measure(options, case)
        raw[case] = samples
        for name, pairs in samples.items():
            speed_left = bootstrap(
                float, [ideal_seconds / step_seconds for step_seconds, ideal_seconds in pairs]
            )
            medians = {
                "step": statistics.median(step_seconds for step_seconds, _ in pairs),
                "ideal": statistics.median(ideal_seconds for _, ideal_seconds in pairs),
            }
            rows.append(
                Row(
                    f"{case}, {name}",
                    medians,
                    "ideal / step",
                    speed_left,
                    **(BARS[name] if case == CASES[0] else {}),
                )
            )
    if not report("lengths", rows, options, raw) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
