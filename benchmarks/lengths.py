"""Samples of 32 to 512 tokens, drawn evenly, dealt by count and by cost: which part of the workers'
own speeds is left.

    python benchmarks/lengths.py [--quick] [--check]

Eight hosts of a lab have one worker and a fifth of a core each, and four samples of each batch of
32. The model takes each sample by itself, so its work is linear in tokens, and nothing is padded.
It goes through its layers several times: the exchange between eight hosts that have so little of a
processor is then small beside its work. The ideal is all tokens by the sum of the workers' own
speeds, which are measured in the same run: samples one by one, by a copy of the model that
exchanges nothing. Epochs of all ways take turns.

`padded` is a second case without a bar: each worker's samples as one batch, padded to the longest,
and `cost=pl.padded(len)`. What is padded is work as well, so no way of dealing comes near the
ideal.
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
    """A worker of the lab: measure all rounds, and leave the seconds in the folder."""
    import torch
    import torch.nn.functional as F
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    import paceline as pl

    torch.set_num_threads(1)
    count = options.steps * WORKERS * EACH
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
            for name, dealt in loaders.items():
                taken, alone = [], []
                for batch in dealt:
                    run.barrier()
                    began = time.perf_counter()
                    loss(model, batch, padded=options.case == "padded").backward()
                    optimizer.step()
                    optimizer.zero_grad()
                    run.barrier()
                    taken.append(time.perf_counter() - began)
                    began = time.perf_counter()
                    loss(plain, batch, padded=False).backward()
                    alone.append([float(sum(map(len, batch))), time.perf_counter() - began])
                seconds[name].append(taken)
                ideal[name].append(alone)
    (options.serve / f"{run.rank}.json").write_text(
        json.dumps({"seconds": seconds, "ideal": ideal})
    )


def measure(options: argparse.Namespace, case: str) -> dict[str, list[tuple[float, float]]]:
    """For each way and round the seconds of a step in the mean, and what they would be if nobody
    waited.
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
    speeds = [
        _speed([turn for rounds in rank["ideal"].values() for one in rounds for turn in one])
        for rank in ranks
    ]
    found: dict[str, list[tuple[float, float]]] = {}
    for name in WAYS:
        rows = []
        for number in range(WARMUP, options.rounds + WARMUP):
            tokens = [sum(turn[0] for turn in rank["ideal"][name][number]) for rank in ranks]
            taken = statistics.mean(
                max(step)
                for step in zip(*(rank["seconds"][name][number] for rank in ranks), strict=True)
            )
            rows.append((taken, sum(tokens) / options.steps / sum(speeds)))
        found[name] = rows
    return found


def _speed(turns: Sequence[Sequence[float]]) -> float:
    """Return the tokens that a worker makes in a second by itself."""
    return sum(tokens for tokens, _ in turns) / sum(seconds for _, seconds in turns)


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "", "lengths", rounds=5)
    parser.add_argument("--steps", type=int, default=12, help="of a round (default %(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="two rounds of four steps, to see that it runs"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--case", choices=CASES, help="one case alone")
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
            left = bootstrap(float, [ideal / taken for taken, ideal in pairs])
            medians = {
                "step": statistics.median(taken for taken, _ in pairs),
                "ideal": statistics.median(ideal for _, ideal in pairs),
            }
            rows.append(
                Row(
                    f"{case}, {name}",
                    medians,
                    "ideal / step",
                    left,
                    **(BARS[name] if case == CASES[0] else {}),
                )
            )
    if not report("lengths", rows, options, raw) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
