"""What a machine can do: tried, and where it can't, said with the reason."""

from __future__ import annotations

import pytest

from paceline.errors import ResourceError
from paceline.lab import kernel, links
from paceline.lab.description import Description, Host
from paceline.lab.spaces import NamespaceSet


def test_everything_is_tried(able):
    found = {ability.name: ability for ability in kernel.try_abilities()}
    assert [name for name, ability in found.items() if ability.needed] == [
        "namespaces",
        "veth, bridge",
        "tbf",
    ]
    assert kernel.find_missing() == "" and not any(
        ability.reason for ability in found.values() if ability.needed
    )


def test_what_is_missing_has_its_reason(monkeypatch):
    def refuse(*kinds: object) -> None:
        raise ResourceError("the kernel says no")

    monkeypatch.setattr(NamespaceSet, "make_namespaces", refuse)
    found = {ability.name: ability.reason for ability in kernel.try_abilities()}
    assert found["namespaces"] == found["tbf"] == "the kernel says no"
    assert kernel.find_missing() == (
        "namespaces: the kernel says no; veth, bridge: the kernel says no; tbf: the kernel says no"
    )
    with pytest.raises(
        ResourceError, match=r"a lab needs root, .* use `paceline lab run`, which enters one"
    ):
        kernel.check_rights()


@pytest.mark.parametrize("has", [True, False])
def test_delay(able, monkeypatch, has):
    def queue(space: NamespaceSet, interface: str, kind: str, **options: int) -> None:
        if not has:
            raise ResourceError("no")

    monkeypatch.setattr(links, "set_queue", queue)
    hosts = (Host("a", delay=0.01),)
    if has:
        assert kernel.check_abilities(Description("d", hosts)) == []
        return
    with pytest.raises(
        ResourceError, match="d has links with delay, and this kernel has no netem: load the module"
    ):
        kernel.check_abilities(Description("d", hosts))
    assert kernel.check_abilities(Description("d", hosts, needs_delay=False)) == [
        "this kernel has no netem: the links of d have no delay here"
    ]
    assert kernel.check_abilities(Description("d", (Host("a"),))) == []
