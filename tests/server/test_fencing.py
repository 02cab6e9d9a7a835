"""What a server says and does after a loss: two of them come to the same steps, and who is lost is not heard any more."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest
import torch

from paceline.errors import DeadlineExceeded, Mismatch
from paceline.server.journal import merged


def close(step: int, *came: tuple[int, int], rate: float = 0.5) -> dict[str, Any]:
    settings = [[0, {"lr": rate}], [1, {"lr": rate}]]
    body = {"optimizer": 0, "step": step, "workers": [worker for worker, _ in came], "factor": 1.0, "settings": settings, "decided": True}
    return body | {"keep": True, "part": 1.0, "of": [0, 0], "came": [[worker, number, [[worker, 0, 4]]] for worker, number in came]}


def push(server: Any, worker: int, value: float) -> None:
    for unit, used in ((0, b"\x01"), (1, b"\x01")):
        server(worker, "push", {"unit": unit, "used": used, "step": 1, "keep": True}, torch.full((16,), value))


def values(server: Any, worker: int) -> float:
    return float(server(worker, "read", {"unit": 0, "step": 0, "copy": True}).tensors[0][0])


def test_what_one_has_made_can_be_made_by_another(begun: Any) -> None:
    push(begun, 0, 1.0)
    push(begun, 1, 2.0)
    begun(0, "close", close(1, (0, 1), (1, 1)))
    push(begun, 0, 4.0)
    begun(0, "close", close(2, (0, 2), rate=0.25))
    answer = begun(1, "since", {"optimizer": 0})
    bodies = msgpack.unpackb(answer.tensors[0].numpy().tobytes(), strict_map_key=False)
    assert [(body["step"], body["workers"]) for body in bodies] == [(1, [0, 1]), (2, [0])]
    for body in bodies:
        begun(1, "close", body)  # has been made, and is not made twice
    assert values(begun, 1) == 1 - 0.5 * 3 - 0.25 * 4
    journal = merged([begun(0, "void").tensors[0].numpy().tobytes()])
    assert journal.gradients == {(0, 0): 2, (0, 1): 1} and journal.done.rows() == [[0, 0, 4], [1, 0, 4]]


def test_what_was_pushed_in_vain_is_void_and_who_is_lost_is_not_heard(begun: Any) -> None:
    push(begun, 0, 1.0)
    push(begun, 7, 2.0)
    begun.caller(7).send("close", step=2, body=close(2, (7, 1)), seconds=5)  # is put off
    assert begun(0, "reckon", {"workers": [0, 1]}).body == {"steps": [0]}
    begun(0, "void")
    with pytest.raises(Mismatch, match="counts as lost"):
        begun(7, "close", close(1, (0, 1), (7, 1)))
    with pytest.raises(Mismatch, match="have not pushed"):
        begun(0, "close", close(1, (0, 1)))
    push(begun, 0, 1.0)
    begun(0, "close", close(1, (0, 1)))
    assert values(begun, 0) == 0.5
    begun(7, "alive")
    with pytest.raises(DeadlineExceeded):
        begun.caller(0).call("taken", body={"optimizer": 0, "step": 2}, seconds=0.2)


def test_a_copy_knows_what_the_first_one_did(begun: Any) -> None:
    push(begun, 0, 1.0)
    begun(0, "close", close(1, (0, 1)))
    begun(0, "drop", {"epoch": 0, "pieces": [[5, 0, 2]]})
    state = begun(0, "state")
    begun(0, "become", None, *state.tensors)
    journal = merged([begun(0, "void").tensors[0].numpy().tobytes()])
    assert journal.gradients == {(0, 0): 1} and list(journal.dropped) == [(0, 5, 0, 2)] and values(begun, 0) == 0.5
