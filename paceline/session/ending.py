"""The end of a run: together with all workers, alone after an error, or when a host leaves."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from paceline.checkpoint.saving import CheckpointSaver
from paceline.cluster.control import events
from paceline.comm.native.default_group import DefaultProcessGroup
from paceline.formatting import format_as_call
from paceline.loop.iteration import explain_error
from paceline.loop.turns import TrainingLoop
from paceline.prepare.optimizers import OptimizerWatch
from paceline.prepare.registry import Prepared
from paceline.record.folder import RunFolder, script_name
from paceline.record.hangs import HangDetector
from paceline.record.held_memory import MemoryWatch
from paceline.record.hints import StartupHints
from paceline.record.history import RunHistory
from paceline.record.live import MAX_EVENTS, LiveRecord
from paceline.record.log import MetricsLog
from paceline.record.outcome.planned import conclude_plan
from paceline.record.outcome.settings import collect_settings
from paceline.record.outcome.worker_time import WorkerTime
from paceline.record.summary import (
    RunOutcome,
    describe_dealing,
    describe_goodput,
    write_outcome,
)
from paceline.sync.abilities import Abilities
from paceline.sync.base import Strategy
from paceline.unequal.probe.link_watch import LinkWatch
from paceline.workers.axes import RunAxes
from paceline.workers.groups import CurrentView


@dataclass(frozen=True)
class RunConclusion:
    """Writes the summary of a run that ends well, and collects its fields during the run."""

    strategy: Strategy
    axes: RunAxes
    abilities: Abilities
    view: CurrentView
    loop: TrainingLoop
    prepared: Prepared
    saving: CheckpointSaver
    history: RunHistory
    folder: RunFolder
    log: MetricsLog
    memory: MemoryWatch
    links: LinkWatch
    worker_time: WorkerTime

    def collect_progress(self) -> dict[str, Any]:
        """Collect the fields of the summary that exist during the run; `live` has its progress.

        Only the worker that writes the log may call this.
        """
        totals, writer = self.log.compute_totals(work=False), self.log.writer
        assert totals is not None and writer is not None, "only the first worker writes the log"
        cluster, everyone = self.view.cluster, self.axes.everyone
        fields = {name: value for name, value in vars(totals).items() if name != "rank_work"}
        late, latest = None, writer.latest
        # ranks of an earlier view may belong to other workers now
        if latest is not None and latest.workers == everyone.origins:
            straggler = latest.late
            host = cluster.host_of(straggler.rank).name
            late = {
                "rank": straggler.rank,
                "host": host,
                "seconds": straggler.seconds,
                "step": latest.step,
                "cause": straggler.cause,
            }
        mesh = self.axes.mesh
        # The other workers tell the first one where their time went only at the end.
        present = [self.worker_time.collect_seconds()] * everyone.group.size
        log_began = self.log.opened_at - self.history.began
        return {
            "sync": format_as_call(self.strategy),
            "workers": everyone.group.size,
            "hosts": len(cluster.hosts),
            **fields,
            "checkpoints": self.saving.copy_tally(),
            "events": self.history.events[-MAX_EVENTS:],
            "saves": self.history.saves[-MAX_EVENTS:],
            "loader": describe_dealing(self.prepared.loaders),
            "mesh": dict(mesh.axes) if self.axes.cut_axes else {},
            "places": [mesh.coordinates(rank) for rank in range(mesh.size)]
            if self.axes.cut_axes
            else [],
            "links": self.links.slow_links,
            "goodput": describe_goodput(self.log, present, self.worker_time, log_began),
            "live": self._collect_live(late),
        }

    def _collect_live(self, late: dict[str, Any] | None) -> dict[str, Any]:
        """Collect the current state of the run. `late` describes the latest rank."""
        cluster, everyone, writer = self.view.cluster, self.axes.everyone, self.log.writer
        assert writer is not None, "only the first worker writes the log"
        # Steps that ended on this worker since it last handed over its log.
        recorded = writer.members.sum_seconds(everyone.origins[everyone.group.rank])
        return {
            "began": self.history.began,
            "script": script_name(),
            "step": self.loop.steps_made,
            "total_steps": self.log.total_steps,
            "cluster": [{"host": host.name, "ranks": list(host.ranks)} for host in cluster.hosts],
            "origins": list(everyone.origins),
            "recent": writer.recent,
            "unrecorded": {
                part: max(seconds - recorded[part], 0.0)
                for part, seconds in self.loop.clock.step_seconds.items()
            },
            "late": late,
            "link": self.links.status_remark,
        }

    def write_conclusion(self) -> None:
        """Write the summary and the trace. Collective."""
        self.log.finish(self.axes.everyone)
        self.saving.wait_for_write()
        history, tables, remote, reports = (
            self.history,
            self.prepared.tables,
            self.abilities.remote,
            self.abilities.reports,
        )
        facts, served = (tables.facts(), tables.served()) if self.view.is_first else ([], [])
        # servers of the strategy come before servers of tables
        is_serving = reports is not None and (remote is None or remote.attached)
        if self.view.is_first and reports is not None and is_serving:
            facts, served = [*reports.facts(), *facts], [*reports.served(), *served]
        outcome = RunOutcome(
            self.strategy,
            self.view.cluster,
            self.prepared,
            self.loop.clock.sent,
            self.loop.clock.axes,
            self.memory.collect_facts(),
            self.loop.clock.interruptions.unmeasured,
            history.note_event,
            history.events,
            history.saves,
            history.began,
            self.saving.summary_facts(self.folder.checkpoints) if self.view.is_first else {},
            facts,
            served,
            history.results,
            self.links.slow_links,
            self._collect_settings() if self.view.is_first else {},
            self.worker_time,
        )
        write_outcome(outcome, self.axes, self.folder, self.log)

    def _collect_settings(self) -> dict[str, Any]:
        """Collect the settings, and how the run compares with its plan, if it has one."""
        worker = self.view.worker
        settings = collect_settings(worker.place, worker.device, self.history.seed, self.prepared)
        planned = conclude_plan(worker.place.plan, self.folder.metrics, worker.say)
        return settings if planned is None else {**settings, "plan": planned}


class RunEnding:
    """Ends a run, once.

    `conclusion` is written if the run ends well. `world` is torch's default group, if any.
    """

    def __init__(
        self,
        conclusion: RunConclusion,
        watch: OptimizerWatch,
        hints: StartupHints,
        watching: HangDetector | None,
        world: DefaultProcessGroup | None,
        *,
        live: LiveRecord,
    ) -> None:
        self._conclusion, self._live, self._watch, self._hints, self._watching = (
            conclusion,
            live,
            watch,
            hints,
            watching,
        )
        self._world = world
        self._view, self._context, self._loop = (
            conclusion.view,
            conclusion.axes.slice,
            conclusion.loop,
        )
        self._log, self._saving, self._prepared = (
            conclusion.log,
            conclusion.saving,
            conclusion.prepared,
        )
        self._close_callbacks: list[Callable[[], None]] = []
        self._process = os.getpid()
        self.closed = False

    def on_close(self, ending: Callable[[], None]) -> None:
        """Call `ending` when the run ends, however it ends."""
        self._close_callbacks.append(ending)

    def close(self) -> None:
        """Leave together with all workers: write the summary, and free memory and sockets.

        A second call does nothing.
        """
        if self._has_ended:
            return
        self.closed = True
        self._hints.end_watching()
        # these steps are collective: if one fails, the others can't be waited for any more
        try:
            self._prepared.epochs.finish()
            self._prepared.cuts.level_ties()
            self._conclusion.write_conclusion()
            self._context.agreement.tell_everyone(
                "the end of the run", self._saving.raise_write_error
            )
            self._live.remove_file()
        except BaseException as error:
            self._leave_alone(type(error), error)
            raise
        # trackers may take long, and the other workers no longer wait for this one
        self._close_trackers(failed=False)
        events.report_closed(self._view.worker.place)
        self.free_resources(failed=False)

    def end_after_error(self, kind: type[BaseException], error: BaseException | None) -> None:
        """Leave at once after an error, without waiting for other workers."""
        if not self._has_ended:
            self.closed = True
            self._leave_alone(kind, error)

    @property
    def _has_ended(self) -> bool:
        """Whether this process has no run to end.

        A process that the script forked has none: the run belongs to the worker.
        """
        return self.closed or os.getpid() != self._process

    def leave_job(self, prepare: Callable[[], None]) -> NoReturn:
        """Call `prepare`, and leave the job between two turns.

        The remaining workers deal the next turn among themselves.
        """
        self.closed = True
        prepare()
        # the remaining workers would delete an unfinished checkpoint
        self._saving.wait_for_write()
        events.report_leaving(self._view.worker.place)
        self._log.close()
        self.free_resources(failed=True)
        self._close_trackers(failed=True)
        raise SystemExit(0)

    def _leave_alone(self, kind: type[BaseException], error: BaseException | None) -> None:
        axes = self._conclusion.axes
        # complete the message of the error before it is reported anywhere
        self._context.agreement.add_whereabouts(error, axes.everyone if axes.cut_axes else None)
        if self._world is not None:
            self._world.explain_error(error)
        explain_error(error, self._loop.turns.under_way)
        events.report_failure(self._view.worker.place, kind, error)
        self._live.record_failure(kind, error)
        self._log.close_quietly()
        self.free_resources(failed=True)
        self._close_trackers(failed=True)

    def _close_trackers(self, *, failed: bool) -> None:
        """Close trackers after they have received the rest of the run."""
        if self._log.feed is not None:
            self._log.feed.close_trackers(failed=failed)

    def free_resources(self, *, failed: bool) -> None:
        """Free everything of the run, and make the script's objects plain ones again."""
        self.closed = True
        if self._watching is not None:
            self._watching.stop_watching()
        self._watch.end_watching()
        self._loop.backward.unwatch()
        self._loop.release_objects()
        # after a failure groups are aborted first, as nothing may wait for other workers below
        groups = [*self._context.extra_groups, self._context.group]
        for group in groups if failed else ():
            group.abort()
        self._prepared.release_models(failed=failed)
        self._loop.backward.sync.detach()
        for group in groups:
            group.close()
        if self._world is not None:
            self._world.close(failed=failed)
        self._view.worker.store.close()
        for ending in self._close_callbacks:
            ending()
        self._saving.close()
