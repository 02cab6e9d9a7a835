"""The numbers of a token bucket, and links between networks that are thrown away: their rates,
in both directions, changed while in use.
"""

from __future__ import annotations

import pytest
from pyroute2 import IPRoute

from paceline.errors import ResourceError
from paceline.lab import links
from paceline.lab.description import Description, Host, Rack
from paceline.lab.spaces import NamespaceSet
from tests.harness.labs import measure

SLOW = pytest.mark.slow
TURNS = 20
MOST = 1.1  # of a rate: what has waited in a buffer may come in the moment that is measured
HEADERS = 1448 / 1514  # the part of a full packet that is payload


def share(cluster, source, target, rate):
    """The part of a rate that is carried for a moment."""
    return measure(cluster, source, target, 0.3) / rate / HEADERS


def limit_by_hand(cluster, rate):
    """Limit the links of two hosts by buckets of a millisecond, in tc's own numbers."""
    for seat in cluster.hosts:
        cluster.limit(seat.number, None, None)
        for space, interface in ((seat.space, links.INTERFACE), (cluster._switch_space, seat.port)):
            links.set_queue(
                space,
                interface,
                "tbf",
                rate=rate // 8,
                burst=max(rate // 8000, 16_384),
                limit=rate // 100,
            )


def check_filled(cluster, other, way, rate, least):
    """One of many short turns carries between `least` of the rate and all of it, or half of what a
    link limited by hand does.

    A bucket is filled for a millisecond at most: what a link can't send in that time, as others
    have the processors, is lost to it. So a busy machine may spoil all turns, and spoils those of
    `other`, which are made in between, as much.
    """
    found, by_hand = [], []
    for turn in range(TURNS):
        found.append(share(cluster, *way, rate))
        if least < found[-1] < MOST:
            return
        if not turn:
            limit_by_hand(other, rate)
        by_hand.append(share(other, 0, 1, rate))
    assert max(by_hand) / 2 < max(found) and min(found) < MOST, (
        f"carried {found}, and limited by hand {by_hand}"
    )


def test_addresses_are_private_and_different():
    addresses = [links.host_address(number) for number in range(600)]
    assert (
        len(set(addresses)) == 600
        and addresses[0] == "10.77.0.1"
        and addresses[254] == "10.77.0.255"
        and addresses[255] == "10.77.1.0"
    )
    assert all(address.startswith("10.77.") for address in addresses)


def test_a_bucket_holds_a_millisecond_and_some_packets():
    assert links.compute_bucket(10**9) == {
        "rate": 125_000_000,
        "burst": 125_000,
        "limit": 6_375_000,
    }
    assert links.compute_bucket(10**6) == {
        "rate": 125_000,
        "burst": 16_384,
        "limit": 262_144 + 16_384,
    }
    assert links.compute_bucket(34 * 10**9)["limit"] < 2**32


# Beside four busy processes a link of 10 Gbit/s carries from a quarter to a half. It carries an
# eighth if it takes bytes for bits, and less than a fifth with a hundredth of its bucket. At 1
# Gbit/s an eighth of the bucket carries less than two thirds.
LEAST = {10**7: 0.9, 10**8: 0.9, 10**9: 0.75, 10**10: 0.25}


@pytest.mark.parametrize(
    "rate", [10**9, *(pytest.param(rate, marks=SLOW) for rate in (10**7, 10**8, 10**10))]
)
def test_a_link_is_filled(pair, rate):
    check_filled(pair(bandwidth=rate), pair(), (0, 1), rate, LEAST[rate])


@SLOW
def test_up_and_down_are_limited_apart(pair):
    cluster, other = pair(bandwidth="1gbit"), pair()
    cluster.limit(0, "100mbit", "300mbit")
    check_filled(cluster, other, (0, 1), 10**8, 0.9)
    check_filled(cluster, other, (1, 0), 3 * 10**8, 0.9)
    cluster.limit(0, None, None)
    check_filled(cluster, other, (0, 1), 10**9, 0.75)  # what the other may receive


@SLOW
def test_a_rack_shares_its_uplink(build):
    hosts = tuple(Host(name, up=5 * 10**8, down=5 * 10**8) for name in ("a", "b", "c"))
    cluster = build(
        description=Description("r", hosts, (Rack("x", ("a", "b"), up=2 * 10**8, down=10**8),))
    )
    other = build(hosts=2)
    # the first one inside
    for way, rate in (((0, 1), 5 * 10**8), ((0, 2), 2 * 10**8), ((2, 1), 10**8)):
        check_filled(cluster, other, way, rate, 0.9)


def buckets(space, interface):
    """What the kernel says of the token buckets at this interface: their rates in bytes a
    second, and how much may wait.
    """

    def read():
        with IPRoute() as ip:
            index = ip.link_lookup(ifname=interface)[0]
            options = [
                entry.get_attr("TCA_OPTIONS")
                for entry in ip.get_qdiscs(index=index)
                if entry.get_attr("TCA_KIND") == "tbf"
            ]
        return [
            (found["rate"], found["limit"])
            for found in (each.get_attr("TCA_TBF_PARMS") for each in options)
        ]

    return space.call_inside(read)


@pytest.mark.parametrize("rate", [10**7, 10**10])
def test_a_limit_is_set_in_both_directions_until_it_is_taken_away(pair, rate):
    """Quick links are limited by the kernel's word: a busy machine carries less than their rate
    without a limit, too.
    """
    cluster = pair(bandwidth=rate)
    wanted = links.compute_bucket(rate)
    ends = [
        (cluster.hosts[0].space, links.INTERFACE),
        (cluster._switch_space, cluster.hosts[0].port),
    ]
    assert [buckets(*end) for end in ends] == [[(rate // 8, wanted["limit"])]] * 2
    cluster.limit(0, None, None)
    assert [buckets(*end) for end in ends] == [[], []]


def test_what_the_kernel_refuses_is_named(able):
    space = NamespaceSet.make_namespaces(["net"])
    try:
        with pytest.raises(
            ResourceError, match="the kernel refused the queueing discipline nonesuch"
        ):
            links.set_queue(space, "lo", "nonesuch")
    finally:
        space.close()
