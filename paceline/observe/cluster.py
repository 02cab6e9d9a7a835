"""Describes a measured cluster: a line for each worker, and a matrix of the links between hosts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cluster.topology import Device, HostRanks, Topology
from paceline.formatting import counted, sized
from paceline.unequal.probe.oddities import oddities, rated


def describe(topology: Topology) -> str:
    """Write what was measured as text, and below it what is odd."""
    dtypes = list(
        dict.fromkeys(
            speed.dtype
            for host in topology.hosts
            for device in host.devices
            for speed in device.speeds
        )
    )
    parts = [
        _titled(
            f"{counted(topology.size, 'worker')} on {counted(len(topology.hosts), 'host')}",
            _workers(topology, dtypes),
        )
    ]
    if topology.links:
        text = (
            "links, from the host of the line to that of the column: latency, what a worker sends "
            "alone, and while all hosts send"
        )
        parts.append(_titled(text, _links(topology)))
    odd = oddities(topology)
    parts.append(
        "\n".join(["what is odd:", *(f"- {line}" for line in odd)]) if odd else "nothing is odd"
    )
    return "\n\n".join(parts)


def _titled(title: str, rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _workers(topology: Topology, dtypes: Sequence[str]) -> list[list[str]]:
    relative = topology.speeds(dtypes[0]) if dtypes else ()
    rows = [
        [
            "rank",
            "host",
            "device",
            "computes with",
            *(f"{dtype} GFLOP/s" for dtype in dtypes),
            "of fastest",
            "copies",
            "memory free",
        ]
    ]
    for host in topology.hosts:
        for rank, device in zip(host.ranks, host.devices, strict=False):
            speeds = [f"{device.flops(dtype) / 1e9:.3g}" for dtype in dtypes]
            part = f"{relative[rank]:.2f}" if relative else "-"
            memory = f"{sized(device.free_bytes)} of {sized(device.memory_bytes)}"
            copied = f"{device.copied_bytes_per_second / 1e9:.3g} GB/s"
            rows.append(
                [
                    str(rank),
                    host.name,
                    _device(device),
                    _threads(host, device),
                    *speeds,
                    part,
                    copied,
                    memory,
                ]
            )
    return rows


def _device(device: Device) -> str:
    place = device.kind if device.kind == "cpu" else f"{device.kind}:{device.index}"
    return f"{place} {device.name}".strip()


def _threads(host: HostRanks, device: Device) -> str:
    cores = f"{counted(host.cores, 'core')}" if host.quota is None else f"a quota of {host.quota:g}"
    return f"{counted(device.threads, 'thread')}, {cores}"


def _links(topology: Topology) -> list[list[str]]:
    rows = [["", *(host.name for host in topology.hosts)]]
    for source, host in enumerate(topology.hosts):
        rows.append(
            [host.name, *(_link(topology, source, target) for target in range(len(topology.hosts)))]
        )
    return rows


def _link(topology: Topology, source: int, target: int) -> str:
    link = topology.link(source, target)
    if link is None:
        return "-"
    crowded = f", {rated(link.crowded_bytes_per_second)}" if link.crowded_bytes_per_second else ""
    return f"{link.latency_seconds * 1e3:.2f} ms, {rated(link.bytes_per_second)}{crowded}"
