"""Decides which worker holds, and writes, each part of a run's state.

It follows from the mesh, and from the places of parameters after the cuts.
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

    `rank`: this worker.

    `renewed` says what is trained in the place of a parameter that is whole on each worker; None
    for all others.
    """

    mesh: Mesh
    rank: int
    placements: Placements
    renewed: Callable[[Parameter], Parameter | None] = lambda parameter: None
    # of pipelines: the first layer of each stage, and the end
    splits: Callable[[], list[list[int]]] = list
    # has all workers know what a state has of all; collective
    level: Callable[[], None] = lambda: None

    @property
    def is_cut(self) -> bool:
        """Whether workers hold different parts of some parameter."""
        return any(placement.axes for placement in self.placements)

    def writes(self, placement: Placement) -> bool:
        """Whether this worker is the first of the workers that hold the same part of a
        parameter.
        """
        return not placement.copy and self._is_first(self.rank, placement.axes)

    def writers(self) -> list[int]:
        """Return the workers that write parts of parameters, the first one of all among them."""
        kinds = {placement.axes for placement in self.placements if placement.axes}
        return sorted(
            rank for rank in self.mesh.grid if any(self._is_first(rank, axes) for axes in kinds)
        )

    def replicas(self, rank: int) -> tuple[int, ...]:
        """Workers that hold the same parts as `rank`, in the order of strategies."""
        return self.mesh.group(rank, ["data"])

    def fingerprint(self) -> str:
        """Text that is equal on all workers, and in all runs whose workers hold the same parts."""
        cuts = sorted(
            [placement.name, list(placement.axes), placement.is_flat]
            for placement in self.placements
            if placement.axes
        )
        return hashlib.sha256(
            json.dumps([str(self.mesh), self.mesh.grid, cuts, self.splits()]).encode()
        ).hexdigest()

    def _is_first(self, rank: int, axes: tuple[str, ...]) -> bool:
        return all(at == 0 for axis, at in self.mesh.coordinates(rank).items() if axis not in axes)
