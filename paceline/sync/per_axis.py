"""One strategy inside hosts and another between hosts: one for each axis of the mesh.

Sequence((AllReduce(), "local"), (LocalSGD(32), "host"))

host 0   rank 0 -- rank 1     mean gradient of the host, in each step
            |
            |                 mean of the replicas, after every 32 steps
            |
host 1   rank 2 -- rank 3     mean gradient of the host, in each step
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.agreement import Agreement
from paceline.errors import UsageError
from paceline.formatting import format_as_call
from paceline.sync.allreduce import AllReduce, AllReduceSync
from paceline.sync.base import Slot, check_strategy
from paceline.sync.context import SyncContext, rescale_to_part
from paceline.sync.localsgd.strategy import LocalSGD, LocalSGDSync


@dataclass(frozen=True)
class Sequence:
    """Use one strategy inside hosts and another one between hosts.

    >>> pl.start(sync=pl.Sequence((pl.AllReduce(), "local"), (pl.LocalSGD(32), "host")))

    p.grad is the mean over the samples of this worker's host. `step` updates the replica of the
    host. The second strategy makes the replicas of all hosts equal from time to time.

    Args:
        inner: Strategy inside hosts: `(AllReduce(...), "local")`.
        outer: Strategy between hosts: `(LocalSGD(...), "host")`.

    Raises:
        UsageError: Other strategies or axes, or `LocalSGD(after=...)`.
    """

    inner: tuple[AllReduce, str]
    outer: tuple[LocalSGD, str]

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        for part, kind, axis in ((self.inner, AllReduce, "local"), (self.outer, LocalSGD, "host")):
            if (
                not isinstance(part, tuple)
                or len(part) != 2
                or not isinstance(part[0], kind)
                or part[1] != axis
            ):
                raise UsageError(
                    f"{part!r} can't stand there; write Sequence((AllReduce(), 'local'), "
                    "(LocalSGD(32), 'host'))"
                )
        if self.outer[0].quorum is not None:
            raise UsageError(
                f"{self!r}: rounds with a quorum need workers that train at their own pace, and "
                "those of a host are in lockstep here; leave quorum out"
            )
        if self.outer[0].after:
            raise UsageError(
                f"{self!r}: LocalSGD(after=...) begins with mean gradients of all workers, and "
                "Sequence has only those of a host; leave after out"
            )

    def begin(self, context: SyncContext) -> PerAxisSync:
        if context.local is None:
            raise UsageError(
                f"{self!r} needs the host of each worker, which is unknown in this run; "
                "use one strategy for all workers, such as AllReduce()"
            )
        inside = _make_host_context(context)
        return PerAxisSync(
            context, inside, self.inner[0].begin(inside), self.outer[0].begin_in_lockstep(context)
        )


def _make_host_context(context: SyncContext) -> SyncContext:
    """Make a context for the workers of this host. Collective.

    Their exchanges are part of collective calls of all workers, so that all of them handle a loss
    together.
    """
    assert context.local is not None
    group = context.local()
    agreement = Agreement(
        group,
        step=lambda: context.step_state.step,
        hosts=(f"the host of rank {group.global_rank(0)}",) * group.size,
    )
    return dataclasses.replace(
        context, group=group, agreement=agreement, hosts=(0,) * group.size, native=None
    )


class PerAxisSync:
    """The running side of `Sequence`."""

    replicas_diverge = True
    exchanges_in_backward = True

    def __init__(
        self, context: SyncContext, inside: SyncContext, inner: AllReduceSync, outer: LocalSGDSync
    ) -> None:
        self._context, self._inside, self._inner, self._outer = context, inside, inner, outer
        self.has_sync_points = outer.has_sync_points

    def attach(self, slots: Rows[Slot]) -> None:
        self._inner.attach(slots)
        self._outer.attach(slots)

    def take_gradient(self, number: int, grad: Tensor, scale: float) -> None:
        self._inner.take_gradient(number, grad, scale)

    def overwrites(self, number: int, grad: Tensor) -> bool:
        return self._inner.overwrites(number, grad)

    def end_backward(self, where: str) -> list[tuple[int, Tensor]]:
        gradients = self._inner.end_backward(where)
        own_share = torch.tensor([self._context.sum_replica_share()], dtype=torch.float64)
        host_share = float(self._inside.group.all_reduce(own_share, name="part").wait())
        # The gradients are weighted in the global batch. Make them means over this host: its
        # weight among hosts is the outer strategy's business.
        rescale_to_part((gradient for _, gradient in gradients), host_share)
        self._outer.end_backward(where)
        return gradients

    def note_optimizer_step(self, optimizer: Optimizer) -> None:
        self._outer.note_optimizer_step(optimizer)

    def commit(self) -> None:
        self._inner.commit()
        self._outer.commit()

    def replicated_state(self) -> dict[str, Tensor] | None:
        """State of the outer strategy; replicas inside a host are always equal."""
        return self._outer.replicated_state()

    def converge(self) -> None:
        self._outer.converge()

    def abort(self) -> None:
        self._inner.abort()
        self._outer.abort()

    def join_info(self) -> Any:
        return {"inner": self._inner.join_info(), "outer": self._outer.join_info()}

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        layout = self.join_info() if layout is None else layout
        self._context, self._inside = context, _make_host_context(context)
        self._inner.regroup(self._inside, layout["inner"])
        self._outer.regroup(context, layout["outer"])

    def load_from_peer(self, state: dict[str, Any]) -> None:
        self._inner.load_from_peer(state["inner"])
        self._outer.load_from_peer(state["outer"])

    @property
    def has_unreplicated_state(self) -> bool:
        return self._outer.has_unreplicated_state

    def unreplicated_state(self) -> dict[str, Any] | None:
        """State of the outer strategy alone: codecs inside a host keep their residuals."""
        return self._outer.unreplicated_state()

    def load_unreplicated_state(self, state: dict[str, Any], step: int) -> bool:
        return self._outer.load_unreplicated_state(state, step)

    def detach(self) -> None:
        self._inner.detach()
        self._outer.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self._inner.state_dict(), "outer": self._outer.state_dict()}

    def load_state_dicts(self, states: Rows[dict[str, Any]]) -> None:
        """Load the state of every worker.

        Each worker continues with the codec's residuals of the same rank, wherever that rank's host
        was. Residuals of ranks that don't exist any more are dropped.
        """
        saved = [state for state in states if state]
        check_strategy("Sequence", saved, "outer")
        group = self._inside.group
        ranks = [group.global_rank(rank) for rank in range(group.size)]
        own_host = [saved[rank]["inner"] for rank in ranks if rank < len(saved)]
        self._inner.load_state_dicts(own_host)
        self._outer.load_state_dicts([state["outer"] for state in saved])
