"""Which worker of a host failed first: by records, exit codes, and leaving without a word."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster.hosts.peers import Failure
from paceline.cluster.launcher.verdict import FailureSearch, pick_first_failure
from paceline.cluster.launcher.worker import describe_end
from paceline.timings import SupervisorTimings

TIMINGS = SupervisorTimings(culprit=5.0, echo=20.0, last_words=1.0, left=5.0, slack=0.2)


@dataclass
class Worker:
    """A worker as far as the search looks at it; `ended` so many seconds ago."""

    rank: int
    records: list[dict[str, Any]] = field(default_factory=list)
    ended_at: float | None = None
    exit_code: int = 0
    sent_signals: set[int] = field(default_factory=set)
    streams: Any = (
        None,
        SimpleNamespace(get_tail=lambda: "Traceback (most recent call last):\nE: x"),
    )

    def __post_init__(self) -> None:
        self.ended_at = None if self.ended_at is None else time.time() - self.ended_at

    def has_reported(self, event: str) -> bool:
        return any(record["event"] == event for record in self.records)


def failed(kind: str = "ValueError", *, ago: float = 1.0, is_echo: bool = False) -> dict[str, Any]:
    return {"event": "failed", "type": kind, "is_echo": is_echo, "time": time.time() - ago}


JOINED = {"event": "joined"}


def search(*workers: Worker, decided: bool = False) -> FailureSearch:
    return FailureSearch("box", workers, lambda: decided, timings=TIMINGS)  # type: ignore[arg-type]


def rank(found: Failure | None) -> int | None:
    return None if found is None else found.rank


def test_nobody_has_failed() -> None:
    found = search(
        Worker(0, [JOINED]), Worker(1, [JOINED], ended_at=9.0, sent_signals={signal.SIGTERM})
    )
    assert found.find_first_failure(1.0) is None and not found.has_sign


def test_a_culprit_is_named_once_it_has_had_the_time() -> None:
    found = search(Worker(0, [failed()], ended_at=0.5, exit_code=1), Worker(1))
    assert [rank(found.find_first_failure(now)) for now in (1.0, 5.9, 6.1)] == [
        None,
        None,
        0,
    ] and found.has_sign


def test_a_culprit_that_has_not_ended_gets_a_moment_for_its_words() -> None:
    found = search(Worker(0, [failed()]), Worker(1))
    assert [rank(found.find_first_failure(now)) for now in (1.0, 6.9, 7.1)] == [None, None, 0]


def test_an_echo_waits_longer_and_gives_way_to_the_cause() -> None:
    workers = [
        Worker(0, [failed("WorkerLost", ago=3.0, is_echo=True)], ended_at=2.0, exit_code=1),
        Worker(1),
    ]
    found = search(*workers)
    assert found.find_first_failure(1.0) is None and found.find_first_failure(7.0) is None
    workers[1].records.append(failed(ago=0.0))
    workers[1].ended_at, workers[1].exit_code = time.time(), 1
    assert rank(found.find_first_failure(7.1)) == 1  # and nobody is left to be waited for


def test_all_have_ended() -> None:
    assert (
        rank(search(Worker(0, [failed()], ended_at=0.5, exit_code=1)).find_first_failure(1.0)) == 0
    )


@pytest.mark.parametrize(
    ("ago", "others", "decided", "named"),
    [(9.0, 1, False, 0), (1.0, 1, False, None), (1.0, 1, True, 0), (9.0, 0, False, 0)],
)
def test_who_leaves_without_a_word(
    ago: float, others: int, decided: bool, named: int | None
) -> None:
    """It is to blame if others train well after it left, also on other hosts, or the job has
    failed anyway.
    """
    leaver = Worker(0, [JOINED], ended_at=ago)
    found = search(leaver, *[Worker(1, [JOINED])] * others, decided=decided)
    failure = found.find_failure(leaver)  # type: ignore[arg-type]
    assert rank(failure) == named and (failure is None or "left in the middle" in failure.words)


@pytest.mark.parametrize(
    ("ago", "records", "named"), [(9.0, [JOINED], 0), (1.0, [JOINED], None), (9.0, [], None)]
)
def test_who_never_came_to_a_run_that_others_are_in(
    ago: float, records: list[dict[str, Any]], named: int | None
) -> None:
    leaver = Worker(0, [], ended_at=ago)
    failure = search(leaver, Worker(1, records)).find_failure(leaver)  # type: ignore[arg-type]
    assert rank(failure) == named and (
        failure is None or "before it joined the run" in failure.words
    )


def test_who_never_came_to_a_run_is_not_to_blame_where_others_fail() -> None:
    leaver = Worker(0, [], ended_at=9.0)
    assert (
        search(
            leaver, Worker(1, [JOINED, failed()], ended_at=1.0, exit_code=1), decided=True
        ).find_failure(leaver)
        is None
    )  # type: ignore[arg-type]


def test_who_ends_by_an_exit_code_of_its_own_is_no_echo() -> None:
    """Such as of a script that calls `sys.exit(3)`, and whose run can't be closed at exit as
    others are in the middle of theirs.
    """
    for code, is_echo in ((1, True), (3, False), (134, True)):
        worker = Worker(0, [failed("Mismatch", is_echo=True)], ended_at=1.0, exit_code=code)
        failure = search(worker).find_failure(worker)  # type: ignore[arg-type]
        assert failure is not None and (failure.code, failure.is_echo) == (code, is_echo)


def test_the_exit_code_of_a_worker_that_had_to_be_ended() -> None:
    worker = Worker(
        0,
        [failed("SystemExit") | {"code": 3}],
        ended_at=1.0,
        exit_code=143,
        sent_signals={signal.SIGTERM},
    )
    failure = search(worker).find_failure(worker)  # type: ignore[arg-type]
    assert failure is not None and (failure.code, failure.words) == (
        3,
        "failed with exit code 3 (SystemExit)",
    )


def test_who_closed_its_run_has_not_failed() -> None:
    leaver = Worker(0, [JOINED, {"event": "closed"}], ended_at=9.0)
    assert search(leaver, Worker(1, [JOINED])).find_failure(leaver) is None  # type: ignore[arg-type]


def test_what_is_said_of_a_failure() -> None:
    worker = Worker(3, [failed()], ended_at=1.0, exit_code=7)
    failure = search(worker).find_failure(worker)  # type: ignore[arg-type]
    assert failure is not None and (failure.rank, failure.host, failure.code) == (3, "box", 7)
    assert failure.words == "failed with exit code 7 (ValueError)" and failure.tail.endswith("E: x")


def died(number: int, code: int, age: float) -> Failure:
    return Failure(number, "box", code, describe_end(code), False, age, "")


def test_of_deaths_that_come_together_the_signal_is_the_cause() -> None:
    first, second = died(0, 1, 1.1), died(1, 137, 1.0)
    assert (
        pick_first_failure([first, second], 0.2) is second
        and pick_first_failure([first, died(1, 137, 0.5)], 0.2) is first
    )
    # how libraries answer to another's death
    assert pick_first_failure([first, died(1, 128 + signal.SIGABRT, 1.0)], 0.2) is first
