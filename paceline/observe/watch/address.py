"""Where a page is served: the address that was asked for, the socket that listens there, and the
token that readers from elsewhere need.
"""

from __future__ import annotations

import errno
import os
import socket
from dataclasses import dataclass
from importlib.util import find_spec

from paceline.cluster import network, secret
from paceline.errors import UsageError

HOME = "127.0.0.1"


@dataclass(frozen=True)
class WatchAddress:
    """An address as it was asked for by `option`: a host and a port; port 0 is any that is free."""

    host: str
    port: int
    option: str

    @classmethod
    def parse(cls, text: str, option: str) -> WatchAddress:
        """Read [HOST:]PORT; an IPv6 address is in brackets.

        Without a host it is loopback. Raises `UsageError`.
        """
        host, _, port = text.rpartition(":")
        number = network.port(port)
        if number is None:
            raise UsageError(
                f"{option} {text} isn't [HOST:]PORT, such as 8080 or 0.0.0.0:8080 (port 0 is any "
                "that is free)"
            )
        return cls(host.removeprefix("[").removesuffix("]") or HOME, number, option)

    def listen(self) -> socket.socket:
        """Open a socket that listens there. Raises `UsageError` where that can't be."""
        try:
            return network.listen(network.resolve(self.host)[0], self.port)
        except OSError as error:
            taken = (
                f"port {self.port} is in use on {self.host}: give another one, or 0 for any that "
                "is free"
            )
            why = (
                taken
                if error.errno == errno.EADDRINUSE
                else f"{self.host}, port {self.port}: {os.strerror(error.errno or 0)}"
            )
            raise UsageError(f"no page can be served for {self.option}: {why}") from error


@dataclass(frozen=True)
class PageGuard:
    """The readers that a page is for: on loopback everybody there, and elsewhere those who have
    the `token`.
    """

    token: str = ""

    @classmethod
    def of(cls, listening: socket.socket, key: bytes) -> PageGuard:
        """Return the guard of this socket: one with a token made of the job's secret, unless
        only this machine reaches it.
        """
        return (
            cls()
            if network.loopback(listening.getsockname()[0])
            else cls(secret.derive(key, "paceline watch", 16).hex())
        )


def url(listening: socket.socket, guard: PageGuard) -> str:
    """Return what to open in a browser."""
    address, port = listening.getsockname()[:2]
    host = (
        socket.gethostname()
        if address in ("0.0.0.0", "::")
        else f"[{address}]"
        if ":" in address
        else address
    )
    return f"http://{host}:{port}/{f'?token={guard.token}' if guard.token else ''}"


def check_installed() -> None:
    """Raise `UsageError` where the library that serves pages isn't installed."""
    if find_spec("aiohttp") is None:
        raise UsageError(
            "a live page needs aiohttp, which is not installed: pip install 'paceline[watch]'"
        )
