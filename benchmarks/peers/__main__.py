"""paceline and its peers, side by side.

Rounds of all peers alternate; every launch's weights are checked against one process's.

python -m benchmarks.peers --install            # once: an environment for each peer, under .bench/
python -m benchmarks.peers --estimate           # how long it would take
python -m benchmarks.peers                      # measure, or go on where it was interrupted
python -m benchmarks.peers report               # write its part of docs/results.md
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from benchmarks import harness
from benchmarks.peers import environments
from benchmarks.peers.catalogue import (
    MODELS,
    PEERS,
    SETTINGS,
    TELLING_MOST,
    Cell,
    guess,
    launch_seconds,
    timed_steps,
    trial_seconds,
)
from benchmarks.peers.environments import InstallError
from benchmarks.peers.measuring import Measurement
from benchmarks.peers.places import tidy
from benchmarks.peers.records import Records
from benchmarks.peers.summary import summarise, write

RESULTS = environments.ROOT / "benchmarks" / "results" / "peers.jsonl"


def arguments() -> argparse.ArgumentParser:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description=__doc__, formatter_class=raw
    )
    parser.add_argument(
        "--settings",
        nargs="+",
        choices=list(SETTINGS),
        metavar="NAME",
        help=f"these only, of {', '.join(SETTINGS)}",
    )
    parser.add_argument(
        "--models",
        nargs="+",
        choices=list(MODELS),
        metavar="NAME",
        help=f"these only, of {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help=(
            "all models in all settings, which takes some 7 hours; default: "
            "the 12 cells that tell most"
        ),
    )
    parser.add_argument(
        "--peers",
        nargs="+",
        choices=list(PEERS),
        default=list(PEERS),
        metavar="NAME",
        help=", ".join(PEERS),
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=3,
        help="launches of every peer in every cell (default %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=4.0,
        help="timed seconds of a launch, roughly: 4 to 40 steps (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of models and data (default %(default)s)"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a smoke test: one-host, the two small models, one round",
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="make the peers' environments first, where they are missing",
    )
    parser.add_argument(
        "--fresh", action="store_true", help="begin anew: what was measured is renamed to *.old"
    )
    parser.add_argument("--retry", action="store_true", help="launch again what failed before")
    parser.add_argument("--estimate", action="store_true", help="only say how long it would take")
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where records go (default %(default)s)"
    )
    parser.add_argument("command", nargs="?", choices=["measure", "report"], default="measure")
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        help="report: the records (.jsonl) or the summary (.json) to read; default: --results",
    )
    parser.add_argument(
        "--docs",
        type=Path,
        default=environments.ROOT / "docs",
        help="report: the folder to write to (default %(default)s)",
    )
    return parser


def install(names: list[str], records: Records) -> None:
    """Make the missing environments of peers; one that can't be made is recorded with its
    reason.
    """
    for name in dict.fromkeys(filter(None, (PEERS[peer].environment for peer in names))):
        if environments.made(name):
            continue
        print(f"installing {name} ...", flush=True)
        why = None
        try:
            environments.make(name)
        except InstallError as error:
            why = str(error)
            print(f"  {name} can't be installed: {why}")
        records.add({"kind": "environment", "environment": name, "why": why})


def plan(options: argparse.Namespace, records: Records) -> Measurement:
    """What the options ask for."""
    cores = len(os.sched_getaffinity(0))
    rounds, chosen = options.rounds, TELLING_MOST
    if options.quick:
        rounds, chosen = 1, {"one-host": ("gpt-0.9m", "digits-cnn")}
    elif options.all or options.settings or options.models:
        chosen = {name: tuple(options.models or MODELS) for name in options.settings or SETTINGS}
    cells = []
    for setting in (SETTINGS[name] for name in chosen):
        for model in (MODELS[name] for name in chosen[setting.name]):
            cells.append(
                Cell(setting, model, timed_steps(guess(setting, model, cores), options.seconds))
            )
    return Measurement(
        cells,
        [PEERS[name] for name in options.peers],
        rounds,
        options.seed,
        cores,
        records,
        options.retry,
    )


def estimate(measurement: Measurement) -> float:
    """Seconds that all missing launches take, roughly."""
    total = 0.0
    for cell in measurement.cells:
        missing = measurement.missing(cell)
        total += launch_seconds(cell, measurement.cores) * len(missing)
        total += trial_seconds(cell, measurement.cores) * any(
            peer.name == "ddp-best" for _, peer in missing
        )
    return total


def measure(options: argparse.Namespace) -> None:
    """Install, measure, and write the summary beside the records."""
    if options.fresh and options.results.exists():
        options.results.rename(options.results.with_suffix(".jsonl.old"))
    records = Records(options.results)
    if options.install:
        install(options.peers, records)
    measurement = plan(options, records)
    absent = [peer.name for peer in measurement.peers if not environments.made(peer.environment)]
    if absent:
        print(f"not installed, and left out: {', '.join(absent)} (--install makes what is missing)")
    seconds = estimate(measurement)
    print(
        (
            f"about {seconds / 60:.0f} minutes, until "
            f"{time.strftime('%H:%M', time.localtime(time.time() + seconds))}"
        ),
        flush=True,
    )
    if options.estimate:
        return
    if (
        any(cell.model.name == "digits-cnn" for cell in measurement.cells)
        and not environments.DIGITS.exists()
    ):
        environments.write_digits()
    records.add(
        {
            "kind": "header",
            "when": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": " ".join(["python -m benchmarks.peers", *sys.argv[1:]]),
            "machine": harness.machine(),
            "versions": harness.versions("torch", "numpy", "paceline"),
        }
    )
    tidy()
    measurement.run()
    path = options.results.with_suffix(".json")
    write(path, summarise(records, list(PEERS)))
    print(f"written to {path}; `python -m benchmarks.peers report {path}` makes the page of it")


def main() -> None:
    options = arguments().parse_args()
    if options.rounds < 1 or options.seconds <= 0:
        sys.exit(
            f"--rounds {options.rounds}, --seconds {options.seconds:g}: give 1 round or more, and "
            "seconds above 0"
        )
    if options.command == "report":
        from benchmarks.peers import page

        page.make(options.file or options.results, options.docs)
    else:
        # so that all is taken down
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        measure(options)


if __name__ == "__main__":
    main()
