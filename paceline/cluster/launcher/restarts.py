"""Restarts of a whole job after a failure that the run can't survive.

    worker 1 is killed --> all others end --> decide_sequel: restart 1 of 3
                                                --> all workers start again, with the folder and
                                                    seed of the run, and resume

With several hosts, each reports how it saw the failure. The launcher that all are connected with
decides for all of them.
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
from paceline.cluster.launcher.worker import WorkerProcess, describe_end

_MOST_ERROR_CHARACTERS = 300  # characters of an error in a message between launchers


class JobRestarts:
    """The restarts of one job, as one launcher takes part in them.

    `start` is what the workers of the present start are told. `words` say what follows on its
    failure, once that is known.

    Args:
        allowed: How often the job may start again.
        patience: Seconds for which hosts wait for another one in the place of one that is gone.
    """

    def __init__(self, allowed: int, *, patience: float = 0.0) -> None:
        self.state = RestartState(allowed)
        self.sequel_words = ""
        self._patience = patience
        # Folder of the run on this host, if its workers have opened the run. Other hosts may have
        # it in another folder.
        self._folder: str | None = None
        self._peers: RestartPeers | None = None  # of the present start
        self._has_reported = self._is_due = False

    @property
    def present_start(self) -> JobStart:
        """The present start."""
        start = self.state.start
        return (
            start
            if start.folder is None or self._folder is None
            else replace(start, folder=self._folder)
        )

    @property
    def is_due(self) -> bool:
        """Whether the job is going to start again."""
        return self._is_due

    def begin_start(self, peers: RestartPeers) -> None:
        """Begin a start with these launchers, from the latest state that any of them knows."""
        self._peers, self._has_reported, self.sequel_words = peers, False, ""
        self.state = peers.state or self.state

    def take_due(self) -> bool:
        """Whether the job is to start again. True only once for each restart."""
        was_due, self._is_due = self._is_due, False
        return was_due

    def settle_sequel(self, failure: Failure, workers: Sequence[WorkerProcess]) -> bool:
        """Agree with the other hosts on what follows on the failure that ended this start.

        Returns whether all hosts know it. Call it again until they do.
        """
        peers = self._peers
        assert peers is not None
        if not self._has_reported:
            self._has_reported = True
            peers.tell_ended(self.make_report(failure, workers))
        # Only the launcher that decides gets the reports of all hosts.
        if (reports := peers.host_reports) is not None and peers.sequel is None:
            peers.tell_sequel(self.decide_sequel(failure, reports))
        if peers.sequel is None:
            return False
        self.sequel_words = peers.sequel.words
        if peers.sequel.state is not None:
            self.state, self._is_due = peers.sequel.state, True
        return True

    def make_report(self, failure: Failure, workers: Sequence[WorkerProcess]) -> HostReport:
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
        folder = self._folder or self.present_start.folder
        report = replace(
            report,
            checkpoint=None
            if folder is None
            else find_newest_checkpoint(Path(folder) / "checkpoints"),
        )
        if failure.rank is None or all(worker.rank != failure.rank for worker in workers):
            return report
        return replace(
            report,
            failure=failure.summary_line().removeprefix("paceline: "),
            cause=_find_cause(failure, workers),
        )

    def decide_sequel(self, failure: Failure, reports: Mapping[int, HostReport]) -> Sequel:
        """Decide what follows on the failure that ended this start.

        The sequel has no words if no restart is left, and no state if the job doesn't start again.
        """
        state = self._add_opened_run(reports)
        restart_count, folder = len(state.start.events), state.start.folder
        if restart_count == state.allowed:
            return Sequel("")
        first = reports[min(reports)]
        checkpoint = first.checkpoint or next(
            (report.checkpoint for report in reports.values() if report.checkpoint is not None),
            None,
        )
        failed_report = next(
            (report for report in reports.values() if report.failure is not None), HostReport()
        )
        # An error that comes again after the same checkpoint would come each time.
        refusal = self._find_refusal(failure, failed_report, reports)
        digest = (
            None if failed_report.cause is None else _digest_cause(failed_report.cause, checkpoint)
        )
        if digest is not None and digest in state.causes:
            refusal = refusal or "the same error has come before, from the same place on"
        if refusal is not None:
            return Sequel(f"it isn't started again: {refusal}")
        if folder is None or (checkpoint is None and min(reports) > 0):
            # No run was opened, or the first host, which saves the checkpoints, is gone.
            origin = ""
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
        words = f"all start again{origin}{waits} (restart {restart_count + 1} of {state.allowed})"
        event = (
            f"{failed_report.failure or failure.summary_line().removeprefix('paceline: ')}; {words}"
        )
        start = replace(state.start, events=(*state.start.events, (time.time(), event)))
        return Sequel(
            words,
            replace(
                state,
                start=start,
                causes=state.causes if digest is None else (*state.causes, digest),
            ),
        )

    def _add_opened_run(self, reports: Mapping[int, HostReport]) -> RestartState:
        """The state, with the run that the workers have opened.

        If hosts have it in different folders, the first host's counts.
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

    def _find_refusal(
        self, failure: Failure, failed_report: HostReport, reports: Mapping[int, HostReport]
    ) -> str | None:
        """Reason why another start would end in the same way; None if it may not."""
        runs = max(report.runs for report in reports.values())
        if runs > 1:
            return (
                f"its script has opened {runs} runs, and only a job of one run can go on; "
                "start each with a command of its own"
            )
        if failed_report.cause is not None and failed_report.cause.is_final:
            return f"every start would end in this {failed_report.cause.kind}"
        if failure.rank is None and not self._patience:
            return "--patience 0 waits for no other host in its place"
        return None


def _find_cause(failure: Failure, workers: Sequence[WorkerProcess]) -> Cause | None:
    """The error of the worker that failed, in its own words if it reported one.

    None if it was killed: the job then starts again as often as restarts are allowed.
    """
    failed_records = [
        record
        for worker in workers
        if worker.rank == failure.rank
        for record in worker.records
        if record["event"] == "failed"
    ]
    if failed_records:
        return Cause(
            str(failed_records[0]["type"]),
            str(failed_records[0]["message"]),
            bool(failed_records[0]["is_final"]),
        )
    if failure.code > 128 and failure.words == describe_end(failure.code):
        return None
    return Cause(
        failure.words, failure.tail.rpartition("\n")[2][-_MOST_ERROR_CHARACTERS:], is_final=False
    )


def _digest_cause(cause: Cause, checkpoint: str | None) -> str:
    """Make a short text that is equal if an error comes again after the same checkpoint."""
    return hashlib.sha256(
        repr((cause.kind, cause.message, checkpoint)).encode(errors="replace")
    ).hexdigest()[:16]


def find_newest_checkpoint(checkpoints: Path) -> str | None:
    """Name of the checkpoint in this folder that was written last; None if there is none."""
    dated_names = []
    for manifest in checkpoints.glob("step-*/manifest.json"):
        try:
            dated_names.append((manifest.stat().st_mtime_ns, manifest.parent.name))
        except OSError:
            # It can't be read. If the run resumes from it, that raises an error that users see.
            continue
    return max(dated_names)[1] if dated_names else None
