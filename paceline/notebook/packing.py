"""Packs functions and their results by value, for workers that can't import them.

Functions may come from a notebook's cells, for example.

caller    function, arguments, import path, sources of cells  --> file without a name --> worker
worker    returned value                                      --> file without a name --> caller

The format is pickle, which runs code that it reads. This is safe here: both files are made by
processes of one call and handed over as descriptors. No other process can write to them, and they
contain only objects that the caller's own function has made.
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

# Raised by objects that can't be pickled.
_UNPICKLABLE = (pickle.PicklingError, TypeError, AttributeError, ValueError, RuntimeError)


class PackedCall(NamedTuple):
    """A call in the form in which it travels.

    `sources` has the lines of the caller's cells by file name, for tracebacks.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    sources: dict[str, Any]


def import_cloudpickle() -> Any:
    """Import cloudpickle. Raises `UsageError` if it isn't installed."""
    try:
        return importlib.import_module("cloudpickle")
    except ImportError:
        raise UsageError(
            "pl.launch sends functions by cloudpickle, which isn't installed: "
            "pip install 'paceline[notebook]'"
        ) from None


def pack_call(function: Callable[..., Any], args: Sequence[Any], file: BinaryIO) -> None:
    """Write a call to a file.

    Raises `UsageError` for a function or arguments that can't leave this process.
    """
    # The import path goes first: the worker needs it to unpickle objects of the caller's modules.
    _pickle_value((list(sys.path), list(sys.argv)), file)
    try:
        _pickle_value((function, tuple(args), _collect_sources()), file)
    except _UNPICKLABLE as error:
        raise UsageError(
            f"{_name_function(function)} can't be sent to workers ({error}): "
            "the function, its arguments, or an object that it uses can't leave this process, such "
            "as a lock, an open file, a generator or a run; make that object inside the function"
        ) from error


def unpack_call(file: BinaryIO) -> PackedCall:
    """Read a call from a file.

    Also gives this process the import path and the command-line arguments of the caller.
    """
    sys.path[:], sys.argv[:] = pickle.load(file)
    return PackedCall(*pickle.load(file))


def pack_result(result: Any, file: BinaryIO) -> None:
    """Write the result of a function to a file.

    Raises `UsageError` for a result that can't leave this process.
    """
    try:
        _pickle_value(result, file)
    except _UNPICKLABLE as error:
        raise UsageError(
            f"the function returned a {type(result).__qualname__} that can't be sent back "
            f"({error}): return numbers, tensors, state dicts, or lists and dicts of these"
        ) from error


def unpack_result(file: BinaryIO) -> Any:
    """Read the result of a function from the file of a worker."""
    return pickle.load(file)


def _pickle_value(value: Any, file: BinaryIO) -> None:
    """Pickle a value.

    Functions keep the names of their files, which tracebacks need and cloudpickle leaves out.
    """
    cloudpickle = import_cloudpickle()
    # This relies on cloudpickle having a reducer for `CodeType` in its `dispatch_table`. Without
    # it, the lookup below raises `KeyError`.
    usual = cloudpickle.Pickler.dispatch_table

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc, name-defined]
        dispatch_table: ClassVar[Any] = ChainMap(
            {CodeType: partial(_reduce_code, usual[CodeType])}, usual
        )

    Pickler(file).dump(value)


def _reduce_code(reduce: Callable[[CodeType], tuple[Any, ...]], code: CodeType) -> tuple[Any, ...]:
    make, make_args, *_ = reduce(code)
    return _restore_code, (make, make_args, code.co_filename)


def _restore_code(make: Callable[..., CodeType], make_args: Sequence[Any], file: str) -> CodeType:
    return make(*make_args).replace(co_filename=file)


def _collect_sources() -> dict[str, Any]:
    """Pick the sources in `linecache` that belong to no file: a notebook's cells.

    A `linecache` entry is (size, mtime, lines, name); mtime is None for lines from no file.
    """
    return {
        name: entry
        for name, entry in linecache.cache.items()
        if len(entry) == 4 and entry[1] is None
    }


def _name_function(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
