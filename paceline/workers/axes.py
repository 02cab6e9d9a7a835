"""The groups in which workers of a run act together, by the axes of the mesh.

mesh "data=2, shard=2, tensor=2"

everyone     all 8 workers: they agree on the seed, the run's folder, its files, and when to stop
slice        4 workers with the same coordinate of `tensor`: batches are dealt to them; each slice
             does everything by itself, on the same samples
replicas     2 workers with the same coordinates of `shard` and `tensor`: they train the same
             parameters, and a strategy keeps them equal

Without a mesh all three are the same group, with the same agreement.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from paceline.cluster.mesh import SAMPLE_AXES, Mesh
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

    Args:
        mesh: Grid of the workers.
        groups: Groups along axes of the mesh.
        everyone: Agreement of all workers.
        slice: Context of the workers to which batches are dealt.
        replicas: Context of the workers with the same parameters, for strategies.
        cluster: Function that gives the hosts of all workers, which may change.
    """

    mesh: Mesh
    groups: AxisGroups
    everyone: Agreement
    slice: SyncContext
    replicas: SyncContext
    cluster: Callable[[], Topology]

    @classmethod
    def from_replicas(cls, context: SyncContext, cluster: Callable[[], Topology]) -> RunAxes:
        """Make the axes of a run whose workers are all replicas of each other."""
        size = context.group.size
        mesh = Mesh((("data", size),), tuple(range(size)))
        return cls(
            mesh, AxisGroups(mesh, context.group), context.agreement, context, context, cluster
        )

    @classmethod
    def from_mesh(cls, mesh: Mesh, context: SyncContext, cluster: Topology) -> RunAxes:
        """Divide all workers by a mesh. Collective.

        Args:
            mesh: The mesh.
            context: Context of all workers.
            cluster: Hosts of all workers.

        Raises:
            UsageError: Workers were given different meshes.
        """
        if not mesh.cut_axes:
            return dataclasses.replace(cls.from_replicas(context, lambda: cluster), mesh=mesh)
        everyone, group = context.agreement, context.group
        # Different meshes would hang or mix up samples later, so they are compared first.
        meshes = [body.decode() for body in everyone.meet("mesh", str(mesh).encode())]
        if len(set(meshes)) > 1:
            sides = "; ".join(f"rank {rank}: {text}" for rank, text in enumerate(meshes))
            raise UsageError(
                f"workers were given different meshes ({sides}); "
                "call start(mesh=...) alike on all of them"
            )
        extra_groups = context.extra_groups
        groups = AxisGroups(mesh, group, extra_groups.append, context.trace)
        context = dataclasses.replace(context, meters=groups.meters)
        division = _Division(context, groups, cluster)
        # Groups along several axes may be the same group. Then they share a context too.
        slice_group, replica_group = groups.group_along(*SAMPLE_AXES), groups.group_along("data")
        slice_context = (
            division.make_context(
                slice_group,
                SAMPLE_AXES,
                lambda: _make_slice_agreement(slice_group, context, cluster),
            )
            if slice_group is not group
            else context
        )
        replica_context = (
            division.make_context(
                replica_group, ("data",), lambda: _make_agreement(replica_group, context, cluster)
            )
            if replica_group is not slice_group
            else slice_context
        )
        sharers = groups.group_along("shard") if mesh.axis_size("shard") > 1 else None
        replica_context = dataclasses.replace(
            replica_context, cut_axes=mesh.cut_axes, sharers=sharers
        )
        # A context's own group is closed with the context, and its traffic counted. All others are
        # extra groups: now the group of all workers, in place of the group of the slice.
        if slice_group is not group:
            extra_groups.append(group)
            _remove_group(extra_groups, slice_group)
        if replica_context.group is slice_context.group:
            slice_context = replica_context
        return cls(mesh, groups, everyone, slice_context, replica_context, lambda: cluster)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """Axes of more than one worker along which workers hold different parts of a model."""
        return self.mesh.cut_axes

    @property
    def wait_sources(self) -> tuple[AxisMeter | Agreement, ...]:
        """Meters and agreements in which a worker may wait, besides the agreement of its slice."""
        if not self.cut_axes:
            return ()
        agreements = {
            id(each): each
            for each in (self.everyone, self.replicas.agreement)
            if each is not self.slice.agreement
        }
        return (*agreements.values(), *(self.groups.meter_along(axis) for axis in self.cut_axes))

    @functools.cached_property
    def counts_samples(self) -> bool:
        """Whether this worker's samples are counted.

        Each slice has the same samples, and only those of the first slice are counted.
        """
        return (
            self.mesh.index_along(
                self.groups.everyone.rank, set(self.mesh.names) - set(SAMPLE_AXES)
            )
            == 0
        )

    def hosts_of(self, context: SyncContext) -> Topology:
        """Topology of the workers of one context, with the ranks of its group."""
        # A context of all workers has the cluster itself, with its measured links.
        return (
            self.cluster()
            if context.group.size == self.cluster().size
            else self.cluster().select_ranks(list_global_ranks(context.group))
        )

    def first_replica_of(self, rank: int) -> int:
        """First worker with the same part of the model as `rank`."""
        return self.mesh.ranks_along(rank, ["data"])[0] if self.cut_axes else 0

    def refuse_cut_axes(self, what: str, instead: str, *, beside: Sequence[str] = ()) -> None:
        """Raise `UsageError` for a feature that can't be used while workers hold parts of a model.

        Args:
            what: The feature.
            instead: What to do instead.
            beside: Axes with which the feature can be used.
        """
        if axes := [axis for axis in self.cut_axes if axis not in beside]:
            raise UsageError(
                f"{what} can't be used yet if the mesh ({self.mesh}) "
                f"has {' and '.join(axes)}: {instead}"
            )


