"""Makes a script's own objects ready for many workers: models, optimizers, loaders, schedulers and scalers, each in its place."""

from __future__ import annotations

import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from paceline.comm.group import Group
from paceline.comm.ordered import Agreement
from paceline.data.loader import ShareLoader
from paceline.errors import UsageError
from paceline.session.step import Turns
from paceline.sync.base import Slot

WRAPPERS = (DistributedDataParallel, DataParallel)
MARK = "_paceline_bound"
Scaler = torch.amp.GradScaler


def kind(value: Any) -> str:
    """"model", "optimizer", "loader", "scheduler" or "scaler"; `UsageError` for anything else."""
    if isinstance(value, WRAPPERS) or _made_by(value, "torch.distributed.fsdp", "FullyShardedDataParallel"):
        name = type(value).__name__
        raise UsageError(f"the model is wrapped in {name} already; give the plain model (model.module): run.prepare does what {name} does")
    if isinstance(value, nn.Module):
        return "model"
    if isinstance(value, LBFGS):
        raise UsageError("LBFGS judges its steps by the loss of one worker's share, which differs on each; use another optimizer")
    if isinstance(value, Optimizer):
        return "optimizer"
    if isinstance(value, ShareLoader):
        raise UsageError("this loader has been prepared before; give the DataLoader itself, once")
    if isinstance(value, DataLoader):
        return "loader"
    if isinstance(value, LRScheduler | ReduceLROnPlateau):
        return "scheduler"
    if isinstance(value, Scaler):
        return "scaler"
    raise UsageError(
        f"run.prepare got a {type(value).__module__}.{type(value).__qualname__}; it takes models (nn.Module), optimizers, DataLoaders, "
        "schedulers and GradScalers. Keep other state with run.keep(name, object)"
    )


def _made_by(value: Any, module: str, name: str) -> bool:
    """Whether `value` is an instance of `module.name`, without importing the module: it takes a second, and who has one has imported it."""
    home = sys.modules.get(module)
    return home is not None and isinstance(value, getattr(home, name))


