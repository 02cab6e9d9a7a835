"""Compares the memory that a plan predicts with the peaks of fresh processes that train so.

    python benchmarks/planner_memory.py [--models gpt unet] [--steps 6] [--seconds]

Models are the demo's GPT with 19 million parameters, and a U-Net. Each is planned for two workers
of this host. Then it is trained in each way, with and without activation checkpoints. Measured is
the largest resident memory of a worker. With --seconds, steps are compared as well: for a quiet
machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SCRIPT = HERE / "planned_cuts.py"
BATCHES = {"gpt": 16, "gpt-small": 24, "unet": 32}


@dataclass(frozen=True)
class Comparison:
    """One way: predicted and measured bytes of the largest worker, and milliseconds of a step."""

    model: str
    way: str
    predicted_bytes: float
    measured_bytes: float
    predicted_ms: float
    measured_ms: float


def run_paceline(*args: str, **env: str) -> str:
    """Run a command of paceline, and return what it printed."""
    ended = subprocess.run(
        [sys.executable, "-m", "paceline", *args],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    if ended.returncode:
        raise RuntimeError(f"paceline {' '.join(args)} failed:\n{ended.stderr[-2000:]}")
    return ended.stdout


def choose_ways(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Choose one way of each cut, with and without activation checkpoints; the fastest of each."""
    seen = set()
    for way in plan["candidates"]:
        cut = way["cut"].partition("(")[0]
        if cut == "pipeline" and 'schedule="1f1b"' not in way["cut"]:
            continue
        key = sum(way["workers"]), way["cut"] if cut == "shard" else cut
        key = *key, way["activation_checkpoints"]
        if key not in seen:
            seen.add(key)
            yield way


def measure_way(
    folder: Path, way: dict[str, Any], args: list[str], layers: list[str], steps: int
) -> tuple[float, float]:
    """Train as a candidate says. Returns the largest peak of a worker, and ms of a step."""
    runs = Path(tempfile.mkdtemp(dir=folder))
    options = ["--workers", str(way["workers"][0]), "--threads", str(way["threads"][0])]
    options += ["--mesh", way["mesh"]] if way["mesh"] else []
    options += ["--cut", way["cut"]] if way["cut"] else []
    again = ["--checkpoint", *layers] if way["activation_checkpoints"] else []
    run_paceline(
        "run",
        *options,
        "--quiet",
        str(SCRIPT),
        *args,
        *again,
        PACELINE_FOLDER=str(runs),
        PACELINE_STEPS=str(steps),
    )
    (run,) = runs.iterdir()
    summary = json.loads((run / "summary.json").read_text())
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    seconds = [sum(line["seconds"].values()) for line in lines if "seconds" in line]
    peak = max(each["peak"] for each in summary["memory"])
    return peak, statistics.median(seconds[min(3, len(seconds) // 4) :]) * 1e3


def compare_model(
    folder: Path, profiles: Path, model: str, steps: int, shown: bool
) -> list[Comparison]:
    """Plan and measure one model. Runs go to `folder`."""
    args = ["--model", model, "--batch", str(BATCHES[model])]
    profile = profiles / f"{model}.json"
    if not profile.exists():
        run_paceline("plan", str(SCRIPT), "--workers", "2", "--profile", str(profile), "--", *args)
    answer = run_paceline("plan", str(profile), "--workers", "2", "--json")
    layers = json.loads(profile.read_text())["checkpointed"]["names"]
    compared = []
    for way in choose_ways(json.loads(answer)):
        peak, milliseconds = measure_way(folder, way, args, layers, steps)
        row = Comparison(
            model,
            way["way"],
            way["memory_bytes"],
            peak,
            way["seconds_per_step"] * 1e3,
            milliseconds,
        )
        compared.append(row)
        print_row(row, shown)
    return compared


def print_row(row: Comparison, shown: bool) -> None:
    """Print a row of the table."""
    cells = [
        row.model,
        row.way,
        f"{row.predicted_bytes / 1e6:.0f}",
        f"{row.measured_bytes / 1e6:.0f}",
        f"{row.predicted_bytes / row.measured_bytes:.2f}",
    ]
    if shown:
        ratio = row.predicted_ms / row.measured_ms
        cells += [f"{row.predicted_ms:.3g}", f"{row.measured_ms:.3g}", f"{ratio:.2f}"]
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt", "unet"], choices=list(BATCHES))
    parser.add_argument("--steps", type=int, default=6, help="steps of each run")
    parser.add_argument("--seconds", action="store_true", help="compare steps as well")
    parser.add_argument(
        "--profiles", type=Path, help="a folder of profiles: none is measured twice"
    )
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args()
    heads = ["model", "way", "predicted MB", "measured MB", "ratio"]
    heads += ["predicted ms", "measured ms", "ratio"] if options.seconds else []
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="paceline-memory-") as temporary:
        folder = Path(temporary)
        rows = [
            row
            for model in options.models
            for row in compare_model(
                folder, options.profiles or folder, model, options.steps, options.seconds
            )
        ]
    errors = [abs(row.predicted_bytes / row.measured_bytes - 1) for row in rows]
    print(
        f"\nmemory: largest error {max(errors):.1%}, median {statistics.median(errors):.1%}; "
        f"within 10 %: {sum(error <= 0.1 for error in errors)} of {len(errors)}"
    )
    if options.out is not None:
        options.out.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")


if __name__ == "__main__":
    main()
