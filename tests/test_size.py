"""Files and functions stay short enough to be read at once.

Only lines of code count, so that explaining costs nothing.
"""

from __future__ import annotations

import ast
from pathlib import Path

from tests.harness.sources import TOGETHER, code_lines, count_code_lines, parsed

pytestmark = TOGETHER
ROOT = Path(__file__).parent.parent
FILE, FUNCTION = 400, 50  # lines of code
# "path:function" or "path": lines it may have; each with its reason beside it
ALLOWED: dict[str, int] = {
    "paceline/bench/command.py:scaling": 60,  # a command: a line for each option
    "paceline/cli.py:run": 60,  # a command: a line for each option
    "paceline/parallel/shard.py:__init__": 60,  # builds all parts of the cut, in one order
    "paceline/session/assemble.py:run": 60,  # builds all parts of a run, in one order
}


def sizes(path: Path) -> dict[str, int]:
    name, source = path.relative_to(ROOT).as_posix(), path.read_text()
    functions = (
        node
        for node in parsed(source).nodes
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    return {name: len(code_lines(source))} | {
        f"{name}:{node.name}": count_code_lines(source, node) for node in functions
    }


def everything() -> dict[str, int]:
    return {
        name: lines
        for path in sorted((ROOT / "paceline").rglob("*.py"))
        for name, lines in sizes(path).items()
    }


def test_files_and_functions_are_short() -> None:
    long = {
        name: lines
        for name, lines in everything().items()
        if lines > ALLOWED.get(name, FUNCTION if ":" in name else FILE)
    }
    assert long == {}


def test_exceptions_are_still_needed() -> None:
    here = everything()
    assert [
        name for name in ALLOWED if here.get(name, 0) <= (FUNCTION if ":" in name else FILE)
    ] == []


def test_only_code_is_counted() -> None:
    source = (
        '"""What it is."""\n\n# why\n\n\ndef f():\n    """Do it.\n\n    More.\n    """\n    # '
        'why\n    x = """a\n    b"""\n    return x\n'
    )
    assert len(code_lines(source)) == 4
    assert count_code_lines(source, ast.parse(source).body[1]) == 4  # type: ignore[arg-type]
