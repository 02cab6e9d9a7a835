"""What a worker holds of prepared models: predicted before an optimizer steps for the first time,
and measured while it trains.

parameters    as they are in the model
gradients     as many bytes as what optimizers step, and the buckets that a cut keeps from pass to
              pass
optimizer     predicted: what a copy of it keeps, which has stepped parameters without memory
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import resource
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils import _pytree

from paceline.parallel.placement import Placement, local
from paceline.prepare.registry import Prepared
from paceline.record.folder import KINDS
from paceline.sync.abilities import RemoteOptimizer
from paceline.sync.base import Slot

_KEPT: dict[tuple[Any, ...], int | None] = {}  # what `_tried` has found
# by the id of each parameter; None where it isn't known
OptimizerBytes = Callable[[Optimizer], dict[int, int] | None]


def predict(
    prepared: Prepared, memory: OptimizerBytes
) -> Iterator[tuple[Placement, Parameter, dict[str, int | None]]]:
    """Yield where each parameter is, the parameter, and the bytes that this worker will hold of
    each of `KINDS`.
    """
    cuts, slots = prepared.cuts, {id(slot.parameter): slot for slot in prepared.slots}
    known: dict[int, dict[int, int] | None] = {}
    for prefix, model in prepared.models:
        for name, parameter in model.named_parameters():
            trained = cuts.trained(parameter)
            slot = slots.get(id(trained), Slot(prefix + name, trained, None))
            kept: int | None = 0
            if slot.optimizer is not None and trained.requires_grad:
                if id(slot.optimizer) not in known:
                    known[id(slot.optimizer)] = memory(slot.optimizer)
                by_parameter = known[id(slot.optimizer)]
                kept = None if by_parameter is None else by_parameter.get(id(trained), 0)
            sizes = {
                "parameters": nbytes(local(parameter)),
                "gradients": nbytes(local(trained)) if trained.requires_grad else 0,
            }
            yield (
                cuts.placements.of(trained, prefix + name),
                parameter,
                {**sizes, "optimizer": kept},
            )


def kept_in_buckets(prepared: Prepared) -> int:
    """Return the bytes of the buckets that cuts keep from pass to pass."""
    return sum(source.kept_nbytes for source in prepared.cuts.sources)


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of the elements of a tensor."""
    if tensor.layout == torch.sparse_coo:
        return nbytes(tensor._values()) + nbytes(tensor._indices())
    return tensor.numel() * tensor.element_size()


def optimizer_nbytes(optimizer: Optimizer) -> dict[int, int] | None:
    """Return the bytes that an optimizer will keep for each parameter, by steps of a copy of it
    without memory; None where that fails.
    """
    found: dict[int, int | None] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        if "fused" in settings:
            settings["fused"] = None  # fused steps need memory, and keep what others keep
        alike: dict[tuple[torch.Size, torch.dtype], int | None] = {}
        for parameter in group["params"]:
            if parameter in optimizer.state:
                found[id(parameter)] = sum(map(nbytes, _tensors(optimizer.state[parameter])))
            elif parameter.requires_grad:
                mine = local(parameter)
                if (mine.shape, mine.dtype) not in alike:
                    alike[mine.shape, mine.dtype] = _tried(optimizer, settings, mine)
                found[id(parameter)] = alike[mine.shape, mine.dtype]
    known = {key: kept for key, kept in found.items() if kept is not None}
    return known if len(known) == len(found) else None


def _tried(optimizer: Optimizer, settings: dict[str, Any], parameter: Tensor) -> int | None:
    """Return what an optimizer keeps for such a parameter; what one of torch's own has been seen
    to keep isn't tried again.
    """
    key = type(optimizer), parameter.shape, parameter.dtype, *settings.items()
    if not all(map(_plain, settings.values())) or not type(optimizer).__module__.startswith(
        "torch.optim."
    ):
        return _try(optimizer, settings, parameter)
    with contextlib.suppress(KeyError):
        return _KEPT[key]
    kept = _try(optimizer, settings, parameter)
    if len(_KEPT) >= 1024:
        _KEPT.clear()  # perhaps by another thread than one that has just looked
    _KEPT[key] = kept
    return kept


def _plain(value: Any) -> bool:
    """Whether a setting of an optimizer is a number, a word, or some of them: equal ones mean
    the same.
    """
    return (
        all(map(_plain, value))
        if isinstance(value, tuple)
        else isinstance(value, int | float | str | None)
    )


