"""Push and pull of a parameter server over limited links: through a codec, against none.

Two hosts of a lab, a worker and a server on each.

    python benchmarks/pushing.py [--mb 20 --bandwidth 100mbit 1gbit --rounds 5 --steps 6]

A step here is hardly anything but its exchange: the gradients of a layer of so many MB leave, the
servers step, and parameters come back; half of both goes over the link, the other half stays on the
host. Launches of all ways alternate. Shown are the medians of rounds (each the median of its
steps), and the time without a codec by the time with it, with its 90 % interval.
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
WARM = 3  # steps: what is told first is told exactly


def train(options: argparse.Namespace) -> None:
    """The script of each worker."""
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
        took = []
        for x, _ in loader:
            loss = (model(x) ** 2).mean()
            if not options.apart:
                run.barrier()
            began = time.perf_counter()
            loss.backward()
            optimizer.step()
            took.append(time.perf_counter() - began)
            optimizer.zero_grad()
        if run.rank == 0:
            Path(options.out, "took.json").write_text(json.dumps(took[WARM:]))


def launch(options: argparse.Namespace, bandwidth: str, way: str) -> float:
    """Seconds of a step."""
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
        ended = cluster.run(
            __file__,
            *words,
            sync=(WAYS | APART)[way],
            environ={"OMP_NUM_THREADS": "1"},
            deadline=600,
        )
        assert ended.code == 0, ended.output
        return statistics.median(json.loads(Path(out, "took.json").read_text()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=20.0, help="of the parameters")
    parser.add_argument("--bandwidth", nargs="*", default=["100mbit", "1gbit"], help="of each host")
    parser.add_argument(
        "--ways",
        nargs="*",
        default=list(WAYS),
        choices=[*WAYS, *APART],
        help="apart: not in lockstep",
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=6, help="timed ones of a launch")
    parser.add_argument("--out", default="", help=argparse.SUPPRESS)
    parser.add_argument("--apart", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out:
        train(options)
        return
    for bandwidth in options.bandwidth:
        found: dict[str, list[float]] = {way: [] for way in options.ways}
        for number in range(options.rounds):
            turn = number % len(options.ways)
            for way in [*options.ways[turn:], *options.ways[:turn]]:
                found[way].append(launch(options, bandwidth, way))
        for way, times in found.items():
            row = {
                "bandwidth": bandwidth,
                "way": way,
                "milliseconds": round(1e3 * statistics.median(times), 1),
            }
            print(
                json.dumps(
                    row
                    | {"ratio": [round(value, 2) for value in ratio(found[options.ways[0]], times)]}
                ),
                flush=True,
            )


if __name__ == "__main__":
    main()
