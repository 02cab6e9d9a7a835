"""Describes a measured cluster: a table of the workers, and a matrix of links between hosts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.cluster.topology import Device, HostRanks, Topology
from paceline.formatting import format_bytes, format_count
from paceline.unequal.probe.oddities import find_oddities, format_rate


def describe_cluster(topology: Topology) -> str:
    """Format a measured cluster as text, followed by what is odd about it."""
    dtypes = list(
        dict.fromkeys(
            speed.dtype
            for host in topology.hosts
            for device in host.devices
            for speed in device.speeds
        )
    )
    blocks = [
        _format_table(
            (
                f"{format_count(topology.size, 'worker')} on "
                f"{format_count(len(topology.hosts), 'host')}"
            ),
            _worker_rows(topology, dtypes),
        )
    ]
    if topology.links:
        text = (
            "links, from the host of the line to that of the column: latency, what a worker sends "
            "alone, and while all hosts send"
        )
        blocks.append(_format_table(text, _link_rows(topology)))
    odd_lines = find_oddities(topology)
    blocks.append(
        "\n".join(["what is odd:", *(f"- {line}" for line in odd_lines)])
        if odd_lines
        else "nothing is odd"
    )
    return "\n\n".join(blocks)


def _format_table(title: str, rows: Sequence[Sequence[str]]) -> str:
    """Format a table with aligned columns under a title."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _worker_rows(topology: Topology, dtypes: Sequence[str]) -> list[list[str]]:
    """Return the rows of the table of workers: device, speed and memory of each."""
    relative = topology.relative_speeds(dtypes[0]) if dtypes else ()
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
            speeds = [f"{device.dtype_flops(dtype) / 1e9:.3g}" for dtype in dtypes]
            share_of_fastest = f"{relative[rank]:.2f}" if relative else "-"
            memory = f"{format_bytes(device.free_bytes)} of {format_bytes(device.memory_bytes)}"
            copied = f"{device.copied_bytes_per_second / 1e9:.3g} GB/s"
            rows.append(
                [
                    str(rank),
                    host.name,
                    _name_device(device),
                    _describe_threads(host, device),
                    *speeds,
                    share_of_fastest,
                    copied,
                    memory,
                ]
            )
    return rows


def _name_device(device: Device) -> str:
    """Name a device, such as "cuda:0 NVIDIA A100"."""
    place = device.kind if device.kind == "cpu" else f"{device.kind}:{device.index}"
    return f"{place} {device.name}".strip()


def _describe_threads(host: HostRanks, device: Device) -> str:
    """Describe the threads of a worker, and the cores that its host has."""
    cores = (
        f"{format_count(host.cores, 'core')}"
        if host.quota is None
        else f"a quota of {host.quota:g}"
    )
    return f"{format_count(device.threads, 'thread')}, {cores}"


def _link_rows(topology: Topology) -> list[list[str]]:
    """Return the rows of the matrix of links, one for each sending host."""
    rows = [["", *(host.name for host in topology.hosts)]]
    for source, host in enumerate(topology.hosts):
        rows.append(
            [
                host.name,
                *(
                    _describe_link(topology, source, target)
                    for target in range(len(topology.hosts))
                ),
            ]
        )
    return rows


def _describe_link(topology: Topology, source: int, target: int) -> str:
    """Describe a link: latency and rate, also while all hosts send."""
    link = topology.find_link(source, target)
    if link is None:
        return "-"
    crowded_rate = (
        f", {format_rate(link.crowded_bytes_per_second)}" if link.crowded_bytes_per_second else ""
    )
    return (
        f"{link.latency_seconds * 1e3:.2f} ms, {format_rate(link.bytes_per_second)}{crowded_rate}"
    )
