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

COMPUTING: Final = 6.0  # seconds for all products and copies, where hosts share a machine
MOST_COMPUTING: Final = 0.9  # seconds of each host, each time
# of all hosts of a machine, about: several short ones for each, as a machine is slower at some
# moments
TURNS: Final = 16
# seconds of each product where a quota holds: three periods of 100 ms, and two gaps between
SOME_PERIODS: Final = 0.35
LINKING: Final = 6.0  # seconds for all links between hosts
LEAST_LINKING, MOST_LINKING = 0.05, 0.15  # seconds of each direction
INSIDE: Final = 0.06  # seconds of each direction of a pair inside a host
# seconds of a round in which all hosts send: several connections have to find their paces
CROWDED: Final = 0.3


def probe(run: Run, *, dtypes: Sequence[Dtype] = USUAL) -> Topology:
    """Measure the compute of each worker and the speed of each link. Collective.

    >>> with pl.start() as run:
    ...     found = pl.probe(run)
    ...     run.print(found.hosts, found.links)

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
            "leave it out where you measure"
        )
    return measure_group(run.group, parts.view.cluster, run.device, dtypes)


def measure_group(
    group: Group, topology: Topology, device: torch.device, dtypes: Sequence[str]
) -> Topology:
    """Measure the workers of a group, which are those of `topology`; each computes on its `device`.

    Collective.
    """
    check_dtypes(dtypes)
    asked = group.gather_objects(list(dtypes), name="probe.dtypes")
    if any(each != asked[0] for each in asked):
        other = next(rank for rank, each in enumerate(asked) if each != asked[0])
        raise UsageError(
            f"workers ask pl.probe for other dtypes: rank 0 for {asked[0]}, rank {other} for "
            f"{asked[other]}; give all the same"
        )
    known = _add_facts(topology, group.gather_objects(_collect_facts(), name="probe.machines"))
    connected = connect_pairs(group, hostnames=known.host_names())
    try:
        found = _WorkerProbe(group, known, device, dtypes, connected)
        devices = group.gather_objects(asdict(found.measure_compute()), name="probe.devices")
        figures = group.gather_objects(found.measure_links(), name="probe.links")
    except BaseException:
        connected.abort()
        raise
    connected.close()
    ordered = [_choose_device(each) for each in devices]
    hosts = tuple(
        replace(host, devices=tuple(ordered[rank] for rank in host.ranks)) for host in known.hosts
    )
    alone, crowded = (
        [LinkFigures(tuple(pair), *rest) for each in figures for pair, *rest in each[part]]
        for part in (0, 1)
    )
    return Topology(hosts, tuple(_merge_links(known, alone, crowded)))


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
        """Measure this worker's device, when it is its host's turn."""
        sizes = self._group.gather_objects(
            [compute.choose_matrix_length(self._device, dtype) for dtype in self._dtypes],
            name="probe.sizes",
        )
        kinds = self._group.gather_objects(self._device.type, name="probe.kinds")
        alike = [each for each, kind in zip(sizes, kinds, strict=True) if kind == self._device.type]
        # devices of one kind are compared by the same matrices
        sides = [max(column) for column in zip(*alike, strict=True)]
        waves = rounds.plan_compute_waves(self._topology)
        held = any(host.quota is not None for host in self._topology.hosts)
        turns = waves * max(1, (TURNS // 2 if held else TURNS) // len(waves))
        seconds = min(MOST_COMPUTING, COMPUTING / len(turns)) / (len(sides) + 1)
        if held:
            seconds = max(seconds, SOME_PERIODS)
        mine, clock, copies = (
            self._topology.host_by_rank()[self._group.rank],
            machine.ProcessorClock(0.0, 0.0, ""),
            list[float](),
        )
        # for all turns: a system takes longer to give such memory than a copy in it takes
        pair = compute.make_copy_pair(self._device)
        tries: dict[str, list[tuple[DeviceSpeed, float]]] = {dtype: [] for dtype in self._dtypes}
        for wave in turns:
            for dtype, side in zip(self._dtypes, sides, strict=True):
                self._meter.meet_workers()
                if mine in wave:
                    tries[dtype].append(
                        compute.measure_products(self._device, dtype, side, seconds)
                    )
                    clock = machine.read_clock()
            self._meter.meet_workers()
            if mine in wave:
                copies.append(compute.measure_copies(pair, seconds))
        del pair  # before anybody asks how much memory is free
        self._meter.meet_workers()
        # what disturbs makes slower, never faster
        best = [max(each, key=lambda found: found[0].flops) for each in tries.values()]
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
        """Measure the links that begin here: alone, and while others send as well."""
        topology, meter = self._topology, self._meter
        between = rounds.plan_between_rounds(topology)
        seconds = min(MOST_LINKING, max(LEAST_LINKING, LINKING / (1.5 * max(1, len(between)))))
        alone = meter.measure_alone(rounds.plan_inside_rounds(topology), INSIDE)
        alone += meter.measure_alone(between, seconds)
        crowded = meter.measure_crowded(rounds.plan_crowded_inside(topology), INSIDE)
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
    """Collect the facts of this machine that need no measurement."""
    return {
        "machine": machine.identify_boot(),
        "machine_cores": os.cpu_count() or 1,
        "quota": machine.read_cpu_quota(),
        "interfaces": [asdict(each) for each in network.describe_interfaces()],
    }


def _add_facts(topology: Topology, facts: Sequence[dict[str, Any]]) -> Topology:
    """Return the topology with what the first worker of each host knows of it."""
    hosts = []
    for host in topology.hosts:
        known = facts[host.ranks[0]]
        hosts.append(
            replace(
                host,
                **{**known, "interfaces": tuple(Interface(**each) for each in known["interfaces"])},
            )
        )
    return Topology(tuple(hosts))


def _choose_device(given: dict[str, Any]) -> Device:
    return Device(**{**given, "speeds": tuple(DeviceSpeed(**each) for each in given["speeds"])})


def _merge_links(
    topology: Topology, alone: Iterable[LinkFigures], crowded: Iterable[LinkFigures]
) -> Iterable[HostLink]:
    """Yield the link of each pair of hosts; inside a host the median of its pairs."""
    where, found = (
        topology.host_by_rank(),
        dict[tuple[int, int], tuple[list[LinkFigures], list[LinkFigures]]](),
    )
    for place, figures in ((0, alone), (1, crowded)):
        for each in figures:
            found.setdefault((where[each.pair[0]], where[each.pair[1]]), ([], []))[place].append(
                each
            )
    for source, target in sorted(found):
        single, many = found[source, target]
        latency, rate = (
            statistics.median(getattr(each, name) for each in single)
            for name in ("latency", "rate")
        )
        together = statistics.median(each.rate for each in many) if many else 0.0
        yield HostLink(source, target, latency, rate, together)
