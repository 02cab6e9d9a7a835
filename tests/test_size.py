"""Files and functions stay short enough to be read at once."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.harness.sources import TOGETHER, parsed

pytestmark = TOGETHER
ROOT = Path(__file__).parent.parent
FILE, FUNCTION = 450, 60  # lines
ALLOWED: dict[str, int] = {}  # "path:function" or "path": lines it may have; each with its reason beside it


def sizes(path: Path) -> dict[str, int]:
    name, source = path.relative_to(ROOT).as_posix(), path.read_text()
    functions = (node for node in parsed(source).nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {name: len(source.splitlines())} | {f"{name}:{node.name}": (node.end_lineno or 0) - node.lineno + 1 for node in functions}


def everything() -> dict[str, int]:
    return {name: lines for path in sorted((ROOT / "paceline").rglob("*.py")) for name, lines in sizes(path).items()}


def test_files_and_functions_are_short() -> None:
    long = {name: lines for name, lines in everything().items() if lines > ALLOWED.get(name, FUNCTION if ":" in name else FILE)}
    assert long == {}


def test_exceptions_are_still_needed() -> None:
    here = everything()
    assert [name for name in ALLOWED if here.get(name, 0) <= (FUNCTION if ":" in name else FILE)] == []
