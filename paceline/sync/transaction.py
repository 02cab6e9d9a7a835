"""Transactions: the collective calls of a step succeed on all workers or on none.

    begin_turn -> end_backward, step_remotely, gather_rows -> begin_turn    the turn has succeeded
        ^                                          |
        +--------------- roll_back <---------------+                        a worker was lost

`PlainTransaction` is for runs that end when a worker is lost, so it never rolls back.
`elastic.transaction` has the transaction of runs that continue.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from paceline.sync.base import Sync
from paceline.sync.context import SyncContext

T = TypeVar("T")
# Number of each parameter that any worker has used, and the tensor to add to its p.grad.
Addends = list[tuple[int, Tensor]]
Deliver = Callable[[int, Tensor, float], None]


class Transaction(Protocol):
    """The transaction of a turn of the loader."""

    failed: bool  # a call of this turn has had no result, on all workers
    recovers: bool  # the run continues after a worker is lost

    def begin_turn(self, *, leads: bool, passes: int) -> None:
        """Begin a turn.

        Args:
            leads: Whether the turn is a step.
            passes: Number of exchanges of gradients in the last turn.
        """
        ...

    def gradient_receiver(self) -> Deliver:
        """Function that takes the gradients of the pass that begins."""
        ...

    def end_backward(self, act: Callable[[], Addends]) -> Addends:
        """Call `act`, which ends a backward pass; return its addends, or zeros if it has failed."""
        ...

    def note_step(self, *, remote: bool) -> None:
        """Prepare for the step of an optimizer. `remote`: the step is made on servers."""
        ...

    def step_remotely(
        self, act: Callable[[], T], what: str, *, last: bool = False, apart: bool = False
    ) -> T | None:
        """Call `act`, which steps on servers; return its result, or None if it has failed.

        Args:
            act: The call.
            what: Name of the call in errors.
            last: Whether nothing after this call can fail the step. Default: False.
            apart: Whether workers call it out of lockstep. Default: False.
        """
        ...

    def gather_rows(self, act: Callable[[], Tensor], nothing: Tensor) -> Tensor:
        """Call `act`, which gathers rows of all workers, once for each batch.

        Returns `nothing` if the rows were gathered before, or if the turn is dealt again.
        """
        ...

    def roll_back(self) -> None:
        """Restore the state from the begin of the turn."""
        ...


class PlainTransaction:
    """The transaction of a run that ends when a worker is lost: it only makes the calls."""

    failed = False
    recovers = False

    def __init__(self, sync: Sync, context: SyncContext) -> None:
        self._sync, self._agreement = sync, context.agreement

    def begin_turn(self, *, leads: bool, passes: int) -> None:
        """Save nothing, as no turn is dealt again."""

    def gradient_receiver(self) -> Deliver:
        return self._sync.take_gradient

    def end_backward(self, act: Callable[[], Addends]) -> Addends:
        # Without an exchange there is nothing to agree on.
        return (
            self._agreement.attempt_call(act, "backward")
            if self._sync.exchanges_in_backward
            else act()
        )

    def note_step(self, *, remote: bool) -> None:
        """Save nothing, as no step is undone."""

    def step_remotely(
        self, act: Callable[[], T], what: str, *, last: bool = False, apart: bool = False
    ) -> T | None:
        return (
            self._agreement.wait_for_some(act, what)
            if apart
            else self._agreement.attempt_call(act, what)
        )

    def gather_rows(self, act: Callable[[], Tensor], nothing: Tensor) -> Tensor:
        return self._agreement.attempt_call(act)

    def roll_back(self) -> None:
        raise AssertionError("a turn has failed in a run that a lost worker ends")
