"""Samples per second by number of servers: the table of a plan, between its counts and beyond."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.planner.budgets.sample_rates import SampleRates, parse_sample_rates, read_sample_rates

TABLE = "[samples_per_second]\n2 = 100.0\n4 = 180.0\n8 = 260.0\n"


@pytest.mark.parametrize(
    ("servers", "rate"),
    [(0, 0), (1, 50), (2, 100), (3, 140), (4, 180), (6, 220), (8, 260), (10, 300)],
)
def test_between_the_counts_and_beyond(servers: int, rate: float) -> None:
    assert parse_sample_rates(TABLE, "p").find_rate(servers) == pytest.approx(rate)


def test_it_never_falls_beyond_and_never_grows_faster_than_servers() -> None:
    assert SampleRates({1: 100.0, 2: 90.0}, "p").find_rate(10) == 90
    assert SampleRates({1: 10.0, 2: 90.0}, "p").find_rate(4) == 180
    assert SampleRates({4: 100.0}, "p").find_rate(6) == 150


def test_workers_of_a_server() -> None:
    rates = parse_sample_rates("workers = [2, 2]\n" + TABLE, "p")
    assert rates.largest == 4 and rates.find_rate(2) == 180
    assert parse_sample_rates("workers = [2, 4]\n" + TABLE, "p", 4).find_rate(2) == 260
    assert rates.find_rate(3) == 220 and "interpolated" in rates.describe(3)
    assert "extrapolated from 2 and 4" in rates.describe(9)
    assert rates.describe(2) == "p"
    assert "proportion" in parse_sample_rates("[samples_per_second]\n4 = 1.0\n", "p").describe(8)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("x", "isn't TOML"),
        ("a = 1\n", "no table"),
        ("[samples_per_second]\n", "no table"),
        ("[samples_per_second]\n0 = 1.0\n", "isn't a rate"),
        ("[samples_per_second]\nmany = 1.0\n", "isn't a rate"),
        ("[samples_per_second]\n1 = -1.0\n", "isn't a rate"),
        ("[samples_per_second]\n1 = nan\n", "isn't a rate"),
        ("[samples_per_second]\n1 = true\n", "isn't a rate"),
        ("[samples_per_second]\n1 = 'fast'\n", "isn't a rate"),
        ("workers = 'two'\n" + TABLE, "isn't a list"),
        ("workers = []\n" + TABLE, "different numbers"),
        ("workers = [1, 2]\n" + TABLE, "--workers-per-server"),
        ("workers = [0]\n" + TABLE, "at least 1"),
    ],
)
def test_what_is_refused_in_one_line(text: str, fault: str) -> None:
    with pytest.raises(UsageError, match=fault) as caught:
        parse_sample_rates(text, "p")
    assert "\n" not in str(caught.value)


def test_a_file(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(TABLE)
    assert read_sample_rates(tmp_path / "plan.toml").largest == 8
    with pytest.raises(UsageError, match="can't be read"):
        read_sample_rates(tmp_path / "none.toml")
