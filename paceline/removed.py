"""Options that were taken out: a call that still passes one raises, and says what to do instead.

@declare_removed_options(pull="parameters are pulled in optimizer.step: leave pull out")
class ParameterServer: ...
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from paceline.errors import UsageError

T = TypeVar("T", bound=Callable[..., Any])
ADVICE_ATTRIBUTE = "_removed_options"


def declare_removed_options(**advice: str) -> Callable[[T], T]:
    """Refuse keyword arguments that a function, or the constructor of a class, had once.

    Args:
        advice: What to do instead, by the name of the option that was taken out.

    Returns:
        A decorator. The decorated function or class keeps its signature.

    Raises:
        UsageError: By a later call that passes one of the options.
    """

    def decorate(target: T) -> T:
        constructed = cast(Any, target)
        # A class stays the same object, with another constructor. A function gets a wrapper.
        if isinstance(target, type):
            constructed.__init__ = _wrap_refusing(target, constructed.__init__)
        else:
            constructed = _wrap_refusing(target, target)
        setattr(constructed, ADVICE_ATTRIBUTE, advice)
        return cast(T, constructed)

    return decorate


def refuse_removed_options(target: Any, options: Iterable[str]) -> None:
    """Raise `UsageError` if one of the options is one that `target` had once."""
    advice = getattr(target, ADVICE_ATTRIBUTE, {})
    for option in options:
        if option in advice:
            raise UsageError(f"{target.__name__}({option}=...) was taken out: {advice[option]}")


def _wrap_refusing(target: Any, function: Any) -> Any:
    """Wrap a function so that it refuses the removed options of `target`."""

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        refuse_removed_options(target if isinstance(target, type) else call, options)
        return function(*args, **options)

    return call
