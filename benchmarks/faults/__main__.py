"""What a killed worker costs: paceline, torchrun that begins again from its last checkpoint, and
torchft, side by side.

    python -m benchmarks.faults --install      # once: an environment for torchft, under .bench/
    python -m benchmarks.faults                # GPT 0.9 M, 4 workers, 6 kills for each system

All train the same model on the same numbered samples with the same global batch, and lose the same
workers after the same times of steady training: each fault is a SIGKILL so many seconds after all
workers take part (again); the seed chooses whom and when. Systems take turns, and who begins
rotates from round to round. In a round before the first nobody is killed: its weights are the
measure of the others.

For each fault, until it is over:
    still       seconds until a step is taken that hadn't been taken before, beyond those of a usual
                step
    seconds     until all workers take part again, beyond what as many samples usually take
For each run, divided by its faults:
    lost        samples of the epoch that are in none of the steps that led to the final weights
    repeated    samples that are in more than one of them
    in vain     samples whose gradients were computed, or begun, and thrown away: rolled back, not
                committed, or of a step dealt again
    away        |w - w'| / |w'| of the final weights, w' those of the system's own undisturbed run
accounting.py says how these are found. Workers that are started again take processors from the
others meanwhile: on a machine with a core for each, `seconds` are fewer.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.faults.runs import RunError, Training, away, run, schedule
from benchmarks.faults.systems import System, systems
from benchmarks.peers import environments
from benchmarks.peers.catalogue import Setting
from benchmarks.peers.places import place, tidy

Record = dict[str, Any]
RESULTS = environments.ROOT / "benchmarks" / "results" / "faults.json"


def arguments() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.faults", description=__doc__, formatter_class=raw
    )
    parser.add_argument(
        "--model", default="small", help="small (0.9 M parameters) or medium (19 M)"
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument(
        "--share",
        type=int,
        default=4,
        help="samples of a step for each worker (default %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=int,
        default=450,
        help="of the epoch that each run trains (default %(default)s)",
    )
    parser.add_argument(
        "--faults", type=int, default=3, help="kills in a run (default %(default)s)"
    )
    parser.add_argument(
        "--rounds", type=int, default=2, help="disturbed runs of each system (default %(default)s)"
    )
    parser.add_argument(
        "--every",
        type=int,
        nargs="+",
        default=[10, 50],
        help="steps between torchrun's checkpoints, each a system",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="SYSTEM",
        help="paceline, torchrun-10, torchrun-50, torchft: these only",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of who is killed when (default %(default)s)"
    )
    parser.add_argument(
        "--deadline",
        type=float,
        default=300,
        help="seconds that a run may take (default %(default)s)",
    )
    parser.add_argument(
        "--install", action="store_true", help="make torchft's environment first, if it is missing"
    )
    parser.add_argument(
        "--keep", type=Path, help="a folder for what all workers and launchers wrote"
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="where the JSON goes (default %(default)s)"
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit with 1 when paceline lost or repeated a sample, or stood still longest",
    )
    return parser


def choose(options: argparse.Namespace) -> list[System]:
    """The systems asked for that can run here; exits for those that don't exist."""
    known = systems(options.every)
    unknown = [name for name in options.only or () if name not in known]
    if unknown:
        sys.exit(f"--only {' '.join(unknown)}: possible are {', '.join(known)}")
    chosen = [known[name] for name in options.only or known]
    for name in {
        system.environment for system in chosen if not environments.made(system.environment)
    }:
        if not options.install:
            sys.exit(
                f"the environment of {name} is missing: give --install to make it, or --only to "
                "leave it out"
            )
        environments.make(str(name))
    return chosen


