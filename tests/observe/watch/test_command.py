"""`paceline watch`: what it refuses in a line, and that it serves until Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import threading
import urllib.request
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.observe.watch import address
from paceline.observe.watch.address import WatchAddress
from paceline.observe.watch.command import check_run_folder, serve_run
from tests.harness.jobs import PATIENCE

HERE = WatchAddress("127.0.0.1", 0, "--listen")


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run folder"):
        check_run_folder(tmp_path / "none")
    with pytest.raises(UsageError, match="is empty: give the folder of a run that has begun"):
        check_run_folder(tmp_path)
    (tmp_path / "x").touch()
    with pytest.raises(UsageError, match="is not a run folder"):
        check_run_folder(tmp_path)
    with pytest.raises(UsageError, match="is a file"):
        check_run_folder(tmp_path / "x")
    for name in ("live.json", "metrics.jsonl", "summary.json"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).touch()
        check_run_folder(folder)


def test_what_is_missing_or_taken_is_said_before_anything_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "live.json").touch()
    with (
        HERE.open_socket() as taken,
        pytest.raises(UsageError, match=r"no page can be served for --listen: port \d+ is in use"),
    ):
        serve_run(
            tmp_path, WatchAddress("127.0.0.1", taken.getsockname()[1], "--listen"), b"", print
        )
    monkeypatch.setattr(address, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install"):
        serve_run(tmp_path, HERE, b"", print)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_it_serves_until_a_signal(tmp_path: Path, number: int) -> None:
    (tmp_path / "metrics.jsonl").touch()
    said: list[str] = []
    read: list[str] = []

    def reader() -> None:
        try:
            found = re.search(r"http://\S+/", said[0])
            assert found is not None
            with urllib.request.urlopen(f"{found[0]}events", timeout=PATIENCE) as stream:
                read.append(str(stream.readline(), "utf-8"))
                os.kill(os.getpid(), number)
                read.append(str(stream.read(), "utf-8"))
        except BaseException:
            os.kill(os.getpid(), number)
            raise

    thread = threading.Thread(target=reader)
    before = {
        each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    }

    def say(text: str) -> None:
        said.append(text)
        thread.start()

    try:
        assert serve_run(tmp_path, HERE, b"", say) == 128 + number
    finally:
        thread.join(PATIENCE)
        for each, handler in before.items():
            signal.signal(each, handler)
    assert read[0] == "event: sections\n" and "paceline watch has ended" in read[1]
