"""Models without memory: parameters are shapes until a run makes this worker's parts of them.

    with pl.meta():              # parameters are on the device "meta"; buffers are made
        model = GPT(...)
    model = run.prepare(model, cut=[...])    # this worker's parts, by modules' reset_parameters

Each parameter of such a model has a `Birth`: the module that it was made for, and what was written
to it since. From that `initialise.py` sees whether `reset_parameters` alone gives it its values.
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

from paceline.errors import UsageError
from paceline.parallel.torch_dispatch import TorchDispatchMode, written_arguments
from paceline.parallel.torch_tensor import storage_key

_UNDER_CONSTRUCTION: Final[ContextVar[list[Parameter] | None]] = ContextVar(
    "made without memory", default=None
)
_COPIES: Final = (torch.ops.aten._to_copy.default, torch.ops.aten.clone.default)
# Where modules are made, wherever their parameters are later.
CPU: Final = torch.device("cpu")
# An attribute of parameters that have no memory. It can't be a table of weak references: torch
# swaps the content of tensors only if they have none.
BIRTH_ATTRIBUTE: Final = "_paceline_birth"


class WriteLog(TorchDispatchMode):
    """Notes the calls that write to tensors without memory while it is on, by their storage."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls: defaultdict[int, set[str]] = defaultdict(set)
        # Storages are kept alive. Otherwise a new one could get the address, and so the key, of
        # another.
        self._alive: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        arguments = {
            **dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)),
            **(kwargs or {}),
        }
        for _, written in written_arguments(func):
            target = arguments.get(written)
            if isinstance(target, Tensor) and target.is_meta:
                self._alive[storage_key(target)] = target.untyped_storage()
                others = [
                    repr(value)
                    for name, value in arguments.items()
                    if name != written and not isinstance(value, Tensor)
                ]
                self._calls[storage_key(target)].add(f"{func} {' '.join(others)}")
        out = func(*args, **(kwargs or {}))
        # A copy has the values of the original, such as after model.bfloat16().
        if func in _COPIES and args[0].is_meta and isinstance(out, Tensor) and out.is_meta:
            self._alive[storage_key(out)] = out.untyped_storage()
            self._calls[storage_key(out)] |= self.calls_writing_to(args[0])
        return out

    def calls_writing_to(self, tensor: Tensor) -> set[str]:
        """The calls that have written to a tensor, or to a view of it."""
        return self._calls.get(storage_key(tensor), set())


@dataclass
class Birth:
    """What is known of a parameter without memory.

    `module` is the module that it was made for, `writes` are the calls that wrote to it inside of
    `pl.meta()`, and `version` is its version counter at the end of that.
    """

    module: weakref.ref[nn.Module]
    writes: set[str] = field(default_factory=set)
    version: int = 0


@contextlib.contextmanager
def meta() -> Iterator[None]:
    """Build a model whose parameters have no memory, as it may be larger than a worker's memory.

    >>> with pl.meta():
    ...     model = nn.Sequential(nn.Linear(20_000, 20_000), nn.ReLU(), nn.Linear(20_000, 10))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> model, optimizer = run.prepare(model, optimizer, cut=pl.shard(zero=3))

    Buffers have memory. `run.prepare` makes this worker's part of each parameter, by
    `reset_parameters` of its module or by the function `prepare(init=...)`. The values depend on
    the run's seed and the names of modules alone, and not on cuts or the number of workers.
    """
    log, created = WriteLog(), list[Parameter]()
    token = _UNDER_CONSTRUCTION.set(created)
    try:
        with log:
            yield
    finally:
        _UNDER_CONSTRUCTION.reset(token)
        for parameter in created:
            record: Birth = getattr(parameter, BIRTH_ATTRIBUTE)
            record.writes, record.version = set(log.calls_writing_to(parameter)), parameter._version


def _strip_memory(module: nn.Module, name: str, parameter: Parameter | None) -> Parameter | None:
    """Replace a parameter that is registered inside of `meta` by one without memory."""
    created = _UNDER_CONSTRUCTION.get()
    if created is None or parameter is None or parameter.is_meta:
        return parameter
    if is_lazy(parameter):
        raise UsageError(
            f"{type(module).__qualname__}.{name} gets its shape from the first batch, and under "
            "pl.meta() shapes have to be known: use the module class that isn't lazy"
        )
    unborn = Parameter(
        torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
    )
    setattr(unborn, BIRTH_ATTRIBUTE, Birth(weakref.ref(module)))
    created.append(unborn)
    return unborn


# Registered for good: torch goes through its hooks while other threads build modules, and fails if
# they change meanwhile. Outside of `meta` the hook does nothing.
register_module_parameter_registration_hook(cast(Callable[..., None], _strip_memory))


def birth_of(parameter: Tensor) -> Birth | None:
    """The record of a parameter that was built inside of `meta`; None for a copy or any other."""
    record: Birth | None = getattr(parameter, BIRTH_ATTRIBUTE, None)
    return record
