"""The run, which a script works with from start to end."""

from __future__ import annotations

import builtins
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from torch import Tensor, nn

from paceline.cluster.control import events
from paceline.data.loader import ShareLoader, Turn
from paceline.data.shares import Shares
from paceline.data.spec import Loss, Readers, Sharding, Weigh
from paceline.errors import UsageError
from paceline.fault import checkpoint
from paceline.formatting import spell
from paceline.session.checkpoint.saving import CheckpointSaver, SaveRequest
from paceline.session.checkpoint.state import RunProgress, WorkerState
from paceline.session.elastic.adapter import ElasticRun
from paceline.session.elastic.departure import Departure
from paceline.session.elastic.recovery import Recovery, ViewGroups
from paceline.session.groups import Subgroups, WorkerContext
from paceline.session.loop import collectives
from paceline.session.loop.rollback import Rollback
from paceline.session.loop.turns import TrainingLoop
from paceline.session.prepare import checks
from paceline.session.prepare.abilities import resolve
from paceline.session.prepare.optimizers import OptimizerWatch
from paceline.session.prepare.registry import Prepared
from paceline.session.record.collector import LogCollector
from paceline.session.record.folder import RunFolder
from paceline.session.record.hints import StartupHints
from paceline.session.record.log import MetricsLog
from paceline.session.record.status_line import StatusLine
from paceline.session.record.summary import RunOutcome, conclude
from paceline.session.record.total_steps import TotalSteps
from paceline.session.replicas.compare import Comparison, ReplicaComparer
from paceline.session.replicas.manual_gradients import ManualGradients
from paceline.state.versioned import Randomness, Stateful
from paceline.sync.autograd import GradientTracker
from paceline.sync.base import Strategy
from paceline.sync.context import SyncContext


