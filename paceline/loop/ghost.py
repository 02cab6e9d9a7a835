"""Buffers in a turn without samples (a ghost): restored, then copied from another worker.

    samples   forward   buffers that have changed ──┐
    ghost     forward   restored                    └─> copied: steps of spectral norm and counters
                                                    stay equal on all workers

With batchnorm="local" each worker has its own statistics, which a ghost only restores. Otherwise
synchronous BatchNorm gives a ghost the right ones.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from paceline.comm.agreement import Agreement
from paceline.data.serialization import pack_value, unpack_value
from paceline.parallel.batchnorm import NormWithBuffers, is_synchronised

# relative and absolute difference that rounding may make between workers in a buffer that depends
# on weights alone
TOLERANCE = 1e-5

SavedBuffers = list[tuple[nn.Module, str, Tensor | None, Tensor | None]]


def copy_buffers(models: Iterable[nn.Module]) -> SavedBuffers:
    """Copy all buffers of the models, except those of synchronous BatchNorm.

    Those are right on a ghost, too.
    """
    copies = []
    for model in models:
        for module in model.modules():
            if not is_synchronised(module):
                copies += [
                    (module, name, b, None if b is None else b.detach().clone())
                    for name, b in module._buffers.items()
                ]
    return copies


def restore_buffers(saved: SavedBuffers) -> None:
    """Set buffers back to what they were."""
    for module, name, buffer, values in saved:
        if buffer is not None and values is not None:
            # torch doesn't count this as a change: constant masks and the like still look unchanged
            buffer.data.copy_(values)
        module._buffers[name] = buffer


def share_buffers(saved: SavedBuffers, agreement: Agreement, *, ghost: bool) -> None:
    """Let ghosts take the buffers that the turn has changed alike on all workers with samples.

    Collective.
    """
    shared = [
        place for place, (module, *_) in enumerate(saved) if not isinstance(module, NormWithBuffers)
    ]
    if not shared:
        return
    changed = (
        []
        if ghost
        else [
            (place, _present_value(saved, place)) for place in shared if _has_changed(saved, place)
        ]
    )
    bodies = agreement.meet("buffers", b"" if ghost else pack_value(changed, what="buffers"))
    changes = [dict(unpack_value(body)) for body in bodies if body]
    if ghost and changes:  # perhaps no worker with samples is left
        for place, value in changes[0].items():
            if all(place in other and _nearly_equal(value, other[place]) for other in changes[1:]):
                _set_buffer(saved, place, value)


def _nearly_equal(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether two values are the same, but for rounding that differs between processors."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return one is other
    return (
        torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE)
        if one.is_floating_point()
        else torch.equal(one, other)
    )


def _present_value(saved: SavedBuffers, place: int) -> Tensor | None:
    module, name, *_ = saved[place]
    buffer = module._buffers.get(name)
    return None if buffer is None else buffer.detach()


def _has_changed(saved: SavedBuffers, place: int) -> bool:
    now, before = _present_value(saved, place), saved[place][3]
    if now is None or before is None:
        return now is not before
    return now.dtype != before.dtype or not torch.equal(now, before)


def _set_buffer(saved: SavedBuffers, place: int, value: Tensor | None) -> None:
    module, name, *_ = saved[place]
    buffer = module._buffers.get(name)
    if (
        buffer is None
        or value is None
        or buffer.shape != value.shape
        or buffer.dtype != value.dtype
    ):
        kind = None if buffer is None else buffer.device
        module._buffers[name] = None if value is None else value.to(kind)
        return
    with torch.no_grad():
        buffer.copy_(value)
