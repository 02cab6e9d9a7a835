"""Refuses objects that can't be prepared, on every worker."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import msgpack
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from paceline.comm.agreement import Agreement
from paceline.comm.group_protocol import Group
from paceline.data.loader import ShareLoader
from paceline.errors import UsageError
from paceline.record.logged.metric import is_metric
from paceline.sync.base import Slot

WRAPPERS = (DistributedDataParallel, DataParallel)
_DEEPEST = 6  # most calls between a scaler's step and `check_scaler`

Scaler = torch.amp.GradScaler
SCALED_AGAIN: Final = "after the loss of a worker (--min-workers) it would count one step twice"
SCALED_SERVED: Final = "servers get gradients before the scaler divides them by its scale"


def find_kind(value: Any) -> str:
    """Kind of an object: "model", "optimizer", "loader", "scheduler", "scaler" or "metric".

    Raises `UsageError` for anything else.
    """
    if isinstance(value, WRAPPERS) or _is_instance_of(
        value, "torch.distributed.fsdp", "FullyShardedDataParallel"
    ):
        name = type(value).__name__
        raise UsageError(
            f"the model is wrapped in {name} already; give the plain model (model.module): "
            f"run.prepare does what {name} does"
        )
    if isinstance(value, nn.Module):
        return "metric" if is_metric(value) else "model"
    if isinstance(value, LBFGS):
        raise UsageError(
            "LBFGS judges its steps by the loss of one worker's share, which differs on each; "
            "use another optimizer"
        )
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
        f"run.prepare got a {type(value).__module__}.{type(value).__qualname__}; "
        "it takes models (nn.Module), optimizers, DataLoaders, "
        "schedulers, GradScalers and metrics of torchmetrics. "
        "Keep other state with run.keep(name, object)"
    )


def _is_instance_of(value: Any, module: str, name: str) -> bool:
    """Whether `value` is an instance of `module.name`, without importing the module.

    If `value` is one, its module has been imported already. An import here would take a second.
    """
    loaded_module = sys.modules.get(module)
    return loaded_module is not None and isinstance(value, getattr(loaded_module, name))


def list_slots(models: list[tuple[str, nn.Module]], optimizers: list[Optimizer]) -> Iterator[Slot]:
    """Yield a slot for every parameter of the models and optimizers, once each.

    A parameter of a model has its name in the model. A parameter that only an optimizer has is
    named by its place in the optimizer.
    """
    owner = {
        id(p): optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for p in group["params"]
    }
    seen = set[int]()
    for prefix, model in models:
        for name, parameter in model.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield Slot(prefix + name, parameter, owner.get(id(parameter)))
    # Parameters that only an optimizer has, such as learned weights of losses.
    for which, optimizer in enumerate(optimizers):
        for place, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield Slot(f"optimizer{which}.group{place}.{index}", parameter, optimizer)


def find_new_slots(slots: Iterable[Slot], prepared: Iterable[Slot]) -> Iterator[Slot]:
    """Yield the slots whose parameters are in no prepared slot."""
    prepared_ids = {id(slot.parameter) for slot in prepared}
    return (slot for slot in slots if id(slot.parameter) not in prepared_ids)


def find_unowned(slots: Iterable[Slot], models: list[tuple[str, nn.Module]]) -> Iterator[Parameter]:
    """Yield the parameters of these slots that belong to no model."""
    owned_ids = {id(parameter) for _, model in models for parameter in model.parameters()}
    return (slot.parameter for slot in slots if id(slot.parameter) not in owned_ids)


def check_known(present: Iterable[Slot], prepared: list[Slot]) -> None:
    """Raise `UsageError` for a parameter that a model or optimizer got after it was prepared.

    Its gradient would not be exchanged.
    """
    for slot in find_new_slots(present, prepared):
        # `list_slots` gives this name to a parameter that no model has.
        if slot.optimizer is not None and slot.name.startswith("optimizer"):
            how = f"the {type(slot.optimizer).__qualname__} after run.prepare (add_param_group)"
        else:
            how = "the model after run.prepare (a new layer, or load_state_dict(assign=True))"
        raise UsageError(
            f"the parameter {slot.name} was added to {how}; give the model and the optimizer to "
            "run.prepare again, on every worker, before it is trained"
        )


def check_schedulers(optimizers: list[Optimizer], prepared: Iterable[Any]) -> None:
    """Raise `UsageError` for an optimizer whose scheduler wasn't prepared.

    If a turn is dealt again, such a scheduler would step a second time.
    """
    for optimizer in find_unprepared_schedules(optimizers, prepared):
        raise UsageError(
            f"the {type(optimizer).__qualname__} has a learning rate scheduler that was not given "
            "to run.prepare: when a worker is lost, it would step twice for one step; give it to "
            "run.prepare, too"
        )


def find_unprepared_schedules(
    optimizers: Iterable[Optimizer], prepared: Iterable[Any]
) -> Iterator[Optimizer]:
    """Yield the optimizers that have a learning rate scheduler, but none that the run keeps."""
    scheduled_optimizers = [getattr(part, "optimizer", None) for part in prepared]
    for optimizer in optimizers:
        # torch's schedulers add this entry to each group.
        has_scheduler = any("initial_lr" in group for group in optimizer.param_groups)
        if has_scheduler and not any(optimizer is other for other in scheduled_optimizers):
            yield optimizer


def check_scaler(prepared: list[Any], why: str) -> None:
    """Raise `UsageError` if an unprepared scaler is among the callers.

    Args:
        prepared: The prepared scalers.
        why: The harm that an unprepared one would do, for the message.
    """
    # A scaler leaves no trace on the optimizer that it steps, so it is looked for on the stack.
    # `sys._getframe` is private to CPython. Two changes of torch break the check: if more than
    # `_DEEPEST` calls lie between, an unprepared scaler is missed; if `GradScaler.step` renames
    # its `self`, prepared ones are refused.
    frame = sys._getframe(1)
    for _ in range(_DEEPEST):
        if frame.f_back is None:
            return
        frame = frame.f_back
        if frame.f_code is Scaler.step.__code__ and not any(
            frame.f_locals.get("self") is scaler for scaler in prepared
        ):
            raise UsageError(
                "an optimizer is stepped by a GradScaler that was not given to run.prepare: "
                f"{why}; give it to run.prepare, too"
            )


def check_not_scaler(thing: Any) -> None:
    """Raise `UsageError` for a scaler. Called if optimizers step on servers.

    Each worker would decide for itself whether a step is skipped.
    """
    if isinstance(thing, Scaler) and thing.is_enabled():
        raise UsageError(
            "a GradScaler skips a step if p.grad overflows, and with ParameterServer p.grad has "
            "one worker's share only: use bfloat16, which needs no scaler, or AllReduce"
        )


def check_owner(prepared: list[Slot], optimizers: list[Optimizer]) -> None:
    """Raise `UsageError` for a second optimizer of a parameter that a server steps.

    The server would continue with the first one.
    """
    owner = {id(slot.parameter): slot.optimizer for slot in prepared if slot.optimizer is not None}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            first = next(
                (
                    owner[id(p)]
                    for p in group["params"]
                    if owner.get(id(p), optimizer) is not optimizer
                ),
                None,
            )
            if first is not None:
                raise UsageError(
                    f"the {type(optimizer).__qualname__} has parameters of a "
                    f"{type(first).__qualname__} that was prepared before, and with "
                    "ParameterServer a parameter keeps its first optimizer: "
                    "change the settings in its param_groups, or use AllReduce"
                )


def check_memory(optimizer: Optimizer, tables: set[int]) -> None:
    """Raise `UsageError` if an optimizer that steps on servers has state on this worker.

    State of parameters with an id in `tables` is allowed.
    """
    if any(
        optimizer.state.get(p)
        for group in optimizer.param_groups
        for p in group["params"]
        if id(p) not in tables
    ):
        raise UsageError(
            f"the {type(optimizer).__qualname__} was given a state on this worker "
            "(load_state_dict), and with ParameterServer servers keep the state and would not get "
            "it: load it before run.prepare, or use run.save and run.resume"
        )


def check_parameters(slots: list[Slot]) -> None:
    """Raise `UsageError` for parameters that can't be replicated yet."""
    for slot in slots:
        if isinstance(slot.parameter, UninitializedParameter | UninitializedBuffer):
            raise UsageError(
                f"{slot.name} is not initialised yet (a lazy module): run one batch through the "
                "model before run.prepare"
            )
        if _is_instance_of(slot.parameter, "torch.distributed.tensor", "DTensor"):
            raise UsageError(
                f"{slot.name} is a DTensor: the model was cut already (fully_shard, "
                "parallelize_module); give the plain model, and say "
                "prepare(..., cut=[shard(...)]) or cut=[tensor({...})]"
            )


