from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest

from paceline.comm.group_protocol import FinishedWork
from paceline.comm.hierarchy import staged_executor as module
from paceline.comm.hierarchy.staged_executor import Flow, StagedExecutor, StagedJob, Steps
from paceline.errors import DeadlineExceeded, UsageError, ViewChanged, WorkerLost
from tests.harness.jobs import PATIENCE, wait_for


def line(stages: int) -> tuple[StagedExecutor, list[Any]]:
    spread: list[Any] = []

    def tell(error: Any) -> Any:
        spread.append(error)
        return ViewChanged(f"the first: {error}")

    return StagedExecutor("test", stages, tell), spread


def job(flows: Iterable[Flow], result: Any = None, deadline: float = PATIENCE) -> StagedJob:
    return StagedJob(lambda: flows, lambda: result, "a job", deadline)


def through(log: list[Any], name: str, stages: int, pause: float = 0.0) -> Steps:
    for stage in range(stages):
        time.sleep(random.uniform(0, pause))
        log.append((stage, name, threading.current_thread().name))
        if stage < stages - 1:
            got = yield FinishedWork((name, stage))
            assert got == (name, stage)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_every_stage_is_a_thread_and_keeps_the_order(stages: int) -> None:
    ours, _ = line(stages)
    log: list[Any] = []
    names = [[f"{turn}.{number}" for number in range(turn % 3)] for turn in range(12)]
    jobs = [
        ours.start_job(
            job([Flow(through(log, name, stages, 0.003), 10) for name in each], result=turn)
        )
        for turn, each in enumerate(names)
    ]
    assert [work.wait() for work in jobs] == list(range(12))
    assert all(work.done() and work.exception() is None for work in jobs) and ours.is_idle
    for stage in range(stages):
        mine = [(name, thread) for number, name, thread in log if number == stage]
        assert [name for name, _ in mine] == [name for each in names for name in each]
        assert {thread for _, thread in mine} == {f"paceline test {stage}"}
    ours.stop(ViewChanged("over"))
    ours.join()
    wait_for(
        lambda: (
            not [
                thread
                for thread in threading.enumerate()
                if thread.name.startswith("paceline test")
            ]
        )
    )


def test_a_flow_that_ends_early_holds_nothing_up() -> None:
    ours, _ = line(3)
    log: list[Any] = []
    work = ours.start_job(
        job([Flow(through(log, "short", 1), 5), Flow(through(log, "long", 3), 5)], "both")
    )
    assert work.wait() == "both" and [
        (stage, name) for stage, name, _ in log if name == "long"
    ] == [(0, "long"), (1, "long"), (2, "long")]
    ours.stop(ViewChanged("over"))


def test_what_is_between_two_stages_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AHEAD", 100)
    ours, _ = line(2)
    gate, begun = threading.Event(), []

    class Gated(FinishedWork):
        def wait(self, timeout: float | None = None) -> Any:
            assert gate.wait(60)

    def steps(name: int) -> Steps:
        begun.append(name)
        yield Gated()

    def flows(elements: int, count: int) -> StagedJob:
        return job(Flow(steps(number), elements) for number in range(count))

    works = [ours.start_job(flows(30, 8))]
    wait_for(lambda: len(begun) >= 4)
    time.sleep(0.05)
    assert len(begun) == 4  # three between the stages, and one that waits for room
    gate.set()
    works += [ours.start_job(flows(1000, 3))]  # larger than the bound: one at a time
    for work in works:
        work.wait()
    assert len(begun) == 11
    ours.stop(ViewChanged("over"))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_an_error_of_ours_ends_the_line_as_the_first_one(stage: int) -> None:
    ours, spread = line(3)

    def fails() -> Steps:
        for _ in range(stage):
            yield FinishedWork()
        raise WorkerLost("rank 3 is gone", (3,))

    works = [
        ours.start_job(job([Flow(fails(), 1)])),
        ours.start_job(job([Flow(through([], "later", 3), 1)])),
    ]
    for work in works:
        with pytest.raises(ViewChanged, match="the first: rank 3 is gone"):
            work.wait()
        assert isinstance(work.exception(), ViewChanged)
    assert len(spread) == 1
    with pytest.raises(ViewChanged, match="the first"):
        ours.start_job(job([]))
    ours.stop(ViewChanged("over"))
    ours.join()


@pytest.mark.parametrize("where", ["flow", "later", "flows", "conclude"])
def test_an_error_of_the_users_ends_its_job_alone(where: str) -> None:
    ours, spread = line(2)

    def fail() -> Any:
        raise UsageError("no such thing")

    def steps() -> Steps:
        if where == "flow":
            fail()
        yield FinishedWork()
        if where == "later":
            fail()

    flows = fail if where == "flows" else lambda: [Flow(steps(), 1), Flow(through([], "x", 2), 1)]
    work = ours.start_job(
        StagedJob(flows, fail if where == "conclude" else lambda: 1, "a job", 10.0)
    )
    with pytest.raises(UsageError, match="no such thing"):
        work.wait()
    assert ours.start_job(job([], 7)).wait() == 7 and not spread
    ours.stop(ViewChanged("over"))


