"""A program that uses paceline keeps its types, and mistakes are found before anything runs:
mypy, once, on both.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from tests.harness.documents import ROOT

PROGRAMS = "tests/harness/programs"
SAID = re.compile(r"^(?P<path>[\w./]+):(?P<line>\d+): error: (?P<text>.*)$", re.MULTILINE)


@pytest.mark.jobs
def test_types_are_kept_and_mistakes_are_found() -> None:
    files = [f"{PROGRAMS}/typed_program.py", f"{PROGRAMS}/typed_mistakes.py"]
    given = ["--config-file", f"{PROGRAMS}/typed.ini", "--cache-dir", os.devnull]
    answer = subprocess.run(
        [sys.executable, "-m", "mypy", *given, *files],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    said = [
        (found["path"], int(found["line"]), found["text"]) for found in SAID.finditer(answer.stdout)
    ]
    wanted = {
        number: line.partition("  # ")[2]
        for number, line in enumerate((ROOT / files[1]).read_text().splitlines(), 1)
        if "  # " in line
    }
    assert len(wanted) > 20
    assert [each for each in said if each[0] != files[1]] == [], (
        "types that the program doesn't keep"
    )
    assert {line for _, line, _ in said} == set(wanted), answer.stdout
    assert [
        (line, text)
        for line, text in wanted.items()
        if not any(each[1] == line and text in each[2] for each in said)
    ] == []
