"""What a worker of a call tells of its end; calls as a whole are in test_launch.py."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from paceline.cluster.control.calls import CallChannel, make_channel
from paceline.cluster.discover import CallPlace, JobStart, Place
from paceline.errors import UsageError
from paceline.notebook.worker import report_failure


class Told:
    """A worker's place, with the ends of its channel and of its pipe to the launcher."""

    def __init__(self) -> None:
        self._mine, theirs = make_channel()
        self.channel = CallChannel(theirs)
        self._read, self._write = os.pipe()
        self.place = Place(
            launcher="paceline", report_fd=self._write, call=CallPlace(0, theirs.fileno(), 1)
        )

    def heard(self) -> tuple[dict[str, Any], str, dict[str, Any]]:
        """The fields of the message, the traceback, and the record that the launcher got."""
        message = self._mine.receive()
        assert message is not None and message.kind == "failed" and message.body is not None
        with message.body as body:
            return message.fields, body.read().decode(), json.loads(os.read(self._read, 1 << 12))

    def close(self) -> None:
        for end in (self._mine, self.channel):
            end.close()
        os.close(self._read)
        os.close(self._write)


@pytest.fixture
def told() -> Iterator[Told]:
    found = Told()
    yield found
    found.close()


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001  any of them
        return caught


def test_the_caller_gets_the_traceback_and_the_launcher_a_record(
    told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    error = raised(ValueError("so\nit is"))
    report_failure(told.place, told.channel, type(error), error, error.__traceback__)
    fields, text, record = told.heard()
    assert fields == {"number": 1, "head": "ValueError: so\nit is"}
    assert (
        text.startswith("Traceback (most recent call last):\n")
        and __file__ in text
        and text.endswith("ValueError: so\nit is\n")
    )
    assert (record["event"], record["type"]) == ("failed", "ValueError")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    "place", [{"worker": 3}, {"job_start": JobStart()}], ids=["survives", "starts again"]
)
def test_it_is_shown_where_others_go_on(
    told: Told, capsys: pytest.CaptureFixture[str], place: dict[str, Any]
) -> None:
    error = raised(UsageError("not so"))
    report_failure(
        replace(told.place, **place), told.channel, type(error), error, error.__traceback__
    )
    assert capsys.readouterr().err == told.heard()[1]


def test_what_the_user_has_interrupted_is_shown_nowhere(
    told: Told, capsys: pytest.CaptureFixture[str]
) -> None:
    error = raised(KeyboardInterrupt())
    report_failure(
        replace(told.place, worker=3), told.channel, type(error), error, error.__traceback__
    )
    assert capsys.readouterr().err == ""
