"""A worker that doesn't come is named by its launcher while the others wait, with its place and
its stack: in every `paceline run`.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import paceline as pl
from paceline.cluster.control import commands
from paceline.cluster.discover import Place
from paceline.comm.agreement import Agreement
from paceline.comm.axis_meter import AxisMeter
from paceline.comm.solo import SoloGroup
from paceline.errors import UsageError
from paceline.record.hangs import HangDetector, check_late_after
from paceline.session.run import Run
from paceline.timings import DEFAULT_TIMINGS, HangTimings, Timings
from tests.harness import short_timings
from tests.harness.jobs import Ended, Jobs, free_port, wait_for
from tests.harness.runs import workers

HOST = socket.gethostname()

TRAINING = """
import signal
with pl.start({start}) as run:
    model, optimizer, loader = parts(run, samples=160)
    run._collector._meetings.next = 1000  # or workers would meet for their logs in a step that depends on how fast they are
    for x, y in loader:
        if run.rank == run.size - 1 and run.steps == 5:
            {hang}
        step(run, model, optimizer, x, y)
        {after}
"""  # noqa: E501
# where all workers answer when they are asked, and a busy machine is slow
ANSWERED = short_timings.environ(hangs={"answer": 60.0})
ENDLESS, QUIET = "while True: pass", "while True: time.sleep(0.01)"  # the second takes no processor


def training(hang: str, start: str, after: str = "pass") -> str:
    return TRAINING.format(hang=hang, start=start, after=after)


def until_told(
    job: Jobs, hang: str, start: str = "deadline={seconds}, late_after=0.5", *, answers: bool = True
) -> tuple[Ended, float]:
    """The training whose last worker does this, and the seconds that were given for it: more
    where a busy machine said nothing in time.
    """
    for seconds in (5.0, 20.0, 60.0):
        text = training(hang.format(seconds=seconds / 2), start.format(seconds=seconds))
        ended = job.run(text, **(ANSWERED if answers else {})).end()
        if told(ended):
            break
    return ended, seconds


def place_of(job: Jobs, hang: str) -> str:
    """Where the stack has to end."""
    lines = (job.folder / "script.py").read_text().splitlines()
    return (
        f'.py", line {next(number for number, line in enumerate(lines, 1) if hang in line)} in '
        "<module>"
    )


def told(ended: Ended) -> list[str]:
    """What a launcher said of who is waited for in step 5: a head, and its stack.

    (On a busy machine somebody may be late before.)
    """
    lines = [
        line
        for line in ended.err.splitlines()
        if line.startswith(("paceline: others wait", "paceline:   "))
    ]
    heads = [
        number
        for number, line in enumerate(lines)
        if "others wait" in line and "of step 5)" in line
    ]
    assert len(heads) <= 1, ended.err
    return lines[heads[0] :] if heads else []


HEAD = (
    f"paceline: others wait for rank 1 on {HOST} (backward of step 5): "
    "its last call was backward of step 4, "
)


@pytest.mark.slow
def test_an_endless_loop_is_named_with_its_stack_and_the_run_ends_at_the_deadline(
    job: Jobs,
) -> None:
    ended, seconds = until_told(job, ENDLESS)
    head, *stack = told(ended)
    assert head.startswith(HEAD) and any(place_of(job, ENDLESS) in line for line in stack), (
        ended.err
    )
    assert ended.code == 1 and "DeadlineExceeded" in ended.last, ended.err
    waited = (
        rf"step 5, backward: rank 0 waited (\S+) s in vain for rank 1 on {HOST}, last seen at "
        r"backward of step 4"
    )
    assert (found := re.search(waited, ended.err)) is not None and float(found[1]) >= seconds, (
        ended.err
    )


@pytest.mark.slow
def test_a_stopped_worker_is_named_as_stopped(job: Jobs) -> None:
    """And the signals that a script takes for itself stay its own."""
    taken = "signal.signal(signal.SIGUSR1, lambda *_: os._exit(3)); "
    ended, _ = until_told(job, f"{taken}os.kill(os.getpid(), signal.SIGSTOP)", answers=False)
    (head,) = told(ended)
    assert (
        head.startswith(HEAD.partition(": its")[0])
        and "it was stopped by a signal (SIGSTOP); `kill -CONT " in head
    ), ended.err
    assert ended.code == 1 and "DeadlineExceeded" in ended.last, ended.err


@pytest.mark.slow
def test_a_call_that_is_skipped_is_named_at_once(job: Jobs) -> None:
    """The workers don't come to the same call, so nobody has to wait for a deadline."""
    ended = job.run(
        training("pass", start="", after="if run.rank == 0 or run.steps != 5: run.mean(1.0)")
    ).end()
    lines = (job.folder / "script.py").read_text().splitlines()
    mean, backward = (
        next(n for n, line in enumerate(lines, 1) if text in line)
        for text in ("run.mean(1.0)", "loss.backward()")
    )
    here = rf"rank 0 on {HOST} at run\.mean of step 5 \(script\.py:{mean}\)"
    # logs meet about once a second
    there = (
        rf"rank 1 on {HOST} at (backward of step 6 \(script\.py:{backward}\)|run\.log of step 6)"
    )
    assert re.search(f"workers have come apart: {here}; {there}", ended.err) and not told(ended), (
        ended.err
    )
    assert ended.code == 1 and "Mismatch" in ended.last, ended.err


