"""Bits are flipped on one worker of several: it is named, with what differs, and the run stops,
or goes on as if it had never been.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import paceline as pl
from paceline.comm.group_protocol import Group
from paceline.errors import ReplicasDiffer, UsageError
from paceline.replicas import compare
from paceline.replicas.compare import Comparison, find_differences
from paceline.session.run import Run
from paceline.sync.base import Strategy
from tests.harness.runs import batches, make, parameters, workers
from tests.harness.thread_groups import spawn

HEAL = Comparison(5, "heal")
STOP = Comparison(5)


class Net(nn.Module):
    """Something of everything: trained and frozen parameters, statistics, tables that nobody
    changes, and what it has seen itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.into, self.norm, self.out = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 2)
        self.scale = nn.Parameter(torch.full((5,), 0.5), requires_grad=False)
        self.register_buffer("mask", torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0]]).t())
        self.register_buffer("order", torch.arange(5), persistent=False)
        self.register_buffer("seen", torch.zeros(5))
        self.register_buffer("newest", torch.zeros(5))
        self.register_buffer("quiet", torch.zeros(5))
        generator = torch.Generator().manual_seed(0)  # threads share torch's own
        for parameter in (*self.into.parameters(), *self.out.parameters()):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.into(x)) * self.scale * self.mask[:, 0]
        if self.training:
            self.seen.lerp_(x.detach().mean(0), 0.1)
            self.newest = x.detach()[-1]
            self.quiet.data.copy_(x.detach().mean(0))  # torch doesn't count it
        return self.out(torch.tanh(x)[:, self.order])


