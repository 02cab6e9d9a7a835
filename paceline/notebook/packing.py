"""Packing of functions and their results by value, if workers can't import them.

They may come from a notebook's cells.

caller    function, arguments, import path, sources of cells  --> file without a name --> worker
worker    returned value                                      --> file without a name --> caller

It is pickle, which runs code that it reads. Both files are made by processes of one call and handed
over as descriptors. No other process can write to them, and they contain only objects that the
caller's own function has made.
"""

from __future__ import annotations

import importlib
import linecache
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType
from typing import Any, BinaryIO, ClassVar, NamedTuple

from paceline.errors import UsageError

# what objects raise that can't be pickled
_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError)


class PackedCall(NamedTuple):
    """A call as it travels. `sources`: the lines of the caller's cells, for tracebacks, by file."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    sources: dict[str, Any]


def require() -> Any:
    """Return the module cloudpickle. Raises `UsageError` where it isn't installed."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        raise UsageError(
            "pl.launch sends functions by cloudpickle, which isn't installed: "
            "pip install 'paceline[notebook]'"
        ) from None


def pack_call(function: Callable[..., Any], args: Sequence[Any], file: BinaryIO) -> None:
    """Write a call.

    Raises `UsageError` for a function, or for arguments, that can't leave this process.
    """
    # what is needed before anything of the caller's can be imported
    _dump((list(sys.path), list(sys.argv)), file)
    try:
        _dump((function, tuple(args), _sources()), file)
    except _UNPICKLABLE as error:
        raise UsageError(
            f"{_name(function)} can't be sent to workers ({error}): it, its arguments, or what it "
            "uses holds something that stays in its"
            " process, such as a lock, an open file, a generator or a run; "
            "make that inside of the function"
        ) from error


def unpack_call(file: BinaryIO) -> PackedCall:
    """Read a call; from now on this process has the arguments of its caller, and imports from
    where that does.
    """
    sys.path[:], sys.argv[:] = pickle.load(file)
    return PackedCall(*pickle.load(file))


def pack_result(result: Any, file: BinaryIO) -> None:
    """Write what a function has returned. Raises `UsageError` for what can't leave this process."""
    try:
        _dump(result, file)
    except _UNPICKLABLE as error:
        raise UsageError(
            f"the function returned a {type(result).__qualname__} that can't be sent back "
            f"({error}): return numbers, tensors, state dicts,"
            " or what is made of them"
        ) from error


def unpack_result(file: BinaryIO) -> Any:
    """Read what a function has returned in a worker of this process's own call."""
    return pickle.load(file)


def _dump(value: Any, file: BinaryIO) -> None:
    """Pickle a value.

    Functions keep the names of their files, for tracebacks, which cloudpickle would leave out.
    """
    cloudpickle = require()
    usual = cloudpickle.Pickler.dispatch_table

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        dispatch_table: ClassVar[Any] = ChainMap(
            {CodeType: partial(_reduce_code, usual[CodeType])}, usual
        )

    Pickler(file).dump(value)


def _reduce_code(reduce: Callable[[CodeType], tuple[Any, ...]], code: CodeType) -> tuple[Any, ...]:
    make, parts, *_ = reduce(code)
    return _placed_code, (make, parts, code.co_filename)


def _placed_code(make: Callable[..., CodeType], parts: Sequence[Any], file: str) -> CodeType:
    return make(*parts).replace(co_filename=file)


def _sources() -> dict[str, Any]:
    """Return the sources that are in no file: those of a notebook's cells, as `linecache` has
    them.
    """
    return {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None
    }


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
