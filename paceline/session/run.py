"""The `Run`, which a script uses from start to end."""

from __future__ import annotations

import builtins
import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Unpack, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from paceline.checkpoint.best import parse_metric
from paceline.checkpoint.files import catalogue
from paceline.checkpoint.files.manifest import Best
from paceline.checkpoint.saving import SaveRequest
from paceline.cluster.control import events
from paceline.cluster.mesh import Mesh
from paceline.comm.group_protocol import Group
from paceline.data.costs import Cost
from paceline.data.shares import RequestedShares
from paceline.data.spec import Loss as Reduction
from paceline.data.spec import Sharding, Weigh
from paceline.errors import UsageError
from paceline.formatting import format_as_call
from paceline.loop import collectives
from paceline.loop.stepping import MicroBatches, SteppedModels
from paceline.parallel.pipelining.batches import Loss
from paceline.prepare.cuts import WantedCuts
from paceline.prepare.initial import Init
from paceline.prepare.metrics import check_logged
from paceline.prepare.options import A, B, BatchNorm, C, D, E, PreparedLoader, PrepareKeywords, S, T
from paceline.prepare.options import Preparable as P
from paceline.prepare.whole import WholeParameters, find_parameters
from paceline.record.folder import RunFolder
from paceline.removed import declare_removed_options
from paceline.session.inference import ModelInference
from paceline.session.run_parts import RunParts
from paceline.state.versioned import Stateful


