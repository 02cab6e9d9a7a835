"""Predicts and measures the memory that a worker holds for its prepared models.

parameters    as they are in the model
gradients     predicted: as large as the parameters that optimizers step, plus the buckets that a
              cut keeps between passes
optimizer     predicted: what a copy of the optimizer keeps after a step on "meta" tensors, which
              have a shape and no memory
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

from paceline.parallel.placement import Placement, local_part
from paceline.prepare.registry import Prepared
from paceline.record.folder import MEMORY_KINDS
from paceline.sync.abilities import RemoteOptimizer
from paceline.sync.base import Slot

# Bytes that an optimizer keeps for a parameter, as `_probe_cached` has found them. The class, the
# shape, the dtype and the settings are the key.
_PROBED_NBYTES: dict[tuple[Any, ...], int | None] = {}
# Returns bytes by the id of each parameter; None if they aren't known.
OptimizerBytes = Callable[[Optimizer], dict[int, int] | None]


def predict_parameters(
    prepared: Prepared, memory: OptimizerBytes
) -> Iterator[tuple[Placement, Parameter, dict[str, int | None]]]:
    """Yield each parameter with its placement and the bytes that this worker holds of each kind.

    Args:
        prepared: What was given to `run.prepare`.
        memory: Returns the bytes that an optimizer keeps, by the id of each parameter.

    Yields:
        Placement, parameter, and bytes by kind; None if the optimizer's bytes aren't known.
    """
    cuts, slots = prepared.cuts, {id(slot.parameter): slot for slot in prepared.slots}
    nbytes_by_optimizer: dict[int, dict[int, int] | None] = {}
    for prefix, model in prepared.models:
        for name, parameter in model.named_parameters():
            trained = cuts.trained_tensor(parameter)
            slot = slots.get(id(trained), Slot(prefix + name, trained, None))
            optimizer_nbytes: int | None = 0
            if slot.optimizer is not None and trained.requires_grad:
                if id(slot.optimizer) not in nbytes_by_optimizer:
                    nbytes_by_optimizer[id(slot.optimizer)] = memory(slot.optimizer)
                by_parameter = nbytes_by_optimizer[id(slot.optimizer)]
                optimizer_nbytes = (
                    None if by_parameter is None else by_parameter.get(id(trained), 0)
                )
            sizes = {
                "parameters": tensor_nbytes(local_part(parameter)),
                "gradients": tensor_nbytes(local_part(trained)) if trained.requires_grad else 0,
            }
            yield (
                cuts.placements.placement_of(trained, prefix + name),
                parameter,
                {**sizes, "optimizer": optimizer_nbytes},
            )


def bucket_nbytes(prepared: Prepared) -> int:
    """Return the bytes of the buckets that cuts keep between passes."""
    return sum(source.kept_nbytes for source in prepared.cuts.sources)


def tensor_nbytes(tensor: Tensor) -> int:
    """Return the bytes of the elements of a tensor."""
    if tensor.layout == torch.sparse_coo:
        return tensor_nbytes(tensor._values()) + tensor_nbytes(tensor._indices())
    return tensor.numel() * tensor.element_size()


def predict_optimizer_nbytes(optimizer: Optimizer) -> dict[int, int] | None:
    """Predict the bytes that an optimizer will keep for each parameter, by the parameter's id.

    Parameters that were stepped before are measured. For the others a copy of the optimizer steps
    on tensors without memory. Returns None if such a step fails.
    """
    nbytes_by_id: dict[int, int | None] = {}
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        if "fused" in settings:
            # Fused steps need memory, and keep the same as others.
            settings["fused"] = None
        nbytes_by_shape: dict[tuple[torch.Size, torch.dtype], int | None] = {}
        for parameter in group["params"]:
            if parameter in optimizer.state:
                nbytes_by_id[id(parameter)] = sum(
                    map(tensor_nbytes, _iterate_tensors(optimizer.state[parameter]))
                )
            elif parameter.requires_grad:
                local_parameter = local_part(parameter)
                if (local_parameter.shape, local_parameter.dtype) not in nbytes_by_shape:
                    nbytes_by_shape[local_parameter.shape, local_parameter.dtype] = _probe_cached(
                        optimizer, settings, local_parameter
                    )
                nbytes_by_id[id(parameter)] = nbytes_by_shape[
                    local_parameter.shape, local_parameter.dtype
                ]
    complete = {key: size for key, size in nbytes_by_id.items() if size is not None}
    return complete if len(complete) == len(nbytes_by_id) else None


def _probe_cached(optimizer: Optimizer, settings: dict[str, Any], parameter: Tensor) -> int | None:
    """Return the bytes that an optimizer keeps for such a parameter, from the cache if possible."""
    key = type(optimizer), parameter.shape, parameter.dtype, *settings.items()
    # Only torch's own optimizers with plain settings are cached, because the memory of others may
    # depend on anything.
    if not all(map(_is_plain, settings.values())) or not type(optimizer).__module__.startswith(
        "torch.optim."
    ):
        return _probe_optimizer(optimizer, settings, parameter)
    with contextlib.suppress(KeyError):
        return _PROBED_NBYTES[key]
    size = _probe_optimizer(optimizer, settings, parameter)
    # Bounded, as a long session may prepare many models. Another thread may clear it at any time,
    # which costs only another probe.
    if len(_PROBED_NBYTES) >= 1024:
        _PROBED_NBYTES.clear()
    _PROBED_NBYTES[key] = size
    return size


def _is_plain(value: Any) -> bool:
    """Whether a setting is a number, a word or a tuple of them, and can be a key of the cache."""
    return (
        all(map(_is_plain, value))
        if isinstance(value, tuple)
        else isinstance(value, int | float | str | None)
    )


def _probe_optimizer(
    optimizer: Optimizer, settings: dict[str, Any], parameter: Tensor
) -> int | None:
    """Return the bytes that an optimizer keeps for such a parameter; None if its step fails."""
    probe = _make_meta_parameter(parameter)
    group = {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in settings.items()
    }
    # A shallow copy with one group and an empty state. It relies on torch's optimizers keeping
    # everything in `param_groups` and `state`.
    copied = copy.copy(optimizer)
    copied.__dict__.update(param_groups=[{**group, "params": [probe]}], state=defaultdict(dict))
    # torch wraps `step` to call hooks, such as ours and the profiler's. This is the step itself.
    step = inspect.unwrap(type(optimizer).step)
    try:
        with torch.no_grad():
            step(copied)
    # A script's own optimizer may read values, which meta tensors don't have, and raise anything.
    except Exception:  # noqa: BLE001
        return None
    return sum(map(tensor_nbytes, _iterate_tensors(copied.state[probe])))


def _make_meta_parameter(parameter: Tensor) -> Parameter:
    """Return a parameter of the same shape, with a gradient, on the "meta" device."""
    probe = Parameter(torch.empty_like(parameter, device="meta"))
    probe.grad = torch.empty_like(probe)
    return probe


class MemoryWatch:
    """Predicts and measures the memory that this worker holds, for the summary.

    It measures after the first step of an optimizer, and after the second, fourth, eighth, and so
    on. `remote` steps the parameters of some optimizers elsewhere, for example on servers.
    """

    def __init__(self, prepared: Prepared, remote: RemoteOptimizer | None) -> None:
        self._prepared, self._remote = prepared, remote
        self._predicted: dict[int, dict[int, int] | None] = {}  # by the id of each optimizer
        self._held_nbytes = dict.fromkeys(MEMORY_KINDS, 0)

    def predict_optimizer(self, optimizer: Optimizer) -> None:
        """Predict what an optimizer will keep, before its first step.

        Only torch's own optimizers are probed.
        """
        if self._remote is not None and self._remote.steps(optimizer):
            self._predicted[id(optimizer)] = {}
        elif inspect.unwrap(type(optimizer).step).__module__.startswith("torch.optim."):
            self._predicted[id(optimizer)] = predict_optimizer_nbytes(optimizer)

    def collect_facts(self) -> dict[str, Any]:
        """Return the predicted and measured bytes of each kind, and the peak of this process."""
        self.measure_held()
        rows = [
            held
            for _, _, held in predict_parameters(
                self._prepared, lambda optimizer: self._predicted.get(id(optimizer))
            )
        ]
        predicted = {kind: _sum_known(row[kind] for row in rows) for kind in MEMORY_KINDS}
        predicted["gradients"] = (predicted["gradients"] or 0) + bucket_nbytes(self._prepared)
        return {"predicted": predicted, "measured": dict(self._held_nbytes), "peak": peak_nbytes()}

    def measure_held(self) -> None:
        """Measure what is held now. The maximum of each kind is kept."""
        # Parameters may be tensor subclasses whose values are still on their way, and reading those
        # would wait. `torch._C.DisableTorchFunctionSubclass` turns their `__torch_function__` off.
        # If torch renames it, this raises AttributeError.
        with torch._C.DisableTorchFunctionSubclass():
            self._measure_tensors()

    def _measure_tensors(self) -> None:
        """Measure without `__torch_function__`, see `measure_held`."""
        prepared = self._prepared
        # A parameter may be in several models and optimizers, and a tensor in several states: by
        # id, or by storage, each counts once.
        trained_by_id = {id(slot.parameter): slot.parameter for slot in prepared.slots}
        in_models = (parameter for _, model in prepared.models for parameter in model.parameters())
        parameters = [local_part(parameter) for parameter in (*in_models, *trained_by_id.values())]
        grads = [
            parameter.grad for parameter in trained_by_id.values() if parameter.grad is not None
        ]
        state_by_id = {
            id(tensor): tensor
            for optimizer in prepared.optimizers
            for tensor in _iterate_tensors(dict(optimizer.state))
        }
        current = {
            "parameters": sum(dict(map(_storage_of, parameters)).values()),
            "gradients": sum(tensor_nbytes(local_part(grad)) for grad in grads)
            + sum(source.nbytes for source in prepared.cuts.sources),
            "optimizer": sum(map(tensor_nbytes, state_by_id.values())),
        }
        self._held_nbytes = {
            kind: max(current[kind], self._held_nbytes[kind]) for kind in MEMORY_KINDS
        }


def peak_nbytes() -> int:
    """Return the largest resident memory of this process in bytes, torch itself included."""
    # macOS reports bytes, Linux KiB.
    max_resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_resident if sys.platform == "darwin" else max_resident * 1024


def _storage_of(tensor: Tensor) -> tuple[int, int]:
    """Return an identifier of a tensor's memory, and the bytes of that memory.

    Several tensors may share one storage, which may be larger than their elements.
    """
    if tensor.layout != torch.strided:
        return id(tensor), tensor_nbytes(tensor)
    # `_cdata` is the address of torch's C++ storage. `data_ptr()` would be 0 for all meta tensors.
    # If torch removes it, this raises AttributeError.
    return tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()


def _iterate_tensors(state: Any) -> Iterator[Tensor]:
    """Iterate over the tensors in nested containers."""
    # `torch.utils._pytree` is private, but used across torch; a rename raises ImportError.
    return (leaf for leaf in _pytree.tree_leaves(state) if isinstance(leaf, Tensor))


def _sum_known(numbers: Iterable[int | None]) -> int | None:
    """Return the sum of these numbers; None if one of them isn't known."""
    values = list(numbers)
    return None if None in values else sum(value for value in values if value is not None)
