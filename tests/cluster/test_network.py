"""What is known of the interfaces of this machine."""

from __future__ import annotations

import pytest

from paceline.cluster import network

pytestmark = pytest.mark.unit


def test_an_interface_that_goes_away_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    there, known = network.describe_interfaces(), network.list_interfaces()
    monkeypatch.setattr(network, "list_interfaces", lambda: {"gone0": "10.9.9.9", **known})
    assert [(one.name, one.address) for one in network.describe_interfaces()] == [
        (one.name, one.address) for one in there
    ]
