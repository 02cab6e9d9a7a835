"""The cuts of a run. They are applied before anything else looks at a model's parameters."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn import Parameter
from torch.optim import Adafactor, Muon, Optimizer
from torch.utils.data import DataLoader
from torch.utils.weak import WeakIdKeyDictionary

from paceline import notation
from paceline.cluster.mesh import Mesh
from paceline.errors import UsageError
from paceline.formatting import format_as_call
from paceline.parallel.cut import CutContext, CutGradients, ModelCut
from paceline.parallel.elementwise import check_elementwise
from paceline.parallel.placement import Placements
from paceline.parallel.repoint import refuse_optimizer_state, repoint_optimizer, reset_adagrad_sums
from paceline.parallel.sharding.optimizers import needs_global_number
from paceline.parallel.state_parts import mark_state_parts
from paceline.prepare.copies import ModelCopies, watch_averages
from paceline.prepare.initial import InitialValues
from paceline.prepare.sample import sample_batch
from paceline.sync.base import Slot
from paceline.workers.axes import RunAxes

if TYPE_CHECKING:
    from paceline.parallel.pipelining.pipelined_model import PipelinedModel

WantedCuts = ModelCut | str | Sequence[ModelCut]
WHOLE = (Adafactor, Muon)  # optimizers of torch that look at all of a matrix
# layers are cut first, then dealt, and what a worker has left of them is shared out
ORDER = ("tensor", "stage", "shard")


class ModelCuts:
    """Applies cuts, and keeps what became of each parameter.

    `override`: those of `paceline run --cut`, in the place of the script's.

    `note` is told of what happens while models train. `parting`: whether stages that share a weight
    may come to have different ones.
    """

    def __init__(
        self,
        axes: RunAxes,
        seed: int,
        override: str | None = None,
        note: Callable[[str], None] = lambda what: None,
        parting: Callable[[], bool] = lambda: False,
    ) -> None:
        self._axes, self._note_event, self._parting = axes, note, parting
        self._override = None if override is None else read_cuts(override)
        self.placements = Placements()
        self.seed = seed
        self.applied: list[ModelCut] = []
        self.sources: list[CutGradients] = []
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.pipelines: list[tuple[nn.Module, PipelinedModel]] = []
        # of the loaders that are prepared
        self.sample: Callable[[int], tuple[Any, ...]] = functools.partial(sample_batch, ())
        self._statistics: str | None = None
        self.copies = ModelCopies(self.placements)
        self._spread: list[nn.Module] = []  # models that are on several devices of each worker
        self._used: set[str] = set()
        self._summed = WeakIdKeyDictionary()  # parameters whose gradients a cut sums along `shard`
        self._endings: list[Callable[[], None]] = []
        self._followers: list[Callable[[], None]] = []
        # by the id of what was cut
        self._renewed: dict[int, tuple[weakref.ref[Parameter], Parameter]] = {}

    def choose_cuts(self, wanted: WantedCuts | None) -> tuple[ModelCut, ...]:
        """Return the cuts for models that are prepared now.

        Raises `UsageError` for one along an axis that the mesh doesn't have.
        """
        cuts = (
            self._override
            if self._override is not None
            else ()
            if wanted is None
            else read_cuts(wanted)
        )
        mesh = self._axes.mesh
        for cut in cuts:
            if not cut.axis and len(cuts) > 1:
                raise UsageError(
                    f"cut={format_as_call(cut)} leaves each worker all of the model, and goes with "
                    "no other cut: take one of them"
                )
            if cut.axis and cut.axis not in mesh.names:
                raise UsageError(
                    f"cut={format_as_call(cut)} is along `{cut.axis}`, and the mesh ({mesh}) "
                    f"doesn't have that: say pl.start(mesh={cut.axis!r}), or paceline run --mesh "
                    f"{cut.axis}, and all workers are along it (mesh='data, {cut.axis}=2': two of "
                    "each replica)"
                )
        return tuple(
            sorted(cuts, key=lambda cut: ORDER.index(cut.axis) if cut.axis in ORDER else len(ORDER))
        )

    def models_on_one_device(
        self, models: Iterable[nn.Module], cuts: Sequence[ModelCut]
    ) -> list[nn.Module]:
        """Models that no cut puts on several devices of a worker.

        `cuts` are for new models; cuts from before count as well.
        """
        several = any(not cut.axis for cut in cuts)
        spread_ids = {id(model) for model in self._spread}
        return [model for model in models if not (several or id(model) in spread_ids)]

    def note_options(self, loaders: Sequence[DataLoader[Any]], statistics: str | None) -> None:
        """Take sample batches for measurements from these loaders, and the BatchNorm option."""
        self._statistics = statistics
        if loaders:
            self.sample = functools.partial(sample_batch, loaders)

    def apply_cuts(
        self,
        models: Sequence[tuple[str, nn.Module]],
        cuts: Sequence[ModelCut],
        optimizers: Sequence[Optimizer],
        initial: InitialValues,
    ) -> list[CutGradients]:
        """Cut models, which have these prefixes in names, and give their parts values.

        Return where gradients come from. Collective.
        """
        axes, sources, valued = self._axes, list[CutGradients](), list[Callable[[], None]]()
        self.refuse_late_optimizers(
            optimizer for optimizer in optimizers if optimizer not in self._optimizers
        )
        self._optimizers.update(optimizers)
        if cuts:
            watch_averages()
        for optimizer, (_, model) in itertools.product(optimizers, models if cuts else ()):
            refuse_optimizer_state(optimizer, model.parameters())
        for prefix, model in models:
            tied = list[Parameter]()
            # Cuts follow each other, from the outermost axis inwards: each one finds the parts that
            # the one before has left.
            for cut in cuts:
                context = CutContext(
                    axes.mesh,
                    axes.groups,
                    self.placements,
                    initial.device,
                    tied=tied,
                    find_trained=self.trained_tensor,
                    make_sample=self.sample,
                    announce=axes.slice.announce,
                    record_span=self._record_span,
                )
                self._cut_model(cut, prefix, model, context, len(models))
                sources += context.gradient_sources
                valued += context.value_callbacks
            if cuts:
                mark_state_parts(model, self.placements.placement_of)
        if self._statistics == "sync" and self.pipelines:
            raise UsageError(
                "batchnorm='sync' can't be had with layers on several workers (pipeline): "
                "leave it out, and statistics are those of each micro-batch, on its worker"
            )
        self.sources += sources
        initial.give_values(self.placements, axes.everyone, axes.slice.announce)
        for act in valued:
            act()
        return sources

    def _cut_model(
        self, cut: ModelCut, prefix: str, model: nn.Module, context: CutContext, models: int
    ) -> None:
        """Apply a cut to one of several models, and keep what it needs for the rest of the run."""
        # Logical names are those of the uncut model, and every part keeps its own.
        before = dict(model.named_parameters())
        for name, parameter in before.items():
            self.placements.add_placement(
                parameter, self.placements.placement_of(parameter, prefix + name)
            )
        _apply_cut(cut, model, context, models)
        self._note_replacements(before, dict(model.named_parameters()), context.replacements)
        self._used.add(cut.axis)
        for parameter in model.parameters() if cut.axis == "shard" else ():
            self._summed[self.trained_tensor(parameter)] = True
        self.applied += [] if cut in self.applied else [cut]
        self._endings += context.close_callbacks
        self._spread += [model] if not cut.axis else []
        self._followers += context.refresh_callbacks
        self.pipelines += context.pipelines

    def _note_replacements(
        self,
        before: dict[str, Parameter],
        now: dict[str, Parameter],
        renewed: dict[Parameter, Parameter],
    ) -> None:
        replaced = {
            old: now[name] for name, old in before.items() if name in now and now[name] is not old
        }
        for old, new in {**replaced, **renewed}.items():
            self._renewed[id(old)] = weakref.ref(old), new

    def replacement_of(self, parameter: Parameter) -> Parameter | None:
        """Tensor that is trained in the place of a parameter that was cut; None for all others."""
        replacement = None
        while (entry := self._renewed.get(id(parameter))) is not None and entry[0]() is parameter:
            replacement = parameter = entry[1]
        return replacement

    def trained_tensor(self, parameter: Parameter) -> Parameter:
        """Tensor that is trained in the place of a parameter, or the parameter itself."""
        replacement = self.replacement_of(parameter)
        return parameter if replacement is None else replacement

    def repoint_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers step what is trained in the place of their parameters.

        Raises `UsageError` for one that can't.
        """
        for optimizer in optimizers if self._renewed else ():
            repoint_optimizer(optimizer, self.replacement_of)
        for optimizer in optimizers if self.applied else ():
            reset_adagrad_sums(optimizer)
        self.refuse_whole_optimizers(optimizers)

    def find_flat_parameter(self, optimizer: Optimizer) -> str:
        """Name of a parameter of an optimizer that the model holds only as a flat piece; "" if
        none.
        """
        parameters = (
            (p for group in optimizer.param_groups for p in group["params"])
            if len(self.placements)
            else ()
        )
        return next(
            (
                where.name
                for p in parameters
                if p.dim() != len((where := self.placements.placement_of(p)).shape)
            ),
            "",
        )

    def refuse_late_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise `UsageError` for optimizers of models that were cut before.

        A script that groups parameters by shape would see flat pieces.
        """
        for optimizer in optimizers:
            if name := self.find_flat_parameter(optimizer):
                raise UsageError(
                    f"the {type(optimizer).__qualname__} steps {name}, which is a flat piece since "
                    "shard(zero=3) has cut its model, so "
                    "groups made by shape would be wrong: make the optimizer before run.prepare, "
                    "and give it to the call that cuts it"
                )

    def refuse_whole_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise `UsageError` for optimizers that may look at whole parameters which are cut
        here.
        """
        mesh = self._axes.mesh
        dealt = (
            {id(p) for model, _ in self.pipelines for p in model.parameters()}
            if mesh.axis_size("stage") > 1
            else set()
        )
        for optimizer in optimizers if len(self.placements) else ():
            refuse_one_number(optimizer, self.placements, mesh, dealt)
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            for where in map(self.placements.placement_of, stepped):
                if any(mesh.axis_size(axis) > 1 for axis in where.axes if axis != "stage"):
                    check_elementwise(optimizer, where.name)
            if isinstance(optimizer, WHOLE) and any(id(p) in dealt for p in stepped):
                raise UsageError(
                    f"{type(optimizer).__qualname__} looks at whole matrices, and fails on those "
                    "that other stages of the pipeline have: "
                    "what goes is an optimizer that steps each element by itself, such as AdamW"
                )

    def replace_slots(self, found: Iterable[Slot]) -> Iterator[Slot]:
        """Yield slots of the tensors that are trained for cut parameters, once, by logical name."""
        if not len(self.placements):
            yield from found
            return
        slots, seen = list(found), set[int]()
        # of a piece, which no model has
        owners = {id(slot.parameter): slot.optimizer for slot in slots}
        for slot in slots:
            parameter = self.trained_tensor(slot.parameter)
            if id(parameter) not in seen:
                seen.add(id(parameter))
                placement, optimizer = (
                    self.placements.placement_of(parameter, slot.name),
                    slot.optimizer or owners.get(id(parameter)),
                )
                yield slot._replace(
                    name=placement.name,
                    parameter=parameter,
                    optimizer=optimizer,
                    shard=placement.axes,
                )

    def announce_change(self, what: str) -> None:
        """Say what has changed, and note the first line of that."""
        self._note_event(what.partition("\n")[0])
        self._axes.slice.announce(what)

    def _record_span(self, what: str, began: int, ended: int) -> None:
        self._axes.slice.trace.record_span(what, "stage", began, ended)

    def pipeline_of(self, model: nn.Module) -> PipelinedModel | None:
        """Return the pipeline that a model is cut into; None for one whose layers are all here."""
        return next((pipeline for other, pipeline in self.pipelines if other is model), None)

    def without_stages(self, models: Iterable[nn.Module]) -> list[nn.Module]:
        """Return the models whose layers are all here."""
        return [model for model in models if self.pipeline_of(model) is None]

    def level_ties(self) -> None:
        """Copy a tied weight from one stage to all that have it, part by part. Collective."""
        if not self._parting():
            return
        for _, pipeline in self.pipelines:
            pipeline.level_ties()
        if any(tie.group is not None for _, pipeline in self.pipelines for tie in pipeline.ties):
            self.follow_pieces()

    def follow_pieces(self) -> None:
        """Make whole parameters what their pieces are, where both are kept. Collective."""
        for follow in self._followers:
            follow()

    def stage_splits(self) -> list[list[int]]:
        """First layer of each stage, and the number of layers at the end."""
        return [list(pipeline.split.bounds) for _, pipeline in self.pipelines]

    def share_stage_state(self) -> None:
        """Let all workers know what only those of a stage do, and a state has of all: buffers.

        Collective.
        """
        self.level_ties()
        for model, pipeline in self.pipelines:
            pipeline.share_buffers(self.copies.copies_of(model))

    def end_cuts(self) -> None:
        """End what cuts have begun, as the run is over."""
        while self._endings:
            self._endings.pop()()

    def check_used(self, *_: Any) -> None:
        """Raise `UsageError` if no cut uses an axis of the mesh.

        Workers along such an axis would all do the same.
        """
        unused = [name for name in self._axes.cut_axes if name not in self._used]
        if unused:
            raise UsageError(
                f"the mesh ({self._axes.mesh}) has the axis `{unused[0]}`, and nothing is cut "
                "along it: its workers would all do the same. "
                f"Give prepare(..., cut=[...]) a cut along `{unused[0]}`, "
                "or leave it out of the mesh"
            )

    def merge_summed_slots(self, slots: list[Slot]) -> list[Slot]:
        """Return slots of what is trained.

        Raises `UsageError` for one whose gradients nothing sums along `shard`, as cuts alone do.
        """
        for slot in slots if self._axes.mesh.axis_size("shard") > 1 else ():
            if slot.optimizer is not None and slot.parameter not in self._summed:
                raise UsageError(
                    f"{slot.name} is trained, and its model isn't cut along `shard`, where workers "
                    "have other samples: nothing would sum "
                    "its gradients over them. Cut its model too, run.prepare(model, ..., "
                    f"cut=[shard()]), or leave `shard` out of the mesh ({self._axes.mesh})"
                )
        return slots


