"""Measures how much of the speed of unequal hosts is left.

A GPT of 0.9 M parameters trains on hosts of a lab that have different parts of a core.

    python benchmarks/unequal.py [--quick] [--check] [--case 100+50@96]

The name of a case has the parts of a core in per cent, with one worker each, and the global batch.
Shares of the batch are equal, set by hand in proportion to the parts, or found by paceline
(`auto`). torch's DistributedDataParallel (`ddp`) has equal shares. All ways take turns in one job.
The result is relative to the sum of the workers' own speeds: the samples that each trains in a
second alone. They are measured in the same job, one worker after another.

`change` is a case of its own: one of two whole cores is cut to 40 % during the job, and restored.
It shows how often shares change, and how far the steps from the 16th on are from the optimum.
`balanced` shows the cost of balancing for workers that are equally fast.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import Row, arguments, bootstrap, report

# Parts of a core, global batch, and lowest part of the speed that `auto` may leave.
CASES = {
    "100+50@96": ((1.0, 0.5), 96, 0.93),
    "100+50@36": ((1.0, 0.5), 36, 0.85),
    "100+60+30@96": ((1.0, 0.6, 0.3), 96, 0.90),
}
EQUAL = "50+50@48"  # small enough that the machine can give both parts at once
WAYS = ("equal", "by hand", "auto", "ddp")
CONTEXT_BATCHES = 4  # batches of data, which the ways read again and again
# Steps that are left out after a change, and the highest ratio of later steps to the optimum.
FOLLOWED, NEAR = 15, 1.10
CHANGES = 4  # most changes of shares
COST = 1.01  # highest ratio of balanced to equal shares, for workers that are equally fast


def serve(options: argparse.Namespace) -> None:
    """Run a worker of the lab: measure all rounds, and write the seconds into the folder."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl
    from paceline.apps.gpt import GPT, SMALL, next_token_loss

    torch.set_num_threads(1)
    parts, batch = _split(options.case)
    tokens = torch.randint(
        0,
        SMALL.vocab,
        (batch * options.steps, SMALL.context + 1),
        generator=torch.Generator().manual_seed(1),
    )
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])

    def loader(size: int = batch) -> Any:
        return DataLoader(data, size, shuffle=True, generator=torch.Generator().manual_seed(2))

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        next_token_loss(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    torch.manual_seed(0)
    model = GPT(SMALL)
    alone_model, ddp_model = copy.deepcopy(model), copy.deepcopy(model)
    seconds_by_way: dict[str, list[float]] = {name: [] for name in (*options.ways, "alone")}
    shares: list[list[int]] = []
    with pl.start(folder=str(options.serve), name="unequal", trace="off") as run:
        ways = {"equal": None, "by hand": list(parts), "auto": "auto"}
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), 1e-4))
        loaders = {
            name: run.prepare(loader(), shares=ways[name]) for name in options.ways if name in ways
        }
        group = dist.new_group(backend="gloo")
        ddp = (
            DistributedDataParallel(ddp_model, process_group=group)
            if "ddp" in options.ways
            else None
        )
        ddp_optimizer = torch.optim.AdamW(ddp_model.parameters(), 1e-4)
        alone_optimizer = torch.optim.AdamW(alone_model.parameters(), 1e-4)
        share = batch // run.size
        for round_number in range(options.rounds + options.warm):
            for name in options.ways:
                run.barrier()
                start = time.perf_counter()
                # DDP has no loader: each worker takes its part of the batch.
                if name == "ddp":
                    assert ddp is not None
                    for index in range(options.steps):
                        first = index * batch + run.rank * share
                        step(
                            ddp,
                            ddp_optimizer,
                            tokens[first : first + share, :-1],
                            tokens[first : first + share, 1:],
                        )
                else:
                    for x, y in loaders[name]:
                        step(model, optimizer, x, y)
                run.barrier()
                if round_number >= options.warm:
                    seconds_by_way[name].append((time.perf_counter() - start) / options.steps)
                if name == "auto":
                    shares.append(list(loaders[name].terms.shares(batch)))
            # Each worker trains alone while the others wait, so that the cores are its own.
            for rank in range(run.size):
                run.barrier()
                if run.rank == rank and round_number >= options.warm:
                    start = time.perf_counter()
                    for index in range(options.alone):
                        step(
                            alone_model, alone_optimizer, *data[index * batch : (index + 1) * batch]
                        )
                    seconds_by_way["alone"].append((time.perf_counter() - start) / options.alone)
        run.barrier()
    (options.serve / f"{run.rank}.json").write_text(
        json.dumps({"seconds": seconds_by_way, "shares": shares})
    )


