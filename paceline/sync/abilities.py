"""What only some strategies can: an interface for each, and the value that says which of them the running one has.

`session/prepare/abilities.py` finds out once, when a run starts; nobody asks again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.sample_queue import SampleQueue
from paceline.sync.context import SyncContext
from paceline.trace import Served

if TYPE_CHECKING:
    from paceline.sync.parameterserver.replication import ServerReplication
    from paceline.sync.tables.freerows import UnlockedRows


@runtime_checkable
class StepObserver(Protocol):
    """A strategy that has to know of each step of an optimizer."""

    def stepped(self, optimizer: Optimizer) -> None:
        """Take note that this optimizer has stepped."""
        ...


@runtime_checkable
class Converging(Protocol):
    """A strategy under which replicas, or what stands for them elsewhere, have to be made equal before they are looked at as one."""

    def converge(self) -> None:
        """Make replicas equal, as they are about to be evaluated, saved or ended. Collective."""
        ...


@runtime_checkable
class Replicated(Protocol):
    """A strategy under which replicas differ at times and are equal at others. Without it they always are as `replicas_diverge` says."""

    @property
    def has_sync_points(self) -> bool:
        """Whether there are moments between two turns, without being asked for, at which all replicas are equal."""
        ...

    def replicated_state(self) -> dict[str, Tensor] | None:
        """Give, between two turns, what is kept here and equal on all workers, as all replicas are; None, on all, if they differ."""
        ...


@runtime_checkable
class Recoverable(Protocol):
    """A strategy that goes on when workers are lost, or others come."""

    def join_info(self) -> Any:
        """Give what a worker that has just come has to know for `regroup`: JSON."""
        ...

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Go on with the context's new group of workers. Collective; what was under way is discarded, or sent anew.

        `layout`: what `join_info` gave, on all workers, where somebody has just come.
        """
        ...

    def load_from_peer(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave on another worker when replicas were equal, but for its residuals; the parameters are here."""
        ...


@runtime_checkable
class Unreplicated(Protocol):
    """A strategy under which a worker has something that no other has, and that another can go on with when it is lost."""

    @property
    def has_unreplicated_state(self) -> bool:
        """Whether this worker may have something that no other has; quick."""
        ...

    def unreplicated_state(self) -> dict[str, Any] | None:
        """Give, between two turns, what this worker alone has; None for nothing. Its tensors stay as they are until the next call."""
        ...

    def load_unreplicated_state(self, state: dict[str, Any], step: int) -> bool:
        """Send later, as mine, what a lost worker's `unreplicated_state` gave after `step`; False where that is out of date."""
        ...


class PendingParameters(Protocol):
    """Parameters that are on their way."""

    def use(self, parameters: Collection[Any] | None = None) -> None:
        """Wait for the values of these parameters (None: all), which are about to be used where torch doesn't ask for them."""
        ...

    def end(self) -> None:
        """The run is over, here at least: parameters are plain ones again."""
        ...


@runtime_checkable
class RemoteOptimizer(Protocol):
    """A strategy in which optimizers step elsewhere than here."""

    @property
    def attached(self) -> bool:
        """Whether it has charge of any parameters."""
        ...

    @property
    def sample_queue(self) -> SampleQueue | None:
        """Where workers that are not in lockstep while they train get their samples; None where they are."""
        ...

    def steps(self, optimizer: Optimizer) -> bool:
        """Whether this one does."""
        ...

    @property
    def rows(self) -> UnlockedRows:
        """What steps sparse tables with them, where workers are not in lockstep."""
        ...

    @property
    def arriving(self) -> PendingParameters | None:
        """What knows of the parameters that are on their way after a step; None where they have come with it."""
        ...

    def step(self, optimizer: Optimizer) -> None:
        """Have it step. Collective, if in lockstep."""
        ...

    def clip(self, parameters: Sequence[Tensor], max_norm: float, norm_type: float) -> Tensor:
        """Return the norm of the gradients and let servers clip by it, as `Run.clip` says; `p.grad` stays. Collective, if in lockstep."""
        ...

    @property
    def copies(self) -> ServerReplication | None:
        """Return what looks after the copies of servers, or None where losses aren't survived."""
        ...

    def servers_begun(self) -> list[str]:
        """What those are called that have begun since in the place of others, where everybody came together for it."""
        ...

    def facts(self) -> list[dict[str, Any]]:
        """What was done elsewhere, for the summary."""
        ...

    def served(self) -> list[Served]:
        """Return what each server has been busy with and when, for the timeline."""
        ...


@runtime_checkable
class LendsGradients(Protocol):
    """A strategy that hands out p.grad in memory which it uses again."""

    def overwrites(self, number: int, grad: Tensor) -> bool:
        """Whether the exchange that this pass is for writes over `grad`, which is p.grad of slot `number` now."""
        ...


@dataclass(frozen=True)
class Abilities:
    """What the running strategy can beyond the core that `Sync` is: the strategy itself, or None where it can't."""

    observer: StepObserver | None = None
    converging: Converging | None = None
    replicated: Replicated | None = None
    recoverable: Recoverable | None = None
    unreplicated: Unreplicated | None = None
    lender: LendsGradients | None = None
    remote: RemoteOptimizer | None = None

    def converge(self) -> None:
        """Make replicas equal, where they may not be. Collective."""
        if self.converging is not None:
            self.converging.converge()

    @property
    def sample_queue(self) -> SampleQueue | None:
        """Where workers that are not in lockstep while they train get their samples; None where they are."""
        return None if self.remote is None else self.remote.sample_queue
