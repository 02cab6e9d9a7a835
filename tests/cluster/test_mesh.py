"""The mesh: axes, coordinates and groups, and how ranks are dealt to it."""

from __future__ import annotations

from math import prod
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

from paceline.cluster.mesh import AXIS_NAMES, Mesh, choose_mesh, lay_out_mesh, parse_mesh
from paceline.cluster.topology import HostRanks, Topology
from paceline.errors import UsageError


def cluster(*hosts: tuple[int, ...]) -> Topology:
    return Topology(
        tuple(HostRanks(f"host{index}", ranks, "127.0.0.1") for index, ranks in enumerate(hosts))
    )


@st.composite
def clusters(draw: st.DrawFn, size: int) -> Topology:
    """`size` ranks on some hosts, dealt at random."""
    hosts = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    found = {
        host: tuple(rank for rank in range(size) if hosts[rank] == host)
        for host in dict.fromkeys(hosts)
    }
    return cluster(*found.values())


@st.composite
def laid_out(draw: st.DrawFn) -> tuple[Mesh, Topology]:
    sizes = draw(st.dictionaries(st.sampled_from(AXIS_NAMES), st.integers(1, 3), min_size=1))
    topology = draw(clusters(prod(sizes.values())))
    return lay_out_mesh(dict(sizes), topology), topology


@given(laid_out())
def test_coordinates_are_all_different_and_groups_are_parts_of_the_whole(
    found: tuple[Mesh, Topology],
) -> None:
    mesh, topology = found
    assert sorted(mesh.grid) == list(range(topology.size)) and mesh.size == topology.size
    places = [tuple(mesh.coordinates(rank).values()) for rank in range(mesh.size)]
    assert len(set(places)) == mesh.size
    for name, size in mesh.axes:
        groups = mesh.rank_groups_along([name])
        assert sorted(rank for group in groups for rank in group) == list(range(mesh.size))
        assert all(len(group) == size == mesh.axis_size(name) for group in groups)
        for group in groups:
            assert [mesh.coordinates(rank)[name] for rank in group] == list(range(size))
            assert len({mesh.index_along(rank, set(mesh.names) - {name}) for rank in group}) == 1
    assert mesh.rank_groups_along(mesh.names) == (mesh.ranks_along(0, mesh.names),)
    assert sorted(
        mesh.ranks_along(0, mesh.names), key=lambda rank: mesh.index_along(rank, mesh.names)
    ) == list(mesh.grid)
    assert mesh.ranks_along(0, []) == (0,)


@given(
    st.integers(1, 3),
    st.integers(1, 3),
    st.lists(st.integers(1, 3), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_what_talks_most_is_inside_a_host_wherever_that_is_possible(
    tensor: int, shard: int, hosts: list[int], random: object
) -> None:
    """Hosts that hold whole blocks of tensor x shard keep them, however ranks are placed."""
    ranks = list(range(tensor * shard * sum(hosts)))
    random.shuffle(ranks)  # type: ignore[attr-defined]
    ends = [tensor * shard * sum(hosts[: count + 1]) for count in range(len(hosts))]
    topology = cluster(
        *(
            tuple(sorted(ranks[end - tensor * shard * held : end]))
            for end, held in zip(ends, hosts, strict=True)
        )
    )
    mesh = lay_out_mesh({"data": None, "shard": shard, "tensor": tensor}, topology)
    assert not mesh.crosses_hosts("tensor", topology) and not mesh.crosses_hosts("shard", topology)
    assert mesh.axis_size("data") == sum(hosts) and mesh.crosses_hosts("data", topology) == (
        len(hosts) > 1
    )


def test_hosts_of_odd_sizes_share_what_is_left_over() -> None:
    mesh = lay_out_mesh(parse_mesh("data, tensor=4"), cluster((0, 1, 2), (3, 4, 5, 6), (7,)))
    assert mesh.rank_groups_along(["tensor"]) == ((0, 1, 2, 7), (3, 4, 5, 6))
    assert str(mesh) == "data=2, tensor=4"


def test_without_other_axes_ranks_keep_their_order() -> None:
    assert lay_out_mesh(parse_mesh("data=4"), cluster((0, 2), (1, 3))).grid == (0, 1, 2, 3)


def test_the_order_in_which_axes_are_written_does_not_matter() -> None:
    topology = cluster((0, 1), (2, 3))
    assert lay_out_mesh(parse_mesh("tensor=2,data=2"), topology) == lay_out_mesh(
        parse_mesh(" data = 2 , tensor=2"), topology
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "data=3, tensor=2",
            "doesn't fit 8 workers; these fit: data=1, tensor=8 | data=2, tensor=4 |",
        ),
        ("data, tensor=3", "doesn't fit 8 workers"),
        ("data, tensor", "leaves the sizes of data and tensor open"),
        ("tensor=2", "doesn't fit 8 workers; these fit: tensor=8"),
        ("data=0, tensor=8", "data=0 is not a number of workers"),
        ("model=2", "there is no axis 'model'; there are data, stage, shard, tensor"),
        ("data=2, data=4", "has the axis data twice"),
        ("data=two", "can't be read at 'data=two'"),
        ("", "doesn't fit 8 workers; these fit: data=8"),
        ({"shard": 2}, "is a dict, and has to be text: mesh='shard=2'"),
        (["shard=2"], "is a list, and has to be text"),
    ],
)
def test_what_does_not_fit_says_what_would(text: Any, words: str) -> None:
    with pytest.raises(UsageError, match="mesh=") as caught:
        lay_out_mesh(parse_mesh(text), cluster(tuple(range(8))))
    assert words in str(caught.value)


@given(laid_out())
def test_the_first_worker_has_the_first_place(found: tuple[Mesh, Topology]) -> None:
    """It writes for all, and is the first of whatever group it is in."""
    mesh, _ = found
    assert mesh.grid[0] == 0


def test_the_axes_that_cut_a_model() -> None:
    assert lay_out_mesh(
        parse_mesh("data=4, tensor=2, shard=1"), cluster(tuple(range(8)))
    ).cut_axes == ("tensor",)


@pytest.mark.parametrize(
    ("text", "survives", "words"),
    [
        (
            "data=2, stage=2",
            True,
            (
                "mesh='data=2, stage=2' with --min-workers: "
                "a worker of a cut model has parts that no other"
            ),
        ),
        (
            "data=2, tensor=2",
            True,
            (
                "mesh='data=2, tensor=2' with --min-workers: a worker of a cut model has parts "
                "that no other"
            ),
        ),
    ],
)
def test_what_cannot_be_had_is_said(text: str, survives: bool, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        choose_mesh(text, cluster((0, 1, 2, 3)), survives=survives)
    assert words in str(caught.value)
    assert (
        choose_mesh("data=4, stage=1", cluster((0, 1, 2, 3)), survives=True).axis_size("data") == 4
    )
