"""What a dataclass says of itself is what travels, and nothing else comes out of it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.comm.rpc import RpcClient, RpcMessage, RpcServer
from paceline.errors import Mismatch, UsageError
from paceline.servers.protocol.message import (
    Acknowledged,
    Index,
    Message,
    Request,
    call_server,
    send_request,
)
from tests.harness.messages import check
from tests.harness.rpc_servers import KEYS, SECONDS, Server

TWO = torch.tensor([1.0, 2.0])


@dataclass(frozen=True)
class Inner(Message):
    """A part of another."""

    name: str
    x: Tensor


@dataclass(frozen=True)
class Outer(Request[Inner]):
    """One of everything."""

    unit: Index
    pairs: tuple[tuple[int, float], ...]
    maybe: Mapping[str, Any] | None
    inner: tuple[Inner, ...]
    last: Tensor


OUTER = Outer(Index(1), ((1, 0.5),), None, (Inner("a", TWO), Inner("b", TWO.double())), TWO.int())


def test_tensors_travel_beside_the_header_and_are_not_copied() -> None:
    body, tensors = OUTER.pack()
    assert body == {
        "unit": 1,
        "pairs": ((1, 0.5),),
        "maybe": None,
        "inner": [{"name": "a"}, {"name": "b"}],
    }
    assert [x.data_ptr() for x in tensors] == [
        OUTER.inner[0].x.data_ptr(),
        OUTER.inner[1].x.data_ptr(),
        OUTER.last.data_ptr(),
    ]
    assert Outer.unpack(body, tensors).inner[0].x is TWO


def test_one_of_everything() -> None:
    check(OUTER)


@pytest.mark.parametrize("unit", [-1, 1.0, True, "x", None])
def test_what_is_not_counted_from_0_on(unit: Any) -> None:
    """Python would count from the end."""
    body, tensors = OUTER.pack()
    with pytest.raises(UsageError, match=f"there is no unit {unit!r}"):
        Outer.unpack({**body, "unit": unit}, tensors)


def test_a_field_that_cannot_travel() -> None:
    with pytest.raises(AssertionError, match="a message can't have a field of type"):

        @dataclass(frozen=True)
        class Wrong(Message):
            x: complex


def test_requests_have_their_kind_their_reply_and_their_step() -> None:
    @dataclass(frozen=True)
    class Step(Request[Acknowledged]):
        step: int

    assert (Outer.kind, Outer.reply_class, Step.reply_class) == ("outer", Inner, Acknowledged)
    assert (OUTER.step_served, Step(3).step_served, Step(-3).step_served) == (0, 3, 0)


def test_a_reply_is_what_was_asked_for_or_names_who_gave_something_else() -> None:
    def answer(receiver: RpcServer, message: RpcMessage) -> None:
        outer = Outer.unpack(message.body, message.tensors)
        receiver.answer(
            message,
            message.kind,
            *(outer.inner[outer.unit].pack() if outer.unit else ({"name": 7}, [TWO])),
        )

    with contextlib.closing(Server(answer, hosts=["127.0.0.1"])) as server:
        caller = RpcClient(server.receiver.addresses[0], KEYS, sender=1, who="server 0")
        with contextlib.closing(caller):
            reply = call_server(caller, OUTER, SECONDS)
            assert reply.name == "b" and torch.equal(reply.x, TWO.double())
            sent = send_request(caller, Outer(Index(0), (), {}, (), TWO), SECONDS)
            with pytest.raises(
                Mismatch, match="server 0 answered outer with something else: name is 7"
            ):
                sent.wait_for_reply(SECONDS)
