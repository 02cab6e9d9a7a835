"""Local SGD and DiLoCo in whole runs on threads, against AllReduce and against each other at
their limits.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.codec.codec import error_feedback, smaller, where
from paceline.codec.coding import exact
from paceline.codec.dense import half, int8
from paceline.codec.sparse import topk
from paceline.errors import UsageError
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce
from paceline.sync.localsgd.fragment import adaptive
from paceline.sync.localsgd.outer import average, nesterov
from paceline.sync.localsgd.rounds import Rounds
from paceline.sync.localsgd.strategy import LocalSGD, LocalSGDSync
from tests.harness.local_training import (
    adam,
    evaluates_before_steps,
    model,
    reference,
    resumes,
    runs,
    sgd,
    train,
)
from tests.harness.runs import batches, cut, distance, parameters, workers


def rounds(run: Run) -> Rounds:
    sync = run._backward.sync
    assert isinstance(sync, LocalSGDSync)
    return sync._rounds


RARE = [
    pytest.param(options, marks=pytest.mark.slow)
    for options in ({"loss": "sum"}, {"shares": cut(0, 3, 5)})
]


@pytest.mark.parametrize("options", [{}, {"shares": cut(1, 7, 2)}, *RARE], ids=str)
def test_every_step_with_plain_sgd_is_allreduce(options: dict[str, Any]) -> None:
    make = (
        sgd
        if options.get("loss") != "sum"
        else (lambda net: torch.optim.SGD(net.parameters(), lr=0.005))
    )
    wanted = runs(AllReduce(), make=make, epochs=2, **options)
    assert distance(runs(LocalSGD(1), make=make, epochs=2, **options), wanted) < 1e-9
    assert distance(runs(LocalSGD(1, after=3), make=make, epochs=2, **options), wanted) < 1e-9
    assert distance(runs(LocalSGD(4), make=make, epochs=2, **options), wanted) > 1e-6, (
        "rounds of four steps are something else"
    )


def test_diloco_with_an_outer_rate_of_one_and_no_momentum_is_local_sgd() -> None:
    for every in (1, 3, 5):
        wanted = reference(LocalSGD(every))
        assert distance(runs(LocalSGD(every, outer=nesterov(1.0, 0.0))), wanted) < 1e-12
        assert distance(runs(LocalSGD(every, outer=nesterov(0.7, 0.9))), wanted) > 1e-3


def test_diloco_is_torchs_nesterov_on_the_changes() -> None:
    """A reference of few lines: each worker by itself on its share, and torch.optim.SGD on the
    mean change.
    """
    every, size, lr, momentum = 4, 2, 0.7, 0.9
    whole = model()
    outer = torch.optim.SGD(whole.parameters(), lr=lr, momentum=momentum, nesterov=True)
    loader = batches()
    data = [batch for _ in range(4) for batch in loader]
    for begin in range(0, len(data), every):
        changes = []
        for rank in range(size):
            net = model()
            net.load_state_dict(whole.state_dict())
            opt = sgd(net)
            for x, y in data[begin : begin + every]:
                mine = slice(rank * len(x) // size, (rank + 1) * len(x) // size)
                opt.zero_grad()
                F.mse_loss(net(x[mine]), y[mine]).backward()
                opt.step()
            changes.append(
                [
                    p.detach() - q.detach()
                    for p, q in zip(net.parameters(), whole.parameters(), strict=True)
                ]
            )
        for p, *mine in zip(whole.parameters(), *changes, strict=True):
            p.grad = -torch.stack(mine).mean(0)
        outer.step()
    assert (
        distance(runs(LocalSGD(every, outer=nesterov(lr, momentum)), size=size), parameters(whole))
        < 1e-12
    )


@pytest.mark.parametrize("every", [2, 3])
def test_replicas_are_equal_after_each_round_and_different_within(every: int) -> None:
    seen: list[list[Tensor]] = [[] for _ in range(3)]

    def body(run: Run) -> None:
        ended: list[Tensor] = []
        train(run, each=lambda net: ended.append(parameters(net)))
        seen[run.rank] = ended

    workers(3, body, strategy=LocalSGD(every))
    # `each` looks at the end of the body: before the round that ends with the step
    for step in range(len(seen[0])):
        equal = torch.equal(seen[0][step], seen[1][step])
        assert not equal, "own steps differ"
    assert len(seen[0]) == 20


CODECS = [
    half(),
    int8(block=32),
    error_feedback(topk(0.2)),
    where(smaller(30), exact(), error_feedback(topk(0.1))),
]
OTHERS = [LocalSGD(2, outer=nesterov(0.7, 0.5)), LocalSGD(4, fragments=2, delay=1, alpha=0.5)]


@pytest.mark.parametrize(
    ("strategy", "codec"),
    [
        (LocalSGD(3), CODECS[0]),
        *((strategy, CODECS[-1]) for strategy in OTHERS),
        *((LocalSGD(3), codec) for codec in CODECS[1:]),
        *(
            pytest.param(strategy, codec, marks=pytest.mark.soak)
            for strategy in OTHERS
            for codec in CODECS[:-1]
        ),
    ],
    ids=repr,
)
def test_every_codec_goes_with_it(codec: Any, strategy: LocalSGD) -> None:
    coded = dataclasses.replace(strategy, codec=codec, bucket_mb=0.001)
    assert 1e-7 < distance(runs(coded), reference(strategy)) < 0.5


@pytest.mark.soak
def test_what_comes_through_while_a_turn_is_counted() -> None:
    """LocalSGDSync of streaming end in threads of their own, beside commits."""
    strategy = LocalSGD(
        4,
        fragments=2,
        delay=1,
        codec=where(smaller(30), exact(), error_feedback(topk(0.1))),
        bucket_mb=0.001,
    )
    wanted = runs(strategy)
    for _ in range(100):
        assert torch.equal(runs(strategy), wanted)


def test_momentum_kept_and_averaged() -> None:
    kept, averaged = runs(LocalSGD(3), make=adam), runs(LocalSGD(3, momentum="averaged"), make=adam)
    assert distance(kept, averaged) > 1e-6

    def body(run: Run) -> Tensor:
        net = model()
        opt = adam(net)
        net, opt, loader = run.prepare(net, opt, batches())
        for x, y in loader:
            F.mse_loss(net(x), y).backward()
            opt.step()
            opt.zero_grad()
        rounds(run).converge()
        return torch.cat([opt.state[p]["exp_avg"].reshape(-1) for p in net.parameters()])

    one, other = workers(2, body, strategy=LocalSGD(5, momentum="averaged"))
    assert torch.equal(one, other)
    one, other = workers(2, body, strategy=LocalSGD(5))
    assert not torch.equal(one, other)


def test_it_sends_only_at_rounds() -> None:
    def body(run: Run) -> int:
        train(run)
        return run._context.traffic.within

    every = {h: workers(2, body, strategy=LocalSGD(h))[0] for h in (1, 4)}
    assert 3 < every[1] / every[4] < 5


def test_fragments_take_turns() -> None:
    sent: list[tuple[int, int]] = []

    def body(run: Run) -> None:
        send = rounds(run)._send_fragment

        def noted(number: int) -> None:
            if run.rank == 0:
                sent.append((rounds(run).steps, number))
            send(number)

        rounds(run)._send_fragment = noted  # type: ignore[method-assign]
        train(run)

    workers(2, body, strategy=LocalSGD(4, fragments=2, delay=1, alpha=0.5))
    within = [(step, number) for step, number in sent if step < 20]
    assert within == [
        (step, number)
        for step in range(2, 20)
        for number in range(2)
        if step % 4 == (2 if number == 0 else 0)
    ]


def test_streaming_with_one_fragment_and_no_delay_is_diloco_and_with_alpha_mixes() -> None:
    wanted = runs(LocalSGD(4, outer=nesterov()))
    late = runs(LocalSGD(4, outer=nesterov(), delay=2))
    mixed = runs(LocalSGD(4, outer=nesterov(), delay=2, alpha=0.5))
    assert distance(late, wanted) > 1e-4 and distance(mixed, late) > 1e-4
    assert bool(mixed.isfinite().all())


def test_rounds_adapt_to_drift() -> None:
    lengths: list[int] = []

    def body(run: Run) -> None:
        train(
            run,
            each=lambda net: lengths.append(rounds(run)._length.steps) if run.rank == 0 else None,
            epochs=6,
        )

    workers(2, body, strategy=LocalSGD(adaptive(2, 1, 8, drift=1000.0)))
    assert lengths[0] == 2 and max(lengths) == 8 and sorted(lengths) == lengths
    lengths.clear()
    workers(2, body, strategy=LocalSGD(adaptive(8, 2, 8, drift=1e-9)))
    assert lengths[0] == 8 and lengths[-1] == 2


@pytest.mark.alike(3)
@pytest.mark.parametrize(
    "strategy",
    [
        LocalSGD(3),
        LocalSGD(3, outer=nesterov()),
        LocalSGD(2, codec=error_feedback(topk(0.2))),
        LocalSGD(2, after=5, momentum="averaged"),
    ],
    ids=repr,
)
def test_a_run_that_is_resumed_goes_on_as_if_it_had_been_saved_only(
    strategy: LocalSGD, tmp_path: Path
) -> None:
    resumes(strategy, 2, tmp_path)


def test_before_an_evaluation_replicas_become_equal() -> None:
    def body(run: Run) -> list[Tensor]:
        net = model()
        net, opt, loader = run.prepare(net, sgd(net), batches())
        test = run.prepare(batches(), train=False)
        found = []
        for _ in run.epochs(2):
            for x, y in loader:
                F.mse_loss(net(x), y).backward()
                opt.step()
                opt.zero_grad()
            found.append(parameters(net))
            for _x, _y in test:
                found.append(parameters(net))
                break
        return found

    one, other = workers(2, body, strategy=LocalSGD(3))
    assert [torch.equal(a, b) for a, b in zip(one, other, strict=True)] == [
        False,
        True,
        False,
        True,
    ]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: LocalSGD(0), "every=0 is not a number of steps"),
        (lambda: LocalSGD("4"), "every='4' is not a number of steps"),
        (
            lambda: LocalSGD(4, momentum="lost"),
            "momentum='lost' is unknown; possible: averaged, kept",
        ),
        (lambda: LocalSGD(4, outer=0.7), "outer=0.7 is no outer optimizer"),
        (lambda: LocalSGD(4, delay=4), "delay must be 0 or more, and less than the 4 steps"),
        (lambda: LocalSGD(4, alpha=0.5), "alpha mixes delayed means; give delay too"),
        (lambda: LocalSGD(4, fragments=0), "fragments 1 or more"),
        (lambda: adaptive(8, 9, 10), "least <= first <= most"),
        (lambda: nesterov(0.0), "lr must be above 0"),
    ],
)
def test_wrong_arguments(make: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        make()


def test_notation() -> None:
    strategy = LocalSGD(
        every=16, outer=nesterov(0.5, 0.9), codec=where(smaller(10_000), exact(), int8())
    )
    assert (
        repr(strategy)
        == "LocalSGD(16, outer=nesterov(lr=0.5), codec=where(smaller(10000), exact(), int8()))"
    )
    assert repr(LocalSGD(8, outer=average())) == "LocalSGD(8)"


def test_an_evaluation_between_backward_and_step_hides_no_step() -> None:
    (one, together), (other, also), _ = workers(3, evaluates_before_steps, strategy=LocalSGD(3))
    assert not torch.equal(one, other) and torch.equal(together, also)
    assert distance(together, runs(AllReduce(), epochs=2)) < 1e-2
