"""Pins of a plan: with `--mesh` and `--cut` only the ways that have them are planned."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from paceline.cluster.mesh import parse_mesh
from paceline.errors import UsageError
from paceline.notation import parse_cuts
from paceline.parallel.pipeline import pipeline
from paceline.parallel.pipelining.schedules import check_schedule
from paceline.parallel.shard import shard
from paceline.parallel.tensor.tensor_cut import tensor
from paceline.planner.candidates import Candidate
from paceline.planner.model_profile import PossibleCuts


@dataclass(frozen=True)
class PinnedWay:
    """What a user has pinned.

    Attributes:
        mesh: Workers of each axis. None as a number: any. Empty: any mesh.
        cut: The cut. None: any, or none.
    """

    mesh: dict[str, int | None]
    cut: Any = None

    def restrict(self, cuts: PossibleCuts) -> PossibleCuts:
        """Restrict the cuts that are tried to what is pinned."""
        if isinstance(self.cut, shard) and self.cut.zero == 3:
            return replace(cuts, gathered_units=(self.cut.patterns,))
        if isinstance(self.cut, pipeline):
            counts = None if self.cut.micro_batches is None else (self.cut.micro_batches,)
            # The number of stages on each worker is the same for any number of workers.
            chunks = check_schedule(self.cut.schedule, 2, max(counts or (4,)), self.cut.chunks)
            return replace(cuts, schedules=((self.cut.schedule, chunks),), micro_batches=counts)
        return cuts

    def has(self, candidate: Candidate) -> bool:
        """Whether a way is as pinned."""
        return self._has_mesh(candidate) and self._has_cut(candidate)

    def _has_mesh(self, candidate: Candidate) -> bool:
        if not self.mesh:
            return True
        sizes = {
            "data": 1 if candidate.zero else candidate.replicas,
            "shard": candidate.replicas if candidate.zero else 1,
            "stage": candidate.stages,
            "tensor": candidate.tensor,
        }
        return all(self.mesh.get(axis, 1) in (size, None) for axis, size in sizes.items())

    def _has_cut(self, candidate: Candidate) -> bool:
        cut = self.cut
        if isinstance(cut, shard):
            return candidate.zero == cut.zero
        if isinstance(cut, tensor):
            return candidate.tensor > 1
        if isinstance(cut, pipeline):
            return candidate.stages > 1
        return True


def pin_way(mesh: str | None, cut: str | None) -> PinnedWay | None:
    """Read what a user has pinned. None: nothing.

    Raises:
        UsageError: It can't be read, or the planner can't price it.
    """
    if mesh is None and cut is None:
        return None
    sizes = {} if mesh is None else parse_mesh(mesh)
    if strange := set(sizes) - {"data", "shard", "stage", "tensor"}:
        raise UsageError(
            f"--mesh {mesh} can't be planned: it has the axis {min(strange)}; there are data, "
            "shard, stage and tensor"
        )
    return PinnedWay(sizes, None if cut is None else _read_cut(cut))


def _make_plain(cut: Any) -> Any:
    """Make the cut that has what can be pinned of another one. None: nothing can."""
    if isinstance(cut, shard):
        # With other stages of ZeRO the planner knows no units.
        return shard(cut.units if cut.zero == 3 else (), cut.zero)
    if isinstance(cut, tensor):
        return tensor("auto")
    if isinstance(cut, pipeline):
        return pipeline(schedule=cut.schedule, micro_batches=cut.micro_batches, chunks=cut.chunks)
    return None


def _read_cut(text: str) -> Any:
    cut, *others = parse_cuts(text)
    if others:
        raise UsageError(f"--cut {text} can't be planned: several cuts together have no price")
    plain = _make_plain(cut)
    if plain is None:
        raise UsageError(f"--cut {text} can't be planned: there are shard, tensor and pipeline")
    if cut != plain:
        raise UsageError(
            f"--cut {text} can't be planned so exactly; --cut '{plain!r}' can, and the plan finds "
            "the rest"
        )
    return cut
