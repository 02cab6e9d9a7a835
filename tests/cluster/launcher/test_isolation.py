"""What is tried in a process of its own: its errors come back, and nothing else of it."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import psutil
import pytest

from paceline.cluster.launcher.isolation import AttemptFailed, attempt_in_copy
from paceline.errors import NotationError


def test_nothing_of_it_stays_here():
    kept: list[int] = []
    attempt_in_copy(lambda: kept.append(1))
    assert kept == []


def test_an_error_of_ours_comes_back():
    def refuse() -> NoReturn:
        raise NotationError("wrong \N{SNOWMAN}" * 20_000)

    with pytest.raises(AttemptFailed) as caught:
        attempt_in_copy(refuse)
    assert (
        caught.value.kind == "NotationError" and str(caught.value) == "wrong \N{SNOWMAN}" * 20_000
    )


@pytest.mark.parametrize(
    "end",
    [lambda: os._exit(3), lambda: sys.exit(4), lambda: int("x"), lambda: os.kill(os.getpid(), 9)],
)
def test_other_ends_tell_nothing_and_leave_no_process(end):
    before = psutil.Process().children()
    attempt_in_copy(end)
    assert psutil.Process().children() == before
