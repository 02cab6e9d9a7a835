"""Fits what data sheets don't say of an A100 to 30 rows of vTrain's table.

    python -m benchmarks.planned.fit [--tables DIR]

Three numbers are fitted: the share of the memory's bandwidth that kernels other than products
reach, the seconds in which the host launches a kernel, and how much longer products with odd rows
take. The rows are each 24th one of the file. The results stand in
`paceline/planner/transformers/device.py`.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.planned.readers import read_vtrain
from benchmarks.planned.rows import MeasuredLayout
from paceline.planner.transformers.device import find_accelerator
from paceline.planner.transformers.transformer_cost import price_layout

TABLE = "vtrain_single_node_a100_hidden1024.csv"
EACH = 24
NOMINAL_BANDWIDTH = 1.555e12  # of an A100 with 40 GB, on its data sheet
START = (0.8, 40e-6, 2.0)
STEPS = (0.04, 4e-6, 0.2)


def rate_numbers(rows: Sequence[MeasuredLayout], numbers: Sequence[float]) -> float:
    """Mean of the absolute logarithms of predicted over measured seconds."""
    share, launch, slowdown = numbers
    device = replace(
        find_accelerator("a100-40gb"),
        memory_bandwidth=share * NOMINAL_BANDWIDTH,
        launch_seconds=launch,
        odd_slowdown=slowdown,
    )
    return statistics.mean(
        abs(
            math.log(
                price_layout(
                    row.model, replace(row.cluster, device=device), row.layout, row.traits
                ).seconds
                / (row.seconds or math.nan)
            )
        )
        for row in rows
    )


def fit_numbers(rows: Sequence[MeasuredLayout]) -> tuple[list[float], float]:
    """Fit by changing one number at a time, in steps that get smaller."""
    numbers, steps = list(START), list(STEPS)
    best = rate_numbers(rows, numbers)
    while steps[0] > STEPS[0] / 8:
        improved = False
        for index in range(len(numbers)):
            for sign in (1, -1):
                trial = list(numbers)
                trial[index] += sign * steps[index]
                error = rate_numbers(rows, trial)
                if error < best:
                    numbers, best, improved = trial, error, True
        if not improved:
            steps = [step / 2 for step in steps]
    return numbers, best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--tables", type=Path, default=Path(__file__).resolve().parents[1] / "published"
    )
    rows = read_vtrain(parser.parse_args().tables / TABLE)[::EACH]
    (share, launch, slowdown), error = fit_numbers(rows)
    print(
        f"{len(rows)} rows: {share:.2f} of the memory's bandwidth, {launch * 1e6:.0f} us for a "
        f"launch, {slowdown:.1f} times as long for odd rows; error {error:.1%}"
    )


if __name__ == "__main__":
    main()
