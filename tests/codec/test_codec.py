from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Size, Tensor

from paceline.codec.codec import (
    Codec,
    State,
    Sum,
    Wire,
    after,
    error_feedback,
    gathered,
    is_finite,
    merge_states,
    named,
    plain,
    scattered,
    smaller,
    to_codec,
    where,
)
from paceline.codec.coding import Coding, compose, exact
from paceline.codec.dense import bfloat16, half, int4, int8, sign
from paceline.codec.powersgd import powersgd
from paceline.codec.sparse import randomk, topk
from paceline.comm.group_protocol import Group
from paceline.errors import UsageError
from tests.harness.thread_groups import spawn

SHAPES = [Size((40, 30)), Size((30,)), Size((8, 3, 5, 5)), Size(()), Size((1, 7))]
NUMEL = sum(math.prod(shape) for shape in SHAPES)
GIVEN: list[Codec | Coding] = [
    exact(),
    half(),
    bfloat16(),
    int8(block=64),
    int8(block=64, rounding="stochastic"),
    int4(block=32),
    sign(block=32),
    topk(0.05),
    topk(0.05, threshold="sampled"),
    randomk(0.1),
    powersgd(2),
    gathered(int8()),
    scattered(topk(0.1)),
    compose(topk(0.1), int8()),
    scattered(compose(topk(0.2), int4(block=8))),
    powersgd(2, inner=int8(block=16)),
    powersgd(3, inner=scattered(half())),
    error_feedback(topk(0.05)),
    error_feedback(sign(block=32)),
    error_feedback(compose(topk(0.1), int8())),
    error_feedback(powersgd(2)),
    error_feedback(powersgd(2, inner=int8(block=16))),
    after(5, int8(block=64)),
    error_feedback(after(3, topk(0.05), before=half())),
]
LOSSLESS = [exact(), after(30, int8())]


def data(rank: int, step: int, size: int = NUMEL) -> Tensor:
    """Different on every rank and in every step, with a part that all have in common."""
    own = torch.randn(size, generator=torch.Generator().manual_seed(1000 * step + rank))
    return own + torch.randn(size, generator=torch.Generator().manual_seed(7)) * 2


def drive(steps: Any) -> Sum:
    """What a line does with a sum, without its threads."""
    result = None
    while True:
        try:
            work = steps.send(result)
        except StopIteration as stop:
            found: Sum = stop.value
            return found
        result = work.wait()


def train(
    group: Group, codec: Codec, steps: int, begin: int = 0, state: State | None = None
) -> tuple[list[Tensor], State]:
    """The totals of some steps, and the state after them."""
    state = codec.init(SHAPES, torch.device("cpu")) if state is None else state
    totals = []
    for step in range(begin, begin + steps):
        wire = Wire(
            (group,) * codec.stages,
            step=step,
            draw=torch.Generator().manual_seed(step * 100 + group.rank),
        )
        x, kept = data(group.rank, step), copy.deepcopy(state)
        found = drive(codec.sum(x, SHAPES, state, wire))
        assert torch.equal(x, data(group.rank, step)), "what is summed stays as it is"
        assert same(state, kept), "so does the state"
        state = found.state
        totals.append(found.total)
    return totals, state


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)


@pytest.mark.each_choice
@pytest.mark.parametrize("size", [1, 2, 3, pytest.param(4, marks=pytest.mark.soak)])
@pytest.mark.parametrize("given", GIVEN, ids=repr)
def test_the_total_is_the_same_on_every_rank(given: Codec | Coding, size: int) -> None:
    codec = to_codec(given)
    results = spawn(size, lambda group: train(group, codec, 8))
    for step in range(8):
        wanted = torch.stack([data(rank, step) for rank in range(size)]).sum(0)
        for totals, _ in results:
            assert torch.equal(totals[step], results[0][0][step]), f"rank differs in step {step}"
        total = results[0][0][step]
        if given in LOSSLESS:
            torch.testing.assert_close(total, wanted)
        elif "error_feedback" not in repr(given):
            assert float((total - wanted).norm()) < float(wanted.norm()), (
                "it is nearer than nothing"
            )


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "given", [given for given in GIVEN if "error_feedback" in repr(given)], ids=repr
)
def test_error_feedback_keeps_what_did_not_arrive(given: Codec | Coding, size: int) -> None:
    """Over 24 steps, with an inf in step 5 and another loss scale from step 12 on."""
    codec = to_codec(given)

    def body(group: Group) -> tuple[Tensor, Tensor]:
        state, arrived = (
            codec.init(SHAPES, torch.device("cpu")),
            torch.zeros(NUMEL, dtype=torch.float64),
        )
        for step in range(24):
            scale = 64.0 if step < 12 else 1024.0
            x = data(group.rank, step) * scale
            if step == 5 and group.rank == group.size - 1:
                x[17] = math.inf
            before = copy.deepcopy(state)
            wire = Wire(
                (group,) * codec.stages,
                scale=scale,
                step=step,
                draw=torch.Generator().manual_seed(step),
            )
            found = drive(codec.sum(x, SHAPES, state, wire))
            state = found.state
            if step == 5:
                assert not is_finite(found.total) and same(state, before)
            else:
                arrived += found.total.double() / scale
        return arrived, state["residual"].double()

    results = spawn(size, body)
    given_in_all = sum(
        data(rank, step).double() for rank in range(size) for step in range(24) if step != 5
    )
    assert isinstance(given_in_all, Tensor)
    found = results[0][0] + sum(residual for _, residual in results)
    assert float((found - given_in_all).norm()) < 1e-5 * float(given_in_all.norm())
    lost = float((results[0][0] - given_in_all).norm())
    assert lost > 1e-3 * float(given_in_all.norm()), (
        "it loses something without what is kept: this test shows something"
    )


