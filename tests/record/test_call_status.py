"""Statuses travel from the first worker to the caller: seldom, in full, and each run to a
display of its own.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.cluster.control.calls import CallChannel, make_channel
from paceline.cluster.discover import CallPlace, Place
from paceline.record.call_status import StatusRelay, StatusReports, make_status_display
from paceline.record.status_line import FinishedStep, StatusLine
from paceline.unequal.stragglers.lateness import RankLateness
from tests.harness.clocks import Clock

SECONDS = {"compute": 0.6, "exchange": 0.2, "wait": 0.1, "data": 0.1}


class Display:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def step(self, beat: FinishedStep, total: int | None) -> None:
        self.told.append((beat, total))

    def show(self) -> None:
        assert isinstance(self.told[-1][0], FinishedStep)

    def at(self, epoch: tuple[int, int] | None) -> None:
        self.told.append(epoch)

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        self.told.append((step, dict(values)))

    def late(self, latest: RankLateness, host: str, step: float) -> None:
        self.told.append((latest, host, step))

    def remark(self, text: str) -> None:
        self.told.append(text)

    def close(self, total: int | None) -> None:
        self.told.append(("closed", total))

    def beats(self) -> list[tuple[FinishedStep, int | None]]:
        """The steps that it was told, each with the total."""
        return [
            told
            for told in self.told
            if isinstance(told, tuple) and isinstance(told[0], FinishedStep)
        ]


def beat(step: int, **values: float) -> FinishedStep:
    return FinishedStep(step, step / 8, 64, values or {"loss": 1.0 / step}, SECONDS)


def pair() -> tuple[CallChannel, CallChannel]:
    mine, theirs = make_channel()
    return mine, CallChannel(theirs)


def drain(mine: CallChannel, relay: StatusRelay) -> None:
    while (message := mine.receive()) is not None:
        assert message.kind == "status"
        relay.show_report(message.fields)


def test_two_a_second_that_add_up_and_the_last_in_any_case() -> None:
    mine, theirs = pair()
    clock, shown = Clock(), Display()
    reports, relay = StatusReports(theirs, clock=clock), StatusRelay(lambda: shown)
    reports.remark("watched")
    for step in range(1, 11):
        reports.at((1, 2))
        reports.step(beat(step), 10)
        reports.show()
        if step == 4:
            reports.late(RankLateness(1, {"compute": 0.3}), "b", 0.5)
        drain(mine, relay)
        clock.now += 0.125
    reports.close(10)
    drain(mine, relay)
    relay.close()
    relay.close()
    beats = shown.beats()
    assert [each.step for each, _ in beats] == [1, 5, 9, 10] and {total for _, total in beats} == {
        10
    }
    assert [each.samples for each, _ in beats] == [64, 256, 256, 64]
    assert [round(each.seconds["compute"], 6) for each, _ in beats] == [0.6, 2.4, 2.4, 0.6]
    assert beats[1][0].values == {"loss": 0.2}
    assert (
        (RankLateness(1, {"compute": 0.3}), "b", 0.5) in shown.told
        and "watched" in shown.told
        and (1, 2) in shown.told
    )
    assert shown.told[-1] == ("closed", 10) and shown.told.count(("closed", 10)) == 1


def test_another_run_has_a_display_of_its_own() -> None:
    mine, theirs = pair()
    shown: list[Display] = []

    def make() -> Display:
        shown.append(Display())
        return shown[-1]

    relay = StatusRelay(make)
    for total in (3, 5):
        reports = StatusReports(
            CallChannel(socket.socket(fileno=socket.dup(theirs.fileno()))), clock=Clock()
        )
        reports.step(beat(1), total)
        reports.show()
        reports.close(total)
        drain(mine, relay)
    relay.close()
    assert [each.told[-1] for each in shown] == [("closed", 3), ("closed", 5)]


def test_a_caller_that_doesn_t_read_holds_no_step_up() -> None:
    mine, theirs = pair()
    clock, shown = Clock(), Display()
    reports = StatusReports(theirs, clock=clock)
    for step in range(1, 500):
        clock.now += 1.0
        reports.step(beat(step), 500)
        reports.show()
    drain(mine, StatusRelay(lambda: shown))
    clock.now += 1.0
    reports.step(beat(500), 500)
    reports.close(500)
    drain(mine, StatusRelay(lambda: shown))
    beats = [each for each, _ in shown.beats()]
    assert len(beats) < 499 and beats[-1].step == 500
    # those of reports that were dropped are in the next one
    assert sum(each.samples for each in beats) == 500 * 64


def test_many_values() -> None:
    mine, theirs = pair()
    shown = Display()
    reports = StatusReports(theirs, clock=Clock())
    reports.step(beat(1, loss=float("nan"), **{f"value{n}": 1.0 for n in range(10_000)}), None)
    reports.show()
    drain(mine, StatusRelay(lambda: shown))
    values = shown.beats()[-1][0].values
    assert len(values) == 16 and values["loss"] != values["loss"]


def test_where_a_worker_shows_it() -> None:
    mine, theirs = make_channel()
    assert isinstance(make_status_display(Place()), StatusLine)
    with theirs:
        reports = make_status_display(replace(Place(), call=CallPlace(0, theirs.fileno(), 0)))
        reports.step(beat(1), 2)
        reports.show()
        message = mine.receive()
        assert message is not None and message.fields["total"] == 2
        reports.close(2)


def test_what_was_logged_beside_steps_comes_in_any_case() -> None:
    mine, theirs = pair()
    shown = Display()
    reports, relay = StatusReports(theirs, clock=Clock()), StatusRelay(lambda: shown)
    reports.step(beat(1), 2)
    reports.logged(1, {"a": 1.0})
    reports.logged(1, {"b": 2.0})
    reports.close(2)
    drain(mine, relay)
    assert (1, {"a": 1.0, "b": 2.0}) in shown.told
    assert [each.step for each, _ in shown.beats()] == [1]
