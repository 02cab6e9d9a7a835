"""A group of several hosts, on threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline.comm.group import Group
from paceline.comm.hierarchy.group import HostsGroup
from paceline.comm.threads import ThreadGroup


def made(group: ThreadGroup, hosts: tuple[int, ...], wrap: Callable[[Group], Any] = lambda outer: outer) -> HostsGroup:
    """A HostsGroup whose three groups are threads; `wrap` is put around that of the leaders."""
    mine, inner = hosts[group.rank], None
    for host in sorted(set(hosts)):
        ranks = [rank for rank, other in enumerate(hosts) if other == host]
        found = group.sub(ranks)
        inner = found if host == mine else inner
    leaders = sorted(hosts.index(host) for host in set(hosts))
    outer = group.sub(leaders)
    assert inner is not None
    return HostsGroup(inner, None if outer is None else wrap(outer), group, hosts, deadline=60)
