"""What a forward on a ghost may change or replace: buffers, which are set back after it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

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
