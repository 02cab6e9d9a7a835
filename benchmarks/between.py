"""Measures all-reduce of float32 between the hosts of a lab: paceline against Gloo.

Ranks are dealt to hosts in blocks or in turn. All variants reduce the same data, different on each
rank, in turns in the same processes. Each result is compared with the sum. The used part of the
link is the number of bytes that have to cross it, divided by the time and the rate: for two hosts
a copy of the tensor each way.

    python benchmarks/between.py [--bandwidth 1gbit] [--sizes 1M 8M 100M]
                                 [--placements block round-robin]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from harness import Row, arguments, bootstrap, interleave, ratio, report

VARIANTS = ("gloo", "registered", "ordinary", "a new result")
HOSTS, WORKERS = 2, 2
LEAST = {"block": 1.45, "round-robin": 2.9}  # lowest ratios to Gloo; 1.5 and 3 are possible
LEAST_USED = 0.93  # lowest used part of the link
BARRED = {"1gbit"}  # the bars are for these bandwidths, and for tensors of 100 MB


def numel(size: str) -> int:
    """Parse a size such as 8M (megabytes) as a number of float32 values."""
    return int(float(size.removesuffix("M")) * 1e6) // 4


class Peer:
    """One rank, with the same data in memory of each kind.

    Args:
        group: All workers.
        count: Number of values of a tensor.
    """

    def __init__(self, group: Any, count: int) -> None:
        import torch

        self.torch, self.group = torch, group
        # Whole numbers, so that sums are exact in any order.
        parts = [
            torch.randint(-1000, 1000, (count,), generator=torch.Generator().manual_seed(r)).float()
            for r in range(group.size)
        ]
        self.own_data, self.sum = parts[group.rank], torch.stack(parts).sum(0)
        self.memory = {name: torch.empty(count) for name in VARIANTS} | {
            "registered": group.empty((count,), torch.float32)
        }

    def measure(self, variant: str) -> float:
        """Time one all-reduce, in seconds, and check its result."""
        x = self.memory[variant]
        x.copy_(self.own_data)
        # Ranks begin together, so a late rank doesn't count as time of the others.
        self.torch.distributed.barrier()
        start = time.perf_counter()
        if variant == "gloo":
            self.torch.distributed.all_reduce(x)
        elif variant == "a new result":
            x = self.group.all_reduce(x).wait()
        else:
            self.group.all_reduce(x, out=x).wait()
        seconds = time.perf_counter() - start
        if not self.torch.equal(x, self.sum):
            raise RuntimeError(f"{variant} gave a wrong sum on rank {self.group.rank}")
        return seconds


def serve(options: argparse.Namespace) -> None:
    """Run a worker of the lab: measure all sizes, and write the samples into the folder."""
    import torch

    import paceline as pl

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    with pl.start(folder=str(options.serve), name="run", trace="off") as run:
        for size in options.sizes:
            peer = Peer(run.group, numel(size))
            variants = {name: partial(peer.measure, name) for name in VARIANTS}
            samples = interleave(variants, options.rounds)
            # Make room for registered memory of the next size.
            run.group.release(peer.memory["registered"])
            (options.serve / f"{size}-{run.rank}.json").write_text(json.dumps(samples))
        run.group.barrier().wait()
    torch.distributed.destroy_process_group()


def measure(options: argparse.Namespace, placement: str) -> dict[str, dict[str, list[float]]]:
    """Measure all sizes with one placement of ranks.

    Returns, for each size and variant, the seconds of the slowest rank in each round.
    """
    from paceline import lab

    with tempfile.TemporaryDirectory() as folder:
        words = ("--serve", folder, "--rounds", str(options.rounds), "--sizes", *options.sizes)
        with lab.cluster(
            hosts=HOSTS, workers=WORKERS, bandwidth=options.bandwidth, placement=placement
        ) as cluster:
            outcome = cluster.run(__file__, *words, environ={"OMP_NUM_THREADS": "1"}, deadline=3600)
        if outcome.code != 0:
            raise SystemExit(outcome.output)
        samples_by_size = {}
        for size in options.sizes:
            ranks = [
                json.loads((Path(folder) / f"{size}-{rank}.json").read_text())
                for rank in range(HOSTS * WORKERS)
            ]
            # An all-reduce ends when its slowest rank does.
            samples_by_size[size] = {
                name: [
                    max(seconds) for seconds in zip(*(rank[name] for rank in ranks), strict=True)
                ]
                for name in VARIANTS
            }
        return samples_by_size


def judge(
    options: argparse.Namespace, placement: str, size: str, samples: dict[str, list[float]]
) -> list[Row]:
    """Make rows that compare each variant with Gloo, and with the rate of the link.

    Args:
        options: Arguments of the benchmark.
        placement: Placement of ranks on hosts.
        size: Size such as 8M.
        samples: Seconds of each variant in each round.
    """
    from paceline.lab.description import parse_rate

    rows, bits_per_second = [], parse_rate(options.bandwidth)
    barred = options.bandwidth in BARRED and size == "100M"
    for name in VARIANTS[1:]:
        what = f"{size}, {placement}, {name}"
        medians = {other: statistics.median(samples[other]) for other in ("gloo", name)}
        rows.append(
            Row(
                what,
                medians,
                "gloo / paceline",
                ratio(samples["gloo"], samples[name]),
                LEAST[placement] if barred else None,
            )
        )
        # For two hosts each byte of the tensor crosses the link once each way.
        used_part = bootstrap(
            lambda seconds: numel(size) * 32 / seconds / bits_per_second, samples[name]
        )
        rows.append(Row(what, {}, "of the link's rate", used_part, LEAST_USED if barred else None))
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "", "between", rounds=7)
    parser.add_argument(
        "--bandwidth", default="1gbit", help="bandwidth of each host's link (default %(default)s)"
    )
    parser.add_argument("--sizes", nargs="+", default=["1M", "8M", "100M"])
    parser.add_argument(
        "--placements",
        nargs="+",
        default=["block", "round-robin"],
        choices=["block", "round-robin"],
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.serve is not None:
        serve(options)
        return
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for placement in options.placements:
        for size, samples in measure(options, placement).items():
            rows += judge(options, placement, size, samples)
            raw[f"{placement}, {size}"] = samples
    if not report("between", rows, options, raw) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
