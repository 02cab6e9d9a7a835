"""Writes docs/modules.md, the list of all modules with their first lines: `python -m
website.modules`.
"""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "paceline"
PAGE = ROOT / "docs" / "modules.md"
HEAD = """# Modules

Every module of the package with its first line, folder by folder. Written by `python -m website.modules`. [Architecture](architecture.md)
says how they fit together, and which to read first.
"""  # noqa: E501


def first_line(path: Path) -> str:
    """Return the first line of a module's docstring, in one paragraph."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].replace("|", "\\|").replace("<", "&lt;")


def written() -> str:
    """Return the page."""
    paths = sorted(
        PACKAGE.rglob("*.py"),
        key=lambda path: (
            path.parent.relative_to(PACKAGE).as_posix(),
            path.name != "__init__.py",
            path.name,
        ),
    )
    parts = [HEAD]
    for folder, inside in groupby(paths, key=lambda path: path.parent):
        name = folder.relative_to(ROOT).as_posix()
        modules = list(inside)
        parts.append(f"\n## {name}\n\n{first_line(modules[0])}\n\n| module | |\n| --- | --- |\n")
        parts += [f"| `{path.name}` | {first_line(path)} |\n" for path in modules[1:]]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(written())
