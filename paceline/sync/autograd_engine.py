"""Announces each backward pass before it adds to any gradient, as torch has no hook for that.

    Tensor.backward, autograd.grad, a checkpoint  ->  run_backward of torch's one engine  ->  the
                                                      listeners of this thread, then the pass

While there are listeners, Python code sees this engine in place of torch's. A hook before the node
of each parameter would do as well, but torch then makes a Python object of each gradient. For a
small gradient that takes longer than all other work.

A pass that C++ code begins (a `backward` inside of TorchScript) isn't announced. It can be told
apart, as its thread is missing in `running_threads`.

A listener belongs to the thread in which it was added. If a pass begins in that thread, the
listener may read its gradients, as no other thread adds to them. If a pass begins in a thread
without listeners, all listeners are told that the pass may reach their parameters.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, Final, Protocol

import torch
from torch.autograd import Variable

from paceline.errors import UsageError


class PassListener(Protocol):
    """An object that is told of backward passes."""

    def handle_pass(self) -> None:
        """Handle a pass that begins in the listener's thread, outside of any other pass.

        The pass may be over other parameters.
        """
        ...

    def handle_pass_elsewhere(self) -> None:
        """Handle a pass that begins in a thread without listeners.

        No pass is under way in the listener's own thread.
        """
        ...


# Attribute of a loss whose backward `run.step` has already run.
STEPPED_ATTRIBUTE: Final = "_paceline_stepped"
# Guards the listeners. It is held while listeners are told, so passes begin one at a time.
_LISTENERS_LOCK: Final = threading.RLock()


class _ThreadMark(threading.local):
    """An object that identifies its thread.

    `threading.get_ident` doesn't: a new thread may get the number of one that has ended.
    """

    def __init__(self) -> None:
        self.mark = object()


_CURRENT_THREAD: Final = _ThreadMark()


class AnnouncingEngine(torch._C._ImperativeEngine):
    """An engine that tells listeners of each pass, then runs it on the engine `before`.

    `torch._C._ImperativeEngine` is private, and so is `Variable._execution_engine`, its one
    instance. This class breaks if `torch.autograd` reaches the C++ engine by another way than
    `Variable._execution_engine.run_backward(tensors, ...)`.
    """

    def __init__(self, before: Any) -> None:
        self.original_engine = before
        # Each listener with the mark of its thread. The tuple is replaced, never changed.
        self.listeners: tuple[tuple[object, weakref.ref[PassListener]], ...] = ()
        # Marks of the threads that run announced passes; nested passes repeat a mark.
        self.running_threads: list[object] = []

    def run_backward(self, *args: Any, **options: Any) -> Any:
        if any(getattr(tensor, STEPPED_ATTRIBUTE, False) for tensor in args[0]):
            raise UsageError(
                "run.step has already run the backward pass of this loss: leave out loss.backward()"
            )
        own_thread = _CURRENT_THREAD.mark
        with _LISTENERS_LOCK:
            live_listeners = [
                (thread, listener)
                for thread, ref in self.listeners
                if (listener := ref()) is not None
            ]
            own_listeners = [
                listener for thread, listener in live_listeners if thread == own_thread
            ]
            # A pass inside of another one, such as a reentrant checkpoint, is part of that one.
            for listener in own_listeners if own_thread not in self.running_threads else ():
                listener.handle_pass()
            # Nothing listens in this thread: every listener might be meant.
            for thread, listener in live_listeners if not own_listeners else ():
                if thread not in self.running_threads:
                    listener.handle_pass_elsewhere()
            self.running_threads.append(own_thread)
        try:
            return self.original_engine.run_backward(*args, **options)
        finally:
            self.running_threads.remove(own_thread)

    def listeners_without(
        self, listener: PassListener
    ) -> tuple[tuple[object, weakref.ref[PassListener]], ...]:
        """Listeners that are still alive, except this one."""
        return tuple(
            (thread, ref) for thread, ref in self.listeners if ref() not in (None, listener)
        )


def add_pass_listener(listener: PassListener) -> AnnouncingEngine:
    """Tell `listener` of passes from now on, for as long as it is alive.

    The calling thread becomes its own thread. Calling this twice is harmless.
    """
    with _LISTENERS_LOCK:
        engine = Variable._execution_engine
        if not isinstance(engine, AnnouncingEngine):
            engine = Variable._execution_engine = AnnouncingEngine(engine)
        engine.listeners = (
            *engine.listeners_without(listener),
            (_CURRENT_THREAD.mark, weakref.ref(listener)),
        )
        return engine


def remove_pass_listener(listener: PassListener) -> None:
    """Tell `listener` of no more passes; without listeners, torch gets its own engine back."""
    with _LISTENERS_LOCK:
        engine = Variable._execution_engine
        if isinstance(engine, AnnouncingEngine):
            engine.listeners = engine.listeners_without(listener)
            if not engine.listeners:
                Variable._execution_engine = engine.original_engine
