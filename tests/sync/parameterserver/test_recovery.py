"""Workers and servers are killed where workers are not in lockstep: every sample is in one step, and the run goes on."""

from __future__ import annotations

import contextlib
import json
import random
import re
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
import torch

from tests.harness import short_timings
from tests.harness.jobs import Job, Jobs, free_port, wait_for
from tests.harness.surviving_servers import servers
from tests.harness.survivors import gap, let_go, pause, trains

SOAK = pytest.mark.soak

SSP, ASP, BACKUP = "staleness=2", "staleness=inf", "backup_workers=1"
MODES = [SSP, ASP, BACKUP]
EPOCHS, SAMPLES, BATCH = 3, 96, 8
# A connection that breaks shows at once who was killed: nobody has to count as lost for being slow.
KILLED = short_timings.environ(servers={"silence": 60.0, "alive": 60.0}, recovery={"form": 60.0})
HELD = {"held": "epoch == 2 and not (out / 'go').exists()"}  # in the last epoch, until the last kill (`let_go`)


def each(quick: str) -> Any:
    """All modes, of which one is in the suite, the others in soak."""
    return pytest.mark.parametrize("mode", [pytest.param(mode, marks=() if mode == quick else SOAK) for mode in MODES])


# The loss is linear, so the order of steps is of no matter: each weight tells whether its sample was in one of that epoch, and by what.
SCRIPT = """
import json, os, random, signal
from pathlib import Path

class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return {samples}
    def __getitem__(self, index):
        return index

class Tables(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Parameter(torch.zeros({samples}, {epochs}, dtype=torch.float64)) for _ in range(2))
    def forward(self, ids, epoch):
        scale = (ids + 1.0).double()
        return (self.one[ids, epoch] + self.two[ids, epoch] * scale).mean()

model = Tables()
optimizer = {optimizer}
loader = DataLoader(Numbers(), batch_size={batch}, shuffle=True, num_workers={readers})
out, chance = Path(os.environ["OUT"]), random.Random(os.getpid())
times = (out / f"times-{{os.getpid()}}").open("a")

def die(now, where):
    if now and not (out / where).exists():
        (out / where).touch()
        os.kill(os.getpid(), signal.SIGKILL)

with pl.start(name="run", folder=str(out / "runs")) as run:
    model, optimizer, loader = run.prepare(model, optimizer, loader{options})
    for epoch in run.epochs({epochs}):
        for ids in loader:
            (out / f"ready-{{os.getpid()}}").touch()
            while len(list(out.glob("ready-*"))) < {workers}:  # nobody trains before all are in their first turn
                time.sleep(0.01)
            loss = model(ids, epoch)
            {before}
            loss.backward()
            {between}
            {step}
            {after}
            run.log(loss=loss)
            times.write(f"{{time.time()}}\\n"); times.flush()
            if run.is_first:
                (out / "told").write_text(f"{{len(run._backward.sync.link.connections.callers)}} {{len(run.events)}} {{run.size}}")
            while {held}:
                time.sleep(0.01)
            time.sleep({nap})
    if run.is_first:
        torch.save([p.detach() for p in model.parameters()], out / "weights.pt")
        (out / "events.json").write_text(json.dumps([event["what"] for event in run.events]))
        (out / "size").write_text(str(run.size))
"""


def script(**parts: Any) -> str:
    usual = {
        "optimizer": "torch.optim.SGD(model.parameters(), 0.5)",
        "readers": 0,
        "options": "",
        "epochs": EPOCHS,
        "samples": SAMPLES,
        "batch": BATCH,
        "nap": "chance.uniform(0, 0.03)",
        "workers": 1,
        "held": False,
        "step": "optimizer.step(); optimizer.zero_grad()",
        **dict.fromkeys(("before", "between", "after"), "pass"),
    }
    return SCRIPT.format(**(usual | parts))


def until(events: int, nap: float = 0.1, *, grows: int = 1) -> str:
    """Naps in each turn, that get short when so much has happened. Until then they are so many times as long in each epoch."""
    return f"chance.uniform(0, 0.01 if len(run.events) >= {events} else {nap} * {grows}**epoch)"


class Outcome(NamedTuple):
    weights: list[torch.Tensor]
    events: list[str]
    size: int
    facts: dict[str, Any]  # of the first server
    err: str = ""  # what the launcher wrote

    def story(self) -> str:
        """What has happened, for who finds something else than expected."""
        return "\n".join(["", *self.events, *self.err.splitlines()[-40:]])


