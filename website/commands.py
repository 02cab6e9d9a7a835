"""The reference of the command line, made of the commands themselves."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from paceline.cli import app

NAME = "reference/command-line.md"
HEAD = """# Command line

All commands and their options, as `--help` shows them. Options of paceline stand before the script, and what stands after it
belongs to the script. With `paceline plan`, what belongs to the script stands after `--`.
"""  # noqa: E501


def page() -> str:
    """Return the page: a heading for each command, its usage, and tables of its arguments and
    options.
    """
    return "\n".join(
        [HEAD, *(section(name, command) for name, command in walk(typer.main.get_command(app)))]
    )


def walk(group: Any, name: str = "paceline") -> Iterator[tuple[str, Any]]:
    """Go through the commands of a group and of those in it, by the names that users type."""
    for word, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from walk(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def section(name: str, command: Any) -> str:
    """Describe one command."""
    context = command.make_context(name, [], resilient_parsing=True)
    usage = command.get_usage(context).removeprefix("Usage: ").replace("{", "").replace("}", "")
    rows = [
        record for parameter in command.params if (record := parameter.get_help_record(context))
    ]
    table = (
        [
            "| Argument or option | What it is |",
            "| --- | --- |",
            *(f"| `{left}` | {_cell(right)} |" for left, right in rows),
        ]
        if rows
        else []
    )
    return "\n".join(
        [f"## `{name}`", "", command.help or "", "", "```text", usage, "```", "", *table, ""]
    )


def _cell(text: str) -> str:
    return re.sub(r"\s+", " ", text).replace("|", "\\|").replace("<", "&lt;").strip()