def _try(optimizer: Optimizer, settings: dict[str, Any], parameter: Tensor) -> int | None:
    """Return what an optimizer keeps for such a parameter, by a step of a copy of it; None where
    that fails.
    """
    probe = _probe(parameter)
    group = {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in settings.items()
    }
    copied = copy.copy(optimizer)
    copied.__dict__.update(param_groups=[{**group, "params": [probe]}], state=defaultdict(dict))
    step = inspect.unwrap(type(optimizer).step)  # without the hooks on steps
    try:
        with torch.no_grad():
            step(copied)
    except Exception:  # noqa: BLE001
        # a script's own optimizer may look at numbers, and raise anything
        return None
    return sum(map(nbytes, _tensors(copied.state[probe])))


def _probe(parameter: Tensor) -> Parameter:
    """Return a parameter of the same shape without memory, which has a gradient."""
    probe = Parameter(torch.empty_like(parameter, device="meta"))
    probe.grad = torch.empty_like(probe)
    return probe


class MemoryWatch:
    """Predicts and measures what this worker holds, for the summary.

    `remote`: what steps optimizers elsewhere, if anything does.

    It is told to measure after the first step of an optimizer, and after the second, fourth, eighth
    and so on.
    """

    def __init__(self, prepared: Prepared, remote: RemoteOptimizer | None) -> None:
        self._prepared, self._remote = prepared, remote
        self._predicted: dict[int, dict[int, int] | None] = {}  # by the id of each optimizer
        self._held = dict.fromkeys(KINDS, 0)

    def predict(self, optimizer: Optimizer) -> None:
        """Predict what an optimizer will keep, before it steps for the first time.

        One that isn't torch's own isn't tried.
        """
        if self._remote is not None and self._remote.steps(optimizer):
            self._predicted[id(optimizer)] = {}
        elif inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim."):
            self._predicted[id(optimizer)] = optimizer_nbytes(optimizer)

    def facts(self) -> dict[str, Any]:
        """Return the bytes predicted and measured of each of `KINDS`, and the most that this
        process has had in memory.
        """
        self.measure()
        rows = [
            held
            for _, _, held in predict(
                self._prepared, lambda optimizer: self._predicted.get(id(optimizer))
            )
        ]
        predicted = {kind: _sum(row[kind] for row in rows) for kind in KINDS}
        predicted["gradients"] = (predicted["gradients"] or 0) + kept_in_buckets(self._prepared)
        return {"predicted": predicted, "measured": dict(self._held), "peak": peak()}

    def measure(self) -> None:
        """Measure what is held; the most of each kind counts."""
        # who asks for values that are on their way would wait for them
        with torch._C.DisableTorchFunctionSubclass():
            self._measure()

    def _measure(self) -> None:
        prepared = self._prepared
        trained = {id(slot.parameter): slot.parameter for slot in prepared.slots}
        parameters = [
            *(local(p) for _, model in prepared.models for p in model.parameters()),
            *(local(p) for p in trained.values()),
        ]
        grads = [parameter.grad for parameter in trained.values() if parameter.grad is not None]
        states = {
            id(x): x for optimizer in prepared.optimizers for x in _tensors(dict(optimizer.state))
        }
        now = {
            "parameters": sum(dict(map(_memory_of, parameters)).values()),
            "gradients": sum(nbytes(local(grad)) for grad in grads)
            + sum(source.nbytes for source in prepared.cuts.sources),
            "optimizer": sum(map(nbytes, states.values())),
        }
        self._held = {kind: max(now[kind], self._held[kind]) for kind in KINDS}


def peak() -> int:
    """Return the most bytes that this process has had in memory, torch itself included."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def _memory_of(x: Tensor) -> tuple[int, int]:
    """Return what tells the memory of a tensor from others', and its bytes, which may be more
    than those of the elements.
    """
    if x.layout != torch.strided:
        return id(x), nbytes(x)
    return x.untyped_storage()._cdata, x.untyped_storage().nbytes()


def _tensors(state: Any) -> Iterator[Tensor]:
    return (leaf for leaf in _pytree.tree_leaves(state) if isinstance(leaf, Tensor))


def _sum(numbers: Iterable[int | None]) -> int | None:
    """Return the sum of numbers; None where one isn't known."""
    found = list(numbers)
    return None if None in found else sum(number for number in found if number is not None)
