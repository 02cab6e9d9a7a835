"""The bubbles of pipelines, measured in traces against simulated: 4 workers whose layers take a
fixed time, so that cores don't matter.

    python benchmarks/bubbles.py [--workers 4] [--micro-batches 8] [--steps 8] [--seconds 0.05]
                                 [--bar 0.03]

Each layer sleeps for so many seconds in its forward, as long for the gradient of its input, and as
long for that of its weight; a worker has two layers. Each schedule is a job of its own, whose
trace.json says when workers were busy. Ends with an error where a bubble is further than the bar
from that of the simulation. On a machine that is busy with other things sleeps last longer: take
more seconds.
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
LAYERS = 2  # of each worker, so that it can have two stages
WARM = 2  # first steps that are left out
ACTION = re.compile(r"[FBIW]\d+ of stage \d+")


def simulated(name: str, workers: int, micro_batches: int, seconds: float) -> float:
    """Return the bubble of a schedule by its data.

    Nothing comes into the first stage that needs gradients: its `weight` half is all.
    """
    schedule = make_schedule(name, workers, micro_batches)
    layers = LAYERS * workers // schedule.stages
    forward, count = layers * seconds, schedule.stages - 1
    times = StageTimes(
        [forward] * (count + 1),
        [2 * forward] * (count + 1),
        input_backwards=[0.0, *[forward] * count],
        weight_backwards=[2 * forward, *[forward] * count],
    )
    return simulate_schedule(schedule, times).bubble


def measured(events: Iterable[Mapping[str, Any]]) -> float:
    """Return the bubble that a trace shows, the median of its steps."""
    steps: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "stage" and ACTION.fullmatch(event["name"]):
            steps.setdefault(event["args"]["step"], []).append(event)
    bubbles = []
    for step in sorted(steps)[WARM:]:
        actions = steps[step]
        whole = max(each["ts"] + each["dur"] for each in actions) - min(
            each["ts"] for each in actions
        )
        workers = len({each["pid"] for each in actions})
        bubbles.append(1 - sum(each["dur"] for each in actions) / (workers * whole))
    return statistics.median(bubbles)


def train(options: argparse.Namespace) -> None:
    """Train layers that sleep, as one of the workers."""
    import torch
    from torch import Tensor, nn
    from torch.nn.functional import mse_loss
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl

    class Sleep(torch.autograd.Function):
        """Gives back what it gets, after `ahead` seconds, and its gradient after `back` seconds."""

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
            # also the first layer has a gradient here
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
        "--seconds", type=float, default=0.05, help="what a layer takes for each of its three parts"
    )
    parser.add_argument("--bar", type=float, default=0.03)
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
    print("schedule     simulated  in the trace  apart   by the medians of its actions")
    far = []
    for name in SCHEDULES:
        wanted = simulated(name, options.workers, options.micro_batches, options.seconds)
        with tempfile.TemporaryDirectory() as folder:
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
            found = measured(
                json.loads((Path(folder) / "bubble" / "trace.json").read_text())["traceEvents"]
            )
            (profile,) = json.loads((Path(folder) / "bubble" / "summary.json").read_text())[
                "pipelines"
            ]
        apart = found - wanted
        print(
            f"{name:<13}{wanted:>8.1%}{found:>13.1%}{apart:>+9.3f}{profile['bubble']['predicted']:>15.1%}",
            flush=True,
        )
        far += [name] if abs(apart) > options.bar else []
    if far:
        raise SystemExit(f"more than {options.bar} apart: {', '.join(far)}")


if __name__ == "__main__":
    main()
