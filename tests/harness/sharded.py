"""Trains a model that is cut by shard() on threads, without a session: groups along the axes, a
tracker, and a strategy over `data`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.cluster.mesh import SAMPLE_AXES, lay_out_mesh
from paceline.cluster.store import Store
from paceline.cluster.topology import HostRanks, Topology
from paceline.comm.agreement import Agreement
from paceline.comm.axis_groups import AxisGroups
from paceline.comm.group_protocol import Group
from paceline.comm.native.torch_group import TorchGroup
from paceline.comm.shm.shared_group import SharedGroup
from paceline.errors import UsageError
from paceline.parallel.cut import CutContext, ModelCut
from paceline.parallel.placement import Placements
from paceline.parallel.shard import ShardedModel, shard
from paceline.sync.allreduce import AllReduce
from paceline.sync.autograd import GradientTracker
from paceline.sync.base import Slot, Strategy
from paceline.sync.context import StepState, SyncContext
from tests.harness.hierarchies import made
from tests.harness.processes import threads
from tests.harness.runs import distance
from tests.harness.sharded_models import odd_net, vectors
from tests.harness.thread_groups import ThreadGroup, spawn
from tests.harness.trackers import watch_without_loop

Step = Callable[["Trainee", int], None]
Build = Callable[[], nn.Module]


@dataclass
class Trainee:
    """One worker's side of a training."""

    model: nn.Module
    optimizer: Optimizer
    rank: int
    size: int
    step_state: StepState
    tracker: GradientTracker
    cut: CutContext
    seen: dict[str, Any] = field(default_factory=dict)

    def batch(self, *wholes: Tensor, cuts: Sequence[int] | None = None) -> tuple[Tensor, ...]:
        """My samples of a global batch, cut evenly or at `cuts`; sets what they count.

        An empty share is a ghost of one sample.
        """
        total = len(wholes[0])
        edges = [
            0,
            *(
                cuts
                if cuts and self.size > 1
                else [total * (r + 1) // self.size for r in range(self.size - 1)]
            ),
            total,
        ]
        start, stop = edges[self.rank], edges[self.rank + 1]
        self.step_state.scale, self.step_state.ghost = (stop - start) / total, start == stop
        return tuple(x[start:stop] if start < stop else x[:1] for x in wholes)


def one_host(size: int) -> Topology:
    return Topology((HostRanks("here", tuple(range(size)), "127.0.0.1"),))


def trainee(
    group: Group,
    build: Callable[[], nn.Module],
    optimizer: Callable[[Any], Optimizer],
    cut: shard | None,
    *,
    strategy: Strategy,
    data: int,
    first: ModelCut | None,
) -> Trainee:
    """Prepare one worker of a mesh of `data` x shard, by hand; of `data` x shard x 2 if another
    cut comes `first`.
    """
    sizes = {"data": data, "shard": None, "tensor": 1 if first is None else 2}
    axes = AxisGroups(
        lay_out_mesh(
            sizes if cut is not None and group.size > 1 else {"data": None}, one_host(group.size)
        ),
        group,
    )
    size, rank = axes.group_along(*SAMPLE_AXES).size, axes.mesh.index_along(group.rank, SAMPLE_AXES)
    state = StepState(scale=1 / size)
    outer = axes.group_along("data")
    context = SyncContext(
        outer, Agreement(outer, step=lambda: state.step), state, announce=lambda text: None
    )
    sync = strategy.begin(context)
    tracker = watch_without_loop(sync, context)
    model = build()
    opt = optimizer(model.parameters())
    around = CutContext(axes.mesh, axes, Placements())
    for each in (first, cut):
        if each is not None and axes.mesh.axis_size(each.axis) > 1:
            each.apply(model, around)
    slots = [
        Slot(name, around.replacements.get(p, p), opt)
        for name, p in model.named_parameters()
        if p.requires_grad
    ]
    for one in opt.param_groups:
        one["params"] = [around.replacements.get(p, p) for p in one["params"]]
    for source in around.gradient_sources:
        tracker.follow_source(source)
    if group.size > 1:
        tracker.watch_slots(slots)
    return Trainee(model, opt, rank, size, state, tracker, around)


def values(one: Trainee) -> Tensor:
    """All parameters, whole, in the order of the model."""
    return put_together(
        one.model,
        one.cut.groups.everyone,
        one.cut.placements,
        lambda p: one.cut.replacements.get(p, p),
    )


def put_together(
    model: nn.Module, group: Group, placements: Placements, trained: Callable[[Any], Any]
) -> Tensor:
    """All parameters in the order of the model, each put together from where the parts of all
    workers of `group` are.
    """
    found = []
    for name, parameter in model.named_parameters():
        part = trained(parameter)
        placement = placements.placement_of(part, name)
        logical = torch.full(placement.shape, torch.nan, dtype=torch.float64)
        regions = (
            [
                [r.logical, r.view_local(part.detach()).reshape(-1).tolist()]
                for r in placement.regions
            ]
            if placement.axes
            else []
        )
        if not placement.axes:
            logical.copy_(part.detach())
        for rectangle, numbers in (
            [region for regions in group.gather_objects(regions) for region in regions]
            if placement.axes
            else []
        ):
            place = logical[tuple(slice(*ends) for ends in rectangle)]
            place.copy_(torch.tensor(numbers, dtype=torch.float64).view(place.shape))
        if placement.axes == ("shard",) and part is not parameter:
            assert torch.equal(logical, parameter.detach().double()), (
                f"{name} is not what its pieces are"
            )
        found.append(logical.reshape(-1))
    return torch.cat(found)


def train(
    size: int,
    build: Callable[[], nn.Module],
    step: Step,
    cut: shard | None,
    *,
    steps: int = 4,
    data: int = 1,
    optimizer: Callable[[Any], Optimizer] = lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    strategy: Callable[[], Strategy] = AllReduce,
    ended: Callable[[Trainee], Any] = lambda one: None,
    shared: bool = False,
    native: bool = False,
    hosts: tuple[int, ...] = (),
    first: ModelCut | None = None,
) -> list[tuple[Tensor, Any]]:
    """Each worker's parameters after some steps, and what `ended` says; in `shared` memory, on
    `native` Gloo, over `hosts`, on threads.
    """

    def body(group: Group) -> tuple[Tensor, Any]:
        one = trainee(group, build, optimizer, cut, strategy=strategy(), data=data, first=first)
        for number in range(steps):
            step(one, number)
            one.step_state.step += 1
        found = ended(one)
        result = values(one)
        group.barrier().wait()
        return result, found

    def over_a_store(rank: int, size: int, store: Store) -> tuple[Tensor, Any]:
        kind = TorchGroup if native else SharedGroup
        group: Group = kind.from_store(store, rank, size, deadline=30)
        try:
            return body(group)
        finally:
            group.close()

    def over_hosts(group: ThreadGroup) -> tuple[Tensor, Any]:
        whole = made(group, hosts)
        try:
            return body(whole)
        finally:
            whole.close()

    return (
        threads(size, over_a_store)
        if shared or native
        else spawn(size, body if not hosts else over_hosts, hosts=hosts or None)
    )


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def fitting(
    batch: Callable[[int], tuple[Tensor, Tensor]],
    loss: Any = F.mse_loss,
    cuts: list[int] | None = None,
) -> Step:
    """A step on the global batch of its number."""

    def step(one: Trainee, number: int) -> None:
        x, y = one.batch(*batch(number), cuts=cuts)
        one.optimizer.zero_grad()
        loss(one.model(x), y).backward()
        one.optimizer.step()

    return step


def same(
    build: Build, step: Step, cut: shard, size: int = 2, *, bound: float = 1e-12, **options: Any
) -> list[Any]:
    """Workers of a cut model end with the parameters of one process; what `ended` says of each."""
    wanted = train(
        1,
        build,
        step,
        None,
        **{key: options[key] for key in ("steps", "optimizer") if key in options},
    )[0][0]
    assert (
        torch.isfinite(wanted).all()
        and distance(wanted, torch.cat([p.detach().reshape(-1) for p in build().parameters()]))
        > 1e-3
    )
    found = train(size, build, step, cut, **options)
    for values, _ in found:
        assert distance(values, wanted) < bound
    return [said for _, said in found]


class Kept:
    """A sink that leaves gradients where optimizers look for them."""

    replicas_diverge = False

    def pass_weight(self) -> float:
        return 0.5

    def take_cut_gradient(self, parameter: nn.Parameter, grad: Tensor) -> None:
        parameter.grad = grad


def alone_with(group: ThreadGroup, build: Build, cut: shard) -> tuple[nn.Module, ShardedModel]:
    model = build()
    every = range(group.size)
    gathering, reducing = group.make_subgroup(every), group.make_subgroup(every)
    assert gathering is not None and reducing is not None
    return model, ShardedModel(model, cut, gathering, reducing)


def refused(
    cut: shard, words: str, build: Build = odd_net, step: Step | None = None, **options: Any
) -> None:
    with pytest.raises(UsageError, match=words):
        train(2, build, step or fitting(vectors), cut, steps=1, **options)