def test_what_settles_is_what_of_mine_arrived() -> None:
    """For every codec the total is the sum of what all ranks take off."""
    for given in GIVEN:
        codec = to_codec(given)

        def body(group: Group, codec: Codec = codec) -> tuple[Tensor, Tensor]:
            state = codec.init(SHAPES, torch.device("cpu"))
            wire = Wire((group,) * codec.stages, draw=torch.Generator().manual_seed(group.rank))
            found = drive(codec.sum(data(group.rank, 0), SHAPES, state, wire))
            left = torch.zeros(NUMEL)
            found.settle(left)
            return found.total, -left

        results = spawn(3, body)
        if "error_feedback" not in repr(given):  # which settles with itself
            torch.testing.assert_close(
                sum(arrived for _, arrived in results), results[0][0], rtol=1e-4, atol=1e-4
            )


@pytest.mark.parametrize("given", GIVEN, ids=repr)
def test_a_state_that_is_saved_goes_on(given: Codec | Coding) -> None:
    codec = to_codec(given)

    def body(group: Group) -> tuple[list[Tensor], list[Tensor]]:
        straight, _ = train(group, codec, 6)
        first, state = train(group, codec, 3)
        return straight, first + train(group, codec, 3, begin=3, state=copy.deepcopy(state))[0]

    for straight, pieced in spawn(2, body):
        assert all(torch.equal(one, other) for one, other in zip(straight, pieced, strict=True))


def test_stages_are_what_is_yielded() -> None:
    for given in GIVEN:
        codec = to_codec(given)

        def body(group: Group, codec: Codec = codec) -> int:
            wire, count, result = Wire((group,) * codec.stages), 0, None
            steps = codec.sum(
                data(group.rank, 0), SHAPES, codec.init(SHAPES, torch.device("cpu")), wire
            )
            while True:
                try:
                    result = steps.send(result).wait()  # type: ignore[arg-type]
                except StopIteration:
                    return count
                count += 1

        assert all(0 < count <= codec.stages for count in spawn(3, body)), given


def test_scattered_sends_two_payloads_and_gathered_one_to_each() -> None:
    def sent(codec: Codec, size: int) -> list[int]:
        def body(group: Group) -> int:
            drive(codec.sum(torch.ones(6000), [Size((6000,))], {}, Wire((group,) * codec.stages)))
            return group.traffic.within + group.traffic.between

        return spawn(size, body, hosts=range(size))

    payload = 6000 + 6 * 4
    assert sent(gathered(int8()), 4) == [pytest.approx(3 * payload, rel=0.02)] * 4
    assert sent(scattered(int8()), 4) == [pytest.approx(2 * payload * 3 / 4, rel=0.02)] * 4
    assert sent(scattered(int8()), 2) == sent(gathered(int8()), 2) == [payload] * 2


def test_lift() -> None:
    assert (
        to_codec(exact()) == plain()
        and to_codec(topk(0.1)) == gathered(topk(0.1))
        and to_codec(int8()) == scattered(int8())
    )
    assert to_codec(compose(randomk(0.1), half())) == gathered(compose(randomk(0.1), half()))
    codec = error_feedback(int8())
    assert to_codec(codec) is codec
    with pytest.raises(UsageError, match=r"a codec is wanted, such as int8\(\).*got 'int8'"):
        to_codec("int8")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="a codec is wanted"):
        error_feedback(3)  # type: ignore[arg-type]


