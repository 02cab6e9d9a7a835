"""Sharded training (ZeRO, Rajbhandari et al. 2020): workers share the state of one model out.

    zero=1    each worker steps its part of all parameters, with its part of the optimizer's state
    zero=2    and keeps its part of gradients alone
    zero=3    and of parameters, which are gathered unit by unit while they are used

For N workers, parameters of P bytes and an optimizer that keeps K bytes for them, a worker holds,
besides what is on its way:

    zero=1    P + P + (P + K) / N        zero=2    P + (P + K) / N        zero=3    (P + P + K) / N

Each of the workers along the axis has samples of its own, as in data-parallel training.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn
from torch.nn import Parameter

from paceline.comm.axis_meter import AxisMeter
from paceline.comm.backward_pass import is_inside_backward
from paceline.comm.group_protocol import Group
from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice, format_as_call
from paceline.parallel.cut import CutContext
from paceline.parallel.meta import CPU
from paceline.parallel.sharding.flat_memory import (
    FlatMemory,
    ModelParameter,
    refuse_gradient_hook,
    refuse_requires_grad_change,
)
from paceline.parallel.sharding.gathered_units import GatheredModel, GatheredUnit
from paceline.parallel.sharding.gradients import ShardGradients
from paceline.parallel.sharding.optimizers import (
    hook_zero_grad,
    is_clipping_refused,
    refuse_idle_clipping,
    refuse_partial_norms,
)
from paceline.parallel.sharding.shard_steps import ShardSteps

Zero = Literal[1, 2, 3]
Half = Literal["bfloat16", "float16"]
Reduce = Literal[Half, "float32"]


@dataclass(frozen=True)
class shard:
    """Divide the state of a model along the axis `shard` of the mesh (ZeRO).

    >>> with pl.start(mesh="shard=4") as run:  # each worker keeps a quarter of all state
    ...     cut = pl.shard("blocks.*", zero=3)
    ...     model, optimizer, loader = run.prepare(model, optimizer, loader, cut=cut)

    Args:
        units: Patterns of module names, such as "blocks.*" (`*` matches dots, too). The parameters
            of a matching module travel together. Of nested modules that one pattern matches, the
            outermost is the unit. All other parameters are one more unit.
        zero: Stage of ZeRO (Rajbhandari et al. 2020): 1 divides the optimizer's state, 2 gradients
            as well, 3 parameters as well. Default: 3.
        params: dtype in which parameters are gathered, with `zero=3`: "bfloat16" or "float16".
            Optimizers step them in their own dtype. Default: their own.
        reduce: dtype in which gradients are summed: one of these, or "float32". Default: their own.

    Raises:
        UsageError: No such stage or dtype, or `params` without `zero=3`.
    """

    units: str | tuple[str, ...] = ()
    zero: Zero = 3
    params: Half | None = None
    reduce: Reduce | None = None

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        patterns = self.units if isinstance(self.units, str | tuple | list) else [self.units]
        if not all(isinstance(pattern, str) for pattern in patterns):
            raise UsageError(
                f"shard({self.units!r}): what comes first are patterns of names of modules, "
                "shard('blocks.*'); the stage of ZeRO has a name: shard(zero=3)"
            )
        if self.zero not in get_args(Zero):
            raise UsageError(
                f"zero={self.zero!r} is no stage of ZeRO; say 1 (optimizer state), 2 (gradients "
                "too) or 3 (parameters too)"
            )
        for name, value, kind in (("params", self.params, Half), ("reduce", self.reduce, Reduce)):
            if value is not None and (wrong := describe_unknown_choice(name, value, kind)):
                raise UsageError(wrong)
        if self.params is not None and self.zero != 3:
            raise UsageError(
                f"shard(zero={self.zero}, params={self.params!r}): parameters stay whole in their "
                "own dtype there; say zero=3, or leave "
                "params out and run the model under torch.autocast"
            )

    @property
    def patterns(self) -> tuple[str, ...]:
        """`units` as a tuple of patterns."""
        return (self.units,) if isinstance(self.units, str) else tuple(self.units)

    @property
    def axis(self) -> str:
        return "shard"

    @property
    def travels(self) -> str:
        when = (
            "before each forward and each backward of their unit"
            if self.zero == 3
            else "after each step"
        )
        return (
            f"parameters are gathered {when}; gradients are summed into parts as soon as a unit "
            "has all of its own"
        )

    def apply(self, model: nn.Module, context: CutContext) -> None:
        groups = context.groups
        if groups.group_along(self.axis).size == 1:
            return
        before = {
            id(parameter): context.placements.placement_of(parameter, name)
            for name, parameter in model.named_parameters()
        }
        if again := [
            before[id(parameter)].name
            for parameter in model.parameters()
            if is_clipping_refused(parameter)
        ]:
            raise UsageError(f"{again[0]} is cut by shard() already; cut each model once")
        # Gathers and reductions each leave in an order of their own, so each kind gets a group.
        gathering, reducing = (
            groups.make_another_group(self.axis),
            groups.make_another_group(self.axis),
        )
        sharded = ShardedModel(
            model,
            self,
            gathering,
            reducing,
            groups.meter_along(self.axis),
            tied=context.tied,
            home=context.device,
        )
        for held, piece, (start, stop) in sharded.iterate_pieces():
            placement = before[id(held.parameter)].cut_flat(start, stop, self.axis)
            if piece is held.parameter:
                context.placements.add_placement(piece, placement)
            else:
                context.replace_parameter(held.parameter, piece, placement)
        context.gradient_sources.append(sharded.gradients)
        context.refresh_callbacks.append(sharded.steps.gather_all)
        context.close_callbacks.append(sharded.steps.close)


class ShardedModel:
    """A model of which this worker has its part. The workers of a group make it together.

    There are two groups that nothing else uses, as `gathering` and `reducing` each have an order of
    their own. `meter` measures what goes through them. Each parameter in `tied` lies in a memory of
    its own, so that its pieces are the same in every stage that has it. Parameters without memory
    get it on the device `home`.
    """

    def __init__(
        self,
        model: nn.Module,
        cut: shard,
        gathering: Group,
        reducing: Group,
        meter: AxisMeter | None = None,
        *,
        tied: Sequence[Parameter] = (),
        home: torch.device = CPU,
    ) -> None:
        meter = AxisMeter(cut.axis) if meter is None else meter
        for group in (gathering, reducing):
            meter.add_sender(group)
        units = list(find_units(model, cut.patterns))
        held = list(find_unit_parameters(model, [name for name, _ in units]))
        # Compare the parameters of all workers first: with different ones, collectives would hang.
        facts = [
            [name, one.name, list(one.parameter.shape), one.parameter.requires_grad]
            for name, one in held
        ]
        if any(other != facts for other in gathering.gather_objects(facts, name="shard")):
            raise UsageError(
                "shard(): workers have different models (names, shapes or requires_grad of "
                "parameters); build the same one everywhere"
            )
        frees = cut.zero == 3
        # With zero=3 all parameters are cut, else those that are trained.
        self._uncut = [one for _, one in held if not (frees or one.parameter.requires_grad)]
        # Hooks of scripts would get gradients of whole parameters before they are summed. Both
        # attributes are private to torch: dicts of hooks by handle. If they were renamed, this
        # raises.
        hooked = [
            one.name
            for _, one in held
            if one.parameter._backward_hooks or one.parameter._post_accumulate_grad_hooks
        ]
        if frees and hooked:
            refuse_gradient_hook(hooked[0])
        dtype = getattr(torch, cut.params) if cut.params else None
        self.memories = [
            FlatMemory(
                unit,
                part,
                gathering,
                frees=frees,
                dtype=dtype if part[0].parameter.is_floating_point() else None,
                meter=meter,
                home=home,
            )
            for unit, part in _group_parameters(
                held, {id(parameter) for parameter in tied}, frozen=frees
            )
        ]
        # Memories come in the order of the forward; gradients of the last are there first.
        self.gradients = ShardGradients(
            [memory for memory in self.memories if memory.is_trained],
            reducing,
            keeps=cut.zero == 1,
            dtype=getattr(torch, cut.reduce) if cut.reduce else None,
            meter=meter,
        )
        if frees:
            self._gather_units(model, units)
        self.steps = ShardSteps(self.memories)
        model.register_forward_pre_hook(self._prepare_forward, prepend=True)
        cut_parameters = [
            one
            for memory in self.memories
            for one in zip(memory.parameters, memory.pieces, memory.wholes, strict=True)
        ]
        refuse_partial_norms((one.name, tensor) for one, *both in cut_parameters for tensor in both)
        if not frees:
            refuse_idle_clipping(whole for _, _, whole in cut_parameters)
            hook_zero_grad(model, {id(whole): piece for _, piece, whole in cut_parameters})

    def _gather_units(self, model: nn.Module, units: Sequence[tuple[str, nn.Module]]) -> None:
        gathered = GatheredModel()
        for name, module in [*units, ("", model)]:
            memories = [memory for memory in self.memories if memory.unit == name]
            unit = GatheredUnit(module, memories, name, model=gathered)
            self.gradients.watch_passes(unit, memories)
            gathered.units.append(unit)

    def _prepare_forward(self, model: nn.Module, args: object) -> None:
        """Refresh whole parameters before a forward, if the strategy has changed their pieces.

        Raises `UsageError` if a parameter that was frozen at the cut is trained now, as its
        gradients aren't summed, or if a parameter has been given other memory.
        """
        for memory in self.memories if not torch.compiler.is_compiling() else ():
            memory.check_memory()
        for one in self._uncut:
            if one.parameter.requires_grad:
                refuse_requires_grad_change(one.name, trained=False)
        if self.gradients.replicas_diverge and not is_inside_backward():
            self.steps.gather_all()

    def __deepcopy__(self, memo: object) -> ShardedModel:
        # The hook of a copied model refreshes the original.
        return self

    def iterate_pieces(self) -> Iterator[tuple[ModelParameter, Parameter, tuple[int, int]]]:
        """Yield each cut parameter, its piece, and the range of its flat elements in that piece."""
        for memory in self.memories:
            yield from zip(
                memory.parameters,
                memory.pieces,
                memory.layout.piece_ranges(memory.rank),
                strict=True,
            )


def find_units(model: nn.Module, patterns: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that patterns match, once each, in the order of the model.

    Of nested modules that one pattern matches, the outermost is yielded.
    """
    modules = {name: module for name, module in model.named_modules() if name}
    matches = dict[str, nn.Module]()
    for pattern in patterns:
        matched = [name for name in modules if fnmatch.fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.0)
            raise UsageError(
                f"shard({pattern!r}) matches no module of the model; "
                f"the nearest names are {', '.join(near) or 'none'}"
            )
        for name in matched:
            if not any(name.startswith(f"{outer}.") for outer in matched):
                matches[name] = modules[name]
    for name, module in modules.items():
        if name not in matches:
            continue
        if type(module).forward is nn.Module.forward or isinstance(
            module, nn.ModuleList | nn.ModuleDict
        ):
            raise UsageError(
                f"shard(): {name} is a {type(module).__name__}, which is never called itself; "
                f"write {name + '.*'!r}"
            )
        if any(True for _ in module.parameters()):
            yield name, module


