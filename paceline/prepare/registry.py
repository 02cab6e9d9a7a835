"""The models, optimizers, loaders, schedulers and scalers of a run, and the groups they need."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from paceline.cluster.mesh import SAMPLE_AXES
from paceline.comm.group_protocol import FinishedWork, Op, Work
from paceline.comm.sample_queue import SampleQueue
from paceline.data.balance import WorkerSpeeds
from paceline.data.loader import LoaderObserver, ShareLoader, deal_loader
from paceline.data.rng import SampleOrder
from paceline.errors import UsageError
from paceline.loop import forward_turn
from paceline.loop.epochs import LoaderEpochs
from paceline.loop.step import TrainingStep
from paceline.parallel.batchnorm import BatchNorm, desynchronise_batchnorm, synchronise_batchnorm
from paceline.prepare import checks, hooks, metrics, scaling, tensor_peers
from paceline.prepare.cuts import ModelCuts
from paceline.prepare.device import make_mover
from paceline.prepare.gradient_clipping import GradientClipping
from paceline.prepare.initial import InitialValues, check_init, move_models
from paceline.prepare.options import PrepareOptions
from paceline.prepare.remote import RemoteSteps
from paceline.servers.run_tables import RunTables
from paceline.state.versioned import Stateful, UnownedParameters, VersionedState
from paceline.sync.base import Slot
from paceline.workers.axes import RunAxes
from paceline.workers.groups import Subgroups

UNCUT = "use shard, which cuts the layers beside it, or nn.Embedding"


class Prepared:
    """Everything that a run has prepared.

    Invariants:
        - `models`, `optimizers`, `loaders` and `metrics` are in the order of their preparation.
          `state` has all of them, and the schedulers and scalers, each once and with its name.
        - `slots` has each trained parameter once. A slot gets its optimizer when that is prepared,
          maybe in a later call.
        - `_synchronous` is empty, or has the models whose BatchNorm layers exchange statistics.
        - `_unstepped` and `_groups` have ids of objects in `optimizers`. An optimizer leaves
          `_unstepped` at its first step with gradients.

    Args:
        axes: Groups of the run.
        step: The training step that optimizers, loaders and backward passes belong to.
        epochs: Observer of the loaders.
        device: Device of this worker.
        subgroups: Groups of BatchNorm layers and loaders.
        cuts: Cuts of the run.
        shares: Shares of `paceline run --shares`, in place of the script's. Default: the script's.
    """

    def __init__(
        self,
        axes: RunAxes,
        step: TrainingStep,
        epochs: LoaderEpochs,
        device: torch.device,
        subgroups: Subgroups,
        *,
        cuts: ModelCuts,
        shares: str | None = None,
    ) -> None:
        self.models: list[tuple[str, nn.Module]] = []
        self.optimizers: list[Optimizer] = []
        self.loaders: list[ShareLoader] = []
        self.slots: list[Slot] = []
        self.axes, self.cuts, self.state, self._unowned = (
            axes,
            cuts,
            VersionedState(),
            UnownedParameters(),
        )
        self.context = context = axes.slice
        self.survives = context.survives  # whether the group of workers may change
        self.epochs, self._step, loop = epochs, step, step.loop
        self._backward, self._loop = loop.backward, loop
        self._device, self.subgroups = device, subgroups
        self._synchronous, self._options = list[nn.Module](), PrepareOptions(shares)
        self.metrics: list[nn.Module] = []  # of torchmetrics
        self._unstepped: set[int] = set()  # the ids of optimizers
        self._bindings = hooks.OptimizerBindings(self._check_beginning, loop)
        # Number of parameter groups that an optimizer was prepared with, by its id.
        self._groups: dict[int, int] = {}
        self.tables = RunTables(context, loop.backward)
        self._abilities, self._remote = loop.abilities, loop.abilities.remote
        self._remote_steps, self._speeds = RemoteSteps(loop, self.tables), WorkerSpeeds()
        self.order = SampleOrder()
        self.clipping = GradientClipping(loop, cuts, axes, self._remote_steps)

    def prepare(
        self,
        objects: tuple[Any, ...],
        given: dict[str, Any],
        *,
        observe: Callable[[LoaderObserver], LoaderObserver] | None = None,
    ) -> list[Any]:
        """Prepare a script's objects. Collective.

        Args:
            objects: Models, optimizers, loaders, schedulers, scalers and metrics.
            given: Options of the call, with None for each one that it leaves out.
            observe: Makes the observer of the loaders of this call from that of the run, which it
                has to notify. Default: that of the run.

        Returns:
            The objects in their order, with a `ShareLoader` in place of each DataLoader.
        """
        # Sort the objects by kind; an object that is given twice is prepared once.
        kinds = [checks.find_kind(value) for value in objects]
        by_kind: dict[str, list[Any]] = defaultdict(list)
        for value, kind in zip(objects, kinds, strict=True):
            if not any(value is other for other in by_kind[kind]):
                by_kind[kind].append(value)
        tensor_peers.share_randomness(self.axes)
        options = self._options.resolve_options(
            given,
            self.context.group.size,
            loaders=bool(by_kind["loader"]),
            models=bool(by_kind["model"]),
        )
        check_init(given["init"], by_kind["model"], self._find_new(by_kind["model"]))
        self.cuts.note_options(by_kind["loader"], given["batchnorm"])
        # Models come first: whatever follows refers to the parameters that are trained.
        if by_kind["model"] or by_kind["optimizer"]:
            self._prepare_models(by_kind["model"], by_kind["optimizer"], options)
        for metric in [
            *by_kind["metric"],
            *(metric for model in by_kind["model"] for metric in metrics.find_metrics(model)),
        ]:
            self._prepare_metric(metric)
        for kind, bind in (
            ("scheduler", hooks.bind_scheduler),
            ("scaler", functools.partial(scaling.bind_scaler, axes=self.axes)),
        ):
            for thing in self._find_new(by_kind[kind]):
                if self._remote is not None:
                    checks.check_not_scaler(thing)
                bind(thing, self._loop)
                self._add_part(kind, thing)
        if any(scaler.is_enabled() for scaler in self._loop.scalers):
            self.tables.check_scaler()
        # Loaders are replaced, all other objects stay the same.
        ready = [
            self._deal_loader(
                value, self._options.loader_options(value.dataset, options, given), observe
            )
            if kind == "loader"
            else value
            for value, kind in zip(objects, kinds, strict=True)
        ]
        self._bind_objects()
        return ready

    def _prepare_models(
        self, models: list[nn.Module], optimizers: list[Optimizer], options: dict[str, Any]
    ) -> None:
        # 1. Move models to the device, and refuse whatever can't be trained here.
        fresh, cuts = self._find_new(models), self.cuts.choose_cuts(options["cut"])
        move_models(self.cuts.models_on_one_device(models, cuts), self._device)
        for model in fresh:
            prefix = f"model{len(self.models)}." if self.models or len(models) > 1 else ""
            self.models.append((prefix, model))
            self._add_part("model", model)
        if self._remote is not None:
            checks.check_owner(self.slots, optimizers)
        named_fresh = [(prefix, model) for prefix, model in self.models if model in fresh]
        if (
            self.axes.groups.group_along(*SAMPLE_AXES).size > 1
            or self.axes.mesh.axis_size("stage") > 1
        ):
            checks.check_embeddings(named_fresh)
        # 2. Give all workers the first one's values.
        new_slots = list(
            checks.find_new_slots(
                self.cuts.replace_slots(checks.list_slots(self.models, optimizers)), self.slots
            )
        )
        checks.equalize_replicas(
            self.axes.everyone, new_slots, named_fresh, optimizers, self.context.announce
        )
        self._unowned.add_parameters(checks.find_unowned(new_slots, self.models), self.state)
        # 3. Cut models, and let optimizers step the parts. A cut without an axis moves the model to
        # devices itself, so first values are made in the processor's memory.
        home = self._device if all(cut.axis for cut in cuts) else torch.device("cpu")
        initial = InitialValues(named_fresh, options["init"], self.cuts.seed, home)
        for source in self.cuts.apply_cuts(named_fresh, cuts, optimizers, initial):
            self._backward.follow_source(source)
        self.cuts.repoint_optimizers(optimizers)
        # 4. Note the parameters that are trained, and the optimizer of each. A parameter of an
        # earlier call may get its optimizer only now.
        slots = list(self.cuts.replace_slots(checks.list_slots(self.models, optimizers)))
        owners = {id(slot.parameter): slot.optimizer for slot in slots}
        self.slots = [
            slot._replace(optimizer=slot.optimizer or owners.get(id(slot.parameter)))
            for slot in self.slots
        ]
        self.slots += checks.find_new_slots(slots, self.slots)
        if optimizers:
            self.cuts.check_used()
        # 5. BatchNorm layers compute the statistics of the global batch.
        if options["batchnorm"] == "sync":
            self._add_batchnorm(models)
        # 6. Keep the optimizers.
        self._add_optimizers(optimizers)
        self._loop.models += fresh
        self._open_tables()

    def _add_batchnorm(self, models: list[nn.Module]) -> None:
        """Let the BatchNorm layers of models, if they have any, see the global batch."""
        if not any(isinstance(module, BatchNorm) for model in models for module in model.modules()):
            return
        if self._sample_queue is not None:
            raise UsageError(
                "a model has BatchNorm layers, which combine the statistics of all workers in "
                "each step, and with staleness, backup_workers or a quorum they are not in "
                "lockstep: say prepare(..., batchnorm='local'), or use another kind of norm"
            )
        self._synchronous += [
            model for model in self.cuts.without_stages(models) if model not in self._synchronous
        ]
        self._synchronize_batchnorm(self._synchronous)

    def _add_optimizers(self, optimizers: list[Optimizer]) -> None:
        """Keep optimizers, and their numbers of parameter groups.

        An optimizer that gets another group later is checked again.
        """
        for optimizer in self._find_new(optimizers):
            if self._device.type == "cuda" and optimizer.state:
                # Loading moves the state to the device of the parameters.
                optimizer.load_state_dict(optimizer.state_dict())
            self._add_part("optimizer", optimizer)
            self.optimizers.append(optimizer)
            self._unstepped.add(id(optimizer))
        self._groups.update(
            (id(optimizer), len(optimizer.param_groups)) for optimizer in optimizers
        )
        self._bindings.groups.clear()

    def _prepare_metric(self, metric: nn.Module) -> None:
        if self.survives:
            raise UsageError(
                f"a {type(metric).__qualname__} would count a turn twice if it is dealt again "
                "after the loss of a worker: with --min-workers use run.mean and run.gather, or "
                "leave out --min-workers"
            )
        self.axes.refuse_cut_axes(
            f"a {type(metric).__qualname__}",
            (
                "it would count samples once for each worker that has them; "
                "use run.mean and run.gather"
            ),
        )
        if self._device.type == "cuda":
            metric.to(self._device)
        metrics.bind_metric(metric, self._loop)
        self.metrics.append(metric)

    def check_known(self) -> None:
        """Raise `UsageError` if a model or optimizer has a parameter that wasn't prepared."""
        checks.check_known(
            self.cuts.replace_slots(checks.list_slots(self.models, self.optimizers)), self.slots
        )

    def _check_beginning(self, optimizer: Optimizer, graded: bool) -> None:
        """Check before a step that all parameters of the optimizer are exchanged.

        Copies of a prepared optimizer are not checked.
        """
        # This runs before each step, so the usual case must be quick: observers hear of the first
        # step, and later only the number of groups is compared.
        if graded and id(optimizer) in self._unstepped:
            self._unstepped.remove(id(optimizer))
            for observer in self._loop.observers.first_step:
                observer(optimizer)
        if len(optimizer.param_groups) == self._groups.get(
            id(optimizer), len(optimizer.param_groups)
        ):
            if id(optimizer) in self._groups and id(optimizer) not in self._unstepped:
                # No further check until the number of groups changes.
                self._bindings.groups[id(optimizer)] = len(optimizer.param_groups)
            return
        # The optimizer has a new group. Servers don't know its parameters, if they step.
        self.check_known()
        own_ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
        orphans = [
            slot.name
            for slot in self.slots
            if slot.optimizer is None and id(slot.parameter) in own_ids
        ]
        if orphans and self._remote is not None:
            raise UsageError(
                f"the parameter {orphans[0]} was added to the {type(optimizer).__qualname__} after "
                "run.prepare (add_param_group), and optimizers step on servers here; give the "
                "optimizer to run.prepare again, on every worker"
            )
        self._groups[id(optimizer)] = len(optimizer.param_groups)

    def _open_tables(self) -> None:
        """Start servers for the sparse tables among the models."""
        tables = self.tables.find_new_tables(self.models)
        if tables:
            self.axes.refuse_cut_axes(f"the sparse table {tables[0][0]}", UNCUT, beside=SAMPLE_AXES)
        if tables and self._sample_queue is not None and self._abilities.remote is None:
            raise UsageError(
                f"sparse tables ({tables[0][0]}) need workers in lockstep here, and with a quorum "
                "they aren't: leave out quorum, or use ParameterServer(staleness=8)"
            )
        if tables and self.survives and self._sample_queue is not None:
            raise UsageError(
                f"sparse tables ({tables[0][0]}) survive the loss of workers only in lockstep, "
                "and with staleness or backup_workers workers "
                "aren't: leave those out, or leave out --min-workers"
            )
        handle_ids = {id(module.weight) for _, module in tables} | self.tables.get_handle_ids()
        dense_slots = [
            slot
            for slot in self.slots
            if slot.optimizer is not None and id(slot.parameter) not in handle_ids
        ]
        if (
            tables
            and self._sample_queue is not None
            and not any(slot.parameter.requires_grad for slot in dense_slots)
        ):
            raise UsageError(
                f"only sparse tables ({tables[0][0]}) are trained here, and with staleness or "
                "backup_workers the servers of other parameters keep the clocks: leave those "
                "out, or train some other parameter with them"
            )
        if tables and self.survives and self._backward.sync.replicas_diverge:
            raise UsageError(
                f"sparse tables ({tables[0][0]}) survive the loss of workers beside AllReduce or "
                "ParameterServer, and with this strategy "
                "replicas differ between two steps: use one of those, or leave out --min-workers"
            )
        had_tables = bool(self.tables.tables)
        self.tables.open_on_servers(tables, self.optimizers, self._abilities.unlocked_rows)
        # The first tables make the turn's commit a matter of tables, too.
        if self.tables.tables and not had_tables:
            observers = self._loop.observers
            self._loop.observe(
                replace(observers, committed=(self.tables.commit_turn, *observers.committed))
            )

    def _bind_objects(self) -> None:
        """Bind optimizers, gradients and forward passes to the loop.

        Called at the end of each call of `prepare`, for all objects so far.
        """
        loop = self._loop
        for optimizer in self.optimizers:
            if self._remote is not None or self.tables.steps_tables(optimizer):
                self._bindings.remote[id(optimizer)] = self._remote_steps
            hooks.bind_optimizer(optimizer, self._step, self._bindings)
            if self.axes.cut_axes:
                hooks.bind_groups(optimizer, loop, self.cuts.trained_tensor)
        if self.axes.cut_axes:
            parameters = [parameter for _, model in self.models for parameter in model.parameters()]
            self.clipping.follow_parameters(
                [*parameters, *map(self.cuts.trained_tensor, parameters)]
            )
        # One worker that stays alone has nothing to exchange.
        if self.context.group.size == 1 and not self.survives and not self.cuts.pipelines:
            return
        # Servers exchange the gradients of tables, so their handles are left out.
        handle_ids = self.tables.get_handle_ids()
        slots = [slot for slot in self.slots if id(slot.parameter) not in handle_ids]
        self.clipping.follow_parameters(slot.parameter for slot in slots)
        self._backward.watch_slots(
            self.cuts.merge_summed_slots([slot for slot in slots if slot.parameter.requires_grad])
        )
        self._backward.watched.note_frozen(
            [slot for slot in slots if not slot.parameter.requires_grad]
        )
        for _, model in self.models:
            hooks.follow_forwards(model, loop)
            forward_turn.remember_turns(model, loop)

    def _deal_loader(
        self,
        loader: DataLoader[Any],
        options: dict[str, Any],
        observe: Callable[[LoaderObserver], LoaderObserver] | None,
    ) -> ShareLoader:
        tensor_peers.check_options(options, self.axes)
        agreement, say = self.context.agreement, self.context.announce
        move = tensor_peers.compare_batches(make_mover(self._device), self.axes)
        options |= {"sample_queue": self._sample_queue, "speeds": self._speeds, "order": self.order}
        hooks = self.epochs if observe is None else observe(self.epochs)
        dealt = deal_loader(loader, agreement, hooks=hooks, say=say, move=move, **options)
        self.loaders.append(dealt)
        self._add_part("loader", dealt)
        return dealt

    @property
    def _sample_queue(self) -> SampleQueue | None:
        return self._loop.abilities.sample_queue

    def _synchronize_batchnorm(self, models: list[nn.Module]) -> None:
        """Let BatchNorm layers exchange in a group of their own.

        Their exchanges happen while gradient buckets are under way in the main group.
        """
        context = self.context
        if context.group.size == 1:
            return
        self.subgroups.layer_group()
        norms: Any = BatchNormGroup(self)
        for model in models:
            synchronise_batchnorm(
                model,
                norms,
                ghost=lambda: context.step_state.ghost,
                scale=lambda: context.step_state.scale,
                copies=self._is_in_loop,
            )

    def _is_in_loop(self) -> bool:
        """Whether a loop over a prepared loader is under way.

        All workers run such a loop together, each on its share.
        """
        return self._loop.turn is not None

    def regroup_layers(self) -> None:
        """Make new groups for layers and loaders, after the workers have changed. Collective."""
        self.subgroups.forget_groups()
        self._synchronize_batchnorm(self._synchronous)

    def release_models(self, *, failed: bool) -> None:
        """Make models plain again and close tables, as the run ends on this worker."""
        for _, model in self.models:
            desynchronise_batchnorm(model)
        self.tables.close(failed=failed)
        self.cuts.end_cuts()

    def _find_new(self, things: list[Any]) -> list[Any]:
        """Select the objects that were not prepared before."""
        return [thing for thing in things if not any(thing is part for part in self.state.parts)]

    def _add_part(self, kind: str, thing: Stateful) -> None:
        """Add an object to the state, with a name of its kind: "model", "model1", "model2", ..."""
        same_kind = sum(name.startswith(kind) for name in self.state.names)
        self.state.add_part(f"{kind}{same_kind}" if same_kind else kind, thing)


