"""How a run resumes: when its script asks for it, and by itself after a restart of its job.

paceline run --restarts 3      first start       | steps 1 ... 140, a checkpoint at 100, a worker is
                                                 killed
                               second start      | the same folder: lines after 100 are removed,
                                                 steps 101 ...
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

    `start`: which start of its job this is; None where the job never starts again.
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
    ) -> None:
        self._saving, self._everyone, self._announce = saving, everyone, announce
        self._loop, self._records, self._folder = loop, records, folder
        self._restartable, self._again = (
            start is not None,
            start is not None and start.folder is not None,
        )
        self._asked = False  # a checkpoint was looked for
        self._trains = False
        self._warned = False

    def resume(self, folder: str | Path | None) -> bool:
        """Restore the newest complete checkpoint, as `Run.resume` does. Collective.

        A job that has started again prefers the run's own.
        """
        asked = [self._folder.path, *self._folder.earlier] if folder is None else [Path(folder)]
        return self._load(
            [self._folder.path, *asked] if self._again else asked,
            named=self._folder.named or folder is not None,
        )

    def epochs_begin(self) -> None:
        """Restore the run's own checkpoint if the job has restarted and the script didn't.

        Collective.
        """
        if self._again and not self._asked:
            self._load([self._folder.path], named=True)

    def training_begins(self) -> None:
        """Remove from the log, once, the steps of an earlier start that will be taken again."""
        if self._trains:
            return
        self._trains = True
        if not self._again:
            return
        if not self._asked and catalogue.newest(self._folder.checkpoints):
            self._announce(
                "the job has started again, and trains from the beginning although it has "
                "checkpoints: loop over run.epochs(n), or call run.resume() after run.prepare"
            )
        self._records.log.rewind_to_step(
            self._loop.steps, time.time() - self._records.history.began
        )

    def epoch_ended(self) -> None:
        """Warn once that a restart would begin anew, if an epoch has ended without a checkpoint."""
        if not self._restartable or self._warned:
            return
        self._warned, tally = True, self._saving.tally()
        if (
            not tally["count"]
            and not tally["background"]
            and not catalogue.newest(self._folder.checkpoints)
        ):
            self._announce(
                "an epoch is over and nothing is saved: --restarts would begin anew; "
                "call run.save now and then"
            )

    def before_save(self) -> None:
        """Flush the log of all steps so far, if a restart of the job may resume here.

        Collective.
        """
        if self._restartable and not self._loop.apart:
            self._records.log.hand_over(self._everyone)

    def _load(self, folders: list[Path], *, named: bool) -> bool:
        self._asked = True
        places = [
            place if place.name == "checkpoints" else place / "checkpoints"
            for place in dict.fromkeys(folders)
        ]
        found = self._saving.resume(places, named=named)
        if found is None:
            return False
        self._records.meetings.meet_after_step(self._loop.steps + 1)
        self._announce(f"resumed from {found} at step {self._loop.steps}")
        return True
