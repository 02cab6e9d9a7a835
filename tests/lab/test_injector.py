"""Carrying faults out, on a cluster that only writes down what it is asked, and on real
processes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster import machine
from paceline.cluster.control import progress
from paceline.cluster.control.progress import ProgressPage
from paceline.cluster.launcher import janitor
from paceline.errors import ResourceError
from paceline.lab import chaos, injector
from paceline.lab.description import Description, Host, Placement, make_regular
from paceline.lab.injector import FaultInjector, record_events
from tests.harness.clocks import Clock
from tests.harness.jobs import PATIENCE, wait_for


class Paper:
    """A cluster on paper: `done` is what was asked of it."""

    def __init__(self, description: Description, *, refuse: str = "") -> None:
        self.description, self.done, self._refuse = description, list[Any](), refuse
        self.quotas: dict[int, float | None] = {
            n: host.processors for n, host in enumerate(description.hosts)
        }

    def _note(self, *what: Any) -> None:
        if what[0] == self._refuse:
            raise ResourceError(f"no {what[0]} here")
        self.done.append(what)

    def cut(self, host: int) -> None:
        self._note("cut", host)

    def mend(self, host: int) -> None:
        self._note("mend", host)

    def limit(self, host: int, up: int | None, down: int | None) -> None:
        self._note("limit", host, up, down)

    def quota(self, host: int, processors: float | None) -> None:
        self._note("quota", host, processors)
        self.quotas[host] = processors

    def quota_of(self, host: int) -> float | None:
        return self.quotas[host]

    def start(self, host: int) -> None:
        self._note("start", host)

    def crash(self, host: int) -> None:
        self._note("crash", host)


# A worker: reaches step after step, says each, and does nothing else.
WORKER = """
import sys, time
from pathlib import Path
from paceline.cluster.control.progress import ProgressPage
page = ProgressPage(Path(sys.argv[1]), deadline=20)
for step in range(int(sys.argv[2])):
    page.reach_step(step)
    print(step, flush=True)
    time.sleep(float(sys.argv[3]))
    page.write_step(step + 1)
"""


class Worker:
    """A process with a page, as a launcher makes them."""

    def __init__(
        self, folder: Path, rank: int, steps: int, pause: float = 0.0, threads: int = 1
    ) -> None:
        self.page = ProgressPage(progress.page_path(folder, rank))
        self.page.describe_worker(rank, 0, threads)
        command = [sys.executable, "-c", WORKER, str(self.page.file), str(steps), str(pause)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, process_group=0)
        self.page.write_process(self.process.pid)

    def end(self) -> tuple[int, list[int]]:
        """Its exit code and the steps that it made."""
        out, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, [int(line) for line in out.split()]

    @property
    def stopped(self) -> bool:
        return janitor.read_state(self.process.pid) == "T"


@contextmanager
def job(folder: Path, *workers: dict[str, Any]) -> Iterator[list[Worker]]:
    started = [Worker(folder, rank, **options) for rank, options in enumerate(workers)]
    try:
        yield started
    finally:
        for worker in started:
            worker.process.kill()
            worker.process.communicate()


def own(folder: Path) -> ProgressPage:
    """The page of a worker that is this process."""
    page = ProgressPage(progress.page_path(folder, 0))
    page.describe_worker(0, 0, 1)
    page.write_process(os.getpid())
    return page


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of injectors, which stands until a test moves it."""
    clock = Clock()
    monkeypatch.setattr(injector, "time", SimpleNamespace(monotonic=clock, time=clock))
    return clock


def unleash(
    cluster: Paper, faults: Any, folder: Path, said: list[str] | None = None
) -> FaultInjector:
    return FaultInjector(
        cluster,
        chaos.list_faults(faults, cluster.description),
        folder,
        say=([] if said is None else said).append,
    )


def happened(found: FaultInjector) -> list[tuple[str, str, int]]:
    return [(event["event"], event["what"], event["step"]) for event in found.events]


@pytest.mark.jobs
def test_kill_comes_exactly_before_its_step(tmp_path: Path) -> None:
    said: list[str] = []
    found = unleash(Paper(make_regular(2)), "kill(rank=1, step=5)", tmp_path, said)
    with found, job(tmp_path, {"steps": 50}, {"steps": 50}) as (other, victim):
        assert victim.end() == (-signal.SIGKILL, [0, 1, 2, 3, 4])
        assert other.end() == (0, list(range(50)))
    assert happened(found) == [("fault", "kill(rank=1, step=5)", 5)]
    assert said == ["kill(rank=1, step=5): done before step 5"]


