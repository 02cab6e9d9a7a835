"""Goodput: the time of all workers, divided into parts that add up exactly."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest

from paceline.record.outcome.goodput import (
    GOODPUT_PARTS,
    EarlierStarts,
    add_times,
    compute_percent,
    divide_time,
    make_goodput_fields,
    read_earlier_starts,
)
from paceline.record.outcome.worker_time import WorkerSeconds, WorkerTime


def make_time(began: float) -> WorkerTime:
    zeros = dict.fromkeys(("compute", "exchange", "wait", "data"), 0.0)
    return WorkerTime(
        began, replaces=False, step=lambda: 0, is_in_turn=lambda: False, waited=lambda: 0.0,
        step_seconds=lambda: zeros, open_seconds=lambda: zeros,
    )  # fmt: skip


def test_parts_add_up_to_the_time_of_a_worker() -> None:
    parts = divide_time(WorkerSeconds(20.0, 2.0, 1.0, 0.5, 0.25, (10.0, 2.0, 1.5, 0.5)))
    assert {name: value / 1e6 for name, value in parts.items()} == {
        "useful": 10, "start": 2, "data": 0.5, "waiting": 1.5, "exchange": 2, "checkpoint": 1,
        "recovery": 0.5, "repeated": 0.25, "idle": 2.25,
    }  # fmt: skip


def test_they_add_up_exactly_whatever_was_measured() -> None:
    chance = random.Random(1)
    for _ in range(200):
        seconds = [chance.expovariate(1) for _ in range(9)]
        worker = WorkerSeconds(*seconds[:5], tuple(seconds[5:]))
        parts = divide_time(worker)
        assert sum(parts.values()) == round(1e6 * worker.present)
        assert min(parts.values()) >= 0 and tuple(parts) == GOODPUT_PARTS
        percent = compute_percent(parts)
        assert sum(round(100 * value) for value in percent.values()) == 10_000


def test_percent_of_nothing() -> None:
    assert {*compute_percent(add_times([])).values()} == {0.0}


def test_workers_are_added_up() -> None:
    worker = WorkerSeconds(4.0, 1.0, 0.0, 0.0, 0.0, (2.0, 0.0, 0.0, 0.0))
    fields = make_goodput_fields([worker] * 3, EarlierStarts(), own=make_time(time.time()))
    assert fields["worker_seconds"] == 12
    assert fields["seconds"]["useful"] == 6 and fields["percent"]["useful"] == 50
    assert fields["restarts"] == fields["restart_seconds"] == 0


def write_live(path: Path, until: float) -> Path:
    seconds = dict.fromkeys(GOODPUT_PARTS, 0.0) | {"useful": 20.0, "waiting": 4.0, "start": 2.0}
    goodput = {"seconds": seconds, "heals": 1, "heal_seconds": 2.0, "restart_seconds": 3.0}
    unrecorded = {"compute": 1.0, "exchange": 0.0, "wait": 0.5, "data": 0.0}
    live = {"time": until, "unrecorded": unrecorded}
    path.write_text(json.dumps({"goodput": goodput, "live": live}))
    return path


def test_the_earlier_start_of_a_job(tmp_path: Path) -> None:
    """Two workers. The last file is of 100, the start ended at 103, the next one began at 110."""
    now = time.time()
    live = write_live(tmp_path / "live.json", now - 10)
    earlier = read_earlier_starts(live, now - 30, [(now - 7, "killed")], 2)
    lines = [{"step": 8, "seconds": {"compute": 2.0, "wait": 0.25}}, {"step": 9, "loss": 1.0}]
    earlier.move_repeated(lines)
    worker = WorkerSeconds(1.0, 0.0, 0.0, 0.0, 0.0, (1.0, 0.0, 0.0, 0.0))
    fields = make_goodput_fields([worker] * 2, earlier, own=make_time(now))
    seconds = fields["seconds"]
    # 2 workers x (2 s of the line and 1 s without one) are repeated, and 0.75 s of waiting
    assert seconds["useful"] == pytest.approx(20 - 6 + 2)
    assert seconds["waiting"] == pytest.approx(4 - 1.5)
    assert seconds["repeated"] == pytest.approx(6 + 1.5 + 2 * 3, abs=0.01)
    assert seconds["recovery"] == pytest.approx(2 * 7, abs=0.1)
    assert fields["worker_seconds"] == pytest.approx(26 + 2 * 10 + 2, abs=0.1)
    assert (fields["heals"], fields["restarts"]) == (1, 1)
    assert fields["restart_seconds"] == pytest.approx(3 + 7, abs=0.1)


def test_what_was_trained_twice_is_moved_once(tmp_path: Path) -> None:
    now = time.time()
    earlier = read_earlier_starts(write_live(tmp_path / "live.json", now), now, [(now, "x")], 2)
    for _ in range(2):
        earlier.move_repeated([])
    assert earlier.parts["repeated"] == 3_000_000
    # no more than there is
    earlier.move_repeated([{"seconds": {"compute": 1e9}}])
    assert earlier.parts["useful"] == 0 and earlier.parts["repeated"] == 21_000_000


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"goodput": 1}', '{"goodput": {"seconds": []}}'])
def test_a_file_that_can_not_be_read(tmp_path: Path, text: str) -> None:
    """Then the time since the first start is known, but not what was done in it."""
    now = time.time()
    (tmp_path / "live.json").write_text(text)
    earlier = read_earlier_starts(tmp_path / "live.json", now - 20, [(now - 5, "killed")], 2)
    earlier.move_repeated([{"seconds": {"compute": 1.0}}])
    worker = WorkerSeconds(0.0, 0.0, 0.0, 0.0, 0.0, (0.0,) * 4)
    fields = make_goodput_fields([worker] * 2, earlier, own=make_time(now))
    assert fields["worker_seconds"] == pytest.approx(40, abs=0.1)
    assert fields["seconds"]["useful"] == 0
