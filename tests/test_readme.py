"""What README, docs and examples say is true: scripts run, commands parse, names and links exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

import paceline
from paceline.cli import app
from paceline.lab.kernel import missing
from tests.harness import nursery

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.name: page.read_text() for page in PAGES}
BRISK = "import tests.harness.brisk\n"
EXAMPLES = [ROOT / "examples" / name for name in ("surrogate.py", "train.py")]  # tests/examples has the others


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def command_lines() -> list[str]:
    """Lines of consoles, and commands between backticks, that begin with `paceline `; mentions without a script left out."""
    consoles = [
        line[2:].split("  #")[0].strip() for text in TEXTS.values() for block in blocks(text, "console") for line in block.splitlines()
    ]
    quoted = [code for text in TEXTS.values() for code in re.findall(r"`(paceline [^`]+)`", text)]
    mentions = {line for line in quoted if line.startswith(("paceline run", "paceline lab run")) and ".py" not in line}
    return sorted({line for line in consoles + quoted if line.startswith("paceline ")} - mentions)


def parse(words: list[str]) -> None:
    """Let typer parse a command line to its end, without doing what it says."""
    command: Any = typer.main.get_command(app)
    context = command.make_context("paceline", words)
    while hasattr(command, "commands"):
        name, command, words = command.resolve_command(context, [*context._protected_args, *context.args])
        context = command.make_context(name, words, parent=context)


def run_script(path: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    return nursery.run_script(path, folder)


def test_the_script_of_the_readme_is_the_example() -> None:
    _, _, script = (ROOT / "examples" / "train.py").read_text().partition('"""\n\n')
    assert blocks(TEXTS["README.md"], "python") == [script]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_run_alone(path: Path, tmp_path: Path) -> None:
    answer = run_script(path, tmp_path)
    assert answer.returncode == 0, answer.stderr
    assert [folder.name for folder in tmp_path.iterdir()] == ["runs"]


def documents() -> Iterator[Any]:
    """The pages of docs; those whose scripts build clusters are slow, and need a machine that can."""
    for page in (page for page in PAGES if page.parent.name == "docs"):
        building = "lab.cluster(" in TEXTS[page.name]
        marks = [pytest.mark.lab, pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing())] if building else []
        yield pytest.param(page, id=page.name, marks=marks)


@pytest.mark.jobs
@pytest.mark.parametrize("page", documents())
def test_scripts_in_docs_run(page: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(BRISK + (ROOT / "examples" / "train.py").read_text())
    for number, block in enumerate(blocks(TEXTS[page.name], "python")):
        (tmp_path / f"block{number}.py").write_text(BRISK * ("torch" in block) + block)
        answer = run_script(tmp_path / f"block{number}.py", tmp_path)
        assert answer.returncode == 0, f"{block}\n{answer.stderr}"


@pytest.mark.jobs
def test_the_first_script_of_checkpoints_resumes(tmp_path: Path) -> None:
    (script, *_) = blocks(TEXTS["checkpoints.md"], "python")
    (tmp_path / "train.py").write_text(BRISK + script.replace("run.epochs(3)", "run.epochs(2)"))
    assert "nothing to resume, training begins anew" in run_script(tmp_path / "train.py", tmp_path).stderr
    answer = run_script(tmp_path / "train.py", tmp_path)
    assert "resumed from runs/circle/checkpoints/step-00000128 at step 128" in answer.stderr, answer.stderr


@pytest.mark.slow
def test_the_readme_s_command_runs(tmp_path: Path) -> None:
    """`paceline run --workers 2 examples/train.py`, as the README has it."""
    words = [sys.executable, "-m", "paceline.cli", "run", "--workers", "2", str(ROOT / "examples" / "train.py")]
    answer = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=200)
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
    answer = subprocess.run([sys.executable, "-m", "paceline.cli", *shlex.split(line)[1:]], capture_output=True, text=True, check=False)
    assert answer.returncode == 0 and len(answer.stdout.splitlines()) > 4


def test_names_of_run_exist(tmp_path: Path) -> None:
    said = {name for text in TEXTS.values() for name in re.findall(r"\brun\.(?!py\b)([a-z_]+)", text)}
    with paceline.start(folder=str(tmp_path)) as run:
        assert [name for name in sorted(said) if not hasattr(run, name)] == []


def test_public_names_exist() -> None:
    said = {name for text in TEXTS.values() for name in re.findall(r"\bpl\.(\w+)", text)}
    assert said <= set(paceline.__all__)


def anchors(text: str) -> set[str]:
    """What GitHub makes of the headings of a page."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_what_an_anchor_is() -> None:
    text = "# Who hangs?\n\n## `paceline run`\n```console\n# no heading\n```\n### 2 hosts x 2, 1 Gbit/s\n"
    assert anchors(text) == {"who-hangs", "paceline-run", "2-hosts-x-2-1-gbits"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", TEXTS[page.name]):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name} leads to {link}"
        assert not anchor or anchor in anchors(target.read_text()), f"{page.name} leads to {link}, and there is no such heading"


def test_every_page_is_found_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(docs/(\w[\w-]*\.md)", TEXTS["README.md"]))
    assert linked == {page.name for page in PAGES if page.parent.name == "docs"}


def test_the_readme_is_short_and_begins_with_what_one_does_first() -> None:
    assert len(TEXTS["README.md"].splitlines()) < 150
    headings = re.findall(r"^## (.+)$", TEXTS["README.md"], re.MULTILINE)
    assert headings[:3] == ["Install", "The script", "Two workers"]


def test_figures_of_the_readme_stand_where_they_come_from() -> None:
    section = TEXTS["README.md"].partition("## What it comes to")[2].partition("\n## ")[0]
    bullets = [line for line in section.splitlines() if line.startswith(("- ", "  "))]
    said = {number for line in bullets for number in re.findall(r"(?<![\w.=])\d+(?:\.\d+)?(?![\w.)])", line)}
    assert len(said) > 12
    assert [number for number in sorted(said) if not re.search(rf"(?<![\d.]){re.escape(number)}(?![\d.]\d)", TEXTS["results.md"])] == []
    assert section.count("\n- ") == 5 and section.count("![") == 1


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    said = {name for text in TEXTS.values() for name in re.findall(r"(?:`|^    )make ([a-z]+)", text, re.MULTILINE)}
    assert {"demo", "test"} <= said <= targets


def test_what_is_refused_on_gpus_is_said_in_those_words() -> None:
    (said,) = re.findall(r"`(runs on GPUs [^`]+)`", TEXTS["gpus.md"])
    assert said in (ROOT / "paceline" / "session" / "elastic" / "adapter.py").read_text()


def test_variables_are_read() -> None:
    source = "".join((ROOT / "paceline" / "cluster" / name).read_text() for name in ("discover.py", "launcher/launch.py"))
    said = {name for text in TEXTS.values() for name in re.findall(r"PACELINE_[A-Z]+", text)}
    assert said and [name for name in said if f'"{name}"' not in source] == []
