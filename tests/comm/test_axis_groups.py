"""Groups along axes: each sums over the workers that it should have, whatever lies beneath."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from paceline.cluster.mesh import Mesh
from paceline.comm.axis_groups import AxisGroups
from paceline.comm.group_protocol import Group
from paceline.comm.hierarchy.hosts_group import HostsGroup
from paceline.comm.solo import SoloGroup
from paceline.errors import UsageError
from tests.harness.hierarchies import made
from tests.harness.thread_groups import ThreadGroup, spawn

SQUARE = Mesh((("data", 2), ("tensor", 2)), (0, 2, 1, 3))
CUBE = Mesh((("data", 2), ("shard", 2), ("tensor", 2)), (0, 4, 2, 6, 1, 5, 3, 7))


def subsets(mesh: Mesh) -> list[tuple[str, ...]]:
    return [
        axes
        for count in range(len(mesh.names) + 1)
        for axes in itertools.combinations(mesh.names, count)
    ]


def sums(
    group: Group, mesh: Mesh, opened: list[Any]
) -> dict[tuple[str, ...], tuple[int, float, tuple[int, ...]]]:
    """Of each set of axes: my rank in its group, what the group sums, and the ranks that it has."""
    groups, found = AxisGroups(mesh, group, opened.append), {}
    for axes in subsets(mesh):
        along = groups.group_along(*axes)
        assert groups.group_along(*reversed(axes)) is along
        total = along.all_reduce(torch.full((7,), 2.0**group.rank)).wait()
        assert bool((total == total[0]).all())
        found[axes] = (
            along.rank,
            float(total[0]),
            tuple(along.global_rank(rank) for rank in range(along.size)),
        )
    return found


def expected(mesh: Mesh, rank: int) -> dict[tuple[str, ...], tuple[int, float, tuple[int, ...]]]:
    of = {axes: mesh.ranks_along(rank, axes) for axes in subsets(mesh)}
    everyone = tuple(range(mesh.size))  # in whose group ranks stay as they are
    of = {axes: everyone if len(ranks) == mesh.size else ranks for axes, ranks in of.items()}
    return {
        axes: (ranks.index(rank), float(sum(2.0**other for other in ranks)), ranks)
        for axes, ranks in of.items()
    }


@pytest.mark.parametrize("mesh", [SQUARE, CUBE], ids=str)
def test_each_group_sums_over_the_workers_that_differ_in_its_axes(mesh: Mesh) -> None:
    opened: list[list[Any]] = [[] for _ in range(mesh.size)]
    found = spawn(mesh.size, lambda group: sums(group, mesh, opened[group.rank]))
    assert found == [expected(mesh, rank) for rank in range(mesh.size)]
    # nobody is asked for a group of one worker, or for that of all again
    proper = len(subsets(mesh)) - 2
    assert [len(groups) for groups in opened] == [proper] * mesh.size


@pytest.mark.parametrize(
    "hosts", [(0, 1, 0, 1, 0, 1, 0, 1), (0, 0, 0, 0, 1, 1, 1, 1), (0, 0, 0, 1, 1, 1, 2, 2)], ids=str
)
def test_over_hosts_they_sum_the_same(hosts: tuple[int, ...]) -> None:
    def body(group: ThreadGroup) -> Any:
        opened: list[Any] = []
        return sums(made(group, hosts), CUBE, opened), [type(each) for each in opened]

    found = spawn(CUBE.size, body)
    assert [sum_ for sum_, _ in found] == [expected(CUBE, rank) for rank in range(CUBE.size)]


def test_a_group_inside_a_host_uses_its_memory_alone_and_one_between_hosts_sends_one_copy_per_host() -> (  # noqa: E501
    None
):
    mesh, hosts = (
        Mesh((("data", 4), ("tensor", 2)), (0, 2, 4, 6, 1, 3, 5, 7)),
        (0, 1, 0, 1, 0, 1, 0, 1),
    )

    def body(group: ThreadGroup) -> Any:
        groups = AxisGroups(mesh, made(group, hosts))
        data, tensor = groups.group_along("data"), groups.group_along("tensor")
        whole = groups.group_along("data", "tensor")
        return type(data), type(tensor), whole is groups.everyone, getattr(data, "hosts", None)

    # ranks 0 2 and 4 6 are neighbours along `tensor` on host 0, so each group along `data` has two
    # workers on each host
    assert spawn(8, body) == [(HostsGroup, ThreadGroup, True, (0, 0, 1, 1))] * 8


def test_an_axis_that_the_mesh_lacks_has_this_worker_alone() -> None:
    def body(group: ThreadGroup) -> Any:
        along = AxisGroups(Mesh((("data", 2), ("shard", 1)), (0, 1)), group).group_along(
            "tensor", "shard"
        )
        return (
            isinstance(along, SoloGroup),
            along.global_rank(0),
            AxisGroups(Mesh((("data", 2),), (0, 1)), group).group_along("data") is group,
        )

    assert spawn(2, body) == [(True, 0, True), (True, 1, True)]


def test_a_mesh_of_other_workers_is_refused() -> None:
    with pytest.raises(
        UsageError,
        match=(
            "the mesh data=2, tensor=2 has 4 workers, and this group has 1; "
            "give the group of all workers"
        ),
    ):
        AxisGroups(SQUARE, SoloGroup())


def test_another_group_of_the_same_workers_has_an_order_of_its_own() -> None:
    def body(group: Group) -> float:
        groups = AxisGroups(SQUARE, group)
        first, second = groups.make_another_group("data"), groups.make_another_group("data")
        assert (
            groups.make_another_group("stage").size == 1
            and first is not groups.group_along("data")
            and first is not second
        )
        mine = torch.tensor([float(group.rank)])
        turns = [first, second] if group.rank < 2 else [second, first]
        sums = [(turn, turn.all_reduce(mine)) for turn in turns]
        return sum(float(work.wait()) * (1 if turn is first else 100) for turn, work in sums)

    assert spawn(4, body) == [101.0 * sum(SQUARE.ranks_along(rank, ["data"])) for rank in range(4)]
