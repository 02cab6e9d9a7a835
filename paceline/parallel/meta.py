"""Models without memory: modules are built as always, and their parameters have shapes alone until a run makes this worker's part of them.

    with pl.meta():              # parameters on the device "meta"; buffers are made
        model = GPT(...)
    model = run.prepare(model, cut=[...])        # the parts that are mine, by each module's reset_parameters

A parameter of such a model knows the module that it was made for, and what was written to it since: by that `initialise.py` sees whether
`reset_parameters` is all that gives it values.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import Parameter, is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import UsageError

BIRTH: Final = "_paceline_birth"  # an attribute of parameters: a weak reference to one would keep it from being made real


class WriteLog(TorchDispatchMode):
    """Notes what is written to tensors while it is on: the calls, by the storage that they write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: defaultdict[int, set[str]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **(kwargs or {})}
        for argument in func._schema.arguments:
            target = given.get(argument.name)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(target, Tensor):
                others = [repr(value) for name, value in given.items() if name != argument.name and not isinstance(value, Tensor)]
                self._calls[_storage(target)].add(f"{func} {' '.join(others)}")
        return func(*args, **(kwargs or {}))

    def of(self, tensor: Tensor) -> set[str]:
        """Return the calls that have written to a tensor, or to a view of it."""
        return self._calls.get(_storage(tensor), set())

    def forget(self, tensor: Tensor) -> None:
        """Begin anew for a tensor, whose storage may have the address of one that is gone."""
        self._calls.pop(_storage(tensor), None)


@dataclass
class Birth:
    """What is known of a parameter without memory: its module, what has written to it while it was built, and its version after that."""

    module: weakref.ref[nn.Module]
    writes: set[str] = field(default_factory=set)
    version: int = 0


@contextlib.contextmanager
def meta() -> Iterator[None]:
    """Build modules whose parameters have no memory, for models larger than a worker's. Buffers are made as always.

    `run.prepare` makes this worker's part of each parameter, by `reset_parameters` of its module or by what `prepare(init=...)` says. The
    values depend on the seed of the run and the names of modules, and on nothing else: not on cuts or on the number of workers.

    Example: `with pl.meta(): model = GPT(shape)`.
    """
    here, log, made = threading.get_ident(), WriteLog(), list[Parameter]()

    def bear(module: nn.Module, name: str, parameter: Parameter | None) -> Parameter | None:
        if parameter is None or parameter.is_meta or threading.get_ident() != here:
            return parameter
        if is_lazy(parameter):
            raise UsageError(
                f"{type(module).__qualname__}.{name} gets its shape from the first batch, and under pl.meta() shapes have to be known: use "
                "the module that isn't lazy"
            )
        unborn = Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        log.forget(unborn)
        setattr(unborn, BIRTH, Birth(weakref.ref(module)))
        made.append(unborn)
        return unborn

    hook: Callable[..., Any] = bear
    handle = register_module_parameter_registration_hook(hook)
    try:
        with log:
            yield
    finally:
        handle.remove()
        for parameter in made:
            birth: Birth = getattr(parameter, BIRTH)
            birth.writes, birth.version = set(log.of(parameter)), parameter._version


def birth(parameter: Tensor) -> Birth | None:
    """Return what is known of a parameter that was built under `meta`; None for a copy of one, and for all others."""
    found: Birth | None = getattr(parameter, BIRTH, None)
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
