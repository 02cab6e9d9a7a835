"""The run beneath a foreign strategy: what it refuses before it is open."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.bridges import bridge_run
from paceline.bridges.bridge_run import BridgeRun
from paceline.cluster.discover import Place
from paceline.errors import UsageError


def test_it_is_closed_at_first():
    bridge = BridgeRun("Fabric", {})
    assert not bridge.is_open and bridge.device is None
    with pytest.raises(UsageError, match="the run isn't open yet: Fabric opens it"):
        bridge.run  # noqa: B018
    bridge.close()  # does nothing


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cut": "shard(zero=3)"}, "--cut can't be honoured under Fabric"),
        ({"mesh": "data=2"}, "--mesh can't be honoured under Fabric"),
        ({"joining": True}, "a worker can't join in the middle of a run of Fabric"),
    ],
)
def test_what_a_launcher_asks_for_is_refused(changes, message, monkeypatch):
    monkeypatch.setattr(bridge_run, "discover_place", lambda: replace(Place(), **changes))
    with pytest.raises(UsageError, match=message):
        BridgeRun("Fabric", {})
