"""Who took part is kept by number: the lost with what they did, and those who came in their
place.
"""

from __future__ import annotations

import pytest

from paceline.record.outcome.members import RunMembers
from paceline.trace import STEP_PARTS


def test_the_drawing() -> None:
    members = RunMembers()
    members.set_workers([0, 1, 2], ["A", "A", "B"])
    for step in range(1, 321):
        for number in (0, 1, *[2] * (step <= 90), *[3] * (step >= 200)):
            members.add_step(number, step, [0.01 * (number + 1), 0.0, 0.0, 0.0], [10, number])
        if step == 200:
            members.set_workers([0, 1, 3], ["A", "A", "B"])
    found = members.to_fields()
    assert [
        (
            each["worker"],
            each["host"],
            each["rank"],
            each["steps"],
            each["first_step"],
            each["last_step"],
        )
        for each in found
    ] == [
        (0, "A", 0, 320, 1, 320),
        (1, "A", 1, 320, 1, 320),
        (2, "B", None, 90, 1, 90),
        (3, "B", 2, 121, 200, 320),
    ]
    assert [each["seconds"]["compute"] for each in found] == pytest.approx([0.01, 0.02, 0.03, 0.04])
    assert [each["bytes_sent"] for each in found] == [
        {"within": 10, "between": number} for number in range(4)
    ]


def test_looks_have_what_was_since_the_last_one_and_lose_nothing() -> None:
    members = RunMembers()
    members.set_workers([0, 1], [])
    assert members.take_look(0.0) is None  # nothing was done
    members.add_step(0, 1, [0.1, 0.2, 0.3, 0.4], [0, 0])
    members.add_lateness({0: 0.05, 1: 0.0})
    assert members.take_look(0.5) == {
        "0": [1, 0.1, 0.2, 0.3, 0.4, 0.05],
        "1": [0, *[0.0] * len(STEP_PARTS), 0.0],
    }
    for worker in (0, 1):
        members.add_step(worker, 2, [0.1, 0.2, 0.3, 0.4], [0, 0])
    assert members.take_look(1.0) is None  # too soon
    # and those who ask before it is time take nothing from the next look
    assert members.to_fields()[0]["steps"] == 2
    members.add_step(0, 3, [0.1, 0.2, 0.3, 0.4], [0, 0])
    assert members.take_look(1.6) == {
        "0": [2, 0.2, 0.4, 0.6, 0.8, 0.0],
        "1": [1, 0.1, 0.2, 0.3, 0.4, 0.0],
    }
    (first, second) = members.to_fields()
    assert (first["steps"], first["late"], second["steps"]) == (3, pytest.approx(0.05 / 3), 1)
    assert first["host"] is None and first["rank"] == 0


def test_looks_become_rarer() -> None:
    members, looks = RunMembers(), 0
    for second in range(1, 20_001):
        for worker in (0, 1):
            members.add_step(worker, second, [1.0, 0.0, 0.0, 0.0], [0, 0])
        looks += members.take_look(float(second)) is not None
    assert 1000 < looks < 2500
    assert members.to_fields()[0]["seconds"]["compute"] == pytest.approx(1.0)


def test_one_worker_alone_needs_no_looks() -> None:
    members = RunMembers()
    members.add_step(0, 1, [1.0, 0.0, 0.0, 0.0], [0, 0])
    assert members.take_look(5.0) is None
    assert members.to_fields()[0]["steps"] == 1