CUT = """
with pl.start(deadline={seconds}, late_after=0.5, mesh="tensor") as run:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    cut = pl.tensor({{"0": pl.column(), "2": pl.row()}})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = DataLoader(TensorDataset(torch.ones(160, 4), torch.ones(160, 1)), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader, cut=cut)
    for x, y in loader:
        if run.rank == 1 and run.steps == 5:
            while True: time.sleep(0.01)
        step(run, model, optimizer, x, y)
"""


@pytest.mark.slow
def test_who_is_waited_for_along_an_axis_of_the_mesh_is_named(job: Jobs) -> None:
    """The others wait in the middle of a layer, and in no call of all."""
    for seconds in (5.0, 20.0, 60.0):
        ended = job.run(CUT.format(seconds=seconds), **ANSWERED).end()
        lines = [line for line in ended.err.splitlines() if "others wait" in line]
        if lines:
            break
    last = "its last call was output of 2 along `tensor` of step 4, "
    head = (
        f"paceline: others wait for rank 1 on {HOST} (output of 2 along `tensor` of step 5): {last}"
    )
    assert len(lines) == 1 and lines[0].startswith(head) and place_of(job, QUIET) in ended.err, (
        ended.err
    )
    assert (
        ended.code == 1
        and f"This was at step 5: rank 1 on {HOST}, last seen at run.log of step " in ended.err
    ), ended.err


@pytest.mark.slow
def test_the_launcher_of_its_host_shows_it_where_others_wait_on_another(job: Jobs) -> None:
    common = {"PACELINE_SECRET": "5a" * 32, "PACELINE_INTERFACE": "lo", **ANSWERED}
    for seconds in (5.0, 20.0, 60.0):
        text = training(QUIET, f"deadline={seconds}, late_after=0.5")
        options = ("--hosts", "2", "--join", f"127.0.0.1:{free_port()}")
        launched = [
            job.run(text, 1, *options, "--host-rank", str(host), **common) for host in range(2)
        ]
        first, second = (one.end() for one in launched)
        if told(second):
            break
    head, *stack = told(second)
    assert (
        head.startswith(HEAD)
        and any(place_of(job, QUIET) in line for line in stack)
        and not told(first)
    ), (first.err, second.err)
    assert first.code == second.code == 1


@pytest.mark.slow
def test_who_comes_after_all_is_named_after_as_long_as_was_asked_for(job: Jobs) -> None:
    """`late_after` is honoured: from these calls five seconds would be learnt.

    And a run in which all come ends well.
    """
    ended, _ = until_told(job, "time.sleep({seconds})", "late_after=0.5")
    head, *stack = told(ended)
    assert (
        head.startswith(HEAD)
        and any(place_of(job, "time.sleep") in line for line in stack)
        and ended.code == 0
    ), ended.err


