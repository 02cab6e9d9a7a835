"""Applies the cuts of a run, before anything else uses a model's parameters."""

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
WHOLE = (Adafactor, Muon)  # torch's optimizers that compute with whole matrices
# Order of cuts: layers are cut, then they are dealt to stages, then the parameters that a worker
# still has are sharded.
ORDER = ("tensor", "stage", "shard")


class ModelCuts:
    """Applies cuts, and remembers the replacement of each parameter.

    Invariants:
        - `placements` is empty until the first cut. Then it has each parameter of a cut model.
        - `applied` has each cut once. `_used` has the axes of `applied`; the axis "" means a cut
          that leaves each worker the whole model.
        - `_renewed` leads from a parameter to its replacement by one cut. After several cuts the
          parameter that is trained is at the end of a chain.
        - `_summed` has trained parameters only, of models with a cut along `shard`.
        - `_endings` and `_followers` belong to cuts in `applied`. `_endings` is empty after the
          run.

    Args:
        axes: The groups of the run.
        seed: Seed of the values of parameters that were built without memory.
        override: Cuts of `paceline run --cut`, in place of the script's. Default: the script's.
        note: Called with a line about each change of a cut during training. Default: ignored.
        parting: Tells whether copies of a weight that two stages share may differ. Default: no.
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
        # Makes a sample batch from the prepared loaders.
        self.sample: Callable[[int], tuple[Any, ...]] = functools.partial(sample_batch, ())
        self._statistics: str | None = None
        self.copies = ModelCopies(self.placements)
        self._spread: list[nn.Module] = []  # models that are on several devices of each worker
        self._used: set[str] = set()
        self._summed = WeakIdKeyDictionary()  # parameters whose gradients a cut sums along `shard`
        self._endings: list[Callable[[], None]] = []
        self._followers: list[Callable[[], None]] = []
        # By id of the replaced parameter. The weak reference tells whether the id is still its own.
        self._renewed: dict[int, tuple[weakref.ref[Parameter], Parameter]] = {}

    def choose_cuts(self, wanted: WantedCuts | None) -> tuple[ModelCut, ...]:
        """Choose the cuts for the models of this call, in the order in which they are applied.

        Raises `UsageError` for a cut along an axis that the mesh doesn't have.
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
                    f"cut={format_as_call(cut)} leaves each worker the whole model, and can't be "
                    "combined with another cut: use one of them"
                )
            if cut.axis and cut.axis not in mesh.names:
                raise UsageError(
                    f"cut={format_as_call(cut)} is along `{cut.axis}`, and the mesh ({mesh}) "
                    f"has no such axis: say pl.start(mesh={cut.axis!r}), or "
                    f"paceline run --mesh {cut.axis}, to put all workers along it (mesh='data, "
                    f"{cut.axis}=2': two workers of each replica)"
                )
        return tuple(
            sorted(cuts, key=lambda cut: ORDER.index(cut.axis) if cut.axis in ORDER else len(ORDER))
        )

    def models_on_one_device(
        self, models: Iterable[nn.Module], cuts: Sequence[ModelCut]
    ) -> list[nn.Module]:
        """List the models that are on one device of this worker.

        Args:
            models: The models.
            cuts: Cuts that these models are about to get. Earlier cuts count as well.
        """
        become_spread = any(not cut.axis for cut in cuts)
        spread_ids = {id(model) for model in self._spread}
        return [model for model in models if not (become_spread or id(model) in spread_ids)]

    def note_options(self, loaders: Sequence[DataLoader[Any]], statistics: str | None) -> None:
        """Note the options of a call that cuts use.

        Args:
            loaders: Loaders that give the sample batches for measurements. Empty: as before.
            statistics: The option `batchnorm`.
        """
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
        """Cut models, and give their parts values. Collective.

        Args:
            models: Models, each with the prefix of its names.
            cuts: Cuts, in the order in which they are applied.
            optimizers: Optimizers that are prepared in the same call.
            initial: First values of the parameters.

        Returns:
            Sources of the gradients that autograd doesn't add to the trained parameters.
        """
        axes, sources = self._axes, list[CutGradients]()
        value_callbacks: list[Callable[[], None]] = []
        # Optimizers of earlier calls were checked then. By now they may step flat pieces.
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
            # Cuts follow each other, from the outermost axis inwards. Each cut works on the parts
            # that the one before has left.
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
                value_callbacks += context.value_callbacks
            if cuts:
                mark_state_parts(model, self.placements.placement_of)
        if self._statistics == "sync" and self.pipelines:
            raise UsageError(
                "batchnorm='sync' can't be used with layers on several workers (pipeline): "
                "leave it out; each worker then takes statistics of its micro-batches"
            )
        self.sources += sources
        # Values come after all cuts, so that a worker makes memory for its own part only.
        initial.give_values(self.placements, axes.everyone, axes.slice.announce)
        for callback in value_callbacks:
            callback()
        return sources

    def _cut_model(
        self, cut: ModelCut, prefix: str, model: nn.Module, context: CutContext, model_count: int
    ) -> None:
        """Apply a cut to one of the models of a call, and note its consequences.

        Args:
            cut: The cut.
            prefix: Prefix of the model's names.
            model: The model.
            context: The context that the cut gets, and fills with callbacks.
            model_count: Number of models of the call.
        """
        # Logical names are those of the uncut model, and every part keeps its own.
        before = dict(model.named_parameters())
        for name, parameter in before.items():
            self.placements.add_placement(
                parameter, self.placements.placement_of(parameter, prefix + name)
            )
        _apply_cut(cut, model, context, model_count)
        # Take over everything that the cut needs in the rest of the run.
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
        """Note the replacements of one cut.

        Some have the same name in the model `now`. The pieces of shard(zero=1) and (zero=2) are no
        parameters of the model, so the cut lists them in `renewed`, which wins.
        """
        replaced = {
            old: now[name] for name, old in before.items() if name in now and now[name] is not old
        }
        for old, new in {**replaced, **renewed}.items():
            self._renewed[id(old)] = weakref.ref(old), new

    def replacement_of(self, parameter: Parameter) -> Parameter | None:
        """The parameter that is trained in the place of one that was cut; None for all others."""
        replacement = None
        # Follow the chain of several cuts. An id may belong to a new object by now, so the
        # reference is compared as well.
        while (entry := self._renewed.get(id(parameter))) is not None and entry[0]() is parameter:
            replacement = parameter = entry[1]
        return replacement

    def trained_tensor(self, parameter: Parameter) -> Parameter:
        """The parameter that is trained in the place of this one, which may be this one itself."""
        replacement = self.replacement_of(parameter)
        return parameter if replacement is None else replacement

    def repoint_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Let optimizers step the parameters that are trained in the place of theirs.

        Raises `UsageError` for an optimizer that can't.
        """
        for optimizer in optimizers if self._renewed else ():
            repoint_optimizer(optimizer, self.replacement_of)
        for optimizer in optimizers if self.applied else ():
            reset_adagrad_sums(optimizer)
        self.refuse_whole_optimizers(optimizers)

    def find_flat_parameter(self, optimizer: Optimizer) -> str:
        """Find a parameter of an optimizer that is a flat piece. Returns its name; "" if none."""
        # A flat piece has one dimension, and its logical tensor usually has more.
        parameters = (
            (p for group in optimizer.param_groups for p in group["params"])
            if len(self.placements)
            else ()
        )
        return next(
            (
                placement.name
                for p in parameters
                if p.dim() != len((placement := self.placements.placement_of(p)).shape)
            ),
            "",
        )

    def refuse_late_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise `UsageError` for optimizers that were made after their model was cut.

        A script that groups parameters by shape would have seen flat pieces.
        """
        for optimizer in optimizers:
            if name := self.find_flat_parameter(optimizer):
                raise UsageError(
                    f"the {type(optimizer).__qualname__} steps {name}, which is a flat piece since "
                    "shard(zero=3) cut its model, so groups made by shape would be wrong: make the "
                    "optimizer before run.prepare, and give it to the call that cuts the model"
                )

    def refuse_whole_optimizers(self, optimizers: Iterable[Optimizer]) -> None:
        """Raise `UsageError` for optimizers that may need whole parameters, if those are cut."""
        mesh = self._axes.mesh
        # Parameters of pipelined models are whole, but other workers have other layers.
        dealt_ids = (
            {id(p) for model, _ in self.pipelines for p in model.parameters()}
            if mesh.axis_size("stage") > 1
            else set()
        )
        for optimizer in optimizers if len(self.placements) else ():
            refuse_one_number(optimizer, self.placements, mesh, dealt_ids)
            stepped = [p for group in optimizer.param_groups for p in group["params"]]
            for placement in map(self.placements.placement_of, stepped):
                if any(mesh.axis_size(axis) > 1 for axis in placement.axes if axis != "stage"):
                    check_elementwise(optimizer, placement.name)
            if isinstance(optimizer, WHOLE) and any(id(p) in dealt_ids for p in stepped):
                raise UsageError(
                    f"{type(optimizer).__qualname__} needs whole matrices, and fails on those "
                    "that other stages of the pipeline have: "
                    "use an optimizer that steps each element by itself, such as AdamW"
                )

    def replace_slots(self, model_slots: Iterable[Slot]) -> Iterator[Slot]:
        """Yield slots of the parameters that are trained in place of cut ones.

        Each is yielded once, by its logical name.
        """
        if not len(self.placements):
            yield from model_slots
            return
        slots, seen = list(model_slots), set[int]()
        # An optimizer may have a flat piece already, which is in no model. Its slot then has the
        # optimizer, and the slot of the model's parameter has none.
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
        """Print a change on the first worker, and pass its first line to `note`."""
        self._note_event(what.partition("\n")[0])
        self._axes.slice.announce(what)

    def _record_span(self, what: str, began: int, ended: int) -> None:
        self._axes.slice.trace.record_span(what, "stage", began, ended)

    def pipeline_of(self, model: nn.Module) -> PipelinedModel | None:
        """Get the pipeline that a model is cut into; None if all of its layers are here."""
        return next((pipeline for other, pipeline in self.pipelines if other is model), None)

    def without_stages(self, models: Iterable[nn.Module]) -> list[nn.Module]:
        """List the models that have all of their layers here."""
        return [model for model in models if self.pipeline_of(model) is None]

    def level_ties(self) -> None:
        """Copy each tied weight from one stage to the others that have it. Collective."""
        if not self._parting():
            return
        for _, pipeline in self.pipelines:
            pipeline.level_ties()
        # The copies went to the trained pieces, so the whole parameters must follow.
        if any(tie.group is not None for _, pipeline in self.pipelines for tie in pipeline.ties):
            self.follow_pieces()

    def follow_pieces(self) -> None:
        """Set whole parameters to the values of their pieces, if both are kept. Collective."""
        for follow in self._followers:
            follow()

    def stage_splits(self) -> list[list[int]]:
        """First layer of each stage, then the number of layers, for each pipeline."""
        return [list(pipeline.split.bounds) for _, pipeline in self.pipelines]

    def share_stage_state(self) -> None:
        """Give all workers the buffers that only one stage has, for a state of the whole model.

        Collective.
        """
        self.level_ties()
        for model, pipeline in self.pipelines:
            pipeline.share_buffers(self.copies.copies_of(model))

    def end_cuts(self) -> None:
        """Call the closing functions of cuts, the last one first, as the run is over."""
        while self._endings:
            self._endings.pop()()

    def check_used(self, *_: Any) -> None:
        """Raise `UsageError` if no cut uses an axis of the mesh.

        Workers along such an axis would all do the same.
        """
        unused = [name for name in self._axes.cut_axes if name not in self._used]
        if unused:
            raise UsageError(
                f"the mesh ({self._axes.mesh}) has the axis `{unused[0]}`, and no model is cut "
                "along it, so its workers would all do the same. "
                f"Give prepare(..., cut=[...]) a cut along `{unused[0]}`, "
                "or leave the axis out of the mesh"
            )

    def merge_summed_slots(self, slots: list[Slot]) -> list[Slot]:
        """Check the slots of trained parameters, and return them.

        Raises `UsageError` for a slot whose gradients are not summed along `shard`. Only a cut of
        the model sums them.
        """
        for slot in slots if self._axes.mesh.axis_size("shard") > 1 else ():
            if slot.optimizer is not None and slot.parameter not in self._summed:
                raise UsageError(
                    f"{slot.name} is trained, but its model isn't cut along `shard`. Workers along "
                    "that axis have different samples, and its gradients would not be summed over "
                    "them. Cut its model too, run.prepare(model, ..., "
                    f"cut=[shard()]), or leave `shard` out of the mesh ({self._axes.mesh})"
                )
        return slots


