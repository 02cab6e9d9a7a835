"""Replaces methods of a user's own objects while a run lasts."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from paceline.loop.turns import TrainingLoop

MARK = "_paceline_bound"


def rebind_method(
    thing: Any,
    name: str,
    wrap: Callable[[Callable[..., Any]], Callable[..., Any]],
    loop: TrainingLoop,
) -> None:
    """Replace the method `name` of one object by a bound method until the run ends.

    Calling it twice is harmless.

    A deepcopy of the object has the method bound to the copy.
    """
    current = thing.__dict__.get(name)
    if getattr(getattr(current, "__func__", current), MARK, False):
        return
    scheduled = any(
        getattr(f, "_wrapped_by_lr_sched", False)
        for f in (current, getattr(current, "__func__", None))
    )
    method = wrap(_find_own_method(thing, name, current if not scheduled else None))
    setattr(method, MARK, True)
    method.__name__ = name
    if isinstance(thing, Optimizer) and name == "step":
        # schedulers ask; we count for them
        method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    setattr(thing, name, types.MethodType(method, thing))

    def undo() -> None:
        if getattr(thing.__dict__.get(name), "__func__", None) is method:
            if current is None:
                delattr(thing, name)
            else:
                setattr(thing, name, current)

    loop.undos.append(undo)


def _find_own_method(thing: Any, name: str, current: Any) -> Callable[..., Any]:
    """The method of the class, or the one set on the object, to be called with the object."""
    if current is None:
        own_method: Callable[..., Any] = getattr(type(thing), name)
        return own_method
    return lambda self, *args, **kwargs: current(*args, **kwargs)
