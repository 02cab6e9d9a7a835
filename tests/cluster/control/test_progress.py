"""Pages: what the launcher, the worker and a watcher tell each other through them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster.control import progress
from paceline.cluster.control.progress import ProgressPage
from paceline.cluster.launcher.launch import run_job
from paceline.cluster.launcher.request import LaunchRequest
from paceline.errors import DeadlineExceeded, ResourceError
from tests.harness.clocks import Clock
from tests.harness.jobs import jobs, wait_for
from tests.harness.runs import batches, workers


def test_a_new_page_says_nothing(tmp_path: Path) -> None:
    page = ProgressPage(progress.page_path(tmp_path, 3))
    assert page.file == tmp_path / "rank-3"
    assert (page.rank, page.host, page.threads, page.pid, page.step, page.began) == (
        -1,
        -1,
        -1,
        -1,
        -1,
        None,
    )
    assert not page.is_alive and not page.is_holding


def test_both_sides_see_the_same_numbers(tmp_path: Path) -> None:
    mine, theirs = ProgressPage(tmp_path / "page"), ProgressPage(tmp_path / "page")
    mine.describe_worker(rank=2, host=1, threads=4)
    mine.write_process(os.getpid())
    mine.write_begin(1234.5)
    mine.reach_step(7)
    assert (theirs.rank, theirs.host, theirs.threads, theirs.pid, theirs.step, theirs.began) == (
        2,
        1,
        4,
        os.getpid(),
        7,
        1234.5,
    )
    assert theirs.is_alive
    mine.write_step(8)
    assert theirs.step == 8


@pytest.mark.jobs
def test_a_process_that_is_gone_is_not_taken_for_another(tmp_path: Path) -> None:
    page, process = (
        ProgressPage(tmp_path / "page"),
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE),
    )
    page.write_process(process.pid)
    assert page.is_alive
    page._cells[progress._BORN] -= 1  # as if the number had been given to a younger process
    assert not page.is_alive
    page._cells[progress._BORN] += 1
    process.communicate(b"\n")
    assert not page.is_alive


def test_a_breakpoint_set_before_the_worker_is_there_holds_it(tmp_path: Path) -> None:
    watcher = ProgressPage(tmp_path / "page")
    watcher.hold_before(2)
    worker = ProgressPage(tmp_path / "page")
    worker.describe_worker(0, 0, 1)  # keeps the breakpoint
    assert worker.reach_step(0) == worker.reach_step(1) == 0.0
    held: list[float] = []
    thread = threading.Thread(target=lambda: held.append(worker.reach_step(2)), daemon=True)
    thread.start()
    wait_for(lambda: watcher.is_holding)
    assert watcher.step == 2 and not held
    watcher.hold_before(3)  # a later one lets it go on, to there
    thread.join(60)
    assert held[0] > 0 and not watcher.is_holding
    # past the breakpoint: held all the same
    thread = threading.Thread(target=lambda: held.append(worker.reach_step(5)), daemon=True)
    thread.start()
    wait_for(lambda: watcher.is_holding)
    watcher.release()
    thread.join(60)
    assert len(held) == 2 and worker.reach_step(6) == 0.0


def test_nobody_is_held_for_ever(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That a worker is held is said before it ends, even if it gets no processor meanwhile."""
    clock = Clock()
    monkeypatch.setattr(
        progress,
        "time",
        SimpleNamespace(monotonic=clock, sleep=lambda _: setattr(clock, "now", clock.now + 2)),
    )
    page = ProgressPage(tmp_path / "page", deadline=1.2)
    page.describe_worker(4, 0, 1)
    page.hold_before(0)
    with pytest.raises(
        DeadlineExceeded,
        match=r"rank 4 was held before step 3 for 1.2 s by .*page, and wasn't released",
    ):
        page.reach_step(3)
    assert not page.is_holding
    assert "paceline: rank 4 is held before step 3, as" in capfd.readouterr().err