def test_waits_end() -> None:
    ours, _ = line(2)
    gate = threading.Event()

    class Never(FinishedWork):
        def wait(self, timeout: float | None = None) -> Any:
            gate.wait(60)

    def steps() -> Steps:
        yield Never()

    work = ours.start_job(job([Flow(steps(), 1)], deadline=0.2))
    with pytest.raises(DeadlineExceeded, match=r"a job has not ended within 0\.05 s"):
        work.wait(0.05)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.2 s"):
        work.wait()
    assert not work.done() and not ours.is_idle and work.exception() is None
    ours.stop(ViewChanged("closed"))
    with pytest.raises(ViewChanged, match="closed"):
        work.wait()
    with pytest.raises(ViewChanged, match="closed"):
        ours.start_job(job([]))
    gate.set()
    ours.join()


class TestSoon:
    """Jobs of which whoever starts them waits at once."""

    @staticmethod
    def threads(log: list[Any], name: str) -> set[str]:
        return {thread for _, found, thread in log if found == name}

    def test_the_thread_that_waits_does_it(self) -> None:
        ours, _ = line(3)
        log: list[Any] = []
        for turn in range(3):
            work = ours.start_job(
                job(
                    [Flow(through(log, f"{turn} {number}", 3), 10) for number in range(2)],
                    result=turn,
                ),
                soon=True,
            )
            assert not ours.is_idle and work.wait() == turn and work.done() and ours.is_idle
        me = threading.current_thread().name
        assert log == [
            (stage, f"{turn} {number}", me)
            for turn in range(3)
            for number in range(2)
            for stage in range(3)
        ]
        ours.stop(ViewChanged("over"))

    @pytest.mark.parametrize(
        "first",
        ["a job before it", "a job after it", "a look at it", "its error", "a wait with a limit"],
    )
    def test_the_threads_do_it_in_its_turn(self, first: str) -> None:
        ours, _ = line(2)
        log: list[Any] = []
        gate = threading.Event()

        def held() -> Steps:
            assert gate.wait(60)
            yield FinishedWork()

        before = [ours.start_job(job([Flow(held(), 1)]))] if first == "a job before it" else []
        work = ours.start_job(job([Flow(through(log, "soon", 2), 10)], "result"), soon=True)
        gate.set()
        if first == "a job after it":
            before.append(ours.start_job(job([Flow(through(log, "after", 2), 10)])))
        elif first == "a look at it":
            wait_for(work.done)
        elif first == "its error":
            assert work.exception() is None
        elif first == "a wait with a limit":
            assert work.wait(60.0) == "result"
        assert work.wait() == "result" and [each.wait() for each in before] == [None] * len(before)
        assert self.threads(log, "soon") == {"paceline test 0", "paceline test 1"}
        stages = [stage for stage, name, _ in log if name == "soon"]
        assert stages == [0, 1]
        ours.stop(ViewChanged("over"))

    def test_what_is_started_meanwhile_waits_for_its_end(self) -> None:
        ours, _ = line(2)
        log: list[Any] = []
        inside, gate = threading.Event(), threading.Event()

        def held() -> Steps:
            inside.set()
            assert gate.wait(60)
            yield from through(log, "soon", 2)

        work = ours.start_job(job([Flow(held(), 1)]), soon=True)
        thread = threading.Thread(target=work.wait, name="who waits", daemon=True)
        thread.start()
        assert inside.wait(60)
        later = ours.start_job(job([Flow(through(log, "later", 2), 1)]))
        time.sleep(0.02)
        assert not later.done()
        gate.set()
        later.wait()
        thread.join(60)
        assert [name for _, name, _ in log] == ["soon", "soon", "later", "later"] and self.threads(
            log, "soon"
        ) == {"who waits"}
        ours.stop(ViewChanged("over"))

    def test_its_errors_are_those_of_the_threads(self) -> None:
        ours, spread = line(2)

        def fails(error: Exception) -> Steps:
            yield FinishedWork()
            raise error

        with pytest.raises(UsageError, match="no such thing"):
            ours.start_job(job([Flow(fails(UsageError("no such thing")), 1)]), soon=True).wait()
        work = ours.start_job(job([Flow(fails(WorkerLost("rank 3 is gone", (3,))), 1)]), soon=True)
        with pytest.raises(ViewChanged, match="the first: rank 3 is gone"):
            work.wait()
        assert len(spread) == 1 and isinstance(work.exception(), ViewChanged)
        with pytest.raises(ViewChanged, match="the first"):
            ours.start_job(job([]), soon=True)

    def test_one_that_nobody_waits_for_is_over_with_the_line(self) -> None:
        ours, _ = line(2)
        log: list[Any] = []
        work = ours.start_job(job([Flow(through(log, "soon", 2), 1)]), soon=True)
        assert ours.finish(ViewChanged("closed"), lambda: None)
        with pytest.raises(ViewChanged, match="closed"):
            work.wait()
        assert not log
