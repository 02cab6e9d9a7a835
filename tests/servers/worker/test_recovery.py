"""Where workers are not in lockstep, some are killed, and servers: samples of a lost worker are
dealt again, a lost server ends the run.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.harness import short_timings
from tests.harness.jobs import Job, Jobs, wait_for
from tests.harness.surviving_servers import servers, until_told
from tests.harness.survivors import gap, let_go, pause, trains

SOAK = pytest.mark.soak
SSP, ASP, BACKUP = "staleness=2", "staleness=inf", "backup_workers=1"
MODES = [SSP, ASP, BACKUP]
EPOCHS, SAMPLES, BATCH = 3, 96, 8
# A connection that breaks shows at once who was killed: nobody has to count as lost for being slow.
KILLED = short_timings.environ(servers={"silence": 60.0, "alive": 60.0}, recovery={"form": 60.0})
SURVIVES = ("--min-workers", "1")
# in the last epoch, until the last kill (`let_go`)
HELD = {"held": "epoch == 2 and not (out / 'go').exists()"}


def each(quick: str) -> Any:
    """All modes, of which one is in the suite, the others in soak."""
    return pytest.mark.parametrize(
        "mode", [pytest.param(mode, marks=() if mode == quick else SOAK) for mode in MODES]
    )


# The loss is linear, so the order of steps is of no matter: each weight tells how often its sample
# was in a step of that epoch.
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
                (out / "told").write_text(f"{{len(run.events)}} {{run.size}}")
            while {held}:
                time.sleep(0.01)
            time.sleep({nap})
        {epoch_end}
    if run.is_first:
        torch.save([p.detach() for p in model.parameters()], out / "weights.pt")
        (out / "events.json").write_text(json.dumps([event["what"] for event in run.events]))
        (out / "size").write_text(str(run.size))
"""  # noqa: E501


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
        **dict.fromkeys(("before", "between", "after", "epoch_end"), "pass"),
    }
    return SCRIPT.format(**(usual | parts))


def until(events: int, nap: float = 0.1, *, grows: int = 1) -> str:
    """Naps in each turn, that get short when so much has happened.

    Until then they are so many times as long in each epoch.
    """
    return f"chance.uniform(0, 0.01 if len(run.events) >= {events} else {nap} * {grows}**epoch)"


class Outcome(NamedTuple):
    weights: list[torch.Tensor]
    events: list[str]
    size: int
    facts: dict[str, Any]  # of the first server


def begun(job: Jobs, mode: str, workers: int = 3, *options: str, **parts: Any) -> Job:
    out = job.folder / "killed"
    out.mkdir()
    sync = f"ParameterServer(servers=2, bucket_mb=0.001, {mode})"
    launched = job.run(
        script(workers=workers, **parts),
        workers,
        "--sync",
        sync,
        *(options or SURVIVES),
        OUT=str(out),
        **KILLED,
    )
    trains(launched, out, workers)
    return launched


def ended(job: Jobs, launched: Job) -> Outcome:
    """What came of a training in which nobody waited long."""
    end = launched.end()
    assert end.code == 0, end.err
    assert gap(job.folder / "killed") < 60
    return told(job.folder / "killed")


def told(out: Path) -> Outcome:
    summary = json.loads((out / "runs" / "run" / "summary.json").read_text())
    return Outcome(
        torch.load(out / "weights.pt"),
        json.loads((out / "events.json").read_text()),
        int((out / "size").read_text()),
        summary["servers"][0],
    )