class Run:
    """One training run, the same on every worker.

    `rank`, `size`, `local_rank`, `host` (name), `device`, `group` (of all workers), `steps` (taken so far), `seed` (shared by all workers),
    `is_first` (of all workers) and `weight` (of my present batch) say where this worker is. `results`: what the first adds to the summary.
    """

    def __init__(
        self, worker: WorkerContext, context: SyncContext, strategy: Strategy, *, seed: int | None, began: float, comparison: Comparison
    ) -> None:
        place = worker.place
        self.rank, self.size, self.local_rank = place.rank, place.size, worker.local
        self.host = worker.cluster.of(place.rank).name
        self.device, self.group = worker.device, context.group
        self.strategy, self.cluster, self.began = strategy, worker.cluster, began
        self.events: list[dict[str, Any]] = []
        self.results: dict[str, Any] = {}
        self._worker_context, self._context, self._agreement = worker, context, context.agreement
        subgroups = Subgroups(context, lambda: self.cluster)  # strategies find the workers of a host through it
        sync = strategy.begin(context)
        abilities = resolve(sync)
        self._backward = GradientTracker(sync, context, abilities)
        self._loop = TrainingLoop(context, self._backward, abilities, self, worker.page)
        self._prepared = Prepared(context, self._backward, self._loop, self.device, subgroups)
        self._collector = LogCollector(self._loop, self._prepared, context, self.event)
        self._watch = OptimizerWatch(self._prepared, self._loop, ManualGradients(self._loop, self._collector))
        self._hints = StartupHints(self._prepared, self._loop)
        self._watch.strange, self._prepared.first = self._hints.strange, self._hints.prepared
        self.state = self._prepared.state
        self._progress = RunProgress(self._loop, self._prepared.loaders)
        self._own = WorkerState(Randomness(self.device), sync, abilities, self._prepared.optimizers)
        tables, patience, pinned = self._prepared.tables, worker.deadline, self.device.type == "cuda"
        self._saving = CheckpointSaver(self.state, self._own, context, self.event, tables=tables, deadline=patience, pinned=pinned)
        self._endings: list[Callable[[], None]] = []
        self._closed = self._waits = self._joined = False
        arguments = f"seed={seed}, sync={spell(strategy)}, {comparison}, replicate={worker.replicate!r}"
        self.seed = collectives.seed(context.agreement, seed, arguments)
        self._comparer = ReplicaComparer(comparison, context, self._prepared, sync, abilities.replicated)
        self._comparer.event, self._comparer.conclude = self.event, self._conclude
        self._loop.asked = lambda loader: self._begin() if loader.terms.training else None
        self.state.add("progress", self._progress)
        self._recovery: Recovery | None = None
        if place.worker is not None:
            self._survive(worker)

    def _survive(self, worker_context: WorkerContext) -> None:
        """Go on when workers are lost, from the first epoch on."""
        if self.device.type == "cuda":
            raise UsageError("runs on GPUs can't go on yet when workers are lost; leave out --min-workers, or say start(device='cpu')")
        body = ElasticRun(self._context, self._prepared, self._loop, self._own, self._comparer, replicate=worker_context.replicate)
        body.moved, body.lost, body.facts, body.learn = self._moved, self._lost, self._facts, self._learn
        recovery = self._recovery = self._collector.recovery = Recovery(worker_context, self._agreement, body)
        self._leaving = body.leaving = Departure(recovery, self._context, worker_context.home, body.keepers)
        self._prepared.survives = True
        self._loop.survive(Rollback(body.parts, self._loop.models, self._own.randomness, self._backward), self._generation)
        self._waits = self._watch.tally.waits = recovery.fresh

    def open(self, folder: RunFolder, log: MetricsLog, total_steps: int | None = None) -> None:
        """Begin to write to the run's folder and log."""
        self.folder, self._log, log.note = folder, log, self._lost
        self._plan = TotalSteps(total_steps, lambda steps: setattr(log, "total_steps", steps))
        self._loop.leads = self._plan.led
        self._collector.open(log)
        self._loop.idle_epochs.fold = log.fold
        self._hints.begin()
        self._watch.begin()

    # ---- who and where

    @property
    def steps(self) -> int:
        """Steps taken: turns of training loaders that are over, each of one global batch."""
        return self._loop.steps

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all workers."""
        return self.rank == 0 and not self._waits

    @property
    def turn(self) -> Turn | None:
        """The turn under way of a loader; None outside of loops."""
        return self._loop.turn

    @property
    def weight(self) -> float:
        """The weight of my present batch (samples, or what `weigh` says); 1 outside of a loop over a loader."""
        return 1.0 if self.turn is None else self.turn.weight

    # ---- preparing

    def prepare(
        self,
        *objects: Any,
        loss: Loss | None = None,
        weigh: Weigh | None = None,
        accumulate: int | None = None,
        shares: Shares | Any = None,
        batchnorm: Literal["sync", "local"] | None = None,
        train: bool | None = None,
        pad: bool | None = None,
        readers: Readers | None = None,
        shard: Sharding | None = None,
    ) -> Any:
        """Make models, optimizers, DataLoaders, schedulers, GradScalers and metrics ready; return them in the order they were given.

        Models, optimizers, schedulers and scalers stay the objects they are; a DataLoader comes back as a loader of my shares. Its batch
        size is the global one. `loss`: whether the loss is a "mean" (default) over the batch or a "sum"; `weigh(batch)` is a batch's weight
        where the mean is over something else than samples (tokens). `accumulate`: micro-batches of each global batch. `shares`: ratios,
        one for each worker, or a function from the global batch size to samples for each worker. `batchnorm`: "sync" (default: statistics
        of the global batch) or "local". `train`: whether loaders are for training (default: what torch.is_grad_enabled() is when iterated).
        `pad`: in evaluation a worker without samples gets the batch's first (left out by `gather`, `mean` and `log`), and not 0 rows.
        `readers`, `shard`: see `paceline.data.loader.deal`. An option that is said where there is no loader (or model) yet is kept for
        those of later calls, unless they say something else.

        Raises `UsageError` for what can't be prepared, on every worker if their models differ.
        """
        options = {"loss": loss, "weigh": weigh, "accumulate": accumulate, "shares": shares, "readers": readers, "shard": shard}
        ready = self._prepared.prepare(objects, {**options, "batchnorm": batchnorm, "train": train, "pad": pad})
        self._hints.introduce(len(self.cluster.hosts), spell(self.strategy))
        return ready[0] if len(ready) == 1 else tuple(ready)

    def keep(self, name: str, thing: Stateful) -> None:
        """Let `thing` (anything with state_dict and load_state_dict, alike on all workers) be part of the run's state: saved, resumed."""
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UsageError(f"run.keep({name!r}) got a {type(thing).__qualname__}, which lacks state_dict or load_state_dict; write both")
        self.state.add(f"kept.{name}", thing)

    # ---- when workers are lost

    def _begin(self) -> None:
        """Survive losses from here on, as all workers are about to train. A worker that joins while they train waits here to be let in."""
        if self._recovery is not None:
            checks.check_schedulers(self._prepared.optimizers, self.state.parts)
        if self._recovery is not None and self._recovery.fresh:
            self._recovery.join()
            self._watch.tally.enter()
            self._waits, self._joined = False, True
        elif self._recovery is not None:
            self._recovery.arm()
        self._comparer.begin(self.steps)

    def _generation(self, loader: ShareLoader) -> int:
        """Return how often the group of workers has changed. Between two turns of training, waiting workers are let in."""
        assert self._recovery is not None
        leaves = self._leaving.goes or (self._recovery.orders.leaving and self._collector.sample_queue is not None)
        if leaves and loader.terms.training and self._loop.turn is None:
            self._depart()
        training = [other for other in self._prepared.loaders if other.terms.training and other.under_way]
        if training == [loader] and self._loop.turn is None and self._collector.sample_queue is not None:
            self._collector.between(self._recovery)
        elif training == [loader] and self._loop.turn is None:
            if self._recovery.short and not self._recovery.pending:
                self._wait_for_others()
            if self._recovery.pending:
                self._own.abilities.converge()
                self._recovery.admit()
        return self._recovery.generation

    def _wait_for_others(self) -> None:
        """Save, and wait until others come, as there are fewer workers than the job needs."""
        assert self._recovery is not None
        path = self.save()
        self._lost(f"{self.size} of {self._worker_context.place.min_workers} workers are left: saved {path.name}, and waiting for others")
        self._recovery.wait()

    def _depart(self) -> None:
        """Leave the job between two turns, as this host is asked to; the others deal the next turn among themselves."""
        self._closed = True
        assert self._recovery is not None
        self._recovery.depart()
        self._saving.wait()  # or the others would sweep it away
        events.left(self._worker_context.place)
        self._log.close()
        self._end(failed=True)
        raise SystemExit(0)

    def _moved(self, founded: ViewGroups) -> None:
        """Go on in the groups of a new view, in the middle of whatever call has failed."""
        worker_context = founded.worker_context
        self._worker_context, self.cluster, self.group = worker_context, worker_context.cluster, founded.group
        self._watch.tally.doubt()
        self.rank, self.size, self.local_rank = worker_context.place.rank, worker_context.place.size, worker_context.local
        if self.is_first:
            self._log.take_over(StatusLine())

    def _lost(self, text: str) -> None:
        self.event(text)
        self._context.announce(text)

    def _facts(self) -> dict[str, Any]:
        return {"flush": self._collector.next, "events": self.events, "began": self.began, "log": self._log.number, "seed": self.seed}

    def _learn(self, facts: dict[str, Any]) -> None:
        self._collector.next, self.events, self.began, self.seed = (facts[name] for name in ("flush", "events", "began", "seed"))
        self._log.place(facts["log"])

    # ---- in the loop

    def epochs(self, count: int) -> Iterator[int]:
        """Yield 0, 1, ... count - 1; after `resume` from the epoch that was under way. Ends early when all have agreed to `stop`."""
        self._begin()
        self._plan.begin(count, self._prepared.loaders)
        if not self._progress.enter():
            return
        while self._progress.epoch < count:
            joined, self._joined = self._joined, False
            if not joined and self._collector.stop_agreed():  # a worker that has joined did so in the middle of an epoch
                return
            self._progress.begin()
            self._hints.begin()
            yield self._progress.epoch
            self._loop.end_broken()
            self._progress.end()
            self._hints.ended()

    def event(self, what: str) -> None:
        """Note that something happened, for the summary."""
        self.events.append({"time": time.time() - self.began, "what": what})

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Add up backward passes inside of the block on their own worker; the first one outside exchanges the whole sum."""
        return self._loop.quietly()

    def clip(self, what: nn.Module | Iterable[Tensor], max_norm: float, norm_type: float = 2.0) -> Tensor | None:
        """Clip the gradients of a model or of parameters to a global norm; return the norm before (None before the last micro-batch)."""
        self._loop.ready("run.clip")
        if not self._loop.acting:
            return None
        tensors = [what] if isinstance(what, Tensor) else list(what.parameters() if isinstance(what, nn.Module) else what)
        self._prepared.tables.check_clip(tensors)
        return self._prepared.clip(tensors, max_norm, norm_type)

    def log(self, **values: Any) -> None:
        """Record numbers of this step (one-element tensors, or floats), whose means over workers, by samples, are written. Never waits."""
        if not self._prepared.loaders:
            self._hints.logged()
        if not self._loop.transaction.failed:
            self._log.log(self.steps + (self._loop.led is not None), values, self.weight)  # a ghost's weight is 0: ignored

    def print(self, *values: Any, **options: Any) -> None:
        """Call `print` on the first worker alone."""
        if self.is_first:
            builtins.print(*values, **options)

    def mean(self, x: Tensor | float, weight: float | None = None) -> Any:
        """Return the mean of `x` over workers by `weight` (default: `run.weight`): a float for a float, else a tensor. Collective."""
        weight = float(self.weight if weight is None else weight)
        return self._agreement.attempt(lambda: collectives.mean(self._agreement, self.group, x, weight))

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows (dim 0) of all workers; inside a loop over a loader in data set order, ghosts left out. Collective."""
        ghost = self.turn is not None and self.turn.ghost
        nothing = (x.detach().reshape(1) if x.dim() == 0 else x.detach())[:0]
        return self._loop.gather(lambda: collectives.gather(self._agreement, self.group, x, ghost=ghost), nothing)

    def barrier(self) -> None:
        """Wait until every worker has come here. Collective."""
        self._agreement.meet("run.barrier")

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Let the first worker of each host go through the block ahead of the others (for downloads). Collective."""
        if self.local_rank == 0:
            yield
            self._agreement.meet("run.first")
        else:
            self._agreement.meet("run.first")
            yield

    def stop(self) -> None:
        """Ask to stop early; never waits. All workers stop together, at the end of the present epoch at the latest."""
        self._collector.asked = True

    # ---- after each step

    def step_ended(self, turn: Turn, seconds: dict[str, float]) -> None:
        steps = self._loop.steps
        for account in self._context.accounts:
            self._log.log(steps, account.take())
        self._log.step(steps, turn.global_batch, seconds)
        self._comparer.step_ended(steps)
        if turn.source is not None:
            self._hints.haunted()
        if steps >= self._collector.next:
            self._collector.step_ended()
        if self._recovery is not None and not self._loop.apart:
            self._leaving.step_ended()

    # ---- state

    def save(self, *, keep: int = 3, background: bool = False) -> Path:
        """Write a checkpoint of everything prepared and kept, and return its folder; the newest `keep` stay. Collective.

        In the loop body the present step counts as taken: save after `optimizer.step()`, at the end of the body. When it returns, the
        checkpoint is on the disk. With `background` it has been copied in the first worker's memory, and a thread there writes it while
        training goes on: the folder is there once it is whole. One is written at a time: a save that comes before waits for it.

        Raises `CheckpointError` where the disk refuses: for what was written in the background at the next save, `resume` or `close`.
        """
        step = self.steps + (self._loop.led is not None and self._loop.led.last_micro)
        folder = self.folder.checkpoints
        if self._loop.transaction.failed:  # this turn comes again, and saves then
            return next(iter(checkpoint.newest(folder)), folder)
        return self._saving.save(SaveRequest(folder, step, keep, background))

    def resume(self, folder: str | Path | None = None) -> bool:
        """Go on from the newest whole checkpoint (of `folder`, a run's; default: of runs called the same before).

        Returns False, and says so, if there is none at all. Otherwise everything prepared and kept is as it was saved, for any number of
        workers. Collective.

        Raises `CheckpointError` if there are some and none can be used.
        """
        asked = [self.folder.path, *self.folder.earlier] if folder is None else [Path(folder)]
        places = [place if place.name == "checkpoints" else place / "checkpoints" for place in asked]
        found = self._saving.resume(places, named=self.folder.named or folder is not None)
        if found is None:
            return False
        self._collector.next = self.steps + 1
        self._context.announce(f"resumed from {found} at step {self.steps}")
        return True

    # ---- the end

    def on_close(self, ending: Callable[[], None]) -> None:
        """Call `ending` when the run ends, however it ends."""
        self._endings.append(ending)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None or events.leaves_well(error):
            self.close()
        else:
            self.fail(kind, error)

    def close(self) -> None:
        """Leave together with all workers: the summary is written, memory and sockets are freed. Twice is harmless."""
        if self._closed:
            return
        self._closed = True
        self._hints.ended()
        try:
            self._loop.finish()
            self._conclude()
            self._agreement.tell("the end of the run", self._saving.last)
        except BaseException as error:
            self._leave(type(error), error)
            raise
        events.closed(self._worker_context.place)
        self._end(failed=False)

    def _conclude(self) -> None:
        self._log.finish(self._agreement)
        self._saving.wait()
        sent, tally, remote, tables = self._loop.sent, self._saving.tally(), self._own.abilities.remote, self._prepared.tables
        facts, served = (tables.facts(), tables.served()) if self.is_first else ([], [])
        if self.is_first and remote is not None and remote.attached:
            facts, served = [*remote.facts(), *facts], [*remote.served(), *served]
        outcome = RunOutcome(self.strategy, self.cluster, self._prepared, sent, self.event, self.events, tally, facts, served, self.results)
        conclude(outcome, self._context, self.folder, self._log)

    def fail(self, kind: type[BaseException], error: BaseException | None) -> None:
        """Leave at once and without the others, after an error."""
        if not self._closed:
            self._closed = True
            self._leave(kind, error)

    def _leave(self, kind: type[BaseException], error: BaseException | None) -> None:
        self._agreement.locate(error)
        if self._worker_context.world is not None:
            self._worker_context.world.explain(error)
        self._loop.explain(error)
        events.report_failure(self._worker_context.place, kind, error)
        self._log.leave()
        self._end(failed=True)

    def _end(self, *, failed: bool) -> None:
        if self._worker_context.watching is not None:
            self._worker_context.watching.stop()
        self._watch.end()
        self._backward.unwatch()
        self._loop.release()
        groups = [*self._context.extra_groups, self.group]
        for group in groups if failed else ():
            group.abort()
        self._prepared.release(failed=failed)
        self._backward.sync.detach()
        for group in groups:
            group.close()
        if self._worker_context.world is not None:
            self._worker_context.world.close(failed=failed)
        self._worker_context.store.close()
        for ending in self._endings:
            ending()
        self._saving.end()
