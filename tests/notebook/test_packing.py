"""Packing of functions: by value where they can't be imported, with the names of their files and
the sources of cells.
"""

from __future__ import annotations

import io
import linecache
import pickle
import sys
import traceback
from typing import Any

import pytest

import paceline as pl
from paceline.notebook.packing import pack_call, pack_result, unpack_call, unpack_result

CELL = (
    "def work(n):\n    return helper(n)\n\ndef helper(n):\n    return [1 "
    "// (n - k) for k in range(3)]\n"
)


def sent(function: Any, *args: Any) -> Any:
    file = io.BytesIO()
    pack_call(function, args, file)
    file.seek(0)
    return unpack_call(file)


def test_a_function_of_a_cell_fails_with_its_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "/tmp/ipykernel_1/2.py"
    space: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELL, name, "exec"), space)
    monkeypatch.setitem(
        linecache.cache, name, (len(CELL), None, CELL.splitlines(keepends=True), name)
    )
    call = sent(space["work"], 5)
    assert call.function is not space["work"] and call.function(*call.args) == [0, 0, 0]
    assert call.sources[name][2][0] == "def work(n):\n"
    try:
        call.function(2)
    except ZeroDivisionError as error:
        frames = traceback.extract_tb(error.__traceback__)
    assert [(frame.filename, frame.lineno, frame.line) for frame in frames[1:3]] == [
        (name, 2, "return helper(n)"),
        (name, 5, "return [1 // (n - k) for k in range(3)]"),
    ]


def test_imports_and_arguments_are_the_caller_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, "/somewhere/else"])
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    file = io.BytesIO()
    pack_call(print, (), file)
    file.seek(0)
    sys.path.remove("/somewhere/else")
    sys.argv.clear()
    unpack_call(file)
    assert sys.path[-1] == "/somewhere/else" and sys.argv == ["train.py", "--lr", "0.1"]


def test_results() -> None:
    file = io.BytesIO()
    pack_result({"loss": 1.5}, file)
    file.seek(0)
    assert unpack_result(file) == {"loss": 1.5}
    with pytest.raises(
        pl.UsageError, match="the function returned a generator that can't be sent back"
    ):
        pack_result((n for n in ()), io.BytesIO())


def test_what_is_in_no_file_is_sent_alone() -> None:
    file = io.BytesIO()
    pack_call(print, (), file)
    file.seek(0)
    pickle.load(file)
    sources = pickle.load(file)[2]
    assert __file__ not in sources and all(entry[1] is None for entry in sources.values())