def check(found: Outcome, mode: str, *, lost: int = 1) -> None:
    """Each sample is in a step of each epoch, or was dropped, and that is told; of the last
    turns of so many `lost` ones perhaps in two.
    """
    one, two = found.weights
    scale = torch.arange(1, SAMPLES + 1, dtype=torch.float64)[:, None]
    # as servers with a part each have it: a worker may be lost between
    counts = torch.stack([-2 * BATCH * one, -2 * BATCH * two / scale])
    never = (counts.abs() < 1e-9).all(0)
    drops = [(epoch, start, stop) for epoch, _, start, stop in found.facts["dropped"]["pieces"]]
    dropped = found.facts["dropped"]["samples"]
    assert dropped == sum(stop - start for _, start, stop in drops) and (
        dropped == 0 or mode == BACKUP
    ), found.facts["dropped"]
    assert int(never.sum()) <= dropped, (never.nonzero(), found.facts["dropped"], found.events)
    if mode != BACKUP:  # there a step has the mean of those who made it
        assert float((counts - counts.round()).abs().max()) < 1e-9 and counts.max() <= 1 + lost, (
            counts,
            found.events,
        )
        assert int((counts.round() > 1).sum(1).max()) <= lost * BATCH, (counts, found.events)
    leads = max(int(lead) for lead in found.facts["staleness"])
    assert leads <= 2 or mode != SSP, found.facts


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 25))])
def test_a_worker_is_killed(job: Jobs, mode: str, seed: int) -> None:
    """Anywhere, also the first: the others go on."""
    chance = random.Random(seed)
    launched = begun(job, mode, nap=until(1), **HELD)
    pause(chance, 0.5)
    chance.choice(launched.workers()).kill()
    let_go(job.folder / "killed")
    found = ended(job, launched)
    check(found, mode)
    assert found.size == 2 and len(found.events) == 1, found.events


IN_A_TURN = "die(run.rank == 1 and run.steps >= 3, 'in a turn')"
READS_AHEAD = {
    "readers": 1,
    "held": "run.rank != 1 and epoch == 2 and not (out / 'in a turn').exists()",
}


@pytest.mark.slow
@each(ASP)
@pytest.mark.parametrize("place", ["before", "after"])
def test_samples_of_a_turn_and_those_read_ahead_are_dealt_again(
    job: Jobs, mode: str, place: str
) -> None:
    """Before the step they are in none yet; after it, before the turn is over, they count twice."""
    found = ended(job, begun(job, mode, **{place: IN_A_TURN}, **READS_AHEAD))
    check(found, mode)
    assert found.size == 2 and (job.folder / "killed" / "in a turn").exists(), found.events
    if mode == ASP:
        twice = int((-2 * BATCH * found.weights[0]).round().gt(1).sum())
        assert (0 if place == "before" else 1) <= twice <= (0 if place == "before" else BATCH), (
            found.weights[0],
            found.events,
        )


@pytest.mark.slow
@each(BACKUP)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 25))])
def test_several_workers_at_once(job: Jobs, mode: str, seed: int) -> None:
    chance = random.Random(seed)
    launched = begun(job, mode, 4, nap=until(2), **HELD)
    pause(chance, 0.4)
    for process in chance.sample(launched.workers(), 2):
        process.kill()
        pause(chance, chance.choice([0.0, 0.05, 0.2]))
    let_go(job.folder / "killed")
    found = ended(job, launched)
    check(found, mode, lost=2)
    assert found.size == 2, found.events


@pytest.mark.slow
@each(SSP)
@pytest.mark.parametrize("which", [0, 1])
def test_a_server_is_killed(job: Jobs, mode: str, which: int) -> None:
    launched = begun(job, mode, held="not (out / 'go').exists()")
    servers(launched)[which].kill()
    let_go(job.folder / "killed")
    end = launched.end()
    assert (
        end.code
        and f"server {which} on" in end.err
        and "lost, and no other server has a copy of its state" in end.err
    ), end.err
    assert "resume from a checkpoint" in end.err


@pytest.mark.slow
@each(ASP)
def test_a_server_is_killed_and_the_job_starts_again(job: Jobs, mode: str) -> None:
    launched = begun(
        job,
        mode,
        3,
        "--restarts",
        "1",
        held="epoch == 1 and not (out / 'go').exists()",
        epoch_end="run.save()",
    )
    wait_for(lambda: any((job.folder / "killed" / "runs" / "run" / "checkpoints").glob("step-*")))
    servers(launched)[0].kill()
    let_go(job.folder / "killed")
    found = ended(job, launched)
    check(found, mode, lost=0)
    assert found.size == 3


@pytest.mark.slow
@each(BACKUP)
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=SOAK) for seed in range(1, 15))])
def test_a_worker_comes_back(job: Jobs, mode: str, seed: int) -> None:
    """In the middle of an epoch: all stop taking samples, let it in, and go on with what is
    left.
    """
    chance = random.Random(seed)
    launched = begun(job, mode, 3, *SURVIVES, "--restarts", "1", nap=until(2, 0.6, grows=4))
    pause(chance, 0.3)
    chance.choice(launched.workers()).kill()
    found = ended(job, launched)
    check(found, mode)
    assert (
        found.size == 3 and len(found.events) == 2 and "has come: 3 workers" in found.events[1]
    ), found.events