class Run:
    """One training run, the same on every worker, as `pl.start()` gives it.

    >>> with pl.start() as run:
    ...     model, optimizer, loader = run.prepare(model, optimizer, loader)
    ...     for epoch in run.epochs(3):
    ...         for x, y in loader:
    ...             loss = F.cross_entropy(model(x), y)
    ...             loss.backward()
    ...             optimizer.step()
    ...             optimizer.zero_grad()

    `rank`, `size`, `local_rank`, `host`, `device`, `group`, `is_first` and `mesh` place this worker
    among all workers. `steps` counts the steps taken, and `weight` belongs to the present batch.
    All workers share `seed`. The first worker adds `results` to the summary.
    """

    def __init__(self, parts: RunParts) -> None:
        self._parts = parts
        self._view, self._axes, self._context, self._agreement = (
            parts.view,
            parts.axes,
            parts.axes.slice,
            parts.axes.slice.agreement,
        )
        self._history, self._log, self._loop, self._prepared = (
            parts.history,
            parts.log,
            parts.loop,
            parts.prepared,
        )
        self._own, self._progress, self._plan, self._saving = (
            parts.own,
            parts.progress,
            parts.plan,
            parts.saving,
        )
        self._hints, self._watch, self._collector, self._resumption = (
            parts.hints,
            parts.watch,
            parts.collector,
            parts.resumption,
        )
        self._comparer, self._survival, self._ending = parts.comparer, parts.survival, parts.ending
        self._backward = parts.loop.backward
        self._inference = ModelInference(parts.axes, parts.prepared.cuts, self.device)
        self._whole = WholeParameters(parts.loop, parts.prepared.cuts, parts.axes)
        self._stepped = SteppedModels(parts.loop, parts.prepared.cuts)

    # ---- where this worker is

    @property
    def rank(self) -> int:
        """Rank of this worker among all workers."""
        return self._view.rank

    @property
    def size(self) -> int:
        """Number of workers."""
        return self._view.size

    @property
    def local_rank(self) -> int:
        """Rank of this worker among the workers of its host."""
        return self._view.worker.local_index

    @property
    def host(self) -> str:
        """Name of this worker's host."""
        worker = self._view.worker
        return worker.cluster.host_of(worker.place.rank).name

    @property
    def device(self) -> torch.device:
        """Device of this worker's models and batches."""
        return self._view.worker.device

    @property
    def group(self) -> Group:
        """Group of all workers.

        `group.all_reduce(x).wait()` sums a tensor over workers, as `sum` does.
        """
        return self._axes.everyone.group

    @property
    def mesh(self) -> Mesh:
        """The workers as a grid with named axes.

        All workers lie along `data`, unless `start` or `--mesh` says something else.
        """
        return (
            self._axes.mesh
            if self._survival is None
            else Mesh((("data", self.size),), tuple(range(self.size)))
        )

    @property
    def seed(self) -> int:
        """Seed that all workers share."""
        return self._history.seed

    @property
    def generator(self) -> torch.Generator:
        """Random generator on `device` for noise that differs between workers.

        >>> noise = torch.randn(len(x), 100, generator=run.generator, device=run.device)

        Its seed is made from `seed` and the worker's place. Workers that differ only along `tensor`
        or `stage` have the same samples, so they draw the same noise. Checkpoints hold its state,
        and a turn that is taken again draws the same numbers. If a run resumes with another number
        of workers, a worker continues the noise of the earlier worker at its place, and a worker at
        a new place starts afresh.
        """
        return self._own.generator.generator

    @property
    def folder(self) -> RunFolder:
        """Folder of the run: `run.folder.path`, and `run.folder.checkpoints` inside it."""
        return self._parts.folder

    @property
    def events(self) -> list[dict[str, Any]]:
        """Events so far, as the summary lists them, each with its `time` in seconds.

        They are lost workers, joined workers, and the notes made by `event`.
        """
        return self._history.events

    @property
    def results(self) -> dict[str, Any]:
        """Values that the first worker adds to the summary."""
        return self._history.results

    @property
    def steps(self) -> int:
        """Number of steps taken: finished turns of training loaders, each of one global batch."""
        return self._loop.steps_made

    @property
    def is_first(self) -> bool:
        """Whether this is the first of all workers."""
        return self._view.is_first

    @property
    def weight(self) -> float:
        """Weight of the present batch: its samples, or the value of `weigh`.

        It is 1 outside of a loop over a loader.
        """
        turn = self._loop.turn
        return 1.0 if turn is None else turn.weight

    # ---- preparing

    @overload
    def prepare(
        self, a: DataLoader[T], /, **options: Unpack[PrepareKeywords]
    ) -> PreparedLoader[T]: ...
    @overload
    def prepare(self, a: A, /, **options: Unpack[PrepareKeywords]) -> A: ...
    @overload
    def prepare(
        self, a: A, b: DataLoader[T], /, **options: Unpack[PrepareKeywords]
    ) -> tuple[A, PreparedLoader[T]]: ...
    @overload
    def prepare(self, a: A, b: B, /, **options: Unpack[PrepareKeywords]) -> tuple[A, B]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: DataLoader[T], /, **options: Unpack[PrepareKeywords]
    ) -> tuple[A, B, PreparedLoader[T]]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, /, **options: Unpack[PrepareKeywords]
    ) -> tuple[A, B, C]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: DataLoader[S], d: DataLoader[T], /, **options: Unpack[PrepareKeywords]
    ) -> tuple[A, B, PreparedLoader[S], PreparedLoader[T]]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: DataLoader[T], /, **options: Unpack[PrepareKeywords]
    ) -> tuple[A, B, C, PreparedLoader[T]]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, /, **options: Unpack[PrepareKeywords]
    ) -> tuple[A, B, C, D]: ...
    @overload
    def prepare(
        self, a: A, b: B, c: C, d: D, e: E, /, **options: Unpack[PrepareKeywords]
    ) -> tuple[A, B, C, D, E]: ...
    @overload
    def prepare(
        self, a: P, b: P, c: P, d: P, e: P, f: P, /, *more: P, **options: Unpack[PrepareKeywords]
    ) -> tuple[Any, ...]: ...
    @overload
    def prepare(self, **options: Unpack[PrepareKeywords]) -> tuple[()]: ...
    @declare_removed_options(
        readers=(
            "each worker reads the whole stream: leave it out, or say shard='mine' if each rank "
            "has samples of its own"
        ),
        accumulate="run.step(model, x, y, loss=..., micro_batches=k or 'auto') cuts a batch by "
        "itself; in a loop of your own put all passes but the last into run.no_sync()",
    )
    def prepare(
        self,
        *objects: Any,
        loss: Reduction | None = None,
        weigh: Weigh | None = None,
        cost: Cost | None = None,
        shares: RequestedShares = None,
        batchnorm: BatchNorm | None = None,
        train: bool | None = None,
        pad: bool | None = None,
        shard: Sharding | None = None,
        cut: WantedCuts | None = None,
        init: Init | None = None,
    ) -> Any:
        """Prepare models, optimizers, DataLoaders, schedulers, GradScalers and metrics.

        >>> model, optimizer, loader = run.prepare(model, optimizer, loader, shares=[2, 1])

        Models, optimizers, schedulers and scalers stay the same objects. A DataLoader comes back as
        a loader of this worker's shares: its batch size is that of the global batch. An option may
        be given before there is a loader or a model. It then holds for later calls, until another
        value is given.

        Args:
            objects: The objects, in any order.
            loss: How the loss sums up the samples of a batch: "mean" (default) or "sum".
            weigh: Function from a batch to its weight, if the loss is a mean over something else
                than samples, such as `pl.tokens("labels")`.
            cost: Function from a sample to its cost, such as its length. Shares are then equal in
                cost and not in samples. `pl.padded(cost)` is for workers that pad their samples.
            shares: How a global batch is divided: one ratio for each worker, a function from the
                batch size to a number of samples for each worker, or "auto", which follows the
                measured speed of each worker. Default: equal shares.
            batchnorm: Statistics of BatchNorm: "sync" (over the global batch, the default) or
                "local".
            train: Whether the loaders are for training. Default: `torch.is_grad_enabled()` when a
                loader is iterated.
            pad: Whether, in evaluation, a worker without samples gets the first sample of the batch
                and not 0 rows. `gather`, `mean` and `log` leave it out.
            shard: "mine" for a stream that already gives each rank its own samples.
            cut: One cut or a list of cuts, which give each worker its part of the models. `paceline
                run --cut` overrides it. See docs/cuts.md.
            init: First values of a model: a file of weights, a state dict, or a function that is
                called with each module of a model that was built under `pl.meta()`.

        Returns:
            The prepared objects in the same order; the object itself if there is one.

        Raises:
            UsageError: An object can't be prepared. All workers raise it if their models differ.
        """
        options = {"loss": loss, "weigh": weigh, "shares": shares}
        more = {"batchnorm": batchnorm, "cut": cut, "init": init, "cost": cost, "shard": shard}
        ready = self._prepared.prepare(objects, {**options, **more, "train": train, "pad": pad})
        self._hints.introduce_run(self._axes, format_as_call(self._parts.strategy))
        return ready[0] if len(ready) == 1 else tuple(ready)

    def keep(self, name: str, thing: Stateful) -> None:
        """Make an object part of the run's state, which is saved and resumed.

        >>> run.keep("average", torch.optim.swa_utils.AveragedModel(model))

        Copies of a cut model, such as an `AveragedModel` of it, are cut as the model is.

        Args:
            name: Name of the object in checkpoints.
            thing: Object with `state_dict` and `load_state_dict`, with equal state on all workers.

        Raises:
            UsageError: The object lacks one of the two methods.
        """
        if not (hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")):
            raise UsageError(
                f"run.keep({name!r}) got a {type(thing).__qualname__}, which lacks state_dict or "
                "load_state_dict; write both"
            )
        self._prepared.state.add_part(f"kept.{name}", thing)
        self._prepared.cuts.copies.find_copies(
            f"kept.{name}", thing, [model for _, model in self._prepared.models]
        )

    # ---- in the loop

    def epochs(self, count: int) -> Iterator[int]:
        """Yield 0, 1, ... count - 1; after `resume`, begin with the epoch that was under way.

        >>> for epoch in run.epochs(3):
        ...     for x, y in loader:
        ...         run.step(model, x, y, loss=F.cross_entropy)
        ...         optimizer.step()
        ...         optimizer.zero_grad()

        It ends early if the workers have agreed to `stop`.
        """
        self._resumption.resume_after_restart()
        self._prepared.epochs.begin_training()
        self._plan.begin_training(count, self._prepared.loaders)
        if not self._progress.begin_epoch_loop():
            return
        while self._progress.epoch < count:
            joined = self._survival is not None and self._survival.take_joined_flag()
            # the vote is taken between epochs, and a worker that has just joined is inside one
            if not joined and self._collector.agree_to_stop():
                return
            self._progress.begin_epoch()
            self._plan.begin_epoch(self._progress.epoch)
            self._hints.begin_watching()
            yield self._progress.epoch
            self._prepared.epochs.end_left()
            self._progress.end_epoch()
            self._resumption.warn_without_checkpoint()
            self._hints.end_watching()

    def forward(self, model: nn.Module, *inputs: Any, **options: Any) -> Any:
        """Run a model without gradients, and gather its whole output even if it is cut.

        >>> logits = run.forward(model, x)

        Inputs move to `device` as batches do. Workers that differ only along `tensor` or `stage`
        must pass the same inputs, and get the same outputs; other workers may pass their own. Call
        `model.eval()` first to switch off dropout. Collective if the model is cut.

        Args:
            model: A prepared model.
            inputs: Positional arguments of the model.
            options: Keyword arguments of the model.
        """
        return self._inference.run_forward(model, inputs, options)

    def step(
        self,
        model: nn.Module,
        *batch: Any,
        loss: Loss,
        weigh: Weigh | None = None,
        micro_batches: MicroBatches = "auto",
        **options: Any,
    ) -> Tensor:
        """Run forward and backward of one batch, for models in any layout, and return the loss.

        >>> loss = run.step(model, x, y, loss=F.cross_entropy)  # no loss.backward() after it

        It replaces `model(x)` and `loss.backward()`. If gradients are off, as in an evaluation,
        there is no backward pass. The scale of a prepared GradScaler is applied here, so the script
        only calls `scaler.step` and `scaler.update`. Layers that take statistics of a batch take
        those of each micro-batch.

        If the mesh has an axis `stage`, all workers along it must call this with the same batch.
        The batch is cut into micro-batches along the first dimension of its tensors. The loss is
        then a mean over samples, or over the loader's `weigh`.

        Args:
            model: A prepared model.
            batch: Inputs of the model, and the target as the last one.
            loss: Function from output and target to one number.
            weigh: Function from a tuple of all that is in `batch` and `options`, with the target
                last, to its weight. Needed with `micro_batches` if the loader has a `weigh`.
            micro_batches: Number of parts of this worker's share that go forward and back one after
                the other. Their sum is exchanged once, and the batch of the step stays the same.
                "auto" (default) takes the share as one part. A worker whose memory runs out in the
                first steps goes on with halves, if only parameters of `model` have gradients and no
                layer takes statistics of the batch.
            options: Keyword arguments of the model.

        Returns:
            The loss of this worker's share, a tensor of one element.

        Raises:
            DataError: Workers along `stage` got different batches; raised on all of them.
        """
        return self._stepped.take_step(
            model, batch, options, loss, weigh, micro_batches=micro_batches
        )

    def event(self, what: str) -> None:
        """Note in the summary that something happened.

        >>> run.event("the learning rate was halved")
        """
        self._history.note_event(what)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Accumulate gradients on this worker, without exchanging them, inside the block.

        >>> with run.no_sync():
        ...     F.cross_entropy(model(x), y).backward()

        The first backward pass outside the block exchanges the whole sum.
        """
        return self._loop.hold_exchanges()

    def clip(
        self, what: nn.Module | Iterable[Tensor], max_norm: float, norm_type: float = 2.0
    ) -> Tensor | None:
        """Clip gradients to a global norm, and return the norm from before.

        >>> norm = run.clip(model, 1.0)  # between loss.backward() and optimizer.step()

        Args:
            what: A model, or parameters.
            max_norm: Largest norm allowed.
            norm_type: Order of the norm. Default: 2.

        Returns:
            The norm before clipping; None in a turn that will be dealt again.
        """
        self._loop.exchange_due_gradients("run.clip")
        if not self._loop.is_acting:
            return None
        tensors = (
            [what]
            if isinstance(what, Tensor)
            else list(what.parameters() if isinstance(what, nn.Module) else what)
        )
        self._prepared.tables.check_clip(tensors)
        return self._prepared.clipping.clip_gradients(tensors, max_norm, norm_type)

    @overload
    def whole(self, what: nn.Parameter) -> contextlib.AbstractContextManager[nn.Parameter]: ...
    @overload
    def whole(
        self, what: nn.Module
    ) -> contextlib.AbstractContextManager[dict[str, nn.Parameter]]: ...
    @contextlib.contextmanager
    def whole(self, what: nn.Module | nn.Parameter) -> Iterator[Any]:
        """Lend a parameter in its full shape to all workers, and keep the changes. Collective.

        >>> with run.whole(model.head.weight) as weight, torch.no_grad():
        ...     weight.div_(weight.norm(dim=-1, keepdim=True))

        The block gets a parameter with the full value and, after backward, the full gradient, even
        if the model is cut. Both may be changed. Use it between two steps, or between backward and
        step.

        Args:
            what: A parameter; or a module, which gives a dict of all its parameters by name.

        Raises:
            UsageError: Workers leave different values.
        """
        named = find_parameters(what, self._prepared.cuts)
        with self._whole.lend_whole(named) as wholes:
            yield wholes if isinstance(what, nn.Module) else next(iter(wholes.values()))

    def log(self, **values: Any) -> None:
        """Record values of this step, or of the last step taken. It never waits.

        >>> run.log(loss=loss, **{"val/accuracy": 0.5})

        Numbers and tensors of one element are written as their mean over workers, weighted by
        samples. Metrics of torchmetrics that were prepared are computed from the states of all
        workers. `pl.histogram(tensor)` and `pl.image(tensor)` are taken from the first worker. All
        values go into the run's folder and to the trackers of `report_to`. The summary has the last
        values, as `logged`.
        """
        if not self._prepared.loaders:
            self._hints.hint_at_missing_turns()
        if not self._loop.transaction.failed:
            check_logged(values, self._prepared.metrics)
            # the log ignores values of weight 0, such as those of a worker without samples
            weight = self.weight if self._axes.counts_samples else 0.0
            self._log.add_values(self.steps + (self._loop.leading_turn is not None), values, weight)

    def print(self, *values: Any, **options: Any) -> None:
        """Call `print` on the first worker alone.

        >>> run.print("epoch", epoch, "is over")
        """
        if self.is_first:
            builtins.print(*values, **options)

    @overload
    def mean(self, x: Tensor, weight: float | None = None) -> Tensor: ...
    @overload
    def mean(self, x: float, weight: float | None = None) -> float: ...
    def mean(self, x: Tensor | float, weight: float | None = None) -> Tensor | float:
        """Average `x` over workers by weight. Collective.

        >>> accuracy = run.mean((model(x).argmax(1) == y).double().mean())

        Args:
            x: A tensor of the same shape on all workers, or a number.
            weight: Weight of this worker's `x`. Default: `run.weight`.

        Returns:
            A float for a float, else a tensor.
        """
        weight = float(self.weight if weight is None else weight)
        return self._agreement.attempt_call(
            lambda: collectives.average_values(self._agreement, self._context.group, x, weight)
        )

    @overload
    def sum(self, x: Tensor) -> Tensor: ...
    @overload
    def sum(self, x: int) -> int: ...
    @overload
    def sum(self, x: float) -> float: ...
    def sum(self, x: Tensor | float) -> Tensor | float:
        """Return the sum of `x` over workers: a number for a number, else a tensor. Collective.

        >>> right += run.sum((model(x).argmax(1) == y).sum())

        In a turn in which this worker has no samples (it is a ghost) its `x` counts as zero. A
        total that a loop has accumulated by itself includes the ghosts: multiply each of its terms
        by `(run.weight > 0)`.
        """
        turn = self._loop.turn
        if turn is None and self._loop.had_ghosts:
            self._hints.hint_at_ghost_sums()
        agreement, group, ghost = (
            self._agreement,
            self._context.group,
            turn is not None and turn.ghost,
        )
        return agreement.attempt_call(
            lambda: collectives.sum_values(agreement, group, x, ghost=ghost)
        )

    def gather(self, x: Tensor) -> Tensor:
        """Gather the rows (dim 0) of all workers. Collective.

        >>> answers = run.gather(model(x).argmax(1))

        Inside a loop over a loader the rows are in the order of the data set, and workers without
        samples are left out.
        """
        turn = self._loop.turn
        ghost = turn is not None and turn.ghost
        no_rows = (x.detach().reshape(1) if x.dim() == 0 else x.detach())[:0]
        order = None if turn is None else turn.rows
        return self._loop.gather_once(
            lambda: collectives.gather_rows(
                self._agreement, self._context.group, x, ghost=ghost, order=order
            ),
            no_rows,
        )

    def barrier(self) -> None:
        """Wait until every worker has called this. Collective.

        >>> run.barrier()
        """
        self._axes.everyone.meet("run.barrier")

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Let the first worker of each host run the block before the others do. Collective.

        >>> with run.first():
        ...     torch.hub.download_url_to_file("https://example.org/data.bin", "data.bin")

        Use it for downloads, for example.
        """
        # the others wait in the same meeting until the first has left its block
        if self.local_rank == 0:
            yield
            self._axes.everyone.meet("run.first")
        else:
            self._axes.everyone.meet("run.first")
            yield

    def stop(self) -> None:
        """Ask all workers to stop early. It never waits.

        >>> if run.mean(loss) < 0.1:
        ...     run.stop()

        They stop together, at the end of the present epoch at the latest.
        """
        self._collector.request_stop()

    # ---- state

    def save(
        self,
        *,
        keep: int = 3,
        background: bool = False,
        metric: Tensor | float | None = None,
        best: Best | None = None,
    ) -> Path:
        """Write a checkpoint of everything that is prepared and kept. Collective.

        >>> run.save(metric=run.mean(loss), best="min")

        Call it at the end of the loop body, after `optimizer.step()`: the present step counts as
        taken. `pl.state_dict(folder, best=True)` reads the model of the best checkpoint, `resume`
        takes the newest.

        Args:
            keep: Number of newest checkpoints that stay; the best one stays as well. Default: 3.
            background: Whether a thread of the first worker writes while training goes on. The
                state is copied in memory before `save` returns, and the folder appears when it is
                complete. A second save waits for the first. Default: False, the checkpoint is on
                the disk on return.
            metric: Number by which checkpoints are compared; the first worker's number counts. A
                number that isn't finite is never the best.
            best: Which metric is the best: "min" or "max". Of equal metrics the earlier one wins.

        Returns:
            The folder of the checkpoint.

        Raises:
            CheckpointError: The disk refuses. For a background save, the next `save`, `resume` or
                `close` raises it.
            UsageError: `metric` is not a number, or `best` differs from earlier saves.
        """
        step = self.steps + (self._loop.leading_turn is not None)
        folder, measured = self.folder.checkpoints, parse_metric(metric, best)
        # a failed turn is dealt again, and the script saves in that second try
        if self._loop.transaction.failed:
            return next(iter(catalogue.list_newest(folder)), folder)
        self._resumption.flush_log()
        return self._saving.save(SaveRequest(folder, step, keep, background, measured))

    def resume(self, folder: str | Path | None = None) -> bool:
        """Restore the newest complete checkpoint. Collective.

        >>> if run.resume():
        ...     run.print("goes on at step", run.steps)

        Everything prepared and kept is as it was saved, for any number of workers. A job that was
        restarted (`paceline run --restarts`) resumes from its own folder, whatever `folder` is.

        Args:
            folder: Folder of a run. Default: earlier runs of the same name.

        Returns:
            False if there is no checkpoint, which is also printed.

        Raises:
            CheckpointError: There are checkpoints, and none can be used.
        """
        return self._resumption.resume_newest(folder)

    # ---- the end

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None or events.is_regular_exit(error):
            self.close()
        else:
            self._ending.end_after_error(kind, error)

    def close(self) -> None:
        """Leave together with all workers: write the summary, and free memory and sockets.

        >>> run = pl.start(name="circle")  # without `with`
        >>> run.close()

        A second call does nothing.
        """
        self._ending.close()


def parts_of_run(run: Run) -> RunParts:
    """Parts of a run, for modules of paceline only."""
    return run._parts
