from __future__ import annotations

import socket

import pytest
from torch.distributed import HashStore

from paceline.comm.wires import Wires
from paceline.errors import DeadlineExceeded, PlaceError


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(PlaceError, match=r"192\.0\.2\.1"):
        Wires("192.0.2.1", 1)


def test_connections_that_are_not_ours_are_left_alone() -> None:
    wires = Wires("127.0.0.1", 2)
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    wires.announce(HashStore(), 0, 1, 1.0)
    assert wires.severed() == ()
    wires.cut()
    client.sendall(b"still here")
    assert accepted.recv(10) == b"still here"
    for line in (client, accepted, server):
        line.close()


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        Wires("127.0.0.1", 1).announce(HashStore(), 1, 3, 0.1)
    assert caught.value.missing == (0, 2)
