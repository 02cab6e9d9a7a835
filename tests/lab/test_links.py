"""The numbers of a token bucket, and links between networks that are thrown away: their rates, in both directions, changed while in use."""

from __future__ import annotations

import pytest

from paceline.errors import ResourceError
from paceline.lab import links
from paceline.lab.description import Description, Host, Rack
from paceline.lab.spaces import Space
from tests.harness.labs import measure

SLOW = pytest.mark.slow
HEADERS = 1448 / 1514  # the part of a full packet that is payload


def share(cluster, source, target, rate, seconds=1.0):
    """What is carried of a rate, at best in twenty tries: a busy machine may be too slow to fill a link, and never makes one quicker."""
    best = 0.0
    for _ in range(20):
        best = max(best, measure(cluster, source, target, seconds) / rate / HEADERS)
        if best > 0.9:
            break
    return best


def test_addresses_are_private_and_different():
    addresses = [links.address(number) for number in range(600)]
    assert len(set(addresses)) == 600 and addresses[0] == "10.77.0.1" and addresses[254] == "10.77.0.255" and addresses[255] == "10.77.1.0"
    assert all(address.startswith("10.77.") for address in addresses)


def test_a_bucket_holds_a_millisecond_and_some_packets():
    assert links.shape(10**9) == {"rate": 125_000_000, "burst": 125_000, "limit": 6_375_000}
    assert links.shape(10**6) == {"rate": 125_000, "burst": 16_384, "limit": 262_144 + 16_384}
    assert links.shape(34 * 10**9)["limit"] < 2**32


@pytest.mark.parametrize("rate", [10**9, *(pytest.param(rate, marks=SLOW) for rate in (10**7, 10**8, 10**10))])
def test_a_link_is_filled(pair, rate):
    cluster = pair(bandwidth=rate)
    seconds = 1.0 if rate > 10**8 else 2.0
    low = 0.9 if rate < 10**9 else 0.5  # the machine may be too busy for more
    found = share(cluster, 0, 1, rate, seconds)
    cluster.limit(0, None, None)
    cluster.limit(1, None, None)
    possible = share(cluster, 0, 1, rate, seconds) if found <= low else 1.0  # of this machine, without a limit
    assert low * min(possible, 1.0) < found < 1.1


@SLOW
def test_up_and_down_are_limited_apart(pair):
    cluster = pair(bandwidth="1gbit")
    cluster.limit(0, "100mbit", "300mbit")
    assert 0.9 < share(cluster, 0, 1, 1e8) < 1.1
    assert 0.9 < share(cluster, 1, 0, 3e8) < 1.1
    cluster.limit(0, None, None)
    assert 0.5 < share(cluster, 0, 1, 1e9) < 1.1  # what the other may receive


@SLOW
def test_a_rack_shares_its_uplink(build):
    hosts = tuple(Host(name, up=5 * 10**8, down=5 * 10**8) for name in ("a", "b", "c"))
    cluster = build(description=Description("r", hosts, (Rack("x", ("a", "b"), up=2 * 10**8, down=10**8),)))
    assert 0.9 < share(cluster, 0, 1, 5e8) < 1.1  # inside
    assert 0.9 < share(cluster, 0, 2, 2e8) < 1.1
    assert 0.9 < share(cluster, 2, 1, 1e8) < 1.1


def test_what_the_kernel_refuses_is_named(able):
    space = Space.make(["net"])
    try:
        with pytest.raises(ResourceError, match="the kernel refused the queueing discipline nonesuch"):
            links.queue(space, "lo", "nonesuch")
    finally:
        space.close()
