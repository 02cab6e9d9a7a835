"""Models without memory: modules are built as always, and their parameters have shapes alone until
a run makes this worker's part of them.

    with pl.meta():              # parameters on the device "meta"; buffers are made
        model = GPT(...)
    model = run.prepare(model, cut=[...])        # the parts that are mine, by each module's
                                                 reset_parameters

A parameter of such a model knows the module that it was made for, and what was written to it since:
by that `initialise.py` sees whether `reset_parameters` is all that gives it values.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import Parameter, is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.errors import UsageError

# by this thread
_MADE: Final[ContextVar[list[Parameter] | None]] = ContextVar("made without memory", default=None)
_COPIES: Final = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
CPU: Final = torch.device("cpu")  # where modules are made, whatever has their parameters later
# an attribute of parameters: a weak reference to one would keep it from being made real
BIRTH: Final = "_paceline_birth"


class WriteLog(TorchDispatchMode):
    """Notes what is written to tensors without memory while it is on: the calls, by the storage
    that they write to.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: defaultdict[int, set[str]] = defaultdict(set)
        # or another one would come to the address of one that is gone
        self._alive: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        given = {
            **dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)),
            **(kwargs or {}),
        }
        for argument in func._schema.arguments:
            target = given.get(argument.name)
            if (
                argument.alias_info is not None
                and argument.alias_info.is_write
                and isinstance(target, Tensor)
                and target.is_meta
            ):
                self._alive[_storage(target)] = target.untyped_storage()
                others = [
                    repr(value)
                    for name, value in given.items()
                    if name != argument.name and not isinstance(value, Tensor)
                ]
                self._calls[_storage(target)].add(f"{func} {' '.join(others)}")
        out = func(*args, **(kwargs or {}))
        # as of model.bfloat16()
        if func in _COPIES and args[0].is_meta and isinstance(out, Tensor) and out.is_meta:
            self._alive[_storage(out)] = out.untyped_storage()
            self._calls[_storage(out)] |= self.of(args[0])
        return out

    def of(self, tensor: Tensor) -> set[str]:
        """Return the calls that have written to a tensor, or to a view of it."""
        return self._calls.get(_storage(tensor), set())


@dataclass
class Birth:
    """What is known of a parameter without memory: its module, what has written to it while it
    was built, and its version after that.
    """

    module: weakref.ref[nn.Module]
    writes: set[str] = field(default_factory=set)
    version: int = 0


@contextlib.contextmanager
def meta() -> Iterator[None]:
    """Build modules whose parameters have no memory, for models larger than a worker's.

    Buffers are made as always.

    >>> with pl.meta():
    ...     model = nn.Sequential(nn.Linear(20_000, 20_000), nn.ReLU(), nn.Linear(20_000, 10))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model, optimizer = run.prepare(model, optimizer, cut=pl.shard(zero=3))

    `run.prepare` makes this worker's part of each parameter, by `reset_parameters` of its module or
    by what `prepare(init=...)` says. The values depend on the seed of the run and the names of
    modules, and on nothing else: not on cuts or on the number of workers.
    """
    log, made = WriteLog(), list[Parameter]()
    token = _MADE.set(made)
    try:
        with log:
            yield
    finally:
        _MADE.reset(token)
        for parameter in made:
            known: Birth = getattr(parameter, BIRTH)
            known.writes, known.version = set(log.of(parameter)), parameter._version


def _bear(module: nn.Module, name: str, parameter: Parameter | None) -> Parameter | None:
    """Put one without memory in the place of a parameter that a module is given, where `meta` is
    on.
    """
    made = _MADE.get()
    if made is None or parameter is None or parameter.is_meta:
        return parameter
    if is_lazy(parameter):
        raise UsageError(
            f"{type(module).__qualname__}.{name} gets its shape from the first batch, and under "
            "pl.meta() shapes have to be known: use "
            "the module that isn't lazy"
        )
    unborn = Parameter(
        torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
    )
    setattr(unborn, BIRTH, Birth(weakref.ref(module)))
    made.append(unborn)
    return unborn


# Once and for good: torch goes through its hooks while other threads build modules, and must not
# find them changed.
register_module_parameter_registration_hook(cast(Callable[..., None], _bear))


def birth(parameter: Tensor) -> Birth | None:
    """Return what is known of a parameter that was built under `meta`; None for a copy of one,
    and for all others.
    """
    found: Birth | None = getattr(parameter, BIRTH, None)
    return found


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
