"""Messages through a mesh: sockets of one process, of which each test plays both ends."""

from __future__ import annotations

import ctypes
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline.comm.p2p.network_message import make_message, read_message
from paceline.comm.p2p.pair_message import pack_header
from paceline.comm.p2p.socket_mesh import NOT_SENT, SENT, ArrivedMessage, SocketMesh, give_back
from paceline.comm.wire_format import MalformedMessage
from paceline.errors import ResourceError
from tests.harness.jobs import PATIENCE, wait_for

MAGIC, VERSION = 0x50434C31, 1


@pytest.fixture(params=[True, False], ids=["eager", "lazy"])
def mesh(request: pytest.FixtureRequest) -> Iterator[SocketMesh]:
    made = SocketMesh(eager=request.param)
    yield made
    made.close()


def connect() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        return one, other


def frame(data: bytes) -> bytes:
    return head(len(data)) + data + bytes(-len(data) % 64)


def head(nbytes: int) -> bytes:
    return struct.pack("=IIqqq32x", MAGIC, VERSION, nbytes, 0, 0)


def piece(data: Any) -> tuple[int, int]:
    return ctypes.addressof(data), len(data)


def wait_for_message(mesh: SocketMesh) -> ArrivedMessage:
    """Wait for the next message."""
    end = time.monotonic() + PATIENCE
    while True:
        seen = mesh.changes
        arrived = mesh.take_message()
        if arrived is not None:
            return arrived
        assert not mesh.has_ended_links and time.monotonic() < end
        mesh.wait_for_change(seen, 1.0)


def next_message(mesh: SocketMesh, link: int) -> bytes:
    """Wait for the next message, and give its memory back."""
    arrived = wait_for_message(mesh)
    assert arrived.link == link
    data = ctypes.string_at(arrived.address, arrived.nbytes)
    give_back(arrived.address)
    return data


@pytest.mark.parametrize("at_once", [0, 1 << 18])
def test_messages_come_as_they_were_sent(mesh: SocketMesh, at_once: int) -> None:
    dice = random.Random(3)
    one, other = connect()
    out, into = mesh.add_link(one), mesh.add_link(other)
    lengths = [dice.choice((0, 1, 11, 12, 13, 4095, 16_384, 300_000, 3_000_000)) for _ in range(60)]
    data = [ctypes.create_string_buffer(dice.randbytes(n), max(n, 1)) for n in lengths]
    for number, (n, memory) in enumerate(zip(lengths, data, strict=True), 1):
        start = ctypes.addressof(memory)
        cut = dice.randrange(n + 1)
        pieces = [(start, cut), (start, 0), (start + cut, n - cut)]
        assert mesh.send(out, pieces, at_once=at_once) in (SENT, number)
    assert [next_message(mesh, into) for _ in lengths] == [
        memory.raw[:n] for n, memory in zip(lengths, data, strict=True)
    ]
    assert mesh.count_sent(out) == len(lengths)


def test_many_pieces_are_sent_in_order(mesh: SocketMesh) -> None:
    one, other = connect()
    out, into = mesh.add_link(one), mesh.add_link(other)
    data = ctypes.create_string_buffer(random.Random(1).randbytes(999))
    assert mesh.send(out, [(ctypes.addressof(data) + i, 1) for i in range(999)], at_once=0) == 1
    assert next_message(mesh, into) == data.raw[:999]


def test_a_sender_is_not_held_up_and_a_wait_for_it_ends(mesh: SocketMesh) -> None:
    one, other = connect()
    out = mesh.add_link(one)
    data = ctypes.create_string_buffer(1 << 24)
    assert mesh.send(out, [piece(data)], at_once=1 << 18) == 1
    mesh.wait_for_change(mesh.changes, 0.05)
    assert mesh.count_sent(out) == 0
    reader = threading.Thread(target=lambda: [None for _ in iter(lambda: other.recv(1 << 20), b"")])
    reader.start()
    wait_for(lambda: mesh.count_sent(out) == 1)
    mesh.close()
    reader.join(PATIENCE)
    assert not reader.is_alive()


