"""State of a PyTorch training that survives the loss of ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch

from paceline.bridges.horovod.common.elastic import ElasticState
from paceline.bridges.horovod.torch.elastic.sampler import ElasticSampler
from paceline.bridges.horovod.torch.functions import (
    broadcast_object,
    broadcast_optimizer_state,
    broadcast_parameters,
)

_STATEFUL = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)


class TorchState(ElasticState):
    """A model, an optimizer and other values that all ranks hold alike.

    Args:
        model: The model. Default: none.
        optimizer: The optimizer. Default: none.
        values: Other values, by name: models, optimizers, samplers, or objects that pickle can
            write. Each becomes an attribute.

    Example:
        >>> state = hvd.elastic.TorchState(model, optimizer, batch=0, epoch=0)
        >>> state.epoch += 1
        >>> state.commit()
    """

    def __init__(self, model: Any = None, optimizer: Any = None, **values: Any) -> None:
        super().__init__()
        values |= {"model": model, "optimizer": optimizer}
        self._names = [*values]
        for name, value in values.items():
            setattr(self, name, value)
        self._saved: dict[str, Any] = {}
        self.save()

    def save(self) -> None:
        """Keep a copy of the state in memory."""
        self._saved = {
            name: copy.deepcopy(value.state_dict() if isinstance(value, _STATEFUL) else value)
            for name, value in self._values().items()
        }

    def restore(self) -> None:
        """Go back to the copy of the last `save`."""
        for name, value in self._values().items():
            if isinstance(value, _STATEFUL):
                value.load_state_dict(copy.deepcopy(self._saved[name]))
            else:
                setattr(self, name, copy.deepcopy(self._saved[name]))

    def sync(self) -> None:
        """Give all ranks the state of rank 0, and keep a copy of it."""
        plain = {}
        for name, value in self._values().items():
            if isinstance(value, torch.nn.Module):
                broadcast_parameters(value.state_dict(), root_rank=0)
            elif isinstance(value, torch.optim.Optimizer):
                broadcast_optimizer_state(value, root_rank=0)
            elif isinstance(value, ElasticSampler):
                value.load_state_dict(broadcast_object(value.state_dict(), name=f"state.{name}"))
            else:
                plain[name] = value
        for name, value in broadcast_object(plain, name="state").items():
            setattr(self, name, value)
        self.save()

    def reset(self) -> None:
        """Deal the rest of the epoch to the new ranks."""
        for value in self._values().values():
            if isinstance(value, ElasticSampler):
                value.reset()

    def _values(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._names}
