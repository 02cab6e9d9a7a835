"""Measures a cluster, together with all workers of a run: `pl.probe(run)`.

1. each worker describes itself, and finds the size of matrices      all at once
2. products of matrices, copies                                      all workers of a host at once,
                                                                     hosts of a machine in turns
3. links inside hosts, one pair at a time, then all pairs            hosts of a machine in turns
4. links between hosts, one pair of hosts at a time                  in turns
5. links between hosts, each host sends and receives                 all at once
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import Any, Final

import torch

from paceline.cluster import machine, network
from paceline.cluster.discover import read_timings
from paceline.cluster.topology import Device, DeviceSpeed, HostLink, Interface, Topology
from paceline.comm.group_protocol import Group
from paceline.comm.pairs import Pairs, connect_pairs
from paceline.errors import UsageError
from paceline.session.run import Run, parts_of_run
from paceline.unequal.probe import compute, rounds
from paceline.unequal.probe.dtypes import USUAL, Dtype, check_dtypes
from paceline.unequal.probe.links import LinkFigures, LinkMeter, choose_stream_seconds

COMPUTING: Final = 6.0  # seconds for all products and copies, if hosts share a machine
MOST_COMPUTING: Final = 0.9  # seconds of each host, each time
# number of turns of all hosts of a machine, about: each host has several short turns, as a machine
# is slower at some moments
TURNS: Final = 16
# seconds of each product under a quota of processor time: three periods of 100 ms, and two gaps
SOME_PERIODS: Final = 0.35
LINKING: Final = 6.0  # seconds for all links between hosts
LEAST_LINKING, MOST_LINKING = 0.05, 0.15  # seconds of each direction
INSIDE: Final = 0.06  # seconds of each direction of a pair inside a host
# seconds of a round in which all hosts send: the connections need time to settle at their rates
CROWDED: Final = 0.3


def probe(run: Run, *, dtypes: Sequence[Dtype] = USUAL) -> Topology:
    """Measure the compute of each worker and the speed of each link. Collective.

    >>> with pl.start() as run:
    ...     topology = pl.probe(run)
    ...     run.print(topology.hosts, topology.links)

    It takes less than 20 seconds for 8 workers. Call it before loops or between them.

    Args:
        run: The run.
        dtypes: Dtypes of the matrices that are multiplied, such as those of the training.

    Returns:
        The same measurements on all workers. The devices of a host are in the order of their ranks.
        A link inside a host goes from the host's index to itself.

    Raises:
        UsageError: A dtype can't be measured or differs between workers; a loop over a loader is
            under way; or the run survives losses.
        WorkerLost, DeadlineExceeded: They name the worker that is missing.
    """
    parts = parts_of_run(run)
    if parts.loop.turn is not None:
        raise UsageError(
            "pl.probe(run) is called inside a loop over a loader: "
            "call it before the loop, or after it"
        )
    if parts.survival is not None:
        raise UsageError(
            "pl.probe(run) measures all workers together, and --min-workers lets some go: "
            "leave it out to measure"
        )
    return measure_group(run.group, parts.view.cluster, run.device, dtypes)


def measure_group(
    group: Group, topology: Topology, device: torch.device, dtypes: Sequence[str]
) -> Topology:
    """Measure the workers of a group, which `topology` lists. Collective.

    Each worker computes on its `device`.
    """
    check_dtypes(dtypes)
    dtypes_by_rank = group.gather_objects(list(dtypes), name="probe.dtypes")
    if any(each != dtypes_by_rank[0] for each in dtypes_by_rank):
        other = next(rank for rank, each in enumerate(dtypes_by_rank) if each != dtypes_by_rank[0])
        raise UsageError(
            f"workers ask pl.probe for other dtypes: rank 0 for {dtypes_by_rank[0]}, "
            f"rank {other} for {dtypes_by_rank[other]}; give all the same"
        )
    described = _add_facts(topology, group.gather_objects(_collect_facts(), name="probe.machines"))
    connected = connect_pairs(group, hostnames=described.host_names())
    try:
        probe = _WorkerProbe(group, described, device, dtypes, connected)
        devices = group.gather_objects(asdict(probe.measure_compute()), name="probe.devices")
        figures = group.gather_objects(probe.measure_links(), name="probe.links")
    except BaseException:
        # others may wait for this worker: an abort ends their waits at once
        connected.abort()
        raise
    connected.close()
    ordered = [_choose_device(each) for each in devices]
    hosts = tuple(
        replace(host, devices=tuple(ordered[rank] for rank in host.ranks))
        for host in described.hosts
    )
    # each worker measured the links that begin at it, so together these are all links
    alone, crowded = (
        [LinkFigures(tuple(pair), *rest) for each in figures for pair, *rest in each[part]]
        for part in (0, 1)
    )
    return Topology(hosts, tuple(_merge_links(described, alone, crowded)))


class _WorkerProbe:
    """One worker's part in the measurement."""

    def __init__(
        self,
        group: Group,
        topology: Topology,
        device: torch.device,
        dtypes: Sequence[str],
        connected: Pairs,
    ) -> None:
        self._group, self._topology, self._device, self._dtypes = group, topology, device, dtypes
        self._meter = LinkMeter(connected, read_timings().probe)

    def measure_compute(self) -> Device:
        """Measure this worker's device whenever its host has a turn."""
        sizes = self._group.gather_objects(
            [compute.choose_matrix_length(self._device, dtype) for dtype in self._dtypes],
            name="probe.sizes",
        )
        kinds = self._group.gather_objects(self._device.type, name="probe.kinds")
        alike = [each for each, kind in zip(sizes, kinds, strict=True) if kind == self._device.type]
        # devices of one kind are compared by the same matrices
        sides = [max(column) for column in zip(*alike, strict=True)]
        waves = rounds.plan_compute_waves(self._topology)
        limited = any(host.quota is not None for host in self._topology.hosts)
        turns = waves * max(1, (TURNS // 2 if limited else TURNS) // len(waves))
        seconds = min(MOST_COMPUTING, COMPUTING / len(turns)) / (len(sides) + 1)
        if limited:
            seconds = max(seconds, SOME_PERIODS)
        own_host, clock, copies = (
            self._topology.host_by_rank()[self._group.rank],
            machine.ProcessorClock(0.0, 0.0, ""),
            list[float](),
        )
        # one pair for all turns: allocating this memory takes longer than a copy in it
        pair = compute.make_copy_pair(self._device)
        tries: dict[str, list[tuple[DeviceSpeed, float]]] = {dtype: [] for dtype in self._dtypes}
        # all workers meet before each measurement, so only the hosts of the wave are busy
        for wave in turns:
            for dtype, side in zip(self._dtypes, sides, strict=True):
                self._meter.meet_workers()
                if own_host in wave:
                    tries[dtype].append(
                        compute.measure_products(self._device, dtype, side, seconds)
                    )
                    clock = machine.read_clock()
            self._meter.meet_workers()
            if own_host in wave:
                copies.append(compute.measure_copies(pair, seconds))
        del pair  # before any worker measures its free memory
        self._meter.meet_workers()
        # a disturbance can only slow a product down, so the fastest try is the truest
        best = [max(each, key=lambda tried: tried[0].flops) for each in tries.values()]
        return self._describe_device(
            [speed for speed, _ in best],
            max(copies),
            statistics.median(used for _, used in best),
            clock,
        )

    def _describe_device(
        self,
        speeds: Sequence[DeviceSpeed],
        copied: float,
        attended: float,
        clock: machine.ProcessorClock,
    ) -> Device:
        device = self._device
        cuda = device.type == "cuda"
        memory = compute.find_free_memory(device)
        return Device(
            device.type,
            device.index or 0,
            torch.cuda.get_device_name(device) if cuda else machine.read_processor_name(),
            memory.total,
            memory.free,
            torch.get_num_threads(),
            tuple(speeds),
            copied,
            attended,
            *(machine.ProcessorClock(0.0, 0.0, "") if cuda else clock),
        )

    def measure_links(self) -> tuple[list[LinkFigures], list[LinkFigures]]:
        """Measure the links that begin at this worker: alone, and while all hosts send."""
        topology, meter = self._topology, self._meter
        between = rounds.plan_between_rounds(topology)
        seconds = min(MOST_LINKING, max(LEAST_LINKING, LINKING / (1.5 * max(1, len(between)))))
        alone = meter.measure_alone(rounds.plan_inside_rounds(topology), INSIDE)
        alone += meter.measure_alone(between, seconds)
        crowded = meter.measure_crowded(rounds.plan_crowded_inside(topology), INSIDE)
        # the round must be longer for slow links, and equally long on all workers
        slowest = max(
            self._group.gather_objects(
                max((each.latency for each in alone), default=0.0), name="probe.latency"
            )
        )
        crowded += meter.measure_crowded(
            rounds.plan_crowded_between(topology), choose_stream_seconds(slowest, CROWDED)
        )
        meter.meet_workers()
        return alone, crowded


def _collect_facts() -> dict[str, Any]:
    """Collect facts about this machine that need no measurement."""
    return {
        "machine": machine.identify_boot(),
        "machine_cores": os.cpu_count() or 1,
        "quota": machine.read_cpu_quota(),
        "interfaces": [asdict(each) for each in network.describe_interfaces()],
    }


def _add_facts(topology: Topology, facts: Sequence[dict[str, Any]]) -> Topology:
    """Complete the hosts of a topology by the facts from the first worker of each."""
    hosts = []
    for host in topology.hosts:
        host_facts = facts[host.ranks[0]]
        hosts.append(
            replace(
                host,
                **{
                    **host_facts,
                    "interfaces": tuple(Interface(**each) for each in host_facts["interfaces"]),
                },
            )
        )
    return Topology(tuple(hosts))


def _choose_device(given: dict[str, Any]) -> Device:
    return Device(**{**given, "speeds": tuple(DeviceSpeed(**each) for each in given["speeds"])})


def _merge_links(
    topology: Topology, alone: Iterable[LinkFigures], crowded: Iterable[LinkFigures]
) -> Iterable[HostLink]:
    """Yield one link for each pair of hosts: the median of its pairs of workers."""
    host_of, by_hosts = (
        topology.host_by_rank(),
        dict[tuple[int, int], tuple[list[LinkFigures], list[LinkFigures]]](),
    )
    for column, figures in ((0, alone), (1, crowded)):
        for each in figures:
            hosts = (host_of[each.pair[0]], host_of[each.pair[1]])
            by_hosts.setdefault(hosts, ([], []))[column].append(each)
    for source, target in sorted(by_hosts):
        single, many = by_hosts[source, target]
        latency, rate = (
            statistics.median(getattr(each, name) for each in single)
            for name in ("latency", "rate")
        )
        together = statistics.median(each.rate for each in many) if many else 0.0
        yield HostLink(source, target, latency, rate, together)