def test_a_time_that_can_not_be_honoured_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"late_after=200 can't be honoured: .* at most 116 \(.* deadline=120\)"
    ):
        pl.start(late_after=200)
    with pytest.raises(UsageError, match="late_after=0 "):
        pl.start(late_after=0)
    check_late_after(3.0, deadline=6.0)  # half of a short deadline


class Worker:
    """One that watches itself, with a launcher at the other end of its pipes."""

    def __init__(
        self,
        deadline: float,
        late_after: float | None = None,
        *,
        number: int | None = None,
        timings: Timings = DEFAULT_TIMINGS,
    ) -> None:
        self.now = time.monotonic() - 1000.0
        self.agreement = Agreement(SoloGroup(), step=lambda: 3)
        self._reports, report = os.pipe()
        heard, self.orders = os.pipe()
        self.shown, stack = os.pipe()
        os.set_blocking(self.shown, False)
        self.descriptors = [self._reports, report, heard, self.orders, self.shown, stack]
        self.place = Place(
            report_fd=report, orders_fd=heard, stack_fd=stack, worker=number, timings=timings
        )
        self.meter = AxisMeter("tensor")
        self.watching = HangDetector(
            self.place, self.agreement, deadline, late_after, others=(self.meter,)
        )
        self._lines = os.fdopen(os.dup(self._reports))

    def report(self) -> dict[str, object]:
        """What it says next."""
        found: dict[str, object] = json.loads(self._lines.readline())
        return found

    def called(self, *intervals: float) -> None:
        """Calls have ended with these intervals (seconds) between them."""
        for interval in intervals:
            self.now += interval
            self.agreement.ended.append(self.now)

    def close(self) -> None:
        self._lines.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@pytest.fixture
def worker() -> Iterator[type[Worker]]:
    made: list[Worker] = []

    class Made(Worker):
        def __init__(self, *args: float, **options: int) -> None:
            super().__init__(*args, **options)
            made.append(self)

    before = signal.getsignal(commands.STACK_SIGNAL)
    yield Made
    for each in made:
        each.watching.stop_watching()
    for thread in [each for each in threading.enumerate() if each.name == "paceline watching"]:
        thread.join(60)
    for each in made:
        each.close()
    faulthandler.unregister(commands.STACK_SIGNAL)
    signal.signal(commands.STACK_SIGNAL, before)


class TestTheLimit:
    def test_is_ten_times_what_is_usual_and_five_seconds_at_least(self, worker):
        found = worker(120.0)
        found.called(*[0.1] * 20)
        assert found.watching.late_after_seconds == 5.0
        found.called(*[1.0] * 40)
        assert found.watching.late_after_seconds == pytest.approx(10.0)

    def test_is_three_times_the_longest(self, worker):
        found = worker(120.0)
        found.called(*[0.1] * 20, 9.0, *[0.1] * 20)
        assert found.watching.late_after_seconds == pytest.approx(27.0)
        found.called(*[0.1] * 64)
        assert found.watching.late_after_seconds == 5.0

    def test_is_short_enough_for_the_deadline(self, worker):
        found = worker(120.0)
        assert found.watching.late_after_seconds == 116.0  # nothing is known yet
        found.called(*[20.0] * 20)
        assert found.watching.late_after_seconds == 116.0
        assert worker(6.0).watching.late_after_seconds == 3.0

    def test_is_what_was_asked_for(self, worker):
        found = worker(120.0, 2.0)
        found.called(*[1.0] * 20)
        assert found.watching.late_after_seconds == 2.0