def begun(job: Jobs, mode: str, workers: int = 3, *options: str, replicas: int = 2, environ: Any = KILLED, **parts: Any) -> Job:
    out = job.folder / "killed"
    out.mkdir()
    sync = f"ParameterServer(servers=2, replicas={replicas}, bucket_mb=0.001, {mode})"
    options = options if "--min-workers" in options else ("--min-workers", "1", *options)
    launched = job.run(script(workers=workers, **parts), workers, "--sync", sync, *options, OUT=str(out), **environ)
    trains(launched, out, workers)
    return launched


def ended(job: Jobs, launched: Job) -> Outcome:
    end = launched.end()
    assert end.code == 0, end.err
    return told(job.folder / "killed")._replace(err=end.err)


def survived(job: Jobs, launched: Job, mode: str) -> Outcome:
    """The same of a training that was checked, in which nobody waited long."""
    found = ended(job, launched)
    check(found, mode)
    assert gap(job.folder / "killed") < 60
    return found


def told(out: Path) -> Outcome:
    summary = json.loads((out / "runs" / "run" / "summary.json").read_text())
    return Outcome(
        torch.load(out / "weights.pt"),
        json.loads((out / "events.json").read_text()),
        int((out / "size").read_text()),
        summary["servers"][0],
    )


def check(found: Outcome, mode: str, batch: int = BATCH) -> None:
    """Each sample is in one step of each epoch, by its weight, unless it was dropped and that is told."""
    one, two = found.weights
    samples, epochs = one.shape
    scaled = -2 * two / torch.arange(1, samples + 1, dtype=torch.float64)[:, None]
    assert float((scaled + 2 * one).abs().max()) < 1e-9, "servers have come apart"
    if mode == BACKUP:  # a step has the mean of those who made it: so many samples
        makers = torch.where(scaled > 0, 1 / scaled, 0.0)
        near = makers.round()
        assert float((makers - near).abs().max()) < 1e-6, (makers, found.events)
        assert all(int((near[:, epoch] == size).sum()) % size == 0 for epoch in range(epochs) for size in range(1, batch + 1)), near
    else:
        near = (scaled * batch).round()
        assert float((scaled * batch - near).abs().max()) < 1e-9, (scaled, found.events)
        assert near.max() <= 1, (near, found.events)
    dropped = int((near == 0).sum())
    told = sum(stop - start for _, _, start, stop in found.facts["dropped"]["pieces"])
    assert dropped == told == found.facts["dropped"]["samples"], (dropped, found.facts["dropped"], found.events)
    assert dropped == 0 or mode == BACKUP, (dropped, found.events)
    leads = max(int(lead) for lead in found.facts["staleness"])
    assert leads <= 2 or mode != SSP, found.facts


@SOAK
@pytest.mark.parametrize("mode", MODES)
def test_nobody_is_killed(job: Jobs, mode: str) -> None:
    found = ended(job, begun(job, mode))
    check(found, mode)
    assert found.size == 3 and not found.events


@pytest.mark.slow
@each(ASP)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 25))])
def test_a_worker_is_killed(job: Jobs, mode: str, seed: int) -> None:
    chance = random.Random(seed)
    launched = begun(job, mode, replicas=1, nap=until(1), **HELD)
    pause(chance, 0.5)
    chance.choice(launched.workers()).kill()
    let_go(job.folder / "killed")
    found = survived(job, launched, mode)
    assert found.size == 2 and len(found.events) == 1, found.events


@pytest.mark.slow
@each(SSP)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 25))])
def test_a_server_is_killed(job: Jobs, mode: str, seed: int) -> None:
    """Which is the first, with the keeper, in every second case. Another one is there soon."""
    chance = random.Random(seed)
    launched = begun(job, mode, nap=until(2, 0.5, grows=4))
    pause(chance, 0.3)
    which = chance.choice([0, 0, 0, 1, 2, 3])
    servers(launched)[which].kill()
    found = survived(job, launched, mode)
    assert found.size == 3 and f"server {which % 2} on" in found.events[0], found.events
    assert len(found.events) == 2 and "has begun" in found.events[1], found.events


@pytest.mark.slow
@each(BACKUP)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 25))])
def test_a_worker_and_a_server_at_once(job: Jobs, mode: str, seed: int) -> None:
    chance = random.Random(seed)
    launched = begun(job, mode, 4, nap=until(2), **HELD)
    pause(chance, 0.4)
    victims = [chance.choice(servers(launched)), *chance.sample(launched.workers(), chance.randint(1, 2))]
    chance.shuffle(victims)
    for process in victims:
        process.kill()
        pause(chance, chance.choice([0.0, 0.05, 0.2]))
    let_go(job.folder / "killed")
    found = survived(job, launched, mode)
    assert found.size == 5 - len(victims), found.events


