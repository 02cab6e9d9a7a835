"""What servers did, in words: shares, bytes, staleness, what was dropped; and advice only where
something stands out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.observe import server_report
from paceline.observe.report import format_report
from tests.harness.finished_runs import finished


def fields(**changes: Any) -> dict[str, Any]:
    """A server in a summary."""
    common = {
        "name": "server 0 on box",
        "busy_seconds": 2.0,
        "bytes": 7_500_000,
        "bytes_sent": 900,
        "memory_bytes": 2_000,
        "put_off": 1,
    }
    return {**common, "messages": {"push": 4}, **changes}


def advice(*servers: dict[str, Any], seconds: float = 10.0, samples: int = 1000) -> list[str]:
    return [
        remark.words
        for remark in server_report.advise_on_servers(
            [server_report.read_server(server, number) for number, server in enumerate(servers)],
            seconds,
            samples,
        )
    ]


def test_two_servers(tmp_path: Path) -> None:
    kept = {"staleness": {"0": 30, "1": 10}, "steps_by_workers": {"2": 9, "3": 1}}
    lost = {"dropped": {"gradients": 1, "samples": 32, "pieces": []}}
    text = format_report(
        finished(
            tmp_path,
            servers=[fields(**kept, **lost), fields(name="table server 0", rows=1200, put_off=20)],
            seconds=10.0,
        )
    )
    assert (
        "Servers, with the share of the run in which each worked:\n"
        "  server 0 on box   20%  7.5 MB received, 900 bytes sent, 2.0 KB kept; "
        "at most 1 message put off\n"
        "  table server 0    20%  7.5 MB received, 900 bytes sent, 2.0 KB in 1,200 rows kept; "
        "at most 20 messages put off\n"
        "Workers went on 0 (75%), 1 (25%) turns ahead of the slowest.\n"
        "Steps were made by 2 (90%), 3 (10%) workers.\n"
        "1 gradient came too late for a step: their 32 samples (0.5% "
        "of those trained) were dropped.\n"
    ) in text
    assert "Nothing stands out" in text


def test_without_servers_nothing_is_said(tmp_path: Path) -> None:
    assert "erver" not in format_report(finished(tmp_path))


def test_of_an_earlier_version(tmp_path: Path) -> None:
    """They had no names; what else is missing is said."""
    nameless = fields()
    del nameless["name"]
    assert "  server 0   20%" in format_report(
        finished(tmp_path / "a", servers=[nameless], seconds=10.0)
    )
    del nameless["bytes"]
    with pytest.raises(UsageError, match="lacks 'bytes'"):
        format_report(finished(tmp_path / "b", servers=[nameless]))


def test_a_busy_server() -> None:
    (words,) = advice(fields(busy_seconds=7.0), fields(busy_seconds=6.5, name="server 1"))
    assert words.startswith(
        "server 0 on box and server 1: at work for 70% of the run"
    ) and words.endswith("--servers N")
    (words,) = advice(fields(busy_seconds=7.0), fields(bytes=1000))
    assert "another gets less than half as many bytes" in words
    assert not advice(fields(busy_seconds=5.9)) and not advice(
        fields(busy_seconds=7.0), seconds=0.0
    )


def test_workers_at_the_bound() -> None:
    (words,) = advice(fields(staleness={"0": 60, "3": 40}, steps_by_workers={"4": 50}))
    assert words.startswith("Workers were 3 turns ahead of the slowest in 40% of their turns")
    assert not advice(fields(staleness={"0": 80, "3": 20}, steps_by_workers={"4": 50}))
    assert not advice(fields(staleness={"0": 60, "3": 40}))  # no bound holds them
    assert not advice(fields(staleness={"0": 90}, steps_by_workers={"4": 50}))


def test_what_is_dropped_for_good() -> None:
    (words,) = advice(fields(dropped={"gradients": 3, "samples": 60}))
    assert words.startswith("Backup workers dropped 60 samples, 6% of those trained")
    assert not advice(fields(dropped={"gradients": 3, "samples": 30}))