def test_a_step_costs_less_than_a_microsecond_or_so(tmp_path: Path) -> None:
    page, best = ProgressPage(tmp_path / "page"), 1.0
    for _ in range(5):
        began = time.perf_counter()
        for step in range(10_000):
            page.reach_step(step)
        best = min(best, (time.perf_counter() - began) / 10_000)
    assert best < 3e-6  # 0.2e-6 on a quiet machine


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="PACELINE_PROGRESS"):
        ProgressPage(progress.page_path(tmp_path / "nowhere", 0))


@pytest.mark.jobs
def test_the_launcher_makes_a_page_for_scripts_that_know_nothing_of_it(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "assert 'PACELINE_PROGRESS' not in os.environ  # a job inside "
        "of this one must not write there\n"
        "open(f'{sys.argv[1]}/pid-' + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
    )
    environ = dict(os.environ) | {"PACELINE_PROGRESS": str(tmp_path), "OMP_NUM_THREADS": "3"}
    assert run_job(LaunchRequest(str(script), (str(tmp_path),), workers=2), environ) == 0
    for rank in range(2):
        page = ProgressPage(progress.page_path(tmp_path, rank))
        assert (page.rank, page.host, page.threads, page.step, page.began) == (rank, 0, 3, -1, None)
        assert page.pid == int((tmp_path / f"pid-{rank}").read_text())
        assert not page.is_alive


@pytest.mark.jobs
def test_without_the_variable_there_is_no_page(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os\nassert not [name for name in os.environ if 'PROGRESS' in name]\n")
    assert run_job(LaunchRequest(str(script)), dict(os.environ)) == 0
    assert sorted(tmp_path.iterdir()) == [script]


def test_a_folder_that_can_not_be_written_ends_the_launcher_before_it_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('started')\n")
    assert (
        run_job(
            LaunchRequest(str(script)),
            dict(os.environ) | {"PACELINE_PROGRESS": str(tmp_path / "nowhere")},
        )
        == 2
    )
    out, err = capfd.readouterr()
    assert "started" not in out and "\npaceline: the page" in err and "PACELINE_PROGRESS" in err


def test_the_loader_stops_before_the_step_asked_for(tmp_path: Path) -> None:
    page = ProgressPage(tmp_path / "page")
    page.hold_before(2)
    seen: list[int] = []
    steps: list[int] = []

    def watch() -> None:
        wait_for(lambda: page.is_holding)
        steps.append(page.step)
        time.sleep(0.05)  # nothing may happen meanwhile
        steps.extend(seen)
        page.release()

    def train(run: Any) -> None:
        run._loop.page = ProgressPage(tmp_path / "page")
        for _ in run.prepare(batches(40, 8), train=True):
            seen.append(run.steps)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    workers(1, train)
    watcher.join(60)
    assert steps == [2, 0, 1]  # steps 0 and 1 were made, 2 was not begun
    assert seen == [0, 1, 2, 3, 4]
    assert page.step == 5  # all are taken


BODY = """
with pl.start(folder=sys.argv[1]) as run:
    model, optimizer, loader = parts(run)
    for x, y in loader:
        print("step", run.steps, flush=True)
        step(run, model, optimizer, x, y)
"""


@pytest.mark.slow
def test_a_whole_job_is_held_and_released(tmp_path: Path) -> None:
    pages = tmp_path / "pages"
    pages.mkdir()
    with jobs(tmp_path) as started:
        first, second = (ProgressPage(progress.page_path(pages, rank)) for rank in range(2))
        second.hold_before(3)
        before = time.time()
        job = started.run(BODY, 2, args=(str(tmp_path / "runs"),), PACELINE_PROGRESS=str(pages))
        wait_for(lambda: second.is_holding)
        assert second.step == 3 and first.step <= 3
        assert second.pid == job.worker(1).pid and second.is_alive
        assert second.began is not None and before < second.began < time.time()
        second.release()
        ended = job.end()
    assert ended.code == 0, ended.err
    assert ended.out.count("[1] step") == 8
    assert first.step == second.step == 8 and not second.is_holding
