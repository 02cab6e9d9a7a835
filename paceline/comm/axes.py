"""Groups along the axes of a mesh: workers that differ in these axes alone.

mesh "data=2, tensor=2"        along("tensor")   ranks 0 1 | ranks 2 3        along("data")   ranks
                                                 0 2 | ranks 1 3

data 0    rank 0   rank 1
data 1    rank 2   rank 3
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from paceline.cluster.mesh import Mesh
from paceline.comm.axis_meter import AxisMeter
from paceline.comm.group import Group, Traffic
from paceline.comm.hierarchy.group import HostsGroup
from paceline.comm.pairs import Pairs
from paceline.comm.solo import SoloGroup
from paceline.errors import UsageError
from paceline.trace import Trace


class Sender(Protocol):
    """An object that sends to other workers, and ends with the run: a group, or messages beside
    groups.
    """

    @property
    def traffic(self) -> Traffic: ...

    @property
    def waited(self) -> float: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


@dataclass(frozen=True)
class _Messages:
    """Messages as a `Sender`.

    The waits for them count as exchange, so none of them are for slower workers.
    """

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
    """The groups of one worker along the axes of `mesh`, made of `group`, which has all workers.

    `opened` is told of each that is made.

    What cuts exchange shows itself in `trace`.
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
        self.mesh, self.everyone, self._opened = mesh, group, opened
        self._known: dict[tuple[str, ...], Group] = {}
        # by the id of the group that they are of, which is kept
        self._parts: dict[tuple[int, tuple[int, ...]], Group | None] = {}
        self._trace = Trace(0) if trace is None else trace
        self.meters: list[AxisMeter] = []  # of the axes along which something is cut

    def along(self, *axes: str) -> Group:
        """Return the group of the workers that differ from this one in these axes alone.

        All workers ask for it together the first time, and then it is there. Its ranks are in the
        order of coordinates; where it has all workers, it is their group as it is. It has this
        worker alone where the axes have an extent of 1, or the mesh lacks them.
        """
        names = tuple(name for name, size in self.mesh.axes if name in axes and size > 1)
        if names not in self._known:
            self._known[names] = self._make(names)
        return self._known[names]

    def another(self, *axes: str) -> Group:
        """Make one more group of the workers of `along(*axes)`, for calls that have an order of
        their own. Collective.
        """
        group = self.along(*axes)
        made = subgroup(group, range(group.size), ", ".join(axes)) if group.size > 1 else None
        if made is None:
            return group
        self._opened(made)
        return made

    def part(self, group: Group, ranks: Sequence[int], axis: str) -> Group | None:
        """Return the group of some ranks of a group along an axis, None on others; the same one
        for the same ranks. Collective.
        """
        key = id(group), tuple(ranks)
        if key not in self._parts:
            self._parts[key] = made = subgroup(group, ranks, axis)
            if made is not None:
                self._opened(made)
                self.meter(axis).add(made)
        return self._parts[key]

    def meter(self, axis: str) -> AxisMeter:
        """Return what measures the exchanges of cuts along an axis; the same one each time."""
        found = next((meter for meter in self.meters if meter.axis == axis), None)
        if found is None:
            found = AxisMeter(axis, self._trace)
            self.meters.append(found)
        return found

    def count(self, axis: str, messages: Pairs) -> None:
        """Count what is sent in messages beside all groups, as exchanges along an axis.

        The waits for them are the meter's.
        """
        self.meter(axis).add(messages)
        self._opened(_Messages(messages))

    def _make(self, names: Sequence[str]) -> Group:
        mesh, everyone = self.mesh, self.everyone
        if not names:
            return SoloGroup(rank=everyone.rank, view=everyone.view)
        found = mesh.groups(names)
        if len(found) == 1:
            return everyone
        made = [
            part
            for ranks in found
            if (part := subgroup(everyone, ranks, ", ".join(names))) is not None
        ]
        self._opened(made[0])
        return made[0]


def subgroup(group: Group, ranks: Sequence[int], axis: str = "") -> Group | None:
    """Make the group of these ranks as fast as it can be: of shared memory inside a host, with one
    copy per host between them. Collective.

    Returns None on other ranks. All ranks of `group` call it with the same list. `axis`: what its
    spans name.
    """
    if not isinstance(group, HostsGroup):
        return group.sub(ranks)
    hosts = [group.hosts[rank] for rank in ranks]
    here = [place for place, host in enumerate(group.hosts) if host == group.hosts[group.rank]]
    mine = [here.index(rank) for rank in ranks if rank in here]
    inner = (
        group.inner.sub(mine)
        if len(mine) > 1
        else SoloGroup(rank=group.global_rank(group.rank), view=group.view)
    )
    if len(set(hosts)) == 1:
        return inner if group.rank in ranks else None
    flat = group.flat.sub(ranks)
    if len(set(hosts)) == len(hosts):
        return flat
    leaders = group.flat.sub([ranks[hosts.index(host)] for host in dict.fromkeys(hosts)])
    if flat is None or inner is None:
        return None
    return HostsGroup(
        inner, leaders, flat, hosts, deadline=group.deadline, trace=group.trace.along(axis)
    )