def find_unit_parameters(
    model: nn.Module, units: Sequence[str]
) -> Iterator[tuple[str, ModelParameter]]:
    """Yield each parameter once, with the name of the innermost unit that it is in.

    A parameter that several units use belongs to the root, whose name is "".
    """
    names = set(units)
    # All three by id of a parameter: the modules that have it, its units, and its name.
    places, homes, parameters = (
        dict[int, list[tuple[nn.Module, str]]](),
        dict[int, set[str]](),
        dict[int, tuple[str, Parameter]](),
    )
    for path, module in model.named_modules(remove_duplicate=False):
        steps = path.split(".")
        # The longest prefix of the path that is a unit.
        home = next(
            (
                name
                for count in range(len(steps), 0, -1)
                if (name := ".".join(steps[:count])) in names
            ),
            "",
        )
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            parameters.setdefault(id(parameter), (f"{path}.{name}" if path else name, parameter))
            homes.setdefault(id(parameter), set()).add(home)
            if (module, name) not in (row := places.setdefault(id(parameter), [])):
                row.append((module, name))
    for key, (name, parameter) in parameters.items():
        if parameter.grad is not None:
            raise UsageError(
                f"{name} has a gradient already, and shard() gives it other memory; "
                "call zero_grad() before run.prepare"
            )
        unit = homes[key].pop() if len(homes[key]) == 1 else ""
        yield unit, ModelParameter(name, parameter, tuple(places[key]))


def _group_parameters(
    held: Sequence[tuple[str, ModelParameter]], alone: Container[int], *, frozen: bool
) -> Iterator[tuple[str, list[ModelParameter]]]:
    """Yield groups of parameters that lie in one memory, each with the name of its unit.

    Those of a group are in the same unit, and have the same dtype, device and `requires_grad`.
    Without `frozen`, parameters that aren't trained are left out. A parameter whose id is in
    `alone` is a group of its own.
    """
    parts = dict[tuple[object, ...], list[ModelParameter]]()
    for unit, one in held:
        parameter = one.parameter
        if (parameter.requires_grad or frozen) and parameter.numel():
            by_itself = id(parameter) if id(parameter) in alone else None
            parts.setdefault(
                (unit, parameter.dtype, parameter.device, parameter.requires_grad, by_itself), []
            ).append(one)
    for key, group in parts.items():
        yield str(key[0]), group