CLIPPED = (
    "die(run.rank == 1 and run.steps >= 3, 'before'); run.clip(model, 1e6); "
    "die(run.rank == 2 and run.steps >= 5, 'after')"
)


@pytest.mark.slow
@each(SSP)
def test_between_clipping_and_stepping(job: Jobs, mode: str) -> None:
    found = ended(job, begun(job, mode, 4, between=CLIPPED))
    check(found, mode, lost=2)
    assert found.size == 2 and len(found.events) == 2, found.events


BY_HAND = {
    "step": (
        "if run.steps % 3 == "
        "2:\n                optimizer.step()\n                optimizer.zero_grad()"
    )
}


@pytest.mark.slow
def test_gradients_that_were_added_up_are_dealt_again(job: Jobs) -> None:
    """A step in three turns, and workers that read ahead: what of it is in no step goes with who
    is lost, and is trained by others.
    """
    lost = "die(run.rank == 1 and run.steps >= 7 and run.steps % 3 == 1, 'carried')"
    # or the others might take all samples
    held = "run.rank != 1 and epoch == 2 and not (out / 'carried').exists()"
    found = ended(job, begun(job, ASP, 3, readers=1, after=lost, held=held, **BY_HAND))
    # each by the part that the last of its turns had of a batch
    counts = -found.weights[0] * 2 * BATCH
    assert counts.min() >= 0 and counts[counts > 0].min() > 0.1, counts
    assert int((counts == 0).sum()) <= 3 * 2 * 3 * EPOCHS, (
        "only what is left over at the end of an epoch isn't in a step"
    )
    assert found.size == 2 and "lost" in found.events[0], found.events


@pytest.mark.slow
@each(SSP)
def test_too_few_wait_for_others(job: Jobs, mode: str) -> None:
    launched = begun(job, mode, 2, "--min-workers", "2", "--restarts", "1", nap="0.05", **HELD)
    launched.workers()[1].kill()
    let_go(job.folder / "killed")
    found = ended(job, launched)
    check(found, mode)
    assert (
        found.size == 2
        and "waiting for others" in found.events[1]
        and "has come" in found.events[2]
    ), found.events


@pytest.mark.slow
def test_through_a_codec(job: Jobs) -> None:
    found = ended(
        job,
        begun(
            job,
            f"{SSP}, codec=error_feedback(int8())",
            after="die(run.rank == 1 and run.steps >= 4, 'x')",
        ),
    )
    counts = -2 * BATCH * found.weights[0]
    assert counts.min() > 0.8 and int((counts > 1.2).sum()) <= BATCH and found.size == 2, (
        counts,
        found.events,
    )


TWO = {
    "optimizer": "torch.optim.SGD([model.one], 0.5)\nother = torch.optim.SGD([model.two], 0.5)",
    "options": ")\n    other = run.prepare(other",
    "step": (
        "optimizer.step(); die(run.rank == 1 and run.steps >= 3, 'between'); other.step(); "
        "optimizer.zero_grad(); other.zero_grad()"
    ),
    # or the others might take all samples
    "held": "run.rank != 1 and epoch == 2 and not (out / 'between').exists()",
}


@pytest.mark.slow
@each(ASP)
def test_between_the_steps_of_two_optimizers(job: Jobs, mode: str) -> None:
    """Samples of a turn in which only the first has stepped are dealt again."""
    found = ended(job, begun(job, mode, 3, **TWO))
    check(found, mode)
    assert found.size == 2 and len(found.events) == 1, found.events


@SOAK
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", range(5))
def test_a_storm(job: Jobs, mode: str, seed: int) -> None:
    """Workers are killed one after the other, and come back."""
    chance, there = random.Random(seed), job.folder / "killed" / "told"
    launched = begun(
        job, mode, 3, *SURVIVES, "--restarts", "6", epochs=6, nap="chance.uniform(0, 0.5)"
    )
    for count in range(4):
        until_told(launched, there, f"{2 * count} 3")  # or nobody might be left who has the state
        for victim in chance.sample(launched.workers(), 1):
            pause(chance, 2.0)
            victim.kill()
    found = ended(job, launched)
    check(found, mode, lost=4)
