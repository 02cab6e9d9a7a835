"""Announces every backward pass before it adds to any gradient, for which torch has no hook.

    Tensor.backward, autograd.grad, a checkpoint  ->  run_backward of torch's one engine  ->  pass_begins of all listeners, then the pass

The engine that Python code sees is replaced while somebody listens. A hook before the node of each parameter would tell as much, and costs
more than all else that is done for a small gradient, as torch makes a Python object of the gradient for it.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final, Protocol

import torch
from torch.autograd import Variable


class PassListener(Protocol):
    """Whatever is told of backward passes."""

    def pass_begins(self) -> None:
        """Take note that a backward pass of this process begins, perhaps inside of another, and perhaps over other parameters."""
        ...


_REGISTRY: Final = threading.Lock()


class AnnouncingEngine(torch._C._ImperativeEngine):
    """Torch's engine, which tells listeners of each pass first. `before`: the engine that was there."""

    def __init__(self, before: Any) -> None:
        self.before = before
        self.listeners: tuple[weakref.ref[PassListener], ...] = ()

    def run_backward(self, *args: Any, **options: Any) -> Any:
        for ref in self.listeners:
            listener = ref()
            if listener is not None:
                listener.pass_begins()
        return self.before.run_backward(*args, **options)

    def without(self, listener: PassListener) -> tuple[weakref.ref[PassListener], ...]:
        """Return the listeners that live, but for this one."""
        return tuple(ref for ref in self.listeners if ref() not in (None, listener))


def listen(listener: PassListener) -> None:
    """Tell `listener` of every pass from now on, as long as it lives. Calling it twice is harmless."""
    with _REGISTRY:
        engine = Variable._execution_engine
        if not isinstance(engine, AnnouncingEngine):
            engine = Variable._execution_engine = AnnouncingEngine(engine)
        engine.listeners = (*engine.without(listener), weakref.ref(listener))


def leave(listener: PassListener) -> None:
    """Tell `listener` of no more passes, and give torch its engine back where nobody listens."""
    with _REGISTRY:
        engine = Variable._execution_engine
        if isinstance(engine, AnnouncingEngine):
            engine.listeners = engine.without(listener)
            if not engine.listeners:
                Variable._execution_engine = engine.before
