"""Channels between launchers are closed only when what was sent last has come."""

from __future__ import annotations

import socket
import threading
import time

from paceline.cluster import network
from paceline.cluster.hosts.channel import Channel, close_channels, wait_ready
from tests.harness.jobs import PATIENCE


def connected() -> tuple[Channel, Channel]:
    """Two ends of a connection whose second one has room for few bytes that nobody has read."""
    with network.open_listener("127.0.0.1") as listening:
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(listening.getsockname())
        server, _ = listening.accept()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    return Channel(server, "server"), Channel(client, "client")


def test_the_last_messages_arrive_though_the_other_side_has_said_something_meanwhile() -> None:
    """A heartbeat that nobody reads makes the system reset a connection that is closed, with all
    that is still on its way.
    """
    server, client = connected()
    client.send({"kind": "beat"})
    wait_ready([server.fileno()], PATIENCE)
    text = "x" * 3000
    for number in range(100):
        server.send({"number": number, "text": text})
    closing = threading.Thread(target=close_channels, args=([server], PATIENCE))
    closing.start()
    for number in range(100):
        assert client.wait_for_message(time.monotonic() + PATIENCE)["number"] == number
    closing.join()
    assert server.fileno() == -1
    client.close()


def test_who_never_reads_is_not_waited_for_longer_than_asked() -> None:
    server, client = connected()
    while not network.count_unacknowledged_bytes(server.connection):
        server.send({"text": "x" * 3000})
    close_channels([server], 0.05)
    assert server.fileno() == -1
    client.close()


def test_who_has_hung_up_is_not_waited_for() -> None:
    server, client = connected()
    client.close()
    wait_ready([server.fileno()], PATIENCE)
    close_channels([server], float("inf"))
    assert server.fileno() == -1
