"""The links of a lab: virtual interfaces, the bridges between them, and their limits.

Each host has a pair of interfaces, one on each side of its link. Everything is made through
netlink.

host0         host1              host2         host3         each in a network of its own
eth0          eth0               eth0          eth0          egress: what the host may send (up)
  |             |                  |             |
port0         port1              port2         port3         egress: what it may receive (down)
+-- rack0 bridge --+             +-- rack1 bridge --+
       top0                             top1                 egress: up of the rack
       bottom0                          bottom1              egress: down of the rack
       +------------ spine bridge ------------+              all bridges in one more network, the
                                                             switch
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from pyroute2 import IPRoute
from pyroute2.netlink.exceptions import NetlinkError

from paceline.errors import ResourceError
from paceline.lab.description import Rate, spell_rate
from paceline.lab.spaces import NamespaceSet

INTERFACE: Final = "eth0"  # of every host
PREFIX: Final = 16  # leading bits of the address, the same in all hosts
_SPINE: Final = "spine"
# The handles 1: and 2: of queueing disciplines, and the place inside of 1: (its class 1:1).
_TBF, _NETEM, _INNER = 0x1_0000, 0x2_0000, 0x1_0001
_ROOT: Final = 0xFFFF_FFFF
_BURST_SECONDS: Final = 0.001  # data that may pass at once after a pause
_LEAST_BURST: Final = 16_384  # bytes: some full packets
_QUEUE_SECONDS: Final = 0.05  # data that waits in a queue before packets are lost
_LEAST_QUEUE: Final = 262_144  # bytes
_NETEM_PACKETS: Final = 100_000
_MOST_BYTES: Final = 2**32 - 1  # of a queue


def host_address(index: int) -> str:
    """Compute the address of a host, which is private and not routed outside of the lab."""
    return f"10.77.{(index + 1) // 256}.{(index + 1) % 256}"


def lay_bridges(switch: NamespaceSet, racks: int) -> None:
    """Make the spine bridge, and one bridge for each rack with a link to the spine."""

    def build() -> None:
        with _open_netlink("building the switch") as ip:
            _bring_up(ip, "lo")
            _make_bridge(ip, _SPINE)
            for rack in range(racks):
                _make_bridge(ip, f"rack{rack}")
                ip.link("add", ifname=f"top{rack}", kind="veth", peer={"ifname": f"bottom{rack}"})
                for name, bridge in ((f"top{rack}", f"rack{rack}"), (f"bottom{rack}", _SPINE)):
                    ip.link(
                        "set", index=_interface_index(ip, name), master=_interface_index(ip, bridge)
                    )
                    _bring_up(ip, name)

    switch.call_inside(build)


def plug_host(switch: NamespaceSet, host: NamespaceSet, index: int, rack: int | None) -> None:
    """Connect a host to the bridge of its rack, or to the spine if it has no rack."""

    # Each end of the pair can be configured only from inside its own network, so the work is in two
    # halves.
    def connect_switch_end() -> None:
        with _open_netlink(f"wiring host {index}") as ip:
            ip.link(
                "add",
                ifname=f"port{index}",
                kind="veth",
                peer={"ifname": INTERFACE, "net_ns_fd": host.fds["net"]},
            )
            ip.link(
                "set",
                index=_interface_index(ip, f"port{index}"),
                master=_interface_index(ip, _SPINE if rack is None else f"rack{rack}"),
            )
            _bring_up(ip, f"port{index}")

    def connect_host_end() -> None:
        with _open_netlink(f"wiring host {index}") as ip:
            _bring_up(ip, "lo")
            ip.addr(
                "add",
                index=_interface_index(ip, INTERFACE),
                address=host_address(index),
                prefixlen=PREFIX,
            )
            _bring_up(ip, INTERFACE)

    switch.call_inside(connect_switch_end)
    host.call_inside(connect_host_end)


def limit_rate(
    space: NamespaceSet, interface: str, rate: Rate | None, delay: float | None = None
) -> None:
    """Limit the data that leaves through this interface, from now on.

    The interface may be in use.

    Args:
        space: The namespaces that contain the interface.
        interface: Name of the interface.
        rate: At most this many bits per second. None: no limit.
        delay: Seconds by which each packet is delayed. Default: none.
    """

    def apply_limit() -> None:
        with _open_netlink(f"limiting {interface} to {spell_rate(rate)}") as ip:
            index = _interface_index(ip, interface)
            # A change of the rate alone replaces the token bucket in place. Otherwise the old
            # disciplines are removed first, since the tree below the root changes.
            if any(entry["handle"] in {_TBF, _NETEM} for entry in ip.get_qdiscs(index=index)) and (
                rate is None or delay is not None
            ):
                ip.tc("del", index=index, parent=_ROOT)
            if rate is not None:
                ip.tc(
                    "replace", "tbf", index=index, handle=_TBF, parent=_ROOT, **compute_bucket(rate)
                )
            # The delay comes inside of the token bucket, or at the root if there is no bucket.
            if delay is not None:
                parent = _ROOT if rate is None else _INNER
                ip.tc(
                    "add",
                    "netem",
                    index=index,
                    handle=_NETEM,
                    parent=parent,
                    delay=round(delay * 1e6),
                    limit=_NETEM_PACKETS,
                )

    space.call_inside(apply_limit)


def set_queue(space: NamespaceSet, interface: str, kind: str, **options: int) -> None:
    """Put a queueing discipline of any kind at the exit of this interface."""

    def add_discipline() -> None:
        with _open_netlink(f"the queueing discipline {kind}") as ip:
            ip.tc(
                "add",
                kind,
                index=_interface_index(ip, interface),
                handle=_TBF,
                parent=_ROOT,
                **options,
            )

    space.call_inside(add_discipline)


def switch_on(space: NamespaceSet, interface: str, *, on: bool) -> None:
    """Switch the interface on or off.

    While it is off no packet passes, and no process is notified.
    """

    def set_state() -> None:
        with _open_netlink(f"switching {interface}") as ip:
            ip.link("set", index=_interface_index(ip, interface), state="up" if on else "down")

    space.call_inside(set_state)


def compute_bucket(rate: Rate) -> dict[str, int]:
    """Compute the parameters of a token bucket (tbf).

    Returns:
        `rate` in bytes per second; `burst` and `limit`, the length of the queue, in bytes.
    """
    bytes_per_second = rate // 8
    burst = max(_LEAST_BURST, round(bytes_per_second * _BURST_SECONDS))
    queue = max(_LEAST_QUEUE, round(bytes_per_second * _QUEUE_SECONDS))
    return {
        "rate": bytes_per_second,
        "burst": burst,
        "limit": min(_MOST_BYTES, queue + burst),
    }


@contextmanager
def _open_netlink(purpose: str) -> Iterator[Any]:
    """Open a netlink connection to the network of this thread; `purpose` is for messages."""
    try:
        with IPRoute() as ip:
            yield ip
    except NetlinkError as error:
        raise ResourceError(
            f"the kernel refused {purpose} ({error.args[-1]}): run `paceline lab check`, which "
            "says what is missing"
        ) from error


def _make_bridge(ip: Any, name: str) -> None:
    ip.link("add", ifname=name, kind="bridge", br_stp_state=0, br_forward_delay=0)
    _bring_up(ip, name)


def _bring_up(ip: Any, name: str) -> None:
    ip.link("set", index=_interface_index(ip, name), state="up")


def _interface_index(ip: Any, name: str) -> int:
    return int(ip.link_lookup(ifname=name)[0])
