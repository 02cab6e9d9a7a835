"""Compares plans with runs in the lab: clusters x models, the chosen way and up to three others.

    python benchmarks/planner_lab.py [--clusters NAMES] [--models NAMES] [--steps 30] [--out FILE]

Each cluster is built and measured by `paceline lab probe`. Then `paceline plan` predicts, and
`paceline lab run` trains. Predicted and measured seconds are those of the median step, and of the
mean step of local SGD.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "planned_script.py"


@dataclass(frozen=True)
class Host:
    """A host of a cluster: its workers, the rate of its link, and its cores if they are limited."""

    workers: int = 1
    bandwidth: str = "1gbit"
    processors: float | None = None


CLUSTERS = {
    "one host": (Host(2),),
    "two hosts, 10 Gbit/s": (Host(1, "10gbit"),) * 2,
    "two hosts, 1 Gbit/s": (Host(1),) * 2,
    "two hosts, 100 Mbit/s": (Host(1, "100mbit"),) * 2,
    "four hosts, 1 Gbit/s": (Host(1),) * 4,
    "unequal hosts, 1 Gbit/s": (Host(1, "1gbit", 1.0), Host(1, "1gbit", 0.5)),
}
FEWEST_STEPS = 6
RUN_SECONDS = 30.0
BATCHES = {"gpt-0.9m": 24, "gpt-19m": 4, "cnn": 64, "mlp": 64}


@dataclass(frozen=True)
class Comparison:
    """One way: predicted and measured milliseconds of a step."""

    way: str
    chosen: bool
    predicted: float
    measured: float


def write_cluster(folder: Path, hosts: tuple[Host, ...]) -> Path:
    """Write the description of a cluster, or of some of its hosts."""
    lines = []
    for host in hosts:
        lines += ["[[host]]", f"workers = {host.workers}", f'bandwidth = "{host.bandwidth}"']
        if host.processors is not None:
            lines.append(f"processors = {host.processors}")
    path = folder / f"cluster-{abs(hash(hosts)) % 10**8}.toml"
    path.write_text("\n".join(lines) + "\n")
    return path


def run_paceline(*args: str, **env: str) -> str:
    """Run a command of paceline, and return what it printed."""
    ended = subprocess.run(
        [sys.executable, "-m", "paceline", *args],
        env={**os.environ, "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}", **env},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"paceline {' '.join(args)} failed:\n{ended.stderr[-2000:]}")
    return ended.stdout


def measure_way(
    folder: Path, hosts: tuple[Host, ...], way: dict[str, Any], args: list[str], steps: int
) -> float:
    """Train in the lab as a candidate says, and return the seconds of a step."""
    runs = Path(tempfile.mkdtemp(dir=folder))
    names = [f"host{index}" for index in range(len(hosts))]
    if way["workers"] == [1]:
        # One worker alone needs no other host; it gets the threads that were planned.
        at = names.index(way["hosts"][0]) if way["hosts"][0] in names else 0
        chosen: tuple[Host, ...] = (Host(1, "10gbit", hosts[at].processors),)
    else:
        chosen = tuple(
            Host(workers, hosts[names.index(name)].bandwidth, hosts[names.index(name)].processors)
            for name, workers in zip(way["hosts"], way["workers"], strict=True)
        )
    options = ["--sync", way["sync"]] if way["sync"] else []
    options += ["--cut", way["cut"]] if way["cut"] else []
    options += ["--shares", "auto"] if way["shares_by_speed"] else []
    run_paceline(
        "lab", "run", str(write_cluster(folder, chosen)), *options, str(SCRIPT), *args,
        PACELINE_STEPS=str(steps), PACELINE_FOLDER=str(runs),
    )  # fmt: skip
    (metrics,) = runs.glob("*/metrics.jsonl")
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = [sum(line["seconds"].values()) for line in lines if "seconds" in line]
    if every := count_round_steps(way):
        # Most steps of a round have no exchange, so the mean of whole rounds counts.
        return statistics.fmean(seconds[every : len(seconds) // every * every])
    return statistics.median(seconds[min(5, len(seconds) // 3) :])


def count_steps(way: dict[str, Any], most: int) -> int:
    """Count the steps of a run: fewer if a step takes long, and three rounds of local SGD."""
    if every := count_round_steps(way):
        return 3 * every
    return max(FEWEST_STEPS, min(most, round(RUN_SECONDS / way["seconds_per_step"])))


def count_round_steps(way: dict[str, Any]) -> int:
    """Count the steps of a round of local SGD. 0: the way has no rounds."""
    match = re.fullmatch(r"LocalSGD\((\d+)\)", way["sync"])
    return int(match[1]) if match else 0


def choose_ways(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Choose the best way, and up to three others: one worker, all workers, and another kind."""
    wanted = [plan["best"], plan["one_worker"], plan["all_workers"]]
    wanted += [each for each in plan["candidates"] if each["cut"]][:1]
    wanted += [each for each in plan["candidates"] if each["sync"]]
    chosen: dict[str, dict[str, Any]] = {}
    for each in wanted:
        chosen.setdefault(each["way"], each)
    return list(chosen.values())[:4]


