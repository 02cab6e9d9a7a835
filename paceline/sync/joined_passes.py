"""Several backward passes that count as one: those of the micro-batches of a pipeline.

                          most parameters        parameters that two stages share
pass of micro-batch 0     added up               added up
pass of micro-batch 1     added up               added up
last pass                 sent at once, while    added up
                          other stages run
end                                              summed over the stages, then sent
after the exchange        p.grad = the strategy's result
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import Tensor

from paceline.comm.backward_pass import current_pass_id
from paceline.errors import UsageError
from paceline.sync.base import GradientSource, Sync
from paceline.sync.context import SyncContext
from paceline.sync.watched_parameters import WatchedParameter, WatchedParameters


class JoinedPasses:
    """Backward passes that count as one. Made by `GradientTracker.joined`."""

    def __init__(self, tracker: JoiningTracker) -> None:
        self._tracker = tracker

    @property
    def silent(self) -> bool:
        """Whether even the end exchanges nothing, as more passes follow (`run.no_sync`)."""
        return self._tracker.context.step_state.defer_exchange

    def begin_pass(self, *, last: bool) -> None:
        """Begin a pass. In the `last` one, complete gradients are sent at once."""
        self._tracker.keep_silent(silent=not last)

    def gather_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Gather cut parameters again, for the second half of a backward through their layers."""
        self._tracker.gather_parameters(parameters)

    def end_pass(self) -> None:
        """End a pass."""
        self._tracker.end_sources()

    def delay_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Send the gradients of these parameters only at the end of all passes."""
        self._tracker.delay_gradients(parameters)

    def accumulated_total(self, parameter: Tensor) -> Tensor | None:
        """Sum of all passes for a delayed parameter; None if no pass has reached it."""
        return self._tracker.accumulated_of(parameter).unsent

    def set_accumulated(self, parameter: Tensor, total: Tensor) -> None:
        """Set the sum of all passes for a delayed parameter to `total`."""
        self._tracker.put_added_up(parameter, total)

    def close(self) -> None:
        """End all passes, and exchange their gradients unless they are silent."""
        self._tracker.keep_silent(silent=self.silent)
        self._tracker.close_pass("run.step")


class JoiningTracker:
    """The part of a `GradientTracker` that joins several passes into one."""

    context: SyncContext
    sync: Sync
    open: bool
    is_silent: bool
    watched: WatchedParameters
    end_pass: Callable[[str], None]  # ends the pass under way, and exchanges what it has reached
    sources: list[GradientSource]
    joining = False  # passes are parts of one
    # indices of parameters that are added up to the end of passes that are joined
    delayed: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def join_passes(self) -> Iterator[JoinedPasses]:
        """Treat the backward passes inside the block as one: the micro-batches of a pipeline."""
        self.refuse_inside("run.step")
        # An open pass has ended with an error, and `join` raises `UsageError` about it.
        if self.open:
            self.join_exchange("run.step")
        self.joining = True
        passes = JoinedPasses(self)
        try:
            yield passes
            passes.close()
        except BaseException:
            if self.open:
                self._forget_pass()
            raise
        finally:
            self.joining, self.delayed = False, frozenset()

    @property
    def replicas_diverge(self) -> bool:
        """Whether the strategy lets replicas differ between steps."""
        return self.sync.replicas_diverge

    def refuse_inside(self, where: str) -> None:
        """Raise `UsageError` if a backward is under way.

        Until it returns, gradients are this worker's own or are being exchanged.
        """
        if current_pass_id() != -1 and self.watched.by_id:
            raise UsageError(
                f"{where} was called inside of loss.backward() (from a hook of a parameter), "
                "when gradients are not the mean over all workers yet; take the hook out, and call "
                "optimizer.step() after loss.backward()"
            )

    def join_exchange(self, where: str, *, due: bool = False) -> None:
        """Take part in the exchanges of other workers; raise if a pass ended with an error."""
        raise NotImplementedError

    def put_added_up(self, parameter: Tensor, total: Tensor) -> None:
        """Set the sum of a parameter to `total`, even if backward has not reached it here."""
        raise NotImplementedError

    def _begin_pass(self, *, idle: bool = False) -> None:
        raise NotImplementedError

    def _forget_pass(self) -> None:
        raise NotImplementedError

    def close_pass(self, where: str) -> None:
        """End the pass under way, and take part in its exchange even if it reached no parameter."""
        several = self.sources or self.context.group.size > 1
        if self.watched.by_id and not self.is_silent and several:
            self.open_idle()
        if self.open:
            self.end_pass(where)

    def keep_silent(self, *, silent: bool) -> None:
        """Add up gradients from now on (silent), or hand them to the strategy (last pass).

        Under `run.no_sync` they are added up in any case.
        """
        self.is_silent = silent or self.context.step_state.defer_exchange

    def delay_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Add up the gradients of these parameters until the end of the joined passes."""
        self.delayed |= {
            self.watched.by_id[id(parameter)].index
            for parameter in parameters
            if id(parameter) in self.watched.by_id
        }

    def open_idle(self) -> None:
        """Begin a pass if none is under way, for gradients that don't come from autograd."""
        if not self.open:
            self._begin_pass(idle=True)

    def accumulated_of(self, parameter: Tensor) -> WatchedParameter:
        """State of a parameter, with the sum of its gradients so far."""
        return self.watched.by_id[id(parameter)]

    def gather_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Gather cut parameters through the sources of their gradients. Collective."""
        for source in self.sources:
            source.gather(parameters)

    def end_sources(self) -> None:
        """Deliver the remaining cut gradients of one of the joined passes.

        Called on every worker, as the pass may have reached other workers only.
        """
        raise NotImplementedError
