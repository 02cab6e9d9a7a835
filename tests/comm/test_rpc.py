"""Messages arrive as they were sent, and nothing else does: not what is cut short, repeated,
garbage, or a stranger's.
"""

from __future__ import annotations

import os
import random
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import zmq
from torch import Tensor

from paceline.cluster.secret import derive_key
from paceline.comm import rpc
from paceline.comm.rpc import (
    HEAD_BYTES,
    WAITING,
    MalformedMessage,
    RpcClient,
    RpcKeys,
    RpcMessage,
    RpcServer,
    derive_rpc_keys,
)
from paceline.comm.wire_format import DTYPES
from paceline.errors import DeadlineExceeded, Mismatch, ViewChanged
from tests.harness.rpc_servers import KEYS, SECONDS, Server, echo


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """Servers, and a folder for their socket files."""
    servers: list[Server] = []
    (tmp_path / "s").mkdir(mode=0o700)

    def make(
        act: Callable[[RpcServer, RpcMessage], Any] = echo, *, where: str = "tcp", **parts: Any
    ) -> Server:
        place = {"hosts": ["127.0.0.1"]} if where == "tcp" else {"path": str(tmp_path / "s" / "0")}
        servers.append(Server(act, **(place | parts)))
        return servers[-1]

    yield make
    for server in servers:
        server.close()


@pytest.fixture
def call(serve: Any) -> Iterator[Callable[..., RpcClient]]:
    """Callers of a server."""
    callers: list[RpcClient] = []

    def make(server: Server, *, sender: int = 3, of: RpcKeys = KEYS, **parts: Any) -> RpcClient:
        callers.append(
            RpcClient(
                server.receiver.addresses[0], of, sender=sender, who="server 0 on here", **parts
            )
        )
        return callers[-1]

    yield make
    for caller in callers:
        caller.close()


def plain(server: Server, *, room: int = 1000) -> zmq.Socket[Any]:
    """A socket with the right keys that sends whatever it likes, with room for so many answers."""
    found = zmq.Context.instance().socket(zmq.DEALER)
    found.linger, found.rcvhwm = 0, room
    found.curve_serverkey, (found.curve_publickey, found.curve_secretkey) = (
        KEYS.server[0],
        KEYS.worker,
    )
    found.connect(server.receiver.addresses[0])
    return found


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


class TestKeys:
    def test_hkdf_as_the_rfc_has_it(self) -> None:
        """RFC 5869, test case 3: no salt, no info."""
        assert derive_key(b"\x0b" * 22, "", 42).hex() == (
            "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
        )

    def test_each_job_and_role_has_its_own(self) -> None:
        found = {
            key
            for job in ("a", "b")
            for pair in derive_rpc_keys(b"one secret of all", job)
            for key in pair
        }
        assert len(found) == 8 and derive_rpc_keys(b"one secret of all", "a") == derive_rpc_keys(
            b"one secret of all", "a"
        )
        assert derive_rpc_keys(b"another secret!!", "a") != derive_rpc_keys(
            b"one secret of all", "a"
        )