def flip(tensor: Tensor, bit: int) -> None:
    """In the last element, past torch's counting, as memory does it."""
    data = tensor.data.view(torch.uint8).view(-1, tensor.element_size())
    data[-1, bit // 8] ^= 1 << bit % 8


Injury = Callable[[nn.Module, torch.optim.Optimizer], None]
STATE = {
    "exp_avg of into.weight": lambda model, opt: opt.state[model.into.weight]["exp_avg"],
    "exp_avg_sq of out.bias": lambda model, opt: opt.state[model.out.bias]["exp_avg_sq"],
    "step of into.bias": lambda model, opt: opt.state[model.into.bias]["step"].reshape(1),
    "into.weight": lambda model, opt: model.into.weight,
    "scale": lambda model, opt: model.scale,
    "norm.running_var": lambda model, opt: model.norm.running_var,
    "mask": lambda model, opt: model.mask.t(),
    "order": lambda model, opt: model.order,
}


class Trained(NamedTuple):
    """What a worker has come to."""

    losses: list[float]
    weights: list[float]
    events: list[str]
    error: str


def train(
    run: Run,
    injuries: dict[tuple[int, int], Injury],
    steps: int = 12,
    batch: int = 8,
    **options: Any,
) -> Trained:
    """`injuries`: what happens to a worker after a step of the optimizer, by rank and step (from
    1 on).
    """
    made, losses, error = Net(), [], ""
    loader = batches(steps * batch, batch, dtype=torch.float32)
    model, opt, loader = run.prepare(
        made, torch.optim.AdamW(made.parameters(), 0.01), loader, **options
    )
    try:
        for _ in run.epochs(1):
            for x, y in loader:
                opt.zero_grad()
                loss = F.mse_loss(model(x), y)
                loss.backward()
                opt.step()
                if (injury := injuries.get((run.rank, run.steps + 1))) is not None:
                    injury(model, opt)
                losses.append(run.mean(loss.item()))
    except ReplicasDiffer as caught:
        error = str(caught)
    state = [
        *parameters(model).tolist(),
        *model.norm.running_mean.tolist(),
        *model.mask.flatten().tolist(),
    ]
    return Trained(losses, state, [event["what"] for event in run.events], error)


def flipping(name: str, bit: int) -> Injury:
    return lambda model, opt: flip(STATE[name](model, opt), bit)


def several(
    size: int, comparison: Comparison, injuries: dict[tuple[int, int], Injury], **more: Any
) -> list[Trained]:
    """What so many workers come to."""
    options = {name: more.pop(name) for name in ("steps", "batch", "batchnorm") if name in more}
    return workers(size, lambda run: train(run, injuries, **options), comparison=comparison, **more)


@pytest.fixture(scope="module")
def undisturbed() -> list[Trained]:
    return several(3, Comparison(None), {})


def test_a_flipped_bit_is_healed_as_if_it_had_never_been() -> None:
    """After each step another one, the lowest and the highest of everything."""
    bits = [(name, bit) for name in STATE for bit in (0, 31) if (name, bit) != ("order", 31)]
    said: list[str] = []
    injuries = {(step % 3, step): flipping(name, bit) for step, (name, bit) in enumerate(bits, 1)}
    found = several(3, Comparison(1, "heal"), injuries, said=said, steps=len(bits) + 1)
    lines = [
        (
            f"replicas differ after step {step}: rank {step % 3} on here in {name}; "
            "healed by what most workers have"
        )
        for step, (name, _) in enumerate(bits, 1)
    ]
    assert [one.events for one in found] == [lines] * 3 and [
        line for line in said if "healed" in line
    ] == lines
    wanted = several(3, Comparison(None), {}, steps=len(bits) + 1)
    assert [one.losses for one in found] == [one.losses for one in wanted]
    assert [one.weights for one in found] == [one.weights for one in wanted]


def test_what_was_healed_may_break_again(undisturbed: list[Trained]) -> None:
    found = several(
        3,
        HEAL,
        {(1, 5): flipping("mask", 3), (1, 10): flipping("mask", 3), (2, 10): flipping("order", 3)},
    )
    assert [event.split("; healed")[0] for event in found[0].events] == [
        "replicas differ after step 5: rank 1 on here in mask",
        "replicas differ after step 10: rank 1 on here in mask; rank 2 on here in order",
    ]
    assert [one.weights for one in found] == [one.weights for one in undisturbed]


@pytest.mark.parametrize("name", ["into.weight", "mask"])
def test_a_difference_stops_all_at_the_same_step_and_is_in_the_summary(
    name: str, tmp_path: Path
) -> None:
    found = several(3, STOP, {(1, 7): flipping(name, 3)}, folder=tmp_path)
    assert [len(one.losses) for one in found] == [10] * 3 and len({one.error for one in found}) == 1
    line = f"replicas differ after step 10: rank 1 on here in {name}"
    assert (
        found[0].error.startswith(f"{line}. ")
        and "differing='heal'" in found[0].error
        and "ECC" in found[0].error
    )
    events = json.loads((tmp_path / "test" / "summary.json").read_text())["events"]
    assert line in [event["what"] for event in events]


def test_only_the_first_of_many_are_listed() -> None:
    def all_of_it(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            flip(parameter, 0)

    found = several(3, STOP, {(2, 2): all_of_it})
    assert "rank 2 on here in scale, into.weight, into.bias, and 4 more. " in found[0].error


def test_of_two_workers_the_first_is_right(undisturbed: list[Trained]) -> None:
    alone = several(2, Comparison(None), {})
    found = several(2, HEAL, {(1, 5): flipping("into.weight", 31)})
    assert (
        found[1].losses == alone[0].losses
        and "no majority" in found[0].events[0]
        and "what the first of them has" in found[0].events[0]
    )
    stopped = several(2, STOP, {(1, 5): flipping("into.weight", 31)})
    assert (
        "rank 1 on here in into.weight (from rank 0 on here: "
        "no majority tells which of them is right)" in stopped[0].error
    )
    other = several(2, HEAL, {(0, 5): flipping("into.weight", 31)})
    assert other[0].weights == other[1].weights != alone[0].weights
    # what it was when training began is known
    table = several(2, HEAL, {(0, 5): flipping("mask", 31)})
    assert table[0].weights == table[1].weights == alone[0].weights


def test_half_of_four_is_no_majority() -> None:
    injury = flipping("into.weight", 31)
    found = several(4, HEAL, {(1, 5): injury, (3, 5): injury})
    assert (
        "rank 1 on here in into.weight; rank 3 on here in "
        "into.weight (from rank 0 on here: no majority" in found[0].events[0]
    )
    assert found[0].weights == found[1].weights == several(4, Comparison(None), {})[0].weights


def test_each_tensor_has_its_own_majority(undisturbed: list[Trained]) -> None:
    """All three replicas differ as a whole, and what each has alone is known all the same; the
    second comparison finds nothing.
    """
    injuries = {
        (0, 5): flipping("into.weight", 31),
        (1, 5): flipping("exp_avg of into.weight", 30),
        (2, 5): flipping("mask", 29),
    }
    found = several(3, HEAL, injuries)
    assert [one.weights for one in found] == [one.weights for one in undisturbed] and len(
        found[0].events
    ) == 1


def test_plain_numbers_are_compared_too(undisturbed: list[Trained]) -> None:
    def faster(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        opt.param_groups[0]["lr"] *= 2
        opt.state[model.out.bias]["count"] = {"a": [1, (2.5, None)]}

    def same(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        opt.state[model.out.bias]["count"] = {"a": [0, (2.5, None)]}

    found = several(3, HEAL, {(0, 5): same, (1, 5): faster, (2, 5): same})
    assert (
        "rank 1 on here in lr of group 0 of AdamW, count of out.bias.a.0; healed"
        in found[0].events[0]
    )
    assert [one.weights for one in found] == [one.weights for one in undisturbed]


def test_what_has_another_form_can_t_be_healed() -> None:
    def odd(model: nn.Module, opt: torch.optim.Optimizer) -> None:
        del opt.state[model.out.bias]["exp_avg"]

    assert "rank 1 on here in exp_avg of out.bias" in several(3, HEAL, {(1, 5): odd})[0].error


def test_nothing_is_compared_where_it_was_not_asked_for(undisturbed: list[Trained]) -> None:
    found = several(3, Comparison(None), {(1, 5): flipping("scale", 0)})
    assert [one.error for one in found] == [""] * 3 and [one.events for one in found] == [[]] * 3


def test_the_usual_begins_with_the_first_step() -> None:
    found = several(3, Comparison(), {(1, 1): flipping("scale", 0)})
    assert len(found[0].losses) == 1 and all("after step 1: rank 1" in one.error for one in found)
    found = several(3, Comparison(5), {(1, 1): flipping("scale", 0)})
    assert "after step 5: rank 1" in found[0].error


def test_hooks_that_update_parameters_themselves_are_found_after_the_first_step() -> None:
    """Registered before `prepare` they see the gradient of the share."""

    def body(run: Run) -> None:
        model = torch.nn.Linear(6, 2).double()
        with torch.no_grad():
            model.weight.zero_()
            model.bias.zero_()

        def update(p: Tensor) -> None:
            p.data.add_(p.grad, alpha=-0.1)
            p.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(update)
        model, loader = run.prepare(model, batches())
        for x, y in loader:
            F.mse_loss(model(x), y).backward()

    with pytest.raises(ReplicasDiffer, match=r"after step 1: rank 1 on here in weight, bias"):
        workers(2, body)


def test_the_usual_is_every_hundred_steps(tmp_path: Path) -> None:
    found = several(2, Comparison(), {(1, 3): flipping("scale", 0)}, steps=102, batch=2)
    assert len(found[0].losses) == 100 and "after step 100: rank 1" in found[1].error


# ---- what may differ


def test_what_a_script_changes_by_itself_is_each_worker_s_own(undisturbed: list[Trained]) -> None:
    """Its buffers, those of local BatchNorm, and those of a worker whose share is empty; tables
    are compared nevertheless.
    """
    for more in ({}, {"batchnorm": "local"}, {"batch": 2}):
        found = several(3, Comparison(1), {}, **more)
        assert [one.error for one in found] == [""] * 3 and [one.events for one in found] == [
            []
        ] * 3
    injuries: dict[tuple[int, int], Injury] = {
        (1, 3): lambda model, opt: model.mask.mul_(2),
        (2, 3): lambda model, opt: setattr(model, "order", model.order.flip(0)),
    }
    assert several(3, Comparison(1), injuries)[0].error == ""
    # rank 2 has ghosts only
    assert (
        "rank 0 on here in mask."
        in several(3, STOP, {(0, 7): flipping("mask", 3)}, batch=2)[0].error
    )


def test_workers_that_compute_differently_are_not_stopped_unless_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kinds = itertools.cycle(["AVX2, threads: 4", "AVX512, threads: 8"])
    monkeypatch.setattr(compare, "DEFAULT_INTERVAL", 5)
    monkeypatch.setattr(compare, "_describe_hardware", lambda tensor: next(kinds))
    injuries = {(1, 3): flipping("into.weight", 0), (1, 8): flipping("scale", 0)}
    found = several(2, Comparison(), injuries)
    assert (
        len(found[0].events) == 1
        and "compute differently" in found[0].events[0]
        and "not compared any more" in found[0].events[0]
    )
    asked = several(2, STOP, injuries)
    assert (
        "after step 5" in asked[0].error
        and "AVX512, threads: 8" in asked[0].error
        and "number of threads" in asked[0].error
    )


def test_local_sgd_is_compared_after_its_rounds() -> None:
    sync = pl.LocalSGD(4, outer=pl.nesterov(0.7, 0.9))
    assert [one.error for one in several(3, Comparison(1), {}, strategy=sync)] == [""] * 3
    found = several(3, STOP, {(1, 1): flipping("scale", 0)}, strategy=sync)
    # 5 comes in the middle of the second round
    assert "after step 8: rank 1 on here in scale. " in found[0].error
    healed = several(
        3, Comparison(4, "heal"), {(1, 4): flipping("scale", 31)}, strategy=sync, steps=20
    )
    assert (
        len(healed[0].events) == 1 and healed[0].weights == healed[1].weights == healed[2].weights
    )
    warm = several(3, STOP, {(1, 1): flipping("scale", 0)}, strategy=pl.LocalSGD(4, after=6))
    assert "after step 5: rank 1" in warm[0].error
    late = several(
        3, STOP, {(1, 7): flipping("scale", 0)}, strategy=pl.LocalSGD(4, delay=1), steps=20
    )
    assert "after step 13: rank 1" in late[0].error, late[0]


def test_what_a_strategy_remembers_is_compared_and_healed() -> None:
    def from_start(run: Run) -> Trained:
        def forget(model: nn.Module, opt: torch.optim.Optimizer) -> None:
            for unit in run._backward.sync._rounds.units:  # type: ignore[attr-defined]
                flip(unit.memory, 30)

        return train(run, {(1, 5): forget}, steps=16)

    found = workers(
        3,
        from_start,
        strategy=pl.LocalSGD(4, outer=pl.nesterov(0.7, 0.9)),
        comparison=Comparison(4, "heal"),
    )
    assert (
        "after step 8: rank 1 on here in " in found[0].events[0]
        and "momentum of rounds, 0" in found[0].events[0]
    )
    assert len(found[0].events) == 1 and found[0].weights == found[1].weights


def test_sequence_is_compared_where_hosts_are_equal() -> None:
    sync = pl.Sequence((pl.AllReduce(), "local"), (pl.LocalSGD(4), "host"))
    found = several(4, STOP, {(3, 1): flipping("scale", 0)}, strategy=sync, hosts=(0, 0, 1, 1))
    assert "after step 8: rank 3 on host1 in scale. " in found[0].error


def test_a_teacher_that_follows_each_replica_is_its_workers_own() -> None:
    said: list[str] = []

    def body(run: Run) -> Tensor:
        model, teacher = Net(), nn.Linear(5, 2)
        teacher.load_state_dict(model.out.state_dict())
        model, teacher, optimizer, loader = run.prepare(
            model,
            teacher.requires_grad_(False),
            torch.optim.SGD(model.parameters(), 0.1),
            batches(dtype=torch.float32),
        )
        for _ in range(3):
            for x, y in loader:
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    teacher.weight.lerp_(model.out.weight, 0.1)
        return teacher.weight.clone()

    one, other = workers(2, body, strategy=pl.LocalSGD(4), comparison=STOP, said=said)
    assert not torch.equal(one, other)
    assert (
        sum("the frozen parameter model1.weight differs between workers" in text for text in said)
        == 1
    )


NEVER: list[Strategy] = [
    pl.Gossip(),
    pl.LocalSGD(4, delay=1, alpha=0.5),
    pl.LocalSGD(4, fragments=2),
]


@pytest.mark.alike(2)
@pytest.mark.parametrize("sync", NEVER, ids=repr)
def test_strategies_whose_replicas_differ_always(sync: Strategy) -> None:
    def body(run: Run) -> Trained:
        levels: list[Any] = []
        replicated = run._own.abilities.replicated

        def watch(model: nn.Module, opt: torch.optim.Optimizer) -> None:
            levels.append(None if replicated is None else replicated.replicated_state())

        found = train(
            run,
            {(1, 1): flipping("scale", 0)} | {(0, step): watch for step in range(1, 102)},
            steps=102,
            batch=2,
        )
        assert set(map(type, levels)) <= {type(None)}
        return found

    found = workers(2, body, strategy=sync)
    assert found[0].error == "" and len(found[0].losses) == 102
    for asked in (Comparison(10), Comparison(differing="heal")):
        with pytest.raises(UsageError, match="differ all the time"):
            several(2, asked, {}, strategy=sync)


def test_who_comes_later_knows_what_is_owed() -> None:
    def body(run: Run) -> Trained:
        run._comparer.adopt_facts([5, -1, 0])  # the others are about to compare
        found = train(run, {(1, 1): flipping("scale", 0)})
        assert run._comparer.collect_facts() == [5, 0, 0]
        return found

    assert "after step 1: rank 1" in workers(2, body, comparison=STOP)[0].error


# ---- options


@pytest.mark.parametrize(
    "options",
    [
        {"compare": 0},
        {"compare": 2.5},
        {"compare": True},
        {"differing": "hope"},
        {"compare": None, "differing": "heal"},
    ],
)
def test_options_that_can_t_be_honoured(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"compare=|differing="):
        pl.start(**options)


def test_all_workers_give_the_same(tmp_path: Path) -> None:
    def body(group: Group) -> None:
        make(group, pl.AllReduce(), str(tmp_path), print, comparison=Comparison(5 + 2 * group.rank))

    first = r"rank 0: seed=1, sync=AllReduce\(\), compare=5, differing='stop', replicate='auto'"
    with pytest.raises(UsageError, match=first + "; rank 1: .* compare=7"):
        spawn(2, body)


# ---- the verdict, as data


def entries(*values: Any) -> list[dict[str, list[Any]]]:
    return [{"w": ["float32[2]", value]} for value in values]


def test_who_has_what_most_have_is_right() -> None:
    assert find_differences(entries(1, 1, 1)) == []
    assert find_differences(entries(1, 2, 1)) == [("w", (0, 2), (1,), True, True)]
    assert find_differences(entries(2, 1, 1)) == [("w", (1, 2), (0,), True, True)]
    assert find_differences(entries(1, 2, 3)) == [("w", (0,), (1, 2), False, True)]
    assert find_differences([*entries(1, 1), {}]) == [("w", (0, 1), (2,), True, False)]


def buffers(*states: int) -> list[dict[str, list[Any]]]:
    return [{"mask": ["buffer", state]} for state in states]


def test_a_buffer_is_wrong_where_it_has_changed_by_itself_on_few() -> None:
    assert find_differences(buffers(0, 1, 0)) == [("mask", (0, 2), (1,), True, True)]
    assert find_differences(buffers(1, 0)) == [("mask", (1,), (0,), True, True)]
    assert (
        find_differences(buffers(0, 0, 0))
        == find_differences(buffers(1, 1, 0))
        == find_differences(buffers(0, 1, 2))
        == find_differences(buffers(2, 2))
        == []
    )