def check_embeddings(models: Iterable[tuple[str, nn.Module]]) -> None:
    """Raise `UsageError` for embeddings with an option that acts on one worker's samples only."""
    for prefix, model in models:
        for name, module in model.named_modules():
            if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
                continue
            if module.max_norm is not None:
                raise UsageError(
                    f"{prefix}{name} has max_norm={module.max_norm:g}, "
                    "which changes the rows that a worker looks up, on that worker alone; "
                    "leave it out, and scale the rows after the lookup: "
                    "e = embed(ids); e = e * (max_norm / e.norm(dim=-1, keepdim=True)).clamp(max=1)"
                )
            if module.scale_grad_by_freq and module.weight.requires_grad:
                raise UsageError(
                    f"{prefix}{name} has scale_grad_by_freq=True, "
                    "which counts words in the samples of one worker or in a micro-batch, and not "
                    "in the whole batch; leave it out"
                )


def equalize_replicas(
    everyone: Agreement,
    slots: list[Slot],
    models: list[tuple[str, nn.Module]],
    optimizers: list[Optimizer],
    say: Callable[[str], None],
) -> None:
    """Copy new parameters, and buffers of new models, from the first worker to all. Collective.

    Args:
        everyone: Agreement of all workers.
        slots: The new parameters.
        models: The new models, with the prefix of their names.
        optimizers: The optimizers of the call, whose settings are compared.
        say: Called with a message if values differed.
    """
    check_parameters(slots)
    if everyone.group.size > 1:
        tensors: list[tuple[str, Tensor]] = [(slot.name, slot.parameter) for slot in slots]
        tensors += [
            (prefix + name, buffer)
            for prefix, model in models
            for name, buffer in model.named_buffers()
        ]
        make_equal(everyone, everyone.group, tensors, optimizers, say)


