"""Clusters as data: what TOML says, what ships, and what is refused with the place of the
mistake.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import lab
from paceline.errors import UsageError
from paceline.lab import description
from paceline.lab.description import (
    Description,
    Host,
    Rack,
    find_cluster,
    make_regular,
    parse_rate,
    read,
    ready,
    spell_rate,
)

NUMBERS = st.integers() | st.floats() | st.sampled_from([10**30, -(10**400), 0, -1, True, 2**40])
WORDS = st.text(max_size=8) | st.sampled_from(
    ["1gbit", "9" * 400 + "gbit", "20ms", "9" * 400 + "s", "2GB", "block", "a\nb", "host0"]
)
VALUES = st.recursive(
    NUMBERS | WORDS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(WORDS, inner, max_size=2),
    max_leaves=4,
)
HOSTS = st.dictionaries(
    st.sampled_from(["name", "workers", "processors", "memory", "bandwidth", "up", "down", "delay"])
    | WORDS,
    VALUES,
)
RACKS = st.dictionaries(
    st.sampled_from(["name", "hosts", "up", "bandwidth"]) | WORDS, VALUES, max_size=3
)
CONTENT = st.fixed_dictionaries(
    {"host": st.lists(HOSTS, min_size=1, max_size=2) | VALUES},
    optional={
        "rack": st.lists(RACKS, max_size=2),
        "all": HOSTS | VALUES,
        "name": VALUES,
        "placement": VALUES,
        "delays": VALUES,
    },
)


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text)
    return path


class TestRead:
    def test_everything_that_can_be_said(self, tmp_path):
        text = """
            name = "all"
            placement = "round-robin"
            delays = "where-possible"
            [all]
            workers = 2
            bandwidth = "1gbit"
            processors = 1.5
            [[host]]
            [[host]]
            name = "b"
            workers = 3
            up = "10mbit"
            memory = "2GB"
            delay = "20ms"
            processors = 0.5
            [[rack]]
            name = "r"
            hosts = ["b"]
            bandwidth = "5gbit"
            down = "1.5gbit"
        """
        assert read(written(tmp_path, text)) == Description(
            "all",
            (
                Host("host0", 2, 1.5, None, 10**9, 10**9, None),
                Host("b", 3, 0.5, 2 * 10**9, 10**7, 10**9, 0.02),
            ),
            (Rack("r", ("b",), 5 * 10**9, 15 * 10**8),),
            "round-robin",
            needs_delay=False,
        )

    def test_what_is_left_out(self, tmp_path):
        assert read(written(tmp_path, "[[host]]")) == Description("mine", (Host("host0"),))

    def test_a_hosts_own_bandwidth_replaces_the_sides_of_all(self, tmp_path):
        host = read(written(tmp_path, '[all]\nup = "1mbit"\n[[host]]\nbandwidth = "2mbit"')).hosts[
            0
        ]
        assert (host.up, host.down) == (2 * 10**6, 2 * 10**6)

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ("host = 3", "mine.toml: host is 3, and has to be tables, each headed by [[host]]"),
            ("", "there are 0 hosts, and there have to be 1 to 200: add [[host]] tables"),
            (
                "[[hosts]]",
                (
                    "mine.toml: there is no key hosts; possible: all, delays, host, name, "
                    "placement, rack; did you mean host?"
                ),
            ),
            ("[all]\nworker = 1\n[[host]]", "there is no key all.worker; possible: "),
            (
                "[[host]]\nbandwith = '1gbit'",
                "there is no key host[0].bandwith; possible: bandwidth",
            ),
            (
                "[[host]]\nworkers = 0",
                "host[0].workers is 0, and has to be a whole number of at least 1",
            ),
            ("[[host]]\nworkers = true", "host[0].workers is True"),
            (
                "[[host]]\nprocessors = 0",
                "host[0].processors is 0, and has to be a number of cores, at least 0.01",
            ),
            ("[[host]]\nmemory = 5", "host[0].memory is 5, and has to be at least 1MiB"),
            (
                "[[host]]\nmemory = '5gb'",
                "host[0].memory is '5gb', and has to be a number with one of KB, MB",
            ),
            (
                "[[host]]\nbandwidth = '1 Gbit/s'",
                (
                    "host[0].bandwidth is '1 Gbit/s', and has to be a number with one of bit, "
                    "kbit, mbit, gbit"
                ),
            ),
            ("[[host]]\nup = '100gbit'", "host[0].up is 100gbit, and has to be 8kbit to 34gbit"),
            (
                "[[host]]\ndelay = 20",
                "host[0].delay is 20, and has to be a number with one of us, ms, s, such as '20ms'",
            ),
            ("[[host]]\nname = 'A b'", "a host is called 'A b'; names have small letters"),
            ("[[host]]\nname = 'a'\n[[host]]\nname = 'a'", "two hosts are called a"),
            ("placement = 'rr'\n[[host]]", "placement is 'rr'; possible: block, round-robin"),
            ("delays = 'no'\n[[host]]", "delays is 'no'"),
            (
                "[[host]]\n[[rack]]\nhosts = ['x']",
                "rack rack0 has a host x, which doesn't exist; possible: host0",
            ),
            (
                "[[host]]\n[[rack]]\nhosts = 'host0'",
                "rack[0].hosts is 'host0', and has to be a list of names",
            ),
            ("[[host]]\n[[rack]]", "rack rack0 has no hosts"),
            (
                "[[host]]\n[[rack]]\nhosts = ['host0']\n[[rack]]\nhosts = ['host0']",
                "host host0 is in rack rack0 and in rack rack1",
            ),
            ("name = 4\n[[host]]", "name is 4, and has to be text"),
            (
                "[[host]]\nworkers = 1000000000000000000000000000000",
                "host[0].workers is 1000000000000000000000000000000, and has to be",
            ),
            (
                "[[host]]\nworkers = 1001",
                "host[0].workers is 1001, and has to be a whole number of at least 1, at most 1000",
            ),
            (
                "[[host]]\nprocessors = 1e400",
                (
                    "host[0].processors is inf, and has to be a number of cores, "
                    "at least 0.01, at most 10000"
                ),
            ),
            ("[[host]]\nprocessors = nan", "host[0].processors is nan"),
            ("[[host]]\nprocessors = -1", "host[0].processors is -1"),
            ("[[host]]\nprocessors = 1e300", "host[0].processors is 1e+300"),
            (
                "[[host]]\nmemory = 1e400",
                "host[0].memory is inf, and has to be a number with one of KB, MB",
            ),
            (
                "[[host]]\nmemory = 1000000000000000000000000000000",
                "and has to be at least 1MiB, at most 1048576GiB",
            ),
            (
                "[[host]]\nmemory = '99999999999999999999GB'",
                "and has to be at least 1MiB, at most 1048576GiB",
            ),
            ("[[host]]\nmemory = true", "host[0].memory is True"),
            (
                f"[[host]]\nmemory = '{'9' * 400}GB'",
                f"host[0].memory is '{'9' * 59}..., and has to be at least 1MiB",
            ),
            (
                f"[[host]]\nbandwidth = '{'9' * 400}gbit'",
                f"host[0].bandwidth is {'9' * 60}..., and has to be 8kbit to 34gbit",
            ),
            ("[[host]]\nup = -1", "host[0].up is -1, and has to be 8kbit to 34gbit"),
            ("[[host]]\nup = inf", "host[0].up is inf, and has to be a number with one of bit"),
            ("[[host]]\ndelay = '61s'", "host[0].delay is '61s', and has to be at most 60s"),
            (f"[[host]]\ndelay = '{'9' * 400}s'", "and has to be at most 60s"),
            (
                f"[[host]]\nworkers = 0x{'f' * 5000}",
                "host[0].workers is a number of thousands of digits, and has to be",
            ),
            (f"[[host]]\nworkers = {'9' * 5000}", "isn't TOML: "),
            (f"host = {'[' * 5000}", "isn't TOML: "),
            ('[[host]]\n"a\\nb" = 1', "there is no key host[0].a b; possible"),
            ("placement = [1e400]\n[[host]]", "placement is '[inf]'; possible: block, round-robin"),
            ("name = ", "isn't TOML: "),
        ],
    )
    def test_mistakes(self, tmp_path, text, said):
        with pytest.raises(UsageError) as raised:
            read(written(tmp_path, text))
        assert said in str(raised.value) and "mine.toml" in str(raised.value)

    @given(st.data())
    def test_whatever_is_written_is_read_or_refused_in_a_line(self, data):
        """As TOML gives it: numbers of any size, tables where none belong, words that are almost
        right.
        """
        found = data.draw(CONTENT)
        try:
            cluster = description._TomlReader("mine.toml").read_description(found, "mine")
        except UsageError as error:
            text = str(error)
            assert text.startswith("mine.toml: ") and "\n" not in text and len(text) < 400
        else:
            assert cluster.workers <= 200 * 1000 and spell_rate(cluster.hosts[0].up)

    def test_a_file_that_is_not_there(self, tmp_path):
        with pytest.raises(
            UsageError,
            match=(
                r"none.toml can't be read \(No such file or directory\); ready-made clusters: "
                r"ethernet-1g, "
            ),
        ):
            find_cluster(str(tmp_path / "none.toml"))


class TestReady:
    def test_what_ships(self):
        assert description.list_ready_clusters() == [
            "ethernet-1g",
            "racks",
            "two-hosts",
            "unequal",
            "wan-100m",
        ]
        shapes = {
            name: [host.workers for host in ready(name).hosts]
            for name in description.list_ready_clusters()
        }
        assert shapes == {
            "ethernet-1g": [1] * 4,
            "racks": [1] * 4,
            "two-hosts": [2, 2],
            "unequal": [1] * 3,
            "wan-100m": [1] * 4,
        }
        assert all(
            host.up == host.down == 10**9
            for name in ("ethernet-1g", "two-hosts", "racks")
            for host in ready(name).hosts
        )
        assert [(host.up, host.delay) for host in ready("wan-100m").hosts] == [
            (10**8, 0.02)
        ] * 4 and not ready("wan-100m").needs_delay
        assert (
            len({host.processors for host in ready("unequal").hosts}) > 1
            and len({host.up for host in ready("unequal").hosts}) > 1
        )
        assert [rack.hosts for rack in ready("racks").racks] == [
            ("left0", "left1"),
            ("right0", "right1"),
        ]

    def test_an_unknown_name(self):
        with pytest.raises(
            UsageError,
            match=r"there is no ready-made cluster two-host; possible: .*; did you mean two-hosts",
        ):
            find_cluster("two-host")

    def test_hosts_by_name_and_number(self):
        cluster = ready("unequal")
        assert (cluster.find("weak"), cluster.find("2"), cluster.workers) == (1, 2, 3)
        with pytest.raises(
            UsageError, match="there is no host 3 in unequal; possible: far, fast, weak"
        ):
            cluster.find("3")


def test_rates():
    assert [parse_rate(text) for text in ("1gbit", "100mbit", "2.5 gbit", "9600bit", 10**6)] == [
        10**9,
        10**8,
        25 * 10**8,
        9600,
        10**6,
    ]
    assert [spell_rate(value) for value in (10**9, 25 * 10**8, 10**8, 9600, None)] == [
        "1gbit",
        "2.5gbit",
        "100mbit",
        "9.6kbit",
        "unlimited",
    ]
    with pytest.raises(UsageError, match="the bandwidth is 7, and has to be 8kbit to 34gbit"):
        parse_rate(7)


class TestRegular:
    def test_equal_hosts(self):
        made = make_regular(
            2,
            3,
            placement="round-robin",
            bandwidth="1gbit",
            up="1mbit",
            processors=2,
            memory="1GiB",
            delay="1ms",
        )
        assert made.hosts == tuple(
            Host(f"host{number}", 3, 2, 2**30, 10**6, 10**9, 0.001) for number in range(2)
        )
        assert made.placement == "round-robin"
        assert make_regular(1, bandwidth=None).hosts == (Host("host0"),)

    def test_mistakes(self):
        with pytest.raises(UsageError, match="hosts is 0, and has to be 1 to 200"):
            make_regular(0)
        with pytest.raises(
            UsageError,
            match=r"there is no key bandwith; possible: bandwidth.*did you mean bandwidth",
        ):
            make_regular(2, bandwith="1gbit")

    def test_a_description_and_more(self):
        with pytest.raises(UsageError, match="hosts, bandwidth and a description are given"):
            lab.cluster(hosts=2, bandwidth="1gbit", description="two-hosts")
        assert (
            lab.cluster(description="two-hosts", placement="round-robin").description.placement
            == "round-robin"
        )


@pytest.mark.parametrize(
    ("host", "said"),
    [
        (Host("a", 0), "x: workers of host a is 0, and has to be at least 1"),
        (Host("a", processors=0), "processors of host a is 0, and has to be at least 0.01"),
        (Host("a", memory=1), "memory of host a is 1"),
        (Host("a", delay=-1), "delay of host a is -1"),
        (Host("a", up=1), "up of host a is 1, and has to be 8kbit to 34gbit"),
    ],
)
def test_objects_are_checked_too(host, said):
    with pytest.raises(UsageError, match=said):
        Description("x", (host,))