@pytest.mark.jobs
def test_stop_stops_and_goes_on(tmp_path: Path, clock: Clock) -> None:
    found = unleash(Paper(make_regular(1)), "stop(rank=0, step=2, seconds=1.5)", tmp_path)
    with found, job(tmp_path, {"steps": 4}) as (worker,):
        wait_for(lambda: len(found.events) == 1 and worker.stopped)
        assert worker.page.step == 2
        clock.now += 1.5
        assert worker.end() == (0, [0, 1, 2, 3])
    what = "stop(rank=0, step=2, seconds=1.5)"
    assert happened(found) == [("fault", what, 2), ("fault over", what, 2)]
    assert [event["time"] for event in found.events] == [0.0, 1.5]


def test_the_end_of_a_fault_comes_at_the_step_at_which_it_was_still_in_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster, page = Paper(make_regular(1)), own(tmp_path)
    monkeypatch.setattr(
        cluster, "mend", lambda host: page.write_step(3)
    )  # the worker goes on at once
    found = unleash(cluster, "cut(host=0, seconds=0.01, step=2)", tmp_path)
    with found:
        page.reach_step(2)
        wait_for(lambda: len(found.events) == 2)
    assert [step for _, _, step in happened(found)] == [2, 2]


@pytest.mark.jobs
def test_a_worker_still_stopped_at_the_end_goes_on(tmp_path: Path) -> None:
    found = unleash(Paper(make_regular(1)), "stop(rank=0, step=0, seconds=100)", tmp_path)
    with job(tmp_path, {"steps": 1}) as (worker,):
        with found:
            wait_for(lambda: worker.stopped)
        assert worker.end() == (0, [0])


@pytest.mark.jobs
def test_two_stops_end_with_the_longer(tmp_path: Path, clock: Clock) -> None:
    found = unleash(
        Paper(make_regular(1)),
        "[stop(rank=0, step=0, seconds=0.2), stop(rank=0, step=0, seconds=4)]",
        tmp_path,
    )
    with found, job(tmp_path, {"steps": 2}) as (worker,):
        wait_for(lambda: len(found.events) == 2 and worker.stopped)
        clock.now += 0.2
        wait_for(lambda: len(found.events) == 3)
        assert worker.stopped
        clock.now += 4
        assert worker.end() == (0, [0, 1])


@pytest.mark.jobs
def test_the_first_worker_of_a_host_is_held_and_several_faults_come_in_order(
    tmp_path: Path,
) -> None:
    cluster = Paper(make_regular(2, 2, bandwidth="1gbit"))
    faults = (
        "[link(host=1, bandwidth='10mbit', step=3), cut(host=1, seconds=0.2, step=3),"
        " link(host=1, up='20mbit', step=6, seconds=0.2), crash(host=0, step=1)]"
    )
    found = unleash(cluster, faults, tmp_path)
    with found, job(tmp_path, *[{"steps": 10, "pause": 0.03}] * 4) as workers:
        for worker in workers:
            worker.end()
        wait_for(lambda: len(found.events) == 6)
    mega = 10**6
    host1 = [what for what in cluster.done if what[1] == 1]
    assert host1[:2] == [("limit", 1, 10 * mega, 10 * mega), ("cut", 1)]
    assert set(host1[2:]) == {
        ("mend", 1),
        ("limit", 1, 20 * mega, 10 * mega),  # `down` as the earlier one wants it
        ("limit", 1, 10 * mega, 10 * mega),  # that one is over, the earlier one not yet
        ("limit", 1, 1000 * mega, 1000 * mega),  # at the end
    }
    assert host1[-1] == ("limit", 1, 1000 * mega, 1000 * mega)
    assert [what for what in cluster.done if what[1] == 0] == [("crash", 0), ("mend", 0)]
    done = [(what, step) for event, what, step in happened(found) if event == "fault"]
    assert done.count(("crash(host=0, step=1)", 1)) == 1
    assert [step for what, step in done if "host=1" in what] == [3, 3, 6]


@pytest.mark.jobs
def test_a_link_cut_twice_is_mended_once(tmp_path: Path) -> None:
    cluster = Paper(make_regular(1))
    found = unleash(cluster, "[cut(host=0, seconds=0.1), cut(host=0, seconds=2)]", tmp_path)
    with found, job(tmp_path, {"steps": 1}):
        wait_for(lambda: len(found.events) == 4)
    assert cluster.done == [("cut", 0), ("cut", 0), ("cut", 0), ("mend", 0)]


