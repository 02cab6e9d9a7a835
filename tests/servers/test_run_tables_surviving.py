"""Workers and servers of sparse tables are killed, and nothing shows it but an event: rows and
layers have made the same steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.harness.jobs import Job, Jobs, free_port
from tests.harness.surviving_servers import ended, kill_primaries, servers, until_told
from tests.harness.surviving_tables import parts
from tests.harness.survivors import (
    AT,
    PLACES,
    Outcome,
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
SURVIVES = ("--min-workers", "1")
SERVED = ("--sync", "ParameterServer(servers=1, bucket_mb=0.001)")


def begun(job: Jobs, *options: str, workers: int = 3, replicas: int = 2, **more: Any) -> Job:
    """A training whose workers and servers are all there."""
    out = job.folder / "killed"
    out.mkdir()
    text = script(**parts(replicas, **({"start": "name='run', folder='killed/runs'"} | more)))
    launched = job.run(text, workers, *SURVIVES, *options, OUT=str(out))
    trains(launched, out, workers)
    return launched


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "dense"),
    [
        ("0", ()),
        *(
            pytest.param(*case, marks=SOAK)
            for case in (("run.size - 1", ()), ("0", SERVED), ("run.size - 1", SERVED))
        ),
    ],
)
def test_workers_killed_in_every_place(
    job: Jobs, alone: Callable[..., Outcome], rank: str, dense: tuple[str, ...]
) -> None:
    places = {
        name: text.format(rank=rank, at=AT.format(rank=rank))
        for name, text in PLACES.items()
        if name != "prepared"
    }
    places["prepared"] = (
        "model.top.weight.register_hook(lambda _: "
        f"die({AT.format(rank=rank)}7, 'the last gradient'))"
    )
    found = play(job, "killed", *SURVIVES, *dense, workers=6, nap=0, **parts(**places))
    check(found, alone(**parts()))
    assert found.size == 1 and [event.partition(" lost")[0] for event in found.events] == [
        f"rank {0 if rank == '0' else last} was" for last in (5, 4, 3, 2, 1)
    ]


TOLD = (
    "callers = run._prepared.tables._servers.connections.callers; "
    "run.is_first and (out / 'c').write_text(f'{len(callers)} {len(run.events)}')"
)


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, *(pytest.param(which, marks=SOAK) for which in (1, 2, 3))])
def test_a_server_is_killed_and_then_its_copy(
    job: Jobs, alone: Callable[..., Outcome], which: int
) -> None:
    """Nothing is lost, and there are as many again soon: in the end the one that was made anew
    has the only rows that are asked for.
    """
    launched = begun(job, nap=until(2, 0.6), after=TOLD)
    pause(random.Random(which), 0.3)
    before = servers(launched)
    assert len(before) == 4, launched.end()
    for count, victim in enumerate((before[which], before[(which + 2) % 4])):
        until_told(launched, job.folder / "killed" / "c", f"4 {count}")
        victim.kill()
    found = ended(job, launched)
    check(found, alone(**parts()))
    assert found.size == 3 and len(found.events) == 2, found.events
    assert all(f"table server {which % 2} on" in event for event in found.events), found.events
    assert gap(job.folder / "killed") < 60


@pytest.mark.slow
def test_a_server_without_a_copy_ends_the_run(job: Jobs) -> None:
    launched = begun(job, workers=2, replicas=1, held=24)
    servers(launched)[1].kill()
    let_go(job.folder / "killed")
    end = launched.end()
    assert end.code == 1 and "no other server has a copy of its state" in end.err, end.err


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 30))])
def test_a_worker_and_a_server_at_once_and_both_come_back(
    job: Jobs, alone: Callable[..., Outcome], seed: int
) -> None:
    chance = random.Random(seed)
    launched = begun(
        job, "--restarts", "2", *(SERVED if seed % 3 == 1 else ()), nap=until("has come", 0.6)
    )
    pause(chance, 0.3)
    found = servers(launched)[:4]  # the dense part's is the youngest
    for process in chance.sample([chance.choice(found), chance.choice(launched.workers())], 2):
        process.kill()
    ends = ended(job, launched)
    check(ends, alone(**parts()))
    assert ends.size == 3 and "has come" in ends.events[-1], ends.events


# The second table is in a model of its own, with an optimizer of its own.
TWO = """
class Few(nn.Module):
    def __init__(self):
        super().__init__()
        self.few = pl.SparseEmbedding(40, 3, seed=2, servers=2, replicas={replicas}, dtype=torch.float64)
        self.top = nn.Linear(3, 1).double()
    def forward(self, x):
        return self.top(self.few((x * 1000).long() % 37))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.many = pl.SparseEmbedding(5000, 4, "sum", seed=1, servers=2, replicas={replicas}, dtype=torch.float64)
        self.top, self.beside = nn.Linear(4, 1).double(), [Few()]
    def forward(self, x):
        return self.top(self.many((x * 1000).long() % 5000)) + self.beside[0](x)
