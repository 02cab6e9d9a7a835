"""What a strategy does to the loss.

python -m benchmarks.learning tune     # the learning rate of the exact run, once
python -m benchmarks.learning table    # GPT 0.9 M, 4 workers, 600 steps, three seeds:
                                       # losses against exact
python -m benchmarks.learning race     # GPT 3.5 M on 4 hosts with links of 100 Mbit/s:
                                       # seconds to the loss that DDP has after 300 steps
python -m benchmarks.learning report   # write its part of docs/results.md and its pictures

Every run is a line in benchmarks/results/learning.jsonl at once; what is there isn't run again.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness
from benchmarks.learning.catalogue import RACE, TABLE, TUNING, Way
from benchmarks.peers import environments
from benchmarks.peers.catalogue import Peer, Setting
from benchmarks.peers.launches import LaunchError, launch
from benchmarks.peers.places import Place, place, tidy
from benchmarks.peers.records import Record, Records

RESULTS = environments.ROOT / "benchmarks" / "results" / "learning.jsonl"
RATES = (1e-3, 2e-3, 4e-3, 8e-3)  # that are tried for exact
HERE = Setting("one-host", "one host, 4 workers", 1, 4)
WAN = Setting("wan-100m", "4 hosts x 1 worker, 100 Mbit/s", 4, 1, "100mbit", 1e8)
MODEL, STEPS, BATCHES = "gpt-0.9m", 600, (8, 32)  # of the tables
# of the race: LAPS are the steps of DDP that set the loss to reach
RACER, LAPS, RACE_BATCH, RACE_RATE = "gpt-3.5m", 300, 8, 1e-3
FAR = 4  # times LAPS after which a way is given up


def arguments() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.learning", description=__doc__, formatter_class=raw
    )
    parser.add_argument("command", choices=["tune", "table", "race", "report"])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument(
        "--batches",
        nargs="+",
        type=int,
        default=BATCHES,
        help="samples of a step, for a table each",
    )
    parser.add_argument("--ways", nargs="+", help="these only")
    parser.add_argument(
        "--steps", type=int, help=f"default: {STEPS} in the table; in the race DDP's {LAPS}"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where records go (default %(default)s)"
    )
    parser.add_argument(
        "--docs",
        type=Path,
        default=environments.ROOT / "docs",
        help="report: the folder to write to",
    )
    return parser


def peer(way: Way) -> Peer:
    """How a way is launched."""
    program = str(Path(__file__).parent / way.program)
    launcher = "paceline run" if way.sync else "torchrun"
    words = ("--sync", way.sync) if way.sync else ()
    return Peer(way.name, way.title, program, launcher, arguments=(*way.arguments, *words))


def train(
    way: Way, where: Place, records: Records, deadline: float, *, kind: str, **asked: object
) -> Record:
    """One run of a way, or the record of it."""
    key = {
        "way": way.name,
        "sync": way.sync,
        **{name: value for name, value in asked.items() if name != "until"},
    }
    known = records.find(kind, **key)
    if known is not None:
        return known
    words: list[str] = []
    for name, value in asked.items():
        words += (
            [f"--{name}"] if value is True else [] if value is False else [f"--{name}", str(value)]
        )
    began = time.perf_counter()
    answers = launch(peer(way), where, words, deadline=deadline)
    first = answers[0]
    losses = (
        first["losses"]
        if way.sync
        else [statistics.fmean(step) for step in zip(*(a["losses"] for a in answers), strict=True)]
    )
    course = {name: first[name] for name in ("seconds", "validation", "sent")}
    print(
        (
            f"{way.title}, seed {asked['seed']}: {first['validation'][-1]} "
            f"({time.perf_counter() - began:.0f} s)"
        ),
        flush=True,
    )
    return records.add({"kind": kind, **key, "losses": losses, **course})


def tuned(records: Records, where: Place, steps: int, batch: int) -> float:
    """The rate with which the exact run ends best, on a seed that isn't in the table."""
    exact = TABLE["exact"]
    found = {
        rate: train(
            exact, where, records, 900, kind="learning", **table(steps, batch, rate, TUNING)
        )
        for rate in RATES
    }
    return min(found, key=lambda rate: float(found[rate]["validation"][-1][2]))


def table(steps: int, batch: int, rate: float, seed: int) -> dict[str, object]:
    """The arguments of a run for the table."""
    stretch = next(count for count in (48, 50, 40, 20, 16, 10, steps) if steps % count == 0)
    return {
        "model": MODEL,
        "batch": batch,
        "steps": steps,
        "stretch": stretch,
        "rate": rate,
        "falling": True,
        "seed": seed,
    }


def make_table(
    records: Records, ways: Sequence[Way], seeds: Sequence[int], steps: int, batch: int
) -> None:
    """All ways with all seeds, each seed's after one another."""
    with place(HERE) as where:
        rate = tuned(records, where, steps, batch)
        print(f"batches of {batch}: learning rate {rate:g}", flush=True)
        for seed in seeds:
            for way in ways:
                train(way, where, records, 900, kind="learning", **table(steps, batch, rate, seed))


def make_race(records: Records, ways: Sequence[Way], seed: int, laps: int) -> None:
    """DDP first, then all others until they are where it was."""
    with place(WAN) as where:

        def go(way: Way, steps: int, until: float) -> Record:
            asked = {
                "model": RACER,
                "batch": RACE_BATCH,
                "steps": steps,
                "stretch": way.stretch,
                "seed": seed,
                "rate": RACE_RATE,
            }
            return train(way, where, records, 60 + 6.0 * steps, kind="race", **asked, until=until)

        goal = go(RACE["ddp"], laps, -1e9)["validation"][-1][2]
        print(f"the loss to reach: {goal:.4f}", flush=True)
        for way in ways:
            if way.name != "ddp":
                try:
                    go(way, -(-FAR * laps // way.stretch) * way.stretch, goal)
                except LaunchError as error:
                    print(f"{way.title}: {error}", file=sys.stderr)


def main() -> None:
    options = arguments().parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    if options.command == "report":
        from benchmarks.learning import page

        page.make(options.results, options.docs)
        return
    known = RACE if options.command == "race" else TABLE
    unknown = [name for name in options.ways or () if name not in known]
    if unknown:
        sys.exit(f"--ways {' '.join(unknown)}: possible are {', '.join(known)}")
    records = Records(options.results)
    command = " ".join(["python -m benchmarks.learning", *sys.argv[1:]])
    made = {"machine": harness.machine(), "versions": harness.versions("torch", "paceline")}
    records.add(
        {"kind": "header", "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "command": command, **made}
    )
    tidy()
    ways = [known[name] for name in options.ways or known]
    if options.command == "race":
        make_race(records, ways, options.seeds[0], options.steps or LAPS)
    elif options.command == "table":
        for batch in options.batches:
            make_table(records, ways, options.seeds, options.steps or STEPS, batch)
    else:
        with place(HERE) as where:
            print(
                json.dumps(
                    {
                        f"rate for {batch}": tuned(records, where, options.steps or STEPS, batch)
                        for batch in options.batches
                    }
                )
            )


if __name__ == "__main__":
    main()
