"""Routes of buckets: the group of workers and the schedule by which a bucket is summed.

    via="auto"      GroupReducer over all workers, or the route that a measured cluster suggests
    via="native"    GroupReducer over a group on torch.distributed (Gloo or NCCL)
    via="ring" ...  ScheduledReducer with the schedule of this name

The name `via` becomes an object here, once.
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
from paceline.formatting import describe_unknown_choice
from paceline.sync.context import SyncContext
from paceline.sync.route_choice import choose_route, choose_uneven

Via = Literal["auto", "native", ScheduleName]


class Reducer(Protocol):
    """Sums flat tensors over all workers, in place, one after the other."""

    def allocate_bucket(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate the CPU memory that this reducer sums fastest. Collective."""
        ...

    def allocate_substitute(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate CPU memory of this worker alone, in place of memory of `allocate_bucket`.

        Other workers needn't replace theirs.
        """
        ...

    def release_memory(self, flat: Tensor) -> None:
        """Take back memory of this reducer that is not used any more."""
        ...

    def all_reduce(self, flat: Tensor, name: str, *, soon: bool = False) -> Work[Tensor]:
        """Start summing `flat` in place.

        Args:
            flat: A contiguous tensor of one dim, of the same length on all workers.
            name: Name of the call in errors and in the trace.
            soon: Whether this worker waits for the sum right away.
        """
        ...

    def close(self) -> None:
        """End threads."""
        ...


class GroupReducer:
    """Sums by the group's own all-reduce."""

    def __init__(self, group: Group, say: Callable[[str], None], *, owned: bool = False) -> None:
        self._group, self._announce, self._owns_group = group, say, owned
        self._unchecked = group if isinstance(group, UncheckedAllReduce) else None
        self._hosts = group if isinstance(group, HostsGroup) else None

    def allocate_bucket(self, numel: int, dtype: torch.dtype) -> Tensor:
        try:
            return self._group.empty((numel,), dtype)
        except ResourceError as error:
            # No room in shared memory: slower, but it works.
            self._announce(f"gradients travel through a copy (slower by about half): {error}")
            return torch.empty(numel, dtype=dtype)

    def allocate_substitute(self, numel: int, dtype: torch.dtype) -> Tensor:
        flat = empty_on_cpu((numel,), dtype)
        # Only groups with shared memory have to know of the substitute, to give it back later.
        stand_in = getattr(self._group, "stand_in", None)
        if stand_in is not None:
            stand_in(flat)
        return flat

    def release_memory(self, flat: Tensor) -> None:
        release = getattr(self._group, "release", None)
        if release is not None:
            release(flat)

    def all_reduce(self, flat: Tensor, name: str, *, soon: bool = False) -> Work[Tensor]:
        # All workers have agreed on the list of buckets, so the group needn't compare the calls.
        if self._hosts is not None:
            return self._hosts.all_reduce_agreed(flat, out=flat, soon=soon)
        if self._unchecked is not None:
            return self._unchecked.all_reduce_agreed(flat, out=flat)
        return self._group.all_reduce(flat, name=name, out=flat)

    def close(self) -> None:
        if self._owns_group:
            self._group.close()


class ScheduledReducer(GroupReducer):
    """Sums by a schedule, run move by move over the group's `exchange`."""

    def __init__(self, group: Group, schedule: Schedule, say: Callable[[str], None]) -> None:
        super().__init__(group, say)
        self._queue, self._schedule = ScheduleQueue(group), schedule

    def allocate_bucket(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate ordinary memory, as messages are copied anyway."""
        return torch.empty(numel, dtype=dtype)

    def all_reduce(self, flat: Tensor, name: str, *, soon: bool = False) -> Work[Tensor]:
        return self._queue.all_reduce(flat, self._schedule, "sum", out=flat)


class BetweenHostsReducer(GroupReducer):
    """Sums inside hosts by shared memory, and between the leaders of hosts by a schedule."""

    def __init__(self, group: HostsGroup, across: Schedule, say: Callable[[str], None]) -> None:
        super().__init__(group, say)
        self._all_hosts, self._across = group, across

    def all_reduce(self, flat: Tensor, name: str, *, soon: bool = False) -> Work[Tensor]:
        return self._all_hosts.all_reduce_agreed(flat, out=flat, across=self._across, soon=soon)


def _make_group_reducer(context: SyncContext) -> Reducer:
    return GroupReducer(context.group, context.announce)


def _make_auto_reducer(context: SyncContext) -> Reducer:
    """Make the reducer that suits the measured cluster; the group's own without measurements."""
    if context.route_facts is None:
        return _make_group_reducer(context)
    choice = choose_route(context.hosts, context.route_facts)
    context.record_route(choice)
    group = context.group
    if choice.across is not None:
        if isinstance(group, HostsGroup):
            return BetweenHostsReducer(group, choice.across, context.announce)
        return ScheduledReducer(
            group,
            build_schedule("uneven", context.hosts, context.route_facts.rates_of(context.hosts)),
            context.announce,
        )
    return GroupReducer(
        group.flat if choice.way == "native" and isinstance(group, HostsGroup) else group,
        context.announce,
    )


def _make_native_reducer(context: SyncContext) -> Reducer:
    if context.native is None or context.group.size == 1:
        return _make_group_reducer(context)
    group = context.native()
    context.extra_groups.append(group)
    return GroupReducer(group, context.announce, owned=True)


def _reduce_by_schedule(name: str) -> Callable[[SyncContext], Reducer]:
    def make_scheduled(context: SyncContext) -> Reducer:
        hosts, facts = context.hosts or (0,) * context.group.size, context.route_facts
        if name != "uneven" or facts is None or len(set(hosts)) == 1:
            return ScheduledReducer(context.group, build_schedule(name, hosts), context.announce)
        context.record_route(choose_uneven(hosts, facts))
        return ScheduledReducer(
            context.group, build_schedule(name, hosts, facts.rates_of(hosts)), context.announce
        )

    return make_scheduled


REDUCER_MAKERS: dict[str, Callable[[SyncContext], Reducer]] = {
    "auto": _make_auto_reducer,
    "native": _make_native_reducer,
    **{name: _reduce_by_schedule(name) for name in SCHEDULES},
}


def find_reducer_maker(via: str, *, coded: bool = False) -> Callable[[SyncContext], Reducer]:
    """Look up the function that makes the reducer of a route.

    Args:
        via: Name of the route.
        coded: Whether most buckets go through a codec, which has its own route. Then "auto" isn't
            chosen by measurements for the remaining buckets.

    Raises:
        UsageError: No route has this name.
    """
    if wrong := describe_unknown_choice("via", via, Via):
        raise UsageError(wrong)
    return _make_group_reducer if coded and via == "auto" else REDUCER_MAKERS[via]
