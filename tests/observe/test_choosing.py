"""Which run a report is of, where its name or folder is given, or nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import UsageError
from paceline.observe.choosing import choose_run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def begun(name: str, at: int, root: str = "runs") -> None:
    """A run whose last line was written at this time."""
    path = Path(root, name, "metrics.jsonl")
    path.parent.mkdir(parents=True)
    path.write_text("")
    os.utime(path, (at, at))


def test_the_newest() -> None:
    for name, at in (("a", 1000), ("c", 3000), ("b", 2000)):
        begun(name, at)
    Path("runs", "later").mkdir()
    assert choose_run(None) == Path("runs/c")


def test_none_at_all(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=rf"there are no runs in {tmp_path}/runs: say which folder you mean"
    ):
        choose_run(None)


def test_by_folder_or_by_name() -> None:
    begun("a", 1000)
    begun("b", 1000, root="elsewhere")
    assert [choose_run(Path(asked)) for asked in ("runs/a", "a", "elsewhere/b")] == [
        Path("runs/a"),
        Path("runs/a"),
        Path("elsewhere/b"),
    ]


def call(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["paceline", "report", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert call(monkeypatch) == 2
    assert capsys.readouterr().err.startswith("paceline: there are no runs in ")
    begun("a", 1000)
    begun("b", 2000)
    assert call(monkeypatch) == 0
    assert capsys.readouterr().out.startswith("b has not ended")
    assert call(monkeypatch, "a") == 0
    assert capsys.readouterr().out.startswith("a has not ended")
    for wrong in ("c", "runs/c"):
        assert call(monkeypatch, wrong) == 2
        assert (
            capsys.readouterr().err
            == "paceline: there is no run folder runs/c; runs in runs: a, b\n"
        )
