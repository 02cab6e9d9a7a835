"""The group over several hosts: one copy per host crosses the network, however ranks lie on hosts.

    host 0   ranks 0 2   sum ─┐ leader 0 ──┐               chunk   0    1    2    3
    host 1   ranks 1 3   sum ─┘ leader 1 ──┴─ all-reduce   inside  ██   ██   ██   ██
                                                           between   ████ ████ ████ ████
    and each leader hands the result out on its host       out             █    █    █    █

Tensors follow each other through the three stages, large ones in chunks, so that the network, the
slowest stage, never waits. Each rank has two threads for this: one sums, the other hands out. So
the next tensor is summed while the one before is on the network. Each thread has a group of its
own inside the host, on which it alone decides the order of calls. `all_reduce` returns at once.

All-gather and reduce-scatter go through the same threads, by `rails`, if all hosts have the same
number of workers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from paceline.at_exit import call_at_exit
from paceline.comm import fingerprint, reduction_rules
from paceline.comm.collectives import (
    GeneratorWork,
    UncheckedExchange,
    all_gather_by_exchange,
    all_reduce_by_schedule_agreed,
)
from paceline.comm.group_protocol import (
    Group,
    Op,
    Traffic,
    UncheckedReduceScatter,
    Work,
    piece_bounds,
)
from paceline.comm.hierarchy.chunks import WIDTH
from paceline.comm.hierarchy.rails import SMALL, Rails, is_even
from paceline.comm.hierarchy.staged_executor import Flow, StagedExecutor, StagedJob
from paceline.comm.hierarchy.staged_reduction import CROSSINGS, ReductionStages, StagedReduction
from paceline.comm.schedule import Schedule
from paceline.comm.shm.shared_group import SharedGroup
from paceline.comm.shm.shared_segment import empty_on_cpu
from paceline.errors import Mismatch, PacelineError, UsageError, ViewChanged
from paceline.trace import Trace

SHORT = WIDTH  # elements up to which the waiting thread may take a tensor through all stages itself
GATHERS = 1 << 21  # first tag of gathers over all ranks; the network's own calls have smaller tags


@runtime_checkable
class EndsTogether(Protocol):
    """A group that the caller can end on all ranks with an error of its own."""

    def end_everywhere(self, error: PacelineError) -> PacelineError:
        """End everything under way on all ranks, and return the error that all of them raise.

        It is `error`, or the error of the rank that ended the group first.
        """
        ...


@runtime_checkable
class ComparesCalls(Protocol):
    """A group that compares calls in one short message."""

    def check_call(self, call: fingerprint.CallFingerprint, extra: bytes = b"") -> list[bytes]:
        """Compare the next call on all ranks, and return every rank's `extra`, in rank order.

        Raises `Mismatch` on all ranks if they are not about to make the same call.
        """
        ...


@runtime_checkable
class CarriesSmall(Protocol):
    """A group whose comparison of an all-reduce carries tensors, if they are small."""

    def carries_with_comparison(self, x: Tensor) -> bool:
        """Whether `x` is so small."""
        ...


class HostsGroup:
    """The workers of several hosts (a `Group`). It takes charge of the three groups it is made of.

    Args:
        inner: The workers of this host.
        outer: The leaders: the first worker of each host. None on workers that don't lead.
        flat: All workers, for calls that don't go by hosts.
        hosts: Host of each rank.
        deadline: Seconds that a wait for other ranks may take. Default: 120.
        trace: Gets a span "within" for each sum and each handing out inside the host, and a span
            "between" for each exchange of leaders. Default: none.
    """

    def __init__(
        self,
        inner: Group,
        outer: Group | None,
        flat: Group,
        hosts: Sequence[int],
        *,
        deadline: float = 120.0,
        trace: Trace | None = None,
    ) -> None:
        self.rank, self.size, self.view = flat.rank, flat.size, flat.view
        self.inner, self.outer, self.flat, self.hosts = inner, outer, flat, tuple(hosts)
        if len(self.hosts) != self.size:
            raise UsageError(
                f"hosts has {len(self.hosts)} entries for {self.size} ranks; "
                "give the host of each rank"
            )
        self.trace, self.deadline = Trace(0) if trace is None else trace, deadline
        self._gathers = 0  # gives gathers under way at the same time tags of their own
        self._deadline = 2 * deadline  # of jobs; the groups beneath find the missing ranks earlier
        # Sums are handed out in a second group of this host: the thread that does it must not
        # depend on the order of the thread that sums.
        self._handout_group = inner.make_subgroup(range(inner.size)) if inner.size > 1 else None
        if isinstance(inner, SharedGroup) and isinstance(self._handout_group, SharedGroup):
            self._handout_group.share_moved_memory(inner)
        self._stages = ReductionStages(inner, outer, self._handout_group, self.size, self.trace)
        self._rails: Rails | None = None  # all ranks have them, or none
        self._executor = StagedExecutor("hosts", 2, self._spread_error)
        # A thread that is inside torch while Python ends takes the process down with it.
        self._unregister = call_at_exit(self.close)

    @property
    def _other_groups(self) -> list[Group]:
        """All groups but `flat`."""
        rail = None if self._rails is None else self._rails.rail
        return [
            group
            for group in (self.outer, rail, self.inner, self._handout_group)
            if group is not None
        ]

    @property
    def traffic(self) -> Traffic:
        """Number of bytes that this rank has sent through all groups."""
        return sum((group.traffic for group in (*self._other_groups, self.flat)), Traffic())

    @property
    def waited(self) -> float:
        """Seconds spent waiting for slower ranks, in agreements and compared calls."""
        return self.flat.waited

    def _spread_error(self, error: PacelineError) -> BaseException:
        """End the waits of all ranks, and return the error that was first.

        An error inside one host is unknown on the others, so `flat` tells them.
        """
        first = self.flat.end_everywhere(error) if isinstance(self.flat, EndsTogether) else error
        for group in self._other_groups:
            group.abort()
        return first

    def _compare_call(self, call: fingerprint.CallFingerprint, rows: int = 0) -> list[int]:
        """Compare `call` on all ranks, and return every rank's number of rows."""
        if isinstance(self.flat, ComparesCalls):
            return [
                struct.unpack("<q", answer)[0]
                for answer in self.flat.check_call(call, struct.pack("<q", rows))
            ]
        answers = self.flat.gather_objects([str(call), call.flaw, rows], name=call.kind)
        fingerprint.check_calls_agree([(text, flaw) for text, flaw, _ in answers])
        return [count for _, _, count in answers]

    # ---- reductions

    def all_reduce(
        self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None
    ) -> Work[Tensor]:
        # A tiny tensor crosses with the comparison, from every rank to every rank: one round trip.
        if isinstance(self.flat, CarriesSmall) and self.flat.carries_with_comparison(x):
            return self.flat.all_reduce(x, op=op, name=name, out=out)
        self._compare_call(fingerprint.reduction_call("all_reduce", x, op, name, out))
        return self.all_reduce_agreed(x, op=op, out=out)

    def all_reduce_moving(self, x: Tensor, *, op: Op = "sum", may_move: bool) -> Work[Tensor]:
        """Reduce `x` in place, and move its memory first if all ranks of this host allow it.

        It moves into memory that all ranks of the host have mapped: see `shm.moving`.
        """
        self._compare_call(fingerprint.reduction_call("all_reduce", x, op, None, x))
        return self._start_reduction(x, op, x, may_move=may_move)

    def all_reduce_agreed(
        self,
        x: Tensor,
        *,
        op: Op = "sum",
        out: Tensor | None = None,
        across: Schedule | None = None,
        soon: bool = False,
    ) -> Work[Tensor]:
        """Reduce as `all_reduce` does, without comparing first.

        Args:
            x: A tensor that is known to be the same on all ranks in shape and dtype.
            op: "sum" (default), "mean", "min", "max" or "product".
            out: Where the result goes; may be `x`. Default: a new tensor.
            across: Schedule between leaders, the same on all ranks. Default: their group's own.
            soon: Whether this rank waits for the result before it does anything else.
        """
        return self._start_reduction(x, op, out, across=across, soon=soon)

    def _start_reduction(
        self,
        x: Tensor,
        op: Op,
        out: Tensor | None,
        *,
        across: Schedule | None = None,
        soon: bool = False,
        may_move: bool | None = None,
    ) -> Work[Tensor]:
        """Reduce a tensor that all ranks agree on.

        `may_move`: whether the memory of `x` may move; None if this is not a moving call. Either
        all ranks of a host make a moving call, or none.
        """
        reduction = StagedReduction(self._stages, x, op, out, across=across, may_move=may_move)
        what = f"all_reduce of {x.numel()} elements over {len(set(self.hosts))} hosts"
        outputs = () if out is None else [out]
        job = StagedJob(reduction.flows, reduction.conclude, what, self._deadline, outputs)
        return self._executor.start_job(job, soon=soon and x.numel() <= SHORT)

    def reduce_by_schedule(self, x: Tensor, plan: Schedule, op: Op, out: Tensor) -> Work[Tensor]:
        """Reduce by a schedule of all ranks over the network, as `RunsSchedules` describes."""
        return all_reduce_by_schedule_agreed(self.flat, x, plan, op, out=out)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Allocate memory that is registered with this host's group."""
        tensor: Tensor = self._run_in_turn(lambda: self.inner.empty(shape, dtype), "empty")
        return tensor

    def stand_in(self, x: Tensor) -> None:
        """Use `x` in place of this rank's registered memory, as `SharedGroup` does."""
        stand_in = getattr(self.inner, "stand_in", None)
        if stand_in is not None:
            self._run_in_turn(lambda: stand_in(x), "stand in")

    def release(self, x: Tensor) -> None:
        """Forget registered memory."""
        release = getattr(self.inner, "release", None)
        if release is not None and self._executor.broken is None:
            self._run_in_turn(lambda: release(x), "release")

    def _run_in_turn(self, act: Callable[[], Any], what: str) -> Any:
        """Run `act` after the sums that were started before: both use this host's group."""
        results: list[Any] = []

        def flows() -> Sequence[Flow]:
            results.append(act())
            return ()

        return self._executor.start_job(
            StagedJob(flows, lambda: results[0], what, self._deadline)
        ).wait()

    # ---- rails

    def connect(self) -> None:
        """Connect the rails, if all hosts have the same number of workers. Collective.

        Compared calls connect them when they first need them. Other calls use them once they are
        there.
        """
        if self._rails is None and self._handout_group is not None and is_even(self.hosts):
            self._rails = Rails.connect_rails(
                self.flat, self.inner, self._handout_group, self.hosts, self.trace
            )

    def _rails_for(self, x: Tensor, nbytes: int, *, compared: bool) -> Rails | None:
        """Return the rails if they are faster for pieces of `nbytes` than all ranks at once."""
        if nbytes < SMALL or x.device.type != "cpu":
            return None
        if compared:  # all ranks are here, so they can connect
            self.connect()
        return self._rails

    def reduce_scatter(self, x: Tensor, *, op: Op = "sum", name: str | None = None) -> Work[Tensor]:
        return self.reduce_scatter_into(x, None, op=op, name=name)

    def reduce_scatter_into(
        self, x: Tensor, out: Tensor | None, *, op: Op = "sum", name: str | None = None
    ) -> Work[Tensor]:
        """Reduce `x`, and write piece `rank` to `out`, as `WritesResults` describes.

        `out`: None for a new tensor.
        """
        self._compare_call(fingerprint.reduction_call("reduce_scatter", x, op, name))
        return self._reduce_scatter(x, op, out, compared=True)

    def reduce_scatter_agreed(self, x: Tensor, *, op: Op = "sum") -> Work[Tensor]:
        """Reduce without comparing first; over rails if they are connected."""
        return self._reduce_scatter(x, op, None, compared=False)

    def _reduce_scatter(
        self, x: Tensor, op: Op, out: Tensor | None, *, compared: bool
    ) -> Work[Tensor]:
        reduction_rules.check_operation(op, x.dtype)
        rails = self._rails_for(x, x.numel() * x.element_size() // self.size, compared=compared)
        if rails is None:
            flat = self.flat
            work = (
                flat.reduce_scatter_agreed(x, op=op)
                if isinstance(flat, UncheckedReduceScatter)
                else flat.reduce_scatter(x, op=op)
            )
            return work if out is None else _copy_results(work, [out], out)
        start, stop = piece_bounds(x.numel(), self.size)[self.rank]
        piece = empty_on_cpu((stop - start,), x.dtype) if out is None else out
        what = f"reduce_scatter of {x.numel()} elements over {len(set(self.hosts))} hosts"
        return self._executor.start_job(
            StagedJob(
                lambda: rails.reduce_flows(x, piece, op),
                lambda: piece,
                what,
                self._deadline,
                [piece],
            )
        )

    def all_gather(self, x: Tensor, *, name: str | None = None) -> Work[list[Tensor]]:
        return self.all_gather_into(x, None, name=name)

    def all_gather_into(
        self, x: Tensor, outs: Sequence[Tensor] | None, *, name: str | None = None
    ) -> Work[list[Tensor]]:
        """Gather every rank's `x` into `outs`: contiguous tensors of the shape and dtype of `x`.

        `outs`: None for new tensors, each of the number of rows that its rank has.
        """
        call = fingerprint.rows_call("all_gather", x, name)
        rows = self._compare_call(call, x.shape[0] if x.dim() else 0)
        same_rows = len(set(rows)) == 1
        if outs is not None and not same_rows:
            counts = ", ".join(map(str, rows))
            raise Mismatch(
                f"{call}: ranks bring {counts} rows; bring as many on each, as results go to "
                "tensors of one shape"
            )
        # Rails cut all pieces into chunks alike, so they need pieces of one shape.
        rails = (
            self._rails_for(x, x.numel() * x.element_size(), compared=True) if same_rows else None
        )
        if rails is None:
            return self._gather_flat(
                x,
                [(count, *x.shape[1:]) if x.dim() else () for count in rows],
                None if outs is None else list(outs),
            )
        gathered = [empty_on_cpu(x.shape, x.dtype) for _ in rows] if outs is None else list(outs)
        what = f"all_gather of {x.numel()} elements over {len(set(self.hosts))} hosts"
        job = StagedJob(
            lambda: rails.gather_flows(x, gathered),
            lambda: gathered,
            what,
            self._deadline,
            gathered,
        )
        return self._executor.start_job(job)

    def _gather_flat(
        self, x: Tensor, shapes: Sequence[Sequence[int]], outs: list[Tensor] | None
    ) -> Work[list[Tensor]]:
        """Gather from all ranks at once. All have agreed on the shapes."""
        # Several may be under way at a time: each has a tag of its own.
        self._gathers = (self._gathers + 1) % CROSSINGS
        work = all_gather_by_exchange(self.flat, x, shapes, tag=GATHERS + self._gathers)
        return work if outs is None else _copy_results(work, outs, outs)

    # ---- everything else goes over all ranks at once

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        return self.flat.exchange(sends, recvs, tag=tag)

    def exchange_agreed(
        self,
        sends: Sequence[tuple[int, Tensor]],
        recvs: Sequence[tuple[int, Tensor]],
        *,
        tag: int = 0,
    ) -> Work[None]:
        """Exchange without comparing first, if the network can."""
        exchange = (
            self.flat.exchange_agreed
            if isinstance(self.flat, UncheckedExchange)
            else self.flat.exchange
        )
        return exchange(sends, recvs, tag=tag)

    def broadcast(self, x: Tensor, *, root: int = 0, name: str | None = None) -> Work[Tensor]:
        return self.flat.broadcast(x, root=root, name=name)

    def all_to_all(self, xs: Sequence[Tensor], *, name: str | None = None) -> Work[list[Tensor]]:
        return self.flat.all_to_all(xs, name=name)

    def barrier(self, *, name: str | None = None) -> Work[None]:
        return self.flat.barrier(name=name)

    def gather_objects(self, obj: Any, *, name: str | None = None) -> list[Any]:
        return self.flat.gather_objects(obj, name=name)

    def gather_bytes(self, payload: bytes) -> list[bytes]:
        return self.flat.gather_bytes(payload)

    def make_subgroup(self, ranks: Sequence[int]) -> Group | None:
        """Make the group of these ranks, over the network even if all are on one host.

        `axes.make_fast_subgroup` uses shared memory.
        """
        return self.flat.make_subgroup(ranks)

    def global_rank(self, rank: int) -> int:
        return self.flat.global_rank(rank)

    def close(self) -> None:
        self._end_groups(ViewChanged("this group has been closed"), lambda group: group.close())

    def abort(self) -> None:
        self._end_groups(ViewChanged("this group has been aborted"), lambda group: group.abort())

    def _end_groups(self, error: ViewChanged, end: Callable[[Group], None]) -> None:
        def let_go() -> None:
            for group in (*self._other_groups, self.flat):
                end(group)

        if self._executor.finish(error, let_go):
            self._unregister()
        else:
            let_go()  # the threads ended earlier: an aborted group is closed as well


def _copy_results(work: Work[Any], outs: list[Tensor], result: Any) -> Work[Any]:
    """Copy the result of `work` to `outs` when it is there; the new Work gives `result`."""

    def steps() -> Generator[Work[Any], None, Any]:
        yield work
        results = work.wait()
        for out, part in zip(
            outs, [results] if isinstance(results, Tensor) else results, strict=True
        ):
            out.detach().copy_(part)
        return result

    return GeneratorWork(steps(), outs)
