"""Parameters of a parameter server that come during the next forward, against those that come with the step: on a link, and on one host.

    python benchmarks/pulling.py [--links 100mbit 1gbit none --batch 1024 --rounds 5 --steps 6]

Two workers train some wide layers; with a link each is on a host of its own in a lab, with a server beside it, and half of what is pushed
and pulled goes over the link ("none": both on one host, with one server). A step is all of it: forward, backward, the exchange. Launches
alternate. Shown are the medians of rounds (each of the mean of its steps), how long forward and what is pulled take by themselves, and the
time with the step by the time with forward, with its 90 % interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from harness import ratio

WAYS = {pull: f"ParameterServer(pull='{pull}', bucket_mb=2.0)" for pull in ("step", "forward")}
WARM = 2  # steps


def train(options: argparse.Namespace) -> None:
    """The script of each worker."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    count = 2 * options.batch
    data = TensorDataset(torch.randn(count * (WARM + options.steps), options.width, generator=generator))
    with pl.start(folder=options.out, name="run", trace="off") as run:
        layers = [layer for _ in range(options.layers) for layer in (nn.Linear(options.width, options.width), nn.ReLU())]
        model = nn.Sequential(*layers)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, count))
        forwards = []
        for number, (x,) in enumerate(loader):
            if number == WARM:
                run.barrier()
                began = time.perf_counter()
            started = time.perf_counter()
            loss = (model(x) ** 2).mean()
            forwards.append(time.perf_counter() - started)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        float(sum(p.detach().sum() for p in model.parameters()))  # the last step's, too
        run.barrier()
        took = (time.perf_counter() - began) / options.steps
        if run.rank == 0:
            Path(options.out, "took.json").write_text(json.dumps([took, statistics.median(forwards[WARM:])]))


def launch(options: argparse.Namespace, link: str, pull: str) -> tuple[float, float]:
    """Seconds of a step, and of its forward."""
    from paceline import lab

    hosts, shaped = (1, {}) if link == "none" else (2, {"bandwidth": link})
    with tempfile.TemporaryDirectory() as out, lab.cluster(hosts=hosts, workers=2 // hosts, **shaped) as cluster:
        words = [f"--{name}={getattr(options, name)}" for name in ("layers", "width", "batch", "steps")]
        ended = cluster.run(__file__, *words, f"--out={out}", sync=WAYS[pull], environ={"OMP_NUM_THREADS": "1"}, deadline=600)
        assert ended.code == 0, ended.output
        took, forward = json.loads(Path(out, "took.json").read_text())
        return took, forward


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=800)
    parser.add_argument("--batch", type=int, default=1024, help="of each worker")
    parser.add_argument("--links", nargs="*", default=["100mbit", "1gbit", "none"], help="of each host; none: one host")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="timed ones of a launch")
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        train(options)
        return
    for link in options.links:
        found: dict[str, list[tuple[float, float]]] = {pull: [] for pull in WAYS}
        for number in range(options.rounds):
            for pull in list(WAYS)[:: 1 if number % 2 else -1]:
                found[pull].append(launch(options, link, pull))
        for pull, times in found.items():
            steps, forwards = ([round(1e3 * statistics.median(each), 1) for each in zip(*times, strict=True)][place] for place in (0, 1))
            ratios = ratio([step for step, _ in found["step"]], [step for step, _ in times])
            row = {"link": link, "pull": pull, "milliseconds": steps, "forward": forwards}
            print(json.dumps(row | {"ratio": [round(value, 2) for value in ratios]}), flush=True)


if __name__ == "__main__":
    main()
