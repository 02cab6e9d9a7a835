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
    """A parameter as strategies see it: replicated over some axes of the mesh, sharded over
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
        """Make these parameters whole for a backward through their layers. Collective.

        Tensors that go with them are made whole, too.
        """
        ...

    def end_pass(self) -> None:
        """Deliver what is left of a backward pass. Collective."""
        ...

    def abort_pass(self) -> None:
        """Forget a pass that has failed."""
        ...


def check_strategy(strategy: str, states: Iterable[Mapping[str, Any]], key: str) -> None:
    """Raise `UsageError` if a state from a checkpoint lacks `key`.

    Every state that this strategy writes has it.
    """
    if any(key not in state for state in states):
        raise UsageError(
            f"this checkpoint was written with another kind of strategy than {strategy}; "
            "resume with that one"
        )


class Sync(Protocol):
    """A running strategy: it gets every gradient and every end of a turn, and makes replicas agree.

    The docstring of each strategy says what p.grad is and what `step` does. Features of some
    strategies alone are abilities (`sync/abilities.py`).
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
        """Take charge of these parameters; called again when some were unfrozen, which come
        last.
        """
        ...

    def take_gradient(self, number: int, grad: Tensor, scale: float) -> None:
        """Take the part that backward adds to the gradient of slot `number`.

        `scale` is its weight in the mean; 0 means zeros.
        """
        ...

    def end_backward(self, where: str) -> list[tuple[int, Tensor]]:
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
        """State of this worker that must survive: residuals, outer optimizers, clocks.

        The turn under way counts as over.
        """
        ...

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        """Load the `state_dict` of every worker, in rank order. Collective.

        There may be more or fewer workers now.
        """
        ...


class Strategy(Protocol):
    """A strategy as it is written: plain data that `begin` turns into a running `Sync`."""

    def begin(self, context: SyncContext) -> Sync:
        """Start running with these groups."""
        ...
