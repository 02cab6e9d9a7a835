"""`hvd.elastic.run`: go on after a failure from the last commit, with the ranks that are left.

func(state) -> HorovodInternalError        a rank died: restore the last commit -+
            -> HostsUpdatedInterrupt       another rank has come: keep the state |
                                                                                 v
               reset callbacks <- the same or other ranks meet <- shutdown, init
               state.sync() -> func(state) again
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from paceline.bridges.horovod.common.basics import PROCESS, init, shutdown
from paceline.bridges.horovod.common.exceptions import HorovodInternalError, HostsUpdatedInterrupt


class ElasticState(ABC):
    """State that all ranks hold alike."""

    def __init__(self) -> None:
        self._reset_callbacks: list[Callable[[], None]] = []

    @abstractmethod
    def save(self) -> None:
        """Keep a copy of the state in memory."""

    @abstractmethod
    def restore(self) -> None:
        """Go back to the copy of the last `save`."""

    @abstractmethod
    def sync(self) -> None:
        """Give all ranks the state of rank 0."""

    def reset(self) -> None:  # noqa: B027  a state may have nothing to adapt
        """Adapt to other ranks. Called before the reset callbacks."""

    def register_reset_callbacks(self, callbacks: Iterable[Callable[[], None]]) -> None:
        """Register functions to call after ranks have changed, to scale a learning rate say."""
        self._reset_callbacks += callbacks

    def on_reset(self) -> None:
        """Adapt to other ranks, and call the callbacks."""
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def commit(self) -> None:
        """Keep a copy of the state, and look for new ranks as `check_host_updates` does."""
        self.save()
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise `HostsUpdatedInterrupt` on all ranks if other ranks wait to come in."""
        if PROCESS.is_elastic:
            news = torch.tensor([int(PROCESS.has_newer_view())], dtype=torch.uint8)
            # ranks hear of it at different moments
            agreed = PROCESS.engine.submit("allreduce", [news], name="host updates", op="max")
            if agreed.wait().tensors[0].item():
                raise HostsUpdatedInterrupt(skip_sync=False)


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a training function, so that it is called again after ranks have changed.

    Args:
        func: Function whose first argument is an `ElasticState`.

    Example:
        >>> @hvd.elastic.run
        ... def train(state): ...
        >>> train(hvd.elastic.TorchState(model, optimizer, epoch=0))
    """

    @functools.wraps(func)
    def wrapper(state: ElasticState, *args: Any, **options: Any) -> Any:
        skip_sync = False
        while True:
            try:
                if not skip_sync:
                    state.sync()
                return func(state, *args, **options)
            except HorovodInternalError:
                state.restore()
                skip_sync = False
            except HostsUpdatedInterrupt as interrupt:
                skip_sync = interrupt.skip_sync
            shutdown()
            init()
            state.on_reset()

    return wrapper
