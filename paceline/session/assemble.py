"""Builds a run from its parts, and lists the parts that follow the training loop.

Joined             this worker, and the groups that it shares with other workers
  strategy.begin   -> the strategy as it runs, and its abilities
  TrainingLoop     -> the loop, which watches backward passes
  Prepared         -> the objects that a script gives to `run.prepare`
  RunHistory       -> the seed of all workers, and events; then folder and log are opened
  RunEnding        -> frees everything at the end
  LogCollector, ReplicaComparer, StartupHints, OptimizerWatch, CheckpointSaver
  Recovery         -> continues the run when workers are lost
  LoopObservers    -> the parts that are called in the loop, in order
  Run              -> the object that a script works with
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from paceline.checkpoint.layout import StateLayout
from paceline.checkpoint.parts import CutParts
from paceline.checkpoint.resumption import RunResumption
from paceline.checkpoint.saving import CheckpointSaver, SaveRequest, compute_write_timeout
from paceline.checkpoint.state import RunProgress, WorkerState
from paceline.cluster.control.commands import CommandPipe
from paceline.comm.native.default_group import DefaultProcessGroup
from paceline.elastic.adapter import ElasticRun, check_elastic, find_server_keepers
from paceline.elastic.departure import Departure
from paceline.elastic.eviction import Eviction, check_eviction
from paceline.elastic.recovery import Recovery
from paceline.elastic.rollback import Rollback
from paceline.elastic.survival import Survival
from paceline.elastic.transaction import RecoverableTransaction
from paceline.formatting import format_as_call
from paceline.loop import collectives
from paceline.loop.epochs import LoaderEpochs
from paceline.loop.observers import LoopObservers
from paceline.loop.run_limit import RunLimit
from paceline.loop.step import TrainingStep
from paceline.prepare.abilities import resolve_abilities
from paceline.prepare.cuts import ModelCuts
from paceline.prepare.optimizers import OptimizerWatch
from paceline.prepare.registry import Prepared
from paceline.record.folder import RunFolder
from paceline.record.hangs import HangDetector
from paceline.record.held_memory import MemoryWatch
from paceline.record.hints import StartupHints
from paceline.record.history import RunHistory
from paceline.record.layout import list_layout_writers
from paceline.record.live import LiveRecord
from paceline.record.log import MetricsLog
from paceline.record.outcome.worker_time import follow_loop
from paceline.record.run_records import LogMeetings, RunRecords
from paceline.record.total_steps import TotalSteps
from paceline.replicas.compare import Comparison, ReplicaComparer, check_comparison
from paceline.replicas.manual_gradients import ManualGradients
from paceline.replicas.step_count import StepCount
from paceline.session.collector import LogCollector
from paceline.session.ending import RunConclusion, RunEnding
from paceline.session.run import Run
from paceline.session.run_parts import RunParts
from paceline.session.saved_end import SavedEnd
from paceline.state.versioned import GeneratorStates, WorkerGenerator
from paceline.sync.base import Strategy
from paceline.sync.context import SyncContext
from paceline.unequal.probe.link_watch import LinkWatch
from paceline.unequal.probe.step_profiler import make_profiler_observers
from paceline.unequal.shares.follower import ShareFollower
from paceline.unequal.shares.quota import ProcessorQuota
from paceline.unequal.stragglers.straggler_policy import Policy, PolicyCheck
from paceline.workers.axes import RunAxes
from paceline.workers.groups import CurrentView, Subgroups, gather_worker_numbers

OpenRecords = Callable[[RunHistory, bool], tuple[RunFolder, MetricsLog]]


@dataclass(frozen=True)
class JoinedWorker:
    """A worker that has joined: its place, its groups, and its hang detector.

    `world` is torch.distributed's default group, for libraries that ask for it. `quota` measures
    the processor time of steps. `straggler` is the policy for slow workers.
    """

    view: CurrentView
    axes: RunAxes
    watching: HangDetector | None = None
    world: DefaultProcessGroup | None = None
    quota: ProcessorQuota | None = None
    straggler: Policy | None = None


class _ElasticParts(NamedTuple):
    """The parts of a run that may lose workers, and take in new ones."""

    body: ElasticRun
    recovery: Recovery
    departure: Departure


def assemble_run(
    joined: JoinedWorker,
    strategy: Strategy,
    *,
    seed: int | None,
    began: float,
    comparison: Comparison,
    open_records: OpenRecords,
    total_steps: int | None = None,
) -> Run:
    """Build the run of a worker that has joined. Collective.

    `open_records` returns the folder and the log. Its arguments are the history, which has the seed
    of all workers, and whether each worker counts its own samples of a step. Each worker does so if
    workers are not in lockstep.
    """
    return _RunAssembly(
        joined, strategy, seed=seed, began=began, comparison=comparison, open_records=open_records
    ).connect_parts(total_steps)


def _announce_unused_cluster(context: SyncContext, strategy: Strategy) -> None:
    """Announce that the strategy ignores the measured links, if it chooses its own routes."""
    if context.route_facts is not None and not context.routes:
        context.announce(
            f"{context.route_facts.source} decides nothing here: {format_as_call(strategy)} has "
            "its own way between hosts"
        )


class _RunAssembly:
    """The parts of a run in the order in which they are built."""

    def __init__(
        self,
        joined: JoinedWorker,
        strategy: Strategy,
        *,
        seed: int | None,
        began: float,
        comparison: Comparison,
        open_records: OpenRecords,
    ) -> None:
        self.joined, self.view, self.strategy = joined, joined.view, strategy
        self.axes, self.context = axes, context = joined.axes, joined.axes.slice
        worker = joined.view.worker
        self.elastic = worker.place.worker is not None
        # strategies find the workers of a host through `Subgroups`
        subgroups = Subgroups(context, lambda: axes.hosts_of(context))
        if axes.replicas is not context:
            Subgroups(axes.replicas, lambda: axes.hosts_of(axes.replicas))
        self.sync = strategy.begin(axes.replicas)
        _announce_unused_cluster(axes.replicas, strategy)
        self.abilities = resolve_abilities(self.sync)
        step = TrainingStep(self.sync, context, self.abilities, worker.page)
        self.loop, self.epochs = step.loop, LoaderEpochs(step)
        arguments = (
            f"seed={seed}, sync={format_as_call(strategy)}, {comparison}, "
            f"replicate={worker.replicate!r}"
        )
        self.worker_time = follow_loop(self.loop, worker.place, began)
        self.history = RunHistory(
            collectives.agree_on_seed(axes.everyone, seed, arguments), began, context.announce
        )
        self._build_prepared(step, subgroups)
        # options are checked before the folder appears, so that a mistake leaves no folder behind
        check_comparison(comparison, self.sync, self.abilities.replicated)
        if self.elastic:
            check_elastic(worker.device, self.abilities)
        self.folder, self.log = open_records(self.history, self.abilities.sample_queue is not None)
        self._build_saving()
        self._build_followers()
        self._build_ending(comparison)

    def _build_prepared(self, step: TrainingStep, subgroups: Subgroups) -> None:
        """Build the registry of the script's objects, and the layout of their state."""
        axes, worker = self.axes, self.view.worker
        cuts = ModelCuts(
            axes,
            self.history.seed,
            worker.place.cut,
            self.history.note_event,
            self._can_tied_copies_diverge,
        )
        self.prepared = Prepared(
            axes,
            step,
            self.epochs,
            worker.device,
            subgroups,
            cuts=cuts,
            shares=worker.place.shares,
        )
        self.layout = StateLayout(
            axes.mesh,
            axes.everyone.group.rank,
            cuts.placements,
            cuts.replacement_of,
            cuts.stage_splits,
            cuts.share_stage_state,
        )

    def _can_tied_copies_diverge(self) -> bool:
        """Whether copies of a parameter on two stages could be changed in different ways.

        Codecs do that, and exchanges between replicas.
        """
        return self.loop.backward.replicas_diverge or bool(self.context.accounts)

    def _build_saving(self) -> None:
        """Build the parts that save the state of the run, and continue from what is saved."""
        context, loop, prepared, history = self.context, self.loop, self.prepared, self.history
        worker, place = self.view.worker, self.view.worker.place
        self.progress = RunProgress(loop, prepared.loaders)
        prepared.state.add_part("progress", self.progress)
        # in an elastic job ranks change, but the id of a worker is never used again
        stream = context.group.rank if place.worker is None else place.worker
        generator = WorkerGenerator(history.seed, stream, worker.device)
        self.own = WorkerState(
            GeneratorStates(worker.device, order=prepared.order, generator=generator),
            self.sync,
            self.abilities,
            prepared.optimizers,
            self.layout,
            context.announce,
            log=None if place.job_start is None else self.log,
            route=self.axes.replicas.route,
            generator=generator,
        )
        parts = CutParts(self.axes.everyone, self.layout, compute_write_timeout(worker.deadline))
        self.saving = CheckpointSaver(
            prepared.state,
            self.own,
            context,
            history,
            self.worker_time,
            parts=parts,
            tables=prepared.tables,
            deadline=worker.deadline,
            pinned=worker.device.type == "cuda",
        )
        self.records = RunRecords(history, self.folder, self.log, LogMeetings(), self.worker_time)
        self.resumption = RunResumption(
            self.saving,
            everyone=self.axes.everyone,
            announce=context.announce,
            loop=loop,
            records=self.records,
            folder=self.folder,
            start=place.job_start,
            resumes=place.resumes,
        )

    def _build_followers(self) -> None:
        """Build the parts that watch the training, and hint at mistakes."""
        loop, prepared, history = self.loop, self.prepared, self.history
        self.hints = StartupHints(prepared, loop)
        mesh = self.axes.mesh if self.axes.cut_axes else None
        self.follower = ShareFollower(
            loop, prepared.loaders, history, mesh=mesh, quota=self.joined.quota
        )
        self.tally = StepCount(loop, waits=self.view.waits_for_admission)
        by_hand = ManualGradients(loop, self.records.meetings, self.axes.first_replica_of)
        self.watch = OptimizerWatch(
            prepared, loop, by_hand, self.tally, self.hints.hint_at_foreign_optimizer
        )
        self.memory = MemoryWatch(prepared, self.abilities.remote)
        self.links = LinkWatch(loop, self.axes, self.strategy, history, survives=self.elastic)

    def _build_ending(self, comparison: Comparison) -> None:
        """Build the parts that report the progress of the run, and the part that ends it."""
        view, log, prepared, history = self.view, self.log, self.prepared, self.history
        writer = log.writer
        conclusion = RunConclusion(
            self.strategy,
            self.axes,
            self.abilities,
            view,
            self.loop,
            prepared,
            self.saving,
            history,
            self.folder,
            log,
            self.memory,
            self.links,
            self.worker_time,
        )
        self.live = LiveRecord(
            self.folder,
            lambda: writer is not None and not writer.stands_by,
            conclusion.collect_progress,
            self.context.announce,
        )
        self.context.add_event_listener(history.note_event)
        history.add_follower(self.live.update_file)
        self.live.update_file()
        self.ending = RunEnding(
            conclusion,
            self.watch,
            self.hints,
            self.joined.watching,
            self.joined.world,
            live=self.live,
        )
        self.comparer = ReplicaComparer(
            comparison,
            self.axes.replicas,
            prepared,
            self.sync,
            self.abilities.replicated,
            event=history.note_event,
            # writing is collective, and in a mesh only workers of the differing part would call it
            conclude=(lambda: None) if self.axes.cut_axes else conclusion.write_conclusion,
        )

    def connect_parts(self, total_steps: int | None) -> Run:
        """Connect the parts to the loop, and make the `Run` of them."""
        elastic = self._build_recovery() if self.elastic else None
        saved_end = SavedEnd(
            self.view.worker.place,
            self.loop,
            self.prepared,
            self.history,
            save=self._save_now,
            close=self.ending.close,
            departure=None if elastic is None else elastic.departure,
        )
        self.ending.on_close(saved_end.stop_listening)
        collector = self._build_collector(elastic, saved_end)
        survival = None if elastic is None else self._build_survival(elastic, collector)
        plan = TotalSteps(total_steps, self.log.expect_steps)
        observers = self._order_observers(plan, collector, saved_end, survival, elastic)
        # For `paceline plan` steps are only measured.
        measuring = make_profiler_observers(self.prepared, self.view.worker.place, self.axes.groups)
        self.loop.observe(observers.preceded_by(measuring))
        self.hints.begin_watching()
        self.watch.begin_watching()
        return Run(
            RunParts(
                view=self.view,
                axes=self.axes,
                strategy=self.strategy,
                history=self.history,
                folder=self.folder,
                log=self.log,
                loop=self.loop,
                prepared=self.prepared,
                own=self.own,
                progress=self.progress,
                plan=plan,
                saving=self.saving,
                hints=self.hints,
                watch=self.watch,
                collector=collector,
                resumption=self.resumption,
                comparer=self.comparer,
                survival=survival,
                ending=self.ending,
            )
        )

    def _order_observers(
        self,
        plan: TotalSteps,
        collector: LogCollector,
        saved_end: SavedEnd,
        survival: Survival | None,
        elastic: _ElasticParts | None,
    ) -> LoopObservers:
        """List the parts that the loop calls at each moment, in the same order on all workers."""
        log, observer, place = self.log, self.abilities.observer, self.view.worker.place
        memory, hints = self.memory, self.hints
        steppers = () if observer is None else (observer.note_optimizer_step,)
        goes_on = place.job_start is not None or place.resumes
        restart = (self.resumption.training_begins,) if goes_on else ()
        unlimited = place.most_steps is None and place.most_seconds is None
        limit = () if unlimited else (RunLimit(place, collector.request_stop).step_ended,)
        # if only the layout of the model is wanted, write it before the first step, and exit
        describing = list_layout_writers(place.layout, self.prepared, self.axes)
        saved_ends = (saved_end,) if saved_end.can_be_asked else ()

        return LoopObservers(
            training_begins=(
                *describing,
                *restart,
                *(() if survival is None else (survival.begin_surviving,)),
                self._begin_comparing,
                self.worker_time.begin_training,
                *(each.begin_training for each in saved_ends),
            ),
            turn_failed=(self.worker_time.discard_turn,),
            epoch_began=(
                collector.leave_lockstep,
                self.follower.epoch_began,
                self.progress.loop_began,
            ),
            lead_taken=(PolicyCheck(self.joined.straggler).check_leader, plan.add_leading_loader),
            first_step=(
                *describing,
                self.prepared.cuts.check_used,
                memory.predict_optimizer,
                hints.hint_at_missing_gradients,
            ),
            stepped=(*steppers, *(each.note_optimizer_step for each in saved_ends)),
            doubled=(memory.measure_held,),
            committed=() if elastic is None else (elastic.body.buddies.copy_if_due,),
            step_ended=(
                log.end_step,
                self.comparer.step_ended,
                self.follower.step_ended,
                *limit,
                self.links.step_ended,
                collector.step_ended,
                *(() if survival is None else (survival.step_ended,)),
            ),
            ghost_ended=(hints.hint_at_ghost_metrics,),
            went_back=(log.fold_later_steps,),
        )

    def _begin_comparing(self) -> None:
        self.comparer.begin_training(self.loop.steps_made)

    def _build_recovery(self) -> _ElasticParts:
        """Build the parts that continue the run when workers are lost."""
        worker, context, own, prepared = self.view.worker, self.context, self.own, self.prepared
        place, watching = worker.place, self.joined.watching
        assert place.worker is not None and place.orders_fd is not None
        orders = CommandPipe(
            place.orders_fd, *(() if watching is None else (watching.answer_launcher,))
        )
        members = gather_worker_numbers(worker)
        leaving = Departure(
            place.worker,
            members,
            orders,
            context,
            home=worker.launcher_name,
            keepers=lambda: find_server_keepers(own, prepared),
            agreed=place.saves_on_term and self.abilities.sample_queue is None,
        )
        body = ElasticRun(
            context,
            prepared,
            self.loop,
            own,
            self.comparer,
            records=self.records,
            view=self.view,
            tally=self.tally,
            leaving=leaving,
            replicate=worker.replicate,
        )
        recovery = Recovery(worker, context.agreement, body, orders, members)
        return _ElasticParts(body, recovery, leaving)

    def _save_now(self) -> Path:
        """Write a checkpoint after a step. Collective."""
        folder, steps, keep = self.folder.checkpoints, self.loop.steps_made, self.saving.latest_keep
        return self.saving.save(SaveRequest(folder, steps, keep, background=False))

    def _build_collector(self, elastic: _ElasticParts | None, saved_end: SavedEnd) -> LogCollector:
        eviction = None
        if self.joined.straggler == "evict" and elastic is not None:
            check_eviction(self.abilities)
            eviction = Eviction(self.view, elastic.departure, self.history)
        return LogCollector(
            self.loop,
            self.prepared,
            self.axes.everyone,
            self.records,
            recovery=None if elastic is None else elastic.recovery,
            follower=self.follower,
            links=self.links,
            live=self.live,
            saved_end=saved_end,
            eviction=eviction,
        )

    def _build_survival(self, elastic: _ElasticParts, collector: LogCollector) -> Survival:
        loop = self.loop
        survival = Survival(
            elastic.recovery,
            elastic.departure,
            self.view,
            loop,
            self.prepared,
            collector=collector,
            records=self.records,
            tally=self.tally,
            save=self._save_now,
            depart=self.ending.leave_job,
        )
        rollback = Rollback(
            elastic.body.get_turn_state, loop.models, self.own.randomness, loop.backward
        )
        self.epochs.recover_by(
            RecoverableTransaction(loop.turns, loop.backward, rollback, self.prepared.tables),
            survival.update_generation,
        )
        return survival
