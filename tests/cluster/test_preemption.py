"""Where SIGTERM saves a checkpoint by default, and what a worker learns of it."""

from __future__ import annotations

import pytest

from paceline.cluster.discover import discover_place
from paceline.cluster.preemption import saves_on_term
from paceline.errors import PlaceError

SCHEDULERS = ("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "RAY_JOB_ID")


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_that_take_machines_away(name: str) -> None:
    assert saves_on_term({name: "1"})
    assert not saves_on_term({name: "1", "PACELINE_SAVE_ON_TERM": "0"})


def test_elsewhere_it_has_to_be_said() -> None:
    assert not saves_on_term({}) and saves_on_term({"PACELINE_SAVE_ON_TERM": "1"})


def test_anything_else_is_refused() -> None:
    with pytest.raises(PlaceError, match="PACELINE_SAVE_ON_TERM=yes has to be 0 or 1"):
        saves_on_term({"PACELINE_SAVE_ON_TERM": "yes"})


def test_what_a_worker_learns() -> None:
    place = discover_place({})
    assert (place.saves_on_term, place.grace_seconds, place.resumes) == (False, 30.0, False)
    place = discover_place(
        {
            "PACELINE_SAVE_ON_TERM": "1",
            "PACELINE_GRACE_SECONDS": "7.5",
            "PACELINE_RESUME": "1",
            "PACELINE_SAVE_REQUEST_FD": "9",
        }
    )
    assert (place.saves_on_term, place.grace_seconds, place.resumes) == (True, 7.5, True)
    assert place.save_request_fd == 9


@pytest.mark.parametrize("text", ["0", "-1", "soon", "inf"])
def test_a_grace_period_is_a_number_of_seconds(text: str) -> None:
    with pytest.raises(PlaceError, match="PACELINE_GRACE_SECONDS"):
        discover_place({"PACELINE_GRACE_SECONDS": text})
