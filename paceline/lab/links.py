"""The links of a lab: a pair of virtual interfaces for each host, bridges between them, and limits,
all made through netlink.

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
PREFIX: Final = 16  # bits of the address that all hosts share
_SPINE: Final = "spine"
_TBF, _NETEM, _INNER = 0x1_0000, 0x2_0000, 0x1_0001  # handles 1: and 2:, and the place inside of 1:
_ROOT: Final = 0xFFFF_FFFF
_BURST_SECONDS: Final = 0.001  # what may pass at once after a pause
_LEAST_BURST: Final = 16_384  # bytes: some full packets
_QUEUE_SECONDS: Final = 0.05  # how much waits in a queue before packets are lost
_LEAST_QUEUE: Final = 262_144  # bytes
_NETEM_PACKETS: Final = 100_000
_MOST_BYTES: Final = 2**32 - 1  # of a queue


def host_address(index: int) -> str:
    """Return the address of a host: private, and routed nowhere."""
    return f"10.77.{(index + 1) // 256}.{(index + 1) % 256}"


def lay_bridges(switch: NamespaceSet, racks: int) -> None:
    """Make the bridges: one, or one for each rack and the spine between them."""

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
    """Connect a host by its link to its rack's bridge or to the spine."""

    def lead_in() -> None:
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

    def receive() -> None:
        with _open_netlink(f"wiring host {index}") as ip:
            _bring_up(ip, "lo")
            ip.addr(
                "add",
                index=_interface_index(ip, INTERFACE),
                address=host_address(index),
                prefixlen=PREFIX,
            )
            _bring_up(ip, INTERFACE)

    switch.call_inside(lead_in)
    host.call_inside(receive)


def limit_rate(
    space: NamespaceSet, interface: str, rate: Rate | None, delay: float | None = None
) -> None:
    """Limit what leaves through this interface: at most `rate` bits a second, each packet
    `delay` seconds later. At once, also in use.
    """

    def apply() -> None:
        with _open_netlink(f"limiting {interface} to {spell_rate(rate)}") as ip:
            index = _interface_index(ip, interface)
            if any(entry["handle"] in {_TBF, _NETEM} for entry in ip.get_qdiscs(index=index)) and (
                rate is None or delay is not None
            ):
                ip.tc("del", index=index, parent=_ROOT)
            if rate is not None:
                ip.tc(
                    "replace", "tbf", index=index, handle=_TBF, parent=_ROOT, **compute_bucket(rate)
                )
            if delay is not None:
                inner = _ROOT if rate is None else _INNER
                ip.tc(
                    "add",
                    "netem",
                    index=index,
                    handle=_NETEM,
                    parent=inner,
                    delay=round(delay * 1e6),
                    limit=_NETEM_PACKETS,
                )

    space.call_inside(apply)


def set_queue(space: NamespaceSet, interface: str, kind: str, **options: int) -> None:
    """Put any queueing discipline at the exit of this interface."""

    def add() -> None:
        with _open_netlink(f"the queueing discipline {kind}") as ip:
            ip.tc(
                "add",
                kind,
                index=_interface_index(ip, interface),
                handle=_TBF,
                parent=_ROOT,
                **options,
            )

    space.call_inside(add)


def switch_on(space: NamespaceSet, interface: str, *, on: bool) -> None:
    """Plug the interface in, or pull it out: nothing passes any more, and no process is
    notified.
    """

    def turn() -> None:
        with _open_netlink(f"switching {interface}") as ip:
            ip.link("set", index=_interface_index(ip, interface), state="up" if on else "down")

    space.call_inside(turn)


def compute_bucket(rate: Rate) -> dict[str, int]:
    """Compute the numbers of a token bucket, in bytes (a second)."""
    each_second = rate // 8
    burst = max(_LEAST_BURST, round(each_second * _BURST_SECONDS))
    return {
        "rate": each_second,
        "burst": burst,
        "limit": min(_MOST_BYTES, max(_LEAST_QUEUE, round(each_second * _QUEUE_SECONDS)) + burst),
    }


@contextmanager
def _open_netlink(doing: str) -> Iterator[Any]:
    """Open a conversation with the kernel about the network that this thread is in."""
    try:
        with IPRoute() as ip:
            yield ip
    except NetlinkError as error:
        raise ResourceError(
            f"the kernel refused {doing} ({error.args[-1]}): run `paceline lab check`, which says "
            "what is missing"
        ) from error


def _make_bridge(ip: Any, name: str) -> None:
    ip.link("add", ifname=name, kind="bridge", br_stp_state=0, br_forward_delay=0)
    _bring_up(ip, name)


def _bring_up(ip: Any, name: str) -> None:
    ip.link("set", index=_interface_index(ip, name), state="up")


def _interface_index(ip: Any, name: str) -> int:
    return int(ip.link_lookup(ifname=name)[0])
