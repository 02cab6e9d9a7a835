"""What `start` opens: trackers as the script or the command line asks for them, and what is
missing is said before anything begins.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

import paceline as pl
from paceline.errors import UsageError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="needs tensorboard"
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def logs(**options: object) -> Path:
    with pl.start(name="mine", device="cpu", **options) as run:  # type: ignore[arg-type]
        run.log(x=1.0)
    return Path("runs/mine")


def test_the_script_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    folder = logs(report_to="tensorboard")
    assert len(list((folder / "tensorboard").iterdir())) == 1
    assert "paceline: tensorboard: tensorboard --logdir runs\n" in capsys.readouterr().err
    assert json.loads((folder / "summary.json").read_text())["logged"] == {"x": 1.0}


@pytest.mark.parametrize(("given", "there"), [("none", False), ("tensorboard:other", True)])
def test_the_command_line_replaces_it(
    given: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_REPORT_TO", given)
    folder = logs(report_to=["tensorboard"])
    assert not (folder / "tensorboard").exists()
    assert Path("other/mine").exists() == there


def test_what_is_missing_is_said_before_anything_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "wandb" else found(name, *rest),
    )
    with pytest.raises(UsageError, match=r"pip install 'paceline\[wandb\]'"):
        logs(report_to=["tensorboard", "wandb"])
    assert not Path("runs").exists()


def test_a_run_that_only_shows_its_layout_is_reported_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PACELINE_LAYOUT", "layouts")
    logs(report_to="tensorboard")
    assert not list(Path().rglob("*tfevents*"))
