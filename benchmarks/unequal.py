"""A GPT of 0.9 M parameters on hosts of unequal processors, in a lab: which part of the sum of
their speeds is left.

    python benchmarks/unequal.py [--quick] [--check] [--case 100+50@96]

Each case is hosts with these parts of a core, one worker each, and a global batch. Shares are
equal, or set by hand (in proportion to the parts), or found by paceline (`auto`); torch's
DistributedDataParallel (`ddp`) has equal ones. All ways take turns in one job. The sum is that of
the samples that each worker trains in a second alone, measured in the same job, one worker after
another.

`change` is a second kind of case: one of two whole cores is cut to 40 % while the job runs, and
given back. It shows how often shares change, and how far from the optimum the steps are from the
16th on.
`balanced` is the third: what it costs workers that are equally fast.
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

CASES = {
    "100+50@96": ((1.0, 0.5), 96, 0.93),
    "100+50@36": ((1.0, 0.5), 36, 0.85),
    "100+60+30@96": ((1.0, 0.6, 0.3), 96, 0.90),
}
EQUAL = "50+50@48"  # as much for both as the machine can give at once
WAYS = ("equal", "by hand", "auto", "ddp")
CONTEXT_BATCHES = 4  # of data that the ways go through again and again
# steps after a change, and how far the steps from then on may be from the optimum
FOLLOWED, NEAR = 15, 1.10
CHANGES = 4
COST = 1.01  # of balancing, for workers that are equally fast


def serve(options: argparse.Namespace) -> None:
    """A worker of the lab: measure all rounds, and leave the seconds in the folder."""
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
    plain, reference = copy.deepcopy(model), copy.deepcopy(model)
    found: dict[str, list[float]] = {name: [] for name in (*options.ways, "alone")}
    shares: list[list[int]] = []
    with pl.start(folder=str(options.serve), name="unequal", trace="off") as run:
        ways = {"equal": None, "by hand": list(parts), "auto": "auto"}
        model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), 1e-4))
        loaders = {
            name: run.prepare(loader(), shares=ways[name]) for name in options.ways if name in ways
        }
        group = dist.new_group(backend="gloo")
        ddp = (
            DistributedDataParallel(reference, process_group=group)
            if "ddp" in options.ways
            else None
        )
        theirs = torch.optim.AdamW(reference.parameters(), 1e-4)
        mine = torch.optim.AdamW(plain.parameters(), 1e-4)
        share = batch // run.size
        for number in range(options.rounds + options.warm):
            for name in options.ways:
                run.barrier()
                began = time.perf_counter()
                if name == "ddp":
                    assert ddp is not None
                    for at in range(options.steps):
                        first = at * batch + run.rank * share
                        step(
                            ddp,
                            theirs,
                            tokens[first : first + share, :-1],
                            tokens[first : first + share, 1:],
                        )
                else:
                    for x, y in loaders[name]:
                        step(model, optimizer, x, y)
                run.barrier()
                if number >= options.warm:
                    found[name].append((time.perf_counter() - began) / options.steps)
                if name == "auto":
                    shares.append(list(loaders[name].terms.shares(batch)))
            for rank in range(run.size):
                run.barrier()
                if run.rank == rank and number >= options.warm:
                    began = time.perf_counter()
                    for at in range(options.alone):
                        step(plain, mine, *data[at * batch : (at + 1) * batch])
                    found["alone"].append((time.perf_counter() - began) / options.alone)
        run.barrier()
    (options.serve / f"{run.rank}.json").write_text(
        json.dumps({"seconds": found, "shares": shares})
    )


def follow(options: argparse.Namespace) -> None:
    """A worker of the lab whose quota changes: leave when each step ended, and by which shares
    it went.
    """
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
    found: list[list[Any]] = []
    with pl.start(folder=str(options.serve), name="change", trace="off") as run:
        loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch)
        model, optimizer, loader = run.prepare(
            model, torch.optim.AdamW(model.parameters(), 1e-4), loader, shares="auto"
        )
        for x, y in loader:
            next_token_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append([time.time(), list(loader.terms.shares(batch))])
    (options.serve / f"{run.rank}.json").write_text(json.dumps(found))


def _split(case: str) -> tuple[tuple[float, ...], int]:
    parts, batch = case.split("@")
    return tuple(int(part) / 100 for part in parts.split("+")), int(batch)


def measure(options: argparse.Namespace, case: str, ways: Sequence[str]) -> list[dict[str, Any]]:
    """What each worker has measured."""
    from paceline import lab
    from paceline.lab.description import Description, Host

    parts, _ = _split(case)
    cluster = Description(
        "unequal",
        hosts=tuple(Host(f"h{number}", processors=part) for number, part in enumerate(parts)),
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
        for line in outcome.output.splitlines():
            if "shares are now" in line:
                print(f"  {case}: {line.strip()}")
        return [
            json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(len(parts))
        ]


def change(options: argparse.Namespace) -> list[dict[str, float]]:
    """For each change of the quota: how far the steps from the 16th on are from the optimum, and
    how often shares have changed.
    """
    from paceline import lab

    stretch = options.stretch
    with (
        tempfile.TemporaryDirectory() as folder,
        lab.cluster(hosts=2, workers=1, processors=1.0) as cluster,
    ):
        words = ("--serve", folder, "--case", "change", f"--steps={8 * stretch}")
        fault = lab.slow(host=1, factor=0.4, step=2 * stretch, seconds=options.slow)
        outcome = cluster.run(
            __file__, *words, faults=[fault], environ={"OMP_NUM_THREADS": "1"}, deadline=3600
        )
        if outcome.code != 0:
            raise SystemExit(outcome.output)
        found = json.loads((Path(folder) / "0.json").read_text())
    ended = [at for at, _ in found]
    seconds = [after - before for before, after in itertools.pairwise(ended)]
    back = next(
        number for number, at in enumerate(ended) if at >= ended[2 * stretch] + options.slow
    )
    whole = statistics.median(seconds[stretch : 2 * stretch])
    changes = [
        number
        for number in range(1, len(found))
        if found[number][1] != found[number - 1][1] and number >= stretch
    ]
    rows = []
    for start, optimum in ((2 * stretch, whole * 2 / 1.4), (back, whole)):
        later = seconds[start + FOLLOWED : start + FOLLOWED + stretch]
        rows.append({"step": statistics.median(later), "optimum": optimum, "changes": len(changes)})
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "", "unequal", rounds=5)
    parser.add_argument("--steps", type=int, default=20, help="of a round (default %(default)s)")
    parser.add_argument(
        "--alone",
        type=int,
        default=6,
        help="steps of each worker alone, in a round (default %(default)s)",
    )
    parser.add_argument(
        "--warm", type=int, default=3, help="rounds that aren't timed (default %(default)s)"
    )
    parser.add_argument(
        "--stretch",
        type=int,
        default=40,
        help="steps before a change, and looked at after it (default %(default)s)",
    )
    parser.add_argument(
        "--slow",
        type=float,
        default=45.0,
        help="seconds for which a quota is cut (default %(default)s)",
    )
    parser.add_argument("--quick", action="store_true", help="few steps, to see that it runs")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument(
        "--case", choices=[*CASES, "change", "balanced", EQUAL], help="one case alone"
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
                near = bootstrap(float, [row["step"] / row["optimum"]])
                note = f"shares changed {row['changes']:.0f} times in all (at most {CHANGES})"
                rows.append(
                    Row(
                        f"one of two cores {name}",
                        {"step": row["step"]},
                        "step / optimum",
                        near,
                        most=NEAR,
                        note=note,
                    )
                )
        elif case == "balanced":
            raw[case] = found = measure(options, EQUAL, ("equal", "auto"))
            cost = [
                auto / equal
                for auto, equal in zip(
                    found[0]["seconds"]["auto"], found[0]["seconds"]["equal"], strict=True
                )
            ]
            rows.append(
                Row("workers equally fast", {}, "auto / equal", bootstrap(float, cost), most=COST)
            )
        else:
            raw[case] = found = measure(options, case, options.ways)
            rows += _rows(case, found, options.ways)
    if not report("unequal", rows, options, raw) and options.check:
        sys.exit(1)


def _rows(case: str, found: Sequence[dict[str, Any]], ways: Sequence[str]) -> list[Row]:
    _, batch, bar = CASES[case]
    rounds = range(len(found[0]["seconds"]["alone"]))
    # samples in a second
    total = [sum(batch / rank["seconds"]["alone"][at] for rank in found) for at in rounds]
    rows = []
    for name in ways:
        taken = [max(rank["seconds"][name][at] for rank in found) for at in rounds]
        left = bootstrap(
            float, [batch / mine / whole for mine, whole in zip(taken, total, strict=True)]
        )
        note = " + ".join(map(str, found[0]["shares"][-1])) if name == "auto" else ""
        medians = {
            "step": statistics.median(taken),
            "ideal": statistics.median(batch / whole for whole in total),
        }
        rows.append(
            Row(
                f"{case}, {name}",
                medians,
                "speed / sum",
                left,
                least=bar if name == "auto" else None,
                note=note,
            )
        )
    return rows


if __name__ == "__main__":
    main()
