"""Stands before torch's own clipping, which scripts call between backward and step, and lets the
run of the parameters clip.

nn.utils.clip_grad_norm_(model.parameters(), 1.0)    ->    the `GradientClipper` of these
                                                           parameters, if they have one    ->
                                                           torch's own

Where models are cut, the norm that torch takes of gradients by itself (get_total_norm) is refused,
as is clipping that finds none of them.

A script may have imported the functions before: it is what they call that is replaced, in the
functions themselves.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.utils.weak import WeakIdKeyDictionary

# what torch's functions, which switch gradients off, call the function itself
INNER: Final = "func"
_REGISTRY: Final = threading.Lock()  # of what stands in torch's functions, for all threads


class GradientClipper(Protocol):
    """Whatever clips gradients in torch's place.

    `own` is torch's function, with the arguments that the script gave.
    """

    def clip_norm(
        self,
        parameters: list[Tensor],
        max_norm: float,
        norm_type: float,
        own: Callable[[], Tensor],
        *,
        finite: bool = False,
    ) -> Tensor:
        """Clip by the norm, and return it.

        Raises `RuntimeError`, as torch does, for one that isn't finite and has to be (`finite`).
        """
        ...

    def clip_by(self, name: str, own: Callable[[], Any]) -> Any:
        """Clip each gradient by itself, as the function of this name does: by value, or by a
        norm that is given.
        """
        ...

    def check_norm(self, parameters: list[Tensor]) -> None:
        """Raise `UsageError` where the norm of the gradients that these parameters have here
        isn't that of all workers.
        """
        ...

    def check_idle(self, name: str) -> None:
        """Raise `UsageError` where this function, which was given no gradient, would do nothing,
        as there are some elsewhere.
        """
        ...


class Door:
    """What torch's function of this name calls in place of `own`."""

    def __init__(self, name: str, own: Callable[..., Any]) -> None:
        self.name, self.own = name, own
        self.clippers = WeakIdKeyDictionary()  # by parameter: a weak reference to its clipper

    def check_idle(self) -> None:
        """Have all clippers that live check a call without any gradient."""
        with _REGISTRY:
            living = {
                id(clipper): clipper
                for found in self.clippers.values()
                if (clipper := found()) is not None
            }
        for clipper in living.values():
            clipper.check_idle(self.name.lstrip("_"))


class ClipDoor(Door):
    """Has the clipper of any of the parameters clip."""

    def __call__(self, parameters: Any, *args: Any, **options: Any) -> Any:
        asked = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clipper = next(
            (
                found
                for parameter in asked
                if (found := self.clippers.get(parameter, _nobody)()) is not None
            ),
            None,
        )
        if not asked or (
            self.name == "_clip_grads_with_norm_"
            and all(parameter.grad is None for parameter in asked)
        ):
            self.check_idle()
        if clipper is None:
            # torch warns of a generator without any
            return self.own(asked or (parameter for parameter in asked), *args, **options)

        def own() -> Any:
            return self.own(asked, *args, **options)

        if self.name != "clip_grad_norm_":
            return clipper.clip_by(self.name.lstrip("_"), own)
        max_norm, norm_type, finite = _norm(*args, **options)
        return clipper.clip_norm(asked, max_norm, norm_type, own, finite=finite)


class NormDoor(Door):
    """Has clippers check the norm of gradients that parameters of theirs have."""

    def __call__(self, tensors: Any, *args: Any, **options: Any) -> Any:
        asked = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not asked:
            self.check_idle()
        with _REGISTRY:
            grads = (
                {
                    _place(p.grad): (p, clipper)
                    for p, clipper in self.clippers.items()
                    if p.grad is not None
                }
                if asked
                else {}
            )
        theirs: dict[Callable[[], GradientClipper | None], list[Tensor]] = {}
        for parameter, clipper in (
            (grads[place] for tensor in asked if (place := _place(tensor)) in grads)
            if grads
            else ()
        ):
            theirs.setdefault(clipper, []).append(parameter)
        for found, parameters in theirs.items():
            if (living := found()) is not None:
                living.check_norm(parameters)
        return self.own(asked, *args, **options)


DOORS: Final[dict[str, type[Door]]] = {
    "clip_grad_norm_": ClipDoor,
    "clip_grad_value_": ClipDoor,
    "_clip_grads_with_norm_": ClipDoor,
    "_get_total_norm": NormDoor,
}


def _nobody() -> None:
    return None


def _place(tensor: Tensor) -> object:
    """Return what tensors with the same numbers in memory have in common."""
    plain = (
        tensor.layout == torch.strided and type(tensor) in (Tensor, nn.Parameter) and tensor.numel()
    )
    return (tensor.data_ptr(), tensor.numel()) if plain else id(tensor)


def norm_here(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Return torch's norm of these gradients, which nobody checks: that of this worker."""
    with _REGISTRY:
        own = next(
            (door.own for door in _doors() if isinstance(door, NormDoor)), nn.utils.get_total_norm
        )
    with torch.no_grad():
        found: Tensor = own(gradients, norm_type)
    return found


def check_finite(norm: float, norm_type: float) -> None:
    """Raise `RuntimeError`, as torch's clip_grad_norm_ does, for a norm that is no finite
    number.
    """
    if not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this "
            "error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


def _norm(
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> tuple[float, float, bool]:
    """Return the norm, its kind and whether it has to be finite from what clip_grad_norm_ is
    called with.
    """
    return float(max_norm), float(norm_type), bool(error_if_nonfinite)


def _doors() -> Iterable[Door]:
    """Yield what stands in each of torch's functions, and put it there the first time."""
    for name, kind in DOORS.items():
        function: Any = getattr(clip_grad, name, None)
        function = getattr(function, "before", function)  # where a cut stands before it
        names = () if function is None else function.__code__.co_freevars
        if INNER not in names:
            continue  # another version of torch
        cell = function.__closure__[names.index(INNER)]
        if not isinstance(cell.cell_contents, Door):
            cell.cell_contents = kind(name, cell.cell_contents)
        yield cell.cell_contents


def let_clip(parameters: Iterable[Tensor], clipper: GradientClipper, *, cut: bool = False) -> None:
    """Let `clipper` clip the gradients of these parameters from now on, as long as it lives;
    check their norms too, if some are `cut`.
    """
    known = list(parameters)
    with _REGISTRY:
        for door in _doors():
            for parameter in known if cut or isinstance(door, ClipDoor) else ():
                door.clippers[parameter] = weakref.ref(clipper)


def clip_plainly(parameters: Iterable[Tensor]) -> None:
    """Let torch itself clip the gradients of these parameters again."""
    known = list(parameters)
    with _REGISTRY:
        for door in _doors():
            for parameter in known:
                door.clippers.pop(parameter, None)
