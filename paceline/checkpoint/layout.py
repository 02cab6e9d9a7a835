"""Decides which worker holds, and which one writes, each part of a run's state.

Both follow from the mesh and from the places of parameters after the cuts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass

from torch.nn import Parameter

from paceline.cluster.mesh import Mesh
from paceline.parallel.placement import Placement, Placements


@dataclass(frozen=True)
class StateLayout:
    """The workers of a run as a grid, and the parameters that are cut between them.

    Attributes:
        mesh: The grid of workers.
        rank: This worker.
        placements: Placement of each parameter.
        find_trained: Finds the tensor that is trained in place of a parameter that each worker has
            in full. None for other parameters.
        stage_bounds: Bounds of each pipeline: the first layer of each stage, and the end.
        equalize_copies: Gives all workers equal tied weights and buffers. Collective.
    """

    mesh: Mesh
    rank: int
    placements: Placements
    find_trained: Callable[[Parameter], Parameter | None] = lambda parameter: None
    stage_bounds: Callable[[], list[list[int]]] = list
    equalize_copies: Callable[[], None] = lambda: None

    @property
    def is_cut(self) -> bool:
        """Whether any parameter is cut between workers."""
        return any(placement.axes for placement in self.placements)

    def writes_part(self, placement: Placement) -> bool:
        """Whether this worker is the first one of all that hold the same part of a parameter."""
        return not placement.copy and self._holds_first_copy(self.rank, placement.axes)

    def writer_ranks(self) -> list[int]:
        """Ranks of the workers that write parts of parameters. Rank 0 is always among them."""
        kinds = {placement.axes for placement in self.placements if placement.axes}
        return sorted(
            rank
            for rank in self.mesh.grid
            if any(self._holds_first_copy(rank, axes) for axes in kinds)
        )

    def replica_ranks(self, rank: int) -> tuple[int, ...]:
        """Ranks of the workers with the same parts as `rank`, in the order that strategies use."""
        return self.mesh.ranks_along(rank, ["data"])

    def compute_fingerprint(self) -> str:
        """Hash of the cuts: equal on all workers, and in all runs with the same cuts."""
        cuts = sorted(
            [placement.name, list(placement.axes), placement.is_flat]
            for placement in self.placements
            if placement.axes
        )
        return hashlib.sha256(
            json.dumps([str(self.mesh), self.mesh.grid, cuts, self.stage_bounds()]).encode()
        ).hexdigest()

    def _holds_first_copy(self, rank: int, axes: tuple[str, ...]) -> bool:
        # A part depends on the coordinates along the axes of the cut alone. Workers that differ
        # along any other axis hold copies, and the first copy has 0 there.
        return all(
            coordinate == 0
            for axis, coordinate in self.mesh.coordinates(rank).items()
            if axis not in axes
        )
