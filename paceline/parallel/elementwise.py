"""Optimizers that step each element by itself, so that they can step parts of parameters.

type(optimizer) is AdamW                  is known to do so
a class derived from AdamW, or another    refused, unless `elementwise` vouches for that very class
an AdamW whose step was replaced          refused, too: make a class of it, and vouch for that one
"""

from __future__ import annotations

from typing import Final, TypeVar

from torch import optim
from torch.optim import Optimizer

from paceline.errors import UsageError

Kind = TypeVar("Kind", bound=type[Optimizer])

_KNOWN: Final = (
    *(optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad),
    *(optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
)
# Looked up in the class alone, not in its base classes.
_VOUCHED_ATTRIBUTE: Final = "_paceline_elementwise"
# Packages whose wrappers of `step` on an instance call the step of the class.
_WRAPPERS: Final = ("torch", "paceline")


def elementwise(kind: Kind) -> Kind:
    """Vouch that a class of optimizers steps each element by itself, and so can step parts.

    >>> @pl.elementwise
    ... class Lion(torch.optim.Optimizer): ...

    A class of another library is vouched for by a call, which returns the class.

    No norm, mean or maximum of a parameter or its gradient may go into the step. The promise holds
    for this class alone, not for its subclasses.

    Raises:
        UsageError: `kind` is not a class of optimizers.
    """
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise UsageError(
            f"elementwise() vouches for a class of optimizers, and got {kind!r:.80}; "
            "write pl.elementwise(MyOptimizer)"
        )
    setattr(kind, _VOUCHED_ATTRIBUTE, True)
    return kind


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known, or vouched for, to step each element by itself."""
    if _VOUCHED_ATTRIBUTE in vars(type(optimizer)):
        return True
    replaced = vars(optimizer).get("step")
    module = getattr(replaced, "__module__", None) or ""
    return type(optimizer) in _KNOWN and (replaced is None or module.partition(".")[0] in _WRAPPERS)


def check_elementwise(optimizer: Optimizer, part: str) -> None:
    """Raise `UsageError` for an optimizer that may be wrong on a `part` of a parameter."""
    if not is_elementwise(optimizer):
        name = type(optimizer).__qualname__
        raise UsageError(
            f"{name} may look at whole parameters, and each worker has a part of {part}: "
            "take one that steps each element by itself "
            f"({', '.join(kind.__name__ for kind in _KNOWN)}; no class derived from them), or, if "
            f"yours does, vouch for it: pl.elementwise({name})"
        )
