"""All-reduce over several hosts by messages that a codec makes: exact sums inside a host, coded
messages between hosts.

    host 0   ranks 0 1   sum ─┐ leader 0 ──┐
    host 1   ranks 2 3   sum ─┘ leader 2 ──┴─ the way, stage after stage      and each leader hands
                         the total out on its host

Where every worker has a host of its own, or all share one, all of them are leaders and go the way.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from paceline.at_exit import at_exit
from paceline.comm.group import Group, Traffic, Work
from paceline.comm.hierarchy.executor import Flow, StagedExecutor, StagedJob, Steps
from paceline.comm.hierarchy.group import EndsTogether, HostsGroup
from paceline.errors import PacelineError, ViewChanged
from paceline.trace import Trace

# from this rank's part (float32, 1-D) to the total of all
Way = Callable[[Tensor, tuple[Group, ...]], Generator[Work[Any], Any, Tensor]]


class CodedAllReduce:
    """Sums flat tensors over `group`, for ways that yield at most `stages` times; collective.

    It sends through groups of its own.
    """

    def __init__(
        self, group: Group, stages: int, *, trace: Trace | None = None, deadline: float = 240.0
    ) -> None:
        self._group, self._stages, self._deadline = group, stages, deadline
        self.trace = Trace(0) if trace is None else trace
        self._inner: Group | None = None
        self._hands: Group | None = None
        leaders: Group | None = group
        if isinstance(group, HostsGroup):
            leaders = group.outer
            if group.inner.size > 1:
                self._inner, self._hands = (_again(group.inner) for _ in range(2))
        self.place = leaders  # the group of the leaders; None on the others
        self._ways = () if leaders is None else tuple(_again(leaders) for _ in range(stages))
        # another group of the leaders, for messages outside the executor
        self.beside = None if leaders is None else _again(leaders)
        self._line = StagedExecutor("relay", stages + 1, self._spread)
        # a thread that is inside torch while Python ends takes the process down with it
        self._unregister = at_exit(self.close)

    @property
    def leads(self) -> bool:
        """Whether this rank goes the way, for all of its host."""
        return self.place is not None

    @property
    def _all(self) -> list[Group]:
        return [
            group
            for group in (self._inner, self._hands, *self._ways, self.beside)
            if group is not None
        ]

    @property
    def crossed(self) -> int:
        """Bytes that this rank has sent on ways."""
        return sum(group.traffic.within + group.traffic.between for group in self._ways)

    @property
    def traffic(self) -> Traffic:
        """Bytes sent through all groups of this object."""
        return Traffic(
            sum(group.traffic.within for group in self._all),
            sum(group.traffic.between for group in self._all),
        )

    @property
    def waited(self) -> float:
        """Seconds spent comparing calls: none, as waits are part of the exchange here."""
        return 0.0

    def all_reduce(self, flat: Tensor, way: Way, name: str) -> Work[Tensor]:
        """Start summing `flat` (floating, 1-D, the same layout on all ranks) in place; leaders
        go `way`. All ranks call it.
        """
        job = StagedJob(
            lambda: [Flow(self._steps(flat, way, name), flat.numel())],
            lambda: flat,
            name,
            self._deadline,
        )
        return self._line.start(job)

    def _steps(self, flat: Tensor, way: Way, name: str) -> Steps:
        room = flat if flat.dtype == torch.float32 else flat.float()
        if self._inner is not None:
            with self.trace.span("sum", "within"):
                self._inner.all_reduce(room, out=room).wait()
        used = 0
        if self.place is not None:
            going, result = way(room, self._ways), None
            with self.trace.span(name, "between"):
                while True:
                    try:
                        work = going.send(result)
                    except StopIteration as stop:
                        room.copy_(stop.value)
                        break
                    used += 1
                    result = yield work
        for _ in range(self._stages - used):
            yield None
        if self._hands is not None:
            with self.trace.span("hand out", "within"):
                self._hands.broadcast(room, root=0).wait()
        if room is not flat:
            flat.copy_(room)

    def _spread(self, error: PacelineError) -> BaseException:
        """Tell all ranks of `error`, and end their waits. Returns the error that was first."""
        whole = self._group.flat if isinstance(self._group, HostsGroup) else self._group
        first = whole.end(error) if isinstance(whole, EndsTogether) else error
        for group in self._all:
            group.abort()
        return first

    def close(self) -> None:
        """End the threads and groups. Calling it twice is harmless."""
        self._end(ViewChanged("this exchange has been closed"), lambda group: group.close())

    def abort(self) -> None:
        """End operations under way, at once and without the others."""
        self._end(ViewChanged("this exchange has been aborted"), lambda group: group.abort())

    def _end(self, error: ViewChanged, end: Callable[[Group], None]) -> None:
        def let_go() -> None:
            for group in self._all:
                end(group)

        if self._line.finish(error, let_go):
            self._unregister()


def _again(group: Group) -> Group:
    """Make another group of the same ranks."""
    made = group.sub(range(group.size))
    assert made is not None
    return made
