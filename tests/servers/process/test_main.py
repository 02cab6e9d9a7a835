"""A server does what fits, refuses what doesn't with its reason, and lives on."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from paceline.errors import Mismatch
from paceline.servers.protocol.message import Index
from paceline.servers.protocol.parameters import CloseStep, PullUnit, PushGradient, ReadMemories
from paceline.servers.protocol.samples import (
    CompleteTurn,
    Contribution,
    DealSamples,
    GatherStep,
    TakeSamples,
)
from paceline.servers.protocol.service import EndServer
from tests.harness.shard_plans import SECONDS

PUSH = PushGradient(Index(0), 1, 0, b"\1", False, False, torch.ones(16))
CLOSE = CloseStep(Index(0), 1, 0, (0,), 1.0, ())
LACKING = "a part of it is missing, or has a wrong value"
WRONG: dict[str, tuple[str, dict[str, Any], bool, str]] = {
    "an unknown message": ("dance", {}, False, "there is no such message"),
    "a unit that is no number": (PUSH.kind, {"unit": "x"}, True, "there is no unit 'x'"),
    "a negative unit": (PUSH.kind, {"unit": -1}, True, "there is no unit -1"),
    "no tensor": (PUSH.kind, {}, False, LACKING),
    "pieces that are no bytes": (PUSH.kind, {"used": 4}, True, LACKING),
    "a turn that is no number": (PUSH.kind, {"turn": "x"}, True, LACKING),
    "something else": (PUSH.kind, {"dance": 1}, True, LACKING),
    "settings that are none": (CLOSE.kind, {"settings": 5}, False, LACKING),
}


@pytest.mark.parametrize("name", WRONG)
def test_is_refused_with_its_reason(begun: Any, name: str) -> None:
    kind, changes, tensor, why = WRONG[name]
    body = (CLOSE if kind == CLOSE.kind else PUSH).pack().body | changes
    with pytest.raises(Mismatch, match=f"the server refused it: {why}"):
        begun.caller(0).call(
            kind, body=body, tensors=[torch.ones(16)] if tensor else [], seconds=SECONDS
        )
    assert len(begun.has_reported) == 1 and f"{kind} of 0 was refused" in begun.has_reported[0]
    for unit in (0, 1):
        begun(0, PushGradient(Index(unit), 1, 0, b"\1", False, False, torch.ones(16)))
    begun(0, CLOSE)
    assert torch.equal(begun(0, PullUnit(Index(0), 1, False)).values[:5], torch.full((5,), 0.75))


@pytest.mark.parametrize("how", ["late", "on time"])
def test_who_is_late_is_found_out_though_nothing_comes(begun: Any, how: str) -> None:
    """The one who waits is answered in time, and with the other only if that one comes."""
    for worker in (0, 1):
        begun(worker, DealSamples(0, 0, (0, 1), 0, torch.ones(99, dtype=torch.int64)))

    def gather(number: int) -> GatherStep:
        return GatherStep(Index(0), number, 3, may_go_on=True, contribution=Contribution(0.5, ()))

    sent = [begun.send(worker, gather(1)) for worker in (0, 1)]
    assert [one.wait_for_reply(SECONDS).workers for one in sent] == [(0, 1)] * 2, (
        "nobody knows yet how long a turn takes"
    )
    for worker in (0, 1):
        begun(worker, TakeSamples(1, 1))
        assert begun(worker, CompleteTurn(1, False, False, 3)).made == ((0, 1),), (
            "it may not have been taken yet"
        )
    waits = begun.send(0, gather(2))
    if how == "late":
        found = waits.wait_for_reply(SECONDS)
        assert (found.workers, found.step, found.parts, found.slowest) == ((0,), 2, 0.5, 1)
    else:
        assert begun(1, gather(2)).workers in ((0, 1), (1,))
        waits.wait_for_reply(SECONDS)


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kept", ["begun", "coded"])
def test_senseless_messages(request: Any, kept: str, count: int) -> None:
    """Well-formed, and wrong in what they say: each is answered or put off, and the server
    lives.
    """
    begun = request.getfixturevalue(kept)
    chance, caller = random.Random(count), begun.caller(9)
    numbers, texts = [0, 1, -1, 1 << 40], [b"", b"\1", b"\1\1"]
    right = {
        "unit": [0, 1, 7],
        "optimizer": [0, 1],
        "used": texts,
        "has": [None, *numbers],
        "settings": [[], [[0, {"lr": 0.1}]], [[5, {}]]],
    }
    right |= {
        "workers": [[], [0], [9], [0, 9]],
        "factor": [1.0, 0.5],
        "norm_type": [2.0, 0.0, -1.0],
        "part": [1.0],
        "of": [None],
        "came": [None],
    }
    wrong = ["x", None, b"\1", [], {}, 1.5, True]
    tensors = [
        torch.ones(16),
        torch.ones(3),
        torch.ones(0),
        torch.ones(2, 2, dtype=torch.int8),
        torch.tensor(1.0),
    ]
    tensors += [
        torch.frombuffer(bytearray(chance.randbytes(size)), dtype=torch.uint8)
        for size in (16, 16, 20, 20, 24)
    ]
    kinds = [*begun.server._shard_rpc.handlers]
    for _ in range(count):
        kind, body = chance.choice(kinds), dict[str, Any]()
        for name in kind._header_codecs:
            flags = (
                [True, False]
                if name in ("keep", "drop_late", "decided", "same", "undo", "copy")
                else numbers
            )
            body[name] = chance.choice(wrong if chance.random() < 0.05 else right.get(name, flags))
        caller.send(
            kind.kind,
            body=body,
            tensors=chance.choices(tensors, k=len(kind._tensor_codecs)),
            seconds=SECONDS,
        )
    begun(0, ReadMemories())
    assert begun.thread.is_alive()


def test_the_end(begun: Any) -> None:
    begun(0, EndServer())
    begun.thread.join(SECONDS)
    assert not begun.thread.is_alive()
