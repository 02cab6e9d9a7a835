"""Clusters for tests: built on this machine, or the test is skipped with the reason why none can be."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import lab
from paceline.lab import kernel
from paceline.lab.hosts import Cluster
from tests.lab.traces import left, traces
from tests.launches import PRELOADED, ROOM


@pytest.fixture(scope="session")
def able() -> None:
    """A lab can run here."""
    reason = kernel.missing()
    if reason:
        pytest.skip(f"no lab can run here: {reason}")


@pytest.fixture(autouse=True)
def _preloaded(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are forked by their launchers where the test is marked so."""
    if request.node.get_closest_marker("preloaded"):
        path = tmp_path / "python"
        path.write_text(f'#!/bin/sh\nshift 2  # -m paceline\nexec {sys.executable} {" ".join(PRELOADED)} "$@"\n')
        path.chmod(0o755)
        monkeypatch.setattr("paceline.lab.running.sys", SimpleNamespace(executable=str(path)))
        monkeypatch.setenv(ROOM, " " * 4096)


@pytest.fixture
def quotas(able: None) -> None:
    """Hosts can have quotas here."""
    lacking = [ability for ability in kernel.abilities() if ability.name.startswith("control group") and ability.reason]
    if lacking:
        pytest.skip("; ".join(f"{ability.name}: {ability.reason}" for ability in lacking))


@pytest.fixture
def build(able: None) -> Iterator[Callable[..., Cluster]]:
    """`build(...)` is `lab.cluster(...)`, entered; nothing of it may be left after the test."""
    before = traces()
    with ExitStack() as held:
        yield lambda **options: held.enter_context(lab.cluster(**options))
    assert left(before) == set()


@pytest.fixture
def clean(able: None) -> Iterator[None]:
    """Nothing of any lab may be left after the test."""
    before = traces()
    yield
    assert left(before) == set()


@pytest.fixture
def pair(build: Callable[..., Cluster]) -> Callable[..., Cluster]:
    """`pair(...)` is a cluster of two hosts."""

    def make(**options: Any) -> Cluster:
        return build(hosts=2, **options)

    return make
