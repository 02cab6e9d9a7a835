"""The end of a run that saves a checkpoint first, as it was asked to end (SIGTERM).

SIGTERM to any worker          the worker notes it
the next step that ends with
a meeting (about each second)  all hear of it, and so stop after the same step
                               a checkpoint is written, and the run is closed
                               SystemExit(143)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from torch.optim import Optimizer

from paceline.cluster.control import events
from paceline.cluster.control.term_request import EXIT_CODE, TermRequest
from paceline.cluster.discover import Place
from paceline.elastic.departure import Departure
from paceline.loop.turns import TrainingLoop
from paceline.prepare.registry import Prepared
from paceline.record.history import RunHistory

# What a worker says at a meeting: it was asked to end; and a checkpoint has all of its work.
Wish = tuple[bool, bool]


class SavedEnd:
    """Saves a checkpoint and ends the run when a worker is asked to end.

    Args:
        place: Place of this worker.
        loop: The training loop.
        prepared: The optimizers of the run.
        history: Records what happens.
        save: Writes a checkpoint. Collective.
        close: Closes the run. Collective.
        departure: This worker's part in the departure of its host, if the job survives losses.
            The host leaves, and the run ends only if all hosts have to leave.
    """

    def __init__(
        self,
        place: Place,
        loop: TrainingLoop,
        prepared: Prepared,
        history: RunHistory,
        *,
        save: Callable[[], Path],
        close: Callable[[], None],
        departure: Departure | None,
    ) -> None:
        self._place, self._loop, self._prepared, self._history = place, loop, prepared, history
        self._announce = prepared.context.announce
        self._save, self._close, self._departure = save, close, departure
        self.request = TermRequest(
            place, (lambda: None) if departure is None else departure.ask_to_leave
        )
        self._steps_at_begin = 0  # steps when training began in this process
        self._stepped_at: int | None = None  # the last step in which an optimizer has stepped

    @property
    def can_be_asked(self) -> bool:
        """Whether a worker of this run may be asked to end it. The same on all workers."""
        return self._place.saves_on_term or self._place.save_request_fd is not None

    def begin_training(self) -> None:
        """Listen for the request from now on: before, there is nothing to save."""
        if self.request.is_listening or self.request.is_foreign:
            return
        if self._loop.abilities.sample_queue is not None:
            if self._place.saves_on_term:
                self._announce(
                    "with staleness or backup_workers SIGTERM saves no checkpoint, as workers are "
                    "at different steps"
                )
            return
        self._steps_at_begin = self._loop.steps_made
        if self.request.begin_listening():
            events.report_saving(self._place)
        elif self.request.is_foreign:
            self._announce("SIGTERM saves no checkpoint, as the script handles it by itself")

    def note_optimizer_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped in the present turn."""
        self._stepped_at = self._loop.steps_made + 1

    def stop_listening(self) -> None:
        """Stop listening, as the run is over."""
        self.request.stop_listening()

    @property
    def is_asked(self) -> bool:
        """Whether this worker was asked to end."""
        if not self.can_be_asked:
            return False
        if self._departure is not None:
            return self._departure.leave_request is not None
        return self.request.is_asked

    def make_wish(self) -> Wish:
        """Say what this worker wants, for a meeting after a step.

        A checkpoint lacks gradients that wait for a later step of the optimizer.
        """
        remote = self._loop.abilities.remote
        # Optimizers may step on servers, or outside of paceline.
        steps_here = self._prepared.optimizers and not (remote is not None and remote.attached)
        has_stepped = self._stepped_at == self._loop.steps_made or not steps_here
        return self.is_asked, has_stepped and not self._loop.backward.owing

    def hear_wishes(self, wishes: Sequence[Wish]) -> bool:
        """Save and end, if the workers want to and can. Collective if they do.

        Returns:
            Whether they want to, but have to meet again after the next step.
        """
        if not self.is_wanted([asked for asked, _ in wishes]):
            return False
        if all(is_whole for _, is_whole in wishes):
            self.save_and_end()
        return True

    def is_wanted(self, asked: Sequence[bool]) -> bool:
        """Whether the run has to end, given which workers were asked to end."""
        return any(asked) if self._departure is None else all(asked)

    def save_and_end(self) -> None:
        """Save a checkpoint, close the run, and leave the script. Collective."""
        text = "asked to end (SIGTERM) before the first step, so no checkpoint was saved"
        if self._loop.steps_made > self._steps_at_begin:
            began = time.monotonic()
            path = self._save()
            seconds = time.monotonic() - began
            text = (
                f"asked to end (SIGTERM): saved {path.name} in {seconds:.1f} s; run.resume() or "
                "`paceline run --resume` goes on from it"
            )
        self._history.announce_event(text)
        self._close()
        raise SystemExit(EXIT_CODE)
