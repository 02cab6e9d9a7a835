"""What a forward does, as data: calls of modules, functions and methods, one after the other, on
values that have names.

    x -> tokens(x) -> add(tokens, positions) -> blocks.0(add) -> ...        each value is called what `Operation.name` says

Modules and parameters stand in it by their names in the model, and are looked up whenever they are
used: what a cut has put in their place is what runs.
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

# the name of what a forward returns: no module or argument can have it
OUTPUT = "output of the model"
Kind = Literal["module", "chained", "function", "method", "device", "output"]


@dataclass(frozen=True)
class Ref:
    """The value of this name, in the place of an argument."""

    name: str


@dataclass(frozen=True)
class Attribute:
    """What lies under this path in the model: a parameter, a buffer or a module, in the place of
    an argument.
    """

    path: str


@dataclass(frozen=True)
class ByMode:
    """An argument that differs between training and evaluation, such as the probability of a
    dropout.
    """

    training: Any
    evaluation: Any


@dataclass(frozen=True, eq=False)
class Operation:
    """One call of a forward. `graded` is False where the forward makes it under torch.no_grad().

    `target` is the name of a module, the name of a method or a function; "chained" calls a module
    with what the one before returned, a tuple as several arguments, "device" is the device of what
    there is, and "output" is what the forward returns.
    """

    name: str
    kind: Kind
    target: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    graded: bool = True

    def reads(self) -> Iterator[str]:
        """Yield the names of the values that this operation reads."""
        return (leaf.name for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, Ref))

    def paths(self) -> Iterator[str]:
        """Yield the paths of modules, parameters and buffers that this operation uses."""
        if self.kind in ("module", "chained"):
            yield self.target
        yield from (
            leaf.path for leaf in _leaves((self.args, self.kwargs)) if isinstance(leaf, Attribute)
        )

    @property
    def called(self) -> str:
        """The name of the function, method or module."""
        return self.target if isinstance(self.target, str) else getattr(self.target, "__name__", "")

    def reads_attribute(self, name: str) -> bool:
        """Whether this reads an attribute of a value: x.shape."""
        return self.target is getattr and self.args[1] == name

    @property
    def gives_numbers(self) -> bool:
        """Whether this asks a tensor for its sizes or its dtype."""
        return self.called in ("size", "dim", "numel") or any(
            map(self.reads_attribute, ("shape", "ndim", "dtype"))
        )

    @property
    def is_arithmetic(self) -> bool:
        """Whether this makes numbers of numbers, if the values that it reads are some."""
        held = any(
            isinstance(leaf, Attribute | torch.Tensor) for leaf in _leaves((self.args, self.kwargs))
        )
        return not held and getattr(self.target, "__module__", "") in ("_operator", "math")

    @property
    def by_mode(self) -> bool:
        """Whether an argument differs between training and evaluation."""
        found = list[bool]()
        substitute(
            (self.args, dict(self.kwargs)), lambda leaf: found.append(isinstance(leaf, ByMode))
        )
        return any(found)

    def merged(self, evaluation: Operation) -> Operation:
        """Make one operation of this one, of training, and what it is in evaluation."""
        return replace(
            self,
            args=merge_modes(self.args, evaluation.args),
            kwargs=merge_modes(dict(self.kwargs), dict(evaluation.kwargs)),
        )

    def call(self, values: Mapping[str, Any], model: nn.Module) -> Any:
        """Do it on the values of these names."""
        if self.graded:
            return self._call(values, model)
        with torch.no_grad():
            return self._call(values, model)

    def _call(self, values: Mapping[str, Any], model: nn.Module) -> Any:
        args, kwargs = resolve(self.args, values, model), resolve(self.kwargs, values, model)
        match self.kind:
            case "module":
                return find(model, self.target)(*args, **kwargs)
            case "chained":
                given = args[0] if type(args[0]) is tuple else (args[0],)
                return find(model, self.target)(*given, **kwargs.get("keywords", {}))
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


def find(model: nn.Module, path: str) -> Any:
    """Return what lies under a path in the model: "blocks.0.scale"."""
    place: Any = model
    for step in path.split("."):
        place = getattr(place, step)
    return place


def resolve(arg: Any, values: Mapping[str, Any], model: nn.Module) -> Any:
    """Put values in the place of what stands for them in an argument."""
    return substitute(arg, lambda leaf: _value(leaf, values, model))


def _value(leaf: Any, values: Mapping[str, Any], model: nn.Module) -> Any:
    match leaf:
        case Ref():
            return values[leaf.name]
        case Attribute():
            return find(model, leaf.path)
        case ByMode():
            return resolve(leaf.training if model.training else leaf.evaluation, values, model)
        case _:
            return leaf


def substitute(arg: Any, change: Callable[[Any], Any]) -> Any:
    """Make a copy of nested tuples, lists, dicts and slices in which each leaf is what `change`
    makes of it.
    """
    if type(arg) is tuple:
        return tuple(substitute(one, change) for one in arg)
    if isinstance(arg, list):
        return [substitute(one, change) for one in arg]
    if isinstance(arg, dict):
        return {key: substitute(one, change) for key, one in arg.items()}
    if isinstance(arg, slice):
        return slice(*(substitute(one, change) for one in (arg.start, arg.stop, arg.step)))
    return change(arg)


def _leaves(arg: Any) -> list[Any]:
    found = list[Any]()

    def keep(leaf: Any) -> None:
        if isinstance(leaf, ByMode):
            found.extend(_leaves((leaf.training, leaf.evaluation)))
        else:
            found.append(leaf)

    substitute(arg, keep)
    return found


def merge_modes(training: Any, evaluation: Any) -> Any:
    """Make one argument of those of two modes, with a `ByMode` where they differ."""
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
            if training is evaluation or _equal(training, evaluation)
            else ByMode(training, evaluation)
        )
    return (
        training
        if training is evaluation or bool(training == evaluation)
        else ByMode(training, evaluation)
    )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return alike and not one.is_meta and torch.equal(one, other)


PLAIN = (torch.Tensor, bool, int, float, str)


def foreign(value: Any) -> type | None:
    """Find the type of a part of `value` that can't be sent: neither a tensor, nor a number, a
    string or None, nested in any way.
    """
    return next(
        (
            type(leaf)
            for leaf in tree_leaves(value)
            if leaf is not None and not isinstance(leaf, PLAIN)
        ),
        None,
    )
