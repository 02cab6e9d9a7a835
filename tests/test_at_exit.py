"""What a worker wants to be called at its exit is not called by processes that its script forks:
they share its connections and memory.
"""

from __future__ import annotations

import atexit
import os
from pathlib import Path

import pytest

import paceline
from paceline.at_exit import call_at_exit


def test_only_the_process_that_asked_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    registered, called = list[object](), list[int]()
    monkeypatch.setattr(atexit, "register", registered.append)
    monkeypatch.setattr(atexit, "unregister", registered.remove)
    unregister = call_at_exit(lambda: called.append(os.getpid()))
    (end,) = registered
    assert callable(end)
    if (child := os.fork()) == 0:
        end()
        os._exit(len(called))
    assert os.waitpid(child, 0)[1] == 0
    end()
    assert called == [os.getpid()]
    unregister()
    assert registered == []


def test_nobody_registers_in_another_way() -> None:
    folder = Path(paceline.__file__).parent
    found = [
        path.relative_to(folder)
        for path in folder.rglob("*.py")
        if "import atexit" in path.read_text(encoding="utf-8")
    ]
    assert found == [Path("at_exit.py")]