class TestWatching:
    def test_shows_stacks_and_says_where_it_is(self, worker):
        """Whether it waits or not, and where losses are survived another thread asks."""
        found = worker(120.0)
        assert found.report()["event"] == "shows"
        os.kill(os.getpid(), commands.STACK_SIGNAL)
        assert b"test_hangs.py" in os.read(found.shown, 1 << 16)
        found.agreement.meet("run.mean")
        os.write(found.orders, commands.ASK_COMMAND)
        where = found.report()
        assert (where["event"], where["call"], where["waits"]) == ("where", 1, False)
        other = worker(120.0, 0.3, number=7)
        os.write(other.orders, commands.ASK_COMMAND)
        assert other.report()["event"] == "shows"
        assert other.agreement.attempt_call(other.report)["event"] == "late"
        other.agreement.attempt_call(other.watching.answer_launcher)
        where = other.report()
        assert (where["event"], where["call"], where["waits"]) == ("where", 1, True)

    def test_sees_waits_along_axes_of_the_mesh(self, worker):
        """No call of all is under way, and the worker is taken for one that waits all the same."""
        found = worker(120.0, 0.3)
        assert found.report()["event"] == "shows"
        found.agreement.meet("run.mean")
        with found.meter.measure_exchange("output of up"):
            late = found.report()
            assert (late["event"], late["call"], late["what"]) == (
                "late",
                1,
                "output of up along `tensor` of step 0",
            )
            os.write(found.orders, commands.ASK_COMMAND)
            where = found.report()
            assert (where["event"], where["what"], where["waits"]) == (
                "where",
                "output of up along `tensor` of step 0",
                True,
            )
        with found.meter.measure_exchange("output of down"):  # of the same step, which is one call
            pass
        os.write(found.orders, commands.ASK_COMMAND)
        where = found.report()
        assert (where["call"], where["what"], where["waits"]) == (
            2,
            "output of down along `tensor` of step 0",
            False,
        )

    def test_leaves_a_handler_of_the_script_s_alone(self, worker):
        signal.signal(commands.STACK_SIGNAL, lambda *_: None)
        found = worker(120.0)
        os.write(found.orders, commands.ASK_COMMAND)
        assert found.report()["event"] == "where"  # and not before that it shows its stacks

    def test_tells_of_a_call_that_takes_too_long_once_and_again_before_it_is_given_up(self, worker):
        found = worker(2.0, 0.3)
        assert found.report()["event"] == "shows"

        def wait():
            late = [found.report(), found.report()]
            assert [(each["event"], each["call"], each["given_up"]) for each in late] == [
                ("late", 1, False),
                ("late", 1, True),
            ]
            assert late[0]["what"] == "backward of step 3"

        found.agreement.meet("run.mean")
        found.agreement.settle_call(wait, "backward")
        os.write(found.orders, commands.ASK_COMMAND)
        assert found.report()["call"] == 2  # nothing more was told

    def test_tells_of_a_wait_for_some_of_the_others(self, worker):
        found = worker(2.0, 0.3)
        found.report()
        late = found.agreement.wait_for_some(found.report, "shares of a stream")
        assert (late["event"], late["what"]) == ("late", "shares of a stream of step 3")

    def test_bears_again_what_it_has_borne(self, worker):
        """Whoever was told of and came after all isn't told of again for the like, however quick
        other calls are.
        """
        found = worker(120.0, timings=Timings(hangs=HangTimings(least=0.2)))
        found.report()
        found.called(*[0.001] * 64)
        found.agreement.attempt_call(found.report)  # comes to its end as soon as it was told of
        found.called(*[0.001] * 65)
        found.agreement.attempt_call(
            lambda: wait_for(lambda: found.watching.late_after_seconds >= 0.4)
        )


def test_layers_and_streams_that_wait_for_others_are_seen() -> None:
    """They aren't calls that are counted; while they last, it can be seen what they are."""

    class Endless(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(torch.ones(40, 4, dtype=torch.float64))

    def body(run: Run) -> list[str]:
        model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
        model, loader = run.prepare(model, DataLoader(Endless(), batch_size=8))
        seen = []
        for x in loader:
            seen.append(run._agreement.what)
            model(x)
            seen.append(run._agreement.what)
            assert run._agreement.since is None
            model(x).sum().backward()
        return seen[2:4]

    assert workers(2, body)[1][1] == "batchnorm 1 of step 1"
