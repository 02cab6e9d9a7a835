"""Interfaces of a strategy: as a user writes it (`Strategy`), and as it runs (`Sync`)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.sync.context import SyncContext

Axes = tuple[str, ...]


class Slot(NamedTuple):
    """A parameter as strategies see it: replicated over some axes of the mesh and sharded over
    others.
    """

    name: str
    parameter: Parameter
    optimizer: Optimizer | None
    replicate: Axes = ("data",)
    shard: Axes = ()


class GradientSource(Protocol):
    """Gradients of parameters that are cut, which autograd doesn't add to them.

    Every worker ends every backward pass.
    """

    def deliver_to(self, sink: Any) -> None:
        """Hand gradients to a `GradientTracker` from now on."""
        ...

    def gather(self, parameters: Sequence[Tensor]) -> None:
        """Make these parameters whole, and what goes with them, for a backward through their
        layers. Collective.
        """
        ...

    def end_pass(self) -> None:
        """Deliver what is left of a backward pass. Collective."""
        ...

    def abort_pass(self) -> None:
        """Forget a pass that has failed."""
        ...


def check_strategy(strategy: str, states: Iterable[Mapping[str, Any]], key: str) -> None:
    """Raise `UsageError` where a state from a checkpoint lacks `key`, which each state that this
    strategy writes has.
    """
    if any(key not in state for state in states):
        raise UsageError(
            f"this checkpoint was written with another kind of strategy than {strategy}; "
            "resume with that one"
        )


class Sync(Protocol):
    """A running strategy, which is given every gradient, and told of the end of every turn: it
    decides when replicas agree.

    Its docstring says what p.grad is and what `step` does. What only some strategies can is an
    ability (`sync/abilities.py`).
    """

    @property
    def replicas_diverge(self) -> bool:
        """Whether replicas, and so the state of their optimizers, may differ between two steps."""
        ...

    @property
    def exchanges_in_backward(self) -> bool:
        """Whether backward passes exchange gradients with all workers."""
        ...

    def attach(self, slots: Sequence[Slot]) -> None:
        """Take charge of these parameters (again with more of them at the end, when some were
        unfrozen).
        """
        ...

    def ready(self, number: int, grad: Tensor, scale: float) -> None:
        """Take what backward adds to the gradient of slot `number`; it counts `scale` in the
        mean (0: as zeros).
        """
        ...

    def backward_done(self, where: str) -> list[tuple[int, Tensor]]:
        """End the outermost backward, or join those of other ranks.

        Returns number and final addend of each slot that any rank has used.
        """
        ...

    def commit(self) -> None:
        """End the turn of the loader, in which nothing has failed."""
        ...

    def abort(self) -> None:
        """Discard what the turn has exchanged, as it has failed."""
        ...

    def detach(self) -> None:
        """Release parameters and memory."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return what has to survive of this worker: residuals, outer optimizers, clocks.

        The turn under way counts as over.
        """
        ...

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Go on from every worker's `state_dict`, in rank order; there may be more or fewer
        workers now. Collective.
        """
        ...


class Strategy(Protocol):
    """A strategy as it is written: plain data that `begin` turns into a running `Sync`."""

    def begin(self, context: SyncContext) -> Sync:
        """Start running with these groups."""
        ...
