"""Describes oddities of a measured cluster that a user may want to fix before training."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Final

from paceline.cluster import network
from paceline.cluster.topology import Device, HostLink, HostRanks, Interface, Topology
from paceline.formatting import format_count

# Limits below which something is odd, as parts of the fastest of its kind.
SLOW_DEVICE: Final = 0.6
SLOW_LINK: Final = 0.2
SLOW_COPY: Final = 0.4
LONG_LATENCY: Final = 10.0  # times the typical latency
LATE: Final = 1e-3  # seconds below which no latency is odd
# Rates while all hosts send, as parts of the rates alone. A third is lost even on a good network,
# as acknowledgements wait behind the data of the other direction.
CROWDED: Final = 0.62
LOSES: Final = 0.9  # a link below this part loses something
HELD_BACK: Final = 0.7  # part of the highest clock
ATTENDED: Final = 0.85  # part of the time that threads, cores and quota allow
SPREAD: Final = 0.3  # part of the median time
FASTER: Final = 2.0  # times as fast as the used interface


def find_oddities(topology: Topology) -> list[str]:
    """Describe oddities in one line each, the most telling first; empty if there are none."""
    return [
        *_report_devices(topology),
        *_report_threads(topology),
        *_report_clocks(topology),
        *_report_links(topology),
        *_report_crowding(topology),
        *_report_interfaces(topology),
        *_report_unsteady(topology),
    ]


def _list_measured(topology: Topology) -> list[tuple[int, HostRanks, Device]]:
    """Rank, host and device of each measured worker."""
    return [(rank, host, device) for host in topology.hosts for rank, device in _pair_devices(host)]


def _pair_devices(host: HostRanks) -> Iterable[tuple[int, Device]]:
    """Pair the ranks of a host with their devices; nothing if no device was measured."""
    return zip(host.ranks, host.devices, strict=bool(host.devices))


def _name_ranks(ranks: Iterable[int], host: HostRanks) -> str:
    """Name the first of some workers of a host, with the number of the others."""
    first, *others = ranks
    return f"rank {first}{f' (and {len(others)} more)' if others else ''} on {host.name}"


def _report_devices(topology: Topology) -> Iterable[str]:
    """Report devices that are slower than others of their kind, and the reason if it is known."""
    # Products: one line for each device, with all dtypes that are slow on it.
    measured = _list_measured(topology)
    for rank, host, device in measured:
        slow = []
        for speed in device.speeds:
            best = max(
                other.dtype_flops(speed.dtype)
                for _, _, other in measured
                if other.kind == device.kind
            )
            if 0 < speed.flops < SLOW_DEVICE * best:
                slow.append(f"{speed.dtype} at {speed.flops / best:.2f}")
        if slow:
            yield (
                f"rank {rank} on {host.name} multiplies {_join_names(slow)} of the fastest "
                f"{device.kind}{_explain_slowness(host, device, measured)}"
            )

    # Copies: a worker with a quota, or without its cores, copies slowly for that reason.
    for rank, host, device in measured:
        best = max(
            other.copied_bytes_per_second for _, _, other in measured if other.kind == device.kind
        )
        steady = not _is_limited(host, device) and _attended_fraction(host, device) >= ATTENDED
        if 0 < device.copied_bytes_per_second < SLOW_COPY * best and steady:
            ratio = device.copied_bytes_per_second / best
            yield (
                f"rank {rank} on {host.name} copies memory at {ratio:.2f} of the fastest "
                f"{device.kind}: look at what else uses its memory"
            )


def _is_limited(host: HostRanks, device: Device) -> bool:
    """Whether the quota of the host is less than its workers could use."""
    return host.quota is not None and host.quota < device.threads * len(host.ranks)


def _explain_slowness(
    host: HostRanks, device: Device, measured: Iterable[tuple[int, HostRanks, Device]]
) -> str:
    """Explain why a device is slow; empty if the reason is unknown."""
    # The most certain reason comes first: a quota, another model, fewer threads, other programs.
    if device.kind == "cpu" and _is_limited(host, device):
        return f": a quota leaves {host.name} {host.quota:g} of a core"
    names = {other.name for _, _, other in measured if other.kind == device.kind and other.name}
    if len(names) > 1:
        return f": it is {device.name}, others differ"
    most = max(other.threads for _, _, other in measured)
    if device.kind == "cpu" and device.threads < most:
        return (
            f": it computes with {format_count(device.threads, 'thread')}, others with up to {most}"
        )
    attended = _attended_fraction(host, device)
    return f": it had its cores {attended:.0%} of the time" if attended < ATTENDED else ""


def _attended_fraction(host: HostRanks, device: Device) -> float:
    """Fraction of the possible time in which the worker had its cores; 1 if unknown.

    Threads, cores and quota limit the possible time.
    """
    cores = host.cores if host.quota is None else min(host.cores, host.quota)
    possible = min(device.threads, cores / len(host.ranks))
    return (
        device.attended / possible
        if device.kind == "cpu" and device.attended > 0 and possible > 0
        else 1.0
    )


def _report_threads(topology: Topology) -> Iterable[str]:
    """Report hosts and machines whose workers have more threads than there are cores."""
    for host in topology.hosts:
        wanted = sum(device.threads for device in host.devices if device.kind == "cpu")
        if wanted > host.cores:
            each = host.cores // len(host.ranks)
            advice = (
                f"give each {each} (--threads)" if each else f"start {host.cores} of them at most"
            )
            yield (
                f"the workers of {host.name} compute with {format_count(wanted, 'thread')} on "
                f"{format_count(host.cores, 'core')}, and disturb each other: "
                f"{advice}"
            )

    # Several hosts may be containers of one machine.
    for machine in dict.fromkeys(host.machine for host in topology.hosts if host.machine):
        hosts = [host for host in topology.hosts if host.machine == machine]
        usable, cores = sum(_most_cores(host) for host in hosts), hosts[0].machine_cores
        if len(hosts) > 1 and 0 < cores < usable:
            yield (
                f"{_join_names(host.name for host in hosts)} are one machine with "
                f"{format_count(cores, 'core')}, and their workers could use "
                f"{usable:g}: they were measured one host after another, and are slower all at once"
            )


def _most_cores(host: HostRanks) -> float:
    """Number of cores that the workers of a host could use, by threads and quota."""
    threads = sum(device.threads for device in host.devices if device.kind == "cpu")
    return threads if host.quota is None else min(threads, host.quota)


def _report_clocks(topology: Topology) -> Iterable[str]:
    """Report processors that stay slow under load, and workers whose cores others use."""
    for host in topology.hosts:
        slow = [
            device
            for device in host.devices
            if 0 < device.clock_hz < HELD_BACK * device.highest_clock_hz
        ]
        if slow:
            worst = min(slow, key=lambda device: device.clock_hz)
            yield (
                f"the processor of {host.name} stays at {worst.clock_hz / 1e9:.1f} GHz of "
                f"{worst.highest_clock_hz / 1e9:.1f} while it "
                f"computes: it saves power or is too hot (governor {worst.governor or 'unknown'}; "
                "`cpupower frequency-set -g performance`)"
            )
    for host in topology.hosts:
        waited = {
            rank: attended
            for rank, device in _pair_devices(host)
            if (attended := _attended_fraction(host, device)) < ATTENDED
        }
        if waited:
            yield (
                f"{_name_ranks(waited, host)} had its cores {min(waited.values()):.0%} of the time "
                "it computed: other programs use them"
            )


def _report_links(topology: Topology) -> Iterable[str]:
    """Report slow links between hosts, in one line if a host is slow in one direction."""
    links = [link for link in topology.links if link.source != link.target]
    best = max((link.bytes_per_second for link in links), default=0.0)
    slow = [link for link in links if link.bytes_per_second < SLOW_LINK * best]

    # All links out of a host, or into it, are slow: the cause is the host, so it gets one line.
    for index, host in enumerate(topology.hosts):
        for way, end in (("sends", "source"), ("receives", "target")):
            of_host = [link for link in links if getattr(link, end) == index]
            if len(of_host) > 1 and all(link in slow for link in of_host):
                middle = statistics.median(link.bytes_per_second for link in of_host)
                yield (
                    f"{host.name} {way} {format_rate(middle)}, and the fastest link carries "
                    f"{format_rate(best)}: check its cable and port"
                )
                slow = [link for link in slow if link not in of_host]

    # The other slow links get a line each, and so do long latencies.
    for link in slow:
        yield (
            f"{_name_link(topology, link)} carries {format_rate(link.bytes_per_second)}, and the "
            "fastest link "
            f"here {format_rate(best)}"
        )
    typical = statistics.median(link.latency_seconds for link in links) if links else 0.0
    for link in links:
        if link.latency_seconds > max(LATE, LONG_LATENCY * typical):
            yield (
                f"{_name_link(topology, link)} takes {link.latency_seconds * 1e3:.1f} ms, and "
                f"{typical * 1e3:.2f} ms are typical here"
            )


def _report_crowding(topology: Topology) -> Iterable[str]:
    """Report links that carry less while other hosts send as well.

    They share a switch or an uplink, or their hosts share cores.
    """
    # Links of one shift were measured at the same time, so they are judged together.
    count = len(topology.hosts)
    for shift in range(1, count):
        pairs = [(host, (host + shift) % count) for host in range(count)]
        links = [
            link
            for pair in pairs
            if (link := topology.find_link(*pair)) is not None and link.crowded_bytes_per_second > 0
        ]
        losing = [
            link for link in links if link.crowded_bytes_per_second < LOSES * link.bytes_per_second
        ]
        alone, crowded = (
            sum(getattr(link, name) for link in losing)
            for name in ("bytes_per_second", "crowded_bytes_per_second")
        )
        if crowded < CROWDED * alone:
            one = len(losing) == 1
            machines = {
                topology.hosts[end].machine for link in losing for end in (link.source, link.target)
            }
            cores = ", or the cores of one machine" if len(machines) == 1 and all(machines) else ""
            yield (
                f"{_join_names(_name_link(topology, link) for link in losing)} "
                f"{'carries' if one else 'carry'} {format_rate(alone)} "
                f"{'alone' if one else 'one at a time'}, "
                f"and {format_rate(crowded)} while all hosts send: "
                f"{'it shares' if one else 'they share'} a switch or an uplink{cores}"
            )


def _report_interfaces(topology: Topology) -> Iterable[str]:
    """Report addresses that reach only this machine, and faster interfaces that all hosts have."""
    machines = {host.machine for host in topology.hosts if host.machine}
    for host in topology.hosts:
        # Other machines can't reach a loopback address.
        if len(machines) > 1 and network.is_loopback(host.address):
            yield (
                f"{host.name} is reached at {host.address}, which is its loopback: "
                f"{_advise_interface(None)}"
            )
        # A faster interface is of use only if all hosts are in its network.
        used = next((each for each in host.interfaces if each.address == host.address), None)
        for other in host.interfaces:
            faster = used is not None and 0 < FASTER * used.bits_per_second <= other.bits_per_second
            if (
                used is not None
                and faster
                and len(topology.hosts) > 1
                and _reaches_all(topology, other)
            ):
                yield (
                    f"{host.name} is reached over {used.name} ({used.bits_per_second / 1e9:g} "
                    f"Gbit/s), and its {other.name} could send "
                    f"{other.bits_per_second / 1e9:g} Gbit/s in a network that all hosts are in: "
                    f"{_advise_interface(other)}"
                )


def _reaches_all(topology: Topology, interface: Interface) -> bool:
    """Whether each host has an address of its own in the network of this interface."""
    # Private networks of containers often have the same addresses on all hosts.
    addresses = [
        {each.address for each in host.interfaces if each.network == interface.network}
        for host in topology.hosts
    ]
    return all(addresses) and len(set.union(*addresses)) >= len(topology.hosts)


def _advise_interface(interface: Interface | None) -> str:
    """Advise to use this interface, or to look for one if it is None."""
    name = "with the one that reaches the others" if interface is None else interface.name
    return f"give --interface {name}"


def _report_unsteady(topology: Topology) -> Iterable[str]:
    """Report hosts on which the same product takes different times."""
    for host in topology.hosts:
        spreads = {
            rank: max((speed.spread for speed in device.speeds), default=0.0)
            for rank, device in _pair_devices(host)
        }
        apart = {rank: spread for rank, spread in spreads.items() if spread > SPREAD}
        if apart:
            yield (
                f"times of {_name_ranks(apart, host)} lie {max(apart.values()):.0%} apart: "
                "something disturbs it; measure again in quiet"
            )


def format_rate(rate: float) -> str:
    """Format bytes per second as links are rated: "956 Mbit/s", from 10 Gbit/s on "3.2 GB/s"."""
    bits = 8 * rate
    if bits >= 1e10:
        return f"{rate / 1e9:.1f} GB/s"
    for unit, size in (("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if bits >= size:
            return f"{bits / size:.3g} {unit}"
    return f"{bits / 1e3:.3g} kbit/s"


def _name_link(topology: Topology, link: HostLink) -> str:
    """Name the hosts of a link: "a to b"."""
    return f"{topology.hosts[link.source].name} to {topology.hosts[link.target].name}"


def _join_names(names: Iterable[str]) -> str:
    """Join names as in a sentence: "a, b and c"."""
    *before, last = names
    return f"{', '.join(before)} and {last}" if before else last
