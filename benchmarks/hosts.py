"""Measures training steps on several hosts of a lab: paceline, DDP, and no exchange.

    python benchmarks/hosts.py [--bandwidth 10gbit 1gbit] [--models gpt-19m gpt-0.9m cnn]
                               [--buckets 1 5 25 200]

All programs run in the same processes, with models of their own that begin equal, and take turns.
DDP is measured with several sizes of buckets. Its best size is chosen after all rounds, in DDP's
favour.

The hosts of a lab share the cores of one machine. So the processor seconds of a step are measured
as well, those of the kernel included: on a fast link they decide. The threads that exchange beside
the training are also counted alone.

The cluster is measured first, and paceline chooses its way between hosts by the file.
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
LEAST = 1.0  # lowest ratio of DDP's step, with its best buckets, to ours
BARRED = {("10gbit", "gpt-19m"), ("10gbit", "gpt-0.9m"), ("1gbit", "gpt-0.9m"), ("1gbit", "cnn")}


def ddp(name: str, options: argparse.Namespace, bucket_mb: float) -> tuple[Any, Iterator[None]]:
    """Make the loop under DistributedDataParallel on Gloo, in a group of its own.

    Args:
        name: Name of the model.
        options: Arguments of the benchmark.
        bucket_mb: Size of buckets in MB.

    Returns:
        The model, and an iterator that trains a step for each item.
    """
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
    """Make the loop without an exchange. Returns the same as `ddp`."""
    import torch.distributed as dist

    model, loss, data = build(name)
    return model, loop(
        model,
        loss,
        dealt(data, name, dist.get_rank(), dist.get_world_size()),
        optimizer_of(model, options),
    )


def serve(options: argparse.Namespace) -> None:
    """Run a worker of the lab: train all variants in turn. Rank 0 writes the samples."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    name = options.models[0]
    ours = paceline(name, 0, HOSTS * WORKERS, options)
    meeting_group = dist.new_group(backend="gloo")
    programs = {f"ddp-{mb:g}": ddp(name, options, mb) for mb in options.buckets} | {
        "nothing": alone(name, options),
        "paceline": ours,
    }
    processor_seconds: dict[str, list[float]] = {variant: [] for variant in programs}
    sleeps: dict[str, list[float]] = {variant: [] for variant in programs}
    other_thread_seconds: dict[str, list[float]] = {variant: [] for variant in programs}

    # All ranks take turns together, and each sample is the same on all of them.
    def turn(variant: str) -> float:
        _, program = programs[variant]
        next(program)  # warm the caches, and bring the workers together
        steps = options.steps or SETUPS[name].steps
        dist.barrier(meeting_group)
        before, start = _used(), time.perf_counter()
        for _ in range(steps):
            next(program)
        step_time = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        after = _used()
        counts = torch.tensor(
            [later - earlier for earlier, later in zip(before, after, strict=True)],
            dtype=torch.float64,
        )
        # The slowest worker has the time of a step. Processor seconds are added up.
        dist.all_reduce(step_time, dist.ReduceOp.MAX, meeting_group)
        dist.all_reduce(counts, group=meeting_group)
        processor_seconds[variant].append(counts[0].item() / steps)
        sleeps[variant].append(counts[1].item() / steps)
        other_thread_seconds[variant].append(counts[2].item() / steps)
        return float(step_time[0]) / steps

    samples = interleave(
        {variant: (lambda variant=variant: turn(variant)) for variant in programs},
        options.rounds,
        warmup=2,
    )
    _inspect({variant: model for variant, (model, _) in programs.items()})
    if dist.get_rank() == 0:
        counted = {"used": processor_seconds, "switches": sleeps, "beside": other_thread_seconds}
        # The first two rounds were for warming up.
        results = {"samples": samples} | {
            what: {variant: values[2:] for variant, values in by_variant.items()}
            for what, by_variant in counted.items()
        }
        (options.serve / "found.json").write_text(json.dumps(results))
    dist.barrier(meeting_group)


