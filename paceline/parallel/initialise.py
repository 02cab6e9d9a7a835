"""Makes the parameters of models built under `pl.meta()`: module by module, each worker its part.

    modules of the model    logical parameters of a module      what this worker holds
    blocks.0.up         ->  made whole by reset_parameters  ->  its regions, the rest is freed
    blocks.0.down       ->  ...

Random numbers come from generators that are seeded with the run's seed and the module's name. So
values don't depend on cuts, on the number of workers, or on other uses of the generators.

The `reset_parameters` (or `init`) of a module may write to parameters of modules inside of it. Such
a module is made whole together with these. A trial on the device "meta" shows which ones they are.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter

from paceline.errors import UsageError
from paceline.parallel.meta import CPU, Birth, WriteLog, birth_of
from paceline.parallel.placement import Placement, Placements, local_part
from paceline.state.versioned import MAX_SHOWN_DIFFERENCES, GeneratorStates

Init = Callable[[nn.Module], Any]
# Guards the global random generators of torch, numpy and Python.
GENERATORS: Final = threading.Lock()
# Stands for a call that writes to a parameter, if a trial can't tell.
GUESSED = "?"
RESETS = ("reset_parameters", "_reset_parameters")  # torch's own attention has the second one


def has_meta_parameters(model: nn.Module) -> bool:
    """Whether a model has parameters without memory."""
    return any(parameter.is_meta for parameter in model.parameters())


@dataclass
class _ModuleNode:
    """A module as it was before it was cut.

    `shape` is a copy of it on the device "meta". `inside` are the modules within it, itself last.
    """

    name: str
    module: nn.Module
    shape: nn.Module
    inside: list[_ModuleNode] = field(default_factory=list)

    def owns_any(self, stand_ins: set[int]) -> bool:
        """Whether one of these parameters, given by their ids, is the module's own."""
        return any(id(parameter) in stand_ins for parameter in self.shape._parameters.values())


@dataclass
class _MetaParameter:
    """A logical parameter without memory.

    `stand_in` is the copy of it in a shape, `owner` the module that gives it values, `birth` what
    `pl.meta()` has noted, and `writes` the calls that write to it when its owner is reset.
    """

    name: str
    stand_in: Parameter
    owner: _ModuleNode
    birth: Birth | None
    writes: set[str] = field(default_factory=set)


@dataclass
class _ResetUnit:
    """Parameters that get their values when `root` is reset.

    `nodes` are the modules that are made for them, inner modules first.
    """

    root: _ModuleNode
    unborn: list[_MetaParameter] = field(default_factory=list)
    nodes: list[_ModuleNode] = field(default_factory=list)

    def choose_nodes(self) -> None:
        """Choose the modules to make: all that have these parameters, themselves or inside.

        If a trial had to guess, all modules within the root are made: the reset may read any of
        them.
        """
        if all(unborn.owner is self.root for unborn in self.unborn):
            self.nodes = [self.root]
        elif any(GUESSED in unborn.writes for unborn in self.unborn):
            self.nodes = self.root.inside
        else:
            ids = {id(unborn.stand_in) for unborn in self.unborn}
            self.nodes = [
                node for node in self.root.inside if any(one.owns_any(ids) for one in node.inside)
            ]