@SOAK
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(10))
def test_many_servers_are_killed(job: Jobs, mode: str, seed: int) -> None:
    """One after the other, most of them primaries; as soon as there are four of them again."""
    chance, there = random.Random(seed), job.folder / "killed" / "told"
    launched = begun(job, mode, epochs=8, nap=until(12, 0.6))
    for events in range(0, 12, 2):
        wanted = f"4 {events} 3"  # or the only one that has a shard might be killed
        wait_for(lambda w=wanted: launched.process.poll() is not None or (there.exists() and there.read_text() == w), 60)
        pause(chance, 0.5)
        with contextlib.suppress(IndexError):
            servers(launched)[chance.choice([0, 0, 1, 1, 2, 3])].kill()
    found = ended(job, launched)
    check(found, mode)
    assert found.size == 3, found.story()


# Who hears that there is nothing more asks once more, as its DataLoader has ended: here of a server that was lost meanwhile.
ASKS_AGAIN = {
    "optimizer": """torch.optim.SGD(model.parameters(), 0.5)

def lingers(run):
    desk, keeper = run._backward.sync.sample_queue, run._backward.sync.link.callers[0]
    def take(most, take=desk.take):
        found, end = take(most), time.monotonic() + 30
        if found is None and not (out / "over").exists():
            (out / "over").touch()
            while not keeper.gone and time.monotonic() < end:
                time.sleep(0.01)
        return found
    if run.rank == 1:
        desk.take = take
""",
    "options": ")\n    lingers(run",
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ASP, *(pytest.param(mode, marks=SOAK) for mode in (SSP, BACKUP))])
def test_a_server_is_killed_when_an_epoch_is_over(job: Jobs, mode: str) -> None:
    launched = begun(job, mode, nap="0", **ASKS_AGAIN)
    wait_for((job.folder / "killed" / "over").exists)
    servers(launched)[0].kill()
    found = survived(job, launched, mode)
    assert found.size == 3 and "server 0 on" in found.events[0], found.story()


@pytest.mark.slow
@each(BACKUP)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 15))])
def test_a_worker_comes_back(job: Jobs, mode: str, seed: int) -> None:
    """In the middle of an epoch: all stop taking samples, let it in, and go on with what is left."""
    chance = random.Random(seed)
    launched = begun(job, mode, 3, "--restarts", "1", replicas=1, nap=until(2, 0.6, grows=4))
    pause(chance, 0.3)
    chance.choice(launched.workers()).kill()
    found = ended(job, launched)
    check(found, mode)
    assert found.size == 3 and len(found.events) == 2 and "has come: 3 workers" in found.events[1], found.events


CLIPPED = "die(run.rank == 1 and run.steps >= 3, 'before'); run.clip(model, 1e6); die(run.rank == 2 and run.steps >= 5, 'after')"


@pytest.mark.slow
@pytest.mark.parametrize("mode", [SSP, pytest.param(ASP, marks=SOAK), pytest.param(BACKUP, marks=SOAK)])
def test_between_clipping_and_stepping(job: Jobs, mode: str) -> None:
    """Who makes the step may be others than those by whose norm it was to be clipped."""
    found = ended(job, begun(job, mode, 4, replicas=1, between=CLIPPED))
    check(found, mode)
    assert found.size == 2 and len(found.events) == 2, found.events