def _used() -> tuple[float, float, float]:
    """Read the resources that this process has used.

    Returns processor seconds, the number of times that a thread went to sleep, and the processor
    seconds of all threads but this one.
    """
    usage = resource.getrusage(resource.RUSAGE_SELF)
    seconds = usage.ru_utime + usage.ru_stime
    return seconds, float(usage.ru_nvcsw), seconds - time.thread_time()


def _inspect(models: dict[str, Any]) -> None:
    """Raise `RuntimeError` unless all programs with an exchange have the same weights.

    The weights of the program without an exchange have to differ.
    """
    import torch

    weights = {
        variant: torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
        for variant, model in models.items()
    }
    for variant, values in weights.items():
        distance = float((values - weights["paceline"]).double().norm() / values.double().norm())
        # Without an exchange weights have to differ. Otherwise the check would show nothing.
        if (distance > LAST) != (variant == "nothing"):
            raise RuntimeError(f"the weights of {variant} are {distance:.2e} away from paceline's")


def measure(options: argparse.Namespace, name: str, bandwidth: str) -> dict[str, Any]:
    """Measure all variants in the lab.

    Args:
        options: Arguments of the benchmark.
        name: Name of the model.
        bandwidth: Bandwidth of the hosts' links.

    Returns:
        All samples.
    """
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
                # paceline reads the measured cluster from this file.
                environ["PACELINE_CLUSTER"] = str(Path(folder) / "cluster.json")
                probe(cluster, Path(environ["PACELINE_CLUSTER"]))
            outcome = cluster.run(
                __file__, *words, sync=options.sync, environ=environ, deadline=900
            )
        if outcome.code != 0:
            raise SystemExit(outcome.output)
        results: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
        return results


def judge(name: str, bandwidth: str, found: dict[str, Any]) -> list[Row]:
    """Make rows that compare the step with that of DDP with its best buckets.

    Args:
        name: Name of the model.
        bandwidth: Bandwidth of the hosts' links.
        found: All samples.
    """
    samples, medians = (
        found["samples"],
        {variant: statistics.median(values) for variant, values in found["samples"].items()},
    )
    # The best size of DDP's buckets is known only now, which is in DDP's favour.
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
        counted_medians = {
            variant: statistics.median(values) for variant, values in found[counted].items()
        }
        compared: Interval = ratio(found[counted][best], found[counted]["paceline"])
        factor, unit = (1.0, "") if counted == "switches" else (1e3, " ms")
        shown = ", ".join(
            f"{variant} {value * factor:.0f}{unit}" for variant, value in counted_medians.items()
        )
        rows.append(Row(what, {}, f"{word} of a step: {best} / paceline ({shown})", compared))
    return rows


def main(words: Sequence[str] | None = None) -> None:
    parser = arguments(__doc__ or "", "hosts", rounds=11)
    parser.add_argument(
        "--bandwidth",
        nargs="+",
        default=["10gbit", "1gbit"],
        help="bandwidth of each host's link (default %(default)s)",
    )
    parser.add_argument(
        "--models", nargs="+", choices=list(SETUPS), default=["gpt-19m", "gpt-0.9m", "cnn"]
    )
    parser.add_argument(
        "--buckets",
        nargs="+",
        type=float,
        default=[1, 5, 25, 200],
        help="sizes of DDP's buckets in MB",
    )
    parser.add_argument("--steps", type=int, help="steps of a round (default: by model)")
    parser.add_argument("--optimizer", choices=["sgd", "adamw"], default="sgd")
    parser.add_argument(
        "--sync", default="AllReduce()", help="paceline's strategy (default %(default)s)"
    )
    parser.add_argument(
        "--unmeasured",
        action="store_true",
        help="don't measure the cluster for paceline",
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
            raw[f"{name}, {bandwidth}"] = samples = measure(options, name, bandwidth)
            rows += judge(name, bandwidth, samples)
    if not report("hosts", rows, options, raw) and options.check:
        sys.exit(1)


if __name__ == "__main__":
    main()
