"""Names everything that should be the same on all workers, and what it is here.

    parameters       all, frozen ones too                        "blocks.3.attn.weight"
                     (where replicas differ between steps, frozen ones that the script changes are
                     each worker's own)
    optimizers       state and settings                          "exp_avg of blocks.3.attn.weight",
                                                                 "lr of group 0 of AdamW"
                     (where replicas differ between steps, each worker has optimizer state of its
                     own)
    the strategy's   what it says is the same, such as           "where all last agreed to be, 0"
                     the momentum of an outer optimizer
    buffers          of synchronous BatchNorm                    "norm.running_mean"
                     constant ones (masks, tables)               "mask"

A buffer that the script's own modules change is each worker's own: they may take it from samples
that only this worker has seen.
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
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from paceline.parallel.batchnorm import is_synchronised
from paceline.state.checksum import checksums
from paceline.state.snapshot import Snapshot, pack
from paceline.sync.base import Slot

PLAIN: Final = (bool, int, float, str, complex, bytes, type(None))
STATISTICS: Final = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm
# a buffer since training began: the same; others have appeared in it by themselves; it was changed
SAME, ALTERED, CHANGED = range(3)
# [form, number] of a tensor, ["plain", JSON] of another value, ["buffer", SAME, ALTERED or CHANGED]
Entry = list[Any]
DIGEST: Final = 16  # bytes


class PreparedObjects(Protocol):
    """What was prepared in a run."""

    @property
    def slots(self) -> Sequence[Slot]: ...

    @property
    def models(self) -> Sequence[tuple[str, nn.Module]]: ...

    @property
    def optimizers(self) -> Sequence[Optimizer]: ...


class ReplicaPart(NamedTuple):
    """A tensor or a plain value, and the function that sets it to another."""

    value: Any
    become: Callable[[Any], object]


@dataclass(frozen=True)
class ReplicaDigest:
    """The parts of one replica, and `entries` by name, in which the other workers see them."""

    parts: Mapping[str, ReplicaPart]
    entries: Mapping[str, Entry]

    def head(self) -> bytes:
        """Pack a digest of what has to be the same, and the state of each of the other buffers."""
        strict = [[name, *entry] for name, entry in self.entries.items() if entry[0] != "buffer"]
        buffers = {name: entry[1] for name, entry in self.entries.items() if entry[0] == "buffer"}
        return bytes(
            msgpack.packb(
                [hashlib.blake2b(msgpack.packb(strict), digest_size=DIGEST).digest(), buffers]
            )
        )


@dataclass
class _KnownBuffer:
    """A buffer as it was when training began."""

    tensor: weakref.ref[Tensor]
    version: int | None
    number: int

    def state(self, buffer: Tensor, number: int) -> int:
        if self.tensor() is not buffer or self.version != _version(buffer):
            return CHANGED
        return SAME if self.number == number else ALTERED


class ReplicaContents:
    """Looks at what was prepared. `apart`: whether replicas may differ between two steps."""

    def __init__(self, prepared: PreparedObjects, *, apart: bool) -> None:
        self._prepared, self._apart = prepared, apart
        self._known: dict[str, _KnownBuffer] = {}

    def begin(self) -> None:
        """Remember the buffers at the beginning of training, when they are equal on all workers."""
        fresh = {
            name: buffer
            for name, buffer in self._buffers(synchronous=False)
            if name not in self._known
        }
        for (name, buffer), number in zip(
            fresh.items(), checksums(list(fresh.values())), strict=True
        ):
            self._known[name] = _KnownBuffer(weakref.ref(buffer), _version(buffer), number)

    def own(self) -> dict[str, int]:
        """Return checksums of the buffers that were changed since training began, by name."""
        found = {
            name: buffer
            for name, buffer in self._buffers(synchronous=False)
            if self._changed(name, buffer)
        }
        return dict(zip(found, checksums(list(found.values())), strict=True))

    def _changed(self, name: str, buffer: Tensor) -> bool:
        known = self._known.get(name)
        return known is None or known.state(buffer, known.number) == CHANGED

    @property
    def watches(self) -> bool:
        """Whether there are buffers that may be each worker's own.

        The answer is the same on all workers.
        """
        return bool(self._known)

    def look(self, more: Mapping[str, Tensor]) -> ReplicaDigest:
        """Return a digest of all parts as they are now; `more` are the strategy's own."""
        parts: dict[str, ReplicaPart] = {}
        for name, part in self._parts(more):
            while name in parts:
                name += "'"
            parts[name] = part
        buffers = {
            name: buffer for name, buffer in self._buffers(synchronous=False) if name in self._known
        }
        tensors = {
            name: part.value for name, part in parts.items() if isinstance(part.value, Tensor)
        }
        numbers = checksums([*tensors.values(), *buffers.values()])
        found = dict(zip(tensors, numbers, strict=False))
        entries = {
            name: [form(part.value), found[name] if name in found else _json(part.value)]
            for name, part in parts.items()
        }
        for (name, buffer), number in zip(buffers.items(), numbers[len(tensors) :], strict=True):
            entries[name] = ["buffer", self._known[name].state(buffer, number)]
            parts[name] = ReplicaPart(buffer, self._healing(name, buffer))
        return ReplicaDigest(parts, entries)

    def _parts(self, more: Mapping[str, Tensor]) -> Iterator[tuple[str, ReplicaPart]]:
        frozen = self.frozen
        for slot in self._prepared.slots:
            if _dense(slot.parameter) and slot.name not in frozen:
                yield slot.name, _tensor(slot.parameter)
        for name, buffer in self._buffers(synchronous=True):
            yield name, _tensor(buffer)
        for name, tensor in more.items():
            yield name, _tensor(tensor)
        names = {id(slot.parameter): slot.name for slot in self._prepared.slots}
        for number, optimizer in enumerate([] if self._apart else self._prepared.optimizers):
            kind = type(optimizer).__name__ + (
                f" {number}" if len(self._prepared.optimizers) > 1 else ""
            )
            for place, group in enumerate(optimizer.param_groups):
                for key in group:
                    yield from (
                        _leaves(f"{key} of group {place} of {kind}", group, key)
                        if key != "params"
                        else ()
                    )
                for parameter in group["params"]:
                    state = optimizer.state.get(parameter, {})
                    for key in state:
                        yield from _leaves(f"{key} of {names.get(id(parameter), '?')}", state, key)

    @property
    def frozen(self) -> dict[str, Parameter]:
        """Parameters, by name, that a script may change differently on each worker.

        An example is a teacher that follows its replica.
        """
        return {
            slot.name: slot.parameter
            for slot in self._prepared.slots
            if self._apart and not slot.parameter.requires_grad
        }

    def _buffers(self, *, synchronous: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield, once each, the buffers that are compared and the parameters that may part.

        They are the buffers of synchronous BatchNorm, or all but those of any BatchNorm.
        """
        seen: set[int] = set()
        for name, parameter in () if synchronous else self.frozen.items():
            if _dense(parameter):
                yield name, parameter
        for prefix, model in self._prepared.models:
            for place, module in model.named_modules():
                for name, buffer in module._buffers.items():
                    if buffer is None or id(buffer) in seen or not _dense(buffer):
                        continue
                    seen.add(id(buffer))
                    if _summed(module, name) if synchronous else not _statistic(module, name):
                        yield f"{prefix}{place}{'.' if place else ''}{name}", buffer

    def _healing(self, name: str, buffer: Tensor) -> Callable[[Tensor], None]:
        def become(values: Tensor) -> None:
            _copy(buffer, values)
            self._known[name].version = _version(buffer)

        return become


def own_buffers(model: nn.Module) -> set[str]:
    """Names of buffers that each worker may have for itself: all but synchronous BatchNorm's."""
    places = [(f"{place}." if place else "", module) for place, module in model.named_modules()]
    return {
        prefix + name
        for prefix, module in places
        for name in module._buffers
        if not _summed(module, name)
    }


def _statistic(module: nn.Module, name: str) -> bool:
    return isinstance(module, _BatchNorm) and name in STATISTICS


def _summed(module: nn.Module, name: str) -> bool:
    """Whether this buffer is a statistic of the batches of all workers."""
    return _statistic(module, name) and is_synchronised(module)


def form(value: Any) -> str:
    """Describe what a part must be like to take over another's value."""
    return (
        f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if isinstance(value, Tensor)
        else "plain"
    )


def plain(text: str) -> Any:
    """Read the value of a plain part's entry."""
    return Snapshot(0, json.loads(text), {}).unpack()


def _json(value: Any) -> str:
    return json.dumps(pack(value).tree)


def _leaves(name: str, holder: Any, key: Any) -> Iterator[tuple[str, ReplicaPart]]:
    """Yield the tensors and plain values of nested state; anything else is left out."""
    value = holder[key]
    if isinstance(value, Tensor):
        if _dense(value):
            yield name, _tensor(value)
    elif type(value) in PLAIN or (
        type(value) is tuple and all(type(item) in PLAIN for item in value)
    ):
        if not isinstance(holder, tuple):
            yield name, ReplicaPart(value, lambda new: holder.__setitem__(key, new))
    elif isinstance(value, dict | list | tuple):
        for inner in value if isinstance(value, dict) else range(len(value)):
            yield from _leaves(f"{name}.{inner}", value, inner)


def _tensor(tensor: Tensor) -> ReplicaPart:
    return ReplicaPart(tensor.detach(), lambda values: _copy(tensor, values))


def _copy(tensor: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(values)


def _dense(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not (
        tensor.is_quantized or tensor.is_meta or tensor.is_nested
    )


def _version(buffer: Tensor) -> int | None:
    """Number of changes in place that torch has counted; None if it doesn't count them."""
    return None if buffer.is_inference() else buffer._version
