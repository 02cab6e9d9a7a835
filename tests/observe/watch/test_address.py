"""Where pages are served: what is asked for, what is refused in a line, and who needs a token."""

from __future__ import annotations

import socket

import pytest

from paceline.cluster import network
from paceline.errors import UsageError
from paceline.observe.watch import address
from paceline.observe.watch.address import (
    PageGuard,
    WatchAddress,
    check_aiohttp_installed,
    page_url,
)

KEY = b"k" * 32


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("8080", "127.0.0.1", 8080),
        (":0", "127.0.0.1", 0),
        ("0.0.0.0:65535", "0.0.0.0", 65535),
        ("localhost:80", "localhost", 80),
        ("[::1]:8080", "::1", 8080),
    ],
)
def test_what_is_asked_for(text: str, host: str, port: int) -> None:
    assert WatchAddress.parse_address(text, "--watch") == WatchAddress(host, port, "--watch")


@pytest.mark.parametrize("text", ["", "x", "8080:", "65536", "-1", "²", "host:port", "1.5"])
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(UsageError, match=r"--watch .*isn't \[HOST:\]PORT"):
        WatchAddress.parse_address(text, "--watch")


def test_a_port_in_use_is_said_in_a_line() -> None:
    with WatchAddress.parse_address("0", "--watch").open_socket() as first:
        port = first.getsockname()[1]
        with pytest.raises(
            UsageError,
            match=(
                rf"no page can be served for --watch: port {port} is in use on 127\.0\.0\.1: "
                r"give another one"
            ),
        ):
            WatchAddress.parse_address(str(port), "--watch").open_socket()


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(UsageError, match=r"192\.0\.2\.7, port 0: Cannot assign requested address"):
        WatchAddress.parse_address("192.0.2.7:0", "--watch").open_socket()
    with pytest.raises(UsageError, match="can't be resolved"):
        WatchAddress.parse_address("no.such.host.invalid:0", "--watch").open_socket()


def test_readers_from_elsewhere_need_a_token_that_tells_nothing_of_the_secret() -> None:
    with (
        WatchAddress.parse_address("0", "--watch").open_socket() as here,
        WatchAddress.parse_address("0.0.0.0:0", "--watch").open_socket() as everywhere,
    ):
        assert PageGuard.for_socket(here, KEY) == PageGuard("")
        guard = PageGuard.for_socket(everywhere, KEY)
        assert len(guard.token) == 32 and KEY.decode() not in guard.token
        assert (
            guard
            == PageGuard.for_socket(everywhere, KEY)
            != PageGuard.for_socket(everywhere, b"x" * 32)
        )
        assert page_url(here, PageGuard()) == f"http://127.0.0.1:{here.getsockname()[1]}/"
        assert (
            page_url(everywhere, guard)
            == f"http://{socket.gethostname()}:{everywhere.getsockname()[1]}/?token={guard.token}"
        )
    if network.is_own_address("::1"):
        with WatchAddress.parse_address("[::1]:0", "--watch").open_socket() as six:
            assert PageGuard.for_socket(six, KEY) == PageGuard("") and page_url(
                six, PageGuard()
            ).startswith("http://[::1]:")


def test_a_library_that_is_missing_is_named_with_the_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    check_aiohttp_installed()
    monkeypatch.setattr(address, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"needs aiohttp, which is not installed: pip install 'paceline\[watch\]'"
    ):
        check_aiohttp_installed()
