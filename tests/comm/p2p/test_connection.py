from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest

from paceline.cluster.secret import MAC_BYTES
from paceline.comm.p2p import connection
from paceline.comm.p2p.connection import (
    HELLO,
    MAGIC,
    ListeningAddress,
    admit_sender,
    call_worker,
    prove_as_sender,
)
from paceline.errors import SecretError
from tests.harness.jobs import PATIENCE

KEY = b"k" * 32


def pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        return one, server.accept()[0]


def both(left: Callable[[], Any], right: Callable[[], Any]) -> tuple[Any, Any]:
    """What two functions give that run at the same time; an error is given, too."""
    results: list[Any] = [None, None]

    def run(index: int, act: Callable[[], Any]) -> None:
        try:
            results[index] = act()
        except Exception as error:  # noqa: BLE001  looked at by the test
            results[index] = error

    threads = [
        threading.Thread(target=run, args=each, daemon=True) for each in enumerate((left, right))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    return results[0], results[1]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever proves itself may take long."""
    monkeypatch.setattr(connection, "PROOF", PATIENCE)


@pytest.mark.usefixtures("patient")
def test_two_that_know_the_key_let_each_other_in() -> None:
    here, there = pair()
    assert both(
        lambda: prove_as_sender(here, KEY, (3, 5), "rank 5"),
        lambda: admit_sender(there, KEY, 5, {3}),
    ) == (None, 3)


def test_who_was_not_let_in_calls_again() -> None:
    class Impatient:
        """A receiver's connection, over which the proof comes too late."""

        def __init__(self, own: socket.socket) -> None:
            self._own = own

        def __getattr__(self, name: str) -> Any:
            return getattr(self._own, name)

        def recv(self, nbytes: int) -> bytes:
            if nbytes == MAC_BYTES:
                raise TimeoutError
            return self._own.recv(nbytes)

    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(PATIENCE)

        def answer() -> tuple[int | None, socket.socket]:
            with server.accept()[0] as first, pytest.raises(TimeoutError):
                admit_sender(Impatient(first), KEY, 5, {3})  # type: ignore[arg-type]
            second = server.accept()[0]
            return admit_sender(second, KEY, 5, {3}), second

        place = ListeningAddress(*server.getsockname(), "")
        options: dict[str, Any] = {
            "who": "rank 5",
            "name": 5,
            "deadline": PATIENCE,
            "check": lambda: None,
        }
        here, (admitted, there) = both(lambda: call_worker(place, KEY, (3, 5), **options), answer)
    with here, there:
        assert admitted == 3 and here.getsockname() == there.getpeername()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("key", "ranks"),
    [(b"x" * 32, (3, 5)), (KEY, (4, 5)), (KEY, (3, 6))],
    ids=["another key", "a rank that isn't awaited", "meant for another receiver"],
)
def test_a_stranger_is_not_let_in(key: bytes, ranks: tuple[int, int]) -> None:
    here, there = pair()

    def answer() -> int | None:
        found = admit_sender(there, KEY, 5, {3})
        there.close()
        return found

    def call() -> None:
        with here:
            prove_as_sender(here, key, ranks, "rank 5 on node")

    caller, admitted = both(call, answer)
    assert admitted is None or isinstance(admitted, OSError)
    assert isinstance(caller, OSError | SecretError)
    if isinstance(caller, SecretError):
        assert "rank 5 on node: it doesn't know the secret" in str(caller)


@pytest.mark.usefixtures("patient")
def test_a_proof_does_not_count_a_second_time() -> None:
    here, there = pair()
    heard = []

    class Tapped:
        """What a sender says, written down."""

        def __getattr__(self, name: str) -> Any:
            return getattr(here, name)

        def sendall(self, data: bytes) -> None:
            heard.append(data)
            here.sendall(data)

    assert (
        both(
            lambda: prove_as_sender(Tapped(), KEY, (3, 5), ""),
            lambda: admit_sender(there, KEY, 5, {3}),
        )[1]
        == 3
    )  # type: ignore[arg-type]
    here, there = pair()
    here.sendall(b"".join(heard))
    assert admit_sender(there, KEY, 5, {3}) is None


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\n\r\n" * 9, MAGIC, HELLO.pack(MAGIC, 3, b"n" * 16) + b"0" * 32],
    ids=range(4),
)
def test_noise_is_not_let_in(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "PROOF", 0.05)
    here, there = pair()
    here.sendall(said)
    with contextlib.suppress(OSError):  # it says too little, for too long
        assert admit_sender(there, KEY, 5, {3}) is None
