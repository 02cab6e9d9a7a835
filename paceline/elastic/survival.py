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
from paceline.record.run_records import RunRecords
from paceline.replicas.step_count import StepCount
from paceline.workers.groups import CurrentView


class Collector(Protocol):
    """Collects logged values on the first worker."""

    @property
    def sample_queue(self) -> SampleQueue | None:
        """Queue of samples for workers that are not in lockstep; None in lockstep."""
        ...

    def pause_between_turns(self, recovery: Recovery) -> None:
        """Hand over all logged values, between two steps. Collective."""
        ...


class Survival:
    """Keeps a run going when workers are lost, join or leave.

    Args:
        recovery: Recovers from losses, and lets new workers in.
        leaving: Departure of this worker's host.
        view: The view in use.
        loop: The training loop.
        prepared: The models, optimizers and loaders of the run.
        collector: Collects logged values.
        records: Records events, and the time that recovery takes.
        tally: Count of steps that workers agree on.
        save: Writes a checkpoint.
        depart: Calls its argument, and ends this worker.
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
        records: RunRecords,
        tally: StepCount,
        save: Callable[[], Path],
        depart: Callable[[Callable[[], None]], NoReturn],
    ) -> None:
        self.recovery, self._departure, self._view, self._loop, self._prepared = (
            recovery,
            leaving,
            view,
            loop,
            prepared,
        )
        self._collector, self._history, self._step_count = collector, records.history, tally
        self._save, self._depart = save, depart
        self._worker_time = records.worker_time
        self._was_let_in = False

    def begin_surviving(self) -> None:
        """Survive losses from now on, as all workers are about to train.

        A worker that joins a running job waits here until it is let in.
        """
        checks.check_schedulers(self._prepared.optimizers, self._prepared.state.parts)
        if not self.recovery.has_no_state:
            self.recovery.arm_recovery()
            return
        self.recovery.join_run()
        self._step_count.enter_job()
        self._view.take_part()
        self._was_let_in = True

    def take_joined_flag(self) -> bool:
        """Tell, once, whether this worker was let in. This happens in the middle of an epoch."""
        joined, self._was_let_in = self._was_let_in, False
        return joined

    def update_generation(self, loader: ShareLoader) -> int:
        """Number of changes of the group of workers, after waiting workers were let in.

        Loaders call this before each turn, and deal samples anew when the number changes. Workers
        are let in or leave only between two turns of training.
        """
        recovery, is_dynamic = self.recovery, self._collector.sample_queue is not None
        if recovery.missed_turns.is_behind:
            # Other workers took these turns before they learned of the loss. So does this one.
            return recovery.missed_turns.repeat_answer()
        is_leaving = self._departure.has_to_leave or (recovery.orders.asked_to_leave and is_dynamic)
        if is_leaving and loader.terms.training and self._loop.turn is None:
            self._depart(recovery.finish_sending)
        # In a loop inside of another one, workers are not between two turns.
        training = [
            other for other in self._prepared.loaders if other.terms.training and other.under_way
        ]
        if training == [loader] and self._loop.turn is None and is_dynamic:
            self._collector.pause_between_turns(recovery)
        elif training == [loader] and self._loop.turn is None:
            if recovery.lacks_workers and not recovery.pending_view:
                with self._worker_time.measure_loss("recovery", "data"):
                    self._wait_for_workers()
            if recovery.pending_view:
                with self._worker_time.measure_loss("recovery", "data"):
                    recovery.admit_workers(self._loop.abilities.converge)
        return (
            recovery.generation
            if is_dynamic
            else recovery.missed_turns.record_answer(recovery.generation)
        )

    def step_ended(self, *_: Any) -> None:
        """Let a host leave if it was told to, when all workers are at the same step."""
        if not self._loop.apart:
            self._departure.copy_before_leaving()

    def _wait_for_workers(self) -> None:
        """Save, and wait for new workers, as fewer are left than the job needs."""
        path, place = self._save(), self._view.worker.place
        self._history.announce_event(
            f"{place.size} of {place.min_workers} workers are left: "
            f"saved {path.name}, and waiting for others"
        )
        self.recovery.wait_for_workers()
