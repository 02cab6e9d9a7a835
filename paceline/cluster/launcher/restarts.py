"""Restarts of a whole job after a failure that the run can't survive.

worker 1 is killed --> all others end --> judge: restart 1 of 3
                                                 --> all workers start, with the run's folder and
                                                     seed, and resume

With several hosts, each reports how it saw the failure, and the launcher that all are connected
with judges for all of them.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from paceline.cluster.discover import JobStart
from paceline.cluster.hosts.peers import Failure, RestartPeers
from paceline.cluster.hosts.restart_messages import Cause, HostReport, RestartState, Sequel
from paceline.cluster.launcher.worker import WorkerProcess, ending

_LONGEST = 300  # characters of an error that launchers tell each other


class JobRestarts:
    """The restarts of one job, of which there are at most `allowed`, as one launcher takes part in
    them.

    For `patience` seconds hosts wait for another one in the place of one that is gone. `start` is
    what the workers of the present start are told; `words` say what follows on its failure, once
    that is known.
    """

    def __init__(self, allowed: int, *, patience: float = 0.0) -> None:
        self.state = RestartState(allowed)
        self.words = ""
        self._patience = patience
        # of the run, where workers of this host have opened it: other hosts may have it elsewhere
        self._folder: str | None = None
        self._peers: RestartPeers | None = None  # of the present start
        self._reported = self._due = False

    @property
    def start(self) -> JobStart:
        """The present start."""
        start = self.state.start
        return (
            start
            if start.folder is None or self._folder is None
            else replace(start, folder=self._folder)
        )

    @property
    def due(self) -> bool:
        """Whether the job is to start again."""
        return self._due

    def begin(self, peers: RestartPeers) -> None:
        """Begin a start together with these launchers, with what the latest of them knows."""
        self._peers, self._reported, self.words = peers, False, ""
        self.state = peers.state or self.state

    def take(self) -> bool:
        """Return, once, whether the job is to start again."""
        due, self._due = self._due, False
        return due

    def settle(self, failure: Failure, workers: Sequence[WorkerProcess]) -> bool:
        """Whether all hosts know what follows on the failure that has ended this start.

        To be called again until they do.
        """
        peers = self._peers
        assert peers is not None
        if not self._reported:
            self._reported = True
            peers.tell_ended(self.report(failure, workers))
        if (reports := peers.ended) is not None and peers.sequel is None:
            peers.tell_sequel(self.judge(failure, reports))
        if peers.sequel is None:
            return False
        self.words = peers.sequel.words
        if peers.sequel.state is not None:
            self.state, self._due = peers.sequel.state, True
        return True

    def report(self, failure: Failure, workers: Sequence[WorkerProcess]) -> HostReport:
        """Report what this host has seen of the start that this failure has ended."""
        records = [
            record for worker in workers for record in worker.records if record["event"] == "opened"
        ]
        report = HostReport(runs=len({record["folder"] for record in records}))
        if records:
            self._folder = self._folder or str(records[0]["folder"])
            report = replace(
                report,
                folder=self._folder,
                seed=int(str(records[0]["seed"])),
                began=float(str(records[0]["began"])),
            )
        folder = self._folder or self.start.folder
        report = replace(
            report, checkpoint=None if folder is None else newest(Path(folder) / "checkpoints")
        )
        if failure.rank is None or all(worker.rank != failure.rank for worker in workers):
            return report
        return replace(
            report,
            failure=failure.line().removeprefix("paceline: "),
            cause=_cause(failure, workers),
        )

    def judge(self, failure: Failure, reports: Mapping[int, HostReport]) -> Sequel:
        """Decide what follows on the failure that ended this start; without words where no
        restart is left.
        """
        state = self._learnt(reports)
        used, folder = len(state.start.events), state.start.folder
        if used == state.allowed:
            return Sequel("")
        first = reports[min(reports)]
        checkpoint = first.checkpoint or next(
            (report.checkpoint for report in reports.values() if report.checkpoint is not None),
            None,
        )
        own = next(
            (report for report in reports.values() if report.failure is not None), HostReport()
        )
        refusal = self._refusal(failure, own, reports)
        cause = None if own.cause is None else _digest(own.cause, checkpoint)
        if cause is not None and cause in state.causes:
            refusal = refusal or "the same error has come before, from the same place on"
        if refusal is not None:
            return Sequel(f"it isn't started again: {refusal}")
        if folder is None or (checkpoint is None and min(reports) > 0):
            origin = ""  # nothing is known of what the first host has saved
        else:
            origin = (
                " from where the run began, as it has saved nothing"
                if checkpoint is None
                else f" from {checkpoint}"
            )
        waits = (
            f" once another host has come in its place, for which they wait {self._patience:g} s"
            if failure.rank is None
            else ""
        )
        words = f"all start again{origin}{waits} (restart {used + 1} of {state.allowed})"
        what = f"{own.failure or failure.line().removeprefix('paceline: ')}; {words}"
        start = replace(state.start, events=(*state.start.events, (time.time(), what)))
        return Sequel(
            words,
            replace(
                state, start=start, causes=state.causes if cause is None else (*state.causes, cause)
            ),
        )

    def _learnt(self, reports: Mapping[int, HostReport]) -> RestartState:
        """Return the state with the run that workers have opened, as the first of the hosts
        knows it.
        """
        opened = next(
            (
                reports[host]
                for host in sorted(reports)
                if reports[host].folder is not None and reports[host].runs
            ),
            None,
        )
        if opened is None or self.state.start.folder is not None:
            return self.state
        return replace(
            self.state,
            start=replace(
                self.state.start, folder=opened.folder, seed=opened.seed, began=opened.began
            ),
        )

    def _refusal(
        self, failure: Failure, own: HostReport, reports: Mapping[int, HostReport]
    ) -> str | None:
        """Reason why another start would end in the same way; None if it may not."""
        runs = max(report.runs for report in reports.values())
        if runs > 1:
            return (
                f"its script has opened {runs} runs, and only a job of one run can go on; "
                "start each with a command of its own"
            )
        if own.cause is not None and own.cause.is_final:
            return f"every start would end in this {own.cause.kind}"
        if failure.rank is None and not self._patience:
            return "--patience 0 waits for no other host in its place"
        return None


def _cause(failure: Failure, workers: Sequence[WorkerProcess]) -> Cause | None:
    """Return the error of the worker that failed, in its own words if it had some; None for one
    that was killed.
    """
    own = [
        record
        for worker in workers
        if worker.rank == failure.rank
        for record in worker.records
        if record["event"] == "failed"
    ]
    if own:
        return Cause(str(own[0]["type"]), str(own[0]["message"]), bool(own[0]["is_final"]))
    if failure.code > 128 and failure.words == ending(failure.code):
        return None  # as often as restarts are allowed
    return Cause(failure.words, failure.tail.rpartition("\n")[2][-_LONGEST:], is_final=False)


def _digest(cause: Cause, checkpoint: str | None) -> str:
    """Return a short text that is equal for an error that comes again, from the same checkpoint."""
    return hashlib.sha256(
        repr((cause.kind, cause.message, checkpoint)).encode(errors="replace")
    ).hexdigest()[:16]


def newest(checkpoints: Path) -> str | None:
    """Return the name of the checkpoint in this folder that was written last; None if there is
    none.
    """
    found = []
    for manifest in checkpoints.glob("step-*/manifest.json"):
        try:
            found.append((manifest.stat().st_mtime_ns, manifest.parent.name))
        except OSError:
            continue  # it can't be looked at: the run will say so, if it tries to read it
    return max(found)[1] if found else None
