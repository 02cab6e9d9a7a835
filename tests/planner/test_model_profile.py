"""Profiles: predictions between measured steps, files, and what several processes measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.errors import UsageError
from paceline.planner.model_profile import (
    FIRST_STEP_BYTES,
    format_profile,
    join_processes,
    parse_profile,
)
from tests.harness.plans import BATCH, make_condition, make_profile


def test_a_measured_step_is_predicted_as_it_was_measured() -> None:
    condition = make_condition()
    for step in condition.steps:
        assert condition.predict_step(step.samples) == step


def test_times_between_measured_steps_lie_on_a_line() -> None:
    condition = make_condition(fixed=0.002, each=0.001, optimizer=0.004)
    step = condition.predict_step(24)
    assert step.forward + step.backward == pytest.approx(0.002 + 0.024)
    assert step.optimizer == pytest.approx(0.004)
    assert condition.predict_step(128).seconds == pytest.approx(0.002 + 0.128 + 0.004)


def test_no_time_falls_below_zero() -> None:
    condition = make_condition(fixed=-0.007)
    assert condition.predict_step(0.5).forward == 0.0


def test_the_nearest_condition_is_found_by_threads_first() -> None:
    conditions = (make_condition(1, 4), make_condition(2, 1), make_condition(4, 1))
    profile = make_profile(conditions)
    assert profile.find_condition(1, 4) is conditions[0]
    assert profile.find_condition(3, 1) in conditions[1:]
    assert profile.find_condition(8, 1) is conditions[2]


def test_a_file_holds_all_of_a_profile() -> None:
    profile = make_profile()
    assert parse_profile(format_profile(profile)) == profile


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"form": "paceline profile", "version": 0}', "[" * 10**5],
)
def test_other_files_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"mine.json isn't a profile"):
        parse_profile(text, "mine.json")


def test_a_profile_without_steps_is_refused() -> None:
    profile = make_profile((replace(make_condition(), steps=()),))
    with pytest.raises(UsageError, match="no steps"):
        parse_profile(format_profile(profile))


def test_processes_are_joined_by_their_medians() -> None:
    measured = [make_condition(3, each=each) for each in (0.001, 0.002, 0.009)]
    joined = join_processes(measured)
    assert joined.predict_step(32) == make_condition(3, each=0.002).predict_step(32)
    two = join_processes(measured[:2])
    assert two.predict_step(32).seconds == pytest.approx(
        make_condition(3, each=0.0015).predict_step(32).seconds
    )


def test_what_a_step_needs_for_a_short_time() -> None:
    """A part of it comes with any step, and the rest is in proportion to samples."""
    profile = make_profile()
    states, kept = sum(profile.state_bytes), 1000 * BATCH
    large = replace(profile, peak_bytes=states + kept + round(FIRST_STEP_BYTES) + 1_000_000)
    assert large.predict_passing_bytes(BATCH) == FIRST_STEP_BYTES + 1_000_000
    assert large.predict_passing_bytes(BATCH / 4) == FIRST_STEP_BYTES + 250_000
    small = replace(profile, peak_bytes=states + kept + 5_000_000)
    assert small.predict_passing_bytes(BATCH / 4) == 5_000_000
    # The peak isn't known.
    assert profile.predict_passing_bytes(BATCH) == 0
