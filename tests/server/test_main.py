"""A server does what fits, refuses what doesn't with its reason, and lives on."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.codec.coding import parts, room
from paceline.codec.dense import int8
from paceline.codec.sparse import topk
from paceline.errors import Mismatch
from paceline.server.codings import CodingPhase
from tests.harness.shard_plans import SECONDS, packed, plan

WAYS = [(CodingPhase(0, topk(0.5)),), (CodingPhase(0, None), CodingPhase(1, int8(8)))]


def close(step: int, workers: tuple[int, ...] = (0,), **more: Any) -> dict[str, Any]:
    return {"optimizer": 0, "step": step, "workers": list(workers), "factor": 1.0, "settings": [], **more}


def test_a_step_waits_for_all_and_a_read_for_the_step(begun: Any) -> None:
    for worker in (0, 1):
        for unit in (0, 1):
            begun(worker, "push", {"unit": unit, "used": b"\1"}, torch.full((16,), float(worker + 1)))
    first, second = begun.caller(0), begun.caller(1)
    closing = first.send("close", body=close(1, (0, 1)), seconds=SECONDS)
    reading = first.send("read", body={"unit": 1, "step": 1}, seconds=SECONDS)
    early = first.send("read", body={"unit": 1, "step": 0}, seconds=SECONDS)
    assert torch.equal(first.wait(early, SECONDS).tensors[0][:12], torch.ones(12)), "what nobody has to wait for isn't held up"
    second.call("close", body=close(1, (0, 1)), seconds=SECONDS)
    first.wait(closing, SECONDS)
    assert torch.equal(first.wait(reading, SECONDS).tensors[0][:12], torch.full((12,), 1 - 0.5 * 3))
    assert torch.equal(begun(1, "read", {"unit": 0, "step": 1}).tensors[0][:5], torch.full((5,), 1 - 0.25 * 3))
    begun(0, "close", close(1, (0, 1)))  # comes again, and does nothing
    assert torch.equal(begun(1, "read", {"unit": 0, "step": 1}).tensors[0][:5], torch.full((5,), 1 - 0.25 * 3))


WRONG = {
    "an unknown message": ("dance", {}, ()),
    "an unknown unit": ("push", {"unit": 7, "used": b"\1"}, (torch.ones(16),)),
    "a unit that is no number": ("push", {"unit": "x", "used": b"\1"}, (torch.ones(16),)),
    "no unit": ("push", {"used": b"\1"}, (torch.ones(16),)),
    "no tensor": ("push", {"unit": 0, "used": b"\1"}, ()),
    "another length": ("push", {"unit": 0, "used": b"\1"}, (torch.ones(15),)),
    "another dtype": ("push", {"unit": 0, "used": b"\1"}, (torch.ones(16).double(),)),
    "too many pieces": ("push", {"unit": 0, "used": b"\1\1"}, (torch.ones(16),)),
    "pieces that are no bytes": ("push", {"unit": 0, "used": 4}, (torch.ones(16),)),
    "a read of nothing": ("read", {"unit": -1, "step": 0}, ()),
    "a read without a step": ("read", {"unit": 0}, ()),
    "a step out of turn": ("close", close(5), ()),
    "a step of nobody": ("close", close(1, ()), ()),
    "a step of workers that have not pushed": ("close", close(1), ()),
    "an optimizer that isn't there": ("close", close(1, optimizer=3), ()),
    "settings that are none": ("close", close(1, settings=5), ()),
    "another plan": ("plan", {}, (packed(plan(9)),)),
    "memories that are none": ("remember", {}, (torch.ones(9, dtype=torch.uint8),)),
    "a fill of another shape": ("fill", {"unit": 0}, (torch.ones(2, 8),)),
}


@pytest.mark.parametrize("name", WRONG)
def test_is_refused_with_its_reason(begun: Any, name: str) -> None:
    kind, body, tensors = WRONG[name]
    with pytest.raises(Mismatch, match="the server refused it: "):
        begun(0, kind, body, *tensors)
    assert len(begun.said) == 1 and f"{kind} of 0 was refused" in begun.said[0]
    begun(0, "push", {"unit": 0, "used": b"\1"}, torch.ones(16))
    begun(0, "push", {"unit": 1, "used": b"\1"}, torch.ones(16))
    begun(0, "close", close(1))
    assert torch.equal(begun(0, "read", {"unit": 0, "step": 1}).tensors[0][:5], torch.full((5,), 0.75))


@pytest.fixture
def coded(call: Any) -> Any:
    """Unit 0 has 5 elements, unit 1 has 12."""
    call(0, "plan", None, packed(plan(ways=WAYS)))
    for unit, length in ((0, 5), (1, 12)):
        call(0, "fill", {"unit": unit}, torch.ones(length))
    return call


def encoded(coding: Any, x: Tensor) -> Tensor:
    whole, message = room(coding, x.numel())
    coding.encode(x, message)
    return whole


PICKED = encoded(topk(0.5), torch.tensor([0.0, 4.0, 0.0, -8.0, 0.0]))
PLACED = PICKED.clone()
parts(topk(0.5), 5, PLACED)[1][0] = 5
WRONG_CODED = {
    "what is not coded": ("push", {"unit": 0, "used": b"\1", "turn": 0}, (torch.ones(5),)),
    "what is coded otherwise": ("push", {"unit": 0, "used": b"\1", "turn": 0}, (encoded(int8(8), torch.ones(5)),)),
    "what is cut short": ("push", {"unit": 0, "used": b"\1", "turn": 0}, (PICKED[:-1].clone(),)),
    "nothing": ("push", {"unit": 0, "used": b"\1", "turn": 0}, (torch.empty(0, dtype=torch.uint8),)),
    "a place that isn't there": ("push", {"unit": 0, "used": b"\1", "turn": 0}, (PLACED,)),
    "too many pieces": ("push", {"unit": 0, "used": b"\1\1", "turn": 0}, (PICKED,)),
    "a turn that is no number": ("push", {"unit": 0, "used": b"\1", "turn": "x"}, (PICKED,)),
    "another phase": ("push", {"unit": 1, "used": b"\1", "turn": 0}, (encoded(int8(8), torch.ones(12)),)),
    "a reader's turn that is no number": ("read", {"unit": 0, "step": 0, "has": 1, "turn": "x"}, ()),
    "a step of no turn": ("close", close(1, turn="x"), ()),
    "another plan": ("plan", {}, (packed(plan()),)),
}


@pytest.mark.parametrize("name", WRONG_CODED)
def test_through_a_codec_it_is_refused_with_its_reason(coded: Any, name: str) -> None:
    kind, body, tensors = WRONG_CODED[name]
    with pytest.raises(Mismatch, match="the server refused it: "):
        coded(0, kind, body, *tensors)
    coded(0, "push", {"unit": 0, "used": b"\1", "turn": 1}, PICKED)
    coded(0, "push", {"unit": 1, "used": b"\1", "turn": 1}, encoded(int8(8), torch.ones(12)))
    coded(0, "close", close(1, turn=1))
    assert torch.equal(coded(0, "read", {"unit": 0, "step": 1}).tensors[0], torch.tensor([1.0, 0, 1, 3, 1]))
    found = coded(0, "read", {"unit": 0, "step": 1, "has": 1})
    assert found.body == {"number": 2, "turn": 1} and found.tensors[0].nbytes == PICKED.nbytes
    for has in (None, 0, 7, "x", [], -1):
        assert torch.equal(coded(0, "read", {"unit": 0, "step": 1, "has": has}).tensors[0], torch.tensor([1.0, 0, 1, 3, 1]))
    assert coded(0, "read", {"unit": 0, "step": 1, "has": 2}).tensors == ()
    apart = {"unit": 0, "step": 1, "turn": 1, "copy": True}
    for has in (None, 7, "x", [], -1):
        assert torch.equal(coded(0, "read", {**apart, "has": has}).tensors[0], torch.tensor([1.0, 0, 1, 3, 1]))
    assert coded(0, "read", {**apart, "has": 5}).body == {"number": 6, "turn": 1}
    coded(0, "level")
    assert coded(0, "read", {"unit": 0, "step": 1, "has": 2}).body == {"number": 3, "turn": None}


def test_nothing_is_kept_before_a_plan(call: Any) -> None:
    with pytest.raises(Mismatch, match="nobody has said yet what is kept here"):
        call(0, "read", {"unit": 0, "step": 0})


def test_workers_that_take_a_step_differently(begun: Any) -> None:
    for worker in (0, 1):
        for unit in (0, 1):
            begun(worker, "push", {"unit": unit, "used": b"\1"}, torch.ones(16))
    begun.caller(0).send("close", body=close(1, (0, 1), factor=0.5), seconds=SECONDS)
    with pytest.raises(Mismatch, match="with different settings, or clipped differently"):
        begun(1, "close", close(1, (0, 1)))


def test_steps_that_are_decided_are_taken_in_their_order(begun: Any) -> None:
    """Another worker may hear of the second one before this server hears of the first: its close, its norm and its read wait."""
    for unit in (0, 1):
        begun(0, "push", {"unit": unit, "used": b"\1", "keep": True}, torch.ones(16))
        begun(1, "push", {"unit": unit, "used": b"\1", "keep": True}, torch.full((16,), 2.0))
    second, decided = begun.caller(1), {"decided": True, "keep": True, "part": 0.5}
    norm = second.send("norm", step=2, body={"optimizer": 0, "step": 2, "workers": [1], "kind": 1.0, "decided": True}, seconds=SECONDS)
    closing = second.send("close", step=2, body=close(2, (1,), **decided), seconds=SECONDS)
    reading = second.send("read", body={"unit": 0, "step": 2, "copy": True}, seconds=SECONDS)
    begun(0, "close", close(1, (0,), **decided))
    assert second.wait(norm, SECONDS).body["norm"] == 64.0
    second.wait(closing, SECONDS)
    assert torch.equal(second.wait(reading, SECONDS).tensors[0][:5], torch.full((5,), 1 - 0.5 * 0.25 * (1 + 2)))


@pytest.mark.parametrize("how", ["late", "on time"])
def test_who_is_late_is_found_out_though_nothing_comes(begun: Any, how: str) -> None:
    """The one who waits is answered in time, and with the other only if that one comes."""
    begun(0, "deal", {"epoch": 0, "first": 0, "workers": [0, 1]}, torch.ones(99, dtype=torch.int64))
    begun(1, "deal", {"epoch": 0, "first": 0, "workers": [0, 1]}, torch.ones(99, dtype=torch.int64))
    body = {"optimizer": 0, "said": {"part": 0.5}, "bound": 3, "part": True}
    sent = [(worker, begun.caller(worker).send("gather", body={**body, "number": 1}, seconds=SECONDS)) for worker in (0, 1)]
    for worker, message in sent:
        assert begun.caller(worker).wait(message, SECONDS).body["workers"] == [0, 1], "nobody knows yet how long a turn takes"
    for worker in (0, 1):
        begun(worker, "take", {"most": 1})
        assert begun(worker, "tick", {"clock": 1, "dropped": "", "bound": 3}).body["made"] == [[0, 1]], "it may not have been taken yet"
    waits = begun.caller(0).send("gather", body={**body, "number": 2}, seconds=SECONDS)
    if how == "late":
        found = begun.caller(0).wait(waits, SECONDS).body
        assert found["workers"] == [0] and found["step"] == 2 and found["parts"] == 0.5 and found["slowest"] == 1
    else:
        assert begun(1, "gather", {**body, "number": 2}).body["workers"] in ([0, 1], [1])
        begun.caller(0).wait(waits, SECONDS)


@pytest.mark.parametrize("count", [500, pytest.param(20_000, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kept", ["begun", "coded"])
def test_senseless_messages(request: Any, kept: str, count: int) -> None:
    """Well-formed, and wrong in what they say: each is answered or put off, and the server lives."""
    begun = request.getfixturevalue(kept)
    chance, caller = random.Random(count), begun.caller(9)
    bodies = [0, -1, 1, 1 << 40, "x", None, b"\1", [], [1], {}, 1.5, True]
    tensors = [torch.ones(16), torch.ones(3), torch.ones(0), torch.ones(2, 2, dtype=torch.int8), torch.tensor(1.0)]
    tensors += [torch.frombuffer(bytearray(chance.randbytes(size)), dtype=torch.uint8) for size in (16, 16, 20, 20, 24)]
    kinds = ["plan", "fill", "remember", "push", "push", "norm", "close", "taken", "read", "memories", "level", "echo", "", "PUSH"]
    names = ["unit", "used", "optimizer", "step", "workers", "factor", "settings", "kind", "turn", "has"]
    for _ in range(count):
        body = {name: chance.choice(bodies) for name in names if chance.random() < 0.8}
        caller.send(chance.choice(kinds), body=body, tensors=chance.choices(tensors, k=chance.randrange(3)), seconds=SECONDS)
    begun(0, "memories", {})
    assert begun.thread.is_alive()


def test_the_end(begun: Any) -> None:
    begun(0, "end")
    begun.thread.join(60)
    assert not begun.thread.is_alive()
