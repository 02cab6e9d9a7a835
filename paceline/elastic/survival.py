"""Losses, arrivals and departures of workers, before training, between turns, and after steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, Protocol

from paceline.comm.sample_queue import SampleQueue
from paceline.data.loader import ShareLoader
from paceline.elastic.departure import Departure
from paceline.elastic.recovery import Recovery
from paceline.loop.turns import TrainingLoop
from paceline.prepare import checks
from paceline.prepare.registry import Prepared
from paceline.record.history import RunHistory
from paceline.replicas.step_count import StepCount
from paceline.workers.groups import CurrentView


class Collector(Protocol):
    """Collects on the first worker what was logged."""

    @property
    def sample_queue(self) -> SampleQueue | None:
        """Where workers get their samples while they are not in lockstep."""
        ...

    def between(self, recovery: Recovery) -> None:
        """Hand over what there is, between two steps. Collective."""
        ...


class Survival:
    """Goes on when workers are lost.

    `save` writes a checkpoint; `depart` calls what it is given, and ends this worker.
    """

    def __init__(
        self,
        recovery: Recovery,
        leaving: Departure,
        view: CurrentView,
        loop: TrainingLoop,
        prepared: Prepared,
        *,
        collector: Collector,
        history: RunHistory,
        tally: StepCount,
        save: Callable[[], Path],
        depart: Callable[[Callable[[], None]], NoReturn],
    ) -> None:
        self.recovery, self._leaving, self._view, self._loop, self._prepared = (
            recovery,
            leaving,
            view,
            loop,
            prepared,
        )
        self._collector, self._history, self._tally = collector, history, tally
        self._save, self._depart = save, depart
        self._joined = False

    def begin(self) -> None:
        """Survive losses from here on, as all workers are about to train.

        A worker that joins while they train waits here to be let in.
        """
        checks.check_schedulers(self._prepared.optimizers, self._prepared.state.parts)
        if not self.recovery.fresh:
            self.recovery.arm()
            return
        self.recovery.join()
        self._tally.enter()
        self._view.enter()
        self._joined = True

    def take_joined(self) -> bool:
        """Return, once, whether this worker was let in, which happens in the middle of an epoch."""
        joined, self._joined = self._joined, False
        return joined

    def generation(self, loader: ShareLoader) -> int:
        """Number of changes of the group of workers.

        Between two turns of training, waiting workers are let in.
        """
        recovery, dynamic = self.recovery, self._collector.sample_queue is not None
        if recovery.missed_turns.behind:
            return recovery.missed_turns.repeat()
        leaves = self._leaving.goes or (recovery.orders.leaving and dynamic)
        if leaves and loader.terms.training and self._loop.turn is None:
            self._depart(recovery.depart)
        training = [
            other for other in self._prepared.loaders if other.terms.training and other.under_way
        ]
        if training == [loader] and self._loop.turn is None and dynamic:
            self._collector.between(recovery)
        elif training == [loader] and self._loop.turn is None:
            if recovery.short and not recovery.pending:
                self._wait_for_others()
            if recovery.pending:
                recovery.admit(self._loop.abilities.converge)
        return recovery.generation if dynamic else recovery.missed_turns.answer(recovery.generation)

    def step_ended(self, *_: Any) -> None:
        """Have a host leave that wants to, where all workers are at the same step."""
        if not self._loop.apart:
            self._leaving.step_ended()

    def _wait_for_others(self) -> None:
        """Save, and wait until others come, as there are fewer workers than the job needs."""
        path, place = self._save(), self._view.worker.place
        self._history.announce_event(
            f"{place.size} of {place.min_workers} workers are left: "
            f"saved {path.name}, and waiting for others"
        )
        self.recovery.wait()
