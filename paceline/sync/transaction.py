"""Transactions: the joint work of one step holds on all workers or on none.

    begin       a turn begins                          exchange    the end of a backward pass
    rollback    it comes again, as it began            step        a step that is made elsewhere
                                                       collective  rows or numbers of all workers

`PlainTransaction` is for runs that a lost worker ends. `elastic.transaction` has the one for runs
that go on.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

from paceline.sync.base import Sync
from paceline.sync.context import SyncContext

T = TypeVar("T")
# number and final addend of each parameter that any worker has used
Addends = list[tuple[int, Tensor]]
Deliver = Callable[[int, Tensor, float], None]


class Transaction(Protocol):
    """A step's transaction.

    `failed`: an act of this turn had no result, on all workers; `recovers`: the run outlives lost
    workers.
    """

    failed: bool
    recovers: bool

    def begin(self, *, leads: bool, passes: int) -> None:
        """Begin a turn; the last one had this number of exchanges of gradients.

        `leads`: the turn is a step.
        """
        ...

    def deliver(self) -> Deliver:
        """Return the function that takes the gradients of the pass that begins."""
        ...

    def exchange(self, act: Callable[[], Addends]) -> Addends:
        """End a backward pass by `act`, and return its addends; zeros if it has no result."""
        ...

    def stepping(self, *, remote: bool) -> None:
        """Note that an optimizer is about to step; `remote`: that may fail."""
        ...

    def step(
        self, act: Callable[[], T], what: str, *, last: bool = False, apart: bool = False
    ) -> T | None:
        """Make a step elsewhere by `act`, and return its result; None where it can't be made.

        `last`: nothing more of it can fail.
        """
        ...

    def collective(self, act: Callable[[], Tensor], nothing: Tensor) -> Tensor:
        """Gather rows by `act`, once for each batch.

        Returns `nothing` if they were gathered before, or if the turn is dealt again.
        """
        ...

    def rollback(self) -> None:
        """Go back to where the turn began."""
        ...


class PlainTransaction:
    """The transaction of a run that ends when a worker is lost: each act is simply made."""

    failed = False
    recovers = False

    def __init__(self, sync: Sync, context: SyncContext) -> None:
        self._sync, self._agreement = sync, context.agreement

    def begin(self, *, leads: bool, passes: int) -> None:
        """Keep nothing, as no turn is dealt again."""

    def deliver(self) -> Deliver:
        return self._sync.ready

    def exchange(self, act: Callable[[], Addends]) -> Addends:
        return (
            self._agreement.attempt_call(act, "backward")
            if self._sync.exchanges_in_backward
            else act()
        )

    def stepping(self, *, remote: bool) -> None:
        """Keep nothing: no step is undone."""

    def step(
        self, act: Callable[[], T], what: str, *, last: bool = False, apart: bool = False
    ) -> T | None:
        return (
            self._agreement.wait_for_some(act, what)
            if apart
            else self._agreement.attempt_call(act, what)
        )

    def collective(self, act: Callable[[], Tensor], nothing: Tensor) -> Tensor:
        return self._agreement.attempt_call(act)

    def rollback(self) -> None:
        raise AssertionError("a turn has failed in a run that a lost worker ends")