def test_frames_may_come_in_any_pieces(mesh: SocketMesh) -> None:
    dice = random.Random(5)
    here, there = connect()
    into = mesh.add_link(there)
    data = [dice.randbytes(dice.choice((0, 5, 100, 20_000, 70_000))) for _ in range(40)]
    stream, at = b"".join(map(frame, data)), 0
    while at < len(stream):
        step = dice.choice((1, 3, 12, 1000, 50_000))
        here.sendall(stream[at : at + step])
        at += step
    assert [next_message(mesh, into) for _ in data] == data


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (b"", "it has closed its end"),
        (frame(b"abc"), "it has closed its end"),
        (frame(b"abc")[:5], "reset"),
        (frame(b"x" * 50_000)[:-1], "reset"),
        (b"GET / HTTP/1.1\r\n\r\n" + bytes(46), "no message"),
        (head(-1), "no message"),
        (head(1 << 60), "no message"),
    ],
)
def test_a_link_ends_with_a_reason(mesh: SocketMesh, said: bytes, reason: str) -> None:
    here, there = connect()
    into = mesh.add_link(there)
    here.sendall(said)
    here.shutdown(socket.SHUT_WR)
    came = None
    while not mesh.find_end(into):
        seen, came = mesh.changes, came or mesh.take_message()
        mesh.wait_for_change(seen, 1.0)
    assert reason in mesh.find_end(into)
    came = came or mesh.take_message()
    assert (came is not None) == (said == frame(b"abc"))
    assert mesh.send(into, []) == NOT_SENT


def test_random_bytes_never_break_the_reader(mesh: SocketMesh) -> None:
    dice = random.Random(7)
    for _ in range(200):
        here, there = connect()
        into = mesh.add_link(there)
        stream = bytearray(b"".join(frame(dice.randbytes(dice.randrange(40))) for _ in range(4)))
        for _ in range(dice.randrange(4)):
            stream[dice.randrange(len(stream))] = dice.randrange(256)
        here.sendall(stream)
        here.close()
        while True:
            seen, has_ended = mesh.changes, bool(mesh.find_end(into))
            while (came := mesh.take_message()) is not None:
                assert came.nbytes <= len(stream)
                give_back(came.address)
            if has_ended:
                break
            mesh.wait_for_change(seen, 1.0)


def test_memory_is_used_again_and_outlives_the_mesh(mesh: SocketMesh) -> None:
    here, there = connect()
    mesh.add_link(there)

    def arrive() -> ArrivedMessage:
        here.sendall(frame(b"x" * 100_000))
        wait_for(lambda: bool(found.append(mesh.take_message()) or found[-1]))
        return found[-1]

    found: list[Any] = []
    first, second = arrive(), arrive()
    assert first.address != second.address and first.address % 64 == 0
    give_back(first.address)
    assert arrive().address == first.address
    mesh.close()
    assert ctypes.string_at(second.address, 3) == b"xxx"
    give_back(second.address)
    give_back(first.address)


def test_a_rest_is_copied(mesh: SocketMesh) -> None:
    one, other = connect()
    out, into = mesh.add_link(one), mesh.add_link(other)
    data = ctypes.create_string_buffer(random.Random(2).randbytes(1 << 24))
    wanted = data.raw
    assert mesh.send(out, [piece(data)], copies=True) in (SENT, 1)
    ctypes.memset(data, 0, len(data))
    assert next_message(mesh, into) == wanted


def test_expected_messages_land_in_their_order(mesh: SocketMesh) -> None:
    dice = random.Random(11)
    one, other = connect()
    out, into = mesh.add_link(one), mesh.add_link(other)
    for turn in range(60):
        # Messages of three keys: some are expected before they are sent, and some afterwards.
        sizes = [dice.choice((0, 1, 63, 64, 5000, 100_000, 700_001)) for _ in range(6)]
        data = [ctypes.create_string_buffer(dice.randbytes(n), max(n, 1)) for n in sizes]
        places = [ctypes.create_string_buffer(max(n, 1)) for n in sizes]
        early = dice.randrange(7)
        for number in range(early):
            place = ctypes.addressof(places[number])
            mesh.expect_message(into, 2, number % 3, place, sizes[number])
        for number, memory in enumerate(data):
            pieces = [(ctypes.addressof(memory), sizes[number])]
            mesh.send(out, pieces, channel=2, key=number % 3, copies=True)
        late = dice.choice((0.0, 0.001))
        time.sleep(late)
        for number in range(early, 6):
            place = ctypes.addressof(places[number])
            mesh.expect_message(into, 2, number % 3, place, sizes[number])
        waiting = {key: [n for n in range(6) if n % 3 == key] for key in range(3)}
        for _ in data:
            arrived = wait_for_message(mesh)
            number = waiting[arrived.key].pop(0)
            assert (arrived.channel, arrived.nbytes) == (2, sizes[number]), turn
            if not arrived.has_landed:
                assert number >= early
                ctypes.memmove(places[number], arrived.address, arrived.nbytes)
            give_back(arrived.address)
        for number, n in enumerate(sizes):
            assert places[number].raw[:n] == data[number].raw[:n], (turn, number)


def test_a_message_of_another_size_does_not_land(mesh: SocketMesh) -> None:
    one, other = connect()
    out, into = mesh.add_link(one), mesh.add_link(other)
    data, place = ctypes.create_string_buffer(b"abc"), ctypes.create_string_buffer(2)
    mesh.expect_message(into, 0, 0, ctypes.addressof(place), 2)
    mesh.send(out, [(ctypes.addressof(data), 3)])
    arrived = wait_for_message(mesh)
    assert not arrived.has_landed and ctypes.string_at(arrived.address, 3) == b"abc"
    assert place.raw == bytes(2)
    give_back(arrived.address)


