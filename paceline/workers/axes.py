"""The groups in which workers do things together, by the axes of the mesh.

mesh "data=2, shard=2, tensor=2"

everyone     all 8 workers: the seed, the run's folder, what is written, when to stop
slice        my coordinate of `tensor`, 4 workers: batches are dealt to them; each slice does all of
             it by itself, on the same samples
replicas     my coordinates of `shard` and `tensor`, 2 workers: they train the same parameters, and
             a strategy keeps those alike

Without a mesh these are the same group and the same agreement.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.cluster.mesh import SAMPLED, Mesh
from paceline.cluster.topology import Topology
from paceline.comm.agreement import Agreement, SliceAgreement
from paceline.comm.axis_groups import AxisGroups, Sender
from paceline.comm.axis_meter import AxisMeter
from paceline.comm.group_protocol import Group
from paceline.errors import UsageError
from paceline.sync.context import SyncContext


@dataclass(frozen=True)
class RunAxes:
    """The groups of a run's workers.

    `everyone` is the group of all of them, `slice` the group of workers that batches are dealt to.
    """

    mesh: Mesh
    groups: AxisGroups
    everyone: Agreement
    slice: SyncContext
    replicas: SyncContext  # what strategies work with
    cluster: Callable[[], Topology]  # of all workers

    @classmethod
    def plain(cls, context: SyncContext, cluster: Callable[[], Topology]) -> RunAxes:
        """Return the axes of a run whose workers are all replicas of each other."""
        size = context.group.size
        mesh = Mesh((("data", size),), tuple(range(size)))
        return cls(
            mesh, AxisGroups(mesh, context.group), context.agreement, context, context, cluster
        )

    @classmethod
    def of(cls, mesh: Mesh, context: SyncContext, cluster: Topology) -> RunAxes:
        """Divide the workers of `context`, which has all of them, by a mesh. Collective.

        Raises `UsageError` where workers were given different meshes.
        """
        if not mesh.cut:
            return dataclasses.replace(cls.plain(context, lambda: cluster), mesh=mesh)
        everyone, group = context.agreement, context.group
        meshes = [body.decode() for body in everyone.meet("mesh", str(mesh).encode())]
        if len(set(meshes)) > 1:
            sides = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(meshes))
            raise UsageError(
                f"workers were given different meshes ({sides}); "
                "call start(mesh=...) alike on all of them"
            )
        made = context.extra_groups
        groups = AxisGroups(mesh, group, made.append, context.trace)
        context = dataclasses.replace(context, meters=groups.meters)
        divided = _Division(context, groups, cluster)
        part, replicas = groups.group_along(*SAMPLED), groups.group_along("data")
        dealt = (
            divided.context(part, SAMPLED, lambda: _slice_agreement(part, context, cluster))
            if part is not group
            else context
        )
        trained = (
            divided.context(replicas, ("data",), lambda: _agreement(replicas, context, cluster))
            if replicas is not part
            else dealt
        )
        sharers = groups.group_along("shard") if mesh.extent("shard") > 1 else None
        trained = dataclasses.replace(trained, cut_axes=mesh.cut, sharers=sharers)
        if part is not group:
            made.append(group)  # it is closed with the others, and what it sends counts
            _leave_out(made, part)
        dealt = trained if trained.group is dealt.group else dealt
        return cls(mesh, groups, everyone, dealt, trained, lambda: cluster)

    @property
    def cut(self) -> tuple[str, ...]:
        """Axes of more than one worker along which workers hold different parts of a model."""
        return self.mesh.cut

    @property
    def waits(self) -> tuple[AxisMeter | Agreement, ...]:
        """Where a worker may wait for others, beside the calls of its slice."""
        if not self.cut:
            return ()
        agreements = {
            id(each): each
            for each in (self.everyone, self.replicas.agreement)
            if each is not self.slice.agreement
        }
        return (*agreements.values(), *(self.groups.meter_along(axis) for axis in self.cut))

    @functools.cached_property
    def counted(self) -> bool:
        """Whether this worker's samples are counted.

        Each slice has the same samples, and only those of the first slice are counted.
        """
        return self.mesh.index(self.groups.everyone.rank, set(self.mesh.names) - set(SAMPLED)) == 0

    def hosts_of(self, context: SyncContext) -> Topology:
        """Return the hosts of the workers of one of the contexts, in the ranks of its group."""
        return (
            self.cluster()
            if context.group.size == self.cluster().size
            else self.cluster().part(members(context.group))
        )

    def twin(self, rank: int) -> int:
        """Return the first worker that has the same part of the model as `rank`."""
        return self.mesh.group(rank, ["data"])[0] if self.cut else 0

    def refuse(self, what: str, instead: str, *, beside: Sequence[str] = ()) -> None:
        """Raise `UsageError` for a feature that can't be used while workers hold parts of a model.

        Axes in `beside` don't matter to it.
        """
        if axes := [axis for axis in self.cut if axis not in beside]:
            raise UsageError(
                f"{what} can't be had yet where the mesh ({self.mesh}) "
                f"has {' and '.join(axes)}: {instead}"
            )


@dataclass(frozen=True)
class _Division:
    """Makes contexts for some of the workers of `whole`."""

    whole: SyncContext
    groups: AxisGroups
    cluster: Topology

    def context(
        self, group: Group, axes: Sequence[str], agreement: Callable[[], Agreement]
    ) -> SyncContext:
        """Return the context of `group`, whose workers lie along these axes."""
        where = self.cluster.where()
        return dataclasses.replace(
            self.whole,
            group=group,
            agreement=agreement(),
            hosts=tuple(where[rank] for rank in members(group)),
            native=None if self.whole.native is None else lambda: self._native(axes),
            local=None,
        )

    def _native(self, axes: Sequence[str]) -> Group:
        """Make the group along these axes on torch.distributed. Collective, for all workers."""
        assert self.whole.native is not None
        everyone = self.whole.native()
        self.whole.extra_groups.append(everyone)
        return AxisGroups(self.groups.mesh, everyone).group_along(*axes)


def members(group: Group) -> list[int]:
    """Return the numbers, among all workers, of the workers of a group."""
    return [group.global_rank(rank) for rank in range(group.size)]


def describe(mesh: Mesh, cluster: Topology) -> str:
    """Say in words how workers are dealt to the axes of a mesh."""
    several = [name for name, size in mesh.axes if size > 1]
    if len(cluster.hosts) == 1 or not several:
        return f"mesh {mesh}"
    between = [name for name in several if mesh.crosses_hosts(name, cluster)]
    inside = [name for name in several if name not in between]
    sides = [f"{' and '.join(inside)} inside hosts"] * bool(inside) + [
        f"{' and '.join(between)} between hosts"
    ] * bool(between)
    return f"mesh {mesh} ({', '.join(sides)})"


def _slice_agreement(group: Group, whole: SyncContext, cluster: Topology) -> Agreement:
    return SliceAgreement(
        group, whole.agreement, step=lambda: whole.step_state.step, hosts=_names(group, cluster)
    )


def _agreement(group: Group, whole: SyncContext, cluster: Topology) -> Agreement:
    return Agreement(group, step=lambda: whole.step_state.step, hosts=_names(group, cluster))


def _names(group: Group, cluster: Topology) -> tuple[str, ...]:
    return tuple(cluster.names()[rank] for rank in members(group))


def _leave_out(groups: list[Sender], group: Group) -> None:
    """Take a group out of a list by identity."""
    groups[:] = [other for other in groups if other is not group]
