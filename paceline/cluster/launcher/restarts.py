"""Restarts of a whole job: whether all workers start again after a failure that nobody can go on after, and what they have to know then.

worker 1 is killed --> all others end --> judge: restart 1 of 3 --> all workers start, with the run's folder and seed, and resume
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from paceline.cluster.discover import JobStart
from paceline.cluster.hosts.peers import Failure
from paceline.cluster.launcher.worker import WorkerProcess, ending


class JobRestarts:
    """The restarts of one job, of which there are at most `allowed`. `start` is what the workers of the present start are told."""

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.start = JobStart()
        self._due = False
        self._causes: set[tuple[str, str, str | None]] = set()  # errors, each with the newest checkpoint when it came

    def judge(self, failure: Failure, workers: Sequence[WorkerProcess]) -> str:
        """Decide what follows on the failure that ended this start, and say it in words; none where no restart is left."""
        self._learn(workers)
        used = len(self.start.events)
        if used == self.allowed:
            return ""
        checkpoint = None if self.start.folder is None else newest(Path(self.start.folder) / "checkpoints")
        reason = self._refusal(failure, workers, checkpoint)
        if reason is not None:
            return f"it isn't started again: {reason}"
        self._due = True
        if self.start.folder is None:
            origin = ""
        else:
            origin = " from where the run began, as it has saved nothing" if checkpoint is None else f" from {checkpoint}"
        words = f"all start again{origin} (restart {used + 1} of {self.allowed})"
        what = f"{failure.line().removeprefix('paceline: ')}; {words}"
        self.start = replace(self.start, events=(*self.start.events, (time.time(), what)))
        return words

    def take(self) -> bool:
        """Return, once, whether the job is to start again."""
        due, self._due = self._due, False
        return due

    def _learn(self, workers: Sequence[WorkerProcess]) -> None:
        """Note the run that the workers have opened."""
        opened = next((record for worker in workers for record in worker.records if record["event"] == "opened"), None)
        if opened is not None and self.start.folder is None:
            seed, began = int(str(opened["seed"])), float(str(opened["began"]))
            self.start = replace(self.start, folder=str(opened["folder"]), seed=seed, began=began)

    def _refusal(self, failure: Failure, workers: Sequence[WorkerProcess], checkpoint: str | None) -> str | None:
        """Return why another start would come to the same end; None if it may not."""
        runs = {record["folder"] for worker in workers for record in worker.records if record["event"] == "opened"}
        if len(runs) > 1:
            return f"its script has opened {len(runs)} runs, and only a job of one run can go on; start each with a command of its own"
        own = [record for worker in workers if worker.rank == failure.rank for record in worker.records if record["event"] == "failed"]
        if own and own[0]["is_final"]:
            return f"every start would end in this {own[0]['type']}"
        if not own and failure.code > 128 and failure.words == ending(failure.code):
            return None  # killed: as often as restarts are allowed
        kind, text = (failure.words, failure.tail.rpartition("\n")[2]) if not own else (str(own[0]["type"]), str(own[0]["message"]))
        cause = (kind, text, checkpoint)
        if cause in self._causes:
            return "the same error has come before, from the same place on"
        self._causes.add(cause)
        return None


def newest(checkpoints: Path) -> str | None:
    """Return the name of the checkpoint in this folder that was written last; None if there is none."""
    found = []
    for manifest in checkpoints.glob("step-*/manifest.json"):
        try:
            found.append((manifest.stat().st_mtime_ns, manifest.parent.name))
        except OSError:
            continue  # it can't be looked at: the run will say so, if it tries to read it
    return max(found)[1] if found else None