def compare_cluster(
    folder: Path, name: str, models: list[str], steps: int
) -> dict[str, list[Comparison]]:
    """Plan and measure all models on one cluster."""
    hosts = CLUSTERS[name]
    cluster = folder / "cluster.json"
    run_paceline("lab", "probe", str(write_cluster(folder, hosts)), "--out", str(cluster))
    compared = {}
    for model in models:
        args = ["--model", model, "--batch", str(BATCHES[model])]
        wanted = ["--cluster", str(cluster), "--allow", "lossy", "--json", "--", *args]
        answer = run_paceline("plan", str(SCRIPT), *wanted)
        plan = json.loads(answer)
        compared[model] = [
            Comparison(
                way["way"],
                way is plan["best"],
                way["seconds_per_step"] * 1e3,
                measure_way(folder, hosts, way, args, count_steps(way, steps)) * 1e3,
            )
            for way in choose_ways(plan)
        ]
        print_model(name, model, compared[model])
    return compared


def print_model(cluster: str, model: str, ways: list[Comparison]) -> None:
    """Print the rows of one model on one cluster."""
    for way in ways:
        print(
            f"| {cluster} | {model} | {way.way}{' (chosen)' if way.chosen else ''} | "
            f"{way.predicted:.3g} | {way.measured:.3g} | {way.predicted / way.measured:.2f} |",
            flush=True,
        )


def summarize(compared: dict[str, dict[str, list[Comparison]]]) -> list[str]:
    """Say how far off predictions are, and how good the chosen ways are."""
    rows = [ways for models in compared.values() for ways in models.values()]
    errors = [abs(way.predicted / way.measured - 1) for ways in rows for way in ways]
    regrets = [
        next(way.measured for way in ways if way.chosen) / min(way.measured for way in ways)
        for ways in rows
    ]
    verdicts = [_is_verdict_right(ways) for ways in rows if len(ways) > 1]
    return [
        f"median error of a step: {statistics.median(errors):.1%}",
        f"chosen way within 5 % of the best measured: {sum(r <= 1.05 for r in regrets)} "
        f"of {len(regrets)} (worst {max(regrets):.2f})",
        f"right whether more than one worker helps: {sum(verdicts)} of {len(verdicts)}",
    ]


def _is_verdict_right(ways: list[Comparison]) -> bool:
    alone = next(way for way in ways if way.way == "1 worker")
    others = [way for way in ways if way is not alone]
    predicted = min(way.predicted for way in others) < alone.predicted
    return predicted == (min(way.measured for way in others) < alone.measured)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS), choices=list(CLUSTERS))
    parser.add_argument("--models", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--steps", type=int, default=30, help="most steps of a run")
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args()
    print("| cluster | model | way | predicted ms | measured ms | ratio |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    with tempfile.TemporaryDirectory(prefix="paceline-planner-") as folder:
        compared = {
            name: compare_cluster(Path(folder), name, options.models, options.steps)
            for name in options.clusters
        }
    print()
    print("\n".join(summarize(compared)))
    if options.out is not None:
        fields = {
            cluster: {model: [vars(way) for way in ways] for model, ways in models.items()}
            for cluster, models in compared.items()
        }
        options.out.write_text(json.dumps(fields, indent=1) + "\n")


if __name__ == "__main__":
    main()
