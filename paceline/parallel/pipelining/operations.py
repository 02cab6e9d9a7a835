"""A forward as data: calls of modules, functions and methods, one after the other, on named values.

    x -> tokens(x) -> add(tokens, positions) -> blocks.0(add) -> ...    a value is named as
                                                                        its operation is

Modules and parameters appear by their names in the model, and are looked up whenever they are used.
So whatever a cut has put in their place is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from paceline.parallel.torch_pytree import tree_leaves

# The name of a forward's result; no module or argument can have it.
OUTPUT = "output of the model"
Kind = Literal["module", "chained", "function", "method", "device", "output"]


@dataclass(frozen=True)
class ValueRef:
    """Stands for the value of this name in arguments."""

    name: str


@dataclass(frozen=True)
class ModelPath:
    """Stands for a parameter, a buffer or a module of the model in arguments, by its path."""

    path: str


@dataclass(frozen=True)
class ByMode:
    """An argument that differs between training and evaluation, such as a dropout's probability."""

    training: Any
    evaluation: Any


@dataclass(frozen=True, eq=False)
class Operation:
    """One call in a forward.

    `target` depends on `kind`:
        module      path of a module
        chained     path of a module, called with the result of the one before; a tuple is spread
        function    the function
        method      name of a method of the first argument
        device      reads the device of any tensor at hand
        output      the result of the forward

    `graded` is False if the forward makes the call under torch.no_grad().
    """

    name: str
    kind: Kind
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graded: bool = True

    def value_names(self) -> Iterator[str]:
        """Names of the values that this operation reads."""
        return (
            leaf.name
            for leaf in _list_leaves((self.args, self.kwargs))
            if isinstance(leaf, ValueRef)
        )

    def model_paths(self) -> Iterator[str]:
        """Paths of the modules, parameters and buffers that this operation uses."""
        if self.kind in ("module", "chained"):
            yield self.target
        yield from (
            leaf.path
            for leaf in _list_leaves((self.args, self.kwargs))
            if isinstance(leaf, ModelPath)
        )

    @property
    def called_name(self) -> str:
        """Name of the function, method or module."""
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", "")

    def reads_attribute(self, name: str) -> bool:
        """Whether this reads an attribute of a value, as in x.shape."""
        return self.target is getattr and self.args[1] == name

    @property
    def gives_numbers(self) -> bool:
        """Whether this reads the sizes or the dtype of a tensor."""
        return self.called_name in ("size", "dim", "numel") or any(
            map(self.reads_attribute, ("shape", "ndim", "dtype"))
        )

    @property
    def is_arithmetic(self) -> bool:
        """Whether this computes a number, if the values that it reads are numbers."""
        # Operators such as `add`, and functions of `math`, on anything but parameters and buffers.
        held = any(
            isinstance(leaf, ModelPath | torch.Tensor)
            for leaf in _list_leaves((self.args, self.kwargs))
        )
        return not held and getattr(self.target, "__module__", "") in ("_operator", "math")

    @property
    def depends_on_mode(self) -> bool:
        """Whether an argument differs between training and evaluation."""
        flags = list[bool]()
        substitute_leaves(
            (self.args, dict(self.kwargs)), lambda leaf: flags.append(isinstance(leaf, ByMode))
        )
        return any(flags)

    def merge_evaluation(self, evaluation: Operation) -> Operation:
        """Merge this operation of a training forward with its counterpart in evaluation."""
        return replace(
            self,
            args=merge_modes(self.args, evaluation.args),
            kwargs=merge_modes(dict(self.kwargs), dict(evaluation.kwargs)),
        )

    def run_operation(self, values: Mapping[str, Any], model: nn.Module) -> Any:
        """Execute the operation on values, given by name."""
        if self.graded:
            return self._run_with_grad(values, model)
        with torch.no_grad():
            return self._run_with_grad(values, model)

    def _run_with_grad(self, values: Mapping[str, Any], model: nn.Module) -> Any:
        args, kwargs = (
            resolve_argument(self.args, values, model),
            resolve_argument(self.kwargs, values, model),
        )
        match self.kind:
            case "module":
                return look_up_path(model, self.target)(*args, **kwargs)
            case "chained":
                spread_args = args[0] if type(args[0]) is tuple else (args[0],)
                return look_up_path(model, self.target)(*spread_args, **kwargs.get("keywords", {}))
            case "function":
                return self.target(*args, **kwargs)
            case "method":
                return getattr(args[0], self.target)(*args[1:], **kwargs)
            case "device":
                tensors = (
                    leaf for leaf in tree_leaves(dict(values)) if isinstance(leaf, torch.Tensor)
                )
                return next(tensors, next(model.parameters())).device
            case "output":
                return args[0]