class TestArriving:
    @pytest.mark.parametrize("where", ["tcp", "ipc"])
    def test_all_of_it(self, serve: Any, call: Any, where: str) -> None:
        tensors = [
            torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
            torch.tensor(7),
            torch.empty(0, 5),
            torch.randn(100_000),
        ]
        caller = call(serve(where=where))
        found = caller.call(
            "push",
            view=2,
            step=5,
            body={"a": [1, {"b": 2.5}], "c": b"x"},
            tensors=tensors,
            seconds=SECONDS,
        )
        assert (found.kind, found.view, found.step, found.body) == (
            "echo",
            2,
            5,
            {"a": [1, {"b": 2.5}], "c": b"x"},
        )
        for one, other in zip(tensors, found.tensors, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
        found.tensors[3].zero_()  # memory of its own

    @pytest.mark.parametrize("name", DTYPES)
    def test_every_dtype(self, name: str) -> None:
        x = torch.arange(6).view(2, 3).to(DTYPES[name])
        (found,) = RpcMessage.from_frames(RpcMessage("k", 1, tensors=(x,)).to_frames()).tensors
        assert found.dtype == x.dtype and torch.equal(found, x)

    @pytest.mark.parametrize("name", DTYPES)
    def test_tensors_lie_where_the_processor_can_use_them(self, name: str) -> None:
        """Frames begin anywhere; vector instructions on complex128 end the process where that is
        no multiple of 16.
        """
        x = torch.arange(5).to(DTYPES[name])
        head, body = RpcMessage("push", 1, tensors=(x,)).to_frames()
        room = bytearray(64 + x.nbytes)
        for start in range(16):
            room[start : start + x.nbytes] = body
            (found,) = RpcMessage.from_frames(
                [head, memoryview(room)[start : start + x.nbytes]]
            ).tensors
            assert found.data_ptr() % x.itemsize == 0 and torch.equal(found, x)

    def test_many_in_flight_by_many(self, serve: Any, call: Any) -> None:
        server, failed = serve(), []

        def work(sender: int) -> None:
            caller = call(server, sender=sender)
            for turn in range(5):
                numbers = [
                    caller.send(
                        "k",
                        body={"n": [sender, turn, i]},
                        tensors=[torch.full((1000,), float(i))],
                        seconds=SECONDS,
                    )
                    for i in range(10)
                ]
                for i in reversed(range(10)):
                    found = caller.wait_for_answer(numbers[i], SECONDS)
                    if found.body["n"] != [sender, turn, i] or not bool(
                        (found.tensors[0] == i).all()
                    ):
                        failed.append((sender, turn, i))

        threads = [threading.Thread(target=work, args=(sender,)) for sender in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not failed and len(server.heard) == 200 and not server.said
        for sender in range(4):
            assert [message.number for message in server.heard if message.sender == sender] == list(
                range(1, 51)
            )

    def test_who_sends_waits_for_who_is_slow(self, serve: Any, call: Any) -> None:
        """Nobody's memory is eaten: some messages wait, and no more are taken."""
        go = threading.Event()
        server = serve(lambda receiver, message: (go.wait(SECONDS), echo(receiver, message)))
        caller, sent = call(server), 0
        with pytest.raises(DeadlineExceeded, match=r"server 0 on here takes no push within 0\.3 s"):
            for _ in range(1000):
                caller.send("push", tensors=[torch.zeros(1 << 18)], seconds=0.3)
                sent += 1
        assert sent < 4 * WAITING
        go.set()
        assert caller.wait_for_answer(sent, SECONDS).kind == "echo"

    @pytest.mark.parametrize("where", ["tcp", "ipc"])
    def test_answers_wait_for_who_reads_late(self, serve: Any, call: Any, where: str) -> None:
        """More of them than either side keeps, and than a socket holds."""
        held, x = [], torch.arange(1 << 18, dtype=torch.float32)

        def act(receiver: RpcServer, message: RpcMessage) -> None:
            held.append(message)
            for each in held if message.body.get("go") else ():
                assert receiver.answer(each, "late", {}, [x])

        caller = call(serve(act, where=where))
        numbers = [
            caller.send("k", body={"go": turn == 4 * WAITING}, seconds=SECONDS)
            for turn in range(4 * WAITING + 1)
        ]
        time.sleep(0.2)
        for number in numbers:
            assert torch.equal(caller.wait_for_answer(number, SECONDS).tensors[0], x)


class TestWaiting:
    def test_nobody_answers(self, serve: Any, call: Any) -> None:
        caller = call(serve(lambda receiver, message: None))
        for number in range(1, 6):  # on a busy machine the call may be late for its own wait
            before, started = caller.waited, time.monotonic()
            with pytest.raises(
                DeadlineExceeded,
                match=rf"server 0 on here has not answered message {number} within 0\.2 s",
            ):
                caller.call("k", seconds=0.2)
            waited = caller.waited - before
            assert waited <= time.monotonic() - started
            if waited >= 0.15:
                break
        assert waited >= 0.15

    def test_a_wait_is_ended_from_elsewhere(self, serve: Any, call: Any) -> None:
        caller = call(serve(lambda receiver, message: None))
        threading.Timer(0.1, lambda: caller.end_waits(ViewChanged("others now"))).start()
        with pytest.raises(ViewChanged):
            caller.call("k", seconds=60)
        with pytest.raises(ViewChanged):
            caller.send("k", seconds=60)

    def test_what_is_refused_says_why(self, serve: Any, call: Any) -> None:
        server = serve(lambda receiver, message: receiver.refuse(message, "there is no unit 7"))
        with pytest.raises(Mismatch, match="server 0 on here refused it: there is no unit 7"):
            call(server).call("push", seconds=SECONDS)
        assert (
            server.said == ["push of 3 was refused: there is no unit 7"]
            and server.receiver.refused_count == 1
        )

    def test_an_answer_to_somebody_who_is_gone(self, serve: Any, call: Any) -> None:
        held: list[Any] = []
        server = serve(
            lambda receiver, message: held.append(message) if not held else echo(receiver, message)
        )
        gone = RpcClient(server.receiver.addresses[0], KEYS, sender=1, who="x")
        gone.send("k", seconds=SECONDS)
        until(lambda: bool(held))
        gone.close()
        server._act = lambda receiver, message: (
            held.append(receiver.answer(held[0], "late")) or echo(receiver, message)
        )
        other = call(server)
        until(lambda: other.call("k", seconds=SECONDS).kind == "echo" and held[-1] is False)


class TestStrangers:
    def refused(self, server: Server, of: RpcKeys, why: str = "") -> None:
        caller = RpcClient(server.receiver.addresses[0], of, sender=1, who="x")
        with pytest.raises(DeadlineExceeded):
            caller.call("k", seconds=0.5)
        until(lambda: not why or any(why in text for text in server.said))
        caller.close()
        assert not server.heard

    def test_another_secret(self, serve: Any, call: Any) -> None:
        server = serve()
        self.refused(server, derive_rpc_keys(b"another secret!!", "job 1"))
        assert call(server).call("k", seconds=SECONDS).kind == "echo"

    def test_another_job(self, serve: Any) -> None:
        self.refused(serve(), derive_rpc_keys(b"a secret of this job", "job 2"))

    def test_the_right_key_of_the_server_and_a_wrong_one_of_ones_own(
        self, serve: Any, call: Any
    ) -> None:
        """What CURVE alone would let in."""
        server = serve()
        self.refused(
            server,
            RpcKeys(KEYS.server, zmq.curve_keypair()),
            "has not the key of this job's workers",
        )
        assert call(server).call("k", seconds=SECONDS).kind == "echo"

    def test_no_key(self, serve: Any) -> None:
        server, bare = serve(), zmq.Context.instance().socket(zmq.DEALER)
        bare.linger = 0
        bare.connect(server.receiver.addresses[0])
        bare.send_multipart(RpcMessage("k", 1).to_frames())
        assert not bare.poll(400) and not server.heard
        bare.close()

    def test_without_the_guard_nobody_gets_in(
        self, serve: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class Gone:
            def __init__(self, *_: Any) -> None: ...
            def watch_listener(self, *_: Any) -> None: ...
            def start(self) -> None: ...
            def close_unstarted(self) -> None: ...
            def join(self) -> None: ...

        monkeypatch.setattr("paceline.comm.rpc.ConnectionGuard", Gone)
        self.refused(serve(), KEYS)

    def test_socket_files_are_of_their_owner_alone(self, serve: Any, tmp_path: Path) -> None:
        server = serve(where="ipc")
        path = Path(server.receiver.addresses[0].removeprefix("ipc://"))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        server.close()
        assert not path.exists()
        server.close = lambda: None  # type: ignore[method-assign]

    def test_a_folder_that_is_open_to_others_is_refused(self, tmp_path: Path) -> None:
        os.chmod(tmp_path, 0o755)
        with pytest.raises(AssertionError, match="0700"):
            RpcServer(KEYS, path=str(tmp_path / "x"))


def head(**parts: Any) -> bytes:
    usual = {"kind": "k", "number": 1, "sender": 0, "view": 0, "step": 0, "body": {}, "forms": []}
    return msgpack.packb(list((usual | parts).values()))


def nested(depth: int) -> Any:
    return {} if depth == 0 else {"a": nested(depth - 1)}


BAD = {
    "nothing": [],
    "an empty header": [b""],
    "no msgpack": [b"\xc1" * 20],
    "half a header": [head()[:-3]],
    "two headers": [head() + head()],
    "a number": [msgpack.packb(3)],
    "too few parts": [msgpack.packb(["k", 1, 0, 0, 0, {}])],
    "a kind that is none": [head(kind=5)],
    "a negative number": [head(number=-1)],
    "a number that is none": [head(step=1.5)],
    "true is no number": [head(view=True)],
    "a body that is no map": [head(body=[1])],
    "deep": [head(body=nested(7))],
    "deeper than msgpack goes": [b"\x97\xa1k\x01\x00\x00\x00" + b"\x91" * 5000],
    "large": [head(body={"x": b"0" * HEAD_BYTES})],
    "no list of tensors": [head(forms=3)],
    "a tensor too few": [head(forms=[["float32", [1]]])],
    "a tensor too many": [head(), b"0000"],
    "a dtype that is unknown": [head(forms=[["float31", [1]]]), b"0000"],
    "a dtype that is no text": [head(forms=[[["float32"], [1]]]), b"0000"],
    "a form of one": [head(forms=[["float32"]]), b"0000"],
    "no shape": [head(forms=[["float32", 4]]), b"0" * 16],
    "a negative length": [head(forms=[["float32", [-1, -1]]]), b"0000"],
    "lengths that wrap around": [head(forms=[["float32", [1 << 32, 1 << 32]]]), b""],
    "lengths of nothing that wrap around": [head(forms=[["float32", [0, 1 << 62, 1 << 62]]]), b""],
    "a length of nothing that is none": [head(forms=[["float32", [0, 1 << 63]]]), b""],
    "too many dims": [head(forms=[["float32", [1] * 17]]), b"0000"],
    "cut short": [head(forms=[["float32", [2]]]), b"0000"],
    "too long": [head(forms=[["float32", [2]]]), b"0" * 9],
}


class TestRubbish:
    @pytest.mark.parametrize("name", BAD)
    def test_is_refused(self, name: str) -> None:
        with pytest.raises(MalformedMessage):
            RpcMessage.from_frames(BAD[name])

    def test_a_header_that_is_good(self) -> None:
        found = RpcMessage.from_frames(
            [head(forms=[["float32", [1, 1]]], body=nested(6)["a"]), b"0000"]
        )
        assert found.tensors[0].shape == (1, 1)

    def test_the_server_lives(self, serve: Any, call: Any) -> None:
        server = serve()
        bad, good = plain(server), call(server)
        for frames in BAD.values():
            bad.send_multipart(frames or [b""])
        until(lambda: server.receiver.refused_count >= len(BAD))
        assert good.call("k", seconds=SECONDS).kind == "echo" and len(server.heard) == 1
        assert len(server.said) == RpcServer.LOUD and "not shown" in server.said[-1]
        bad.close()

    def test_what_comes_again_is_refused(self, serve: Any) -> None:
        server = serve()
        bad = plain(server)
        for number in (1, 2, 2, 1, 3):
            bad.send_multipart(RpcMessage("k", number, 9).to_frames())
        until(lambda: len(server.heard) == 3 and server.receiver.refused_count == 2)
        assert [message.number for message in server.heard] == [1, 2, 3]
        assert "number 2 of 9 has come before" in server.said[0]
        bad.close()

    def test_a_connection_speaks_for_one_worker(self, serve: Any) -> None:
        """Or one could have something kept for any number of workers."""
        server = serve()
        bad = plain(server)
        for number, sender in ((1, 9), (2, 8), (3, 9), (4, 7)):
            bad.send_multipart(RpcMessage("k", number, sender).to_frames())
        until(lambda: len(server.heard) == 2 and server.receiver.refused_count == 2)
        assert [message.sender for message in server.heard] == [
            9,
            9,
        ] and "8 speaks over the connection of 9" in server.said[0]
        bad.close()

    def test_answers_to_who_reads_none_are_dropped_at_last(
        self, serve: Any, call: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(rpc, "UNREAD", 20)
        server = serve(
            act=lambda receiver, message: receiver.answer(message, "k", {}, (torch.zeros(1 << 16),))
        )
        deaf, good = plain(server, room=1), call(server)
        for number in range(1, 200):
            deaf.send_multipart(RpcMessage("k", number, 9).to_frames())
        until(
            lambda: any(
                "an answer to 9 was dropped: it has not read 20 others" in said
                for said in server.said
            )
        )
        assert good.call("k", seconds=SECONDS).kind == "k"
        deaf.close()

    def test_frames_that_are_too_large_cut_their_sender_off(self, serve: Any, call: Any) -> None:
        server = serve(largest=1 << 20)
        caller = call(server, sender=1)
        caller.send("k", tensors=[torch.zeros(1 << 19)], seconds=SECONDS)
        with pytest.raises(DeadlineExceeded):
            caller.wait_for_answer(1, 0.5)
        assert not server.heard and call(server, sender=2).call("k", seconds=SECONDS).kind == "echo"

    def test_garbage_on_the_port(self, serve: Any, call: Any) -> None:
        server, chance = serve(), random.Random(1)
        host, port = server.receiver.addresses[0].removeprefix("tcp://").split(":")
        for _ in range(20):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(chance.randbytes(chance.randrange(1, 2000)))
        assert call(server).call("k", seconds=SECONDS).kind == "echo" and len(server.heard) == 1


def mangled(chance: random.Random, frames: list[bytes]) -> list[bytes]:
    """A message with something wrong, or perhaps nothing."""
    found = [bytearray(frame) for frame in frames]
    for _ in range(chance.randrange(1, 4)):
        frame = chance.choice(found)
        match chance.randrange(5):
            case 0 if frame:
                frame[chance.randrange(len(frame))] = chance.randrange(256)
            case 1:
                del frame[chance.randrange(len(frame) + 1) :]
            case 2:
                frame += chance.randbytes(chance.randrange(20))
            case 3:
                found.append(bytearray(chance.randbytes(chance.randrange(20))))
            case 4 if len(found) > 1:
                found.remove(frame)
    return [bytes(frame) for frame in found]


@pytest.mark.parametrize("count", [1000, pytest.param(100_000, marks=pytest.mark.soak)])
def test_mangled_messages(serve: Any, call: Any, count: int) -> None:
    """Each is refused, or has the form that its header tells; the server lives."""
    server, chance = serve(), random.Random(count)
    bad = plain(server)

    def heard(sent: int) -> None:
        until(lambda: len(server.heard) + server.receiver.refused_count >= sent)

    for number in range(1, count + 1):
        whole = RpcMessage(
            "push", number, 5, 1, 1, {"unit": 3, "part": 0.5}, (torch.arange(4.0),)
        ).to_frames()
        bad.send_multipart(mangled(chance, [bytes(frame) for frame in whole]))
        if number % 100 == 0:
            heard(number)
    heard(count)
    assert server.receiver.refused_count > count // 2
    for message in server.heard:
        assert all(isinstance(x, Tensor) for x in message.tensors) and isinstance(
            message.body, dict
        )
    other = call(server, sender=6)
    assert other.call("k", seconds=SECONDS).kind == "echo"
    bad.close()
