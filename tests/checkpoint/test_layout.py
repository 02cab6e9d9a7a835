"""Each part of the state is written by one worker, whatever it is cut along."""

from __future__ import annotations

import dataclasses

import torch

from paceline.checkpoint.layout import StateLayout
from paceline.cluster.mesh import Mesh
from paceline.parallel.placement import Placement, Placements

MESH = Mesh((("data", 2), ("shard", 2), ("tensor", 2)), tuple(range(8)))
WHOLE = Placement.whole("w", (8, 4))
ROWS = WHOLE.cut_dim(0, [(0, 4)], "tensor")
FLAT = ROWS.cut_flat(0, 8, "shard")


def layouts(*placements: Placement, mesh: Mesh = MESH) -> list[StateLayout]:
    kept = Placements()
    for placement in placements:
        kept.add_placement(torch.empty(0), placement)
    return [StateLayout(mesh, rank, kept) for rank in range(mesh.size)]


def writing(placement: Placement) -> list[int]:
    return [layout.rank for layout in layouts(placement) if layout.writes_part(placement)]


def test_the_first_of_those_that_hold_the_same_writes() -> None:
    assert writing(WHOLE) == [0]
    assert writing(ROWS) == [0, 1]
    assert writing(WHOLE.cut_flat(0, 16, "shard")) == [0, 2]
    assert writing(FLAT) == [0, 1, 2, 3]


def test_all_know_who_writes() -> None:
    assert all(layout.writer_ranks() == [0, 1] for layout in layouts(ROWS, WHOLE))
    assert all(layout.writer_ranks() == [0, 1, 2, 3] for layout in layouts(ROWS, FLAT))
    assert all(layout.writer_ranks() == [] and not layout.is_cut for layout in layouts(WHOLE))


def test_replicas_are_those_along_data() -> None:
    assert [layout.replica_ranks(layout.rank) for layout in layouts(FLAT)[:3]] == [
        (0, 4),
        (1, 5),
        (2, 6),
    ]


def test_a_fingerprint_is_that_of_mesh_and_cuts() -> None:
    found = {layout.compute_fingerprint() for layout in layouts(FLAT)}
    assert len(found) == 1
    split = dataclasses.replace(layouts(FLAT)[0], stage_bounds=lambda: [[0, 3, 8]])
    # what strategies and optimizers keep of parameters is on other workers
    assert split.compute_fingerprint() not in found
    others = [
        layouts(ROWS),
        layouts(
            FLAT, mesh=Mesh((("data", 2), ("shard", 2), ("tensor", 2)), (0, 1, 4, 5, 2, 3, 6, 7))
        ),
        layouts(WHOLE),
    ]
    assert len(found | {other[0].compute_fingerprint() for other in others}) == 4
