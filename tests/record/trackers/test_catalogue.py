"""Names of trackers are read in every way that they may be written, and what is wrong with them
is said in a line.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

import pytest

from paceline.errors import UsageError
from paceline.record.trackers.catalogue import (
    REQUIRED_MODULES,
    TrackerSpec,
    check_trackers_installed,
    make_trackers,
    parse_trackers,
)

BOTH = (TrackerSpec("tensorboard"), TrackerSpec("wandb", "team/project"))


@pytest.mark.parametrize(
    "asked",
    [
        "tensorboard,wandb:team/project",
        " tensorboard, wandb:team/project",
        ["tensorboard", "wandb:team/project"],
    ],
)
def test_names_are_read(asked: str | Sequence[str]) -> None:
    assert parse_trackers(asked) == BOTH


@pytest.mark.parametrize("asked", [None, "none", ["none"], []])
def test_nowhere(asked: str | Sequence[str] | None) -> None:
    assert parse_trackers(asked) == ()


def test_what_stands_behind_the_colon_may_have_colons() -> None:
    assert parse_trackers("prometheus:0.0.0.0:9500") == (TrackerSpec("prometheus", "0.0.0.0:9500"),)
    assert str(parse_trackers("prometheus:0.0.0.0:9500")[0]) == "prometheus:0.0.0.0:9500"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("tensorbord", "did you mean tensorboard"),
        ("", "possible: mlflow, prometheus, tensorboard, wandb"),
        ("wandb,none", "'none' is unknown"),
        ("tensorboard,tensorboard:/logs", "names tensorboard twice"),
        (3, "is neither a name nor a list of names"),
        ([3], "is neither a name nor a list of names"),
        (b"wandb", "is neither a name nor a list of names"),
    ],
)
def test_what_is_wrong_is_said(asked: object, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        parse_trackers(asked)  # type: ignore[arg-type]


def test_what_is_not_installed_is_said_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("tensorboard", "prometheus_client") else found(name),
    )
    check_trackers_installed(())
    with pytest.raises(UsageError, match=r"pip install 'paceline\[tensorboard,prometheus\]'$"):
        check_trackers_installed(parse_trackers("tensorboard,prometheus:9500"))


def test_each_has_its_object_and_its_extra() -> None:
    assert [
        tracker.name for tracker in make_trackers([TrackerSpec(name) for name in REQUIRED_MODULES])
    ] == list(REQUIRED_MODULES)


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("wandb:a/b/c", "wandb:PROJECT or wandb:ENTITY/PROJECT"),
        ("wandb:a/", "wandb:PROJECT or wandb:ENTITY/PROJECT"),
        ("mlflow:http://127.0.0.1:5000", "export MLFLOW_TRACKING_URI=http://127.0.0.1:5000"),
        ("prometheus:here", "has no port"),
        ("prometheus:70000", "has no port"),
    ],
)
def test_details_that_can_not_be_are_refused(asked: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        make_trackers(parse_trackers(asked))
