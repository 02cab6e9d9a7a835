"""Replaces torch's gradient clipping, which scripts call between backward and step.

nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    -> the `GradientClipper` of these parameters, if they have one
    -> else torch's own function

If a model is cut, `get_total_norm` would give the norm of this worker's parts alone, so it is
refused. So is a call that is given no gradient at all while other workers have some.

A script may have imported torch's functions before this module runs. So the functions stay the same
objects, and the function that they call inside is replaced.
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

# The free variable of torch's no_grad wrappers that holds the wrapped function.
WRAPPED_VARIABLE: Final = "func"
# Guards the contents of torch's functions and all `clippers`.
_REGISTRY: Final = threading.Lock()


class GradientClipper(Protocol):
    """Clips gradients in torch's place. `own` calls torch's function as the script called it."""

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

        Raises `RuntimeError`, as torch does, if `finite` is set and the norm isn't finite.
        """
        ...

    def clip_each(self, name: str, own: Callable[[], Any]) -> Any:
        """Clip each gradient by itself, by value or by a given norm, as function `name` does."""
        ...

    def check_norm(self, parameters: list[Tensor]) -> None:
        """Raise `UsageError` if the local norm of these gradients differs from the global norm."""
        ...

    def check_idle(self, name: str) -> None:
        """Raise `UsageError` if `name` got no gradient here, and other workers have gradients."""
        ...


class ClippingDoor:
    """A callable that torch's function of this name calls in place of its own function `own`."""

    def __init__(self, name: str, own: Callable[..., Any]) -> None:
        self.name, self.own = name, own
        # By parameter: weak reference to its clipper.
        self.clippers = WeakIdKeyDictionary()

    def check_idle(self) -> None:
        """Let all clippers that are still alive check a call without any gradient."""
        with _REGISTRY:
            living = {
                id(clipper): clipper
                for ref in self.clippers.values()
                if (clipper := ref()) is not None
            }
        for clipper in living.values():
            clipper.check_idle(self.name.lstrip("_"))


class ClipCallDoor(ClippingDoor):
    """Passes the call on to the clipper of any of the parameters."""

    def __call__(self, parameters: Any, *args: Any, **options: Any) -> Any:
        given = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        clipper = next(
            (
                living
                for parameter in given
                if (living := self.clippers.get(parameter, _no_clipper)()) is not None
            ),
            None,
        )
        if not given or (
            self.name == "_clip_grads_with_norm_"
            and all(parameter.grad is None for parameter in given)
        ):
            self.check_idle()
        if clipper is None:
            # torch warns if a generator has no parameters, and not if a list has none. So give it
            # what the script may have given: the generator.
            return self.own(given or (parameter for parameter in given), *args, **options)

        def own() -> Any:
            return self.own(given, *args, **options)

        if self.name != "clip_grad_norm_":
            return clipper.clip_each(self.name.lstrip("_"), own)
        max_norm, norm_type, finite = _read_norm_arguments(*args, **options)
        return clipper.clip_norm(given, max_norm, norm_type, own, finite=finite)


class NormCallDoor(ClippingDoor):
    """Lets clippers check a norm that is taken of gradients of their parameters."""

    def __call__(self, tensors: Any, *args: Any, **options: Any) -> Any:
        given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        if not given:
            self.check_idle()
        # torch gives this function gradients and not parameters: find out by the gradients' memory
        # whose they are.
        with _REGISTRY:
            grads = (
                {
                    _memory_key(p.grad): (p, clipper)
                    for p, clipper in self.clippers.items()
                    if p.grad is not None
                }
                if given
                else {}
            )
        by_clipper: dict[Callable[[], GradientClipper | None], list[Tensor]] = {}
        for parameter, clipper in (
            (grads[place] for tensor in given if (place := _memory_key(tensor)) in grads)
            if grads
            else ()
        ):
            by_clipper.setdefault(clipper, []).append(parameter)
        for ref, parameters in by_clipper.items():
            if (living := ref()) is not None:
                living.check_norm(parameters)
        return self.own(given, *args, **options)


DOORS: Final[dict[str, type[ClippingDoor]]] = {
    "clip_grad_norm_": ClipCallDoor,
    "clip_grad_value_": ClipCallDoor,
    "_clip_grads_with_norm_": ClipCallDoor,
    "_get_total_norm": NormCallDoor,
}


def _no_clipper() -> None:
    return None


def _memory_key(tensor: Tensor) -> object:
    """Key of a tensor's memory: equal for two tensors that have the same numbers in memory."""
    plain = (
        tensor.layout == torch.strided and type(tensor) in (Tensor, nn.Parameter) and tensor.numel()
    )
    return (tensor.data_ptr(), tensor.numel()) if plain else id(tensor)


def compute_local_norm(gradients: list[Tensor], norm_type: float) -> Tensor:
    """Compute torch's norm of this worker's gradients, without any check."""
    with _REGISTRY:
        own = next(
            (door.own for door in _install_doors() if isinstance(door, NormCallDoor)),
            nn.utils.get_total_norm,
        )
    with torch.no_grad():
        norm: Tensor = own(gradients, norm_type)
    return norm


def check_norm_is_finite(norm: float, norm_type: float) -> None:
    """Raise `RuntimeError`, as torch's clip_grad_norm_ does, for a norm that isn't finite."""
    if not math.isfinite(norm):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, "
            "so it cannot be clipped. To disable this "
            "error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


def _read_norm_arguments(
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> tuple[float, float, bool]:
    """Read max_norm, norm_type and error_if_nonfinite out of a call of clip_grad_norm_."""
    return float(max_norm), float(norm_type), bool(error_if_nonfinite)


def _install_doors() -> Iterable[ClippingDoor]:
    """Yield the door in each of torch's functions; put it there the first time."""
    for name, kind in DOORS.items():
        function: Any = getattr(clip_grad, name, None)
        function = getattr(function, "before", function)  # if a cut has wrapped the function itself
        # torch decorates these functions with no_grad, so the function proper is in a closure cell
        # named `func`. This relies on a private detail of torch: if a version names it otherwise,
        # or decorates no more, the function is left alone, and clips local parts only.
        names = () if function is None else function.__code__.co_freevars
        if WRAPPED_VARIABLE not in names:
            continue
        cell = function.__closure__[names.index(WRAPPED_VARIABLE)]
        if not isinstance(cell.cell_contents, ClippingDoor):
            cell.cell_contents = kind(name, cell.cell_contents)
        yield cell.cell_contents


def register_clipper(
    parameters: Iterable[Tensor], clipper: GradientClipper, *, cut: bool = False
) -> None:
    """Let `clipper` clip the gradients of these parameters from now on, as long as it is alive.

    If some of the parameters are `cut`, it checks norms that are taken of their gradients as well.
    """
    all_parameters = list(parameters)
    with _REGISTRY:
        for door in _install_doors():
            for parameter in all_parameters if cut or isinstance(door, ClipCallDoor) else ():
                door.clippers[parameter] = weakref.ref(clipper)


def unregister_clipper(parameters: Iterable[Tensor]) -> None:
    """Undo `register_clipper`: torch itself clips the gradients of these parameters again."""
    all_parameters = list(parameters)
    with _REGISTRY:
        for door in _install_doors():
            for parameter in all_parameters:
                door.clippers.pop(parameter, None)
