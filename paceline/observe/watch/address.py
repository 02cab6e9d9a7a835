"""The address of a live page: its socket, and the token for readers on other machines."""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from importlib.util import find_spec

from paceline.cluster import network, secret
from paceline.errors import UsageError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class WatchAddress:
    """The address that an option has given: a host and a port. Port 0 is any free port."""

    host: str
    port: int
    option: str

    @classmethod
    def parse_address(cls, text: str, option: str) -> WatchAddress:
        """Parse [HOST:]PORT. An IPv6 address is in brackets, and the default host is loopback.

        Raises:
            UsageError: `text` has another form.
        """
        host, _, port = text.rpartition(":")
        port_number = network.parse_port(port)
        if port_number is None:
            raise UsageError(
                f"{option} {text} isn't [HOST:]PORT, such as 8080 or 0.0.0.0:8080 (port 0 is any "
                "that is free)"
            )
        return cls(host.removeprefix("[").removesuffix("]") or LOOPBACK, port_number, option)

    def open_socket(self) -> socket.socket:
        """Open a socket that listens at this address.

        Raises:
            UsageError: The port is in use, or the host is not one of this machine.
        """
        try:
            return network.open_listener(network.resolve_host(self.host)[0], self.port)
        except OSError as error:
            port_in_use = (
                f"port {self.port} is in use on {self.host}: give another one, "
                "or 0 for any that is free"
            )
            why = (
                port_in_use
                if error.errno == errno.EADDRINUSE
                else f"{self.host}, port {self.port}: {os.strerror(error.errno or 0)}"
            )
            raise UsageError(f"no page can be served for {self.option}: {why}") from error


@dataclass(frozen=True)
class PageGuard:
    """The readers that a page admits.

    On loopback everyone on this machine is admitted; elsewhere the `token` is needed.
    """

    token: str = ""

    @classmethod
    def for_socket(cls, listening: socket.socket, key: bytes) -> PageGuard:
        """Return the guard of a socket.

        Unless only this machine reaches it, the guard has a token, which is derived from the job's
        secret.
        """
        return (
            cls()
            if network.is_loopback(listening.getsockname()[0])
            else cls(secret.derive_key(key, "paceline watch", 16).hex())
        )


def page_url(listening: socket.socket, guard: PageGuard) -> str:
    """Return the address to open in a browser."""
    address, port = listening.getsockname()[:2]
    host = (
        socket.gethostname()
        if address in ("0.0.0.0", "::")
        else f"[{address}]"
        if ":" in address
        else address
    )
    return f"http://{host}:{port}/{f'?token={guard.token}' if guard.token else ''}"


def check_aiohttp_installed() -> None:
    """Raise `UsageError` if aiohttp, which serves pages, isn't installed."""
    if find_spec("aiohttp") is None:
        raise UsageError(
            "a live page needs aiohttp, which is not installed: pip install 'paceline[watch]'"
        )
