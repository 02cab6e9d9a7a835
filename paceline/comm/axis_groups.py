"""Groups along the axes of a mesh: workers whose coordinates differ in these axes alone.

mesh "data=2, tensor=2"

    data 0    rank 0   rank 1        along("tensor"):  ranks 0 1 | ranks 2 3
    data 1    rank 2   rank 3        along("data"):    ranks 0 2 | ranks 1 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.cluster.mesh import Mesh
from paceline.comm.axis_meter import AxisMeter
from paceline.comm.group_protocol import Group, Traffic
from paceline.comm.hierarchy.hosts_group import HostsGroup
from paceline.comm.pairs import Pairs
from paceline.comm.solo import SoloGroup
from paceline.errors import UsageError
from paceline.trace import Trace


class Sender(Protocol):
    """An object that sends to other workers and ends with the run: a group, or messages."""

    @property
    def traffic(self) -> Traffic: ...

    @property
    def waited(self) -> float: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class _MessageSender:
    """Messages beside groups, as a `Sender`. No wait for them counts as one for slower workers."""

    pairs: Pairs
    waited: float = 0.0

    @property
    def traffic(self) -> Traffic:
        return self.pairs.traffic

    def close(self) -> None:
        self.pairs.close()

    def abort(self) -> None:
        self.pairs.abort()


class AxisGroups:
    """The groups of one worker along the axes of a mesh, made when they are first asked for.

    Args:
        mesh: The mesh of all workers.
        group: The group of all workers.
        opened: Called with each group or messages made here. Default: nothing.
        trace: Gets the spans of exchanges along axes. Default: none.
    """

    def __init__(
        self,
        mesh: Mesh,
        group: Group,
        opened: Callable[[Sender], None] = lambda sender: None,
        trace: Trace | None = None,
    ) -> None:
        if mesh.size != group.size:
            raise UsageError(
                f"the mesh {mesh} has {mesh.size} workers, and this group has {group.size}; "
                "give the group of all workers"
            )
        self.mesh, self.everyone, self._on_open = mesh, group, opened
        self._groups: dict[tuple[str, ...], Group] = {}  # by the axes' names
        # By the id of the group that they are a part of, which is never closed before.
        self._subgroups: dict[tuple[int, tuple[int, ...]], Group | None] = {}
        self._trace = Trace(0) if trace is None else trace
        self.meters: list[AxisMeter] = []  # one for each axis along which something is cut

    def group_along(self, *axes: str) -> Group:
        """Return the group of the workers that differ from this one in these axes alone.

        Collective the first time; later calls return the same group. Ranks are in the order of
        coordinates. If it has all workers, it is their group itself. If the axes have an extent of
        1, or the mesh lacks them, it is a group of this worker alone.
        """
        names = tuple(name for name, size in self.mesh.axes if name in axes and size > 1)
        if names not in self._groups:
            self._groups[names] = self._make_group(names)
        return self._groups[names]

    def make_another_group(self, *axes: str) -> Group:
        """Make another group of the workers of `group_along(*axes)`, with its own order of calls.

        Collective.
        """
        group = self.group_along(*axes)
        twin = (
            make_fast_subgroup(group, range(group.size), ", ".join(axes))
            if group.size > 1
            else None
        )
        if twin is None:
            return group
        self._on_open(twin)
        return twin

    def subgroup_along(self, group: Group, ranks: Sequence[int], axis: str) -> Group | None:
        """Return the group of some ranks of a group along an axis; None on other ranks. Collective.

        The same group is returned for the same ranks.
        """
        key = id(group), tuple(ranks)
        if key not in self._subgroups:
            self._subgroups[key] = subset = make_fast_subgroup(group, ranks, axis)
            if subset is not None:
                self._on_open(subset)
                self.meter_along(axis).add_sender(subset)
        return self._subgroups[key]

    def meter_along(self, axis: str) -> AxisMeter:
        """Return the meter of the exchanges of cuts along an axis; the same one each time."""
        meter = next((meter for meter in self.meters if meter.axis == axis), None)
        if meter is None:
            meter = AxisMeter(axis, self._trace)
            self.meters.append(meter)
        return meter

    def count_messages(self, axis: str, messages: Pairs) -> None:
        """Count messages beside all groups as exchanges along an axis.

        Their waits are measured by the meter, where they happen.
        """
        self.meter_along(axis).add_sender(messages)
        self._on_open(_MessageSender(messages))

    def _make_group(self, names: Sequence[str]) -> Group:
        mesh, everyone = self.mesh, self.everyone
        if not names:
            return SoloGroup(rank=everyone.rank, view=everyone.view)
        slices = mesh.rank_groups_along(names)
        if len(slices) == 1:
            return everyone
        # Every rank takes part in making every group, and is in one of them.
        made = [
            part
            for ranks in slices
            if (part := make_fast_subgroup(everyone, ranks, ", ".join(names))) is not None
        ]
        self._on_open(made[0])
        return made[0]


def make_fast_subgroup(group: Group, ranks: Sequence[int], axis: str = "") -> Group | None:
    """Make the group of these ranks, with the fastest ways that there are. Collective.

    Inside a host it uses shared memory. Over several hosts, one copy per host crosses the network.

    Args:
        group: The group that all ranks are of; all of them call this.
        ranks: Ranks of the new group, the same list on all ranks.
        axis: Axis of its spans in the trace. Default: none.

    Returns:
        The group; None on ranks that are not in it.
    """
    if not isinstance(group, HostsGroup):
        return group.make_subgroup(ranks)
    hosts = [group.hosts[rank] for rank in ranks]
    # All ranks of a host make its part of the group, then all ranks make the rest, in this order.
    ranks_here = [
        place for place, host in enumerate(group.hosts) if host == group.hosts[group.rank]
    ]
    inner_ranks = [ranks_here.index(rank) for rank in ranks if rank in ranks_here]
    inner = (
        group.inner.make_subgroup(inner_ranks)
        if len(inner_ranks) > 1
        else SoloGroup(rank=group.global_rank(group.rank), view=group.view)
    )
    if len(set(hosts)) == 1:
        return inner if group.rank in ranks else None
    flat = group.flat.make_subgroup(ranks)
    if len(set(hosts)) == len(hosts):
        return flat
    # The first rank on each host leads.
    leaders = group.flat.make_subgroup([ranks[hosts.index(host)] for host in dict.fromkeys(hosts)])
    if flat is None or inner is None:
        return None
    return HostsGroup(
        inner, leaders, flat, hosts, deadline=group.deadline, trace=group.trace.copy_for_axis(axis)
    )
