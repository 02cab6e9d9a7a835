"""Records of labs, and the end of what they name."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ResourceError
from paceline.lab import cgroups, cleaning, remains
from tests.harness.jobs import PATIENCE, wait_for

# another one in each process that runs tests: what has the mark of a lab is ended wherever it runs
FEED = f"feed{os.getpid():x}"
STUBBORN = (
    "import signal, time; [signal.signal(n, signal.SIG_IGN) for n in (1, 2, 15)]; "
    "print('up', flush=True); time.sleep(600)"
)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where records are, in this test."""
    monkeypatch.setattr(remains, "records_folder", lambda: tmp_path / "records")
    # those of labs with records elsewhere
    monkeypatch.setattr(cgroups, "list_orphans", lambda bases: [])
    return tmp_path / "records"


@pytest.fixture
def stubborn() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        [sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, env={remains.MARK: FEED}
    )
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    yield process
    process.kill()
    process.communicate()


def record(**changes: Any) -> dict[str, Any]:
    own = {
        "identity": FEED,
        "name": "x",
        "process": os.getpid(),
        "began": remains.start_ticks(os.getpid()),
    }
    return {**own, "keeper": 0, "folder": "/nonexistent/folder", "hosts": [], **changes}


def test_records_come_and_go(place):
    assert remains.read_records() == []
    remains.write_record(record())
    remains.write_record(record(identity="beef"))
    assert [found["identity"] for found in remains.read_records()] == ["beef", FEED] and all(
        map(remains.is_alive, remains.read_records())
    )
    remains.forget_record(FEED)
    remains.forget_record(FEED)
    assert place.exists()
    remains.forget_record("beef")
    assert not place.exists()


@pytest.mark.jobs
def test_a_number_that_is_used_again_is_another_process(stubborn):
    assert remains.is_alive(record(process=stubborn.pid, began=remains.start_ticks(stubborn.pid)))
    assert not remains.is_alive(record(process=stubborn.pid, began="1"))
    stubborn.kill()
    wait_for(lambda: remains.start_ticks(stubborn.pid) == "")  # a zombie is dead
    assert not remains.is_alive(record(process=stubborn.pid, began=""))


def test_records_of_others_are_not_believed(place):
    place.mkdir(mode=0o755)
    for act in (remains.read_records, lambda: remains.write_record(record())):
        with pytest.raises(PermissionError, match="it isn't a folder of this user with mode 0700"):
            act()
    with pytest.raises(ResourceError, match=r"can't be read \(it isn't a folder of this user"):
        cleaning.remove_leftovers()


def test_halves_are_dropped(place):
    place.mkdir(mode=0o700)
    (place / f"{FEED}.999999999").write_text("{")
    (place / f"beef.{os.getpid()}").write_text("{")
    remains.drop_partial_records()
    assert [path.name for path in place.iterdir()] == [f"beef.{os.getpid()}"]


@pytest.mark.jobs
def test_sweeping_ends_what_has_the_mark(place, stubborn, tmp_path):
    (tmp_path / "files").mkdir()
    dead = record(process=stubborn.pid, began="1", folder=str(tmp_path / "files"))
    remains.write_record(dead)
    assert remains.sweep_lab(dead, trusted=False) == []
    assert (
        stubborn.wait(PATIENCE) == -9
        and not (tmp_path / "files").exists()
        and remains.read_records() == []
    )


@pytest.mark.jobs
def test_networks_of_an_old_record_are_another_labs(place, stubborn):
    network = os.readlink(f"/proc/{stubborn.pid}/ns/net")
    host = {"name": "a", "network": network, "cgroups": []}
    assert stubborn.pid in remains.processes_inside([network])
    assert (
        remains.sweep_lab(
            record(identity="none", process=0, began="1", hosts=[host]), trusted=False
        )
        == []
    )
    assert stubborn.poll() is None


@pytest.mark.jobs
def test_the_keeper_does_nothing_for_a_lab_that_is_done(place, stubborn):
    path = remains.write_record(record(process=os.getpid()))
    done = subprocess.run(
        [sys.executable, "-I", "-S", remains.__file__, str(path)],
        input=b"done",
        check=False,
        timeout=60,
    )
    assert (
        done.returncode == 0
        and stubborn.poll() is None
        and json.loads(path.read_text())["identity"] == FEED
    )


@pytest.mark.jobs
def test_the_keeper_sees_a_death_behind_an_open_pipe(stubborn, tmp_path):
    path = tmp_path / f"{FEED}.json"
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    path.write_text(json.dumps(record(process=sleeper.pid, began=remains.start_ticks(sleeper.pid))))
    keeper = subprocess.Popen(
        [sys.executable, "-I", "-S", remains.__file__, str(path)], stdin=subprocess.PIPE
    )
    sleeper.kill()
    sleeper.wait()
    assert stubborn.wait(PATIENCE) == -9  # though the pipe is open
    assert keeper.wait(PATIENCE) == 0
    keeper.communicate()
