"""Names all state that should be equal on all workers, and makes a digest of it.

    parameters       all, also frozen ones                       "blocks.3.attn.weight"
                     (if replicas differ between steps, frozen ones may differ, as a script may
                     change them)
    optimizers       state and settings                          "exp_avg of blocks.3.attn.weight",
                                                                 "lr of group 0 of AdamW"
                     (only if replicas don't differ between steps)
    the strategy     state that it keeps equal, such as          "where all last agreed to be, 0"
                     the momentum of an outer optimizer
    buffers          of synchronous BatchNorm                    "norm.running_mean"
                     constant ones (masks, tables)               "mask"

Other buffers that change during training may differ. Modules may make them from samples that only
this worker has seen.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import msgpack
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.parallel.batchnorm import BatchNorm, is_synchronised
from paceline.state.checksum import compute_checksums
from paceline.state.snapshot import Snapshot, make_snapshot
from paceline.state.tensor_version import version_of
from paceline.sync.base import Slot

PLAIN_TYPES: Final = (bool, int, float, str, complex, bytes, type(None))
BATCHNORM_STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm
# State of a buffer since training began: unchanged; other values although torch counted no change
# (broken memory, or a change that torch doesn't count); changed.
SAME, ALTERED, CHANGED = range(3)
# [form, checksum] of a tensor, ["plain", JSON] of another value, or ["buffer", state] with SAME,
# ALTERED or CHANGED.
Entry = list[Any]
DIGEST_BYTES: Final = 16  # bytes


class PreparedObjects(Protocol):
    """The models and optimizers that a run has prepared."""

    @property
    def slots(self) -> Sequence[Slot]: ...

    @property
    def models(self) -> Sequence[tuple[str, nn.Module]]: ...

    @property
    def optimizers(self) -> Sequence[Optimizer]: ...


class ReplicaPart(NamedTuple):
    """A tensor or a plain value, and the function that sets it to another value."""

    value: Any
    set_value: Callable[[Any], object]


@dataclass(frozen=True)
class ReplicaDigest:
    """The parts of one replica, and the entries that describe them to other workers, by name."""

    parts: Mapping[str, ReplicaPart]
    entries: Mapping[str, Entry]

    def pack_summary(self) -> bytes:
        """Pack a hash of all parts that have to be equal, and the state of each buffer."""
        strict = [[name, *entry] for name, entry in self.entries.items() if entry[0] != "buffer"]
        buffers = {name: entry[1] for name, entry in self.entries.items() if entry[0] == "buffer"}
        return bytes(
            msgpack.packb(
                [hashlib.blake2b(msgpack.packb(strict), digest_size=DIGEST_BYTES).digest(), buffers]
            )
        )


@dataclass
class _KnownBuffer:
    """A buffer as it was when training began."""

    tensor: weakref.ref[Tensor]
    version: int | None
    checksum: int

    def compare_state(self, buffer: Tensor, number: int) -> int:
        if self.tensor() is not buffer or self.version != version_of(buffer):
            return CHANGED
        return SAME if self.checksum == number else ALTERED


class ReplicaContents:
    """Makes digests of the prepared objects.

    Args:
        prepared: The models and optimizers of the run.
        apart: Whether replicas may differ between two steps.
    """

    def __init__(self, prepared: PreparedObjects, *, apart: bool) -> None:
        self._prepared, self._may_differ = prepared, apart
        self._known_buffers: dict[str, _KnownBuffer] = {}

    def remember_buffers(self) -> None:
        """Remember the buffers at the beginning of training, when they are equal on all workers."""
        new_buffers = {
            name: buffer
            for name, buffer in self._iterate_buffers(synchronous=False)
            if name not in self._known_buffers
        }
        for (name, buffer), checksum in zip(
            new_buffers.items(), compute_checksums(list(new_buffers.values())), strict=True
        ):
            self._known_buffers[name] = _KnownBuffer(
                weakref.ref(buffer), version_of(buffer), checksum
            )

    def checksum_own_buffers(self) -> dict[str, int]:
        """Checksums of the buffers that were changed since training began, by name."""
        changed_buffers = {
            name: buffer
            for name, buffer in self._iterate_buffers(synchronous=False)
            if self._has_changed(name, buffer)
        }
        return dict(
            zip(changed_buffers, compute_checksums(list(changed_buffers.values())), strict=True)
        )

    def _has_changed(self, name: str, buffer: Tensor) -> bool:
        known = self._known_buffers.get(name)
        return known is None or known.compare_state(buffer, known.checksum) == CHANGED

    @property
    def has_own_buffers(self) -> bool:
        """Whether there are buffers that may differ between workers.

        The answer is equal on all workers.
        """
        return bool(self._known_buffers)

    def make_digest(self, strategy_state: Mapping[str, Tensor]) -> ReplicaDigest:
        """Make a digest of all parts as they are now. `strategy_state` is the strategy's own."""
        parts: dict[str, ReplicaPart] = {}
        for name, part in self._iterate_parts(strategy_state):
            while name in parts:
                name += "'"
            parts[name] = part
        buffers = {
            name: buffer
            for name, buffer in self._iterate_buffers(synchronous=False)
            if name in self._known_buffers
        }
        tensors = {
            name: part.value for name, part in parts.items() if isinstance(part.value, Tensor)
        }
        # One call computes all checksums, so that a GPU is waited for only once.
        sums = compute_checksums([*tensors.values(), *buffers.values()])
        checksums_by_name = dict(zip(tensors, sums, strict=False))
        entries = {
            name: [
                describe_form(part.value),
                checksums_by_name[name] if name in checksums_by_name else _to_json(part.value),
            ]
            for name, part in parts.items()
        }
        for (name, buffer), checksum in zip(buffers.items(), sums[len(tensors) :], strict=True):
            entries[name] = ["buffer", self._known_buffers[name].compare_state(buffer, checksum)]
            parts[name] = ReplicaPart(buffer, self._make_setter(name, buffer))
        return ReplicaDigest(parts, entries)

    def _iterate_parts(
        self, strategy_state: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, ReplicaPart]]:
        frozen = self.frozen_parameters
        for slot in self._prepared.slots:
            if _is_dense(slot.parameter) and slot.name not in frozen:
                yield slot.name, _make_tensor_part(slot.parameter)
        for name, buffer in self._iterate_buffers(synchronous=True):
            yield name, _make_tensor_part(buffer)
        for name, tensor in strategy_state.items():
            yield name, _make_tensor_part(tensor)
        names = {id(slot.parameter): slot.name for slot in self._prepared.slots}
        for optimizer_index, optimizer in enumerate(
            [] if self._may_differ else self._prepared.optimizers
        ):
            kind = type(optimizer).__name__ + (
                f" {optimizer_index}" if len(self._prepared.optimizers) > 1 else ""
            )
            for group_index, group in enumerate(optimizer.param_groups):
                for key in group:
                    yield from (
                        _iterate_leaves(f"{key} of group {group_index} of {kind}", group, key)
                        if key != "params"
                        else ()
                    )
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    for key in state:
                        yield from _iterate_leaves(
                            f"{key} of {names.get(id(parameter), '?')}", state, key
                        )

    @property
    def frozen_parameters(self) -> dict[str, Parameter]:
        """Frozen parameters, by name, that a script may change differently on each worker.

        An example is a teacher that is a moving average of its replica.
        """
        return {
            slot.name: slot.parameter
            for slot in self._prepared.slots
            if self._may_differ and not slot.parameter.requires_grad
        }

    def _iterate_buffers(self, *, synchronous: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield either the buffers of synchronous BatchNorm, or those of all other modules.

        With `synchronous=False` frozen parameters that may differ are among them. Statistics of
        other BatchNorms are never compared. A buffer with several names comes once.
        """
        seen: set[int] = set()
        for name, parameter in () if synchronous else self.frozen_parameters.items():
            if _is_dense(parameter):
                yield name, parameter
        for prefix, model in self._prepared.models:
            for path, module in model.named_modules():
                # A private part of torch. If it goes: `named_buffers(recurse=False)`, which leaves
                # out buffers with a second name in the same module.
                for name, buffer in module._buffers.items():
                    if buffer is None or id(buffer) in seen or not _is_dense(buffer):
                        continue
                    seen.add(id(buffer))
                    if (
                        _is_synchronised_statistic(module, name)
                        if synchronous
                        else not _is_statistic(module, name)
                    ):
                        yield f"{prefix}{path}{'.' if path else ''}{name}", buffer

    def _make_setter(self, name: str, buffer: Tensor) -> Callable[[Tensor], None]:
        def become(values: Tensor) -> None:
            _copy_values(buffer, values)
            self._known_buffers[name].version = version_of(buffer)

        return become


def find_own_buffers(model: nn.Module) -> set[str]:
    """Find the names of buffers that may differ: all but those of synchronous BatchNorm."""
    places = [(f"{place}." if place else "", module) for place, module in model.named_modules()]
    return {
        prefix + name
        for prefix, module in places
        for name in module._buffers
        if not _is_synchronised_statistic(module, name)
    }


def _is_statistic(module: nn.Module, name: str) -> bool:
    return isinstance(module, BatchNorm) and name in BATCHNORM_STATISTICS


def _is_synchronised_statistic(module: nn.Module, name: str) -> bool:
    """Whether this buffer is a statistic over the batches of all workers."""
    return _is_statistic(module, name) and is_synchronised(module)


def describe_form(value: Any) -> str:
    """Describe the dtype and shape of a part. A value fits only a part of the same form."""
    return (
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, Tensor)
        else "plain"
    )


def parse_plain_value(text: str) -> Any:
    """Parse the value in the entry of a plain part."""
    return Snapshot(0, json.loads(text), {}).unpack_state()


def _to_json(value: Any) -> str:
    return json.dumps(make_snapshot(value).tree)


def _iterate_leaves(name: str, holder: Any, key: Any) -> Iterator[tuple[str, ReplicaPart]]:
    """Yield the tensors and plain values of nested state. Anything else is left out."""
    value = holder[key]
    if isinstance(value, Tensor):
        if _is_dense(value):
            yield name, _make_tensor_part(value)
    elif type(value) in PLAIN_TYPES or (
        type(value) is tuple and all(type(item) in PLAIN_TYPES for item in value)
    ):
        if not isinstance(holder, tuple):
            yield name, ReplicaPart(value, lambda new: holder.__setitem__(key, new))
    elif isinstance(value, dict | list | tuple):
        for inner in value if isinstance(value, dict) else range(len(value)):
            yield from _iterate_leaves(f"{name}.{inner}", value, inner)


def _make_tensor_part(tensor: Tensor) -> ReplicaPart:
    return ReplicaPart(tensor.detach(), lambda values: _copy_values(tensor, values))


def _copy_values(tensor: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(values)


def _is_dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (
        tensor.is_quantized or tensor.is_meta or tensor.is_nested
    )
