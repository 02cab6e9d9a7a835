"""Clients of torch's store don't wait for ever for a server that is stopped."""

from __future__ import annotations

import socket
import struct
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from paceline.cluster import store, store_client
from paceline.cluster.discover import Place
from paceline.errors import DeadlineExceeded

DEADLINE = 3600.0  # seconds; a test that waits so long is ended before


def waits(port: int) -> set[float]:
    """How long sockets of this process wait that are connected to this port."""
    found = set()
    for connection in store_client._copy_sockets():
        with connection:
            try:
                there = connection.getpeername()
            except OSError:
                continue
            if len(there) > 1 and there[1] == port:
                seconds, rest = struct.unpack(
                    "@ll", connection.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)
                )
                found.add(seconds + rest / 1e6)
    return found


def test_what_listens_and_never_answers_is_given_up() -> None:
    # as the system does for a process that is stopped
    listening = socket.create_server(("127.0.0.1", 0))
    with listening, pytest.raises(TimeoutError, match="doesn't answer"):
        store_client.connect_client("127.0.0.1", listening.getsockname()[1], 0.05)


def test_a_worker_that_finds_such_a_store_names_the_first() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = Place(
            rank=1, size=2, meeting=("127.0.0.1", listening.getsockname()[1]), hostname="here"
        )
        with pytest.raises(
            DeadlineExceeded,
            match=r"rank 1 on here found no store .*the program that listens there doesn't answer",
        ) as raised:
            store._connect_until(place, 0.05)
        assert raised.value.missing == (0,)


def test_a_client_waits_for_an_answer_so_many_seconds() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    client = store_client.connect_client("127.0.0.1", server.port, 60.0)
    assert waits(server.port) == {0.0}
    # without addresses, as those between a launcher and its workers
    one, other = socket.socketpair()
    with one, other:
        store_client.limit_answer_time(PrefixStore("inner", client), 2.5)
    assert waits(server.port) == {2.5}  # timer ticks are whole milliseconds
    client.set("here", b"1")
    assert server.get("here") == b"1"
    store_client.limit_answer_time(HashStore(), 2.5)  # which nobody serves


def test_the_end_of_a_server_is_seen_though_the_client_is_gone() -> None:
    server = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    client = store_client.connect_client("127.0.0.1", server.port, 60.0)
    end, other = store_client.ServerEndWaiter(client), store_client.ServerEndWaiter(client)
    del client
    other.wait(0.05)  # it serves, and the time is over
    del server
    end.wait(DEADLINE)
    end.wait(DEADLINE)  # nothing is left to wait for
