"""Reads a table of a TOML file with a fixed set of keys. Each error is one line."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

from paceline.errors import UsageError
from paceline.formatting import format_choices


def read_toml_table(
    path: str | Path, name: str, *, needed: Set[str], optional: Set[str]
) -> Mapping[str, Any]:
    """Read the table `name` of a TOML file.

    Args:
        path: The file.
        name: Name of the table.
        needed: Keys that it must have.
        optional: Keys that it may have.

    Raises:
        UsageError: The file can't be read, there is no such table, or a key is missing or unknown.
    """
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # as in `lab.read`
        raise UsageError(f"{path} isn't TOML: {error}") from error
    if others := sorted(set(content) - {name}):
        raise UsageError(f"{path}: {others[0]!r} isn't known here; all keys belong below [{name}]")
    table = content.get(name)
    if not isinstance(table, dict):
        raise UsageError(f"{path} has no table [{name}]: begin it with the line [{name}]")
    for key in table:
        if key not in needed | optional:
            raise UsageError(
                f"{path}: {key!r} isn't a key of [{name}]; {format_choices(key, needed | optional)}"
            )
    if missing := sorted(needed - set(table)):
        raise UsageError(f"{path}: [{name}] lacks {', '.join(missing)}")
    return table


def check_number(name: str, value: object, *, whole: bool = False, least: float = 0.0) -> None:
    """Raise `UsageError` if a value isn't a finite number above `least`."""
    fits = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not fits or not least < float(value) < float("inf"):  # type: ignore[arg-type]
        kind = "a whole number" if whole else "a number"
        raise UsageError(f"{name} is {value!r}: it has to be {kind} above {least:g}")
