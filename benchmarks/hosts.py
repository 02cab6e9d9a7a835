"""Training steps on several hosts of a lab: paceline against DistributedDataParallel with buckets
of several sizes, and without exchange.

All programs live in the same worker processes, with models of their own that begin equal, and take
turns round by round. The best of DDP's bucket sizes is the one with the least median, chosen after
all rounds, in DDP's favour. Hosts of a lab share the cores of one machine, so processor seconds of
a step (of all workers, the kernel's included) are counted as well: they are what a link that is
fast enough leaves. So are those of the threads that exchange beside the training.
The cluster is measured first, and paceline is given the file, by which it chooses its way between
hosts.

    python benchmarks/hosts.py [--bandwidth 10gbit 1gbit] [--models gpt-19m gpt-0.9m cnn]
                               [--buckets 1 5 25 200]
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import Interval, Row, arguments, interleave, ratio, report
from training import LAST, SETUPS, build, dealt, loop, optimizer_of, paceline
from uneven_links import probe

HOSTS, WORKERS = 2, 2
LEAST = 1.0  # DDP's step, with its best buckets, over ours
BARRED = {("10gbit", "gpt-19m"), ("10gbit", "gpt-0.9m"), ("1gbit", "gpt-0.9m"), ("1gbit", "cnn")}


def ddp(name: str, options: argparse.Namespace, bucket_mb: float) -> tuple[Any, Iterator[None]]:
    """The loop under DistributedDataParallel on Gloo, in a group of its own."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    model, loss, data = build(name)
    wrapped = DistributedDataParallel(
        model, process_group=dist.new_group(backend="gloo"), bucket_cap_mb=bucket_mb
    )
    return model, loop(
        wrapped,
        loss,
        dealt(data, name, dist.get_rank(), dist.get_world_size()),
        optimizer_of(wrapped, options),
    )


def alone(name: str, options: argparse.Namespace) -> tuple[Any, Iterator[None]]:
    """The loop without exchange."""
    import torch.distributed as dist

    model, loss, data = build(name)
    return model, loop(
        model,
        loss,
        dealt(data, name, dist.get_rank(), dist.get_world_size()),
        optimizer_of(model, options),
    )


def serve(options: argparse.Namespace) -> None:
    """A worker of the lab: train all variants in turn, and leave the samples of the first rank,
    which are those of all, in the folder.
    """
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    name = options.models[0]
    ours = paceline(name, 0, HOSTS * WORKERS, options)
    meet = dist.new_group(backend="gloo")
    programs = {f"ddp-{mb:g}": ddp(name, options, mb) for mb in options.buckets} | {
        "nothing": alone(name, options),
        "paceline": ours,
    }
    used: dict[str, list[float]] = {variant: [] for variant in programs}
    switches: dict[str, list[float]] = {variant: [] for variant in programs}
    beside: dict[str, list[float]] = {variant: [] for variant in programs}

    def turn(variant: str) -> float:
        _, program = programs[variant]
        next(program)  # warms the caches and brings the workers together
        steps = options.steps or SETUPS[name].steps
        dist.barrier(meet)
        before, began = _used(), time.perf_counter()
        for _ in range(steps):
            next(program)
        figures = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
        after = _used()
        counts = torch.tensor(
            [b - a for a, b in zip(before, after, strict=True)], dtype=torch.float64
        )
        dist.all_reduce(figures, dist.ReduceOp.MAX, meet)
        dist.all_reduce(counts, group=meet)
        used[variant].append(counts[0].item() / steps)
        switches[variant].append(counts[1].item() / steps)
        beside[variant].append(counts[2].item() / steps)
        return float(figures[0]) / steps

    samples = interleave(
        {variant: (lambda variant=variant: turn(variant)) for variant in programs},
        options.rounds,
        warmup=2,
    )
    _inspect({variant: model for variant, (model, _) in programs.items()})
    if dist.get_rank() == 0:
        counted = {"used": used, "switches": switches, "beside": beside}
        found = {"samples": samples} | {
            what: {v: u[2:] for v, u in each.items()} for what, each in counted.items()
        }
        (options.serve / "found.json").write_text(json.dumps(found))
    dist.barrier(meet)


