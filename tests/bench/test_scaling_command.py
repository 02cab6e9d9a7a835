"""What the command `paceline bench scaling` makes of its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from paceline.bench import scaling, scaling_command
from paceline.errors import UsageError


def call(*words: str) -> None:
    app = typer.Typer()
    app.command()(scaling_command.scaling)
    get_command(app).main(list(words), standalone_mode=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "give either a training script"),
        (("train.py", "--read", "runs/a"), "give either a training script"),
        (("--read", "runs/a", "--workers", "1,2"), "so --workers has no effect"),
        (
            ("--read", "runs/a", "--batch-option", "--batch"),
            "so --batch-option has no effect",
        ),
        (("train.py", "--lab", "nowhere"), "no ready-made cluster nowhere"),
    ],
)
def test_mistakes(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(UsageError) as caught:
        call(*words)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("words", "kind"),
    [((), "strong"), (("--batch-option", "--b"), "both"), (("--kind", "weak"), "weak")],
)
def test_a_request_has_what_was_written(
    words: tuple[str, ...], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(
        scaling, "measure_scaling", lambda request, show, note: asked.append(request) or 0
    )
    call(
        "train.py",
        "--workers",
        "3,1",
        "--rounds",
        "2",
        "--steps",
        "7",
        "--seconds",
        "8",
        "--folder",
        "f",
        *words,
        "--",
        "--b",
        "4",
    )
    assert (
        asked[0].kind == kind
        and asked[0].workers == (1, 3)
        and asked[0].args == ("--b", "4")
        and asked[0].folder == Path("f")
    )
    assert (asked[0].rounds, asked[0].steps, asked[0].seconds) == (2, 7, 8.0)
