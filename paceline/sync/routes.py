"""Routes of buckets: with which workers and by which schedule a bucket is summed.

A name becomes an object here, once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, Protocol

import torch
from torch import Tensor

from paceline.comm.collectives import ScheduleQueue
from paceline.comm.group_protocol import Group, UncheckedAllReduce, Work
from paceline.comm.hierarchy.hosts_group import HostsGroup
from paceline.comm.schedule import SCHEDULES, Schedule, ScheduleName, build_schedule
from paceline.comm.shm.shared_segment import empty_on_cpu
from paceline.errors import ResourceError, UsageError
from paceline.formatting import unknown
from paceline.sync.context import SyncContext
from paceline.sync.route_choice import by_rates, choose

Via = Literal["auto", "native", ScheduleName]


class Reducer(Protocol):
    """Sums flat tensors over all workers, in place, one after the other."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return CPU memory that this reducer sums fastest. Collective."""
        ...

    def beside(self, numel: int, dtype: torch.dtype) -> Tensor:
        """CPU memory of this worker alone that may replace the memory of `empty`.

        Other workers needn't know of it.
        """
        ...

    def release(self, flat: Tensor) -> None:
        """Take back `flat` (from `empty` or `beside`), which is not used any more."""
        ...

    def all_reduce(self, flat: Tensor, name: str, *, soon: bool = False) -> Work[Tensor]:
        """Start summing `flat` in place.

        `soon`: this worker will do nothing more before it waits for the sum.
        """
        ...

    def close(self) -> None:
        """End threads."""
        ...


class GroupReducer:
    """Sums by the group's own all-reduce."""

    def __init__(self, group: Group, say: Callable[[str], None], *, owned: bool = False) -> None:
        self._group, self._say, self._owned = group, say, owned
        self._unchecked = group if isinstance(group, UncheckedAllReduce) else None
        self._hosts = group if isinstance(group, HostsGroup) else None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        try:
            return self._group.empty((numel,), dtype)
        except ResourceError as error:
            self._say(f"gradients travel through a copy (slower by about half): {error}")
            return torch.empty(numel, dtype=dtype)

    def beside(self, numel: int, dtype: torch.dtype) -> Tensor:
        flat = empty_on_cpu((numel,), dtype)
        stand_in = getattr(self._group, "stand_in", None)
        if stand_in is not None:
            stand_in(flat)
        return flat

    def release(self, flat: Tensor) -> None:
        release = getattr(self._group, "release", None)
        if release is not None:
            release(flat)

    def all_reduce(self, flat: Tensor, name: str, *, soon: bool = False) -> Work[Tensor]:
        if self._hosts is not None:
            return self._hosts.all_reduce_agreed(flat, out=flat, soon=soon)
        if self._unchecked is not None:
            return self._unchecked.all_reduce_agreed(flat, out=flat)
        return self._group.all_reduce(flat, name=name, out=flat)

    def close(self) -> None:
        if self._owned:
            self._group.close()


class ScheduledReducer(GroupReducer):
    """Sums by a schedule, run move by move over the group's `exchange`."""

    def __init__(self, group: Group, schedule: Schedule, say: Callable[[str], None]) -> None:
        super().__init__(group, say)
        self._lane, self._schedule = ScheduleQueue(group), schedule

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return ordinary memory, as messages are copied anyway."""
        return torch.empty(numel, dtype=dtype)

    def all_reduce(self, flat: Tensor, name: str, *, soon: bool = False) -> Work[Tensor]:
        return self._lane.all_reduce(flat, self._schedule, "sum", out=flat)


class AcrossReducer(GroupReducer):
    """Sums by a group of several hosts, whose leaders exchange by a schedule."""

    def __init__(self, group: HostsGroup, across: Schedule, say: Callable[[str], None]) -> None:
        super().__init__(group, say)
        self._whole, self._across = group, across

    def all_reduce(self, flat: Tensor, name: str, *, soon: bool = False) -> Work[Tensor]:
        return self._whole.all_reduce_agreed(flat, out=flat, across=self._across, soon=soon)


def _group(context: SyncContext) -> Reducer:
    return GroupReducer(context.group, context.announce)


def _auto(context: SyncContext) -> Reducer:
    """Choose the route that a measured cluster suggests, or the group's if none was measured."""
    if context.route_facts is None:
        return _group(context)
    choice = choose(context.hosts, context.route_facts)
    context.choose_route(choice)
    group = context.group
    if choice.across is not None:
        if isinstance(group, HostsGroup):
            return AcrossReducer(group, choice.across, context.announce)
        return ScheduledReducer(
            group,
            build_schedule("uneven", context.hosts, context.route_facts.of(context.hosts)),
            context.announce,
        )
    return GroupReducer(
        group.flat if choice.way == "native" and isinstance(group, HostsGroup) else group,
        context.announce,
    )


def _native(context: SyncContext) -> Reducer:
    if context.native is None or context.group.size == 1:
        return _group(context)
    group = context.native()
    context.extra_groups.append(group)
    return GroupReducer(group, context.announce, owned=True)


def _by(name: str) -> Callable[[SyncContext], Reducer]:
    def make(context: SyncContext) -> Reducer:
        hosts, facts = context.hosts or (0,) * context.group.size, context.route_facts
        if name != "uneven" or facts is None or len(set(hosts)) == 1:
            return ScheduledReducer(context.group, build_schedule(name, hosts), context.announce)
        context.choose_route(by_rates(hosts, facts))
        return ScheduledReducer(
            context.group, build_schedule(name, hosts, facts.of(hosts)), context.announce
        )

    return make


WAYS: dict[str, Callable[[SyncContext], Reducer]] = {
    "auto": _auto,
    "native": _native,
    **{name: _by(name) for name in SCHEDULES},
}


def reducer(via: str, *, coded: bool = False) -> Callable[[SyncContext], Reducer]:
    """Return the function that makes the reducer called `via`.

    Raises `UsageError` for an unknown name.

    `coded`: most goes through a codec, which has a way of its own, so that "auto" isn't chosen for
    what is left.
    """
    if wrong := unknown("via", via, Via):
        raise UsageError(wrong)
    return _group if coded and via == "auto" else WAYS[via]
