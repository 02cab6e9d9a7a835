"""Strangers at a server's port: they take hardly any room, and keep out nobody who has the key."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest
import torch

from paceline.cluster import network
from paceline.comm import admission
from paceline.comm.rpc import FRAME, RpcClient, RpcMessage, derive_rpc_keys
from paceline.comm.wire_format import MalformedMessage
from paceline.timings import DEFAULT_TIMINGS, ServerTimings
from tests.harness import strangers
from tests.harness.rpc_servers import SECONDS, Server, echo

KEYS = derive_rpc_keys(b"a secret of this job", "job 1")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)  # ZMTP 3.1


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    found = Server(
        echo, hosts=["127.0.0.1"], timings=getattr(request, "param", DEFAULT_TIMINGS.servers)
    )
    yield found
    found.close()


def point(server: Server) -> tuple[str, int]:
    host, port = server.receiver.addresses[0].removeprefix("tcp://").split(":")
    return host, int(port)


def answers(server: Server) -> bool:
    caller = RpcClient(server.receiver.addresses[0], KEYS, sender=1, who="server 0", alert=SECONDS)
    try:
        return (
            caller.call("k", tensors=[torch.arange(FRAME)], seconds=SECONDS).tensors[0].sum()
            == FRAME * (FRAME - 1) // 2
        )
    finally:
        caller.close()


@pytest.mark.parametrize("kind", [0x02, 0x06], ids=["a message", "a command"])
def test_a_stranger_cannot_make_a_server_take_much(server: Server, kind: int) -> None:
    """Of a frame that is said to be large nothing is waited for; a little one may come."""
    with socket.create_connection(point(server), timeout=SECONDS) as stranger:
        stranger.sendall(GREETING + bytes([kind]) + (200 << 20).to_bytes(8, "big") + bytes(1000))
        with pytest.raises(ConnectionError):
            while stranger.recv(1 << 12):
                pass
            raise ConnectionResetError  # it hung up politely
    assert answers(server)


@pytest.mark.parametrize("server", [ServerTimings(key=1000.0)], indirect=True, ids=["patient"])
def test_strangers_that_hold_1100_open_are_hung_up_on(server: Server) -> None:
    """They are not hung up on for being slow."""
    with strangers.held_open(point(server), 1100) as held:
        for each in held:
            each.sendall(GREETING)
        assert answers(server)
        poll = select.poll()
        for each in held:
            poll.register(each, select.POLLRDHUP)
        strangers.until(lambda: len(poll.poll(100)) >= 1100 - admission.MOST, lambda: None)


def test_who_is_let_in_stays_in_whoever_comes(server: Server) -> None:
    caller = RpcClient(server.receiver.addresses[0], KEYS, sender=1, who="server 0", alert=SECONDS)
    caller.call("k", seconds=SECONDS)
    with strangers.held_open(point(server), 300):
        assert answers(server)
    assert caller.call("k", seconds=SECONDS).kind == "echo" and not caller.is_gone
    caller.close()


def test_who_is_pushed_out_before_it_is_let_in_tries_again() -> None:
    with network.open_listener("127.0.0.1") as listening:
        caller = RpcClient(
            f"tcp://127.0.0.1:{listening.getsockname()[1]}",
            KEYS,
            sender=1,
            who="server 0",
            alert=SECONDS,
        )
        for _ in range(4):  # by the last one it has heard of the others
            assert not caller.is_gone
            listening.accept()[0].close()
        caller.close()


@pytest.mark.parametrize("nbytes", [0, 1, FRAME - 1, FRAME, FRAME + 1, 3 * FRAME, 3 * FRAME + 5])
def test_tensors_travel_in_frames(server: Server, nbytes: int) -> None:
    x = torch.arange(nbytes, dtype=torch.int64).to(torch.uint8)
    caller = RpcClient(server.receiver.addresses[0], KEYS, sender=1, who="server 0")
    found = caller.call("k", tensors=[x, x[:1]], seconds=SECONDS)
    assert all(
        torch.equal(one, other) for one, other in zip(found.tensors, (x, x[:1]), strict=True)
    )
    assert (
        max(memoryview(frame).nbytes for frame in RpcMessage("k", 1, tensors=(x,)).to_frames(FRAME))
        <= FRAME
    )
    caller.close()


def test_a_frame_too_few() -> None:
    frames = RpcMessage("k", 1, tensors=(torch.zeros(3 * FRAME, dtype=torch.uint8),)).to_frames(
        FRAME
    )
    assert len(frames) == 4
    for wrong in (frames[:-1], [*frames, b""], [*frames[:-1], frames[-1][:-1]]):
        with pytest.raises(MalformedMessage):
            RpcMessage.from_frames(wrong, b"", FRAME)