def slots(models: list[tuple[str, nn.Module]], optimizers: list[Optimizer]) -> Iterator[Slot]:
    """Every parameter of the models, once, and those that only an optimizer knows."""
    owner = {id(p): optimizer for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    seen: set[int] = set()
    for prefix, model in models:
        for name, parameter in model.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield Slot(prefix + name, parameter, owner.get(id(parameter)))
    for number, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield Slot(f"optimizer{number}.group{place}.{index}", parameter, optimizer)


def check_parameters(found: list[Slot]) -> None:
    """Raise `UsageError` for parameters that can't be replicated yet."""
    for slot in found:
        if isinstance(slot.parameter, UninitializedParameter | UninitializedBuffer):
            raise UsageError(f"{slot.name} is not initialised yet (a lazy module): run one batch through the model before run.prepare")
        if _made_by(slot.parameter, "torch.distributed.tensor", "DTensor"):
            raise UsageError(
                f"{slot.name} is a DTensor (fully_shard or tensor parallel): sharded parameters are not supported yet, give the plain model"
            )


def same_everywhere(agreement: Agreement, group: Group, tensors: list[tuple[str, Tensor]], say: Callable[[str], None]) -> None:
    """Compare names, shapes and dtypes with all workers, and give everybody the first worker's values, said if they differed."""
    layout = [[name, list(x.shape), str(x.dtype)] for name, x in tensors]
    _same_layout(agreement, layout)
    digest = hashlib.sha256()
    for _, x in tensors:
        digest.update(x.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data if x.numel() else b"")
    digests = agreement.meet("values of prepare", digest.digest())
    different = [rank for rank, found in enumerate(digests) if found != digests[0]]
    if not different:
        return
    say(
        f"parameters or buffers of rank {', '.join(map(str, different))} differed from rank 0's and were replaced by them "
        "(seed all workers alike to avoid it)"
    )
    with torch.no_grad():
        for name, x in tensors:
            group.broadcast(x.detach(), name=name).wait()


def _same_layout(agreement: Agreement, layout: list[list[Any]]) -> None:
    answers = agreement.meet("prepare", hashlib.sha256(repr(layout).encode()).digest())
    if len(set(answers)) == 1:
        return
    layouts = [msgpack.unpackb(a) for a in agreement.meet("layouts of prepare", msgpack.packb(layout))]
    for rank, other in enumerate(layouts):
        for mine, theirs in zip(layouts[0], other, strict=False):
            if mine != theirs:
                raise UsageError(
                    f"workers prepare different models: rank 0 has {mine[0]} {mine[1]} {mine[2]} where rank {rank} has "
                    f"{theirs[0]} {theirs[1]} {theirs[2]}; build the same model on every worker"
                )
        if len(other) != len(layouts[0]):
            longer = max(layouts[0], other, key=len)
            extra = longer[min(len(other), len(layouts[0]))][0]
            counts = f"rank 0 has {len(layouts[0])} tensors and rank {rank} has {len(other)}"
            raise UsageError(f"workers prepare different models: {counts}, the first extra one is {extra}")


# ---- rebinding a user's own objects


def rebind(thing: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the method `name` of one object by a bound method; a second time is harmless, and a deepcopy is bound to the copy."""
    current = thing.__dict__.get(name)
    if getattr(getattr(current, "__func__", current), MARK, False):
        return
    scheduled = any(getattr(f, "_wrapped_by_lr_sched", False) for f in (current, getattr(current, "__func__", None)))
    method = wrap(_own(thing, name, current if not scheduled else None))
    setattr(method, MARK, True)
    method.__name__ = name
    if isinstance(thing, Optimizer) and name == "step":
        method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]  # schedulers ask; we count for them
    setattr(thing, name, types.MethodType(method, thing))


def _own(thing: Any, name: str, current: Any) -> Callable[..., Any]:
    """The method as its class has it (or as it was set on the object), to be called with the object."""
    if current is None:
        return lambda self, *args, **kwargs: getattr(type(self), name)(self, *args, **kwargs)
    return lambda self, *args, **kwargs: current(*args, **kwargs)


def bind_optimizer(optimizer: Optimizer, turns: Turns, *, accumulate: bool) -> None:
    """Let `step` see that gradients are exchanged, and with micro-batches let `step` and `zero_grad` act on the last."""

    def stepping(own: Callable[..., Any]) -> Callable[..., Any]:
        def step(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            self._opt_called = True  # type: ignore[attr-defined]
            closure = kwargs.get("closure", args[0] if args else None)
            if closure is None:
                turns.ready("optimizer.step")
                if not turns.acting:
                    return None
            result = own(self, *args, **kwargs)
            turns.backward.sync.stepped(self)
            return result

        return step

    def clearing(own: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
            return own(self, *args, **kwargs) if turns.clearing else None

        return zero_grad

    rebind(optimizer, "step", stepping)
    if accumulate:
        rebind(optimizer, "zero_grad", clearing)


def bind_zero_grad(model: nn.Module, turns: Turns) -> None:
    """With micro-batches, `model.zero_grad` acts as the optimizer's."""

    def clearing(own: Callable[..., Any]) -> Callable[..., Any]:
        def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return own(self, *args, **kwargs) if turns.clearing else None

        return zero_grad

    rebind(model, "zero_grad", clearing)


def bind_acting(thing: Any, names: tuple[str, ...], turns: Turns) -> None:
    """Let methods of a scheduler or scaler act only when the optimizer's step does."""
    for name in names:
        if not inspect.ismethod(getattr(thing, name, None)):
            continue

        def acting(own: Callable[..., Any]) -> Callable[..., Any]:
            def act(self: Any, *args: Any, **kwargs: Any) -> Any:
                return own(self, *args, **kwargs) if turns.acting else None

            return act

        rebind(thing, name, acting)
