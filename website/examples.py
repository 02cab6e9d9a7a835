"""A page for each example: what its first line says of it, and the whole of it."""

from __future__ import annotations

import ast
from pathlib import Path

LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".sh": "bash", ".sbatch": "bash", ".slurm": "bash", ".toml": "toml"}


def files(folder: Path) -> list[Path]:
    """Return the examples, those in folders below too."""
    return sorted(path for path in folder.rglob("*") if path.suffix in LANGUAGES and "__pycache__" not in path.parts)


def homes(folder: Path) -> dict[str, str]:
    """Return the page of each example by its path in the repository."""
    return {f"examples/{(path.relative_to(folder)).as_posix()}": _name(path, folder) for path in files(folder)}


def pages(folder: Path) -> dict[str, str]:
    """Return the pages by their names on the site."""
    return {_name(path, folder): page(path, folder) for path in files(folder)}


def page(path: Path, folder: Path) -> str:
    """Return the page of one example."""
    text, name = path.read_text(), path.relative_to(folder).as_posix()
    said = ast.get_docstring(ast.parse(text)) or "" if path.suffix == ".py" else ""
    return f'# {name}\n\n{said}\n\n```{LANGUAGES[path.suffix]} title="examples/{name}"\n{text.rstrip()}\n```\n'


def _name(path: Path, folder: Path) -> str:
    return f"examples/{path.relative_to(folder).as_posix().replace('.', '-')}.md"
