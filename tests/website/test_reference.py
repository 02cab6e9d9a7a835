"""Pages that nobody writes have every command, every public name and every example."""

from __future__ import annotations

import json
from pathlib import Path

import typer.main

import paceline
from paceline import lab
from paceline.cli import app
from tests.harness.documents import ROOT
from website import commands, examples, names
from website.sources import OUTSIDE, made, source


def test_every_command_and_option_is_there() -> None:
    sections = {
        part.partition("`")[0]: part for part in commands.page().split("\n## `paceline ")[1:]
    }
    found = {
        name.removeprefix("paceline "): command
        for name, command in commands.walk(typer.main.get_command(app))
    }
    assert set(sections) == set(found) >= {"run", "lab run", "report"}
    for name, command in found.items():
        shown = [
            each.opts[0]
            if each.metavar is None or each.opts[0].startswith("-")
            else str(each.metavar)
            for each in command.params
        ]
        assert [option for option in shown if option not in sections[name]] == []


def test_every_public_name_is_there() -> None:
    text = "".join(names.pages().values())
    wanted = [f'"paceline.{name}"' for name in paceline.__all__ if name != "__version__"] + [
        f'"paceline.lab.{name}"' for name in lab.__all__
    ]
    assert [name for name in wanted if text.count(f"heading: {name}") != 1] == []


def test_every_example_is_there() -> None:
    pages = examples.pages(ROOT / "examples")
    assert len(pages) == len(examples.files(ROOT / "examples")) >= 2
    assert 'title="examples/train.py"' in pages["examples/train-py.md"]


def test_an_example_says_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text('"""Trains."""\n\nx = 1\n')
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "job.yaml").write_text("kind: Job\n")
    assert set(examples.pages(tmp_path)) == {"examples/a-py.md", "examples/deep/job-yaml.md"}
    assert examples.pages(tmp_path)["examples/a-py.md"].startswith("# a.py\n\nTrains.\n\n```python")
    (tmp_path / "README.md").write_text("# Examples\n")
    cells = [
        {"cell_type": "markdown", "source": ["# Here\n"]},
        {"cell_type": "code", "source": ["x = 1\n", "y = 2"]},
    ]
    (tmp_path / "note.ipynb").write_text(json.dumps({"cells": cells}))
    assert next(iter(examples.pages(tmp_path).items())) == ("examples/index.md", "# Examples\n")
    assert (
        examples.pages(tmp_path)["examples/note-ipynb.md"]
        == "# note.ipynb\n\n## Here\n\n\n```python\nx = 1\ny = 2\n```"
    )
    assert examples.homes(tmp_path)["examples/deep/job.yaml"] == "examples/deep/job-yaml.md"


def test_pages_know_their_files() -> None:
    assert source("contributing.md") == "CONTRIBUTING.md"
    assert source("index.md") == "docs/index.md"  # where the README leads, too
    assert source("how-to/slurm.md") == "docs/how-to/slurm.md"
    assert source("examples/train-py.md") == "examples/train.py"


def test_other_files_become_pages() -> None:
    assert {commands.NAME, *OUTSIDE.values()} <= set(made())
