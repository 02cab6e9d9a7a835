"""A write in the background gives way to training, can be waited for, and tells what it failed
of.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest

from paceline.checkpoint.files.background import LOWEST_PRIORITY, BackgroundWrite, ReportBytes
from paceline.errors import CheckpointError


def test_it_runs_beside_and_takes_time() -> None:
    go = threading.Event()
    writing = BackgroundWrite("step 3", 10, lambda moved: go.wait(30), print)
    assert not writing.wait_until_ended(0.01) and writing.seconds == 0
    go.set()
    assert (
        writing.wait_until_ended(30) and writing.explain_failure() is None and writing.seconds > 0
    )


@pytest.mark.skipif(sys.platform != "linux", reason="threads have priorities of their own on Linux")
def test_it_gives_way_and_nobody_else_does() -> None:
    found = list[int]()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    writing = BackgroundWrite(
        "step 3", 10, lambda moved: found.append(os.getpriority(os.PRIO_PROCESS, 0)), print
    )
    assert writing.wait_until_ended(30) and found == [LOWEST_PRIORITY]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_a_failure_is_said_at_once_and_kept() -> None:
    said = list[str]()

    def fail(moved: ReportBytes) -> None:
        raise CheckpointError("step 3 was not saved: no")

    writing = BackgroundWrite("step 3", 10, fail, said.append)
    assert writing.wait_until_ended(30)
    failure = writing.explain_failure()
    assert str(failure) == "step 3 was not saved: no"
    assert said == [
        "step 3 was not saved: no. The next save raises this error, or else the end of the run"
    ]


def test_one_that_hangs_says_how_far_it_is() -> None:
    begun, go = threading.Event(), threading.Event()

    def crawl(moved: ReportBytes) -> None:
        moved(2_000_000)
        moved(500_000)
        begun.set()
        go.wait(30)

    writing = BackgroundWrite("step 3", 10_000_000, crawl, print)
    assert begun.wait(30) and not writing.wait_until_ended(0.01)
    failure = writing.explain_failure()
    go.set()
    assert "step 3 was not on the disk in time: 2.5 of 10.0 MB are written" in str(failure)
    assert "start(deadline=seconds)" in str(failure)
    assert writing.wait_until_ended(30) and writing.explain_failure() is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_ends_of_something_else_has_not_saved() -> None:
    def fail(moved: ReportBytes) -> Any:
        raise MemoryError

    writing = BackgroundWrite("step 3", 10, fail, print)
    assert writing.wait_until_ended(30)
    assert "step 3 was not saved: the thread that wrote it has ended" in str(
        writing.explain_failure()
    )
