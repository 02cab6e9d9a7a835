"""Workers are killed while they train, in every place of a turn and at random moments, and
nothing shows it but an event.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from paceline.cluster.control.commands import CommandPipe, Member, Roster
from paceline.elastic import recovery as surviving
from paceline.elastic.recovery import Recovery
from paceline.errors import ServerLost
from paceline.timings import RecoveryTimings
from tests.harness import short_timings
from tests.harness.jobs import Job, Jobs, free_port
from tests.harness.survivors import (
    AT,
    BATCH,
    NET,
    PLACES,
    SAMPLES,
    Outcome,
    check,
    gap,
    kill,
    let_go,
    outcome,
    pause,
    play,
    script,
    trains,
    until,
)

HOST = socket.gethostname()


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", "run.size - 1"])
def test_killed_in_every_place(job: Jobs, alone: Callable[..., Outcome], rank: str) -> None:
    parts = {name: text.format(rank=rank, at=AT.format(rank=rank)) for name, text in PLACES.items()}
    found = play(job, "killed", "--min-workers", "1", workers=6, nap=0, **parts)
    check(found, alone())
    assert found.size == 1 and [event.partition(" lost")[0] for event in found.events] == [
        f"rank {0 if rank == '0' else last} was" for last in (5, 4, 3, 2, 1)
    ]


OTHERS = {
    "adam": {"optimizer": "torch.optim.Adam(model.parameters(), 0.003)"},
    "batchnorm": {
        "model": (
            "model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, "
            "1)).double()"
        )
    },
    "readers": {"readers": 2},
    "a mean before": {"before": "run.mean(loss)"},
    "a mean after": {"after": "run.mean(loss)"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [kind if kind == "readers" else pytest.param(kind, marks=pytest.mark.soak) for kind in OTHERS],
)
def test_killed_at_a_random_moment(job: Jobs, alone: Callable[..., Outcome], kind: str) -> None:
    wanted = alone(**OTHERS[kind])
    chance, out = random.Random(kind), job.folder / "killed"
    out.mkdir()
    launched = job.run(
        script(start="name='run', folder='killed/runs'", held=24, **OTHERS[kind]),
        4,
        "--min-workers",
        "1",
        OUT=str(out),
    )
    trains(launched, out, 4)
    for _ in range(2):
        pause(chance, 0.4)
        kill(launched, chance)
    let_go(out)
    ended = launched.end()
    assert ended.code == 0, ended
    check(outcome(out, out), wanted, close=1e-9)


LATE = """
from paceline.cluster.control.commands import CommandPipe
breaking, here, already = CommandPipe.wait_for_breaking_view, os.getpid(), []
def late(orders, *given):
    found = breaking(orders, *given)
    while run.rank == 1 and len(orders.find_roster(orders.latest_view).workers) < 3 and not already:
        time.sleep(0.01)
    already.append(found)
    return orders.find_roster(orders.latest_view) if found else None
CommandPipe.wait_for_breaking_view = late
"""


@pytest.mark.slow
def test_some_begin_to_meet_before_they_hear_that_somebody_comes_and_some_after(
    job: Jobs, alone: Callable[..., Outcome]
) -> None:
    """They have to come together in one view: who is in the earlier one can't be left there
    until its deadline.
    """
    out = job.folder / "killed"
    out.mkdir()
    prepared = LATE.strip().replace("\n", "\n    ")
    text = script(
        start="name='run', folder='killed/runs'", nap=until("has come", 0.8), prepared=prepared
    )
    launched = job.run(text, 3, "--min-workers", "1", "--restarts", "1", OUT=str(out))
    trains(launched, out, 3)
    launched.workers()[-1].kill()
    ended = launched.end()
    assert ended.code == 0, ended
    found = outcome(out, out)
    check(found, alone())
    assert found.size == 3 and gap(out) < 60, found.events


def test_a_complaint_that_crosses_a_new_view_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers take it for one of the view before; and the new view, in which nobody is
    missing, mends nothing.
    """
    heard, told = os.pipe()
    view, said, met = [Member(10, 0, "box", "::1")], list[int](), list[int]()

    def broken(place: Any, number: int) -> None:
        said.append(number)
        os.write(told, Roster(number + 1, tuple(view), broken=number == 3).dump())

    recovery = object.__new__(Recovery)
    recovery.__dict__.update(
        worker=10,
        view=1,
        orders=CommandPipe(heard),
        _worker_context=SimpleNamespace(place=None),
        _agreement=None,
        _run=None,
        _timings=RecoveryTimings(view=0.2),
    )
    recovery.orders.watch_breaking_views(1, frozenset({10}), lambda: None)
    monkeypatch.setattr(surviving.events, "report_broken_view", broken)
    monkeypatch.setattr(surviving, "make_recovery_plan", lambda reaches: None)
    monkeypatch.setattr(surviving, "connect_store", MagicMock())
    for name, answer in {
        "_exchange_progress": {},
        "_make_groups": None,
        "_announce_recovery": None,
    }.items():
        monkeypatch.setattr(recovery, name, lambda *given, answer=answer: answer)
    monkeypatch.setattr(recovery, "_arm_view", lambda roster, members: met.append(roster.number))
    recovery.recover_from(ServerLost("server 0 is gone"))
    assert (said, met) == ([1, 2, 3], [4])
    os.close(told)


