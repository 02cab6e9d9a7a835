"""Addresses and interfaces of this machine.

The address at which others reach this machine comes from the kernel's route to them. It is never
guessed from a host name.
"""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import re
import socket
import struct
import sys
import termios

from paceline.cluster.topology import Interface
from paceline.errors import PlaceError

# From linux/sockios.h. They are part of the kernel's interface to programs, and don't change.
_SIOCGIFCONF, _SIOCGIFNETMASK, _SIOCETHTOOL = 0x8912, 0x891B, 0x8946
# struct ethtool_cmd. The speed (Mbit/s) is in two halves.
_ETHTOOL_SETTINGS = struct.Struct("=IIIHBBBBBBIIHBBIII")
_GET_SETTINGS, _UNKNOWN_SPEED = 1, 0xFFFF_FFFF
_IFREQ_BYTES = 40  # struct ifreq on 64-bit Linux: 16 of name, 24 of address
_MAX_INTERFACES = 256


def list_interfaces() -> dict[str, str]:
    """List the interfaces of this machine that are up, with their IPv4 addresses.

    Empty if the system isn't Linux.
    """
    if not sys.platform.startswith("linux"):
        return {}
    # The kernel fills a buffer with structs ifreq, and tells how many bytes it has used.
    buffer = array.array("B", bytes(_MAX_INTERFACES * _IFREQ_BYTES))
    address, length = buffer.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, struct.pack("iL", length, address))
    used_bytes = struct.unpack("iL", answer)[0]
    raw = buffer.tobytes()
    addresses: dict[str, str] = {}
    for start in range(0, used_bytes, _IFREQ_BYTES):
        name = raw[start : start + 16].split(b"\0", 1)[0].decode()
        addresses.setdefault(name, socket.inet_ntoa(raw[start + 20 : start + 24]))
    return addresses


def describe_interfaces() -> tuple[Interface, ...]:
    """Describe the interfaces of this machine that are up, except loopback."""
    descriptions = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, address in list_interfaces().items():
            if is_loopback(address):
                continue
            try:
                answer = fcntl.ioctl(
                    probe.fileno(), _SIOCGIFNETMASK, struct.pack("16s24x", name.encode())
                )
            except OSError:
                # The interface has gone since it was listed.
                continue
            network = ipaddress.ip_network(
                f"{address}/{socket.inet_ntoa(answer[20:24])}", strict=False
            )
            descriptions.append(
                Interface(name, address, str(network), 1e6 * _read_link_speed(probe, name))
            )
    return tuple(descriptions)


def _read_link_speed(probe: socket.socket, name: str) -> int:
    """Ask the driver of an interface for its speed in Mbit/s. 0 if it doesn't tell."""
    settings = array.array("B", _ETHTOOL_SETTINGS.pack(_GET_SETTINGS, *[0] * 17))
    try:
        fcntl.ioctl(
            probe.fileno(),
            _SIOCETHTOOL,
            struct.pack("16sP16x", name.encode(), settings.buffer_info()[0]),
        )
    except OSError:
        return 0
    fields = _ETHTOOL_SETTINGS.unpack(settings.tobytes())
    speed = fields[3] | fields[12] << 16
    return 0 if speed in (0xFFFF, _UNKNOWN_SPEED) else int(speed)


def resolve_host(host: str) -> list[str]:
    """Resolve a host name to IP addresses, IPv4 first.

    Raises `PlaceError` if this machine can't resolve it.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise PlaceError(
            f"the host name {host!r} can't be resolved on {socket.gethostname()} ({error}): "
            "use an IP address, or a name that every host knows"
        ) from error
    # IPv4 first, and no address twice. The sort keeps the order of the resolver.
    addresses = sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in addresses))


def is_loopback(address: str) -> bool:
    """Whether an IP address can be reached from this machine only."""
    return ipaddress.ip_address(address.split("%", maxsplit=1)[0]).is_loopback


def is_written_as_local(host: str) -> bool:
    """Whether a host is written as this machine: localhost, or a loopback address.

    Other names may resolve to loopback too. They aren't resolved here.
    """
    if host == "localhost":
        return True
    try:
        return is_loopback(host)
    except ValueError:
        return False


def parse_port(text: str) -> int | None:
    """Parse a port written in digits. None for any other text."""
    number = int(text) if re.fullmatch("[0-9]{1,5}", text) else 1 << 16
    return number if number < 1 << 16 else None


def is_own_address(address: str) -> bool:
    """Whether an IP address belongs to this machine (to this network namespace)."""
    # Only an address of this machine can be bound.
    with socket.socket(address_family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            if error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL}:
                return False
            raise
    return True


def address_family(address: str) -> socket.AddressFamily:
    """Address family of an IP address: AF_INET or AF_INET6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def find_local_address(address: str) -> str:
    """Find the local IP address from which packets to this IP address would leave.

    Sends nothing: to connect a UDP socket only makes the kernel choose a route.
    """
    with socket.socket(address_family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise PlaceError(
                f"{socket.gethostname()} has no route to {address} ({error.strerror}): "
                f"{format_interface_advice()}"
            ) from error
        return str(probe.getsockname()[0])


def resolve_interface(interface: str) -> str:
    """Resolve PACELINE_INTERFACE, the name or an address of an interface, to an IP address."""
    addresses = list_interfaces()
    if interface in addresses:
        return addresses[interface]
    try:
        ipaddress.ip_address(interface)
    except ValueError:
        raise PlaceError(
            f"PACELINE_INTERFACE={interface} is no interface of {socket.gethostname()}: "
            f"{format_interface_advice()}"
        ) from None
    if not is_own_address(interface):
        raise PlaceError(
            f"PACELINE_INTERFACE={interface} is no address of {socket.gethostname()}: "
            f"{format_interface_advice()}"
        )
    return interface


def find_interface_name(address: str) -> str | None:
    """Find the name of the interface that has this address. None if there is none."""
    if is_loopback(address):
        address = "127.0.0.1"
    return next((name for name, own in list_interfaces().items() if own == address), None)


def format_interface_advice() -> str:
    """Format the advice to set PACELINE_INTERFACE, with the interfaces of this machine."""
    listed = ", ".join(
        f"{name} ({address})"
        for name, address in list_interfaces().items()
        if not is_loopback(address)
    )
    return (
        "set PACELINE_INTERFACE to the interface that reaches the other hosts; here: "
        f"{listed or 'only loopback'}"
    )


def open_listener(address: str, port: int = 0, *, backlog: int = 512) -> socket.socket:
    """Open a socket that listens on this address only.

    Children don't inherit it unless it is made inheritable.

    Args:
        address: An IP address of this machine.
        port: The port. Default: any free one.
        backlog: Number of connections that may wait to be accepted.
    """
    server = socket.socket(address_family(address), socket.SOCK_STREAM)
    try:
        # A port that an ended job has used can be bound again at once.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen(backlog)
    except OSError:
        server.close()
        raise
    return server


def reserve_port(address: str) -> socket.socket:
    """Reserve a free port for MASTER_PORT.

    The socket is bound, but doesn't listen. So no other program gets the port, and a worker can
    still bind it (SO_REUSEADDR).
    """
    reserved = socket.socket(address_family(address), socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, 0))
    except OSError as error:
        reserved.close()
        raise PlaceError(f"no port is free on {address} ({error.strerror})") from error
    return reserved


def count_unacknowledged_bytes(connection: socket.socket) -> int:
    """Count the bytes sent on a TCP connection that the other side has not acknowledged."""
    count = array.array("i", [0])
    fcntl.ioctl(connection, termios.TIOCOUTQ, count)
    return count[0]
