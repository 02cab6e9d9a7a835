"""The ways to train a script that are compared: which workers, which shares, which strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from paceline.parallel.pipelining.schedules import CHUNKED_SCHEDULES
from paceline.planner.exchange_cost import EXACT, INT8, WireCodec
from paceline.planner.model_profile import PossibleCuts
from paceline.planner.planned_cluster import PlannedCluster, PlannedHost

Kind = Literal[
    "one worker",
    "data parallel",
    "sharded",
    "tensor",
    "pipeline",
    "int8",
    "local SGD",
    "activation checkpoints",
]
ROUND_STEPS: Final = (8, 32)  # steps between two exchanges of local SGD
LOSSY_KINDS: Final = ("int8", "local SGD")
# Schedules that are tried, with their stages on each worker.
TRIED_SCHEDULES: Final = (("1f1b", 1), ("zero-bubble", 1), ("interleaved", 2))
MOST_STAGES: Final = 8  # workers of a pipeline
STAGE_MICRO_BATCHES: Final = (2, 4)  # micro-batches that are tried, for each worker of a pipeline


WHOLE: Final = PossibleCuts()


@dataclass(frozen=True)
class Candidate:
    """One way to train.

    Attributes:
        kind: The kind of way. The best of each kind is shown.
        cluster: The hosts and workers that take part.
        host_indices: Indices of these hosts in the whole cluster.
        codec: How gradients are written between hosts.
        every: Steps between two exchanges.
        by_speed: Whether shares follow the workers' speeds. If not, they are equal.
        zero: Stage of ZeRO: 1 divides the state of optimizers, 2 gradients as well, 3 parameters as
            well. 0: none.
        tensor: Workers that divide each layer.
        stages: Workers of a pipeline.
        schedule: Schedule of the pipeline.
        chunks: Stages on each worker of the pipeline.
        micro_batches: Micro-batches of a step of the pipeline.
        split: Layers of each stage. Empty until it is priced.
        recompute: Whether the script puts its layers into activation checkpoints.
        units: Patterns of the layers that `shard(zero=3)` gathers one by one.
    """

    kind: Kind
    cluster: PlannedCluster
    host_indices: tuple[int, ...]
    codec: WireCodec = EXACT
    every: int = 1
    by_speed: bool = False
    zero: int = 0
    tensor: int = 1
    stages: int = 1
    schedule: str = "1f1b"
    chunks: int = 1
    micro_batches: int = 1
    split: tuple[int, ...] = ()
    recompute: bool = False
    units: tuple[str, ...] = ()

    @property
    def replicas(self) -> int:
        """Groups of workers that have a whole model each."""
        return self.cluster.workers // (self.tensor * self.stages)

    @property
    def mesh(self) -> str:
        """The mesh, as `--mesh` takes it. Empty: that of the cut, or none."""
        sizes = {"data": self.replicas, "stage": self.stages, "tensor": self.tensor}
        several = [f"{name}={size}" for name, size in sizes.items() if size > 1]
        return ", ".join(several) if self.tensor * self.stages > 1 else ""

    @property
    def cut(self) -> str:
        """The cut of the model, as `--cut` takes it. Empty: none."""
        if self.tensor > 1:
            return 'tensor("auto")'
        if self.stages > 1:
            # Other schedules have a fixed number of stages on each worker.
            chunks = f", chunks={self.chunks}" if self.schedule == "interleaved" else ""
            return (
                f'pipeline("auto", schedule="{self.schedule}", micro_batches={self.micro_batches}'
                f"{chunks}, split={list(self.split)})"
            )
        units = repr(self.units[0] if len(self.units) == 1 else self.units) + ", "
        return f"shard({units if self.units else ''}zero={self.zero})" if self.zero else ""

    @property
    def sync(self) -> str:
        """The strategy, as `--sync` takes it and summaries write it. Empty: AllReduce, or none."""
        if self.every > 1:
            return f"LocalSGD({self.every})"
        return f"AllReduce(codec={self.codec.name})" if self.codec.name else ""

    @property
    def shares(self) -> str:
        """The shares, as `--shares` takes them. Empty: equal."""
        return "auto" if self.by_speed else ""

    def describe(self) -> str:
        """Describe the workers and the strategy in a few words."""
        hosts, workers = len(self.cluster.hosts), self.cluster.workers
        where = f"{workers} worker{'s' if workers > 1 else ''}"
        if hosts > 1:
            where += f" on {hosts} hosts"
        if self.stages > 1:
            cut = f"{self.mesh}, {self.schedule} of {self.micro_batches} micro-batches"
        else:
            cut = self.mesh or self.cut
        how = [words for words in (self.sync, cut) if words]
        how += ["activation checkpoints"] if self.recompute else []
        how += ["shares by speed"] if self.by_speed else []
        return ", ".join([where, *how])


def list_candidates(
    cluster: PlannedCluster, *, lossy: bool, cuts: PossibleCuts = WHOLE
) -> Iterator[Candidate]:
    """Yield all ways to train on a cluster.

    Hosts are taken in the order of their speed, the fastest first: one of them with each number
    of workers, then two, and so on. Within a host workers come one by one.

    Args:
        cluster: All hosts.
        lossy: Whether strategies may be used that change the loss curve.
    """
    order = sorted(range(len(cluster.hosts)), key=lambda i: (-_speed(cluster.hosts[i]), i))
    best = order[0]
    for workers in range(1, cluster.hosts[best].workers + 1):
        part = take_workers(cluster, {best: workers})
        yield from _vary_strategy(part, (best,), lossy=lossy)
        yield from _vary_cut(part, (best,), cuts)
    for count in range(2, len(order) + 1):
        chosen = tuple(sorted(order[:count]))
        full = {index: cluster.hosts[index].workers for index in chosen}
        whole = take_workers(cluster, full)
        yield from _vary_strategy(whole, chosen, lossy=lossy)
        yield from _vary_cut(whole, chosen, cuts)
        if sum(full.values()) > len(chosen):
            alone = take_workers(cluster, dict.fromkeys(chosen, 1))
            yield from _vary_strategy(alone, chosen, lossy=lossy)
            yield from _vary_cut(alone, chosen, cuts)


def take_workers(cluster: PlannedCluster, workers: Mapping[int, int]) -> PlannedCluster:
    """Take some workers of some hosts, which divide the cores of their machine.

    Args:
        cluster: All hosts. If all workers of all hosts are taken, their threads stay as they are.
        workers: Number of workers of each host that is taken, by its index.
    """
    if workers == {index: host.workers for index, host in enumerate(cluster.hosts)}:
        return cluster
    hosts = [
        replace(cluster.hosts[index], workers=count) for index, count in sorted(workers.items())
    ]
    return replace(cluster, hosts=tuple(_deal_threads(host, hosts) for host in hosts))


def _deal_threads(host: PlannedHost, hosts: Sequence[PlannedHost]) -> PlannedHost:
    """Give each worker as many threads as `paceline run` would."""
    if host.quota is not None:
        threads = max(1, int(host.quota) // host.workers)
    else:
        together = [each for each in hosts if each is host or each.machine == host.machine]
        sharing = sum(each.workers for each in together) if host.machine else host.workers
        threads = max(1, int(host.cores) // sharing)
    # A worker with all threads is as fast in products as all that shared them.
    scale = threads / host.threads
    flops = tuple(each * scale for each in host.flops[: host.workers])
    return replace(host, threads=threads, flops=flops)


def _vary_strategy(
    cluster: PlannedCluster, indices: Sequence[int], *, lossy: bool
) -> Iterator[Candidate]:
    chosen = tuple(indices)
    if cluster.workers == 1:
        yield Candidate("one worker", cluster, chosen)
        return
    for by_speed in (False, True) if _is_unequal(cluster) else (False,):
        base = Candidate("data parallel", cluster, chosen, by_speed=by_speed)
        yield base
        # Shares by speed and cuts together aren't priced.
        if not by_speed:
            for zero in (1, 2):
                yield replace(base, kind="sharded", zero=zero)
        if lossy:
            if len(cluster.hosts) > 1:
                yield replace(base, kind="int8", codec=INT8)
            for every in ROUND_STEPS:
                yield replace(base, kind="local SGD", every=every)


def _vary_cut(
    cluster: PlannedCluster, indices: Sequence[int], cuts: PossibleCuts
) -> Iterator[Candidate]:
    """Yield the ways in which workers have parts of the model, and those with checkpoints."""
    base = Candidate("data parallel", cluster, tuple(indices))
    count = cluster.workers
    ways = [base, *(replace(base, kind="sharded", zero=zero) for zero in (1, 2) if count > 1)]
    # Workers that divide layers exchange all the time, so they are on one host.
    ways += [
        replace(base, kind="tensor", tensor=size)
        for size in cuts.tensor_sizes
        if size > 1 and not any(host.workers % size for host in cluster.hosts)
    ]
    for stages in range(2, min(count, MOST_STAGES, cuts.layers) + 1):
        ways += [] if count % stages else _list_pipelines(base, stages, cuts)
    yield from (each for each in ways if each.tensor * each.stages > 1)
    for units in cuts.gathered_units if count > 1 else ():
        yield replace(base, kind="sharded", zero=3, units=units)
    if cuts.checkpoints:
        yield from (replace(each, kind="activation checkpoints", recompute=True) for each in ways)


def _list_pipelines(base: Candidate, stages: int, cuts: PossibleCuts) -> list[Candidate]:
    """List the pipelines with a number of stages."""
    replicas = base.cluster.workers // stages
    return [
        replace(
            base,
            kind="pipeline",
            stages=stages,
            schedule=schedule,
            chunks=chunks,
            micro_batches=count,
        )
        for schedule, chunks in cuts.schedules or TRIED_SCHEDULES
        for count in cuts.micro_batches or [stages * times for times in STAGE_MICRO_BATCHES]
        if stages * chunks <= cuts.layers
        and replicas * count <= cuts.samples
        and (schedule not in CHUNKED_SCHEDULES or count >= stages)
    ]


def _speed(host: PlannedHost) -> float:
    return sum(host.flops) if host.flops else min(host.demand, host.cores)


def _is_unequal(cluster: PlannedCluster) -> bool:
    speeds = [flops for host in cluster.hosts for flops in host.flops]
    per_worker = [host.demand / host.workers for host in cluster.hosts for _ in range(host.workers)]
    values = speeds if len(speeds) == cluster.workers else per_worker
    return max(values) > 1.1 * min(values)