@pytest.mark.jobs
def test_a_crashed_host_is_not_mended_by_a_cut_that_is_over(tmp_path: Path) -> None:
    cluster = Paper(make_regular(1))
    found = unleash(cluster, "[cut(host=0, seconds=1), crash(host=0)]", tmp_path)
    with found, job(tmp_path, {"steps": 1}):
        wait_for(lambda: len(found.events) == 3)
        assert cluster.done == [("cut", 0), ("crash", 0), ("cut", 0)]
    assert cluster.done[-1] == ("mend", 0)  # for the next run


@pytest.mark.jobs
def test_slow_is_a_factor_of_the_described_quota(tmp_path: Path) -> None:
    cluster = Paper(Description("two", (Host("a", processors=1.5), Host("b"))))
    found = unleash(
        cluster,
        "[slow(host=0, factor=0.5, step=1), slow(host=0, factor=0.1, step=2, seconds=0.1)]",
        tmp_path,
    )
    with found, job(tmp_path, {"steps": 3}, {"steps": 1}):
        wait_for(lambda: len(found.events) == 3)
    quotas = [quota for _, host, quota in cluster.done if host == 0]
    # a check that changes nothing; both; the second over; the end
    assert quotas == pytest.approx([1.5, 0.75, 0.15, 0.75, 1.5])


@pytest.mark.jobs
@pytest.mark.parametrize(("threads", "cores"), [(1, 2), (64, 4)])
def test_without_a_quota_it_is_a_factor_of_the_threads(
    tmp_path: Path, threads: int, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "count_cores", lambda: 4)
    cluster = Paper(make_regular(1, 2))
    found = unleash(cluster, "slow(host=0, factor=0.5, step=0)", tmp_path)
    with found, job(tmp_path, *[{"steps": 1, "threads": threads}] * 2):
        wait_for(lambda: len(found.events) == 1)
    assert cluster.done == [("quota", 0, None), ("quota", 0, cores / 2), ("quota", 0, None)]


def test_where_there_are_no_quotas_slow_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="no quota here"):
        unleash(
            Paper(make_regular(1), refuse="quota"), "slow(host=0, factor=0.5, step=0)", tmp_path
        )


@pytest.mark.jobs
def test_join_waits_for_the_first_worker_of_all(tmp_path: Path) -> None:
    cluster = Paper(make_regular(2))
    found = unleash(cluster, "join(host=0, step=3)", tmp_path)
    with found, job(tmp_path, {"steps": 6}) as (worker,):
        assert worker.end() == (0, [0, 1, 2, 3, 4, 5])
    assert cluster.done == [("start", 0)]
    assert happened(found) == [("fault", "join(host=0, step=3)", 3)]


@pytest.mark.jobs
def test_a_host_that_has_crashed_may_come_back(tmp_path: Path) -> None:
    cluster = Paper(make_regular(2))
    found = unleash(cluster, "[join(host=0, step=3), crash(host=0, step=1)]", tmp_path)
    with found, job(tmp_path, {"steps": 2}) as (victim,):  # rank 0 is there: host 0 isn't late
        assert victim.end() == (0, [0, 1])
        # in a real job rank 1 wouldn't be at step 3 before that
        wait_for(lambda: cluster.done == [("crash", 0)])
        other = Worker(tmp_path, 1, 5)
        assert other.end() == (0, [0, 1, 2, 3, 4])
    assert cluster.done == [("crash", 0), ("mend", 0), ("start", 0)]


@pytest.mark.jobs
def test_what_never_came_due_is_said_and_noted(tmp_path: Path) -> None:
    said: list[str] = []
    found = unleash(
        Paper(make_regular(1)), "[kill(rank=0, step=500), crash(host=0, step=20)]", tmp_path, said
    )
    with found, job(tmp_path, {"steps": 20}) as (worker,):
        assert worker.end()[0] == 0
    assert happened(found) == [
        ("fault not carried out", "crash(host=0, step=20)", 20),
        ("fault not carried out", "kill(rank=0, step=500)", 20),
    ]
    assert said[1] == "not carried out: kill(rank=0, step=500): the run ended after 20 steps"
    assert found.events[1]["why"] == "the run ended after 20 steps"