@pytest.mark.slow
def test_a_worker_comes_back(job: Jobs, alone: Callable[..., Outcome]) -> None:
    wanted = alone()
    out = job.folder / "killed"
    out.mkdir()
    text = script(start="name='run', folder='killed/runs'", nap=until("has come", 0.8))
    launched = job.run(
        text, 3, "--min-workers", "1", "--restarts", "1", "--mesh", "data=3", OUT=str(out)
    )
    trains(launched, out, 3)
    kill(launched, random.Random(1))
    ended = launched.end()
    assert ended.code == 0, ended
    found = outcome(out, out)
    check(found, wanted)
    views = [event for event in found.events if "(view" in event]
    assert found.size == 3 and [event.split(":")[0].split(" ", 2)[2] for event in views] == [
        "was lost",
        "has come",
    ]


@pytest.mark.slow
def test_a_stopped_worker_is_left_behind(job: Jobs) -> None:
    out = job.folder / "killed"
    out.mkdir()
    short = short_timings.environ(replacement={"stopped": 0.5, "look": 0.1})
    launched = job.run(
        script(start="name='run', folder='killed/runs'", held=24),
        3,
        "--min-workers",
        "1",
        OUT=str(out),
        **short,
    )
    trains(launched, out, 3)
    kill(launched, random.Random(1), signal.SIGSTOP)
    let_go(out)
    ended = launched.end()
    assert ended.code == 0 and "SIGSTOP" in ended.err, ended
    assert gap(out) < 60


@pytest.mark.slow
def test_an_error_that_comes_again_ends_the_job(job: Jobs) -> None:
    """The sample goes to another worker, whose error is the same."""
    launched = job.run(
        script(before="if 77 in index.tolist(): raise ValueError('sample 77 is broken')", nap=0),
        3,
        "--min-workers",
        "1",
        OUT=str(job.folder),
    )
    ended = launched.end()
    assert ended.code == 1 and "ValueError" in ended.last, ended
    assert "sample 77 is broken" in ended.err


ONCE = """
            if run.rank == 1 and run.steps == 5 and not (out / "once").exists():
                (out / "once").touch()
                raise ValueError("only here")
"""


def test_an_error_on_one_worker_is_survived(job: Jobs, alone: Callable[..., Outcome]) -> None:
    wanted = alone()
    found = play(job, "killed", "--min-workers", "1", workers=3, nap=0, before=ONCE)
    check(found, wanted)
    assert len(found.events) == 1


@pytest.mark.slow
def test_before_training_begins_a_death_ends_the_job(job: Jobs) -> None:
    launched = job.run(
        script(prepared="die(run.rank == 1, 'early')"), 3, "--min-workers", "1", OUT=str(job.folder)
    )
    ended = launched.end()
    assert ended.code == 137 and "SIGKILL" in ended.last, ended


