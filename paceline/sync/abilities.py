"""Abilities that only some strategies have: one interface each, and the set that a run has.

`prepare/abilities.py` finds them out once, when a run starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.sample_queue import SampleQueue
from paceline.sync.context import SyncContext
from paceline.trace import Served


@runtime_checkable
class StepObserver(Protocol):
    """A strategy that has to know of each step of an optimizer."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Take note that this optimizer has stepped."""
        ...


@runtime_checkable
class Converging(Protocol):
    """A strategy whose replicas must be made equal before they are looked at as one.

    Copies of parameters that lie elsewhere count as replicas, too.
    """

    def converge(self) -> None:
        """Make replicas equal, as they are about to be evaluated, saved or ended. Collective."""
        ...


@runtime_checkable
class Replicated(Protocol):
    """A strategy under which replicas differ at times and are equal at others.

    Other strategies always are as `replicas_diverge` says.
    """

    @property
    def has_sync_points(self) -> bool:
        """Whether all replicas become equal by themselves at some moments between two turns."""
        ...

    def replicated_state(self) -> dict[str, Tensor] | None:
        """State that is equal on all workers between two turns, if replicas are; else None on
        all.
        """
        ...


@runtime_checkable
class Recoverable(Protocol):
    """A strategy that goes on when workers are lost, or others join."""

    def join_info(self) -> Any:
        """Facts that a joining worker needs for `regroup`, as JSON values."""
        ...

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Go on with the context's new group of workers.

        Collective; what was under way is discarded, or sent anew.

        `layout`: what `join_info` returned, on all workers, where a worker has just joined.
        """
        ...

    def load_from_peer(self, state: dict[str, Any]) -> None:
        """Load another worker's `state_dict`, except its residuals.

        It was made while replicas were equal. Parameters are here already.
        """
        ...


@runtime_checkable
class Unreplicated(Protocol):
    """A strategy whose workers have state of their own, which another worker can take over."""

    @property
    def has_unreplicated_state(self) -> bool:
        """Whether this worker may have something that no other has; quick."""
        ...

    def unreplicated_state(self) -> dict[str, Any] | None:
        """Return, between two turns, what this worker alone has; None for nothing.

        Its tensors stay as they are until the next call.
        """
        ...

    def load_unreplicated_state(self, state: dict[str, Any], step: int) -> bool:
        """Take over a lost worker's `unreplicated_state` of after `step`, to send it later.

        Returns False where it is out of date.
        """
        ...


@runtime_checkable
class RemoteOptimizer(Protocol):
    """A strategy in which optimizers step on servers instead of on the worker."""

    @property
    def attached(self) -> bool:
        """Whether the strategy has charge of any parameters."""
        ...

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer steps on servers."""
        ...

    def step(self, optimizer: Optimizer) -> None:
        """Let an optimizer step on servers. Collective, if in lockstep."""
        ...


@runtime_checkable
class RemoteClipping(Protocol):
    """A strategy that clips gradients on servers, as a worker doesn't have their mean."""

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Let servers clip by the norm of the gradients, and return it, as `Run.clip` does.

        `p.grad` stays as it is. Collective, if in lockstep.
        """
        ...


@runtime_checkable
class Unlocked(Protocol):
    """A strategy in which workers may leave lockstep while they train."""

    @property
    def sample_queue(self) -> SampleQueue | None:
        """Queue from which workers out of lockstep take their samples; None in lockstep."""
        ...

    @property
    def rows(self) -> Any:
        """Stepper of sparse tables for workers out of lockstep (a `PerWorkerRowSteps` of
        `servers`).
        """
        ...


@runtime_checkable
class ServerKeeping(Protocol):
    """A strategy that looks after servers, and starts others in place of lost ones."""

    @property
    def copies(self) -> Any:
        """Keeper of the servers' copies (a `ServerReplication`); None if losses aren't survived."""
        ...


@runtime_checkable
class ServerReports(Protocol):
    """A strategy whose servers tell at the end what they have done."""

    def facts(self) -> list[dict[str, Any]]:
        """Facts about the work of each server, for the summary."""
        ...

    def served(self) -> list[Served]:
        """Busy times of each server and their causes, for the timeline."""
        ...


@runtime_checkable
class LendsGradients(Protocol):
    """A strategy that hands out p.grad in memory that it uses again."""

    def overwrites(self, number: int, grad: Tensor) -> bool:
        """Whether the exchange of this pass writes over `grad`, the present p.grad of slot
        `number`.
        """
        ...


@dataclass(frozen=True)
class Abilities:
    """The abilities of the running strategy: for each the strategy itself, or None."""

    observer: StepObserver | None = None
    converging: Converging | None = None
    replicated: Replicated | None = None
    recoverable: Recoverable | None = None
    unreplicated: Unreplicated | None = None
    lender: LendsGradients | None = None
    remote: RemoteOptimizer | None = None
    clipping: RemoteClipping | None = None
    unlocked: Unlocked | None = None
    keeping: ServerKeeping | None = None
    reports: ServerReports | None = None

    def converge(self) -> None:
        """Make replicas equal, where they may not be. Collective."""
        if self.converging is not None:
            self.converging.converge()

    @property
    def sample_queue(self) -> SampleQueue | None:
        """Queue from which workers out of lockstep take their samples; None in lockstep."""
        return None if self.unlocked is None else self.unlocked.sample_queue

    @property
    def unlocked_rows(self) -> Any:
        """Steps sparse tables where workers are not in lockstep; None in lockstep."""
        return (
            None
            if self.unlocked is None or self.unlocked.sample_queue is None
            else self.unlocked.rows
        )