def read_cuts(wanted: WantedCuts) -> tuple[ModelCut, ...]:
    """Read cuts from a script's argument, or from a text in notation."""
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


def _apply_cut(cut: ModelCut, model: nn.Module, context: CutContext, model_count: int) -> None:
    """Cut a model. If the call has several models, an error names the one that can't be cut."""
    try:
        cut.apply(model, context)
    except UsageError as error:
        if model_count == 1:
            raise
        raise UsageError(
            f"{error}. That is the {type(model).__name__}: "
            f"cut= applies to each of the {model_count} models of this call to run.prepare; "
            "prepare a model that needs another cut, or none, in a call of its own"
        ) from error


def refuse_one_number(
    optimizer: Optimizer, placements: Placements, mesh: Mesh, dealt: Container[int]
) -> None:
    """Raise `UsageError` for an optimizer that computes one number over all parameters.

    The number would be wrong if workers have parts of parameters, or different layers.

    Args:
        optimizer: The optimizer.
        placements: Placements of its parameters.
        mesh: Mesh of the workers.
        dealt: Ids of parameters of models whose layers are dealt to stages.
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
                f"{type(optimizer).__qualname__} computes one number (a norm, a step size) over "
                "all parameters, and each worker along "
                f"`{along[0] if along else 'stage'}` would compute it over its own parts: "
                "use an optimizer that steps each element by itself, such as AdamW"
            )
