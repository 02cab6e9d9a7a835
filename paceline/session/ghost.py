"""What a forward on a ghost may change or replace: buffers. They are set back after it, and then taken from a worker that has samples.

    samples   forward   what of its buffers has changed ──┐
    ghost     forward   set back                          └─> taken: steps of spectral norm and counters stay equal on all workers

Statistics of BatchNorm layers are each worker's own with batchnorm="local", and stay set back on ghosts; else they are right on a ghost.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.comm.ordered import Agreement
from paceline.data.packing import pack, unpack
from paceline.parallel.batchnorm import is_synchronous

Buffers = list[tuple[nn.Module, str, Tensor | None, Tensor | None]]


def buffers(models: Iterable[nn.Module]) -> Buffers:
    """All of them, as they are; those of synchronous BatchNorm are right on a ghost too."""
    found = []
    for model in models:
        for module in model.modules():
            if not is_synchronous(module):
                found += [(module, name, b, None if b is None else b.detach().clone()) for name, b in module._buffers.items()]
    return found


def put_back(kept: Buffers) -> None:
    """Let them be what they were."""
    for module, name, buffer, values in kept:
        if buffer is not None and values is not None:
            buffer.data.copy_(values)  # not counted as a change: masks and tables stay what nobody has changed
        module._buffers[name] = buffer


def level(kept: Buffers, agreement: Agreement, *, ghost: bool, source: int) -> None:
    """Have the ghosts of a turn take the buffers that it has changed where there were samples, on worker `source`. Collective."""
    shared = [place for place, (module, *_) in enumerate(kept) if not isinstance(module, _NormBase)]
    if not shared:
        return
    tells = not ghost and (agreement.group.rank == source or agreement.recovery is not None)  # whoever tells may be lost meanwhile
    changed = [(place, _present(kept, place)) for place in shared if _is_other(kept, place)] if tells else []
    told = agreement.meet("buffers", pack(changed, what="buffers") if changed else b"")
    found = next((body for body in told if body), None)
    if ghost and found is not None:
        for place, value in unpack(found):
            _take(kept, place, value)


def _present(kept: Buffers, place: int) -> Tensor | None:
    module, name, *_ = kept[place]
    buffer = module._buffers.get(name)
    return None if buffer is None else buffer.detach()


def _is_other(kept: Buffers, place: int) -> bool:
    now, before = _present(kept, place), kept[place][3]
    if now is None or before is None:
        return now is not before
    return now.dtype != before.dtype or not torch.equal(now, before)


def _take(kept: Buffers, place: int, value: Tensor | None) -> None:
    module, name, *_ = kept[place]
    buffer = module._buffers.get(name)
    if buffer is None or value is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
        kind = None if buffer is None else buffer.device
        module._buffers[name] = None if value is None else value.to(kind)
        return
    with torch.no_grad():
        buffer.copy_(value)
