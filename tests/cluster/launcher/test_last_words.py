"""Of all that a worker wrote, the traceback of the error that ended it."""

from __future__ import annotations

import atexit
import subprocess
import sys
import threading
import traceback

import pytest

from paceline.cluster.launcher.last_words import extract_last_words

FIRST = "Traceback (most recent call last):\n  x\nKeyError: 1\n"
JOINED = "\nDuring handling of the above exception, another exception occurred:\n\n"
SECOND = f"{FIRST}{JOINED}Traceback (most recent call last):\n  y\nours.ValueError: 2"
NOISE = "".join(f"line {number}\n" for number in range(40))


def test_the_last_traceback_with_its_causes() -> None:
    for kind in (None, "ValueError", "KeyError"):
        assert extract_last_words("noise\n" + FIRST + "more\n" + SECOND, kind) == SECOND


def test_the_last_lines_where_there_is_none() -> None:
    assert extract_last_words("a\nb") == extract_last_words("a\nb", "ValueError", 0) == "a\nb"
    assert (
        extract_last_words("") == ""
        and extract_last_words(NOISE).splitlines() == NOISE.splitlines()[-20:]
    )


def test_an_old_traceback_is_not_of_what_ended_it() -> None:
    """Such as of an error that the script has handled, long before it was killed."""
    for kind in (None, "SystemExit"):
        assert extract_last_words(FIRST + NOISE, kind).splitlines() == NOISE.splitlines()[-20:]
        assert extract_last_words(FIRST + "gives up", kind) == FIRST + "gives up"


@pytest.mark.parametrize(
    "after",
    [
        NOISE,
        f"Exception ignored in: <function Loader.__del__ at 0x1>\n{FIRST}",
        f"Exception ignored in: <function Loader.__del__ at 0x1>\n{SECOND}\n",
        f"Exception in thread Thread-1:\n{SECOND}\ngoodbye\n",
        f"Error in atexit._run_exitfuncs:\n{SECOND}\n{NOISE}",
        f"Process Process-2:\n{SECOND}\n",
        FIRST,
    ],
)
def test_what_is_written_at_exit_is_left_out(after: str) -> None:
    assert extract_last_words(NOISE + SECOND + "\n" + after, "ValueError", 0) == SECOND


def test_a_message_of_several_lines() -> None:
    assert (
        extract_last_words(f"{SECOND}\ntwo\n\nthree\n{NOISE}", "ValueError", 3)
        == f"{SECOND}\ntwo\n\nthree"
    )
    inner = f"Traceback (most recent call last):\n  z\nRuntimeError: a child failed:\n{FIRST}"
    assert (
        extract_last_words(inner, "RuntimeError")
        == "Traceback (most recent call last):\n  z\nRuntimeError: a child failed:"
    )
    quoted = (
        "Traceback (most recent call last):\n  z\nRuntimeError: caught\nOriginal Traceback (most "
        "recent call last):\n  y\nKeyError: 1"
    )
    assert extract_last_words(f"{quoted}\n{NOISE}", "RuntimeError", 3) == quoted


def raised(error: BaseException) -> str:
    """Return what Python writes of an error that comes while another one is handled."""
    try:
        try:
            raise KeyError(3)
        except KeyError:
            raise error  # noqa: B904 (as scripts do)
    except type(error):
        return traceback.format_exc()


def test_groups_of_exceptions() -> None:
    inner = ExceptionGroup("b", [KeyError(2), ValueError("two\nlines")])
    group = ExceptionGroup("a", [ValueError(1), inner])
    text = raised(group)
    for kind, after in ((None, "\ngoodbye"), ("ExceptionGroup", "")):
        assert extract_last_words(NOISE + text + "goodbye\n", kind, 0) == text.rstrip() + after
    assert extract_last_words(raised(group) + SECOND, "ValueError", 0) == SECOND
    bare = "".join(traceback.format_exception(group.derive([ValueError(1)])))
    assert extract_last_words(f"{bare}{NOISE}", "ExceptionGroup", 0) == bare.rstrip()


def test_what_python_writes() -> None:
    """An error while another is handled; at exit there are an error of a thread, one of
    `__del__`, one of a function and a line.
    """
    body = f"""
import {atexit.__name__}, {threading.__name__}, sys
class Loader:
    def __del__(self):
        raise ValueError("ignored")
kept = Loader()
def late():
    raise ValueError("late")
atexit.register(print, "goodbye", file=sys.stderr)
atexit.register(late)
started = threading.Event()
def wait():
    started.set()
    threading.main_thread().join()
    raise ValueError("in a thread")
thread = threading.Thread(target=wait)
thread.start(), started.wait()
try:
    1 / 0
except ZeroDivisionError:
    raise ValueError("the one")
"""
    said = subprocess.run(
        [sys.executable, "-I", "-S", "-c", body], capture_output=True, text=True, check=False
    ).stderr
    assert all(words in said for words in ("ignored", "late", "in a thread", "goodbye"))
    words = extract_last_words(said, "ValueError", 0).splitlines()
    assert (
        words[-1] == "ValueError: the one"
        and "ZeroDivisionError: division by zero" in words
        and "goodbye" not in words
    )
