"""Replaces methods of a user's own objects until the run ends."""

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

    A second call does nothing. In a deepcopy of the object the new method is bound to the copy.

    Args:
        thing: The object.
        name: Name of the method.
        wrap: Makes the new method from the present one. Both take the object as first argument.
        loop: The method is restored with this loop's other undos.
    """
    current = thing.__dict__.get(name)
    if getattr(getattr(current, "__func__", current), MARK, False):
        return
    # A learning rate scheduler may have replaced `step` already, to count steps. The new method
    # does that too (`bind_optimizer`), so it is put around the method of the class.
    # `_wrapped_by_lr_sched` is private to torch's lr_scheduler.py. If torch renames it, steps stay
    # right, but schedulers warn that `step` was overridden.
    scheduled = any(
        getattr(f, "_wrapped_by_lr_sched", False)
        for f in (current, getattr(current, "__func__", None))
    )
    method = wrap(_find_own_method(thing, name, current if not scheduled else None))
    setattr(method, MARK, True)
    method.__name__ = name
    if isinstance(thing, Optimizer) and name == "step":
        # Schedulers that are made later find the mark, and don't replace the method.
        method._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    setattr(thing, name, types.MethodType(method, thing))

    def undo() -> None:
        # A method that someone else has set since then stays.
        if getattr(thing.__dict__.get(name), "__func__", None) is method:
            if current is None:
                delattr(thing, name)
            else:
                setattr(thing, name, current)

    loop.undos.append(undo)


def _find_own_method(thing: Any, name: str, current: Any) -> Callable[..., Any]:
    """Find the method of the class, or the one set on the object.

    The result takes the object as first argument.
    """
    if current is None:
        own_method: Callable[..., Any] = getattr(type(thing), name)
        return own_method
    return lambda self, *args, **kwargs: current(*args, **kwargs)
