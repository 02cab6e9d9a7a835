"""Compares ways of all-reduce over several hosts. One of them has a slow link.

Chunks in proportion to the links are compared with even chunks: Gloo's ring, our ring and owners.
All ways sum the same buckets, different on each rank, and take turns in the same processes. Each
result is compared with the sum. The cluster is measured first, as by `paceline probe`, and
`via="auto"` chooses by the file.

    python benchmarks/uneven_links.py [--cluster benchmarks/clusters/one-slow-link.toml]
                                      [--megabytes 8] [--buckets 2]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from harness import Row, arguments, interleave, ratio, report

# Lowest ratio to the best way with even chunks. The schedule predicts 1.33.
LEAST = 1.2
EVEN = ("native", "ring", "owners")


def serve(options: argparse.Namespace) -> None:
    """Run a worker of the lab: sum in each way in turn. The first worker writes the samples."""
    import torch
    import torch.distributed as dist

    import paceline as pl
    from paceline.comm.agreement import Agreement
    from paceline.session.run import parts_of_run
    from paceline.sync.context import SyncContext
    from paceline.sync.routes import find_reducer_maker
    from paceline.unequal.probe.cluster_file import ClusterFile

    torch.set_num_threads(1)
    with pl.start(folder=str(options.serve), name="run", trace="off") as run:
        agreement = Agreement(run.group)
        file = ClusterFile.read_cluster(options.measured)
        assert file is not None
        notes: list[str] = []
        cluster = parts_of_run(run).view.cluster
        hosts_by_rank = cluster.host_by_rank()
        context = SyncContext(
            run.group,
            agreement,
            hosts=hosts_by_rank,
            announce=notes.append,
            route_facts=file.route_facts(cluster),
        )
        ways = {
            "uneven": find_reducer_maker("auto")(context),
            "native": find_reducer_maker("native")(context),
        }
        ways |= {name: find_reducer_maker(name)(context) for name in ("ring", "owners")}
        numel = int(options.megabytes * 1e6) // 4
        # Whole numbers, so that sums are exact in any order.
        parts = [
            torch.randint(
                -1000, 1000, (numel,), generator=torch.Generator().manual_seed(rank)
            ).float()
            for rank in range(run.size)
        ]
        total = torch.stack(parts).sum(0)

        def turn(name: str) -> float:
            flats = [parts[run.rank].clone() for _ in range(options.buckets)]
            run.barrier()
            start = time.perf_counter()
            # Several buckets are under way at once, as in a training.
            works = [
                ways[name].all_reduce(flat, f"bucket {index}") for index, flat in enumerate(flats)
            ]
            for work in works:
                if not torch.equal(work.wait(), total):
                    raise RuntimeError(f"{name} gave a wrong sum on rank {run.rank}")
            seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            return float(run.group.all_reduce(seconds, op="max").wait()[0])

        samples = interleave({name: partial(turn, name) for name in ways}, options.rounds)
        if run.is_first:
            (options.serve / "found.json").write_text(
                json.dumps({"samples": samples, "said": notes})
            )
        dist.barrier()


def probe(cluster: Any, file: Path) -> None:
    """Measure a cluster of the lab, as `paceline probe` does, and write the file."""
    from paceline.commands.lab import PROBE_SCRIPT

    words = (
        str(PROBE_SCRIPT),
        "--dtypes",
        "float32",
        "--out",
        str(file),
        "--folder",
        str(file.parent),
    )
    outcome = cluster.run(*words, environ={"OMP_NUM_THREADS": "1"}, deadline=300)
    if outcome.code != 0:
        raise SystemExit(outcome.output)
    print(outcome.output)


def main() -> None:
    parser = arguments(__doc__ or "", "uneven_links", rounds=9)
    parser.add_argument(
        "--cluster", type=Path, default=Path(__file__).parent / "clusters" / "one-slow-link.toml"
    )
    parser.add_argument(
        "--megabytes", type=float, default=8.0, help="size of a bucket (default %(default)s)"
    )
    parser.add_argument(
        "--buckets",
        type=int,
        default=2,
        help="number of buckets that are sent at once (default %(default)s)",
    )
    parser.add_argument(
        "--measured", type=Path, help="file of this cluster (default: it is measured first)"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options)
        return
    from paceline import lab

    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--serve",
            folder,
            "--rounds",
            str(options.rounds),
            "--buckets",
            str(options.buckets),
        ]
        file = options.measured or Path(folder) / "cluster.json"
        words += ["--megabytes", str(options.megabytes), "--measured", str(file.absolute())]
        with lab.cluster(description=str(options.cluster)) as cluster:
            if options.measured is None:
                probe(cluster, file)
            outcome = cluster.run(
                __file__,
                *words,
                sync="AllReduce(via='native')",
                environ={"OMP_NUM_THREADS": "1"},
                deadline=900,
            )
        if outcome.code != 0:
            raise SystemExit(outcome.output)
        results: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    print("\n".join(results["said"]))
    samples = results["samples"]
    medians = {name: statistics.median(seconds) for name, seconds in samples.items()}
    # The best of the ways with even chunks is the one to compare with.
    best = min(EVEN, key=medians.__getitem__)
    what = f"{options.buckets} x {options.megabytes:g} MB, {options.cluster.stem}"
    rows = [
        Row(what, medians, f"{best} / uneven", ratio(samples[best], samples["uneven"]), least=LEAST)
    ]
    rows += [
        Row(what, {}, f"{name} / uneven", ratio(samples[name], samples["uneven"]))
        for name in EVEN
        if name != best
    ]
    if not report("uneven_links", rows, options, results) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