model = Net()
few = model.beside[0]
"""  # noqa: E501
MANY = {
    "optimizer": "torch.optim.Adagrad(model.parameters(), 0.1)",
    "prepared": "few, other = run.prepare(few, torch.optim.Adagrad(few.parameters(), 0.1))",
    "between": "die(run.rank == 2 and run.steps == 5, 'before both')",
    "after": "die(run.rank == 1 and run.steps == 20, 'one of two'); other.step(); other.zero_grad()",  # noqa: E501
    "saved": (
        "[*model.parameters(), *few.parameters(), model.many.lookup(torch.arange(5000)), "
        "few.few.lookup(torch.arange(40))]"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("dense", [(), pytest.param(SERVED, marks=SOAK)])
def test_in_turns_of_several_steps(
    job: Jobs, alone: Callable[..., Outcome], dense: tuple[str, ...]
) -> None:
    """Lost after one of two optimizers has stepped its table: that goes back, on all copies."""
    found = play(
        job, "killed", *SURVIVES, *dense, workers=3, nap=0, **MANY, model=TWO.format(replicas=2)
    )
    check(found, alone(**MANY, model=TWO.format(replicas=1)))
    assert found.size == 1 and len(found.events) == 2, found.events


OTHERS: dict[str, dict[str, Any]] = {
    "schedules": {
        "prepared": "schedule = run.prepare(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))",  # noqa: E501
        "between": "die(run.rank == 1 and run.steps == 9, 'settling')",
        "after": "schedule.step(); die(run.rank == 1 and run.steps == 4, 'scheduled')",
    },
    "a mean before": {
        "between": "die(run.rank == 1 and run.steps == 5, 'before the mean'); run.mean(loss)"
    },
    "gradients that are kept": {
        "prepared": "optimizer.zero_grad = lambda: None",
        "before": "run.steps % 3 or model.zero_grad(); run.is_first and slay(run.steps == 4, 1, 'early')",  # noqa: E501
        "between": "run.is_first and slay(run.steps == 8, 0, 'late')",
    },
}


@SOAK
@pytest.mark.parametrize("kind", OTHERS)
def test_other_loops(job: Jobs, alone: Callable[..., Outcome], kind: str) -> None:
    found = play(job, "killed", *SURVIVES, workers=4, nap=0, **parts(2, **OTHERS[kind]))
    check(found, alone(**parts(**OTHERS[kind])))


@SOAK
@pytest.mark.parametrize("victim", [0, 2])
def test_a_host_is_lost_with_its_servers(
    job: Jobs, alone: Callable[..., Outcome], victim: int
) -> None:
    """Also the first, which coordinates. Copies are on other hosts."""
    out = job.folder / "killed"
    out.mkdir()
    options = (*SURVIVES, "--hosts", "3", "--join", f"127.0.0.1:{free_port()}")
    common = {"OUT": str(out), "PACELINE_SECRET": "5a" * 32, "PACELINE_INTERFACE": "lo"}
    text = script(**parts(2, start="name='run', folder='killed/runs'", nap=until(1)))
    launched = [job.run(text, 2, *options, "--host-rank", str(rank), **common) for rank in range(3)]
    trains(launched[0], out, 6)
    pause(random.Random(victim), 0.3)
    for process in [
        psutil.Process(launched[victim].process.pid),
        *launched[victim].workers(),
        *servers(launched[victim]),
    ]:
        process.kill()
    ends = [host.end() for host in launched]
    assert [end.code for end in ends] == [-9 if rank == victim else 0 for rank in range(3)], ends
    result = outcome(out, out)
    check(result, alone(**parts()))
    assert result.size == 4 and gap(out) < 60, result.events


@SOAK
@pytest.mark.timeout(3600)
def test_kills_of_primaries(job: Jobs, alone: Callable[..., Outcome]) -> None:
    wanted = alone(**parts(epochs=20))
    for seed in range(15):
        kill_primaries(job, seed, wanted, *SURVIVES, **parts(2, after=TOLD))
