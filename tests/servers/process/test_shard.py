"""Servers step as one process would: whatever order pushes come in, however parameters are cut,
and whoever is lost in between.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.comm.bucket_layout import BucketShape, cut_runs
from paceline.errors import Mismatch
from paceline.servers.process import optimizers as recipe
from paceline.servers.process.partition import RowRange, cut_parameters, deal_pieces
from paceline.servers.process.shard import Shard, ShardPlan
from paceline.state.snapshot import make_snapshot, snapshot_from_bytes

SIZES = ((600, 40), (40,), (30, 40), (30,))


def parameters(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=generator, dtype=dtype)) for size in SIZES]


class Servers:
    """Shards of a model, and what a worker does with them."""

    def __init__(
        self, model: list[nn.Parameter], optimizers: list[torch.optim.Optimizer], count: int
    ) -> None:
        self.model = model
        owner = {
            id(p): (k, g)
            for k, o in enumerate(optimizers)
            for g, group in enumerate(o.param_groups)
            for p in group["params"]
        }
        found = cut_parameters(
            [BucketShape.of_parameter(p) for p in model], count, [False] * len(model)
        )
        told = [(recipe.get_optimizer_name(o), recipe.read_settings(o)) for o in optimizers]
        self.shards = []
        for numbers in deal_pieces(found, count):
            mine = [found[number] for number in numbers]
            owners = [owner[id(model[piece.slot])] for piece in mine]
            kinds = [
                piece.shape._replace(kind=who[0]) for piece, who in zip(mine, owners, strict=True)
            ]
            self.shards.append(
                Shard(
                    ShardPlan(
                        mine, cut_runs(kinds, reversed(range(len(mine))), 100_000), owners, told
                    )
                )
            )
        for shard in self.shards:
            for number in range(len(shard.units)):
                shard.fill_unit(number, self.flat(shard, number, [p.detach() for p in model]))

    def flat(self, shard: Shard, number: int, values: list[Tensor | None]) -> Tensor:
        """Some tensors of all parameters, as they lie in a unit."""
        bucket = shard.units[number].bucket
        found = torch.zeros_like(bucket.flat)
        for index, view in zip(
            shard.plan.unit_pieces[number], bucket.views_over(found), strict=True
        ):
            value = values[(piece := shard.plan.pieces[index]).slot]
            if value is not None:
                view.copy_(value[piece.start : piece.stop] if value.dim() else value)
        return found

    def used(self, shard: Shard, number: int, values: list[Tensor | None]) -> bytes:
        return bytes(
            values[shard.plan.pieces[index].slot] is not None
            for index in shard.plan.unit_pieces[number]
        )

    def pushes(self, values: list[Tensor | None], worker: int) -> list[Any]:
        return [
            (
                shard,
                number,
                worker,
                self.flat(shard, number, values),
                self.used(shard, number, values),
            )
            for shard in self.shards
            for number in range(len(shard.units))
        ]

    def read(self) -> list[Tensor]:
        found = [torch.empty_like(p) for p in self.model]
        for shard in self.shards:
            for number, unit in enumerate(shard.units):
                for index, view in zip(
                    shard.plan.unit_pieces[number],
                    unit.bucket.views_over(shard.read_unit(number)),
                    strict=True,
                ):
                    piece: RowRange = shard.plan.pieces[index]
                    found[piece.slot][piece.start : piece.stop] = view.detach()
        return found


def gradients(step: int, worker: int, *, without: int | None = None) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    found: list[Tensor | None] = [
        torch.randn(size, generator=generator, dtype=torch.float64) for size in SIZES
    ]
    if without is not None:
        found[without] = None
    return found


KINDS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1),
    "momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, 0.01),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.5, centered=True),
    "groups": lambda p: torch.optim.Adam([{"params": p[:1], "lr": 0.02}, {"params": p[1:]}], 0.01),
}


@pytest.mark.each_choice
@pytest.mark.parametrize(
    "servers", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_twenty_steps_are_those_of_one_process(kind, servers):
    """By 1 to 4 workers whose pushes come in any order, with a schedule, clipped, and a
    parameter that is not always used.
    """
    chance = random.Random(kind)
    for workers in (1, 2, 3, 4):
        alone, model = parameters(), parameters()
        one, mine = KINDS[kind](alone), KINDS[kind](model)
        there = Servers(model, [mine], servers)
        told = recipe.read_settings(mine)
        for step in range(1, 21):
            without = 1 if step % 3 == 0 else None
            found = [gradients(step, worker, without=without) for worker in range(workers)]
            for p, *grads in zip(alone, *found, strict=True):
                p.grad = None if grads[0] is None else torch.stack(grads).sum(0)
            for optimizer in (one, mine):
                optimizer.param_groups[0]["lr"] *= 0.97
            norm = float(nn.utils.clip_grad_norm_(alone, 50.0))
            one.step()
            pushes = [
                push for worker in range(workers) for push in there.pushes(found[worker], worker)
            ]
            chance.shuffle(pushes)
            for shard, *push in pushes:
                shard.push_gradient(*push)
            parts = [shard.compute_norm(0, range(workers)) for shard in there.shards]
            assert math.isclose(math.hypot(*parts), norm, rel_tol=1e-12)
            factor, now = min(1.0, 50.0 / (norm + 1e-6)), recipe.read_settings(mine)
            for shard in there.shards:
                assert shard.close_step(
                    0, step, range(workers), factor=factor, settings=recipe.diff_settings(told, now)
                )
            told = now
        for one_value, value in zip(alone, there.read(), strict=True):
            assert (one_value - value).norm() <= 1e-12 * one_value.norm()


def test_the_sum_does_not_depend_on_who_comes_first():
    found = []
    for seed in range(5):
        model = [nn.Parameter(p.float()) for p in parameters()]
        there = Servers(model, [KINDS["momentum"](model)], 2)
        for step in range(1, 4):
            pushes = []
            for worker in range(4):
                grads = [None if g is None else g.float() for g in gradients(step, worker)]
                pushes += there.pushes(grads, worker)
            random.Random(seed + step).shuffle(pushes)
            for shard, *push in pushes:
                shard.push_gradient(*push)
            for shard in there.shards:
                shard.close_step(0, step, range(4))
        found.append(there.read())
    assert all(
        torch.equal(one, other)
        for others in found[1:]
        for one, other in zip(found[0], others, strict=True)
    )


@pytest.fixture
def there():
    model = parameters()
    return Servers(model, [KINDS["adam"](model)], 2)


def push(there: Servers, step: int, workers: Any = (0, 1)) -> None:
    for worker in workers:
        for shard, *parts in there.pushes(gradients(step, worker), worker):
            shard.push_gradient(*parts)


class TestOnce:
    def test_a_step_that_comes_again_does_nothing(self, there):
        push(there, 1)
        shard = there.shards[0]
        assert shard.close_step(0, 1, [0, 1]) and not shard.close_step(0, 1, [0, 1])
        with pytest.raises(Mismatch, match="step 3 of optimizer 0 can't come after step 1"):
            shard.close_step(0, 3, [0, 1])

    def test_a_push_that_comes_again_counts_once(self, there):
        push(there, 1, (0, 1, 0, 0, 1))
        for shard in there.shards:
            shard.close_step(0, 1, [0, 1])
        model = parameters()
        other = Servers(model, [KINDS["adam"](model)], 1)
        push(other, 1)
        other.shards[0].close_step(0, 1, [0, 1])
        assert all(
            torch.equal(one, two) for one, two in zip(there.read(), other.read(), strict=True)
        )

    def test_a_turn_that_is_dealt_again_replaces_what_was_pushed(self, there):
        push(there, 7)
        for shard in there.shards:
            shard.discard_worker_pushes(0)
            shard.discard_worker_pushes(1)
            assert shard.list_missing_workers(0, [0, 1]) == [0, 1]
        push(there, 1, (1,))
        for shard in there.shards:
            assert shard.list_missing_workers(0, [1]) == [] and shard.close_step(0, 1, [1])
        alone = parameters()
        one = KINDS["adam"](alone)
        for p, grad in zip(alone, gradients(1, 1), strict=True):
            p.grad = grad
        one.step()
        assert all(
            torch.allclose(p, value, rtol=1e-14)
            for p, value in zip(alone, there.read(), strict=True)
        )

    def test_only_who_is_named_counts(self, there):
        push(there, 1, (0, 1, 2))
        there.shards[0].discard_worker_pushes(2)
        with pytest.raises(Mismatch, match=r"workers \[2\] have not pushed"):
            there.shards[0].close_step(0, 1, [0, 2])
        assert there.shards[1].close_step(0, 1, [0, 1])

    def test_who_comes_after_the_sum_is_late(self, there):
        push(there, 1, (0,))
        shard = there.shards[0]
        shard.compute_norm(0, [0])
        with pytest.raises(Mismatch, match="worker 1 comes too late"):
            push(there, 1, (1,))


class TestFits:
    def test_another_shape_or_dtype(self, there):
        shard = there.shards[0]
        flat = shard.read_unit(0)
        used = bytes(len(shard.plan.unit_pieces[0]))
        for wrong in (flat[:-1].clone(), flat.float(), flat.view(1, -1).clone()):
            with pytest.raises(Mismatch, match="unit 0 is float64"):
                shard.push_gradient(0, 0, wrong, used)
        with pytest.raises(Mismatch, match="there is no unit 99"):
            shard.push_gradient(99, 0, flat, used)
        with pytest.raises(Mismatch, match="whether they were used"):
            shard.push_gradient(0, 0, flat.clone(), used + b"\1")
        assert shard.list_missing_workers(0, [0]) == [0]


def test_two_optimizers_step_by_themselves():
    model = parameters()
    optimizers = [torch.optim.SGD(model[:2], 0.1), torch.optim.Adam(model[2:], 0.1)]
    there = Servers(model, optimizers, 2)
    before = there.read()
    push(there, 1, (0,))
    for shard in there.shards:
        shard.close_step(1, 1, [0])
    after = there.read()
    assert [torch.equal(one, other) for one, other in zip(before, after, strict=True)] == [
        True,
        True,
        False,
        False,
    ]
    for shard in there.shards:
        shard.close_step(0, 1, [0])
    assert not torch.equal(there.read()[0], before[0]) and torch.equal(there.read()[2], after[2])


def test_gradients_that_are_applied_as_they_come():
    """Each of them is a step of its own, by a part of the learning rate."""
    alone, model = parameters(), parameters()
    one, mine = KINDS["adam"](alone), KINDS["adam"](model)
    for group in one.param_groups:
        group["lr"] *= 0.25
    there = Servers(model, [mine], 3)
    for step in range(1, 6):
        for worker in range(2):
            grads = gradients(step, worker)
            for p, grad in zip(alone, grads, strict=True):
                p.grad = grad * 0.5
            one.step()
            for shard, number, _, flat, used in there.pushes(grads, worker):
                shard.push_gradient(number, worker, flat, used)
            for shard in there.shards:
                assert shard.apply_gradient(0, worker, step, factor=0.5, part=0.25)
                assert not shard.apply_gradient(0, worker, step, factor=0.5, part=0.25), (
                    "it comes again, and does nothing"
                )
                with pytest.raises(Mismatch, match="has not pushed all"):
                    shard.apply_gradient(0, worker, step + 1)
                with pytest.raises(Mismatch, match="can't come after its step"):
                    shard.apply_gradient(0, worker, step + 2)
    assert all(
        torch.allclose(p, value, rtol=1e-12) for p, value in zip(alone, there.read(), strict=True)
    )
    assert {unit.version for shard in there.shards for unit in shard.units} == {11}


@pytest.mark.parametrize("clipped", [False, True])
def test_what_comes_late_is_kept_for_a_later_step(clipped):
    """Steps by those who are named: the mean of their gradients, by their part of the learning
    rate; each gradient is in one of them.
    """
    alone, model = parameters(), parameters()
    one, mine = KINDS["adam"](alone), KINDS["adam"](model)
    there = Servers(model, [mine], 2)
    # by worker and turn: the second of worker 1 is late
    steps = [[(0, 1), (1, 1), (2, 1)], [(0, 2), (2, 2)], [(0, 3), (1, 2), (2, 3)]]
    for step, who in enumerate(steps, 1):
        part = len(who) / 3
        for p, *grads in zip(
            alone, *(gradients(turn, worker) for worker, turn in who), strict=True
        ):
            p.grad = torch.stack(grads).mean(0)
        one.param_groups[0]["lr"] = 0.01 * part
        one.step()
        for worker, turn in [*who, (1, 2)] if step == 2 else who:
            if worker == 1 and step == 2 and clipped:
                for shard in there.shards:
                    shard.compute_norm(0, [worker for worker, _ in who])  # and it comes after that
            if step < 3 or worker != 1:
                for shard, number, _, flat, used in there.pushes(
                    [g / 3 for g in gradients(turn, worker)], worker
                ):
                    shard.push_gradient(number, worker, flat, used, keep=True)
        for shard in there.shards:
            assert shard.close_step(
                0, step, [worker for worker, _ in who], factor=1 / part, part=part, keep=True
            )
    assert all(
        torch.allclose(p, value, rtol=1e-12) for p, value in zip(alone, there.read(), strict=True)
    )
    assert all(
        not unit.pushes and unit.gradient_sum is None
        for shard in there.shards
        for unit in shard.units
    )
    assert all(
        group["lr"] == 0.01 for shard in there.shards for group in shard.optimizers[0].param_groups
    )


@pytest.mark.parametrize("summed", [False, True])
def test_a_replica_goes_on_from_the_state(there, summed):
    """As it travels, in the middle of a step: bit for bit the same."""
    push(there, 1)
    for shard in there.shards:
        shard.close_step(0, 1, [0, 1])
    push(there, 2)
    shard = there.shards[0]
    if summed:
        shard.compute_norm(0, [0, 1])
    other = Shard(shard.plan)
    other.load_state_dict(
        snapshot_from_bytes(make_snapshot(shard.state_dict()).to_bytes()).unpack_state()
    )
    for replica in (shard, other):
        assert (
            replica.list_missing_workers(0, [0, 1]) == []
            and not replica.close_step(0, 1, [0, 1])
            and replica.close_step(0, 2, [0, 1])
        )
    for number in range(len(shard.units)):
        assert (
            torch.equal(shard.read_unit(number), other.read_unit(number))
            and shard.units[number].version == other.units[number].version
        )
    assert other.units[0].bucket.flat.data_ptr() != shard.units[0].bucket.flat.data_ptr()
