"""Optional abilities of strategies: one small interface each, and the set that a run has.

When a run starts, `prepare/abilities.py` checks once which interfaces its strategy implements.
Other code asks `Abilities` and never tests the type of a strategy itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.sample_queue import SampleQueue
from paceline.sync.context import SyncContext
from paceline.trace import ServerWork


@runtime_checkable
class StepObserver(Protocol):
    """A strategy that must be told of each step of an optimizer."""

    def note_optimizer_step(self, optimizer: Optimizer) -> None:
        """Handle a step that `optimizer` has just made."""
        ...


@runtime_checkable
class ConvergesReplicas(Protocol):
    """A strategy whose replicas must be made equal before they are evaluated or saved.

    Copies of parameters outside of the workers, such as on servers, count as replicas too.
    """

    def converge(self) -> None:
        """Make replicas equal before an evaluation, a checkpoint or the end. Collective."""
        ...


@runtime_checkable
class HasSyncPoints(Protocol):
    """A strategy whose replicas differ at some times and are equal at others.

    Without this ability, `Sync.replicas_diverge` holds at all times.
    """

    @property
    def has_sync_points(self) -> bool:
        """Whether the strategy makes all replicas equal between some turns, without `converge`."""
        ...

    def replicated_state(self) -> dict[str, Tensor] | None:
        """State that is equal on all workers between two turns.

        None on all workers if replicas differ at the moment.
        """
        ...


@runtime_checkable
class Recoverable(Protocol):
    """A strategy that continues after workers are lost or join."""

    def join_info(self) -> Any:
        """Facts that a joining worker needs for `regroup`, as JSON values."""
        ...

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Continue with the new group of workers in `context`. Collective.

        Exchanges under way are discarded, or started again.

        Args:
            context: Groups of the new view.
            layout: Result of another worker's `join_info`, the same on all workers. Given if a
                worker has just joined. Default: this worker's own.
        """
        ...

    def load_from_peer(self, state: dict[str, Any]) -> None:
        """Load another worker's `state_dict`, except its residuals.

        The state was taken while replicas were equal. The parameters were copied before.
        """
        ...


@runtime_checkable
class KeepsUnreplicatedState(Protocol):
    """A strategy whose workers have state of their own, which another worker can take over."""

    @property
    def has_unreplicated_state(self) -> bool:
        """Whether this worker may have state that no other worker has. Cheap to ask."""
        ...

    def unreplicated_state(self) -> dict[str, Any] | None:
        """State that this worker alone has between two turns; None if it has none.

        Its tensors are not written to until the next call.
        """
        ...

    def load_unreplicated_state(self, state: dict[str, Any], step: int) -> bool:
        """Take over the `unreplicated_state` that a lost worker had after `step`.

        It is sent later, with this worker's own. Returns False if the state is out of date.
        """
        ...


@runtime_checkable
class RemoteOptimizer(Protocol):
    """A strategy in which optimizers step on servers instead of on the worker."""

    @property
    def attached(self) -> bool:
        """Whether the strategy manages any parameters."""
        ...

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer steps on servers."""
        ...

    def step(self, optimizer: Optimizer) -> None:
        """Step `optimizer` on the servers. Collective in lockstep."""
        ...


@runtime_checkable
class RemoteClipping(Protocol):
    """A strategy that clips gradients on servers, because workers don't have the mean."""

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Clip gradients on the servers, and return their norm as `Run.clip` does.

        `p.grad` isn't changed. Collective in lockstep.

        Args:
            parameters: Parameters whose gradients are clipped together.
            max_norm: Largest norm of their gradients after clipping.
            norm_type: Order of the norm: 2 for the Euclidean norm.
        """
        ...


@runtime_checkable
class LeavesLockstep(Protocol):
    """A strategy that lets workers train out of lockstep."""

    @property
    def sample_queue(self) -> SampleQueue | None:
        """Queue that gives samples to workers out of lockstep; None in lockstep."""
        ...

    @property
    def rows(self) -> Any:
        """Stepper of sparse tables for workers out of lockstep.

        It is a `PerWorkerRowSteps`, which `sync` can't import from `servers`.
        """
        ...


@runtime_checkable
class KeepsServers(Protocol):
    """A strategy that watches its servers and replaces lost ones."""

    @property
    def copies(self) -> Any:
        """Keeper of the servers' copies, a `ServerReplication`; None if a loss ends the run."""
        ...


@runtime_checkable
class ReportsServers(Protocol):
    """A strategy whose servers report their work at the end."""

    def facts(self) -> list[dict[str, Any]]:
        """Facts about the work of each server, for the summary."""
        ...

    def served(self) -> list[ServerWork]:
        """Busy times of each server and their causes, for the timeline."""
        ...


@runtime_checkable
class LendsGradients(Protocol):
    """A strategy that sets p.grad to memory that it writes again in a later pass."""

    def overwrites(self, number: int, grad: Tensor) -> bool:
        """Whether the exchange of this pass writes over `grad`, the p.grad of slot `number`."""
        ...


@dataclass(frozen=True)
class Abilities:
    """The abilities of the running strategy: each field is the strategy itself, or None."""

    observer: StepObserver | None = None
    converging: ConvergesReplicas | None = None
    replicated: HasSyncPoints | None = None
    recoverable: Recoverable | None = None
    unreplicated: KeepsUnreplicatedState | None = None
    lender: LendsGradients | None = None
    remote: RemoteOptimizer | None = None
    clipping: RemoteClipping | None = None
    unlocked: LeavesLockstep | None = None
    keeping: KeepsServers | None = None
    reports: ReportsServers | None = None

    def converge(self) -> None:
        """Make replicas equal if the strategy lets them differ. Collective."""
        if self.converging is not None:
            self.converging.converge()

    @property
    def sample_queue(self) -> SampleQueue | None:
        """Queue that gives samples to workers out of lockstep; None in lockstep."""
        return None if self.unlocked is None else self.unlocked.sample_queue

    @property
    def unlocked_rows(self) -> Any:
        """Stepper of sparse tables for workers out of lockstep; None in lockstep."""
        return (
            None
            if self.unlocked is None or self.unlocked.sample_queue is None
            else self.unlocked.rows
        )