TWO = {
    "optimizer": "torch.optim.SGD([model.one], 0.5)\nother = torch.optim.SGD([model.two], 0.5)",
    "options": ")\n    other = run.prepare(other",
    "step": "optimizer.step(); die(run.rank == 1 and run.steps >= 3, 'between'); other.step(); optimizer.zero_grad(); other.zero_grad()",
    "held": "run.rank != 1 and epoch == 2 and not (out / 'between').exists()",  # or the others might take all samples
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", [ASP, pytest.param(SSP, marks=SOAK)])
def test_between_the_steps_of_two_optimizers(job: Jobs, mode: str) -> None:
    """The first one's step decides whether samples are trained: those of who is lost there are not dealt again, and not in the second's."""
    found = ended(job, begun(job, mode, 3, replicas=1, **TWO))
    one, two = found.weights
    scale = torch.arange(1, SAMPLES + 1, dtype=torch.float64)[:, None]
    first, second = -2 * BATCH * one, -2 * BATCH * two / scale
    assert float((first - 1).abs().max()) < 1e-9, (first, found.events)
    missing = second.abs() < 1e-9
    assert 0 < int(missing.sum()) <= 3 and float((second[~missing] - 1).abs().max()) < 1e-9, (second, found.events)
    assert found.size == 2 and len(found.events) == 1 and found.facts["dropped"]["samples"] == 0, found.events


BY_HAND = {"step": "if run.steps % 3 == 2:\n                optimizer.step()\n                optimizer.zero_grad()"}


@pytest.mark.slow
def test_gradients_that_were_added_up_are_dealt_again(job: Jobs) -> None:
    """A step in three turns, and workers that read ahead: what of it is in no step goes with who is lost, and is trained by others."""
    lost = "die(run.rank == 1 and run.steps >= 7 and run.steps % 3 == 1, 'carried')"
    held = "run.rank != 1 and epoch == 2 and not (out / 'carried').exists()"  # or the others might take all samples
    found = ended(job, begun(job, ASP, 3, replicas=1, readers=1, after=lost, held=held, **BY_HAND))
    counts = -found.weights[0] * 2 * BATCH  # each by the part that the last of its turns had of a batch
    assert counts.min() >= 0 and counts[counts > 0].min() > 0.1, counts
    assert int((counts == 0).sum()) <= 3 * 2 * 3 * EPOCHS, "only what is left over at the end of an epoch isn't in a step"
    assert found.size == 2 and "lost" in found.events[0], found.events


@pytest.mark.slow
def test_through_a_codec(job: Jobs) -> None:
    """What was pushed in vain is encoded again from what was kept."""
    found = ended(job, begun(job, f"{SSP}, codec=error_feedback(int8())", replicas=1, after="die(run.rank == 1 and run.steps >= 4, 'x')"))
    one, _ = found.weights
    assert float((one * 2 * BATCH + 1).abs().max()) < 0.2 and found.size == 2, (one * 2 * BATCH, found.events)


@SOAK
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("which", [0, 1])
def test_a_server_is_stopped(job: Jobs, mode: str, which: int) -> None:
    launched = begun(job, mode, nap=until(1, 0.5), environ={})
    servers(launched)[which].suspend()
    found = ended(job, launched)
    check(found, mode)
    assert f"server {which} on" in found.events[0] and gap(job.folder / "killed") < 60, found.events


@pytest.mark.slow
@each(SSP)
def test_too_few_wait_for_others(job: Jobs, mode: str) -> None:
    launched = begun(job, mode, 2, "--min-workers", "2", "--restarts", "1", replicas=1, nap="0.05", **HELD)
    launched.workers()[1].kill()
    let_go(job.folder / "killed")
    found = ended(job, launched)
    check(found, mode)
    assert found.size == 2 and "waiting for others" in found.events[1] and "has come" in found.events[2], found.events


@SOAK
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(10))
def test_a_storm(job: Jobs, mode: str, seed: int) -> None:
    """Workers and servers, and both at once, one after the other; workers come back, servers are made anew."""
    chance, there = random.Random(seed), job.folder / "killed" / "told"
    launched = begun(job, mode, 3, "--restarts", "6", epochs=6, nap="chance.uniform(0, 0.5)")
    for _ in range(6):
        wait_for(lambda: launched.process.poll() is not None or (there.exists() and re.fullmatch(r"4 \d+ 3", there.read_text())), 90)
        pause(chance, 2.0)
        with contextlib.suppress(IndexError, psutil.NoSuchProcess):
            victims = chance.choice([[*servers(launched)[:1]], [chance.choice(servers(launched)), chance.choice(launched.workers())]])
            for process in chance.choice([victims, [chance.choice(launched.workers())]]):
                process.kill()
                pause(chance, 0.2)
        there.unlink(missing_ok=True)
    found = ended(job, launched)
    check(found, mode)


@SOAK
@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("victim", [0, 2])
def test_a_host_goes_with_its_servers(job: Jobs, mode: str, victim: int, leaves: bool) -> None:
    """It is asked to leave, or dies; also the first. Copies are on other hosts."""
    out = job.folder / "killed"
    out.mkdir()
    options = ("--min-workers", "1", "--hosts", "3", "--join", f"127.0.0.1:{free_port()}")
    common = {"OUT": str(out), "PACELINE_SECRET": "5a" * 32, "PACELINE_INTERFACE": "lo", **KILLED}
    options += ("--sync", f"ParameterServer(replicas=2, bucket_mb=0.001, {mode})")
    launched = [job.run(script(nap=until(1), workers=3), 1, *options, "--host-rank", str(rank), **common) for rank in range(3)]
    trains(launched[0], out, 3)
    pause(random.Random(victim), 0.3)
    if leaves:
        launched[victim].process.terminate()
    else:
        for process in [psutil.Process(launched[victim].process.pid), *launched[victim].workers(), *servers(launched[victim])]:
            process.kill()
    ends = [host.end() for host in launched]
    assert [end.code for end in ends] == [(143 if leaves else -9) if rank == victim else 0 for rank in range(3)], ends
    found = told(out)
    check(found, mode)
    assert found.size == 2, found.events
