"""Announces every backward pass before it adds to any gradient, for which torch has no hook.

    Tensor.backward, autograd.grad, a checkpoint  ->  run_backward of torch's one engine  ->  the
                                                      listeners of this thread, then the pass

The engine that Python code sees is replaced while somebody listens. A hook before the node of each
parameter would tell as much, and costs more than all else that is done for a small gradient, as
torch makes a Python object of the gradient for it.

A pass that is begun by C++ code alone (a `backward` inside of TorchScript) is announced to nobody;
`running` tells that apart.

A listener has the thread in which it began to listen, and may look at its gradients when a pass
begins there: no other thread is adding to them. Of a pass in a thread without listeners all are
told that it may be theirs.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final, Protocol

import torch
from torch.autograd import Variable

from paceline.errors import UsageError


class PassListener(Protocol):
    """Whatever is told of backward passes."""

    def pass_begins(self) -> None:
        """Take note that a pass begins in the thread that listens, in no other pass; it may be
        over other parameters.
        """
        ...

    def pass_elsewhere(self) -> None:
        """Take note that a pass begins in a thread that nothing listens in, and none is under
        way in the thread that listens.
        """
        ...


STEPPED: Final = "_paceline_stepped"  # an attribute of losses that nothing is left to go back from
_REGISTRY: Final = threading.RLock()  # of listeners; and a pass begins in one thread at a time


class _ThreadMark(threading.local):
    """What is this thread's alone.

    A number isn't: the system gives that of an ended thread to the next one.
    """

    def __init__(self) -> None:
        self.mark = object()


_HERE: Final = _ThreadMark()


class AnnouncingEngine(torch._C._ImperativeEngine):
    """Torch's engine, which tells listeners of each pass first.

    `before`: the engine that was there.
    """

    def __init__(self, before: Any) -> None:
        self.before = before
        # with the mark of the thread of each
        self.listeners: tuple[tuple[object, weakref.ref[PassListener]], ...] = ()
        self.running: list[object] = []  # the marks of the threads of announced passes under way

    def run_backward(self, *args: Any, **options: Any) -> Any:
        if any(getattr(tensor, STEPPED, False) for tensor in args[0]):
            raise UsageError(
                "this loss is what run.step returned, which has gone back from it already: "
                "leave out loss.backward()"
            )
        here = _HERE.mark
        with _REGISTRY:
            known = [
                (thread, listener)
                for thread, ref in self.listeners
                if (listener := ref()) is not None
            ]
            own = [listener for thread, listener in known if thread == here]
            for listener in own if here not in self.running else ():
                listener.pass_begins()
            for thread, listener in known if not own else ():
                if thread not in self.running:
                    listener.pass_elsewhere()
            self.running.append(here)
        try:
            return self.before.run_backward(*args, **options)
        finally:
            self.running.remove(here)

    def without(
        self, listener: PassListener
    ) -> tuple[tuple[object, weakref.ref[PassListener]], ...]:
        """Return the listeners that live, but for this one."""
        return tuple(
            (thread, ref) for thread, ref in self.listeners if ref() not in (None, listener)
        )


def listen(listener: PassListener) -> AnnouncingEngine:
    """Tell `listener` of passes from now on, as long as it lives; this thread is its own.

    Calling it twice is harmless.
    """
    with _REGISTRY:
        engine = Variable._execution_engine
        if not isinstance(engine, AnnouncingEngine):
            engine = Variable._execution_engine = AnnouncingEngine(engine)
        engine.listeners = (*engine.without(listener), (_HERE.mark, weakref.ref(listener)))
        return engine


def leave(listener: PassListener) -> None:
    """Tell `listener` of no more passes, and give torch its engine back where nobody listens."""
    with _REGISTRY:
        engine = Variable._execution_engine
        if isinstance(engine, AnnouncingEngine):
            engine.listeners = engine.without(listener)
            if not engine.listeners:
                Variable._execution_engine = engine.before
