"""What advice would gain follows from what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.observe.advice import collect_remarks, explain_no_advice
from paceline.observe.facts import read_facts
from paceline.record.folder import RunFolder
from paceline.unequal.stragglers.causes import CAUSES
from tests.harness.finished_runs import QUIET, finished

EXCHANGE = {"compute": 0.06, "exchange": 0.04, "wait": 0.0, "data": 0.0}
WAIT = {"compute": 0.06, "exchange": 0.0, "wait": 0.04, "data": 0.0}
WORK = [{"seconds": 0.02, "late": 0.0}, {"seconds": 0.1, "late": 1.0}]
LATE = [dict.fromkeys(CAUSES, 0.0), dict.fromkeys(CAUSES, 0.0) | {"compute": 0.08}]
STOLEN = [dict.fromkeys(CAUSES, 0.0), dict.fromkeys(CAUSES, 0.0) | {"stolen": 0.08}]
LINK = {
    "step": 9,
    "hosts": ["B"],
    "rate": 1e6,
    "usual": 1e7,
    "words": "the link of B carries 8 Mbit/s",
}


def gains(
    tmp_path: Path, parts: dict[str, float] = QUIET, **changes: Any
) -> list[tuple[float | None, bool, str]]:
    found = collect_remarks(read_facts(RunFolder(finished(tmp_path, parts, **changes))))
    assert all(remark.words for remark in found)
    return [
        (None if remark.gain is None else round(remark.gain, 3), remark.most, remark.of)
        for remark in found
    ]


def test_exchange(tmp_path: Path) -> None:
    assert gains(tmp_path, EXCHANGE) == [(0.2, False, "step")]
    assert gains(tmp_path / "via", EXCHANGE, sync="AllReduce(via='ring')") == [
        (0.2, False, "step"),
        (0.4, True, "step"),
    ]
    axes = {"tensor": {"seconds": 0.03, "within": 1.0, "between": 0.0}}
    assert gains(tmp_path / "axis", EXCHANGE, axes=axes) == [(0.3, True, "step")]


def test_shares_by_speed_gain_what_is_waited_for(tmp_path: Path) -> None:
    even = 2 / (1 / 0.02 + 1 / 0.1)
    assert gains(tmp_path, WAIT, work=WORK, late=LATE) == [
        (round((0.1 - even) / 0.1, 3), False, "step")
    ]


def test_shares_that_differ_already(tmp_path: Path) -> None:
    # the second is slower by less than its time says
    loader = {"num_workers": 0, "shares": [10, 30]}
    even = 40 / (10 / 0.02 + 30 / 0.1)
    assert gains(tmp_path, WAIT, work=WORK, late=LATE, loader=loader) == [
        (round((0.1 - even) / 0.1, 3), False, "step")
    ]


def test_another_cause_gains_at_most_what_it_takes(tmp_path: Path) -> None:
    assert gains(tmp_path, WAIT, work=WORK, late=STOLEN) == [(0.8, True, "step")]


def test_workers_with_the_same_samples(tmp_path: Path) -> None:
    places = [{"tensor": 0}, {"tensor": 1}]
    assert gains(tmp_path, WAIT, work=WORK, late=LATE, mesh={"tensor": 2}, places=places) == [
        (0.8, True, "step")
    ]


def test_data_checkpoints_and_the_rest_of_the_run(tmp_path: Path) -> None:
    assert gains(tmp_path, {"compute": 0.06, "exchange": 0.0, "wait": 0.0, "data": 0.04}) == [
        (0.4, True, "step")
    ]
    saved = {"count": 4, "stall_seconds": 2.0, "write_seconds": 1.8}
    assert gains(tmp_path / "saves", seconds=20.0, checkpoints=saved) == [(0.1, True, "run")]
    assert gains(tmp_path / "more", seconds=20.0, checkpoints=saved | {"background": 4}) == [
        (0.05, False, "run")
    ]
    assert gains(tmp_path / "outside", seconds=100.0) == [(0.9, True, "run")]


@pytest.mark.parametrize(
    ("advice", "gain", "expected"), [("int8", 1.25, [(0.2, False, "step")]), ("", None, [])]
)
def test_links(
    tmp_path: Path, advice: str, gain: float | None, expected: list[tuple[float, bool, str]]
) -> None:
    assert gains(tmp_path, links=[LINK | {"advice": advice, "gain": gain}]) == expected


def test_no_advice_has_its_reason(tmp_path: Path) -> None:
    facts = read_facts(RunFolder(finished(tmp_path)))
    assert collect_remarks(facts) == [] and explain_no_advice(facts).startswith(
        "Nothing stands out"
    )