INSIDE = "Sequence((AllReduce(), 'local'), (LocalSGD(4), 'host'))"
MORE = (
    INSIDE,
    "AllReduce(codec=error_feedback(int8()))",
    "Gossip()",
    "AllReduce(codec=powersgd(2))",
    "LocalSGD(4, momentum='averaged', fragments=2, delay=1)",
    "Gossip(codec=int8())",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sync", ["LocalSGD(4)", *(pytest.param(sync, marks=pytest.mark.soak) for sync in MORE)]
)
def test_other_strategies_go_on(job: Jobs, sync: str) -> None:
    chance, out = random.Random(sync), job.folder / "killed"
    out.mkdir()
    options = ("--min-workers", "1", "--restarts", "2", "--sync", sync)
    start = "name='run', folder='killed/runs', replicate=1"
    launched = job.run(script(start=start, epochs=5, nap=0.06, held=48), 4, *options, OUT=str(out))
    trains(launched, out, 4)
    for _ in range(2):
        pause(chance, 0.6)
        kill(launched, chance)
    let_go(out)
    ended = launched.end()
    assert ended.code == 0, ended
    found = outcome(out, out)
    assert found.logged == list(range(1, 5 * SAMPLES // BATCH + 1))
    assert found.size >= 2 and sum("lost" in event for event in found.events) >= 1


FORMING = """
from paceline.comm.shm.shared_group import SharedGroup
empty = SharedGroup.empty
def dying(group, *given):
    die(run.rank == 1 and group.size == 3, "while new groups are formed")
    return empty(group, *given)
SharedGroup.empty = dying
"""


@pytest.mark.slow
def test_another_dies_while_new_groups_are_formed(job: Jobs) -> None:
    """Those who had begun to move to these groups go on from where all last agreed to be, as the
    others do.
    """
    out = job.folder / "killed"
    out.mkdir()
    prepared, before = (
        FORMING.strip().replace("\n", "\n    "),
        "die(run.rank == 3 and run.steps == 2, 'first')",
    )
    text = script(
        start="name='run', folder='killed/runs', replicate=1, compare=1",
        prepared=prepared,
        before=before,
        nap=0,
    )
    ended = job.run(text, 4, "--min-workers", "1", "--sync", "LocalSGD(4)", OUT=str(out)).end()
    assert ended.code == 0, ended
    found = outcome(out, out)
    assert found.size == 2 and [event.partition(" lost")[0] for event in found.events] == [
        "ranks 1, 3 were"
    ]
    assert (out / "while new groups are formed").exists() and found.logged == list(
        range(1, 3 * SAMPLES // BATCH + 1)
    )


# Rank 2 dies in a call once it is there for it; rank 0 hears of that before rank 1 has come, and
# rank 1 only in its next call.
AHEAD = """
from paceline.comm.cancellation import CancelScope
from paceline.comm.shm.shared_group import SharedGroup
from paceline.comm.shm.waiting import RankWaiter
agree, wait, trip = SharedGroup.gather_bytes, RankWaiter.wait_until_ready, CancelScope.trip
me, inside = run.rank, []
def until(mark):
    while not (out / mark).exists(): time.sleep(0.001)
def agreeing(group, payload, **named):
    if (out / "cut off").exists():
        (out / "next call").touch()
    elif {what!r} in payload and run.steps == 4 and group.size == 3:
        inside.append(me)
        if me == 1: until("cut off")
    try:
        return agree(group, payload)
    except Exception:
        if inside == [0]: (out / "cut off").touch()
        raise
    finally:
        inside.clear()
def waiting(waiter, *given):
    if inside == [0]: (out / "waits").touch()
    if inside == [2]:
        until("waits")
        die(True, "came")
    return wait(waiter, *given)
def hearing(scope, error):
    if me == 1: until("next call")
    trip(scope, error)
SharedGroup.gather_bytes, RankWaiter.wait_until_ready, CancelScope.trip = agreeing, waiting, hearing
"""
BEHIND = {
    "LocalSGD(4)": (b"comparing replicas", "pass"),
    "AllReduce()": (b"settled", "run.mean(loss)"),
    "ParameterServer()": (b"settled", "pass"),
}


@pytest.mark.alike(2)
@pytest.mark.slow
@pytest.mark.parametrize("sync", BEHIND)
def test_who_is_cut_off_takes_the_turns_that_others_have_taken_since(
    job: Jobs, alone: Callable[..., Outcome], sync: str
) -> None:
    what, before = BEHIND[sync]
    prepared = AHEAD.strip().replace("\n", "\n    ").format(what=what)
    more = "compare=4" if "Local" in sync else "compare=None"
    found = play(
        job,
        "killed",
        "--min-workers",
        "1",
        "--sync",
        sync,
        workers=3,
        nap=0,
        more=more,
        prepared=prepared,
        before=before,
    )
    assert (job.folder / "killed" / "next call").exists() and [
        event.split(":")[0] for event in found.events
    ] == ["rank 2 was lost"]
    if "Local" in sync:
        assert found.logged == list(range(1, 3 * SAMPLES // BATCH + 1)) and found.size == 2
    else:
        check(found, alone())


def three_hosts(job: Jobs, out: Path, **parts: Any) -> list[Job]:
    """The launchers of a run of three hosts with two workers each."""
    options = ("--min-workers", "1", "--hosts", "3", "--join", f"127.0.0.1:{free_port()}")
    common = {"OUT": str(out), "PACELINE_SECRET": "5a" * 32, "PACELINE_INTERFACE": "lo"}
    # who is killed or leaves is missed at once
    common |= short_timings.environ(membership={"silence": 60.0, "call": 60.0})
    text = script(start="name='run', folder='killed/runs'", **parts)
    return [job.run(text, 2, *options, "--host-rank", str(rank), **common) for rank in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, pytest.param(2, marks=pytest.mark.soak)])
def test_a_host_is_lost(job: Jobs, alone: Callable[..., Outcome], victim: int) -> None:
    """Also the first, which coordinates; its launcher and its workers are gone at once."""
    out = job.folder / "killed"
    out.mkdir()
    launched = three_hosts(job, out, held=24)
    trains(launched[0], out, 6)
    pause(random.Random(victim), 0.3)
    for process in [psutil.Process(launched[victim].process.pid), *launched[victim].workers()]:
        process.kill()
    let_go(out)
    ends = [host.end() for host in launched]
    assert [end.code for end in ends] == [-9 if rank == victim else 0 for rank in range(3)], ends
    result = outcome(out, out)
    check(result, alone())
    assert result.size == 4 and gap(out) < 60


@pytest.mark.slow
def test_a_worker_that_hangs_is_named_with_its_stack(job: Jobs) -> None:
    """Others wait for it; its launcher says where it is, and gives it up before they do."""
    hang = 'open(out / "hung", "w").close()\n                while True: pass'
    before = f"if run.rank == 2 and run.steps == 20:\n                {hang}"
    for seconds in (6.0, 20.0, 60.0):  # more where the machine is busy, and others seem to hang too
        out = job.folder / f"killed{seconds:g}"
        out.mkdir()
        text = script(
            start=f"name='run', folder='{out.name}/runs', deadline={seconds}", before=before
        )
        ended = job.run(
            text,
            3,
            "--min-workers",
            "1",
            OUT=str(out),
            **short_timings.environ(hangs={"answer": 60.0}),
        ).end()
        if (
            ended.code == 0
            and "rank 2 is given up" in ended.err
            and (found := outcome(out, out)).size == 2
        ):
            break
    assert ended.code == 0, ended
    line = next(
        number
        for number, content in enumerate((job.folder / "script.py").read_text().splitlines(), 1)
        if "while True" in content
    )
    told = [
        content
        for content in ended.err.splitlines()
        if "others wait for rank 2" in content or f"line {line} in" in content
    ]
    assert len(told) == 2 and HOST in told[0] and "(backward of step 20)" in told[0], ended.err
    assert re.search(r"script\d*\.py", told[1]), ended.err
    assert "rank 2 is given up" in ended.err
    assert found.size == 2 and gap(out) < 60


@pytest.mark.slow
def test_a_host_that_is_asked_to_leave_goes_after_its_step(
    job: Jobs, alone: Callable[..., Outcome]
) -> None:
    out = job.folder / "killed"
    out.mkdir()
    launched = three_hosts(job, out, nap=until(1))
    trains(launched[0], out, 6)
    launched[1].process.terminate()
    ends = [host.end() for host in launched]
    assert [end.code for end in ends] == [0, 128 + signal.SIGTERM, 0], ends
    result = outcome(out, out)
    check(result, alone())
    assert result.size == 4 and gap(out) < 60 and "asked to leave" in ends[1].err


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_kills(job: Jobs, alone: Callable[..., Outcome]) -> None:
    """Of random workers at random moments, three in a run; those that die come back."""
    wanted = alone(epochs=8)
    for seed in range(34):
        chance, out = random.Random(seed), job.folder / f"killed{seed}"
        out.mkdir()
        text = script(start=f"name='run', folder='{out.name}/runs'", epochs=8, nap=0.03)
        launched = job.run(text, 4, "--min-workers", "1", "--restarts", "3", OUT=str(out))
        trains(launched, out, 4)
        for _ in range(3):
            pause(chance, 2.0)
            kill(launched, chance)
        ended = launched.end()
        assert ended.code == 0, (seed, ended)
        check(outcome(out, out), wanted)
        assert gap(out) < 60, seed


@pytest.mark.slow
def test_fewer_than_the_job_needs_save_and_wait(job: Jobs, alone: Callable[..., Outcome]) -> None:
    wanted = alone()
    out = job.folder / "killed"
    out.mkdir()
    options, later = (
        ["--min-workers", "3", "--restarts", "1"],
        short_timings.environ(replacement={"backoff": 3.0}),
    )
    launched = job.run(
        script(start="name='run', folder='killed/runs'", held=24),
        3,
        *options,
        OUT=str(out),
        **later,
    )
    trains(launched, out, 3)
    kill(launched, random.Random(2))
    let_go(out)
    ended = launched.end()
    assert ended.code == 0, ended
    found = outcome(out, out)
    check(found, wanted)
    assert found.size == 3 and [
        event for event in found.events if event.startswith("2 of 3 workers are left: saved step-")
    ]
    assert list((out / "runs" / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_they_wait_no_longer_than_they_are_told_to(job: Jobs) -> None:
    out = job.folder / "killed"
    out.mkdir()
    text = script(start="name='run', folder='killed/runs'", held=24)
    launched = job.run(text, 3, "--min-workers", "3", "--patience", "10", OUT=str(out))
    trains(launched, out, 3)
    kill(launched, random.Random(2))
    let_go(out)
    ended = launched.end()
    assert ended.code == 137 and "SIGKILL" in ended.last, ended
    assert list((out / "runs" / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_scheduler_that_was_not_prepared_is_refused(job: Jobs) -> None:
    prepared = "torch.optim.lr_scheduler.StepLR(optimizer, 5)"
    ended = job.run(script(prepared=prepared), 2, "--min-workers", "1", OUT=str(job.folder)).end()
    assert ended.code == 1 and "not given to run.prepare" in ended.err, ended


@pytest.mark.slow
def test_a_scaler_that_was_not_prepared_is_refused(job: Jobs) -> None:
    parts = {
        "prepared": "scaler = torch.amp.GradScaler('cpu', init_scale=2.0)",
        "between": "scaler.step(optimizer); scaler.update(); continue",
    }
    text = script(**parts).replace("loss.backward()", "scaler.scale(loss).backward()")
    ended = job.run(text, 2, "--min-workers", "1", OUT=str(job.folder)).end()
    assert ended.code == 1 and "a GradScaler that was not given to run.prepare" in ended.err, ended
    prepared = text.replace("init_scale=2.0)", "init_scale=2.0); run.prepare(scaler)")
    assert job.run(prepared, 2, "--min-workers", "1", OUT=str(job.folder)).end().code == 0


@pytest.mark.slow
def test_two_at_once(job: Jobs, alone: Callable[..., Outcome]) -> None:
    out = job.folder / "killed"
    out.mkdir()
    launched = job.run(
        script(start="name='run', folder='killed/runs'", held=24),
        4,
        "--min-workers",
        "1",
        OUT=str(out),
    )
    trains(launched, out, 4)
    pause(random.Random(5), 0.3)
    for process in launched.workers()[1:3]:
        process.kill()
    let_go(out)
    ended = launched.end()
    assert ended.code == 0, ended
    found = outcome(out, out)
    check(found, alone())
    assert found.size == 2 and gap(out) < 60


# What is kept moves with the state of a worker that is healed: it dies of it, the first time.
MORTAL = """
class Mortal:
    def state_dict(self): return {"x": torch.zeros(3)}
    def load_state_dict(self, state): die(os.environ.get("PACELINE_JOINING") == "1", "while it is healed")
"""  # noqa: E501


@pytest.mark.slow
def test_a_worker_dies_while_it_is_healed(job: Jobs, alone: Callable[..., Outcome]) -> None:
    """The others go on, and the next one in its place is healed."""
    out = job.folder / "killed"
    out.mkdir()
    slowly = "0 if (out / 'go').exists() else 1.0"
    parts = {"model": NET + MORTAL, "prepared": "run.keep('mortal', Mortal())", "nap": slowly}
    launched = job.run(
        script(start="name='run', folder='killed/runs'", **parts),
        3,
        "--min-workers",
        "1",
        "--restarts",
        "3",
        OUT=str(out),
    )
    trains(launched, out, 3)
    launched.workers()[1].kill()
    trains(launched, out, 4)
    (out / "go").touch()
    ended = launched.end()
    assert ended.code == 0, ended
    found = outcome(out, out)
    check(found, alone())
    assert (out / "while it is healed").exists() and found.size == 3 and gap(out) < 60, found.events
