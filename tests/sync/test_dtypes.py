"""Parameters of every dtype through every strategy and codec, and with another default dtype:
nothing is dropped, nothing rounded away.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.codec.codec import after, error_feedback
from paceline.codec.coding import NARROWED, compose
from paceline.codec.dense import bfloat16, half, int4, int8, sign
from paceline.codec.powersgd import powersgd
from paceline.codec.sparse import randomk, topk
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from paceline.sync.allreduce import AllReduce
from paceline.sync.base import Strategy
from paceline.sync.gossip.strategy import Gossip
from paceline.sync.localsgd.strategy import LocalSGD
from tests.harness.runs import batches, workers

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.complex128)
CODECS: list[Any] = [
    *(
        half(),
        bfloat16(),
        int8(block=16),
        int8(block=16, rounding="stochastic"),
        int4(block=16),
        error_feedback(sign(block=16)),
    ),
    *(
        error_feedback(topk(0.3)),
        error_feedback(randomk(0.3)),
        error_feedback(compose(topk(0.3), int8(block=16))),
    ),
    *(error_feedback(powersgd(1)), error_feedback(after(2, topk(0.3), before=half()))),
]


class Mixed(nn.Module):
    """A matrix of each of some dtypes, on the same inputs."""

    def __init__(self, dtypes: tuple[torch.dtype, ...] = DTYPES, rows: int = 3) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(3)  # threads share torch's own
        for dtype in dtypes:
            made = torch.randn(rows, 6, generator=draw, dtype=torch.float64)
            if dtype.is_complex:
                made = torch.complex(
                    made, torch.randn(rows, 6, generator=draw, dtype=torch.float64)
                )
            self.register_parameter(
                str(dtype).replace("torch.", "of_"), nn.Parameter(made.to(dtype))
            )

    def forward(self, x: Tensor) -> Tensor:
        """The mean of what the matrices make of the inputs, complex ones turned by 45 degrees."""
        total = torch.zeros((), dtype=torch.float64)
        for p in self.parameters():
            y = x.to(p.dtype) @ p.t()
            total = (
                total
                + (torch.view_as_real(y * (1 + 1j)).square() if p.is_complex() else y.square())
                .double()
                .mean()
            )
        return total


def train(
    run: Run,
    *,
    lr: float = 0.05,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    rows: int = 3,
    apart: bool = False,
    epochs: int = 2,
    count: int = 40,
) -> list[Tensor]:
    """The parameters after epochs of a step for each eight samples of `count`; `apart`: they
    differ in the beginning.
    """
    net = Mixed(dtypes, rows)
    net, opt, loader = run.prepare(
        net, torch.optim.SGD(net.parameters(), lr), batches(count, batch=8)
    )
    if apart:
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(1 + run.rank)
    before = [p.detach().clone() for p in net.parameters()]
    for _ in run.epochs(epochs):
        for x, _y in loader:
            opt.zero_grad()
            net(x).backward()
            opt.step()
    after = [p.detach().clone() for p in net.parameters()]
    run._prepared.epochs.finish()  # replicas are looked at
    return [*before, *after, *(p.detach().clone() for p in net.parameters())]


def ends(strategy: Strategy, size: int = 3, **options: Any) -> list[Tensor]:
    """What all become together."""
    found = workers(size, lambda run: train(run, **options), strategy=strategy)
    count = len(found[0]) // 3
    assert all(
        torch.equal(mine, other)
        for theirs in found
        for mine, other in zip(found[0][-count:], theirs[-count:], strict=True)
    )
    return found[0][-count:]


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    """torch makes tensors of this dtype where none is said."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def off(mine: Tensor, wanted: Tensor) -> float:
    return float((mine - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize("codec", [half(), int8(block=16), topk(0.5)], ids=repr)
def test_mixing_through_a_codec_keeps_the_mean_of_every_dtype(codec: Any) -> None:
    """Learning rate 0: replicas that began apart come nearer, and their mean stays as exact as
    their dtype is.
    """
    found = workers(
        3,
        lambda run: train(run, lr=0.0, apart=True),
        strategy=Gossip("ring", codec=codec, gamma=0.5),
    )
    kinds = [torch.float32, torch.float64, torch.complex64, torch.complex128]
    for number in (DTYPES.index(kind) for kind in kinds):
        first, last = (
            torch.stack([replica[number + len(DTYPES) * when] for replica in found])
            for when in (0, 1)
        )
        assert off(last.mean(0), first.mean(0)) < 20 * torch.finfo(DTYPES[number]).eps, DTYPES[
            number
        ]
        assert float(last.std(0).max()) < 0.5 * float(first.std(0).max()), DTYPES[number]
        if first.is_complex():
            assert float(last.imag.std(0).max()) < 0.5 * float(first.imag.std(0).max()), (
                "imaginary parts mix, too"
            )


def test_a_codec_says_what_it_leaves_out() -> None:
    for strategy in (
        Gossip(codec=int8()),
        AllReduce(codec=int8()),
        LocalSGD(2, codec=int8()),
        ParameterServer(codec=int8()),
    ):
        said: list[str] = []
        workers(2, lambda run: train(run, epochs=1, count=24), strategy=strategy, said=said)
        for kind in ("complex64", "complex128"):
            text = (
                f"of_{kind} is torch.{kind}: it is exchanged exactly, codecs are for real numbers"
            )
            assert said.count(text) == 1, (strategy, said)
        assert said.count(NARROWED) == (not isinstance(strategy, Gossip)), (
            "a replica that mixes keeps what is finer"
        )


@pytest.mark.each_choice
@pytest.mark.parametrize("rows", [1, 3, 4000])
@pytest.mark.parametrize("options", [{}, {"staleness": 1}, {"codec": int8()}], ids=str)
def test_servers_take_every_dtype(options: dict[str, Any], rows: int) -> None:
    """Messages of some bytes and of many: tensors over them must not lie where the processor
    can't use them.
    """
    dtypes, size = (
        (torch.complex128, torch.complex64, torch.float64),
        1 if "staleness" in options else 2,
    )
    mine, wanted = (
        ends(strategy, size, dtypes=dtypes, rows=rows)
        for strategy in (ParameterServer(**options), AllReduce())
    )
    for one, other in zip(mine, wanted, strict=True):
        assert off(one, other) < (
            0.02
            if options.get("codec") and not one.is_complex()
            else 1e-5
            if one.dtype == torch.complex64
            else 1e-12
        )


@pytest.mark.alike(4)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_codecs_come_to_the_same_whatever_the_default_dtype(codec: Any) -> None:
    found = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        with default(dtype):
            found.append(ends(AllReduce(codec=codec), 2, epochs=1, count=24))
    for other in found[1:]:
        assert all(torch.equal(one, mine) for one, mine in zip(found[0], other, strict=True))
    assert all(bool(one.isfinite().all()) for one in found[0])


@pytest.mark.each_choice
@pytest.mark.parametrize(
    "make", [lambda codec: LocalSGD(2, codec=codec), lambda codec: ParameterServer(codec=codec)]
)
@pytest.mark.parametrize(
    "codec",
    [int8(16, "stochastic"), error_feedback(topk(0.3)), error_feedback(randomk(0.3))],
    ids=repr,
)
def test_strategies_come_to_the_same_whatever_the_default_dtype(make: Any, codec: Any) -> None:
    found = []
    for dtype in (torch.float32, torch.float64):
        with default(dtype):
            found.append(ends(make(codec), 2, epochs=1, count=24))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
