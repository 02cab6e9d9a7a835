"""What README, docs and examples say is true: examples run, commands parse, and names exist.

Blocks and links: tests/test_pages.py.
"""

from __future__ import annotations

import functools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer.main

import paceline
from paceline.cli import app
from tests.harness import nursery
from tests.harness.documents import PAGES, blocks, name, text
from tests.harness.documents import parse as parse_page

ROOT = Path(__file__).parent.parent
TEXTS = {name(page): text(page) for page in PAGES}
# tests/examples has the others
EXAMPLES = [ROOT / "examples" / name for name in ("surrogate.py", "train.py")]


def bodies(page: str, language: str) -> list[str]:
    """The blocks of a language on a page."""
    return [block.body for block in parse_page(TEXTS[page]) if block.language == language]


def command_lines() -> list[str]:
    """Lines of consoles, and commands between backticks, that begin with `paceline `; mentions
    without a script left out.
    """
    consoles = [line for page in PAGES for block in blocks(page) for line in block.commands]
    # which is made of docstrings
    written = [page for name, page in TEXTS.items() if name != "docs/modules.md"]
    quoted = [code for page in written for code in re.findall(r"`(paceline [^`]+)`", page)]
    mentions = {
        line
        for line in quoted
        if line.startswith(("paceline run", "paceline lab run", "paceline plan"))
        and ".py" not in line
    }
    return sorted(
        {line for line in consoles + quoted if line.startswith("paceline ")}
        - mentions
        - {"paceline lab"}
    )


@functools.cache
def commands() -> Any:
    """All commands, which typer makes anew each time it is asked."""
    return typer.main.get_command(app)


def parse(words: list[str]) -> None:
    """Let typer parse a command line to its end, without doing what it says."""
    command = commands()
    context = command.make_context("paceline", words)
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
        context = command.make_context(name, words, parent=context)


def run_script(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return nursery.run_script(path, folder)


def test_the_script_of_the_readme_is_the_example() -> None:
    text = (ROOT / "examples" / "train.py").read_text()
    (script,) = bodies("README.md", "py")
    imported, _, loop = script.partition("\n\n")
    assert f"\n{imported}\n" in text and text.endswith(f"\n\n{loop}")
    assert len(loop.splitlines()) == 9  # ten with the import


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run_alone(path: Path, tmp_path: Path) -> None:
    script, folder = tmp_path / path.name, tmp_path / "alone"
    # solving takes most of the time
    script.write_text(path.read_text().replace("count=60 * 16", "count=6 * 16"))
    folder.mkdir()
    answer = run_script(script, folder)
    assert answer.returncode == 0, answer.stderr
    assert [made.name for made in folder.iterdir()] == ["runs"]


@pytest.mark.jobs
def test_the_first_script_of_checkpoints_resumes(tmp_path: Path) -> None:
    (script, *_) = bodies("docs/checkpoints.md", "python")
    (tmp_path / "train.py").write_text(script.replace("run.epochs(3)", "run.epochs(2)"))
    assert (
        "nothing to resume, training begins anew"
        in run_script(tmp_path / "train.py", tmp_path).stderr
    )
    answer = run_script(tmp_path / "train.py", tmp_path)
    assert "resumed from runs/circle/checkpoints/step-00000128 at step 128" in answer.stderr, (
        answer.stderr
    )


@pytest.mark.slow
def test_the_readme_s_command_runs(tmp_path: Path) -> None:
    """`paceline run --workers 2 examples/train.py`, as the README has it, by programs that load
    torch as they do at a user's.
    """
    words = [
        sys.executable,
        "-m",
        "paceline.cli",
        "run",
        "--workers",
        "2",
        str(ROOT / "examples" / "train.py"),
    ]
    plain = os.environ | {"PYTHONPATH": str(ROOT)}
    answer = subprocess.run(
        words, cwd=tmp_path, env=plain, capture_output=True, text=True, check=False, timeout=200
    )
    assert answer.returncode == 0, answer.stderr
    assert "2 workers" in answer.stdout + answer.stderr


def test_there_are_commands() -> None:
    assert len(command_lines()) >= 6


@pytest.mark.parametrize("line", command_lines())
def test_commands_parse(line: str) -> None:
    parse(shlex.split(line)[1:])


@pytest.mark.jobs
def test_the_picture_of_the_readme() -> None:
    line = next(line for line in command_lines() if "--draw" in line)
    answer = subprocess.run(
        [sys.executable, "-m", "paceline.cli", *shlex.split(line)[1:]],
        capture_output=True,
        text=True,
        check=False,
    )
    assert answer.returncode == 0 and len(answer.stdout.splitlines()) > 4


def test_names_of_run_exist(tmp_path: Path) -> None:
    said = {
        name for page in TEXTS.values() for name in re.findall(r"\brun\.(?!py\b)([a-z_]+)", page)
    }
    with paceline.start(folder=str(tmp_path)) as run:
        assert [name for name in sorted(said) if not hasattr(run, name)] == []


def test_public_names_exist() -> None:
    said = {name for page in TEXTS.values() for name in re.findall(r"\bpl\.(\w+)", page)}
    assert said <= set(paceline.__all__)


def test_the_readme_leads_to_the_start_page() -> None:
    assert "](docs/index.md)" in TEXTS["README.md"]


def test_the_readme_is_short_and_begins_with_what_one_does_first() -> None:
    assert len(TEXTS["README.md"].splitlines()) < 121
    headings = re.findall(r"^## (.+)$", TEXTS["README.md"], re.MULTILINE)
    assert headings[:3] == ["Install", "The script", "Two workers"]
    # one picture, at the top
    assert re.findall(r"^!\[.*", TEXTS["README.md"], re.MULTILINE) == [
        TEXTS["README.md"].splitlines()[2]
    ]


def test_figures_of_the_readme_stand_where_they_come_from() -> None:
    section = TEXTS["README.md"].partition("## What it comes to")[2].partition("\n## ")[0]
    bullets = [line for line in section.splitlines() if line.startswith(("- ", "  "))]
    said = {
        number
        for line in bullets
        for number in re.findall(r"(?<![\w.=])\d+(?:\.\d+)?(?![\w.)])", line)
    }
    assert len(said) > 12
    results = TEXTS["docs/results.md"]
    assert [
        number
        for number in sorted(said)
        if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]\d)", results)
    ] == []
    assert section.count("\n- ") == 5


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    said = {
        name
        for page in TEXTS.values()
        for name in re.findall(r"(?:`|^    )make ([a-z]+)", page, re.MULTILINE)
    }
    assert {"demo", "test"} <= said <= targets


def test_what_is_refused_on_gpus_is_said_in_those_words() -> None:
    (said,) = re.findall(r"`(runs on GPUs [^`]+)`", TEXTS["docs/gpus.md"])
    assert said in (ROOT / "paceline" / "elastic" / "adapter.py").read_text()


def test_variables_are_read() -> None:
    source = "".join(
        (ROOT / "paceline" / "cluster" / name).read_text()
        for name in ("discover.py", "launcher/launch.py", "launcher/worker_commands.py")
    )
    said = {name for page in TEXTS.values() for name in re.findall(r"PACELINE_[A-Z_]+", page)}
    assert said and [name for name in said if f'"{name}"' not in source] == []