def test_an_expected_message_comes_while_no_thread_waits(mesh: SocketMesh) -> None:
    one, other = connect()
    into, nbytes = mesh.add_link(other), 24 << 20
    place = ctypes.create_string_buffer(nbytes)
    mesh.expect_message(into, 0, 0, ctypes.addressof(place), nbytes)
    one.sendall(frame(b"y" * nbytes))  # more than the network takes
    assert wait_for_message(mesh).has_landed and place.raw == b"y" * nbytes


def test_the_end_of_a_mesh_ends_waits(mesh: SocketMesh) -> None:
    one, other = connect()
    out = mesh.add_link(one)
    data = ctypes.create_string_buffer(1 << 24)
    mesh.send(out, [piece(data)], at_once=0)
    # One of them serves the sockets, the others sleep.
    waits = [
        threading.Thread(target=lambda: mesh.wait_for_change(mesh.changes, PATIENCE))
        for _ in range(3)
    ]
    for thread in waits:
        thread.start()
    time.sleep(0.05)
    mesh.close()
    for thread in waits:
        thread.join(PATIENCE / 2)
        assert not thread.is_alive()
    assert mesh.find_end(out) and mesh.send(out, [piece(data)], at_once=0) == NOT_SENT
    with pytest.raises(ResourceError):
        mesh.add_link(other)


def test_many_threads_wait_for_messages_of_many_links(mesh: SocketMesh) -> None:
    """Each thread answers one link; together they take every message once."""
    ends = [connect() for _ in range(4)]
    links = [(mesh.add_link(one), mesh.add_link(other)) for one, other in ends]
    taken: list[tuple[int, bytes]] = []
    total = 4 * 500

    def take() -> None:
        end = time.monotonic() + PATIENCE
        while len(taken) < total and time.monotonic() < end:
            seen = mesh.changes
            arrived = mesh.take_message()
            if arrived is None:
                mesh.wait_for_change(seen, 1.0)
            else:
                taken.append((arrived.link, ctypes.string_at(arrived.address, arrived.nbytes)))
                give_back(arrived.address)
        mesh.wake()

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    data = [ctypes.create_string_buffer(str(number).encode()) for number in range(500)]
    for memory in data:
        for out, _ in links:
            mesh.send(out, [(ctypes.addressof(memory), len(memory) - 1)], copies=True)
    for thread in threads:
        thread.join(PATIENCE)
    for _, into in links:
        assert sorted(int(text) for link, text in taken if link == into) == list(range(500))


# ---- messages of tensors


def through_bytes(message: Any) -> ArrivedMessage:
    """Bring a message into memory of a mesh."""
    mesh, (here, there) = SocketMesh(eager=True), connect()
    out, _ = mesh.add_link(here), mesh.add_link(there)
    mesh.send(out, message.pieces)
    arrived: list[Any] = []
    wait_for(lambda: bool(arrived.append(mesh.take_message()) or arrived[-1]))
    mesh.close()
    return arrived[-1]


@pytest.mark.parametrize("count", [0, 1, 4, 100])
def test_tensors_come_as_they_were_sent(count: int) -> None:
    dice = random.Random(count)
    tensors = [
        torch.randn(dice.choice((0, 1, 7, 30_000))).to(dice.choice((torch.bool, torch.float64)))
        for _ in range(count)
    ]
    tensors += [torch.arange(12).view(3, 4).t()]
    message = make_message(pack_header(7, {"n": count}, tensors), tensors)
    lane, came = read_message(through_bytes(message))
    assert (lane, came.head, len(came.tensors)) == (7, {"n": count}, len(tensors))
    for x, y in zip(came.tensors, tensors, strict=True):
        assert torch.equal(x, y) and x.dtype == y.dtype


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x01\0",
        struct.pack("<I", 1 << 31) + b"{}",
        struct.pack("<I", 50) + b"0\n[]\n{}",
        struct.pack("<I", 6) + b"0 [] {}",
        struct.pack("<I", 7) + b"0\n[]\n{}x",
        struct.pack("<I", 24) + b'0\n[["float32",[9]]]\n{}  ',
    ],
)
def test_a_message_that_describes_itself_wrongly_is_refused(said: bytes) -> None:
    here, there = connect()
    mesh = SocketMesh(eager=True)
    mesh.add_link(there)
    here.sendall(frame(said))
    arrived: list[Any] = []
    wait_for(lambda: bool(arrived.append(mesh.take_message()) or arrived[-1]))
    with pytest.raises(MalformedMessage):
        read_message(arrived[-1])
    mesh.close()
