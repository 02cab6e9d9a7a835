"""Lateness is what is above the usual, and is dealt to causes by what each took more than usual."""

from __future__ import annotations

import random

import numpy as np
import pytest

from paceline.record.logged.record import LogRecord
from paceline.trace import MEASURED_CAUSES, STEP_PARTS
from paceline.unequal.stragglers.causes import CAUSES, WORDS
from paceline.unequal.stragglers.lateness import (
    LatenessTotals,
    compute_lateness,
    find_latest_rank,
    stack_records,
)


def steps(*ranks: dict[str, float], times: int = 1) -> np.ndarray:
    """Steps in which each rank has these seconds by cause."""
    return np.array([[[rank.get(cause, 0.0) for cause in CAUSES] for rank in ranks]] * times)


def test_the_drawing() -> None:
    usual = {"compute": 40, "reading": 5}
    late = compute_lateness(
        steps(usual, usual, usual | {"collection": 4}, {"compute": 42, "reading": 25})
    )[0]
    assert late.sum(axis=1).tolist() == [0, 0, 4, 22]
    assert late[2].tolist() == [4 * (cause == "collection") for cause in CAUSES]
    assert late[3].tolist() == [
        20 * (cause == "reading") + 2 * (cause == "compute") for cause in CAUSES
    ]


@pytest.mark.parametrize("cause", CAUSES)
def test_each_cause_is_told(cause: str) -> None:
    alike = dict.fromkeys(CAUSES, 0.01)
    work = steps(alike, alike | {cause: 0.1}, alike)
    found = find_latest_rank(compute_lateness(work), range(3))
    assert (found.rank, found.cause, found.seconds) == (1, WORDS[cause], pytest.approx(0.09))


def test_less_of_one_makes_up_for_more_of_another() -> None:
    """Who reads longer and computes shorter is late by the difference, for its reading."""
    work = steps({"compute": 0.1}, {"compute": 0.08, "reading": 0.05}, {"compute": 0.1})
    assert compute_lateness(work)[0, 1].tolist() == pytest.approx(
        [0.03 * (cause == "reading") for cause in CAUSES]
    )


def test_on_crowded_machines_more_work_is_no_stolen_processor() -> None:
    """Each millisecond of work costs two that others have; rank 1 has ten more to do, and rank 2
    shares its processor with more.
    """
    usual = {"compute": 0.01, "stolen": 0.02}
    late = compute_lateness(
        steps(usual, {"compute": 0.02, "stolen": 0.04}, {"compute": 0.01, "stolen": 0.05}, usual)
    )[0]
    assert late[1].tolist() == pytest.approx([0.03, 0, 0, 0, 0]) and late[
        2
    ].tolist() == pytest.approx([0, 0, 0, 0.03, 0])


def test_causes_add_up_and_half_are_never_late() -> None:
    random.seed(3)
    for ranks in (1, 2, 3, 4, 7):
        work = np.array(
            [[[random.random() for _ in CAUSES] for _ in range(ranks)] for _ in range(50)]
        )
        late, own = compute_lateness(work), work.sum(axis=2)
        usual = np.sort(own, axis=1)[:, (ranks - 1) // 2 : (ranks - 1) // 2 + 1]
        assert np.allclose(late.sum(axis=2), np.maximum(own - usual, 0)) and (late >= 0).all()
        assert ((late.sum(axis=2) > 0).sum(axis=1) <= ranks // 2).all()


def test_compute_is_what_was_not_measured_as_something_else() -> None:
    seconds = {"compute": 0.1, "exchange": 9.0, "wait": 9.0, "data": 0.02}
    measured = {"reading": 15_000, "collection": 30_000, "stolen": 6000, "paging": 1000}
    record = LogRecord(
        1,
        1,
        0.0,
        8,
        [seconds[part] for part in STEP_PARTS],
        {},
        [measured[cause] for cause in MEASURED_CAUSES],
        [0, 0],
        {},
    )
    (found,) = stack_records([{4: record, 5: record}], [4, 5])
    assert dict(zip(CAUSES, found[1], strict=True)) == pytest.approx(
        {"compute": 0.068, "reading": 0.015, "collection": 0.03, "stolen": 0.006, "paging": 0.001}
    )


def test_totals_are_means_and_the_last_steps_are_kept() -> None:
    totals = LatenessTotals(last=10)
    first = compute_lateness(steps({}, {"stolen": 0.02}, {}, times=20))
    totals.add_steps(range(1, 21), [0, 1, 2], first)
    totals.add_steps(range(21, 31), [0, 1], compute_lateness(steps({}, {"paging": 0.04}, times=10)))
    means = totals.mean_lateness()
    assert means[1]["stolen"] == pytest.approx(0.02 * 20 / 30) and means[1][
        "paging"
    ] == pytest.approx(0.04 * 10 / 30)
    assert sum(means[0].values()) == sum(means[2].values()) == 0.0
    assert sorted(totals.recent_late_ranks()) == list(range(21, 31))
    assert [(each.rank, each.cause) for each in totals.recent_late_ranks()[30]] == [(1, "swapping")]
