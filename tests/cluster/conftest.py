"""Scripts and launchers for the tests of this folder; nothing of them may be left after a test."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.launchers import Launched, wait_gone


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    def write(body: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(
            "import os, sys, time\nrank = int(os.environ['RANK'])\n" + textwrap.dedent(body)
        )
        return str(path)

    return write


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """Starts launchers; afterwards nothing that ran in this test's folder may be left."""
    started: list[Launched] = []

    def start(script: str, workers: int = 2, **options: Any) -> Launched:
        environ = {name: options.pop(name) for name in list(options) if name.isupper()}
        started.append(
            Launched(tmp_path, {"script": script, "workers": workers, **options}, **environ)
        )
        return started[-1]

    yield start
    for launched in started:
        if launched.process.poll() is None:
            launched.process.kill()
            launched.process.communicate()
    left = wait_gone(tmp_path)
    assert not left, f"left behind: {left}"
