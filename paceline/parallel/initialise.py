"""Makes the parameters of models that were built under `pl.meta()`: module by module, each worker
keeps its part.

    modules of the model     logical parameters of one module      what this worker holds
    blocks.0.up          ->  made whole, by reset_parameters   ->  its regions are copied, the rest
                                                                   is freed
    blocks.0.down        ->  ...

Numbers are drawn from generators whose seeds are made of the run's and of the module's name, so
values don't depend on cuts, on the number of workers, or on what else draws. A module whose
reset_parameters (or `init`) writes to parameters of modules inside of it is made whole together
with those: a trial without memory shows which ones are.
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
from paceline.parallel.meta import CPU, Birth, WriteLog, birth
from paceline.parallel.placement import Placement, Placements, local
from paceline.state.versioned import SHOWN, Randomness

Init = Callable[[nn.Module], Any]
GENERATORS: Final = threading.Lock()  # of torch and others, which all threads draw from
GUESSED = "?"  # in the place of a call that writes to a parameter, where a trial can't tell
# the second one is what torch's own attention has
RESETS = ("reset_parameters", "_reset_parameters")


def is_unborn(model: nn.Module) -> bool:
    """Whether a model has parameters without memory."""
    return any(parameter.is_meta for parameter in model.parameters())


@dataclass
class _Node:
    """A module as it was before it was cut.

    `shape`: a copy without memory; `inside`: those within it, itself the last.
    """

    name: str
    module: nn.Module
    shape: nn.Module
    inside: list[_Node] = field(default_factory=list)

    def has(self, stand_ins: set[int]) -> bool:
        """Whether one of these parameters, by their ids, is the module's own."""
        return any(id(parameter) in stand_ins for parameter in self.shape._parameters.values())


@dataclass
class _Unborn:
    """A logical parameter without memory: its name, the copy that stands for it, the module that
    makes it, and what is known of it.
    """

    name: str
    stand_in: Parameter
    owner: _Node
    birth: Birth | None
    writes: set[str] = field(default_factory=set)


@dataclass
class _Unit:
    """Parameters that have their values after `root` was reset; `nodes` are the modules that are
    made for them, those inside first.
    """

    root: _Node
    unborn: list[_Unborn] = field(default_factory=list)
    nodes: list[_Node] = field(default_factory=list)

    def choose_nodes(self) -> None:
        """Choose the modules that have these parameters, or have such inside; all within the
        root where it may look at other numbers.
        """
        if all(unborn.owner is self.root for unborn in self.unborn):
            self.nodes = [self.root]
        elif any(GUESSED in unborn.writes for unborn in self.unborn):
            self.nodes = self.root.inside
        else:
            mine = {id(unborn.stand_in) for unborn in self.unborn}
            self.nodes = [
                node for node in self.root.inside if any(one.has(mine) for one in node.inside)
            ]


