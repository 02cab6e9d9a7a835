"""What a strategy is: when replicas agree, told through the same few calls whichever it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.sync.context import SyncContext

if TYPE_CHECKING:
    pass

Axes = tuple[str, ...]


class Slot(NamedTuple):
    """What a strategy is given for each parameter: it is replicated over some axes of the mesh and sharded over others."""

    name: str
    parameter: Parameter
    optimizer: Optimizer | None
    replicate: Axes = ("data",)
    shard: Axes = ()
    scripted: bool = False  # used where Python doesn't see it (torch.jit.script)


class Sync(Protocol):
    """When replicas agree. A strategy is told of every gradient and every step; its docstring says what p.grad is and what step does."""

    @property
    def replicas_diverge(self) -> bool:
        """Whether replicas, and so what their optimizers remember, may differ between two steps."""
        ...

    @property
    def has_sync_points(self) -> bool:
        """Whether there are moments between two turns, without being asked for, at which all replicas are equal."""
        ...

    @property
    def exchanges_in_backward(self) -> bool:
        """Whether backward passes exchange gradients with all workers."""
        ...

    def attach(self, slots: Sequence[Slot]) -> None:
        """Take charge of these parameters (again with more of them at the end, when some were unfrozen)."""
        ...

    def ready(self, number: int, grad: Tensor, scale: float) -> None:
        """Backward has made what it adds to the gradient of slot `number`; it counts `scale` in the mean (0: as zeros)."""
        ...

    def backward_done(self, where: str) -> list[tuple[int, Tensor]]:
        """The outermost backward has ended, or a rank without one joins it: number and final addend of each slot that any rank has used."""
        ...

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer has stepped."""
        ...

    def commit(self) -> None:
        """The turn of the loader is over and nothing failed."""
        ...

    def abort(self) -> None:
        """The turn has failed: forget what it exchanged."""
        ...

    def replicated_state(self) -> dict[str, Tensor] | None:
        """Between two turns: what it keeps that is equal on all workers, as all replicas are now; None, on all workers, if they aren't."""
        ...

    def converge(self) -> None:
        """Replicas are about to be looked at as one (evaluated, saved, ended): make them equal. Collective."""
        ...

    def join_info(self) -> Any:
        """What who has just come has to know for `regroup`: JSON."""
        ...

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """The workers are others now: go on with the new group of the scene. Collective; what was under way is void, or sent anew.

        `layout`: what `layout` gave where somebody has just come, on all workers.
        """
        ...

    def load_from_peer(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` gave on another worker when replicas were equal, but for its residuals; the parameters are here."""
        ...

    @property
    def has_unreplicated_state(self) -> bool:
        """Whether this worker may have something that no other has; quick."""
        ...

    def unreplicated_state(self) -> dict[str, Any] | None:
        """What this worker alone has, between two turns; None if that is nothing. Its tensors stay as they are until the next call."""
        ...

    def load_unreplicated_state(self, state: dict[str, Any], step: int) -> bool:
        """What `own` gave after `step` on a worker that is lost becomes mine to send; False where that is out of date, or can't be used."""
        ...

    def detach(self) -> None:
        """Let go of parameters and memory."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What has to survive of this worker: residuals, outer optimizers, clocks. The turn under way counts as over."""
        ...

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Take up what `state_dict` gave on each worker, in rank order; there may be more or fewer workers now. Collective."""
        ...


class Strategy(Protocol):
    """A strategy as it is written: plain data that `begin` turns into what runs."""

    def begin(self, context: SyncContext) -> Sync:
        """Start running in this scene."""
        ...
