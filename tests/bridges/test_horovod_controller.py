"""Ranks agree on named operations whatever the order in which they submit them."""

from __future__ import annotations

import pytest

from paceline.bridges.horovod.engine import controller as controllers
from paceline.bridges.horovod.engine.controller import Agreed, Controller, CycleMessage
from paceline.bridges.horovod.engine.requests import OperationKey, OperationRequest


def request(name: str, shape: tuple[int, ...] = (3,), **fields: object) -> OperationRequest:
    """A request of one tensor."""
    kind = str(fields.pop("kind", "allreduce"))
    process_set = int(str(fields.pop("process_set", 0)))
    whole = {"dtypes": ("float32",), "shapes": (shape,), "op": "sum"} | fields
    return OperationRequest(OperationKey(process_set, kind, name), **whole)  # type: ignore[arg-type]


class Ranks:
    """Controllers of some ranks, which hear each other's messages."""

    def __init__(self, size: int) -> None:
        self.controllers = [Controller(size, rank) for rank in range(size)]
        self.nbytes = 0

    def cycle(self, *submitted: list[OperationRequest], **others: object) -> list[Agreed]:
        """One cycle. All ranks come to the same decisions, which are returned."""
        payloads = [
            controller.encode_message(CycleMessage(requests, **others))  # type: ignore[arg-type]
            for controller, requests in zip(self.controllers, submitted, strict=True)
        ]
        self.nbytes = sum(map(len, payloads))
        decisions = [controller.decide_cycle(payloads) for controller in self.controllers]
        assert all(others == decisions[0] for others in decisions)
        return decisions[0]


def names(decisions: list[Agreed]) -> list[str]:
    return [decision.key.name for decision in decisions]


def test_an_operation_runs_once_all_have_submitted_it() -> None:
    ranks = Ranks(2)
    assert names(ranks.cycle([request("a"), request("b")], [request("b"), request("c")])) == ["b"]
    assert names(ranks.cycle([request("c")], [request("a")])) == ["a", "c"]


def test_what_was_agreed_travels_as_a_number() -> None:
    ranks = Ranks(2)
    long_name = "n" * 200
    ranks.cycle([request(long_name)], [request(long_name)])
    first = ranks.nbytes
    assert names(ranks.cycle([request(long_name)], [request(long_name)])) == [long_name]
    assert ranks.nbytes < 20 < first
    assert [controller.cache_hits for controller in ranks.controllers] == [1, 1]


def test_a_changed_shape_is_not_taken_from_the_cache() -> None:
    ranks = Ranks(2)
    ranks.cycle([request("a")], [request("a")])
    (decision,) = ranks.cycle([request("a", (4,))], [request("a", (4,))])
    assert decision.requests[1].shapes == ((4,),)
    (decision,) = ranks.cycle([request("a", (4,))], [request("a", (5,))])
    assert "Mismatched allreduce tensor shapes" in decision.error


def test_a_full_cache_forgets_alike_on_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controllers, "CACHE_CAPACITY", 2)
    ranks = Ranks(2)
    for name in "abcabcab":
        assert names(ranks.cycle([request(name)], [request(name)])) == [name]


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"shape": (4,)}, "allreduce tensor shapes: rank 0 has [3], but rank 1 has [4]"),
        ({"dtypes": ("int32",)}, "data types: rank 0 has float32, but rank 1 has int32"),
        ({"op": "min"}, "allreduce operations: rank 0 has sum, but rank 1 has min"),
        ({"prescale": 2.0}, "prescale factors: rank 0 has 1.0, but rank 1 has 2.0"),
        ({"postscale": 2.0}, "postscale factors: rank 0 has 1.0, but rank 1 has 2.0"),
        ({"shapes": ((3,), (3,))}, "number of tensors: rank 0 has 1, but rank 1 has 2"),
    ],
)
def test_what_differs_is_an_error_that_names_ranks(other: dict[str, object], text: str) -> None:
    (decision,) = Ranks(2).cycle([request("a")], [request("a", **other)])  # type: ignore[arg-type]
    assert f"allreduce.a: Mismatched {text}" in decision.error


def test_a_root_has_to_be_the_same_and_a_member() -> None:
    def broadcast(root: int) -> OperationRequest:
        return request("a", kind="broadcast", root=root, op="")

    (decision,) = Ranks(2).cycle([broadcast(0)], [broadcast(1)])
    assert "Mismatched broadcast root ranks: rank 0 has 0, but rank 1 has 1" in decision.error
    (decision,) = Ranks(2).cycle([broadcast(2)], [broadcast(2)])
    assert "root rank 2 is not one of ranks 0, 1" in decision.error


def test_rows_may_differ_in_an_allgather() -> None:
    def gather(*shape: int) -> OperationRequest:
        return request("a", shape, kind="allgather", op="")

    assert not Ranks(2).cycle([gather(3, 2)], [gather(5, 2)])[0].error
    assert "tensor shapes" in Ranks(2).cycle([gather(3, 2)], [gather(3, 4)])[0].error
    assert "rank-zero tensor" in Ranks(2).cycle([gather()], [gather()])[0].error


def test_an_overdue_operation_names_who_lacks_it_and_for_what_they_wait() -> None:
    ranks = Ranks(3)
    assert ranks.cycle([request("a")], [request("b")], [request("a")]) == []
    (decision,) = ranks.cycle([], [], [], overdue=[request("a").key])
    assert "rank 1 did not submit it; there it waits for allreduce.b" in decision.error


def test_a_joined_rank_is_not_waited_for() -> None:
    ranks = Ranks(2)
    join = OperationRequest(OperationKey(0, "join", "join"))
    assert ranks.cycle([join], [request("a")])[0].requests.keys() == {1}
    gather = request("g", (2,), kind="allgather", op="")
    assert "not supported with Join" in ranks.cycle([], [gather])[0].error
    assert "not supported with Join" in ranks.cycle([], [request("m", op="min")])[0].error
    (decision,) = ranks.cycle([], [join])
    assert (decision.key.kind, decision.last_joined) == ("join", 1)
    assert ranks.cycle([], [request("a")]) == []  # now all are waited for again


def test_a_process_set_waits_for_its_own_ranks_only() -> None:
    ranks = Ranks(3)
    add = request("s", kind="add_process_set", numbers=(0, 2))
    assert not ranks.cycle([add], [add], [add])[0].error
    inside = request("a", process_set=1)
    assert names(ranks.cycle([inside], [], [inside])) == ["a"]
    assert "exists already" in ranks.cycle([add], [add], [add])[0].error
    other = add._replace(numbers=(0, 1))
    assert "Mismatched process sets" in ranks.cycle([add], [add], [other])[0].error
    remove = request("r", kind="remove_process_set", numbers=(1,))
    assert not ranks.cycle([remove], [remove], [remove])[0].error
    assert "doesn't exist" in ranks.cycle([inside], [], [])[0].error


def test_a_shutdown_is_heard_by_all() -> None:
    ranks = Ranks(2)
    ranks.cycle([], [], shutdown=True)
    assert all(controller.ending == [0, 1] for controller in ranks.controllers)
