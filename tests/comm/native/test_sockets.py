from __future__ import annotations

import os
import socket

import pytest
from torch.distributed import HashStore

from paceline.comm.native.sockets import GroupSockets
from paceline.errors import DeadlineExceeded, PlaceError


def test_a_foreign_address_is_refused() -> None:
    with pytest.raises(PlaceError, match=r"192\.0\.2\.1"):
        GroupSockets("192.0.2.1", 1)


def test_connections_that_are_not_ours_are_left_alone() -> None:
    wires = GroupSockets("127.0.0.1", 2)
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    assert wires.announce_listeners(HashStore(), 0, 1, 1.0, "told") == ["told"]
    assert wires.find_severed_ranks() == ()
    wires.cut_connections()
    client.sendall(b"still here")
    assert accepted.recv(10) == b"still here"
    for line in (client, accepted, server):
        line.close()


def test_who_does_not_come_is_named() -> None:
    with pytest.raises(DeadlineExceeded) as caught:
        GroupSockets("127.0.0.1", 1).announce_listeners(HashStore(), 1, 3, 0.1)
    assert caught.value.missing == (0, 2)


def test_another_thread_closes_a_socket_while_they_are_looked_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line, look, looks = socket.socket(), os.readlink, []
    path = f"/proc/self/fd/{line.fileno()}"

    def closing(name: str) -> str:
        if name == path:
            looks.append(name)
            if len(looks) == 2:
                line.close()
        return look(name)

    monkeypatch.setattr(os, "readlink", closing)
    GroupSockets("127.0.0.1", 1)
    assert len(looks) == 2
