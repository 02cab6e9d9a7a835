"""What launchers tell each other of restarts: it is read as it was written, and what is none of
it is refused.
"""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

from paceline.cluster.discover import JobStart
from paceline.cluster.hosts.channel import MALFORMED
from paceline.cluster.hosts.restart_messages import (
    Cause,
    HostReport,
    JobStopped,
    RestartState,
    Sequel,
)

REPORT = HostReport(
    "runs/ü", 7, 1.5, 1, "step-00000005", "rank 1 failed", Cause("ValueError", "no", is_final=True)
)
STATE = RestartState(
    3,
    JobStart("runs/x", 7, 1.5, ((2.0, "rank 1 was killed"), (3.0, "host b is gone"))),
    ("1f", "2e"),
)


@pytest.mark.parametrize(
    "message",
    [
        REPORT,
        HostReport(),
        STATE,
        RestartState(1),
        Sequel("it isn't"),
        Sequel("all start again", STATE),
    ],
    ids=repr,
)
def test_what_is_written_is_read(message: Any) -> None:
    assert type(message).load(json.loads(json.dumps(message.dump()))) == message


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (HostReport, {"folder": 3}),
        (HostReport, {"runs": "1"}),
        (HostReport, {"began": None}),
        (HostReport, {"other": 1}),
        (HostReport, {"cause": ["ValueError", "no"]}),
        (HostReport, {"cause": ["ValueError", "no", 1]}),
        (HostReport, 5),
        (RestartState, {"allowed": 1.5, "start": {"events": []}, "causes": []}),
        (RestartState, {"allowed": 1, "start": {"events": [[1.0]]}, "causes": []}),
        (RestartState, {"allowed": 1, "start": {"events": [["x", "y"]]}, "causes": []}),
        (RestartState, {"allowed": 1, "start": {"events": [], "seed": None}, "causes": []}),
        (RestartState, {"allowed": 1, "start": {"events": [], "folder": 1}, "causes": []}),
        (RestartState, {"allowed": 1, "start": {"events": []}, "causes": [1]}),
        (RestartState, None),
        (Sequel, {"words": "x"}),
        (Sequel, {"words": 1, "state": None}),
        (Sequel, {"words": "x", "state": {}}),
    ],
)
def test_what_is_none_of_it_is_refused(kind: Any, value: Any) -> None:
    with pytest.raises(MALFORMED):
        kind.load(value)


def test_the_later_state_is_the_one_of_more_starts_or_of_one_that_knows_the_run() -> None:
    begun = RestartState(3, JobStart("runs/x"))
    assert RestartState(3).sort_key < begun.sort_key < STATE.sort_key


def test_a_stop_says_where_it_was_asked_for() -> None:
    stop = JobStopped(signal.SIGTERM, "box")
    assert (
        str(stop) == "the launcher on box was asked to end the job (SIGTERM)"
        and stop.dump()["number"] == signal.SIGTERM
    )