def measure(options: argparse.Namespace, chosen: Sequence[System]) -> list[Record]:
    """All rounds of all systems; the first, undisturbed one has number -1."""
    sizes = (options.model, options.workers, options.share, options.steps, options.deadline)
    training, found, undisturbed = Training(*sizes), [], {}
    with place(
        Setting("faults", f"one host, {options.workers} workers", 1, options.workers)
    ) as where:
        for index in range(-1, options.rounds):
            faults = (
                [] if index < 0 else schedule(options.seed + index, options.faults, options.workers)
            )
            turn = index % len(chosen)
            for system in (*chosen[turn:], *chosen[:turn]):
                record: Record = {"system": system.name, "round": index, "schedule": faults}
                try:
                    came = run(system, training, faults, where, options.keep)
                    final = came.pop("weights")
                    undisturbed.setdefault(system.name, final)
                    record |= {**came, "away": away(final, undisturbed[system.name])}
                except RunError as error:
                    record["why"] = str(error)
                found.append(record)
                print(
                    json.dumps(
                        {
                            name: value
                            for name, value in record.items()
                            if name not in ("schedule", "kills")
                        }
                    ),
                    flush=True,
                )
    return found


def summarise(records: Sequence[Record], chosen: Sequence[System]) -> list[Record]:
    """A row for each system: medians over faults, samples for each fault."""
    rows = []
    for system in chosen:
        mine = [record for record in records if record["system"] == system.name]
        went = [record for record in mine if "why" not in record]
        disturbed = [record for record in went if record["faults"]]
        row: Record = {
            "system": system.title,
            "failed": [record["why"] for record in mine if "why" in record],
        }
        row["step"] = statistics.median(record["step"] for record in went) if went else None
        costs = [cost for record in disturbed for cost in record["faults"]]
        row["faults"] = len(costs)
        if costs:
            for name in ("still", "seconds", "back"):
                row[name] = statistics.median(cost[name] for cost in costs)
            row["worst"] = max(cost["still"] for cost in costs)
            for name in ("lost", "repeated", "vain"):
                row[name] = sum(record["samples"][name] for record in disturbed) / len(costs)
            row["away"] = max(record["away"] for record in disturbed)
        rows.append(row)
    return rows


def table(rows: Sequence[Record]) -> str:
    """The rows in Markdown."""
    heads = (
        "after a SIGKILL",
        "next new step after (worst)",
        "seconds lost until all take part",
        "steps rolled back",
        "samples lost",
        "repeated",
        "computed in vain",
        "final weights away from undisturbed",
        "a usual step",
    )
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in rows:
        if row["faults"]:
            cells = [
                f"{row['still']:.2f} s ({row['worst']:.2f} s)",
                f"{row['seconds']:.1f} s",
                *(f"{row[name]:.0f}" for name in ("back", "lost", "repeated", "vain")),
                f"{row['away']:.1e}" if row["away"] else "0",
                f"{row['step'] * 1e3:.0f} ms",
            ]
        else:
            cells = ["no figures"] + [""] * (len(heads) - 2)
        failed = f" ({len(row['failed'])} runs failed)" if row["failed"] else ""
        lines.append(f"| {row['system']}{failed} | {' | '.join(cells)} |")
    return "\n".join(lines)


def held(rows: Sequence[Record]) -> bool:
    """Whether paceline loses and repeats nothing, and takes the next step sooner than all
    others.
    """
    ours = next((row for row in rows if row["system"] == "paceline"), None)
    if ours is None or not ours["faults"] or ours["failed"]:
        return False
    others = [row["still"] for row in rows if row is not ours and row["faults"]]
    return ours["lost"] == ours["repeated"] == 0 and all(ours["still"] < still for still in others)


def main() -> None:
    options = arguments().parse_args()
    if (
        min(options.workers, options.share, options.steps, options.rounds, options.faults) < 1
        or options.workers < 3
    ):
        sys.exit(
            "--workers: 3 or more, since two have to be left; --share, --steps, --rounds, "
            "--faults: 1 or more"
        )
    # so that all is taken down
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    tidy()
    chosen = choose(options)
    records = measure(options, chosen)
    rows = summarise(records, chosen)
    print(f"\n{table(rows)}")
    result = {
        "benchmark": "faults",
        "command": shlex.join(
            [Path(sys.executable).name, "-m", "benchmarks.faults", *sys.argv[1:]]
        ),
        "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": harness.machine(),
        "versions": {
            **harness.versions("torch", "paceline"),
            "peers": environments.requirement("torchft"),
        },
        "options": {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(options).items()
        },
        "rows": rows,
        "raw": records,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(f"\nwritten to {options.out}")
    if options.check and not held(rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