@dataclass(frozen=True)
class _Division:
    """Makes contexts for some of the workers of the context `whole`."""

    whole: SyncContext
    groups: AxisGroups
    cluster: Topology

    def make_context(
        self, group: Group, axes: Sequence[str], agreement: Callable[[], Agreement]
    ) -> SyncContext:
        """Make the context of a group along some axes.

        Args:
            group: The group.
            axes: Its axes.
            agreement: Function that makes its agreement.
        """
        hosts = self.cluster.host_by_rank()
        return dataclasses.replace(
            self.whole,
            group=group,
            agreement=agreement(),
            hosts=tuple(hosts[rank] for rank in list_global_ranks(group)),
            native=None if self.whole.native is None else lambda: self._make_native_group(axes),
            local=None,
        )

    def _make_native_group(self, axes: Sequence[str]) -> Group:
        """Make the group along these axes on torch.distributed. Collective, for all workers."""
        assert self.whole.native is not None
        everyone = self.whole.native()
        self.whole.extra_groups.append(everyone)
        return AxisGroups(self.groups.mesh, everyone).group_along(*axes)


def list_global_ranks(group: Group) -> list[int]:
    """List the ranks, among all workers, of the workers of a group."""
    return [group.global_rank(rank) for rank in range(group.size)]


def describe_mesh(mesh: Mesh, cluster: Topology) -> str:
    """Format a mesh, with the axes that lie inside hosts and between hosts."""
    several = [name for name, size in mesh.axes if size > 1]
    if len(cluster.hosts) == 1 or not several:
        return f"mesh {mesh}"
    between = [name for name in several if mesh.crosses_hosts(name, cluster)]
    inside = [name for name in several if name not in between]
    sides = [f"{' and '.join(inside)} inside hosts"] * bool(inside) + [
        f"{' and '.join(between)} between hosts"
    ] * bool(between)
    return f"mesh {mesh} ({', '.join(sides)})"


def _make_slice_agreement(group: Group, whole: SyncContext, cluster: Topology) -> Agreement:
    return SliceAgreement(
        group,
        whole.agreement,
        step=lambda: whole.step_state.step,
        hosts=_list_host_names(group, cluster),
    )


def _make_agreement(group: Group, whole: SyncContext, cluster: Topology) -> Agreement:
    return Agreement(
        group, step=lambda: whole.step_state.step, hosts=_list_host_names(group, cluster)
    )


def _list_host_names(group: Group, cluster: Topology) -> tuple[str, ...]:
    """List the names of the hosts of a group's workers."""
    return tuple(cluster.host_names()[rank] for rank in list_global_ranks(group))


def _remove_group(groups: list[Sender], group: Group) -> None:
    """Remove a group from a list, by identity."""
    groups[:] = [other for other in groups if other is not group]
