"""Compares the bubbles of pipelines in traces with simulated ones.

    python benchmarks/bubbles.py [--workers 4] [--micro-batches 8] [--steps 8] [--seconds 0.05]
                                 [--bar 0.03]

Layers sleep for a fixed time, so the number of cores doesn't matter. A layer sleeps for `--seconds`
in its forward pass, again for the gradient of its input, and again for that of its weight. A worker
has two layers. Each schedule is a job of its own, and its trace.json tells when workers were busy.
The benchmark ends with an error if a bubble differs from the simulated one by more than the bar. On
a busy machine sleeps last longer: take more seconds.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from paceline.parallel.pipelining.schedules import make_schedule
from paceline.parallel.pipelining.simulate import StageTimes, simulate_schedule

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
LAYERS = 2  # layers of each worker, so that it can have two stages
WARM = 2  # first steps, which are left out
ACTION = re.compile(r"[FBIW]\d+ of stage \d+")


def simulated(name: str, workers: int, micro_batches: int, seconds: float) -> float:
    """Compute the bubble of a schedule from its data.

    Args:
        name: Name of the schedule.
        workers: Number of workers.
        micro_batches: Number of micro-batches.
        seconds: Time of each of the three parts of a layer.
    """
    schedule = make_schedule(name, workers, micro_batches)
    layers = LAYERS * workers // schedule.stages
    forward, count = layers * seconds, schedule.stages - 1
    # The input of the first stage needs no gradient: its backward pass is for weights alone.
    times = StageTimes(
        [forward] * (count + 1),
        [2 * forward] * (count + 1),
        input_backwards=[0.0, *[forward] * count],
        weight_backwards=[2 * forward, *[forward] * count],
    )
    return simulate_schedule(schedule, times).bubble


def measured(events: Iterable[Mapping[str, Any]]) -> float:
    """Compute the bubble in a trace, the median of its steps."""
    steps: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "stage" and ACTION.fullmatch(event["name"]):
            steps.setdefault(event["args"]["step"], []).append(event)
    bubbles = []
    for step in sorted(steps)[WARM:]:
        actions = steps[step]
        step_time = max(action["ts"] + action["dur"] for action in actions) - min(
            action["ts"] for action in actions
        )
        workers = len({action["pid"] for action in actions})
        # The bubble is the part of the time in which workers are idle.
        bubbles.append(1 - sum(action["dur"] for action in actions) / (workers * step_time))
    return statistics.median(bubbles)


def train(options: argparse.Namespace) -> None:
    """Train layers that sleep, as one of the workers."""
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import mse_loss
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl

    class Sleep(torch.autograd.Function):
        """Returns its input after `ahead` seconds, and the gradient after `back` seconds."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, ahead: float, back: float) -> Tensor:
            ctx.back = back
            time.sleep(ahead)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
            time.sleep(ctx.back)
            return grad, None, None

    class Paced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.shift = nn.Parameter(torch.eye(4)), nn.Parameter(torch.zeros(4))

        def forward(self, x: Tensor) -> Tensor:
            # Because of `shift` the first layer has a gradient here, too.
            x = Sleep.apply(x + self.shift, options.seconds, options.seconds)
            return x @ Sleep.apply(self.weight, 0.0, options.seconds)

    torch.set_num_threads(1)
    with pl.start(mesh="stage", folder=options.folder, name="bubble") as run:
        model = nn.Sequential(*(Paced() for _ in range(LAYERS * options.workers)))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        rows = torch.ones(options.micro_batches * options.steps, 4)
        loader = DataLoader(TensorDataset(rows, rows), batch_size=options.micro_batches)
        cut = pl.pipeline(
            "auto", schedule=options.train, micro_batches=options.micro_batches, trace=False
        )
        model, optimizer, loader = run.prepare(model, optimizer, loader, cut=cut)
        for x, y in loader:
            run.step(model, x, y, loss=mse_loss)
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument(
        "--seconds", type=float, default=0.05, help="time of each of the three parts of a layer"
    )
    parser.add_argument("--bar", type=float, default=0.03, help="largest difference")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train is not None:
        train(options)
        return
    print(
        f"{options.workers} workers, {options.micro_batches} micro-batches, {LAYERS} layers of 3 x "
        f"{options.seconds * 1e3:g} ms on each"
    )
    print("schedule     simulated  in the trace  apart   from median actions")
    missed = []
    for name in SCHEDULES:
        simulated_bubble = simulated(name, options.workers, options.micro_batches, options.seconds)
        with tempfile.TemporaryDirectory() as folder:
            # The job runs this script again, as its workers.
            words = [*sys.argv, "--train", name, "--folder", folder]
            subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "paceline",
                    "run",
                    "--workers",
                    str(options.workers),
                    *words,
                ],
                check=True,
            )
            measured_bubble = measured(
                json.loads((Path(folder) / "bubble" / "trace.json").read_text())["traceEvents"]
            )
            (profile,) = json.loads((Path(folder) / "bubble" / "summary.json").read_text())[
                "pipelines"
            ]
        difference = measured_bubble - simulated_bubble
        print(
            f"{name:<13}{simulated_bubble:>8.1%}{measured_bubble:>13.1%}{difference:>+9.3f}"
            f"{profile['bubble']['predicted']:>15.1%}",
            flush=True,
        )
        missed += [name] if abs(difference) > options.bar else []
    if missed:
        raise SystemExit(f"more than {options.bar} apart: {', '.join(missed)}")


if __name__ == "__main__":
    main()
