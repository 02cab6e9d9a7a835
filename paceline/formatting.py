"""Formats values for messages: calls, choices, counts, bytes, durations, error messages.

Imports nothing from paceline.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import traceback
from collections.abc import Iterable, Iterator
from types import UnionType
from typing import Any, Union, get_args, get_origin


def format_as_call(value: object) -> str:
    """Format a value as the call that makes it, without arguments that have their defaults.

    A class takes part by `__repr__ = format_as_call` in its body. It keeps each argument of its
    constructor in the attribute of the same name, as a dataclass does. Python functions and other
    classes have no notation: their text can't be read back.

    Example: `format_as_call(LocalSGD(every=16))` is `"LocalSGD(16)"` if `every` has no default,
    and `"LocalSGD(every=16)"` if it has another default.
    """
    if type(value) in (tuple, list):
        items = [format_as_call(item) for item in value]  # type: ignore[attr-defined]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if not isinstance(value, type) and type(value).__repr__ is format_as_call:
        return f"{type(value).__name__}({', '.join(_format_arguments(value))})"
    if callable(value) and (isinstance(value, type) or hasattr(value, "__name__")):
        kind = "class" if isinstance(value, type) else "function"
        return f"<{kind} {value.__name__}: no notation>"
    return repr(value)


def _format_arguments(value: Any) -> Iterator[str]:
    """Yield the arguments of the call.

    An argument is positional while all before it are required, and goes by name after that.
    """
    # A field with a factory has no default in the signature that a value could be compared to.
    factories = (
        {f.name: f.default_factory for f in dataclasses.fields(value)}
        if dataclasses.is_dataclass(value)
        else {}
    )
    positional, kind = True, value.__class__
    # Once an argument is left out, those after it can only go by name.
    for name, parameter in _list_parameters(kind):
        argument, factory = getattr(value, name), factories.get(name)
        required = parameter.default is parameter.empty
        if not required and _is_same_value(
            argument, factory() if callable(factory) else parameter.default
        ):
            positional = False
            continue
        positional = positional and required and parameter.kind is not parameter.KEYWORD_ONLY
        yield format_as_call(argument) if positional else f"{name}={format_as_call(argument)}"


@functools.lru_cache(256)
def _list_parameters(kind: type) -> tuple[tuple[str, inspect.Parameter], ...]:
    """List the parameters of a constructor with their names."""
    return tuple(inspect.signature(kind).parameters.items())


def _is_same_value(one: object, other: object) -> bool:
    """Whether two values are equal, and of one type."""
    return one is other or (type(one) is type(other) and bool(one == other))


def escape_unprintable(text: str) -> str:
    """Escape characters that can't be printed, such as those that move a terminal's cursor.

    They are written as in a Python literal, such as `\\x1b`.
    """
    return "".join(
        sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode()
        for sign in text
    )


def format_choices(found: str, possible: Iterable[str]) -> str:
    """Format the end of a message about an unknown name: the choices, and the likely one.

    Example: `format_choices("rnig", ["ring", "tree"])` is `"possible: ring, tree; did you mean
    ring?"`.
    """
    names = sorted(possible)
    if not names:
        return "there are none to choose from"
    # Compared in lower case: "localsgd" is meant as LocalSGD.
    folded = {name.lower(): name for name in names}
    near = difflib.get_close_matches(found.lower(), folded, n=1)
    return f"possible: {', '.join(names)}" + (f"; did you mean {folded[near[0]]}?" if near else "")


def describe_unknown_choice(option: str, value: object, kind: Any) -> str:
    """Describe an unknown value of an option. Empty if the value is one of the choices.

    Example: `describe_unknown_choice("trace", "lst", Literal["last", "all"])` is `"trace='lst' is
    unknown; possible: all, last; did you mean last?"`.

    Args:
        option: Name of the option.
        value: Its value.
        kind: Its choices, a `Literal` or a union that contains one.
    """
    words = list(_list_choices(kind))
    # Types are compared too: True == 1, but only one of them may be a choice.
    if any(type(value) is type(word) and value == word for word in words):
        return ""
    return f"{option}={value!r} is unknown; {format_choices(str(value), map(str, words))}"


def _list_choices(kind: Any) -> Iterator[Any]:
    """Yield the choices of a `Literal`, or of all `Literal`s in a union."""
    for part in get_args(kind):
        yield from _list_choices(part) if get_origin(kind) in (Union, UnionType) else [part]


def suggest_nearest(found: str, names: Iterable[str]) -> str:
    """Format a hint at the name nearest to an unknown one. Empty if none is close.

    Example: `suggest_nearest("haed.weight", ["head.weight"])` is `" (the nearest is head.weight)"`.
    """
    near = difflib.get_close_matches(found, list(names), n=1)
    return f" (the nearest is {near[0]})" if near else ""


def format_count(number: int, thing: str) -> str:
    """Format a number of things: "1 step", "2,000 steps"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def format_bytes(number: float) -> str:
    """Format a number of bytes: "12 bytes", "7.5 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"


def format_duration(seconds: float) -> str:
    """Format seconds as on a clock: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def list_message_lines(error: BaseException | None) -> list[str]:
    """Split the message of an error, and its notes, into lines, as Python prints them.

    An error whose `__str__` fails has a message too. There is at least one line. It is empty if the
    error has no message.
    """
    shown = [] if error is None else "".join(traceback.format_exception_only(error)).splitlines()
    # A SyntaxError begins with indented lines that show its place.
    first = next(
        (index for index, line in enumerate(shown) if not line.startswith(" ")), len(shown)
    )
    head, *rest = shown[first:] or [""]
    return [head.partition(": ")[2], *rest]