class Blueprint:
    """A model without memory as it is before it is cut, and how its parameters get values.

    `init` is called with each module after its `reset_parameters`, those inside first, as
    `nn.Module.apply` does. `prefix` is put before names. Raises `UsageError` for parameters that
    nothing gives values to, and for those that were given others than `reset_parameters` gives.
    """

    def __init__(self, model: nn.Module, init: Init | None = None, *, prefix: str = "") -> None:
        self._init, self._prefix = init, prefix
        # by the id of the model's parameter, to which cuts give another content
        self._stand_ins: dict[int, Parameter] = {}
        self._nodes: dict[int, _Node] = {}  # by the id of the module, those inside first
        self._copy("", model)
        self._unborn = {id(found.stand_in): found for found in self._find(model)}
        self._units = self._plan() if self._unborn else []

    def make(
        self, model: nn.Module, placements: Placements, seed: int, device: torch.device = CPU
    ) -> None:
        """Give this worker's part of each parameter its values.

        `model` is what cuts have left of it, `placements` say what is where.

        Modules are made on the processor, so numbers are the same for each `device` on which their
        parts come to lie.
        """
        kept: dict[str, Tensor] = {
            placement.name: parameter for parameter, placement in placements.parameters()
        }
        kept |= {
            self._prefix + name: parameter
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }
        with kept_randomness():
            for unit in self._units:
                names = [self._prefix + unborn.name for unborn in unit.unborn]
                # other workers have all of it
                if not any(placements.of(kept[name], name).regions for name in names):
                    for name in names:
                        give_memory(kept[name], placements.of(kept[name], name), device)
                    continue
                _seed(seed, self._prefix + unit.root.name)
                for unborn, value in self._made(unit):
                    name = self._prefix + unborn.name
                    _fill(kept[name], placements.of(kept[name], name), value, device)

    # ---- the model as it is

    def _copy(self, name: str, module: nn.Module) -> _Node:
        if id(module) in self._nodes:
            return self._nodes[id(module)]
        inner = {
            key: None if child is None else self._copy(f"{name}.{key}" if name else key, child)
            for key, child in module._modules.items()
        }
        shape = _shallow(
            module,
            {
                key: None if p is None else self._stand_in(p)
                for key, p in module._parameters.items()
            },
            {
                key: None if b is None else torch.empty_like(b, device="meta")
                for key, b in module._buffers.items()
            },
            {key: None if node is None else node.shape for key, node in inner.items()},
        )
        node = self._nodes[id(module)] = _Node(name, module, shape)
        seen: dict[int, _Node] = {
            id(one): one for child in inner.values() if child is not None for one in child.inside
        }
        node.inside = [*seen.values(), node]
        return node

    def _stand_in(self, parameter: Parameter) -> Parameter:
        if id(parameter) not in self._stand_ins:
            copy = Parameter(
                torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
            )
            self._stand_ins[id(parameter)] = copy
        return self._stand_ins[id(parameter)]

    def _find(self, model: nn.Module) -> Iterator[_Unborn]:
        empty = [name for name, buffer in model.named_buffers() if buffer.is_meta]
        if empty:
            raise UsageError(
                f"buffers have no memory: {_listed(self._prefix, empty)}; "
                "build the model under pl.meta() and not under "
                "torch.device('meta'), so that they are made"
            )
        for name, parameter in model.named_parameters():
            if not parameter.is_meta:
                continue
            known = birth(parameter)
            if known is not None and parameter._version != known.version:
                raise UsageError(
                    f"{self._prefix}{name} was written to after pl.meta(), when it had no memory, "
                    "and what was written is lost: say "
                    "run.prepare(..., init=function of a module), or load values after prepare"
                )
            if weakref.getweakrefcount(parameter):
                raise UsageError(
                    f"{self._prefix}{name} is held by weak references ({_holder(model, parameter)} "
                    "does so), and can't be given memory: "
                    "build that module outside of pl.meta()"
                )
            stand_in, home = (
                self._stand_ins[id(parameter)],
                None if known is None else known.module(),
            )
            first = next(
                node
                for node in self._nodes.values()
                if any(p is stand_in for p in node.shape._parameters.values())
            )
            yield _Unborn(
                name, stand_in, first if home is None else self._nodes.get(id(home), first), known
            )

    # ---- what is written where

    def _plan(self) -> list[_Unit]:
        """Find the modules that have to be made for each parameter.

        Raises for parameters that nothing makes.
        """
        units: dict[int, _Unit] = {}
        outermost: dict[int, _Node] = {}  # that writes to a parameter, by the id of its stand-in
        with kept_randomness():
            for node in self._nodes.values():
                within = {id(one) for one in node.inside}
                for stand_in, calls in self._try(node):
                    unborn = self._unborn.get(id(stand_in))
                    if unborn is not None and id(unborn.owner) in within:
                        unborn.writes |= calls
                        outermost[id(stand_in)] = node
        self._check(list(self._unborn.values()))
        for key, unborn in self._unborn.items():
            root = outermost[key]
            unit = units.setdefault(id(root), _Unit(root))
            unit.unborn.append(unborn)
        for unit in units.values():
            unit.choose_nodes()
        return list(units.values())

    def _check(self, found: Sequence[_Unborn]) -> None:
        self._refuse_empty([one for one in found if not one.writes])
        odd = [
            one.name
            for one in found
            if one.birth is not None and not one.birth.writes <= one.writes
        ]
        if odd and self._init is None:
            raise UsageError(
                f"the model gives values of its own to {_listed(self._prefix, odd)}, which are not "
                "those of reset_parameters; say "
                "run.prepare(..., init=function of a module) that does the same"
            )

    def _refuse_empty(self, without: Sequence[_Unborn]) -> None:
        """Raise for parameters that have no values, if there are any."""
        if without:
            names = _listed(self._prefix, [one.name for one in without])
            kinds = ", ".join(sorted({type(one.owner.module).__qualname__ for one in without}))
            raise UsageError(
                f"nothing gives values to {names}: {kinds} has no reset_parameters that writes to "
                "them; say "
                "run.prepare(..., init=function of a module) that does"
            )

    def _try(self, node: _Node) -> Iterator[tuple[Parameter, set[str]]]:
        """Reset a module without memory, and yield the parameters in it that this writes to,
        with the calls.
        """
        known = [
            (module, name, p)
            for module in node.shape.modules()
            for name, p in module._parameters.items()
            if p is not None
        ]
        log, needs_numbers = WriteLog(), False
        try:
            with log:
                self._reset(node.shape)
        except (RuntimeError, TypeError, ValueError):
            # there are none: that it writes to its own parameters is a guess, which `_check_made`
            # looks at
            needs_numbers = True
        for module, name, old in known:
            replaced = module._parameters.get(name) is not old
            module._parameters[name] = old
            calls = log.of(old)
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

    def _reset(self, module: nn.Module) -> None:
        reset = next(
            (found for name in RESETS if callable(found := getattr(module, name, None))), None
        )
        if reset is not None:
            reset()
        if self._init is not None:
            with torch.no_grad():
                self._init(module)

    # ---- the making

    def _made(self, unit: _Unit) -> Iterator[tuple[_Unborn, Tensor]]:
        """Make the modules of a unit whole, and yield its parameters with their values."""
        real: dict[int, Parameter] = {}
        copies: dict[int, nn.Module] = {}  # by the id of their shapes, those inside first
        for node in unit.nodes:
            shape = node.shape
            copies[id(shape)] = _shallow(
                shape,
                {
                    name: None if p is None else real.setdefault(id(p), _real(p))
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
            self._reset(copy)
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
                self._check_made(unborn, value)
            yield unborn, value.detach()

    def _check_made(self, unborn: _Unborn, value: Tensor) -> None:
        """Raise where a reset has left a parameter, or elements of it, as `_real` made it; the
        trial may have guessed.
        """
        if value.is_floating_point() or value.is_complex():
            numbers = torch.view_as_real(value) if value.is_complex() else value
            # without a copy, as isnan() makes
            self._refuse_empty([unborn] if value.numel() and bool(numbers.amax().isnan()) else [])
        elif GUESSED in unborn.writes:
            raise UsageError(
                f"{self._prefix}{unborn.name} has whole numbers, and the reset of "
                f"{type(unborn.owner.module).__qualname__} can't be tried "
                "without memory, so nobody can tell whether it gives values to them: "
                "build that module outside of pl.meta()"
            )


def _shallow(module: nn.Module, parameters: Any, buffers: Any, modules: Any) -> nn.Module:
    """Copy a module that has these parameters, buffers and modules inside, and shares all else
    with the one that it is a copy of.
    """
    copy: nn.Module = object.__new__(type(module))
    copy.__dict__.update(
        module.__dict__, _parameters=parameters, _buffers=buffers, _modules=modules
    )
    return copy


def _holder(model: nn.Module, parameter: Parameter) -> str:
    """Return the class of the first module that has a parameter."""
    return next(
        type(module).__qualname__
        for module in model.modules()
        if any(p is parameter for p in module._parameters.values())
    )


def _real(stand_in: Parameter) -> Parameter:
    """Give a parameter memory; elements that nothing writes to are no numbers, where their dtype
    has such.
    """
    memory = torch.empty_like(stand_in, device=CPU, requires_grad=False)
    if memory.is_floating_point() or memory.is_complex():
        memory.fill_(torch.nan)
    return Parameter(memory, requires_grad=stand_in.requires_grad)


def give_memory(parameter: Tensor, placement: Placement, device: torch.device = CPU) -> None:
    """Give memory to a parameter that has none, for the part of it that this worker holds; it
    stays the same object.
    """
    if parameter.is_meta:
        memory = torch.empty(placement.local, dtype=parameter.dtype, device=device)
        torch.utils.swap_tensors(
            parameter, Parameter(memory, requires_grad=parameter.requires_grad)
        )


def _fill(parameter: Tensor, placement: Placement, value: Tensor, device: torch.device) -> None:
    """Copy this worker's part of a logical parameter to where it is held."""
    give_memory(parameter, placement, device)
    mine = local(parameter)
    for region in placement.regions:
        region.of_local(mine).copy_(region.of_logical(value))


def _seed(seed: int, name: str) -> None:
    """Seed the generators of this process for a module."""
    number = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8], "little")
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % (1 << 32))


@contextlib.contextmanager
def kept_randomness() -> Iterator[None]:
    """Leave generators where they were before, one thread at a time."""
    with GENERATORS:
        kept = Randomness()
        state = kept.state_dict()
        try:
            yield
        finally:
            kept.load_state_dict(state)


def _listed(prefix: str, names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(prefix + name for name in names[:SHOWN]) + more
