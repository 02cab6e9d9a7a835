"""Turns what a user gives `paceline plan` into data: clusters, changes of them, sizes of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from paceline.cluster import topology_file
from paceline.cluster.machine import count_cores
from paceline.comm.schedule import LinkSpeed
from paceline.errors import UsageError
from paceline.formatting import format_as_call
from paceline.lab import description
from paceline.lab.description import Description, Host
from paceline.notation import parse_strategy
from paceline.planner.planned_cluster import (
    UNLIMITED,
    PlannedCluster,
    PlannedHost,
    convert_topology,
    describe_this_host,
)

# Bytes of tensors for each byte that travels: the rest are headers of TCP, IP and Ethernet.
PAYLOAD: Final = 0.94
LATENCY: Final = 100e-6  # seconds, of a switch and two network stacks


def choose_cluster(workers: int | None, cluster: str | None) -> PlannedCluster:
    """Choose the cluster: workers of this host, a measured file, or a described one.

    Raises:
        UsageError: Neither or both are given, or the file is wrong.
    """
    if (workers is None) == (cluster is None):
        raise UsageError("give either --workers N, for this host, or --cluster FILE")
    if workers is not None:
        if not 1 <= workers <= 1000:
            raise UsageError(f"--workers {workers}: give a number from 1 to 1000")
        return describe_this_host(workers, count_cores())
    assert cluster is not None
    if cluster.endswith(".json"):
        topology = topology_file.read_topology(Path(cluster))
        kinds = {device.kind for host in topology.hosts for device in host.devices}
        if kinds - {"cpu"}:
            raise UsageError(
                f"{cluster} has devices of kind {', '.join(sorted(kinds))}: scripts are planned "
                "for CPUs, and transformers given by numbers for GPUs"
            )
        return convert_topology(topology, cluster)
    return convert_description(description.find_cluster(cluster), cluster)


def convert_description(cluster: Description, source: str) -> PlannedCluster:
    """Convert a described cluster. Its hosts are machines whose cores are as fast as here."""
    if cluster.racks:
        raise UsageError(
            f"{source} has racks, whose shared links aren't planned: leave them out, or measure "
            "the cluster with `paceline probe`"
        )
    return PlannedCluster(tuple(_convert_host(host) for host in cluster.hosts), source)


def _convert_host(host: Host) -> PlannedHost:
    cores = float(count_cores()) if host.processors is None else host.processors
    threads = max(1, int(cores) // host.workers)
    # A host with less than a core for each thread gives each a part of the time.
    quota = cores if host.workers * threads > cores else None
    return PlannedHost(
        host.name,
        host.workers,
        threads,
        max(cores, 1.0),
        quota,
        (),
        _convert_rate(host.up, host.delay),
        _convert_rate(host.down, host.delay),
    )


def _convert_rate(bits_per_second: int | None, delay: float | None) -> LinkSpeed:
    if bits_per_second is None:
        return UNLIMITED._replace(latency_seconds=UNLIMITED.latency_seconds + (delay or 0.0))
    return LinkSpeed(LATENCY + (delay or 0.0), bits_per_second / 8 * PAYLOAD)


def split_changes(changes: Sequence[str], sync: str | None) -> tuple[list[str], str | None]:
    """Split `sync=STRATEGY` off changes, which is another way to write `--sync STRATEGY`.

    Returns:
        The other changes, and the strategy as candidates have it: "" for AllReduce(), None if there
        is none.

    Raises:
        UsageError: Two strategies are given.
    """
    strategies = [change.partition("=")[2] for change in changes if change.startswith("sync=")]
    given = strategies + ([] if sync is None else [sync])
    if len(given) > 1:
        raise UsageError(f"give one strategy to plan, not {' and '.join(given)}")
    kept = [change for change in changes if not change.startswith("sync=")]
    if not given:
        return kept, None
    strategy = format_as_call(parse_strategy(given[0]))
    return kept, "" if strategy == "AllReduce()" else strategy


def apply_changes(cluster: PlannedCluster, changes: Sequence[str]) -> PlannedCluster:
    """Apply changes such as `link=10gbit`, `hosts=4` or `workers=2` (of each host).

    Raises:
        UsageError: A change is unknown or impossible.
    """
    for change in changes:
        name, equals, value = change.partition("=")
        if not equals or name not in ("link", "hosts", "workers"):
            raise UsageError(
                f"--what-if {change!r}: give link=RATE, hosts=N, workers=N or sync=STRATEGY, such "
                "as link=10gbit"
            )
        cluster = _apply_change(cluster, name, value)
    return cluster


def _apply_change(cluster: PlannedCluster, name: str, value: str) -> PlannedCluster:
    hosts = cluster.hosts
    if name == "link":
        link = _convert_rate(description.parse_rate(value, "--what-if link"), None)
        changed = tuple(
            replace(
                host,
                up=LinkSpeed(host.up.latency_seconds, link.bytes_per_second),
                down=LinkSpeed(host.down.latency_seconds, link.bytes_per_second),
            )
            for host in hosts
        )
        return replace(cluster, hosts=changed)
    if not (value.isascii() and value.isdecimal() and 1 <= int(value) <= 1000):
        raise UsageError(f"--what-if {name}={value}: give a number from 1 to 1000")
    count = int(value)
    if name == "hosts":
        # More hosts are like the last one, and each is a machine of its own.
        more = tuple(
            replace(hosts[-1], name=f"{hosts[-1].name}+{index}", machine="")
            for index in range(1, count - len(hosts) + 1)
        )
        return replace(cluster, hosts=(*hosts[:count], *more))
    changed = tuple(
        replace(
            host,
            workers=count,
            threads=max(1, host.workers * host.threads // count),
            flops=(),
        )
        for host in hosts
    )
    return replace(cluster, hosts=changed)


def parse_memory(text: str | None) -> float | None:
    """Parse a size such as `8GB`. None stays None."""
    if text is None:
        return None
    units = {"KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
    for unit, size in units.items():
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdecimal() and float(number) > 0:
            return float(number) * size
    raise UsageError(f"--memory {text}: give a size such as 8GB or 512MiB")
