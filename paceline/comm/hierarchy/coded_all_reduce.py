"""All-reduce over several hosts through a codec: exact sums inside a host, coded messages between.

    host 0   ranks 0 1   sum ─┐ leader 0 ──┐
    host 1   ranks 2 3   sum ─┘ leader 2 ──┴─ coded exchange, stage after stage

    and each leader hands the total out on its host

If all workers share one host, or each has its own, all of them are leaders.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from paceline.at_exit import call_at_exit
from paceline.comm.group_protocol import Group, Traffic, Work
from paceline.comm.hierarchy.hosts_group import EndsTogether, HostsGroup
from paceline.comm.hierarchy.staged_executor import Flow, StagedExecutor, StagedJob, Steps
from paceline.errors import PacelineError, ViewChanged
from paceline.trace import Trace

# Exchanges coded messages between leaders: from this rank's part (float32, 1-D) and the leaders'
# groups, one for each stage, to the total of all parts. It yields at the end of each stage.
CodedExchange = Callable[[Tensor, tuple[Group, ...]], Generator[Work[Any], Any, Tensor]]


class CodedAllReduce:
    """Sums flat tensors over `group`, by a coded exchange of leaders. Collective.

    It sends through groups of its own, so it does not mix with other calls on `group`.

    Args:
        group: All workers.
        stages: How often a `CodedExchange` yields at most.
        trace: Gets the spans of each stage. Default: none.
        deadline: Seconds that a wait for a sum may take. Default: 240.
    """

    def __init__(
        self, group: Group, stages: int, *, trace: Trace | None = None, deadline: float = 240.0
    ) -> None:
        self._group, self._stages, self._deadline = group, stages, deadline
        self.trace = Trace(0) if trace is None else trace
        self._inner: Group | None = None
        self._handout_group: Group | None = None
        leaders: Group | None = group
        if isinstance(group, HostsGroup):
            leaders = group.outer
            if group.inner.size > 1:
                self._inner, self._handout_group = (_duplicate_group(group.inner) for _ in range(2))
        self.leaders = leaders  # the group of the leaders; None on workers that don't lead
        # One group for each stage, so that the stages of different tensors can't mix.
        self._stage_groups = (
            () if leaders is None else tuple(_duplicate_group(leaders) for _ in range(stages))
        )
        # One more for messages of leaders outside of the executor.
        self.leaders_beside = None if leaders is None else _duplicate_group(leaders)
        self._executor = StagedExecutor("relay", stages + 1, self._spread_error)
        # A thread that is inside torch while Python ends takes the process down with it.
        self._unregister = call_at_exit(self.close)

    @property
    def is_leader(self) -> bool:
        """Whether this rank exchanges coded messages, for all workers of its host."""
        return self.leaders is not None

    @property
    def _groups(self) -> list[Group]:
        return [
            group
            for group in (
                self._inner,
                self._handout_group,
                *self._stage_groups,
                self.leaders_beside,
            )
            if group is not None
        ]

    @property
    def coded_bytes(self) -> int:
        """Number of bytes that this rank has sent in coded exchanges."""
        return sum(group.traffic.within + group.traffic.between for group in self._stage_groups)

    @property
    def traffic(self) -> Traffic:
        """Number of bytes that this rank has sent through all groups of this object."""
        return Traffic(
            sum(group.traffic.within for group in self._groups),
            sum(group.traffic.between for group in self._groups),
        )

    @property
    def waited(self) -> float:
        """Seconds spent comparing calls: always 0, as nothing is compared here."""
        return 0.0

    def all_reduce(self, flat: Tensor, way: CodedExchange, name: str) -> Work[Tensor]:
        """Begin to sum `flat` in place. All ranks call it.

        Args:
            flat: A tensor of one dim and a floating dtype, of the same length on all ranks.
            way: The leaders' coded exchange.
            name: Name of the call in errors and in the trace.
        """
        job = StagedJob(
            lambda: [Flow(self._reduce_steps(flat, way, name), flat.numel())],
            lambda: flat,
            name,
            self._deadline,
        )
        return self._executor.start_job(job)

    def _reduce_steps(self, flat: Tensor, way: CodedExchange, name: str) -> Steps:
        # A codec works in float32.
        total = flat if flat.dtype == torch.float32 else flat.float()
        if self._inner is not None:
            with self.trace.measure_span("sum", "within"):
                self._inner.all_reduce(total, out=total).wait()
        stages_used = 0
        if self.leaders is not None:
            exchange, result = way(total, self._stage_groups), None
            with self.trace.measure_span(name, "between"):
                while True:
                    try:
                        work = exchange.send(result)
                    except StopIteration as stop:
                        total.copy_(stop.value)
                        break
                    stages_used += 1
                    result = yield work
        # The last stage hands out: pass the stages that this rank had no use for.
        for _ in range(self._stages - stages_used):
            yield None
        if self._handout_group is not None:
            with self.trace.measure_span("hand out", "within"):
                self._handout_group.broadcast(total, root=0).wait()
        if total is not flat:
            flat.copy_(total)

    def _spread_error(self, error: PacelineError) -> BaseException:
        """End the waits of all ranks, and return the error that was first."""
        everyone = self._group.flat if isinstance(self._group, HostsGroup) else self._group
        first = everyone.end_everywhere(error) if isinstance(everyone, EndsTogether) else error
        for group in self._groups:
            group.abort()
        return first

    def close(self) -> None:
        """End the threads and groups. May be called twice."""
        self._end_groups(ViewChanged("this exchange has been closed"), lambda group: group.close())

    def abort(self) -> None:
        """End operations under way, at once, without a word from the other ranks."""
        self._end_groups(ViewChanged("this exchange has been aborted"), lambda group: group.abort())

    def _end_groups(self, error: ViewChanged, end: Callable[[Group], None]) -> None:
        def let_go() -> None:
            for group in self._groups:
                end(group)

        if self._executor.finish(error, let_go):
            self._unregister()


def _duplicate_group(group: Group) -> Group:
    """Make one more group of the same ranks."""
    twin = group.make_subgroup(range(group.size))
    assert twin is not None
    return twin