def look_up_path(model: nn.Module, path: str) -> Any:
    """Look up a path in a model, such as "blocks.0.scale"."""
    place: Any = model
    for step in path.split("."):
        place = getattr(place, step)
    return place


def resolve_argument(arg: Any, values: Mapping[str, Any], model: nn.Module) -> Any:
    """Replace what stands for values in an argument by the values."""
    return substitute_leaves(arg, lambda leaf: _resolve_leaf(leaf, values, model))


def _resolve_leaf(leaf: Any, values: Mapping[str, Any], model: nn.Module) -> Any:
    match leaf:
        case ValueRef():
            return values[leaf.name]
        case ModelPath():
            return look_up_path(model, leaf.path)
        case ByMode():
            return resolve_argument(
                leaf.training if model.training else leaf.evaluation, values, model
            )
        case _:
            return leaf


def substitute_leaves(arg: Any, change: Callable[[Any], Any]) -> Any:
    """Copy nested tuples, lists, dicts and slices, with each leaf changed by `change`."""
    if type(arg) is tuple:
        return tuple(substitute_leaves(one, change) for one in arg)
    if isinstance(arg, list):
        return [substitute_leaves(one, change) for one in arg]
    if isinstance(arg, dict):
        return {key: substitute_leaves(one, change) for key, one in arg.items()}
    if isinstance(arg, slice):
        return slice(*(substitute_leaves(one, change) for one in (arg.start, arg.stop, arg.step)))
    return change(arg)


def _list_leaves(arg: Any) -> list[Any]:
    leaves = list[Any]()

    def keep(leaf: Any) -> None:
        if isinstance(leaf, ByMode):
            leaves.extend(_list_leaves((leaf.training, leaf.evaluation)))
        else:
            leaves.append(leaf)

    substitute_leaves(arg, keep)
    return leaves


def merge_modes(training: Any, evaluation: Any) -> Any:
    """Merge an argument of two modes, with a `ByMode` for each part that differs."""
    if type(training) is not type(evaluation):
        return ByMode(training, evaluation)
    if isinstance(training, tuple | list) and len(training) == len(evaluation):
        return type(training)(
            merge_modes(one, other) for one, other in zip(training, evaluation, strict=True)
        )
    if isinstance(training, dict) and training.keys() == evaluation.keys():
        return {key: merge_modes(one, evaluation[key]) for key, one in training.items()}
    if isinstance(training, torch.Tensor):
        return (
            training
            if training is evaluation or _are_tensors_equal(training, evaluation)
            else ByMode(training, evaluation)
        )
    return (
        training
        if training is evaluation or bool(training == evaluation)
        else ByMode(training, evaluation)
    )


def _are_tensors_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Tensors without memory have no values to compare, so they never count as equal.
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and not one.is_meta and torch.equal(one, other)


PLAIN = (torch.Tensor, bool, int, float, str)


def find_foreign_type(value: Any) -> type | None:
    """Find the type of a nested part that can't be sent: no tensor, number, string or None."""
    return next(
        (
            type(leaf)
            for leaf in tree_leaves(value)
            if leaf is not None and not isinstance(leaf, PLAIN)
        ),
        None,
    )