def read_cuts(wanted: WantedCuts) -> tuple[ModelCut, ...]:
    """Return the cuts that a script, or a text in notation, asks for."""
    cuts = (
        notation.parse_cuts(wanted)
        if isinstance(wanted, str)
        else tuple(wanted)
        if isinstance(wanted, list | tuple)
        else (wanted,)
    )
    if kind := next((each.__name__ for each in cuts if isinstance(each, type)), None):
        raise UsageError(f"cut={kind} is the class itself; call it: cut=pl.{kind}(...)")
    wrong = next(
        (each for each in cuts if not (hasattr(each, "axis") and hasattr(each, "apply"))), None
    )
    if wrong is not None:
        raise UsageError(f"cut={wrong!r} is no cut; write e.g. cut=[shard('blocks.*')]")
    return tuple(cuts)


def _apply_cut(cut: ModelCut, model: nn.Module, context: CutContext, models: int) -> None:
    """Cut a model, and say which one it is where it is one of several that can't be cut alike."""
    try:
        cut.apply(model, context)
    except UsageError as error:
        if models == 1:
            raise
        raise UsageError(
            f"{error}. That is the {type(model).__name__}: "
            f"cut= is for each of the {models} models of this "
            "call to run.prepare; give one that is cut otherwise, or not, to a call of its own"
        ) from error


def refuse_one_number(
    optimizer: Optimizer, placements: Placements, mesh: Mesh, dealt: Container[int]
) -> None:
    """Raise `UsageError` for an optimizer that takes one number over all parameters.

    It is wrong if workers have parts of parameters, or different layers (`dealt`).
    """
    for parameter in (
        (p for group in optimizer.param_groups for p in group["params"])
        if needs_global_number(optimizer)
        else ()
    ):
        along = [
            name for name in placements.placement_of(parameter).axes if mesh.axis_size(name) > 1
        ]
        if along or id(parameter) in dealt:
            raise UsageError(
                f"{type(optimizer).__qualname__} takes one number (a norm, a step size) over all "
                "parameters, and each worker along "
                f"`{along[0] if along else 'stage'}` would take that of its own parts: "
                "what goes is an optimizer that steps each "
                "element by itself, such as AdamW"
            )
