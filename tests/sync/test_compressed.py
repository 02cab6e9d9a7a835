"""AllReduce through codecs, in whole runs on threads: the same on every worker, and state that
counts with its turn.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.codec.codec import after, error_feedback, named, smaller, where
from paceline.codec.coding import compose, exact
from paceline.codec.dense import bfloat16, half, int4, int8, sign
from paceline.codec.powersgd import powersgd
from paceline.codec.sparse import randomk, topk
from paceline.errors import UsageError
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce
from tests.harness.compressed_training import exchange, model, steps, train
from tests.harness.runs import batches, distance, parameters, workers

CODECS = [
    half(),
    bfloat16(),
    int8(block=64),
    int8(block=64, rounding="stochastic"),
    int4(block=32),
    error_feedback(sign(block=32)),
    error_feedback(topk(0.1)),
    error_feedback(topk(0.1, threshold="sampled")),
    error_feedback(randomk(0.3)),
    error_feedback(compose(topk(0.2), int8())),
    error_feedback(powersgd(2)),
    error_feedback(powersgd(2, inner=int8(block=16))),
    where(smaller(30), exact(), error_feedback(topk(0.2))),
    where(named("*.bias"), half(), int4(block=8)),
    error_feedback(after(5, topk(0.1), before=half())),
]


def ten(run: Run, **options: Any) -> Tensor:
    """What ten steps come to, after half of which one codec hands over to another."""
    return train(run, epochs=2, **options)


@cache
def plainly(size: int) -> Tensor:
    """What training comes to without a codec."""
    return workers(size, ten)[0]


@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.soak), 3])
@pytest.mark.parametrize(
    "codec",
    [pytest.param(c, marks=pytest.mark.slow if n % 4 else ()) for n, c in enumerate(CODECS)],
    ids=repr,
)
def test_gradients_and_weights_are_bit_equal_everywhere(codec: Any, size: int) -> None:
    seen: list[list[Tensor]] = [[] for _ in range(size)]
    found = workers(
        size,
        lambda run: ten(run, grads=seen[run.rank]),
        strategy=AllReduce(codec=codec, bucket_mb=0.001),
    )
    assert len(seen[0]) == 10
    for rank in range(1, size):
        assert all(torch.equal(one, other) for one, other in zip(seen[rank], seen[0], strict=True))
        assert torch.equal(found[rank], found[0])
    assert not torch.equal(found[0], plainly(size)), "the codec was used"
    assert bool(found[0].isfinite().all()) and distance(found[0], plainly(size)) < 0.5


def test_a_codec_that_loses_nothing_changes_nothing() -> None:
    for codec in (exact(), where(smaller(10**9), exact(), int8()), after(10**6, int8())):
        assert distance(workers(3, ten, strategy=AllReduce(codec=codec))[0], plainly(3)) < 1e-6
    assert distance(workers(3, ten, strategy=AllReduce(codec=half()))[0], plainly(3)) < 1e-3


def test_via_native_and_ways_that_a_codec_does_not_have() -> None:
    found = workers(3, ten, strategy=AllReduce(via="native", codec=int8()))
    assert all(torch.equal(other, found[0]) for other in found)
    with pytest.raises(
        UsageError,
        match=r"AllReduce\(via='ring', codec=int8\(\)\): a codec has a way of its own to sum",
    ):
        AllReduce(via="ring", codec=int8())
    with pytest.raises(
        UsageError,
        match="codec='int8' is unknown; as a string there is 'auto', else give a codec such as",
    ):
        AllReduce(codec="int8")  # type: ignore[arg-type]
    AllReduce(via="ring", codec=exact())


def test_buckets_hold_one_kind_and_states_count_with_their_turn() -> None:
    codec = where(smaller(25), exact(), error_feedback(topk(0.1)))

    def body(run: Run) -> None:
        net = model()
        net, opt, loader = run.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.05), batches(dtype=torch.float32)
        )
        kept: list[Any] = []
        for x, y in loader:
            F.mse_loss(net(x), y).backward()
            coded = exchange(run)._coded
            assert coded is not None
            if len(kept) < 3:
                now = [
                    {key: value.clone() for key, value in state.items() if key == "residual"}
                    for state in coded.states
                ]
                kept.append(now)
            opt.step()
            opt.zero_grad()
        assert [
            len(bucket.members)
            for bucket in exchange(run)._buckets.layout
            if bucket.flat.numel() < 100
        ]
        for bucket in exchange(run)._buckets.layout:
            assert len({exchange(run)._kinds[number] for number in bucket.members}) == 1
        with_residual = [index for index, state in enumerate(kept[0]) if "residual" in state]
        assert with_residual
        for index in with_residual:  # the first turn's counts from the second one on
            assert not bool(kept[0][index]["residual"].any()) and bool(
                kept[1][index]["residual"].any()
            )
        assert coded is not None
        before = [dict(state) for state in coded.states]
        coded._next_states[with_residual[0]] = {"residual": torch.ones(3)}
        coded.abort()
        coded.commit()
        assert all(
            before[index]["residual"] is coded.states[index]["residual"] for index in with_residual
        )

    workers(2, body, strategy=AllReduce(codec=codec))


def test_residuals_have_no_loss_scale() -> None:
    """The same weights whatever a GradScaler multiplies by, an inf in the middle included."""

    def body(run: Run, scale: float, strike: int) -> Tensor:
        net = model()
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=4)
        opt = torch.optim.SGD(net.parameters(), lr=0.05)
        net, opt, loader, scaler = run.prepare(net, opt, batches(dtype=torch.float32), scaler)
        step = 0
        for _ in run.epochs(3):
            for x, y in loader:
                opt.zero_grad()
                loss = scaler.scale(F.mse_loss(net(x), y))
                if step == strike and run.rank == 1:
                    loss = loss * float("inf")
                loss.backward()
                scaler.step(opt)
                scaler.update()
                step += 1
        return parameters(net)

    codec = error_feedback(topk(0.1))
    for strike in (-1, 5):
        one, *others = [
            workers(
                2,
                lambda run, scale=scale, strike=strike: body(run, scale, strike),
                strategy=AllReduce(codec=codec),
            )[0]
            for scale in ((1.0, 1024.0, 2.0**15) if strike < 0 else (1.0, 1024.0))
        ]
        assert bool(one.isfinite().all())
        assert all(distance(other, one) < 1e-5 for other in others)


def test_scalers_with_different_scales_are_refused() -> None:
    def body(run: Run) -> None:
        net = model()
        scalers = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (2.0, 4.0)]
        net, _, loader, *_ = run.prepare(
            net, torch.optim.SGD(net.parameters(), lr=0.05), batches(dtype=torch.float32), *scalers
        )
        for _ in range(2):
            for x, y in loader:
                F.mse_loss(net(x), y).backward()

    with pytest.raises(UsageError, match=r"2 GradScalers have come to different scales \(2, 4\)"):
        workers(2, body, strategy=AllReduce(codec=error_feedback(int8())))


KEEPING = [
    codec for codec in CODECS if "error_feedback" in repr(codec) or "stochastic" in repr(codec)
]
RARE = ("sign", "topk(0.1)", "compose", "powersgd(2))")  # keep nothing but what others here keep


@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(
            codec, marks=pytest.mark.soak if any(word in repr(codec) for word in RARE) else ()
        )
        for codec in KEEPING
    ],
    ids=repr,
)
def test_a_run_that_is_resumed_goes_on_with_what_was_kept(codec: Any, tmp_path: Path) -> None:
    strategy = AllReduce(codec=codec, bucket_mb=0.001)
    straight = workers(2, lambda run: steps(run, 11), strategy=strategy)
    first = workers(2, lambda run: steps(run, 6, save=True), strategy=strategy, folder=tmp_path)
    later = workers(2, lambda run: steps(run, 5, resume=True), strategy=strategy, folder=tmp_path)
    for rank in range(2):
        pieced = [*first[rank], *later[rank]]
        assert len(pieced) == len(straight[rank]) == 11
        for turn, (one, other) in enumerate(zip(pieced, straight[rank], strict=True)):
            assert torch.equal(one, other), f"step {turn}"


@pytest.mark.parametrize(("before", "after_"), [(4, 3), (2, 4), (3, 2)])
def test_with_other_workers_nothing_that_was_kept_is_lost(
    before: int, after_: int, tmp_path: Path
) -> None:
    """The sum of all residuals is what it was."""
    strategy = AllReduce(codec=error_feedback(powersgd(2)))

    def kept(run: Run) -> tuple[Tensor, Tensor]:
        coded = exchange(run)._coded
        assert coded is not None
        states = coded.state_dict()["states"]
        return torch.cat([state["residual"] for state in states]).double(), torch.cat(
            [state["inner"]["q"] for state in states]
        )

    def first(run: Run) -> tuple[Tensor, Tensor]:
        steps(run, 6, save=True)
        return kept(run)

    def later(run: Run) -> tuple[Tensor, Tensor]:
        net = model()
        run.prepare(
            net,
            torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9),
            batches(dtype=torch.float32),
        )
        assert run.resume()
        return kept(run)

    old = workers(before, first, strategy=strategy, folder=tmp_path)
    new = workers(after_, later, strategy=strategy, folder=tmp_path)
    total = torch.stack([residual for residual, _ in old]).sum(0)
    assert float(total.norm()) > 0
    torch.testing.assert_close(
        torch.stack([residual for residual, _ in new]).sum(0), total, rtol=1e-5, atol=1e-7
    )
    assert all(torch.equal(q, old[0][1]) for _, q in [*old, *new])


def test_another_codec_begins_anew_and_says_so(tmp_path: Path) -> None:
    workers(
        2,
        lambda run: steps(run, 4, save=True),
        strategy=AllReduce(codec=error_feedback(topk(0.1))),
        folder=tmp_path,
    )
    for strategy, says in [
        (
            AllReduce(codec=error_feedback(topk(0.2))),
            "the checkpoint was written with codec=error_feedback(topk(0.1)), this is codec=",
        ),
        (
            AllReduce(),
            "the checkpoint was written with a codec: what it had kept of the gradients is dropped",
        ),
    ]:
        said: list[str] = []
        workers(
            2, lambda run: steps(run, 3, resume=True), strategy=strategy, folder=tmp_path, said=said
        )
        assert any(says in text for text in said), said
