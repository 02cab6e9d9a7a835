"""Resumes a run: when the script asks for it, and by itself after a restart of its job.

paceline run --restarts 3      first start       | steps 1 ... 140, a checkpoint at 100, then a
                                                 | worker is killed
                               second start      | the same folder: lines after step 100 are
                                                 | removed, then steps 101 ...
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from paceline.checkpoint.files import catalogue
from paceline.checkpoint.saving import CheckpointSaver
from paceline.cluster.discover import JobStart
from paceline.comm.agreement import Agreement
from paceline.loop.turns import TrainingLoop
from paceline.record.folder import RunFolder
from paceline.record.run_records import RunRecords


class RunResumption:
    """Resumes one run.

    Args:
        saving: Saves and loads checkpoints.
        everyone: The agreement between all workers.
        announce: Called with messages for the user.
        loop: The training loop.
        records: The log and the history of the run.
        folder: The folder of the run.
        start: This start of the job. None if the job is never restarted.
        resumes: Whether the run goes on from an earlier run (`paceline run --resume`).
    """

    def __init__(
        self,
        saving: CheckpointSaver,
        *,
        everyone: Agreement,
        announce: Callable[[str], None],
        loop: TrainingLoop,
        records: RunRecords,
        folder: RunFolder,
        start: JobStart | None,
        resumes: bool = False,
    ) -> None:
        self._saver, self._everyone, self._announce = saving, everyone, announce
        self._loop, self._records, self._folder = loop, records, folder
        self._restartable, self._has_restarted = (
            start is not None,
            start is not None and start.folder is not None,
        )
        self._is_resume_requested = resumes
        self._has_resumed = False  # the run has looked for a checkpoint
        self._has_trained = False  # a training loop has begun
        self._has_warned = False  # of an epoch without a checkpoint

    def resume_newest(self, folder: str | Path | None) -> bool:
        """Restore the newest complete checkpoint, as `Run.resume` does. Collective.

        After a restart of the job, a checkpoint of the run itself comes before all others.
        """
        folders = [self._folder.path, *self._folder.earlier] if folder is None else [Path(folder)]
        return self._resume_from(
            [self._folder.path, *folders] if self._has_restarted else folders,
            named=self._folder.named or folder is not None,
        )

    def resume_after_restart(self) -> None:
        """Load a checkpoint if the job was restarted, or with `--resume`. Collective.

        After a restart it is the run's own. Nothing happens if the script has called `run.resume`.
        """
        if self._has_resumed:
            return
        if self._is_resume_requested:
            self.resume_newest(None)
        elif self._has_restarted:
            self._resume_from([self._folder.path], named=True)

    def training_begins(self) -> None:
        """Remove steps of earlier starts from the log that this start takes again.

        Called as each training loop begins. Only the first call has an effect.
        """
        if self._has_trained:
            return
        self._has_trained = True
        if self._is_resume_requested and not self._has_resumed:
            self._announce(
                "--resume has no effect, as the script doesn't loop over run.epochs(n): call "
                "run.resume() after run.prepare"
            )
        if not self._has_restarted:
            return
        if not self._has_resumed and catalogue.list_newest(self._folder.checkpoints):
            self._announce(
                "the job has restarted, and trains from the beginning although it has "
                "checkpoints: loop over run.epochs(n), or call run.resume() after run.prepare"
            )
        self._records.log.rewind_to_step(
            self._loop.steps_made, time.time() - self._records.history.began
        )

    def warn_without_checkpoint(self) -> None:
        """Warn, once, if an epoch has ended without a checkpoint: a restart would begin anew."""
        if not self._restartable or self._has_warned:
            return
        self._has_warned, tally = True, self._saver.copy_tally()
        if (
            not tally["count"]
            and not tally["background"]
            and not catalogue.list_newest(self._folder.checkpoints)
        ):
            self._announce(
                "an epoch is over and no checkpoint is saved: --restarts would begin anew; "
                "call run.save now and then"
            )

    def flush_log(self) -> None:
        """Flush the log of all steps so far, if a restart of the job may resume here.

        Collective.
        """
        if self._restartable and not self._loop.apart:
            self._records.log.hand_over(self._everyone)

    def continue_at_step(self, steps: int) -> None:
        """Go on at this number of steps, with a state that was read from elsewhere.

        All workers call it at the same place.
        """
        self._has_resumed = True
        self._loop.go_to_step(steps)
        self._plan_next_meeting()

    def _plan_next_meeting(self) -> None:
        # Workers have to meet at the same step. The resumed run may have planned its next meeting
        # for another one, so they meet after the first new step.
        self._records.meetings.meet_after_step(self._loop.steps_made + 1)

    def _resume_from(self, folders: list[Path], *, named: bool) -> bool:
        """Load the newest checkpoint of the first folder that has one; False if none has."""
        self._has_resumed = True
        places = [
            place if place.name == "checkpoints" else place / "checkpoints"
            for place in dict.fromkeys(folders)
        ]
        path = self._saver.resume_newest(places, named=named)
        if path is None:
            return False
        self._plan_next_meeting()
        self._announce(f"resumed from {path} at step {self._loop.steps_made}")
        return True