def follow(options: argparse.Namespace) -> None:
    """Run a worker of the lab whose quota changes: write the end and the shares of each step."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl
    from paceline.apps.gpt import GPT, SMALL, next_token_loss

    torch.set_num_threads(1)
    batch = 96
    tokens = torch.randint(
        0,
        SMALL.vocab,
        (batch * options.steps, SMALL.context + 1),
        generator=torch.Generator().manual_seed(1),
    )
    torch.manual_seed(0)
    model = GPT(SMALL)
    steps: list[list[Any]] = []
    with pl.start(folder=str(options.serve), name="change", trace="off") as run:
        loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch)
        model, optimizer, loader = run.prepare(
            model, torch.optim.AdamW(model.parameters(), 1e-4), loader, shares="auto"
        )
        for x, y in loader:
            next_token_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append([time.time(), list(loader.terms.shares(batch))])
    (options.serve / f"{run.rank}.json").write_text(json.dumps(steps))


def _split(case: str) -> tuple[tuple[float, ...], int]:
    """Parse the name of a case as parts of a core and a global batch."""
    parts, batch = case.split("@")
    return tuple(int(part) / 100 for part in parts.split("+")), int(batch)


def measure(options: argparse.Namespace, case: str, ways: Sequence[str]) -> list[dict[str, Any]]:
    """Measure one case in the lab.

    Args:
        options: Arguments of the benchmark.
        case: Name of the case.
        ways: Names of the ways.

    Returns:
        The measurements of each worker.
    """
    from paceline import lab
    from paceline.lab.description import Description, Host

    parts, _ = _split(case)
    cluster = Description(
        "unequal",
        hosts=tuple(Host(f"h{index}", processors=part) for index, part in enumerate(parts)),
    )
    with tempfile.TemporaryDirectory() as folder:
        words = ["--serve", folder, "--case", case, "--ways", *ways]
        words += [
            f"--{name}={getattr(options, name)}" for name in ("rounds", "steps", "warm", "alone")
        ]
        with lab.cluster(description=cluster) as built:
            outcome = built.run(__file__, *words, environ={"OMP_NUM_THREADS": "1"}, deadline=3600)
        if outcome.code != 0:
            raise SystemExit(outcome.output)
        # Show when and how shares have changed.
        for line in outcome.output.splitlines():
            if "shares are now" in line:
                print(f"  {case}: {line.strip()}")
        return [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(len(parts))
        ]


def change(options: argparse.Namespace) -> list[dict[str, float]]:
    """Measure steps after a quota is cut, and after it is restored.

    Returns for each the median step, the optimum, and the number of changes of shares.
    """
    from paceline import lab

    stretch = options.stretch
    with (
        tempfile.TemporaryDirectory() as folder,
        lab.cluster(hosts=2, workers=1, processors=1.0) as cluster,
    ):
        words = ("--serve", folder, "--case", "change", f"--steps={8 * stretch}")
        # The quota of the second host is cut for some time.
        fault = lab.slow(host=1, factor=0.4, step=2 * stretch, seconds=options.slow)
        outcome = cluster.run(
            __file__, *words, faults=[fault], environ={"OMP_NUM_THREADS": "1"}, deadline=3600
        )
        if outcome.code != 0:
            raise SystemExit(outcome.output)
        steps = json.loads((Path(folder) / "0.json").read_text())
    step_ends = [step_end for step_end, _ in steps]
    seconds = [after - before for before, after in itertools.pairwise(step_ends)]
    restored_step = next(
        step
        for step, step_end in enumerate(step_ends)
        if step_end >= step_ends[2 * stretch] + options.slow
    )
    full_speed_step = statistics.median(seconds[stretch : 2 * stretch])
    changes = [
        step
        for step in range(1, len(steps))
        if steps[step][1] != steps[step - 1][1] and step >= stretch
    ]
    rows = []
    # With 1 and 0.4 cores the optimum takes 2 / 1.4 times as long as with two cores.
    for change_step, optimum in (
        (2 * stretch, full_speed_step * 2 / 1.4),
        (restored_step, full_speed_step),
    ):
        later_seconds = seconds[change_step + FOLLOWED : change_step + FOLLOWED + stretch]
        rows.append(
            {"step": statistics.median(later_seconds), "optimum": optimum, "changes": len(changes)}
        )
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "", "unequal", rounds=5)
    parser.add_argument(
        "--steps", type=int, default=20, help="steps of a round (default %(default)s)"
    )
    parser.add_argument(
        "--alone",
        type=int,
        default=6,
        help="steps of each worker alone, in a round (default %(default)s)",
    )
    parser.add_argument(
        "--warm", type=int, default=3, help="first rounds, which aren't timed (default %(default)s)"
    )
    parser.add_argument(
        "--stretch",
        type=int,
        default=40,
        help="number of measured steps before and after a change (default %(default)s)",
    )
    parser.add_argument(
        "--slow",
        type=float,
        default=45.0,
        help="seconds for which a quota is cut (default %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="few steps, to check that it runs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--case", choices=[*CASES, "change", "balanced", EQUAL], help="only this case"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.quick:
        (
            options.rounds,
            options.steps,
            options.alone,
            options.warm,
            options.stretch,
            options.slow,
        ) = 2, 8, 2, 2, 12, 12.0
    if options.serve is not None:
        (follow if options.case == "change" else serve)(options)
        return
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for case in (*CASES, "change", "balanced") if options.case is None else (options.case,):
        if case == "change":
            raw[case] = change(options)
            for name, row in zip(("to 40 %", "and back"), raw[case], strict=True):
                interval = bootstrap(float, [row["step"] / row["optimum"]])
                note = f"shares changed {row['changes']:.0f} times in all (at most {CHANGES})"
                rows.append(
                    Row(
                        f"one of two cores {name}",
                        {"step": row["step"]},
                        "step / optimum",
                        interval,
                        most=NEAR,
                        note=note,
                    )
                )
        elif case == "balanced":
            raw[case] = reports = measure(options, EQUAL, ("equal", "auto"))
            ratios = [
                auto / equal
                for auto, equal in zip(
                    reports[0]["seconds"]["auto"], reports[0]["seconds"]["equal"], strict=True
                )
            ]
            rows.append(
                Row("workers equally fast", {}, "auto / equal", bootstrap(float, ratios), most=COST)
            )
        else:
            raw[case] = reports = measure(options, case, options.ways)
            rows += _rows(case, reports, options.ways)
    if not report("unequal", rows, options, raw) and options.check:
        sys.exit(1)


def _rows(case: str, reports: Sequence[dict[str, Any]], ways: Sequence[str]) -> list[Row]:
    """Make the rows of a case: the part of the sum of speeds that each way leaves."""
    _, batch, bar = CASES[case]
    rounds = range(len(reports[0]["seconds"]["alone"]))
    # The sum of the workers' own speeds in each round, in samples a second.
    total_speeds = [
        sum(batch / report["seconds"]["alone"][index] for report in reports) for index in rounds
    ]
    rows = []
    for name in ways:
        step_seconds = [
            max(report["seconds"][name][index] for report in reports) for index in rounds
        ]
        speed_left = bootstrap(
            float,
            [
                batch / seconds / total_speed
                for seconds, total_speed in zip(step_seconds, total_speeds, strict=True)
            ],
        )
        note = " + ".join(map(str, reports[0]["shares"][-1])) if name == "auto" else ""
        medians = {
            "step": statistics.median(step_seconds),
            "ideal": statistics.median(batch / total_speed for total_speed in total_speeds),
        }
        rows.append(
            Row(
                f"{case}, {name}",
                medians,
                "speed / sum",
                speed_left,
                least=bar if name == "auto" else None,
                note=note,
            )
        )
    return rows


if __name__ == "__main__":
    main()
