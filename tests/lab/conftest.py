"""Clusters for tests: built on this machine, or the test is skipped with the reason why none can
be.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import lab
from paceline.lab import kernel
from paceline.lab.hosts import Cluster
from tests.harness import nursery
from tests.harness.labs import left, traces


@pytest.fixture(scope="session")
def able() -> None:
    """A lab can run here."""
    reason = kernel.find_missing()
    if reason:
        pytest.skip(f"no lab can run here: {reason}")


@pytest.fixture(autouse=True)
def _forked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers, workers and servers are forked with torch in them, unless the test is marked
    `real_processes`.
    """
    if not request.node.get_closest_marker("real_processes"):
        monkeypatch.setattr(
            "paceline.lab.hosts.subprocess",
            SimpleNamespace(**{**vars(subprocess), "Popen": nursery.on_host}),
        )


@pytest.fixture
def quotas(able: None) -> None:
    """Hosts can have quotas here."""
    lacking = [
        ability
        for ability in kernel.try_abilities()
        if ability.name.startswith("control group") and ability.reason
    ]
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