def test_choices() -> None:
    codec = error_feedback(where(smaller(100), exact(), where(named("*.bias"), half(), topk(0.01))))
    big = Size((50, 50))
    assert codec.choose("a.bias", Size((99,))) == plain()
    assert codec.choose("a.bias", big) == error_feedback(scattered(half()))
    assert codec.choose("a.weight", big) == error_feedback(gathered(topk(0.01)))
    assert after(3, where(smaller(9), exact(), int8())).choose("x", big) == after(
        3, scattered(int8()), plain()
    )
    assert codec.stages == 2
    with pytest.raises(UsageError, match="where wants a predicate first"):
        where(100, exact(), int8())  # type: ignore[arg-type]


def test_after_warms_up() -> None:
    codec = after(3, int4(block=8))

    def body(group: Group) -> list[Tensor]:
        return train(group, codec, 5)[0]

    for step, total in enumerate(spawn(2, body)[0]):
        wanted = data(0, step) + data(1, step)
        assert torch.allclose(total, wanted, atol=1e-5) == (step < 3)
    with pytest.raises(UsageError, match="steps is -1"):
        after(-1, int8())


def test_powersgd_finds_a_low_rank_in_two_steps_and_sends_little() -> None:
    shape = [Size((300, 200))]
    u, v = torch.randn(300, 2), torch.randn(2, 200)

    def body(group: Group) -> tuple[float, int]:
        codec, state = powersgd(2), powersgd(2).init(shape, torch.device("cpu"))
        for _ in range(3):
            mine = (u @ v * (group.rank + 1)).view(-1)
            found = drive(codec.sum(mine, shape, state, Wire((group,) * 2)))
            state = found.state
        return float(
            (found.total.view(300, 200) - u @ v * 3).norm() / (u @ v * 3).norm()
        ), group.traffic.within

    for error, nbytes in spawn(2, body):
        assert error < 1e-5 and nbytes <= 3 * 2 * 4 * (300 + 200) * 2
    for make, says in [
        (lambda: powersgd(0), "rank is 0"),
        (lambda: powersgd(2, inner=error_feedback(int8())), "put it around powersgd"),
        (
            lambda: powersgd(2, inner=after(3, error_feedback(int8()))),
            "mean nothing for the next ones",
        ),
        (
            lambda: powersgd(2, inner=where(smaller(9), exact(), int8())),
            "where chooses between tensors",
        ),
    ]:
        with pytest.raises(UsageError, match=says):
            make()


def test_powersgd_recovers_from_zeros() -> None:
    shape = [Size((30, 20))]

    def body(group: Group) -> float:
        codec, state = powersgd(3), powersgd(3).init(shape, torch.device("cpu"))
        for x in (torch.zeros(600), torch.ones(600), torch.ones(600)):
            found = drive(codec.sum(x, shape, state, Wire((group,) * 2)))
            state = found.state
        return float((found.total - 2).abs().max())

    assert max(spawn(2, body)) < 1e-4


def test_notation() -> None:
    texts: Sequence[tuple[object, str]] = [
        (error_feedback(topk(0.01)), "error_feedback(topk(0.01))"),
        (where(smaller(10_000), exact(), int8()), "where(smaller(10000), exact(), int8())"),
        (after(100, powersgd(4, inner=int8())), "after(100, powersgd(4, inner=int8()))"),
        (scattered(named_ := int4(block=64)), f"scattered({named_!r})"),
    ]
    for codec, text in texts:
        assert repr(codec) == text


def test_who_goes_on_for_others_sends_what_they_have_kept() -> None:
    """4 -> 3 ranks: the sum of what arrived and of what is kept stays the sum of what was given."""
    codec = error_feedback(powersgd(2, inner=int8(block=16)))
    results = spawn(4, lambda group: train(group, codec, 5))
    states = [state for _, state in results]
    fewer = [merge_states([states[0], states[3]]), states[1], states[2]]
    assert torch.equal(fewer[0]["inner"]["q"], states[1]["inner"]["q"])

    def body(group: Group) -> tuple[list[Tensor], State]:
        return train(group, codec, 5, begin=5, state=fewer[group.rank])

    later = spawn(3, body)
    arrived = sum(total.double() for total in (*results[0][0], *later[0][0]))
    kept = sum(state["residual"].double() for _, state in later)
    everything = [
        data(rank, step).double() for step in range(10) for rank in range(4 if step < 5 else 3)
    ]
    wanted = torch.stack(everything).sum(0)
    assert float((arrived + kept - wanted).norm()) < 1e-5 * float(wanted.norm())


def test_finite() -> None:
    big = torch.full((4,), 3e38)
    assert is_finite(big) and is_finite(torch.zeros(0))
    assert not is_finite(torch.tensor([1.0, math.nan])) and not is_finite(
        torch.tensor([math.inf, -math.inf])
    )
