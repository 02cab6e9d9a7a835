"""Sharded training is training: whatever is cut, among however many workers, parameters are
those of one process.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.apps.gpt import next_token_loss
from paceline.codec.dense import int8
from paceline.comm.hierarchy import hosts_group as hierarchy
from paceline.errors import Mismatch, UsageError
from paceline.parallel.shard import find_unit_parameters, find_units, shard
from paceline.sync.allreduce import AllReduce
from paceline.sync.localsgd.strategy import LocalSGD
from tests.harness.models import fill
from tests.harness.sharded import Trainee, adamw, fitting, refused, same, train
from tests.harness.sharded_models import OddNet, gpt, odd_net, pictures, texts, unet, vectors

STAGES = pytest.mark.parametrize("zero", [1, 2, 3])

MODELS = {
    "odd": (odd_net, fitting(vectors), "blocks.*"),
    "unet": (unet, fitting(pictures), ("first", "second", "bottom", "last")),
    "gpt": (gpt, fitting(texts, next_token_loss), "blocks.*"),
}


@pytest.mark.each_choice
@STAGES
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("size", "data"), [(2, 1), (3, 1), (4, 2)])
def test_as_one_process(model: str, zero: Any, size: int, data: int) -> None:
    build, step, units = MODELS[model]
    same(build, step, shard(units, zero=zero), size, data=data)


@pytest.mark.parametrize(("size", "data", "zero"), [(4, 1, 1), (4, 1, 2), (4, 1, 3), (8, 2, 3)])
def test_after_a_cut_of_layers(zero: Any, size: int, data: int) -> None:
    layers = pl.tensor(
        {
            "blocks.*.attention.qkv": pl.column(parts=3),
            "blocks.*.attention.out": pl.row(),
            "blocks.*.up": pl.column(),
            "blocks.*.down": pl.row(),
        },
        divide=["blocks.*.attention.heads"],
    )
    same(
        gpt,
        fitting(texts, next_token_loss),
        shard("blocks.*", zero=zero),
        size,
        data=data,
        first=layers,
    )


@STAGES
def test_in_shared_memory(zero: Any) -> None:
    same(gpt, fitting(texts, next_token_loss), shard("blocks.*", zero=zero), 4, data=2, shared=True)


def test_units_in_another_order_are_noticed() -> None:
    """Blocks have the same sizes, so nothing else than their names tells them apart."""

    def step(one: Trainee, number: int) -> None:
        x, _ = one.batch(*vectors(number))
        order = (0, 1) if one.rank == 0 else (1, 0)
        with torch.no_grad():
            for block in order:
                one.model.blocks[block](x[:, :5])  # type: ignore[index, operator]

    for shared in (False, True):
        with pytest.raises(Mismatch, match="the parameters of blocks"):
            train(2, odd_net, step, shard("blocks.*"), steps=1, shared=shared)


def test_a_model_that_one_worker_calls_alone_is_noticed_at_once() -> None:
    def step(one: Trainee, number: int) -> None:
        if one.rank == 0:
            with torch.no_grad():
                one.model(vectors(0)[0])
        fitting(vectors)(one, number)

    for shared in (False, True):
        with pytest.raises(
            Mismatch,
            match=(
                r"rank 0 at .* for model.* without gradients.*rank 1 at .* for model.* with "
                r"gradients"
            ),
        ):
            train(2, odd_net, step, shard("blocks.*"), steps=1, shared=shared)


@STAGES
def test_adamw_over_twenty_steps(zero: Any) -> None:
    same(
        odd_net,
        fitting(vectors),
        shard("blocks.*", zero=zero),
        4,
        steps=20,
        bound=1e-9,
        optimizer=adamw,
    )


@STAGES
def test_sgd_in_single_precision(zero: Any) -> None:
    def step(one: Trainee, number: int) -> None:
        x, y = (t.float() for t in one.batch(*vectors(number)))
        one.optimizer.zero_grad()
        F.mse_loss(one.model(x), y).backward()
        one.optimizer.step()

    same(lambda: fill(OddNet()).float(), step, shard("blocks.*", zero=zero), 3, steps=1, bound=5e-7)


@STAGES
def test_shares_over_data(zero: Any) -> None:
    # one replica has 9 samples, the other 3
    same(odd_net, fitting(vectors, cuts=[3, 9, 10]), shard("blocks.*", zero=zero), 4, data=2)


@STAGES
def test_one_unit_alone_and_units_in_units(zero: Any) -> None:
    same(odd_net, fitting(vectors), shard(zero=zero), 3)
    same(odd_net, fitting(vectors), shard(("blocks.*", "blocks.*.0", "inward"), zero=zero), 3)


@STAGES
def test_frozen_parameters_and_adapters(zero: Any) -> None:
    class Adapted(nn.Module):
        def __init__(self, inward: int, outward: int) -> None:
            super().__init__()
            self.base, self.down, self.up = (
                nn.Linear(inward, outward),
                nn.Linear(inward, 2),
                nn.Linear(2, outward),
            )
            self.base.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.base(x) + self.up(self.down(x))
            return out

    def build() -> nn.Module:
        net = OddNet()
        net.inward.requires_grad_(False)
        for index in range(3):
            net.blocks[index] = nn.Sequential(Adapted(5, 9), nn.Tanh(), Adapted(9, 5))
        net.blocks[1].requires_grad_(False)
        return fill(net.double())

    same(build, fitting(vectors), shard("blocks.*", zero=zero), 3)


@pytest.mark.each_choice
@STAGES
@pytest.mark.parametrize(
    "strategy",
    [
        lambda: AllReduce(bucket_mb=0.0001),
        lambda: AllReduce(codec=int8()),
        lambda: LocalSGD(every=2),
    ],
)
def test_strategies_between_replicas(zero: Any, strategy: Any) -> None:
    """What a codec or rounds do to gradients is up to them; all workers end with the same
    parameters.
    """

    def ended(one: Trainee) -> list[float]:
        x, y = vectors(0)
        return [float(F.mse_loss(one.model(x), y).detach())]

    def step(one: Trainee, number: int) -> None:
        fitting(vectors)(one, number)
        one.tracker.sync.commit()

    found = train(
        4,
        odd_net,
        step,
        shard("blocks.*", zero=zero),
        data=2,
        steps=6,
        strategy=strategy,
        ended=ended,
    )
    assert all(torch.equal(values, found[0][0]) for values, _ in found)
    untrained = float(F.mse_loss(odd_net()(vectors(0)[0]), vectors(0)[1]).detach())
    assert all(said == found[0][1] and said[0] < untrained for _, said in found)


def test_words_that_mean_nothing() -> None:
    with pytest.raises(UsageError, match="zero=4 is no stage"):
        shard(zero=4)  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match="reduce='int8' is unknown; possible: bfloat16, float16, float32"
    ):
        shard(reduce="int8")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="say zero=3, or leave params out"):
        shard(zero=2, params="bfloat16")
    assert (
        repr(shard("blocks.*", zero=2, reduce="float32"))
        == "shard(units='blocks.*', zero=2, reduce='float32')"
    )


def test_patterns() -> None:
    model = odd_net()
    names = [name for name, _ in find_units(model, ["blocks.*", "head"])]
    assert names == ["blocks.0", "blocks.1", "blocks.2", "head"]
    assert [name for name, _ in find_units(model, ["blocks.*", "blocks.?.2"])][:2] == [
        "blocks.0",
        "blocks.0.2",
    ]
    with pytest.raises(
        UsageError,
        match=r"shard\('block.\*'\) matches no module of the model; the nearest names are blocks",
    ):
        list(find_units(model, ["block.*"]))
    with pytest.raises(
        UsageError, match=r"blocks is a ModuleList, which is never called itself; write 'blocks.\*'"
    ):
        list(find_units(model, ["blocks"]))


def test_tied_parameters_belong_to_one_unit() -> None:
    homes = {
        held.name: (unit, len(held.places))
        for unit, held in find_unit_parameters(gpt(), ["tokens", "head", "blocks.0"])
    }
    assert (
        homes["tokens.weight"] == ("", 2)
        and homes["blocks.0.up.weight"] == ("blocks.0", 1)
        and "head.weight" not in homes
    )


@pytest.mark.filterwarnings("ignore:Using backward")
@STAGES
def test_what_can_not_be_cut(zero: Any) -> None:
    cut = shard("blocks.*", zero=zero)
    refused(cut, "Adafactor may look at whole parameters", optimizer=torch.optim.Adafactor)

    def sparse() -> nn.Module:
        return nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 3)).double()

    def lookup(one: Trainee, number: int) -> None:
        one.model(torch.tensor([1, 2])).sum().backward()

    refused(shard(zero=zero), "the gradient of 0.weight is sparse", sparse, lookup)

    def graph(one: Trainee, number: int) -> None:
        one.model(vectors(0)[0]).square().sum().backward(create_graph=True)

    refused(cut, r"backward\(create_graph=True\) reached the parameter head", step=graph)


def test_workers_with_different_models() -> None:
    sizes = iter([3, 4])
    refused(shard(), "workers have different models", lambda: nn.Linear(2, next(sizes)))


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_over_hosts_parts_go_once_to_each_other_host(
    zero: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step with one unit, parts of gradients and those of parameters."""
    monkeypatch.setattr(hierarchy, "SMALL", 1)

    def body(one: Trainee, number: int) -> None:
        before = sum(meter.traffic.between for meter in one.cut.groups.meters)
        step(one, number)
        one.seen["sent"] = sum(meter.traffic.between for meter in one.cut.groups.meters) - before

    step = fitting(vectors)
    sent = same(
        odd_net, body, shard(zero=zero), 4, hosts=(0, 1, 0, 1), ended=lambda one: one.seen["sent"]
    )
    part = -(-sum(p.numel() for p in odd_net().parameters()) // 4) * 8  # bytes
    assert sent == [2 * part] * 4