def _used() -> tuple[float, float, float]:
    """Processor seconds of this process, with the kernel's for it; how often a thread went to
    sleep; the seconds of all but this thread.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    whole = usage.ru_utime + usage.ru_stime
    return whole, float(usage.ru_nvcsw), whole - time.thread_time()


def _inspect(models: dict[str, Any]) -> None:
    """Raise unless all that exchanged came to the same weights, and what didn't came to others."""
    import torch

    weights = {
        variant: torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        for variant, model in models.items()
    }
    for variant, found in weights.items():
        away = float((found - weights["paceline"]).double().norm() / found.double().norm())
        if (away > LAST) != (variant == "nothing"):
            raise RuntimeError(f"the weights of {variant} are {away:.2e} away from paceline's")


def measure(options: argparse.Namespace, name: str, bandwidth: str) -> dict[str, Any]:
    """The samples of all variants for a model on hosts with links of a bandwidth."""
    from paceline import lab

    with tempfile.TemporaryDirectory() as folder:
        words = [
            "--serve",
            folder,
            "--rounds",
            str(options.rounds),
            "--models",
            name,
            "--buckets",
            *map(str, options.buckets),
        ]
        words += [
            "--optimizer",
            options.optimizer,
            *(["--steps", str(options.steps)] if options.steps else []),
        ]
        with lab.cluster(hosts=HOSTS, workers=WORKERS, bandwidth=bandwidth) as cluster:
            environ = {"OMP_NUM_THREADS": "1"}
            if not options.unmeasured:
                environ["PACELINE_CLUSTER"] = str(Path(folder) / "cluster.json")
                probe(cluster, Path(environ["PACELINE_CLUSTER"]))
            outcome = cluster.run(
                __file__, *words, sync=options.sync, environ=environ, deadline=900
            )
        if outcome.code != 0:
            raise SystemExit(outcome.output)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return found


def judge(name: str, bandwidth: str, found: dict[str, Any]) -> list[Row]:
    """The step against DDP's with its best buckets, and with those of 25 MB where they were
    measured.
    """
    samples, medians = (
        found["samples"],
        {variant: statistics.median(taken) for variant, taken in found["samples"].items()},
    )
    best = min(
        (variant for variant in samples if variant.startswith("ddp")), key=medians.__getitem__
    )
    what = f"{name}, {bandwidth}, {HOSTS} hosts x {WORKERS}"
    bar = LEAST if (bandwidth, name) in BARRED else None
    rows = [
        Row(
            what,
            medians,
            f"step: {best} / paceline",
            ratio(samples[best], samples["paceline"]),
            least=bar,
        )
    ]
    for counted, word in (
        ("used", "processor"),
        ("beside", "processor of other threads"),
        ("switches", "sleeps"),
    ):
        each = {variant: statistics.median(taken) for variant, taken in found[counted].items()}
        compared: Interval = ratio(found[counted][best], found[counted]["paceline"])
        times, unit = (1.0, "") if counted == "switches" else (1e3, " ms")
        shown = ", ".join(f"{variant} {value * times:.0f}{unit}" for variant, value in each.items())
        rows.append(Row(what, {}, f"{word} of a step: {best} / paceline ({shown})", compared))
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "", "hosts", rounds=11)
    parser.add_argument(
        "--bandwidth",
        nargs="+",
        default=["10gbit", "1gbit"],
        help="of each host's link (default %(default)s)",
    )
    parser.add_argument(
        "--models", nargs="+", choices=list(SETUPS), default=["gpt-19m", "gpt-0.9m", "cnn"]
    )
    parser.add_argument(
        "--buckets", nargs="+", type=float, default=[1, 5, 25, 200], help="MB of DDP's buckets"
    )
    parser.add_argument("--steps", type=int, help="steps of a round (default: by model)")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument(
        "--sync", default="AllReduce()", help="paceline's strategy (default %(default)s)"
    )
    parser.add_argument(
        "--unmeasured",
        action="store_true",
        help="give paceline no measured cluster to choose its way by",
    )
    parser.add_argument(
        "--silent", action="store_true", help="paceline's loop without run.log(loss=...)"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(words)
    if options.serve is not None:
        serve(options)
        return
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for bandwidth in options.bandwidth:
        for name in options.models:
            raw[f"{name}, {bandwidth}"] = found = measure(options, name, bandwidth)
            rows += judge(name, bandwidth, found)
    if not report("hosts", rows, options, raw) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