def test_a_script_without_steps_is_told_so(tmp_path: Path) -> None:
    said: list[str] = []
    with unleash(Paper(make_regular(1)), "crash(host=0)", tmp_path, said):
        pass
    assert said == [
        (
            "not carried out: crash(host=0): the run ended before the first step of a loader that "
            "paceline has prepared"
        )
    ]


@pytest.mark.jobs
def test_a_fault_that_fails_is_raised_when_the_run_is_over(tmp_path: Path) -> None:
    found = unleash(
        Paper(make_regular(1), refuse="crash"),
        "[crash(host=0), link(host=0, bandwidth='1mbit', step=1)]",
        tmp_path,
    )
    with (
        job(tmp_path, {"steps": 3}) as (worker,),
        pytest.raises(ResourceError, match="no crash here"),
        found,
    ):
        assert worker.end() == (0, [0, 1, 2])  # it goes on, and so do other faults
    assert [(event, what) for event, what, _ in happened(found)] == [
        ("fault failed", "crash(host=0)"),
        ("fault", "link(host=0, bandwidth='1mbit', step=1)"),
    ]


@pytest.mark.jobs
def test_workers_are_let_go_when_the_injector_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Paper(make_regular(1))
    monkeypatch.setattr(cluster, "crash", lambda host: 1 / 0)
    found = unleash(cluster, "crash(host=0, step=1)", tmp_path)
    with job(tmp_path, {"steps": 3}) as (worker,), pytest.raises(ZeroDivisionError), found:
        assert worker.end() == (0, [0, 1, 2])


def test_times_count_from_the_beginning_of_the_run(tmp_path: Path) -> None:
    found, page = unleash(Paper(make_regular(1)), "crash(host=0, step=1)", tmp_path), own(tmp_path)
    with found:
        page.write_begin(time.time() - 1000)
        page.reach_step(1)
    assert 1000 <= found.events[0]["time"] < 1100


def test_no_worker_is_held_where_nothing_is_to_happen(tmp_path: Path) -> None:
    unleash(Paper(make_regular(3)), "[crash(host=1, step=4), kill(rank=1, step=2)]", tmp_path)
    holds = [
        ProgressPage(progress.page_path(tmp_path, rank))._cells[progress._HOLD] - 1
        for rank in range(3)
    ]
    assert holds == [-1, 2, -1]


@pytest.mark.parametrize(("placement", "rank"), [("block", 3), ("round-robin", 1)])
def test_the_first_worker_of_a_host_depends_on_placement(
    tmp_path: Path, placement: Placement, rank: int
) -> None:
    cluster = Paper(
        Description("three", (Host("a", 3), Host("b", 1), Host("c", 2)), placement=placement)
    )
    unleash(cluster, "crash(host=1, step=7)", tmp_path)
    assert [
        ProgressPage(progress.page_path(tmp_path, number))._cells[progress._HOLD] - 1
        for number in range(6)
    ].index(7) == rank


def test_events_go_into_the_summary_by_time(tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(
        json.dumps({"steps": 20, "events": [{"time": 2.0, "what": "stopped: x"}]})
    )
    faults = [
        {"time": 1.0, "event": "fault", "what": "kill(rank=0, step=1)"},
        {"time": 3.0, "event": "fault over", "what": "x"},
    ]
    assert record_events(tmp_path, faults) == tmp_path / "summary.json"
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["steps"] == 20 and [event["time"] for event in summary["events"]] == [
        1.0,
        2.0,
        3.0,
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_without_a_summary_events_stand_beside(tmp_path: Path) -> None:
    faults = [{"time": 1.0, "event": "fault", "what": "kill(rank=0, step=1)"}]
    assert record_events(tmp_path, faults) == tmp_path / "events.json"
    assert json.loads((tmp_path / "events.json").read_text()) == faults


@pytest.mark.jobs
def test_it_looks_often_enough_and_not_too_often(tmp_path: Path) -> None:
    """A worker with a fault before each of 50 steps: held some milliseconds at each."""
    faults = ", ".join(f"link(host=0, bandwidth='1mbit', step={step})" for step in range(50))
    found = unleash(Paper(make_regular(1)), f"[{faults}]", tmp_path)
    before = threading.active_count()
    with found, job(tmp_path, {"steps": 50}) as (worker,):
        assert worker.end() == (0, list(range(50)))
    assert len(found.events) == 50
    assert threading.active_count() == before
    assert 0.001 <= injector._TICK_SECONDS <= 0.01