def make_equal(
    agreement: Agreement,
    group: Group,
    tensors: list[tuple[str, Tensor]],
    optimizers: list[Optimizer],
    say: Callable[[str], None],
) -> None:
    """Compare prepared objects on all workers, and copy the first worker's values. Collective.

    Args:
        agreement: Agreement of all workers.
        group: The same workers.
        tensors: Parameters and buffers, with their names.
        optimizers: Optimizers whose settings are compared.
        say: Called with a message if values differed.

    Raises:
        UsageError: Names, shapes, dtypes or settings differ; raised on all workers.
    """
    names = {id(x): name for name, x in tensors}
    layout = [
        f"{name} {list(x.shape)} {x.dtype}{_frozen_word(x)}{' without memory' if x.is_meta else ''}"
        for name, x in tensors
    ]
    # Layouts are compared first: the broadcasts below need the same tensors on all workers.
    _check_same_layout(
        agreement,
        [
            *layout,
            *(line for optimizer in optimizers for line in _describe_groups(optimizer, names)),
        ],
    )
    # Tensors without memory get their values later, the same ones on all workers.
    tensors = [(name, x) for name, x in tensors if not x.is_meta]
    # Equal hashes save sending the values, which is the usual case.
    digest = hashlib.sha256()
    for _, x in tensors:
        digest.update(
            x.detach().contiguous().cpu().view(-1).view(torch.uint8).numpy().data
            if x.numel()
            else b""
        )
    digests = agreement.meet("values of prepare", digest.digest())
    different = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if not different:
        return
    say(
        f"parameters or buffers of rank {', '.join(map(str, different))} differed from rank 0's "
        "and were replaced by those of rank 0 (seed all workers alike to avoid it)"
    )
    with torch.no_grad():
        for name, x in tensors:
            group.broadcast(x.detach(), name=name).wait()


def _frozen_word(x: Tensor) -> str:
    return ", frozen" if isinstance(x, nn.Parameter) and not x.requires_grad else ""


def _describe_groups(optimizer: Optimizer, names: dict[int, str]) -> Iterator[str]:
    """Yield a line for each parameter group, with settings by which replicas could diverge.

    Its parameters are given by a hash of their names, as a group may have thousands.
    """
    for which, group in enumerate(optimizer.param_groups):
        plain = {
            key: float(value) if isinstance(value, Tensor) else value
            for key, value in group.items()
        }
        settings = ", ".join(
            f"{key}={value!r}"
            for key, value in plain.items()
            if isinstance(value, int | float | str | bool | tuple)
        )
        members = hashlib.sha256(
            "".join(names.get(id(p), "?") for p in group["params"]).encode()
        ).hexdigest()[:8]
        yield (
            f"group {which} of {type(optimizer).__qualname__} ({settings}, {len(group['params'])} "
            f"parameters {members})"
        )


def _check_same_layout(agreement: Agreement, layout: list[str]) -> None:
    # Hashes travel first. The layouts themselves are long, and only needed for the message.
    digests = agreement.meet("prepare", hashlib.sha256("\n".join(layout).encode()).digest())
    if all(digest == digests[0] for digest in digests):
        return
    layouts = [
        msgpack.unpackb(body)
        for body in agreement.meet("layouts of prepare", msgpack.packb(layout))
    ]
    # All workers have all layouts, so all of them raise the same error.
    first = layouts[0]
    for rank, other in enumerate(layouts):
        for one, another in zip(first, other, strict=False):
            if one != another:
                raise UsageError(
                    "workers prepare different things: "
                    f"rank 0 has {one}, and rank {rank} has {another} in its place; "
                    "build the same model and optimizer on every worker"
                )
        if len(other) != len(first):
            longer = max(first, other, key=len)
            counts = (
                f"rank 0 has {len(first)} tensors and parameter groups and rank {rank} has "
                f"{len(other)}"
            )
            raise UsageError(
                f"workers prepare different things: {counts}, the first extra one is "
                f"{longer[min(len(other), len(first))]}"
            )
