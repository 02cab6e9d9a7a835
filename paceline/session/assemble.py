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
from paceline.record.layout import ModelLayout
from paceline.record.live import LiveRecord
from paceline.record.log import MetricsLog
from paceline.record.run_records import LogMeetings, RunRecords
from paceline.record.total_steps import TotalSteps
from paceline.replicas.compare import Comparison, ReplicaComparer, check_comparison
from paceline.replicas.manual_gradients import ManualGradients
from paceline.replicas.step_count import StepCount
from paceline.session.collector import LogCollector
from paceline.session.ending import RunConclusion, RunEnding
from paceline.session.run import Run
from paceline.session.run_parts import RunParts
from paceline.state.versioned import GeneratorStates, WorkerGenerator
from paceline.sync.base import Strategy
from paceline.sync.context import SyncContext
from paceline.unequal.probe.link_watch import LinkWatch
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
            "its own way "
            "between hosts"
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
        view, axes, context = joined.view, joined.axes, joined.axes.slice
        worker, self.elastic = view.worker, view.worker.place.worker is not None
        self.joined, self.view, self.axes, self.context, self.strategy = (
            joined,
            view,
            axes,
            context,
            strategy,
        )
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
        self.history = RunHistory(
            collectives.agree_on_seed(axes.everyone, seed, arguments), began, context.announce
        )
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
        # options are checked before the folder appears, so that a mistake leaves no folder behind
        check_comparison(comparison, self.sync, self.abilities.replicated)
        if self.elastic:
            check_elastic(worker.device, self.abilities)
        self.folder, self.log = open_records(self.history, self.abilities.sample_queue is not None)
        self._build_followers()
        self._build_ending(comparison)

    def _can_tied_copies_diverge(self) -> bool:
        """Whether copies of a parameter on two stages could be changed in different ways.

        Codecs do that, and exchanges between replicas.
        """
        return self.loop.backward.replicas_diverge or bool(self.context.accounts)

    def _build_followers(self) -> None:
        """Build the parts that follow the training: state, checkpoints, records, watches."""
        context, loop, prepared, history = self.context, self.loop, self.prepared, self.history
        worker = self.view.worker
        self.progress = RunProgress(loop, prepared.loaders)
        prepared.state.add_part("progress", self.progress)
        tables, pinned, start = (
            prepared.tables,
            worker.device.type == "cuda",
            worker.place.job_start,
        )
        log = None if start is None else self.log
        worker_id = worker.place.worker
        # in an elastic job ranks change, but the id of a worker is never used again
        stream = self.context.group.rank if worker_id is None else worker_id
        generator = WorkerGenerator(history.seed, stream, worker.device)
        self.own = WorkerState(
            GeneratorStates(worker.device, order=prepared.order, generator=generator),
            self.sync,
            self.abilities,
            prepared.optimizers,
            self.layout,
            context.announce,
            log=log,
            route=self.axes.replicas.route,
            generator=generator,
        )
        parts = CutParts(self.axes.everyone, self.layout, compute_write_timeout(worker.deadline))
        self.saving = CheckpointSaver(
            prepared.state,
            self.own,
            context,
            history,
            parts=parts,
            tables=tables,
            deadline=worker.deadline,
            pinned=pinned,
        )
        self.records, self.hints = (
            RunRecords(history, self.folder, self.log, LogMeetings()),
            StartupHints(prepared, loop),
        )
        self.resumption = RunResumption(
            self.saving,
            everyone=self.axes.everyone,
            announce=context.announce,
            loop=loop,
            records=self.records,
            folder=self.folder,
            start=start,
        )
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
        elastic, recovery, leaving = self._build_recovery() if self.elastic else (None, None, None)
        loop, log, comparer = self.loop, self.log, self.comparer
        collector = self._build_collector(recovery, leaving)
        survival = None
        if elastic is not None and recovery is not None and leaving is not None:
            survival = self._build_survival(elastic, recovery, leaving, collector)
        ended = (
            self.links.step_ended,
            collector.step_ended,
            *(() if survival is None else (survival.step_ended,)),
        )
        plan, policy = TotalSteps(total_steps, log.expect_steps), PolicyCheck(self.joined.straggler)
        observer, place = self.abilities.observer, self.view.worker.place
        restart = () if place.job_start is None else (self.resumption.training_begins,)
        unlimited = place.most_steps is None and place.most_seconds is None
        limit = () if unlimited else (RunLimit(place, collector.request_stop).step_ended,)
        # if only the layout of the model is wanted, write it before the first step, and exit
        describing = (
            ()
            if place.layout is None
            else (ModelLayout(self.prepared, self.axes, Path(place.layout)).write_and_exit,)
        )

        def begin_comparing() -> None:
            comparer.begin_training(loop.steps_made)

        # the loop calls the parts of each event in this order, which is the same on all workers
        loop.observe(
            LoopObservers(
                training_begins=(
                    *describing,
                    *restart,
                    *(() if survival is None else (survival.begin_surviving,)),
                    begin_comparing,
                ),
                epoch_began=(
                    collector.leave_lockstep,
                    self.follower.epoch_began,
                    self.progress.loop_began,
                ),
                lead_taken=(policy.check_leader, plan.add_leading_loader),
                first_step=(
                    *describing,
                    self.prepared.cuts.check_used,
                    self.memory.predict_optimizer,
                    self.hints.hint_at_missing_gradients,
                ),
                stepped=() if observer is None else (observer.note_optimizer_step,),
                doubled=(self.memory.measure_held,),
                committed=() if elastic is None else (elastic.buddies.copy_if_due,),
                step_ended=(
                    log.end_step,
                    comparer.step_ended,
                    self.follower.step_ended,
                    *limit,
                    *ended,
                ),
                ghost_ended=(self.hints.hint_at_ghost_metrics,),
                went_back=(log.fold_later_steps,),
            )
        )
        self.hints.begin_watching()
        self.watch.begin_watching()
        return Run(
            RunParts(
                view=self.view,
                axes=self.axes,
                strategy=self.strategy,
                history=self.history,
                folder=self.folder,
                log=log,
                loop=loop,
                prepared=self.prepared,
                own=self.own,
                progress=self.progress,
                plan=plan,
                saving=self.saving,
                hints=self.hints,
                watch=self.watch,
                collector=collector,
                resumption=self.resumption,
                comparer=comparer,
                survival=survival,
                ending=self.ending,
            )
        )

    def _build_recovery(self) -> tuple[ElasticRun, Recovery, Departure]:
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
        return body, Recovery(worker, context.agreement, body, orders, members), leaving

    def _build_collector(
        self, recovery: Recovery | None, leaving: Departure | None
    ) -> LogCollector:
        eviction = None
        if self.joined.straggler == "evict" and leaving is not None:
            check_eviction(self.abilities)
            eviction = Eviction(self.view, leaving, self.history)
        everyone, records = self.axes.everyone, self.records
        return LogCollector(
            self.loop,
            self.prepared,
            everyone,
            records,
            recovery=recovery,
            follower=self.follower,
            links=self.links,
            live=self.live,
            eviction=eviction,
        )

    def _build_survival(
        self, body: ElasticRun, recovery: Recovery, leaving: Departure, collector: LogCollector
    ) -> Survival:
        loop, saving, folder = self.loop, self.saving, self.folder
        survival = Survival(
            recovery,
            leaving,
            self.view,
            loop,
            self.prepared,
            collector=collector,
            history=self.history,
            tally=self.tally,
            save=lambda: saving.save(
                SaveRequest(folder.checkpoints, loop.steps_made, keep=3, background=False)
            ),
            depart=self.ending.leave_job,
        )
        rollback = Rollback(body.get_turn_state, loop.models, self.own.randomness, loop.backward)
        self.epochs.recover_by(
            RecoverableTransaction(loop.turns, loop.backward, rollback, self.prepared.tables),
            survival.update_generation,
        )
        return survival
