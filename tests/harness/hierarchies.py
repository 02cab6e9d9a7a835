"""Groups of several hosts, on threads and on processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.cluster.store import Store
from paceline.comm.group_protocol import Group
from paceline.comm.hierarchy.hosts_group import HostsGroup
from paceline.comm.native.torch_group import TorchGroup
from paceline.comm.shm.shared_group import SharedGroup
from paceline.trace import Trace
from tests.harness.thread_groups import ThreadGroup


def made(
    group: ThreadGroup,
    hosts: tuple[int, ...],
    wrap: Callable[[Group], Any] = lambda outer: outer,
    trace: Trace | None = None,
) -> HostsGroup:
    """A HostsGroup whose three groups are threads; `wrap` is put around that of the leaders."""
    mine, inner = hosts[group.rank], None
    for host in sorted(set(hosts)):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        found = group.make_subgroup(ranks)
        inner = found if host == mine else inner
    leaders = sorted(hosts.index(host) for host in set(hosts))
    outer = group.make_subgroup(leaders)
    assert inner is not None
    outer = None if outer is None else wrap(outer)
    return HostsGroup(inner, outer, group, hosts, deadline=60, trace=trace)


def networked(
    store: Store, rank: int, hosts: tuple[int, ...], *, deadline: float = 60.0
) -> HostsGroup:
    """A HostsGroup of processes: shared memory inside hosts, Gloo between them."""
    size, mine = len(hosts), [other for other, host in enumerate(hosts) if host == hosts[rank]]
    flat = TorchGroup.from_store(
        store.open_substore("flat"), rank, size, deadline=deadline, hosts=hosts
    )
    inner = SharedGroup.from_store(
        store.open_substore(f"host{hosts[rank]}"),
        mine.index(rank),
        len(mine),
        deadline=deadline,
        ranks=mine,
    )
    return HostsGroup(
        inner,
        flat.make_subgroup(sorted(hosts.index(host) for host in set(hosts))),
        flat,
        hosts,
        deadline=deadline,
    )
