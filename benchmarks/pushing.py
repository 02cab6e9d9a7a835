"""Measures push and pull of a parameter server over slow links, with codecs and without.

Two hosts of a lab have a worker and a server each.

    python benchmarks/pushing.py [--mb 20 --bandwidth 100mbit 1gbit --rounds 5 --steps 6]

A step is little more than its exchange: the gradients of a layer of `--mb` MB leave, the servers
step, and parameters come back. Half of both goes over the link, the other half stays on the host.
Launches of all ways take turns. The results are medians of rounds (each the median of its steps),
and the time without a codec divided by the time with it, with its 90 % interval.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from harness import ratio

WAYS = {
    "none": "ParameterServer()",
    "half": "ParameterServer(codec=half())",
    "int8": "ParameterServer(codec=error_feedback(int8()))",
    "topk": "ParameterServer(codec=error_feedback(topk(0.01)))",
}
APART = {
    f"apart-{name}": sync.replace(
        "(", "(staleness=inf, " if name != "none" else "(staleness=inf", 1
    )
    for name, sync in WAYS.items()
}
WARM = 3  # first steps, which don't count: a codec sends the first values exactly


def train(options: argparse.Namespace) -> None:
    """Train on one worker. The first worker writes the seconds of its steps."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    import paceline as pl

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    count = 2 * (WARM + options.steps)
    data = TensorDataset(torch.randn(count, 1000, generator=generator), torch.zeros(count))
    with pl.start(folder=options.out, trace="off") as run:
        model = nn.Linear(1000, round(options.mb * 1e6 / 4 / 1000), bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 1e-4, momentum=0.9)
        model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, 2))
        step_seconds = []
        for x, _ in loader:
            loss = (model(x) ** 2).mean()
            # In lockstep workers begin together, so a step has no wait for a late one.
            if not options.apart:
                run.barrier()
            step_start = time.perf_counter()
            loss.backward()
            optimizer.step()
            step_seconds.append(time.perf_counter() - step_start)
            optimizer.zero_grad()
        if run.rank == 0:
            Path(options.out, "took.json").write_text(json.dumps(step_seconds[WARM:]))


def launch(options: argparse.Namespace, bandwidth: str, way: str) -> float:
    """Launch a run, and return the median seconds of a step.

    Args:
        options: Arguments of the benchmark.
        bandwidth: Bandwidth of the hosts' links.
        way: Key of `WAYS` or `APART`.
    """
    from paceline import lab

    with (
        tempfile.TemporaryDirectory() as out,
        lab.cluster(hosts=2, workers=1, bandwidth=bandwidth) as cluster,
    ):
        words = [
            f"--mb={options.mb}",
            f"--steps={options.steps}",
            f"--out={out}",
            *(["--apart"] if way in APART else []),
        ]
        outcome = cluster.run(
            __file__,
            *words,
            sync=(WAYS | APART)[way],
            environ={"OMP_NUM_THREADS": "1"},
            deadline=600,
        )
        assert outcome.code == 0, outcome.output
        return statistics.median(json.loads(Path(out, "took.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=20.0, help="size of the parameters in MB")
    parser.add_argument(
        "--bandwidth", nargs="*", default=["100mbit", "1gbit"], help="bandwidths of each host"
    )
    parser.add_argument(
        "--ways",
        nargs="*",
        default=list(WAYS),
        choices=[*WAYS, *APART],
        help="ways to send; those with apart- are not in lockstep",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="timed steps of a launch")
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        train(options)
        return
    for bandwidth in options.bandwidth:
        times_by_way: dict[str, list[float]] = {way: [] for way in options.ways}
        for round_number in range(options.rounds):
            # The order rotates, so that no way always comes first.
            turn = round_number % len(options.ways)
            for way in [*options.ways[turn:], *options.ways[:turn]]:
                times_by_way[way].append(launch(options, bandwidth, way))
        for way, times in times_by_way.items():
            row = {
                "bandwidth": bandwidth,
                "way": way,
                "milliseconds": round(1e3 * statistics.median(times), 1),
            }
            print(
                json.dumps(
                    row
                    | {
                        "ratio": [
                            round(value, 2) for value in ratio(times_by_way[options.ways[0]], times)
                        ]
                    }
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
