"""Several backward passes as one: those of the micro-batches of a pipeline.

pass of micro-batch 0     adds up
pass of micro-batch 1     adds up          parameters that two stages share: up to the end, where
                                           the stages are summed
the last one              leaves at once   while other stages still run
end                       what is left leaves; p.grad = the strategy's result
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
    """Backward passes that count as one (what `GradientTracker.joined` gives)."""

    def __init__(self, tracker: JoiningTracker) -> None:
        self._tracker = tracker

    @property
    def silent(self) -> bool:
        """Whether nothing is exchanged at the end, as more passes follow (`run.no_sync`)."""
        return self._tracker.context.step_state.defer_exchange

    def begin(self, *, last: bool) -> None:
        """Begin a pass.

        `last`: the gradients of the parameters that it reaches are complete with it, and leave at
        once.
        """
        self._tracker.keep_silent(silent=not last)

    def gather(self, parameters: Sequence[Tensor]) -> None:
        """Make cut parameters whole again for the second half of a backward through their
        layers.
        """
        self._tracker.gather(parameters)

    def end(self) -> None:
        """End a pass."""
        self._tracker.end_sources()

    def delay(self, parameters: Iterable[Tensor]) -> None:
        """Let the gradients of these parameters leave at the end of all passes alone."""
        self._tracker.delay(parameters)

    def total(self, parameter: Tensor) -> Tensor | None:
        """Sum of all passes for a delayed parameter; None if none has reached it."""
        return self._tracker.added_up(parameter).unsent

    def put(self, parameter: Tensor, total: Tensor) -> None:
        """Let `total` be what all passes have added up of a delayed parameter."""
        self._tracker.put_added_up(parameter, total)

    def close(self) -> None:
        """End all passes: exchange what they have reached, unless the whole is silent."""
        self._tracker.keep_silent(silent=self.silent)
        self._tracker.close_pass("run.step")


class JoiningTracker:
    """The part of a `GradientTracker` that takes several passes as one."""

    context: SyncContext
    sync: Sync
    open: bool
    is_silent: bool
    watched: WatchedParameters
    end_pass: Callable[[str], None]  # ends the pass under way, and exchanges what it has reached
    sources: list[GradientSource]
    joins = False  # passes are parts of one
    # indices of parameters that are added up to the end of passes that are joined
    late: frozenset[int] = frozenset()

    @contextlib.contextmanager
    def joined(self) -> Iterator[JoinedPasses]:
        """Treat the backward passes inside the block as one: the micro-batches of a pipeline."""
        self.refuse_inside("run.step")
        if self.open:
            self.join("run.step")  # raises
        self.joins = True
        passes = JoinedPasses(self)
        try:
            yield passes
            passes.close()
        except BaseException:
            if self.open:
                self._forget()
            raise
        finally:
            self.joins, self.late = False, frozenset()

    @property
    def replicas_diverge(self) -> bool:
        """Whether the strategy changes parameters otherwise than by gradients."""
        return self.sync.replicas_diverge

    def refuse_inside(self, where: str) -> None:
        """Raise `UsageError` if a backward is under way.

        Until it returns, gradients belong to this worker alone, or are being exchanged.
        """
        if current_pass_id() != -1 and self.watched.by_id:
            raise UsageError(
                f"{where} was called inside of loss.backward() (an optimizer in a hook of its "
                "parameters), where gradients are not the "
                "mean over all workers yet; take the hook out, and call optimizer.step() after "
                "loss.backward()"
            )

    def join(self, where: str, *, due: bool = False) -> None:
        """Take part in what the others exchange; raises where a pass ended with an error."""
        raise NotImplementedError

    def put_added_up(self, parameter: Tensor, total: Tensor) -> None:
        """Set the sum of a parameter to `total`, even if backward has not reached it here."""
        raise NotImplementedError

    def _begin(self, *, idle: bool = False) -> None:
        raise NotImplementedError

    def _forget(self) -> None:
        raise NotImplementedError

    def close_pass(self, where: str) -> None:
        """End the pass under way.

        If backward has reached nothing here, take part as the others end theirs.
        """
        several = self.sources or self.context.group.size > 1
        if self.watched.by_id and not self.is_silent and several:
            self.open_idle()
        if self.open:
            self.end_pass(where)

    def keep_silent(self, *, silent: bool) -> None:
        """Add up gradients of joined passes from now on, or hand them to the strategy at the last.

        If all of the passes are silent, they are only added up.
        """
        self.is_silent = silent or self.context.step_state.defer_exchange

    def delay(self, parameters: Iterable[Tensor]) -> None:
        """Add up the gradients of these parameters until the end of the passes that are joined."""
        self.late |= {
            self.watched.by_id[id(parameter)].index
            for parameter in parameters
            if id(parameter) in self.watched.by_id
        }

    def open_idle(self) -> None:
        """Begin a pass if there is none, for gradients that come from elsewhere.

        Backward has reached nothing here then.
        """
        if not self.open:
            self._begin(idle=True)

    def added_up(self, parameter: Tensor) -> WatchedParameter:
        """Sum of a parameter's gradients so far."""
        return self.watched.by_id[id(parameter)]

    def gather(self, parameters: Sequence[Tensor]) -> None:
        """Have the sources of cut gradients make these parameters whole."""
        for source in self.sources:
            source.gather(parameters)

    def end_sources(self) -> None:
        """Let the sources of cut gradients deliver the rest of one of the joined passes.

        The pass may have reached this worker, or only others.
        """
        raise NotImplementedError
