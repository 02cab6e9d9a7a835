"""Views that come to a worker through a pipe, and what they end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from paceline.cluster.control.commands import (
    ASK_COMMAND,
    CommandPipe,
    Member,
    Roster,
    make_worker_number,
    wait_for_question,
)


def roster(number: int, *workers: int, broken: bool = False) -> Roster:
    return Roster(
        number, tuple(Member(worker, 0, "box", "127.0.0.1") for worker in workers), broken
    )


class Launcher:
    """The other end of the pipe."""

    def __init__(self) -> None:
        heard, self.told = os.pipe()
        self.orders = CommandPipe(heard)
        self.tripped: list[int] = []  # the latest view that was known then

    def arm(self, number: int, *needed: int) -> None:
        self.orders.watch_breaking_views(
            number, frozenset(needed), lambda: self.tripped.append(self.orders.latest_view)
        )

    def tell(self, *views: Roster) -> None:
        os.write(self.told, b"".join(view.dump() for view in views))
        assert self.orders.wait_for_newer_view(views[-1].number - 1, 60.0) is not None


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    found = Launcher()
    yield found
    os.close(found.told)


def test_a_worker_s_number_tells_its_port() -> None:
    assert Member(make_worker_number(77, 40_123), 0, "box", "10.0.0.1").port == 40_123
    assert make_worker_number(1, 40_123) != make_worker_number(2, 40_123)


def test_a_roster_is_its_line() -> None:
    one = Roster(3, (Member(make_worker_number(5, 9), 1, "böx", "::1"),), broken=True)
    assert Roster.load(one.dump()) == one and one.dump().endswith(b"\n")


def test_a_view_without_somebody_needed_ends_the_waits_before_it_is_shown(
    launcher: Launcher,
) -> None:
    launcher.arm(1, 10, 11)
    launcher.tell(roster(2, 10, 11, 12))
    assert launcher.tripped == []  # somebody has come
    launcher.tell(roster(3, 10, 12))
    assert launcher.tripped == [2]  # then view 3 was not known yet


def test_a_view_that_says_that_groups_broke_ends_them_too(launcher: Launcher) -> None:
    launcher.arm(1, 10)
    launcher.tell(roster(2, 10, broken=True))
    assert launcher.tripped == [0]  # no view was known yet


def test_what_came_before_arming_counts_and_what_is_older_does_not(launcher: Launcher) -> None:
    launcher.tell(roster(2, 10), roster(3, 10, 11))
    launcher.arm(2, 10, 11)
    assert launcher.tripped == []
    launcher.arm(1, 10, 11)
    assert launcher.tripped == [3]


def test_waits_end_in_time(launcher: Launcher) -> None:
    launcher.arm(1, 10)
    assert (
        launcher.orders.wait_for_newer_view(1, 0.1) is None
        and launcher.orders.wait_for_breaking_view(0.1) is None
    )
    threading.Timer(
        0.1, lambda: os.write(launcher.told, roster(2, 10).dump() + roster(3, 11).dump())
    ).start()
    found = launcher.orders.wait_for_breaking_view(60.0)
    assert found is not None and found.number == 3


def test_who_waits_for_a_view_that_breaks_hears_of_one_that_does_not(launcher: Launcher) -> None:
    launcher.arm(1, 10)
    launcher.tell(roster(2, 10))
    threading.Timer(0.1, lambda: os.write(launcher.told, roster(3, 10, 11).dump())).start()
    assert (
        launcher.orders.wait_for_breaking_view(0.1, 2) is None
        and launcher.orders.wait_for_breaking_view(60.0, 2) is None
    )
    assert launcher.orders.latest_view == 3
    launcher.tell(roster(4, 10, broken=True))
    found = launcher.orders.wait_for_breaking_view(60.0, 4)
    assert found is not None and found.number == 4


def test_it_is_asked_where_it_is() -> None:
    asked = threading.Event()
    heard, told = os.pipe()
    orders = CommandPipe(heard, asked.set)
    os.write(told, b'{"ask": true}\n')
    assert asked.wait(60.0) and orders.latest_view == 0
    os.close(told)


def test_a_worker_that_is_told_nothing_else_is_asked_too() -> None:
    heard, told = os.pipe()
    assert not wait_for_question(heard, 0.01)
    os.write(told, ASK_COMMAND)
    assert wait_for_question(heard, 60.0) and not wait_for_question(heard, 0.01)
    os.close(told)
    assert not wait_for_question(heard, 0.01)  # the launcher is gone
    os.close(heard)
