"""A page for each example: what its first line says of it, and the whole of it."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

LANGUAGES = {
    ".py": "python",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".sh": "bash",
    ".sbatch": "bash",
    ".slurm": "bash",
    ".toml": "toml",
}
INDEX, NOTEBOOK = "README.md", ".ipynb"


def _is_example(path: Path) -> bool:
    return "__pycache__" not in path.parts and (
        path.suffix in (*LANGUAGES, NOTEBOOK) or path.name == INDEX
    )


def files(folder: Path) -> list[Path]:
    """Return the examples, those in folders below too; what leads through them is the first."""
    return sorted(
        (path for path in folder.rglob("*") if _is_example(path)),
        key=lambda path: (path.name != INDEX, path),
    )


def homes(folder: Path) -> dict[str, str]:
    """Return the page of each example by its path in the repository."""
    return {
        f"examples/{(path.relative_to(folder)).as_posix()}": _name(path, folder)
        for path in files(folder)
    }


def pages(folder: Path) -> dict[str, str]:
    """Return the pages by their names on the site."""
    return {_name(path, folder): page(path, folder) for path in files(folder)}


def page(path: Path, folder: Path) -> str:
    """Return the page of one example."""
    text, name = path.read_text(), path.relative_to(folder).as_posix()
    if path.name == INDEX:
        return text
    if path.suffix == NOTEBOOK:
        return "\n\n".join([f"# {name}", *map(_cell, json.loads(text)["cells"])])
    said = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else ""
    return (
        f"# {name}\n\n{said}\n\n```{LANGUAGES[path.suffix]} "
        f'title="examples/{name}"\n{text.rstrip()}\n```\n'
    )


def _cell(cell: dict[str, Any]) -> str:
    source = "".join(cell["source"])
    return (
        f"```python\n{source}\n```"
        if cell["cell_type"] == "code"
        else source.replace("# ", "## ", 1)
        if source.startswith("# ")
        else source
    )


def _name(path: Path, folder: Path) -> str:
    if path.name == INDEX:
        return f"examples/{(path.parent.relative_to(folder) / 'index.md').as_posix()}"
    return f"examples/{path.relative_to(folder).as_posix().replace('.', '-')}.md"
