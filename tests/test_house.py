"""Tests share helpers in tests/harness, and never import each other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.harness.sources import TOGETHER, parsed

pytestmark = TOGETHER
TESTS = Path(__file__).parent

# What an import of a test has on its first line: sources without it needn't be parsed, which takes
# seconds.
SUSPECT = re.compile(r"^\s*(from|import)\s+tests\b.*(\(|\b(test_|conftest\b))", re.MULTILINE)


def imported(source: str) -> Iterator[str]:
    """The modules that it imports, and the names from modules, which may be modules too."""
    for node in parsed(source).nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def of_tests(source: str) -> list[str]:
    """What this source imports of a test or of a conftest."""
    found = (name.split(".") for name in imported(source))
    return [
        ".".join(name)
        for name in found
        if name[0] == "tests"
        and any(part.startswith("test_") or part == "conftest" for part in name)
    ]


def test_no_test_imports_a_test() -> None:
    sources = {
        path: text
        for path in sorted(TESTS.rglob("*.py"))
        if SUSPECT.search(text := path.read_text())
    }
    assert {
        path.relative_to(TESTS).as_posix(): found
        for path, text in sources.items()
        if (found := of_tests(text))
    } == {}


def test_the_test_sees_imports_of_tests() -> None:
    assert of_tests("def f():\n    from tests.codec.test_coding import data\n") == [
        "tests.codec.test_coding.data"
    ]
    assert of_tests("from tests.codec import test_coding") and of_tests("import tests.conftest")
    split = "from tests.codec import (\n    test_coding,\n)"
    lines = (
        "    from tests.codec.test_coding import data",
        "from tests.codec import test_coding",
        "import tests.conftest",
        split,
    )
    assert all(map(SUSPECT.search, lines)) and not SUSPECT.search(
        "from tests.harness.runs import workers"
    )
    assert of_tests(split) == ["tests.codec.test_coding"]
    assert not of_tests("from tests.harness.codings import data\nimport tests.harness.runs")
