"""Workers and servers are killed while optimizers step on servers, and nothing shows it but an
event.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import psutil
import pytest

from tests.harness.jobs import Job, Jobs, free_port, wait_for
from tests.harness.surviving_servers import ended, kill_primaries, servers
from tests.harness.survivors import (
    AT,
    PLACES,
    Outcome,
    apart,
    check,
    gap,
    let_go,
    outcome,
    pause,
    play,
    script,
    trains,
    until,
)

SOAK = pytest.mark.soak

SYNC = "ParameterServer(servers=2, bucket_mb=0.001)"
TWICE = "ParameterServer(servers=2, replicas=2, bucket_mb=0.001)"
SURVIVES = ("--min-workers", "1", "--sync")


@pytest.mark.slow
@pytest.mark.parametrize("rank", ["0", pytest.param("run.size - 1", marks=SOAK)])
def test_workers_killed_in_every_place(job: Jobs, alone: Callable[..., Outcome], rank: str) -> None:
    parts = {name: text.format(rank=rank, at=AT.format(rank=rank)) for name, text in PLACES.items()}
    found = play(job, "killed", *SURVIVES, SYNC, workers=6, nap=0, **parts)
    check(found, alone())
    assert found.size == 1 and [event.partition(" lost")[0] for event in found.events] == [
        f"rank {0 if rank == '0' else last} was" for last in (5, 4, 3, 2, 1)
    ]


def begun(job: Jobs, sync: str, workers: int = 3, *options: str, **parts: object) -> Job:
    """A training whose workers and servers are all there."""
    out = job.folder / "killed"
    out.mkdir()
    text = script(**({"start": "name='run', folder='killed/runs'"} | parts))
    launched = job.run(text, workers, *SURVIVES, sync, *options, OUT=str(out))
    trains(launched, out, workers)
    return launched


def until_there(launched: Job, count: int) -> None:
    """Wait for so many servers."""
    wait_for(lambda: len(servers(launched)) == count or launched.process.poll() is not None)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, *(pytest.param(which, marks=SOAK) for which in (1, 2, 3))])
def test_a_server_is_killed(job: Jobs, alone: Callable[..., Outcome], which: int) -> None:
    """A primary, or a copy: nothing is lost, and there are as many again soon."""
    wanted = alone()
    launched = begun(job, TWICE, nap=until(1, 0.6))
    pause(random.Random(which), 0.3)
    before = servers(launched)
    assert len(before) == 4
    before[which].kill()
    until_there(launched, 4)
    found = ended(job, launched)
    check(found, wanted)
    assert (
        found.size == 3 and len(found.events) == 1 and f"server {which % 2} on" in found.events[0]
    ), found.events
    assert gap(job.folder / "killed") < 60


@pytest.mark.slow
def test_a_server_without_a_copy_ends_the_run(job: Jobs) -> None:
    launched = begun(job, SYNC, 2, held=24)
    servers(launched)[1].kill()
    let_go(job.folder / "killed")
    end = launched.end()
    assert end.code == 1 and "no other server has a copy of its state" in end.err, end.err


@SOAK
def test_a_server_that_is_stopped_for_ever_is_lost(
    job: Jobs, alone: Callable[..., Outcome]
) -> None:
    wanted = alone()
    launched = begun(job, TWICE, nap=until(1, 0.6))
    servers(launched)[0].suspend()
    found = ended(job, launched)
    check(found, wanted)
    assert "server 0 on" in found.events[0] and gap(job.folder / "killed") < 60


@SOAK
@pytest.mark.parametrize("seed", range(30))
def test_a_worker_and_a_server_at_once_and_both_come_back(
    job: Jobs, alone: Callable[..., Outcome], seed: int
) -> None:
    wanted = alone()
    chance = random.Random(seed)
    launched = begun(job, TWICE, 3, "--restarts", "2", nap=until("has come", 0.6))
    pause(chance, 0.3)
    server, worker = chance.choice(servers(launched)), chance.choice(launched.workers())
    for process in chance.sample([server, worker], 2):
        process.kill()
    found = ended(job, launched)
    check(found, wanted)
    assert found.size == 3 and "has come" in found.events[-1], found.events


MANY = {
    "optimizer": "torch.optim.Adam(model[0].parameters(), 0.003)",
    "prepared": "other = run.prepare(torch.optim.SGD(model[2].parameters(), 0.01, momentum=0.9))",
    "between": "run.clip(model[0], 0.5); die(run.rank == 2 and run.steps == 5, 'clipped')",
    "after": "die(run.rank == 1 and run.steps == 20, 'one of two'); other.step(); other.zero_grad()",  # noqa: E501
}


@pytest.mark.slow
def test_in_turns_of_several_steps(job: Jobs, alone: Callable[..., Outcome]) -> None:
    """Lost after the sum was clipped by its norm: the step is made.

    Lost after one of two optimizers has stepped: it goes back.
    """
    found = play(job, "killed", *SURVIVES, TWICE, workers=3, nap=0, **MANY)
    check(found, alone(**MANY), close=1e-9)
    assert found.size == 1 and len(found.events) == 2, found.events


@SOAK
@pytest.mark.parametrize("victim", [0, 2])
def test_a_host_is_lost_with_its_servers(
    job: Jobs, alone: Callable[..., Outcome], victim: int
) -> None:
    """Also the first, which coordinates. Copies are on other hosts."""
    out = job.folder / "killed"
    out.mkdir()
    options = (
        *SURVIVES,
        "ParameterServer(replicas=2, bucket_mb=0.001)",
        "--hosts",
        "3",
        "--join",
        f"127.0.0.1:{free_port()}",
    )
    common = {"OUT": str(out), "PACELINE_SECRET": "5a" * 32, "PACELINE_INTERFACE": "lo"}
    text = script(start="name='run', folder='killed/runs'", nap=until(1))
    launched = [job.run(text, 2, *options, "--host-rank", str(rank), **common) for rank in range(3)]
    trains(launched[0], out, 6)
    pause(random.Random(victim), 0.3)
    mine = [
        psutil.Process(launched[victim].process.pid),
        *launched[victim].workers(),
        *servers(launched[victim]),
    ]
    assert len(mine) == 5
    for process in mine:
        process.kill()
    ends = [host.end() for host in launched]
    assert [end.code for end in ends] == [-9 if rank == victim else 0 for rank in range(3)], ends
    result = outcome(out, out)
    check(result, alone())
    assert result.size == 4 and gap(out) < 60, result.events


TOLD = (
    "run.is_first and (out / 'c').write_text(f'{len(run._backward.sync.link.connections.callers)} "
    "{len(run.events)}')"
)


@SOAK
@pytest.mark.timeout(3600)
def test_fifty_kills_of_primaries(job: Jobs, alone: Callable[..., Outcome]) -> None:
    wanted = alone(epochs=20)
    for seed in range(25):
        kill_primaries(job, seed, wanted, *SURVIVES, TWICE, after=TOLD)


@pytest.mark.slow
def test_through_a_codec_workers_stay_equal(job: Jobs, alone: Callable[..., Outcome]) -> None:
    """What a lost worker had kept is lost with it; a worker that comes, and a copy that is made
    anew, know what was told.
    """
    coded = TWICE.replace(")", ", codec=error_feedback(int8()))")
    launched = begun(
        job,
        coded,
        3,
        "--restarts",
        "1",
        start="name='run', folder='killed/runs', compare=5",
        nap=until("has come", 0.6),
    )
    servers(launched)[0].kill()
    launched.workers()[-1].kill()
    found = ended(job, launched)
    assert found.samples == alone().samples and found.size == 3
    assert apart(found, alone()) < 0.05
