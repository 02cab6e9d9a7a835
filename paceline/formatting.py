"""Formatting of values in words: an object as the call that makes it, and the nearest of some
names. Imports nothing of ours.
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


def spell(value: object) -> str:
    """Write the notation of `value`: the call that makes it, defaults left out.

    A class that should be written like this says `__repr__ = spell` in its body, and keeps each
    argument of its constructor in the attribute of the same name, as a dataclass does. Python
    functions and classes have no notation; what is given can't be read back.

    Example: `spell(LocalSGD(every=16))` is `"LocalSGD(16)"` if `every` has no default,
    `"LocalSGD(every=16)"` if it has another.
    """
    if type(value) in (tuple, list):
        items = [spell(item) for item in value]  # type: ignore[attr-defined]
        if isinstance(value, list):
            return f"[{', '.join(items)}]"
        return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
    if not isinstance(value, type) and type(value).__repr__ is spell:
        return f"{type(value).__name__}({', '.join(_arguments(value))})"
    if callable(value) and (isinstance(value, type) or hasattr(value, "__name__")):
        kind = "class" if isinstance(value, type) else "function"
        return f"<{kind} {value.__name__}: no notation>"
    return repr(value)


def _arguments(value: Any) -> Iterator[str]:
    """Yield the arguments between the brackets: positional while every argument before it was
    required, by name after.
    """
    factories = (
        {f.name: f.default_factory for f in dataclasses.fields(value)}
        if dataclasses.is_dataclass(value)
        else {}
    )
    positional, kind = True, value.__class__
    for name, parameter in _parameters(kind):
        given, factory = getattr(value, name), factories.get(name)
        required = parameter.default is parameter.empty
        if not required and _same(given, factory() if callable(factory) else parameter.default):
            positional = False
            continue
        positional = positional and required and parameter.kind is not parameter.KEYWORD_ONLY
        yield spell(given) if positional else f"{name}={spell(given)}"


@functools.lru_cache(256)
def _parameters(kind: type) -> tuple[tuple[str, inspect.Parameter], ...]:
    """Return the parameters of a constructor by name."""
    return tuple(inspect.signature(kind).parameters.items())


def _same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and bool(one == other))


def printable(text: str) -> str:
    """Write a text for a terminal: signs that can't be printed, such as those that move its
    cursor, become what Python calls them.
    """
    return "".join(
        sign if sign.isprintable() or sign == "\n" else sign.encode("unicode_escape").decode()
        for sign in text
    )


def choices(found: str, possible: Iterable[str]) -> str:
    """Write the end of a message about an unknown name: the possible ones, and the one that was
    perhaps meant.

    Example: `choices("rnig", ["ring", "tree"])` is `"possible: ring, tree; did you mean ring?"`.
    """
    names = sorted(possible)
    if not names:
        return "there are none to choose from"
    folded = {name.lower(): name for name in names}
    near = difflib.get_close_matches(found.lower(), folded, n=1)
    return f"possible: {', '.join(names)}" + (f"; did you mean {folded[near[0]]}?" if near else "")


def unknown(option: str, value: object, kind: Any) -> str:
    """Write what is wrong with the value of an option whose choices are a `Literal`, or a union
    with one; nothing where it is a choice.

    Example: `unknown("trace", "lst", Literal["last", "all"])` is `"trace='lst' is unknown;
    possible: all, last; did you mean last?"`.
    """
    words = list(_words(kind))
    if any(type(value) is type(word) and value == word for word in words):
        return ""
    return f"{option}={value!r} is unknown; {choices(str(value), map(str, words))}"


def _words(kind: Any) -> Iterator[Any]:
    """Yield the choices in a `Literal`, or in those of a union."""
    for part in get_args(kind):
        yield from _words(part) if get_origin(kind) in (Union, UnionType) else [part]


def nearest(found: str, names: Iterable[str]) -> str:
    """Write in brackets which name is like one that is unknown; nothing where none is close.

    Example: `nearest("haed.weight", ["head.weight"])` is `" (the nearest is head.weight)"`.
    """
    near = difflib.get_close_matches(found, list(names), n=1)
    return f" (the nearest is {near[0]})" if near else ""


def counted(number: int, thing: str) -> str:
    """Write a number of things: "1 step", "2,000 steps"."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def sized(number: float) -> str:
    """Write a number of bytes: "12 bytes", "7.5 MB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number:.0f} bytes"


def spoken(seconds: float) -> str:
    """Write a time in seconds as on a clock: 0:07, 12:34, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def message(error: BaseException | None) -> list[str]:
    """Return the lines of an error's message, and of its notes, as Python shows them: an error that
    can't tell its message has one, too.

    There is at least one line, which is empty if the error says nothing.
    """
    shown = [] if error is None else "".join(traceback.format_exception_only(error)).splitlines()
    # a SyntaxError begins with its place
    first = next(
        (index for index, line in enumerate(shown) if not line.startswith(" ")), len(shown)
    )
    head, *rest = shown[first:] or [""]
    return [head.partition(": ")[2], *rest]
