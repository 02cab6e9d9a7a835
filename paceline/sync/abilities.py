"""What only some strategies can: an interface for each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.sample_queue import SampleQueue
from paceline.trace import Served

if TYPE_CHECKING:
    from paceline.sync.parameterserver.replication import ServerReplication
    from paceline.sync.tables.freerows import UnlockedRows


class PendingParameters(Protocol):
    """Parameters that are on their way."""

    def use(self, parameters: Collection[Any] | None = None) -> None:
        """These parameters (None: all) are about to be used where torch may not ask them: they have to be there."""
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
        """See `Run.clip`; nothing is changed here. Collective, if in lockstep."""
        ...

    @property
    def copies(self) -> ServerReplication | None:
        """Who looks after the servers, where losses are survived."""
        ...

    def servers_begun(self) -> list[str]:
        """What those are called that have begun since in the place of others, where everybody came together for it."""
        ...

    def facts(self) -> list[dict[str, Any]]:
        """What was done elsewhere, for the summary."""
        ...

    def served(self) -> list[Served]:
        """And when, for the timeline."""
        ...


@runtime_checkable
class LendsGradients(Protocol):
    """A strategy that hands out p.grad in memory which it uses again."""

    def overwrites(self, number: int, grad: Tensor) -> bool:
        """Whether the exchange that this pass is for writes over `grad`, which is p.grad of slot `number` now."""
        ...
