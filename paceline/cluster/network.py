"""Addresses of this machine: found by asking the kernel for the route, never guessed from a name
alone.
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

_SIOCGIFCONF, _SIOCGIFNETMASK, _SIOCETHTOOL = 0x8912, 0x891B, 0x8946  # linux/sockios.h
# struct ethtool_cmd; the speed (Mbit/s) is in two halves
_SETTINGS = struct.Struct("=IIIHBBBBBBIIHBBIII")
_GET_SETTINGS, _UNKNOWN_SPEED = 1, 0xFFFF_FFFF
_IFREQ_BYTES = 40  # struct ifreq on 64-bit Linux: 16 of name, 24 of address
_MOST_INTERFACES = 256


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface of this machine that is up; empty where the
    kernel can't be asked (not Linux).
    """
    if not sys.platform.startswith("linux"):
        return {}
    room = array.array("B", bytes(_MOST_INTERFACES * _IFREQ_BYTES))
    address, length = room.buffer_info()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFCONF, struct.pack("iL", length, address))
    used = struct.unpack("iL", answer)[0]
    raw = room.tobytes()
    addresses: dict[str, str] = {}
    for start in range(0, used, _IFREQ_BYTES):
        name = raw[start : start + 16].split(b"\0", 1)[0].decode()
        addresses.setdefault(name, socket.inet_ntoa(raw[start + 20 : start + 24]))
    return addresses


def described() -> tuple[Interface, ...]:
    """Return the interfaces of this machine that are up, loopback left out."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for name, address in interfaces().items():
            if loopback(address):
                continue
            try:
                answer = fcntl.ioctl(
                    probe.fileno(), _SIOCGIFNETMASK, struct.pack("16s24x", name.encode())
                )
            except OSError:  # it has gone since it was listed
                continue
            network = ipaddress.ip_network(
                f"{address}/{socket.inet_ntoa(answer[20:24])}", strict=False
            )
            found.append(Interface(name, address, str(network), 1e6 * _megabits(probe, name)))
    return tuple(found)


def _megabits(probe: socket.socket, name: str) -> int:
    """Ask the driver of an interface for its speed; 0 where it doesn't say."""
    settings = array.array("B", _SETTINGS.pack(_GET_SETTINGS, *[0] * 17))
    try:
        fcntl.ioctl(
            probe.fileno(),
            _SIOCETHTOOL,
            struct.pack("16sP16x", name.encode(), settings.buffer_info()[0]),
        )
    except OSError:
        return 0
    fields = _SETTINGS.unpack(settings.tobytes())
    speed = fields[3] | fields[12] << 16
    return 0 if speed in (0xFFFF, _UNKNOWN_SPEED) else int(speed)


def resolve(host: str) -> list[str]:
    """Return the IP addresses of `host`, IPv4 first; raises `PlaceError` when the name means
    nothing here.
    """
    try:
        entries = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as error:
        raise PlaceError(
            f"the host name {host!r} can't be resolved on {socket.gethostname()} ({error}): "
            "use an IP address, or a name that every host knows"
        ) from error
    addresses = sorted(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return list(dict.fromkeys(str(entry[4][0]) for entry in addresses))


def loopback(address: str) -> bool:
    """Whether this IP address is reached from this machine only."""
    return ipaddress.ip_address(address.split("%", maxsplit=1)[0]).is_loopback


def literal(host: str) -> bool:
    """Whether `host` itself says that it means this machine only: localhost or a loopback
    address.
    """
    if host == "localhost":
        return True
    try:
        return loopback(host)
    except ValueError:
        return False


def port(text: str) -> int | None:
    """Return the number of a port that is written in digits; None for any other text."""
    found = int(text) if re.fullmatch("[0-9]{1,5}", text) else 1 << 16
    return found if found < 1 << 16 else None


def local(address: str) -> bool:
    """Whether this IP address belongs to this machine (to this network namespace)."""
    with socket.socket(family(address), socket.SOCK_STREAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError as error:
            if error.errno in {errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT, errno.EINVAL}:
                return False
            raise
    return True


def family(address: str) -> socket.AddressFamily:
    """Return AF_INET or AF_INET6, as the IP address is written."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def route(address: str) -> str:
    """Return the local IP address that packets to this IP address would leave from; nothing is
    sent.
    """
    with socket.socket(family(address), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, 9))
        except OSError as error:
            raise PlaceError(
                f"{socket.gethostname()} has no route to {address} ({error.strerror}): {advice()}"
            ) from error
        return str(probe.getsockname()[0])


def override(interface: str) -> str:
    """Return the IP address that an override means: an interface's name, or an address of this
    machine.
    """
    known = interfaces()
    if interface in known:
        return known[interface]
    try:
        ipaddress.ip_address(interface)
    except ValueError:
        raise PlaceError(
            f"PACELINE_INTERFACE={interface} is no interface of {socket.gethostname()}: {advice()}"
        ) from None
    if not local(interface):
        raise PlaceError(
            f"PACELINE_INTERFACE={interface} is no address of {socket.gethostname()}: {advice()}"
        )
    return interface


def carrier(address: str) -> str | None:
    """Return the name of the interface that has this address, if known."""
    if loopback(address):
        address = "127.0.0.1"
    return next((name for name, known in interfaces().items() if known == address), None)


def advice() -> str:
    """Return advice on the variable to set, with the interfaces that there are."""
    known = ", ".join(
        f"{name} ({address})" for name, address in interfaces().items() if not loopback(address)
    )
    return (
        "set PACELINE_INTERFACE to the interface that reaches the other hosts; here: "
        f"{known or 'only loopback'}"
    )


def listen(address: str, port: int = 0, *, backlog: int = 512) -> socket.socket:
    """Open a socket that listens on this address only (port 0: any free one).

    Not inherited by children unless made so.
    """
    server = socket.socket(family(address), socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen(backlog)
    except OSError:
        server.close()
        raise
    return server


def reserve(address: str) -> socket.socket:
    """Reserve a port for MASTER_PORT that stays ours: bound but not listening, so that a worker
    can still bind it (SO_REUSEADDR).
    """
    reserved = socket.socket(family(address), socket.SOCK_STREAM)
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, 0))
    except OSError as error:
        reserved.close()
        raise PlaceError(f"no port can be had on {address} ({error.strerror})") from error
    return reserved


def unacknowledged(connection: socket.socket) -> int:
    """Number of bytes sent on a TCP connection that the other side has not acknowledged."""
    count = array.array("i", [0])
    fcntl.ioctl(connection, termios.TIOCOUTQ, count)
    return count[0]
