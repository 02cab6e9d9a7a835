"""The page of a job as its launcher sees it: it is there before the workers, follows the run,
and is no burden when it dies.
"""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest

from paceline.errors import UsageError
from paceline.observe.watch import process
from paceline.observe.watch.address import WatchAddress
from paceline.observe.watch.process import WatchedJob
from tests.harness.jobs import PATIENCE, Jobs, free_port, listening, wait_for
from tests.harness.live_runs import facts

KEY = b"k" * 32


def read(url: str) -> str:
    """The first event of a page."""
    with urllib.request.urlopen(url, timeout=PATIENCE) as stream:
        return str(stream.readline() + stream.readline(), "utf-8")


def test_a_job_is_shown_from_before_it_begins_to_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "PATIENCE", PATIENCE)
    said: list[str] = []
    with WatchedJob(
        WatchAddress.parse_address("127.0.0.1:0", "--watch"), KEY, say=said.append
    ) as job:
        job.begin_serving(), job.begin_serving()
        found = re.fullmatch(r"this run can be watched at (http://127\.0\.0\.1:\d+/)", said[0])
        assert found and len(said) == 1
        page = f"{found[1]}events"
        assert "waiting for the workers" in read(page)
        (tmp_path / "live.json").write_text(
            json.dumps(facts() | {"live": facts()["live"] | {"state": "running"}})
        )
        job.follow_run(tmp_path), job.show_line("rank 1 was killed; all start again")
        wait_for(lambda: "40 of 100" in read(page))
        assert "rank 1 was killed; all start again" in read(page)
        with urllib.request.urlopen(page, timeout=PATIENCE) as stream:
            children = psutil.Process().children()
            assert job._process is not None and job._process.pid in {
                child.pid for child in children
            }
            job.close()
            assert "The job has ended" in str(stream.read(), "utf-8")
    assert job._process.poll() == 0
    with pytest.raises(OSError):
        read(page)


def test_its_death_is_no_matter_of_the_job(tmp_path: Path) -> None:
    said: list[str] = []
    with WatchedJob(WatchAddress.parse_address("0", "--watch"), KEY, say=said.append) as job:
        job.begin_serving()
        assert job._process is not None
        os.kill(job._process.pid, signal.SIGKILL)
        job._process.wait()
        job.follow_run(tmp_path)
        job.show_line("x" * 10_000)
    assert len(said) == 1


def test_one_that_hangs_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "PATIENCE", 0.2)
    with WatchedJob(WatchAddress.parse_address("0", "--watch"), KEY, say=lambda text: None) as job:
        job.begin_serving()
        assert job._process is not None
        os.kill(job._process.pid, signal.SIGSTOP)
        for _ in range(300):
            job.show_line("x" * 1000)  # more than the pipe takes
    assert job._process.returncode == -signal.SIGKILL


def test_a_port_in_use() -> None:
    port = str(free_port())
    address = WatchAddress.parse_address(port, "--watch")
    said: list[str] = []
    with address.open_socket():
        with pytest.raises(UsageError, match="is in use"):
            WatchedJob(address, KEY, say=said.append)
        with WatchedJob(address, KEY, elsewhere=True, say=said.append) as job:
            assert said == []  # as the run may be of another host
            with pytest.raises(UsageError, match="is in use"):
                job.begin_serving()
            # it has become this host's in the middle of the training
            job.follow_run(Path("x")), job.follow_run(Path("y"))
            assert [text.partition(": port ")[0] for text in said] == [
                "no page can be served for --watch"
            ]


def test_the_secret_is_on_no_command_line() -> None:
    with WatchedJob(
        WatchAddress.parse_address("0.0.0.0:0", "--watch"), KEY, say=lambda text: None
    ) as job:
        job.begin_serving()
        assert job._process is not None
        words = " ".join(psutil.Process(job._process.pid).cmdline())
        assert KEY.decode() not in words and "token" not in words


DYING = """
import signal
with pl.start(name="run") as run:
    model, optimizer, loader = parts(run, samples=4000)
    for _ in run.epochs(10**9):
        for x, y in loader:
            step(run, model, optimizer, x, y)
            if rank == 0 and run.steps == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            if os.path.exists("over"):
                run.stop()
            time.sleep(0.01)
"""


@pytest.mark.slow
def test_the_loss_of_the_first_worker_is_on_the_page_and_another_one_goes_on_with_it(
    job: Jobs,
) -> None:
    port = free_port()
    page, live = f"http://127.0.0.1:{port}/events", job.folder / "runs" / "run" / "live.json"
    launched = job.run(DYING, 3, "--min-workers", "1", "--watch", str(port))
    job.ports.add(port)
    wait_for(lambda: launched.process.poll() is not None or port in listening())
    wait_for(
        lambda: (
            launched.process.poll() is not None
            or "rank 0 was lost: 2 workers went on" in read(page)
        )
    )
    assert launched.process.poll() is None, launched.end()
    assert "2 workers on 1 host" in read(page)
    first = json.loads(live.read_text())["live"]["writer"]["pid"]
    assert first == launched.workers()[0].pid  # as rank 1 of the start is the first now
    wait_for(lambda: int(json.loads(live.read_text())["live"]["step"]) > 25)
    with urllib.request.urlopen(page, timeout=PATIENCE) as stream:
        (job.folder / "over").touch()
        text = str(stream.read(), "utf-8")
    assert "The job has ended" in text and 'data-state=\\"ended\\"' in text
    ended = launched.end()
    assert (
        ended.code == 0 and f"this run can be watched at http://127.0.0.1:{port}/" in ended.err
    ), ended
    assert not live.exists() and (live.parent / "summary.json").exists()