class Blueprint:
    """A model without memory as it was before it was cut, and how its parameters get values.

    `init` is called with each module after its `reset_parameters`, inner modules first, as
    `nn.Module.apply` does. `prefix` is put before names.

    Raises `UsageError` for parameters that nothing gives values to, and for parameters whose values
    in the model's constructor were not those of `reset_parameters`.
    """

    def __init__(self, model: nn.Module, init: Init | None = None, *, prefix: str = "") -> None:
        self._init, self._prefix = init, prefix
        # By id of the model's parameter. Cuts replace its content later, but not the stand-in's.
        self._stand_ins: dict[int, Parameter] = {}
        self._nodes: dict[int, _ModuleNode] = {}  # by id of the module, inner modules first
        self._copy_module("", model)
        self._unborn = {id(unborn.stand_in): unborn for unborn in self._find_meta_parameters(model)}
        self._units = self._plan_units() if self._unborn else []

    def make_parameters(
        self, model: nn.Module, placements: Placements, seed: int, device: torch.device = CPU
    ) -> None:
        """Give this worker's part of each parameter its values.

        `model` is the model as cuts have left it, and `placements` say which part of a parameter is
        here. Modules are made on the CPU, so that values are the same for each `device` that the
        parts come to.
        """
        held: dict[str, Tensor] = {
            placement.name: parameter for parameter, placement in placements.parameters()
        }
        held |= {
            self._prefix + name: parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        with preserve_randomness():
            for unit in self._units:
                names = [self._prefix + unborn.name for unborn in unit.unborn]
                # Other workers have all of this unit: only memory is needed here, maybe of no
                # elements.
                if not any(placements.placement_of(held[name], name).regions for name in names):
                    for name in names:
                        give_memory(held[name], placements.placement_of(held[name], name), device)
                    continue
                _seed_generators(seed, self._prefix + unit.root.name)
                for unborn, value in self._make_values(unit):
                    name = self._prefix + unborn.name
                    _fill_part(held[name], placements.placement_of(held[name], name), value, device)

    # ---- copies without memory

    def _copy_module(self, name: str, module: nn.Module) -> _ModuleNode:
        if id(module) in self._nodes:
            return self._nodes[id(module)]
        inner = {
            key: None
            if child is None
            else self._copy_module(f"{name}.{key}" if name else key, child)
            for key, child in module._modules.items()
        }
        shape = _copy_shallowly(
            module,
            {
                key: None if p is None else self._make_stand_in(p)
                for key, p in module._parameters.items()
            },
            {
                key: None if b is None else torch.empty_like(b, device="meta")
                for key, b in module._buffers.items()
            },
            {key: None if node is None else node.shape for key, node in inner.items()},
        )
        node = self._nodes[id(module)] = _ModuleNode(name, module, shape)
        seen: dict[int, _ModuleNode] = {
            id(one): one for child in inner.values() if child is not None for one in child.inside
        }
        node.inside = [*seen.values(), node]
        return node

    def _make_stand_in(self, parameter: Parameter) -> Parameter:
        if id(parameter) not in self._stand_ins:
            copy = Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
            self._stand_ins[id(parameter)] = copy
        return self._stand_ins[id(parameter)]

    def _find_meta_parameters(self, model: nn.Module) -> Iterator[_MetaParameter]:
        empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
        if empty:
            raise UsageError(
                f"buffers have no memory: {_list_names(self._prefix, empty)}; "
                "build the model under pl.meta() and not under "
                "torch.device('meta'), so that they are made"
            )
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                continue
            # Values that a script wrote, and weak references that swap_tensors can't follow, would
            # be lost when the parameter gets memory.
            record = birth_of(parameter)
            if record is not None and parameter._version != record.version:
                raise UsageError(
                    f"{self._prefix}{name} was written to after pl.meta(), when it had no memory, "
                    "and what was written is lost: say "
                    "run.prepare(..., init=function of a module), or load values after prepare"
                )
            if weakref.getweakrefcount(parameter):
                raise UsageError(
                    f"{self._prefix}{name} is held by weak references "
                    f"({_owner_class(model, parameter)} does so), and can't be given memory: "
                    "build that module outside of pl.meta()"
                )
            stand_in, home = (
                self._stand_ins[id(parameter)],
                None if record is None else record.module(),
            )
            first = next(
                node
                for node in self._nodes.values()
                if any(p is stand_in for p in node.shape._parameters.values())
            )
            yield _MetaParameter(
                name, stand_in, first if home is None else self._nodes.get(id(home), first), record
            )

    # ---- trials: which reset writes to which parameter

    def _plan_units(self) -> list[_ResetUnit]:
        """Find the module whose reset gives each parameter its values.

        Modules are tried from the inside to the outside, and the last one that writes to a
        parameter counts: its reset would overwrite the values of the modules inside of it.
        """
        units: dict[int, _ResetUnit] = {}
        # By id of a stand-in: the outermost module that writes to it.
        outermost: dict[int, _ModuleNode] = {}
        with preserve_randomness():
            for node in self._nodes.values():
                within = {id(one) for one in node.inside}
                for stand_in, calls in self._try_reset(node):
                    unborn = self._unborn.get(id(stand_in))
                    if unborn is not None and id(unborn.owner) in within:
                        unborn.writes |= calls
                        outermost[id(stand_in)] = node
        self._check_writes(list(self._unborn.values()))
        for key, unborn in self._unborn.items():
            root = outermost[key]
            unit = units.setdefault(id(root), _ResetUnit(root))
            unit.unborn.append(unborn)
        for unit in units.values():
            unit.choose_nodes()
        return list(units.values())

    def _check_writes(self, parameters: Sequence[_MetaParameter]) -> None:
        self._refuse_empty([one for one in parameters if not one.writes])
        # The constructor of the model wrote to them otherwise than reset_parameters does.
        odd = [
            one.name
            for one in parameters
            if one.birth is not None and not one.birth.writes <= one.writes
        ]
        if odd and self._init is None:
            raise UsageError(
                "the model gives values of its own to "
                f"{_list_names(self._prefix, odd)}, which are not "
                "those of reset_parameters; say "
                "run.prepare(..., init=function of a module) that does the same"
            )

    def _refuse_empty(self, without: Sequence[_MetaParameter]) -> None:
        """Raise `UsageError` for parameters without values, if there are any."""
        if without:
            names = _list_names(self._prefix, [one.name for one in without])
            kinds = ", ".join(sorted({type(one.owner.module).__qualname__ for one in without}))
            raise UsageError(
                f"nothing gives values to {names}: {kinds} has no "
                "reset_parameters that writes to them; say "
                "run.prepare(..., init=function of a module) that does"
            )

    def _try_reset(self, node: _ModuleNode) -> Iterator[tuple[Parameter, set[str]]]:
        """Reset a module without memory; yield the parameters written to, with the calls."""
        before = [
            (module, name, p)
            for module in node.shape.modules()
            for name, p in module._parameters.items()
            if p is not None
        ]
        log, needs_numbers = WriteLog(), False
        try:
            with log:
                self._reset_module(node.shape)
        except (RuntimeError, TypeError, ValueError):
            # The reset reads values, and there are none. That it writes to all of the module's own
            # parameters is a guess then, which `_check_all_written` verifies.
            needs_numbers = True
        for module, name, old in before:
            replaced = module._parameters.get(name) is not old
            module._parameters[name] = old
            calls = log.calls_writing_to(old)
            if replaced or (needs_numbers and module is node.shape):
                unborn = self._unborn.get(id(old))
                calls = (
                    calls
                    | {GUESSED}
                    | (
                        unborn.birth.writes
                        if unborn is not None and unborn.birth is not None
                        else set()
                    )
                )
            if calls:
                yield old, calls

    def _reset_module(self, module: nn.Module) -> None:
        reset = next(
            (method for name in RESETS if callable(method := getattr(module, name, None))), None
        )
        if reset is not None:
            reset()
        if self._init is not None:
            with torch.no_grad():
                self._init(module)

    # ---- making the values

    def _make_values(self, unit: _ResetUnit) -> Iterator[tuple[_MetaParameter, Tensor]]:
        """Make the modules of a unit whole, and yield its parameters with their values."""
        real: dict[int, Parameter] = {}
        copies: dict[int, nn.Module] = {}  # by id of their shapes, inner modules first
        for node in unit.nodes:
            shape = node.shape
            copies[id(shape)] = _copy_shallowly(
                shape,
                {
                    name: None if p is None else real.setdefault(id(p), _make_real(p))
                    for name, p in shape._parameters.items()
                },
                {
                    name: None if b is None else b.detach().to(CPU, copy=True)
                    for name, b in node.module._buffers.items()
                },
                {
                    name: None if child is None else copies.get(id(child), child)
                    for name, child in shape._modules.items()
                },
            )
        for copy in copies.values():
            self._reset_module(copy)
        for unborn in unit.unborn:
            shape = unborn.owner.shape
            name = next(name for name, p in shape._parameters.items() if p is unborn.stand_in)
            value = copies[id(shape)]._parameters[name]
            if value is None or value.shape != unborn.stand_in.shape:
                raise UsageError(
                    f"{self._prefix}{unborn.name} has another shape after it was reset; "
                    "give modules that keep it"
                )
            if value is real[id(unborn.stand_in)]:
                self._check_all_written(unborn, value)
            yield unborn, value.detach()

    def _check_all_written(self, unborn: _MetaParameter, value: Tensor) -> None:
        """Raise `UsageError` if a reset has left elements as `_make_real` made them."""
        if value.is_floating_point() or value.is_complex():
            numbers = torch.view_as_real(value) if value.is_complex() else value
            # The maximum is NaN if any element is. It needs no copy, as isnan() of all elements
            # would.
            self._refuse_empty([unborn] if value.numel() and bool(numbers.amax().isnan()) else [])
        elif GUESSED in unborn.writes:
            raise UsageError(
                f"{self._prefix}{unborn.name} has whole numbers, and the reset of "
                f"{type(unborn.owner.module).__qualname__} can't be tried "
                "without memory, so it can't be known whether it gives values to them: "
                "build that module outside of pl.meta()"
            )


def _copy_shallowly(module: nn.Module, parameters: Any, buffers: Any, modules: Any) -> nn.Module:
    """Copy a module with other parameters, buffers and modules inside; all else is shared."""
    # `_parameters`, `_buffers` and `_modules` are where nn.Module keeps them, by name. They are
    # private, but unchanged for years, and subclasses and other libraries rely on them. All of
    # `parallel` does.
    copy: nn.Module = object.__new__(type(module))
    copy.__dict__.update(
        module.__dict__, _parameters=parameters, _buffers=buffers, _modules=modules
    )
    return copy


def _owner_class(model: nn.Module, parameter: Parameter) -> str:
    """Name of the class of the first module that has a parameter."""
    return next(
        type(module).__qualname__
        for module in model.modules()
        if any(p is parameter for p in module._parameters.values())
    )


def _make_real(stand_in: Parameter) -> Parameter:
    """Make a parameter with memory. Its elements are NaN, which shows later what no reset wrote."""
    memory = torch.empty_like(stand_in, device=CPU, requires_grad=False)
    if memory.is_floating_point() or memory.is_complex():
        memory.fill_(torch.nan)
    return Parameter(memory, requires_grad=stand_in.requires_grad)


def give_memory(parameter: Tensor, placement: Placement, device: torch.device = CPU) -> None:
    """Give a parameter without memory that of this worker's part. It stays the same object."""
    if parameter.is_meta:
        memory = torch.empty(placement.local, dtype=parameter.dtype, device=device)
        torch.utils.swap_tensors(
            parameter, Parameter(memory, requires_grad=parameter.requires_grad)
        )


def _fill_part(
    parameter: Tensor, placement: Placement, value: Tensor, device: torch.device
) -> None:
    """Copy this worker's part of a logical parameter into the tensor that holds it here."""
    give_memory(parameter, placement, device)
    part = local_part(parameter)
    for region in placement.regions:
        region.view_local(part).copy_(region.view_logical(value))


def _seed_generators(seed: int, name: str) -> None:
    """Seed the global generators for one module."""
    module_seed = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
    torch.default_generator.manual_seed(module_seed)
    random.seed(module_seed)
    np.random.seed(module_seed % (1 << 32))


@contextlib.contextmanager
def preserve_randomness() -> Iterator[None]:
    """Put the global generators back into their state at the end; one thread at a time."""
    with GENERATORS:
        randomness = GeneratorStates()
        state = randomness.state_dict()
        try:
            yield
        finally:
            randomness.load_state_dict(state)


def _list_names(prefix: str, names: Sequence[str]) -> str:
    more = (
        f" and {len(names) - MAX_SHOWN_DIFFERENCES} more"
        if len(names) > MAX_SHOWN_DIFFERENCES
        else ""
    )
    return ", ".join(prefix + name for name in names[:MAX_SHOWN_DIFFERENCES]) + more