class BatchNormGroup:
    """A group for BatchNorm layers that survives the loss of workers.

    Its exchanges are announced to the other workers, so none waits for a worker that is lost.
    """

    def __init__(self, prepared: Prepared) -> None:
        self._prepared = prepared
        self.size = prepared.context.group.size

    def all_reduce(
        self, x: Tensor, *, op: Op = "sum", name: str | None = None, out: Tensor | None = None
    ) -> Work[Tensor]:
        agreement, norms = self._prepared.context.agreement, self._prepared.subgroups.layer_subgroup
        # No worker can be replaced: exchange at once.
        if agreement.recovery is None and norms is not None:
            return FinishedWork(
                agreement.wait_for_some(
                    lambda: norms.all_reduce(x, op=op, name=name, out=out).wait(),
                    name or "BatchNorm",
                )
            )

        # The exchange may be tried again in a smaller group, so each attempt asks for the present
        # group, and reduces a copy: a failed attempt may have changed its tensor.
        def act() -> Tensor:
            norms = self._prepared.subgroups.layer_subgroup
            return (
                x.clone() if norms is None else norms.all_reduce(x.clone(), op=op, name=name).wait()
            )

        total = agreement.attempt_call(act, name or "BatchNorm")
        return FinishedWork(total if out is None else out.copy_(total))
