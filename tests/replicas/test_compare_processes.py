"""Replicas that differ among real workers, who may die in any call of the comparison, or come
later.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.harness.jobs import Jobs
from tests.harness.survivors import apart, kill, outcome, script, trains

FLIP = (
    "if run.rank == run.size - 1 and run.steps + 1 in {steps}: "
    "next(model.parameters()).data.view(torch.int64)[0, 0] ^= 1 << 61"
)


def out(job: Jobs, name: str) -> Path:
    (job.folder / name).mkdir()
    return job.folder / name


def start(name: str, **options: object) -> str:
    return f"name='run', folder='{name}/runs', " + ", ".join(
        f"{key}={value!r}" for key, value in options.items()
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("--min-workers", "1", "--restarts", "3")], ids=["plain", "surviving"]
)
def test_all_stop_and_say_why(job: Jobs, options: tuple[str, ...]) -> None:
    """Also where the others could go on: the error is the same on all."""
    folder = out(job, "stopped")
    text = script(start=start("stopped", compare=5), after=FLIP.format(steps=(8,)), nap=0)
    ended = job.run(text, 3, *options, OUT=str(folder)).end()
    assert ended.code == 1 and "(ReplicasDiffer)" in ended.last, ended
    assert (
        "replicas differ after step 10: rank 2 on " in ended.err
        and " in 0.weight. Few tensors of one rank" in ended.err
    )
    summary = json.loads((folder / "runs" / "run" / "summary.json").read_text())
    assert summary["steps"] == 10 and summary["events"][0]["what"].startswith(
        "replicas differ after step 10: rank 2 on "
    )


DYING = """import paceline.replicas.compare as c
    def dying(owner, name, steps, rank, late=False):
        own = getattr(owner, name)
        def instead(*args):
            found = own(*args) if late else None
            die(run.steps == steps and run.rank == rank % run.size, f"{name} {steps}")
            return found if late else own(*args)
        setattr(owner, name, instead)
    dying(c.ReplicaContents, "make_digest", 3, 0)                    # before anything is known
    dying(c.ReplicaComparer, "_find_verdict", 6, -1)                # the one that differs
    dying(c.ReplicaComparer, "_exchange_values", 9, 0)             # who was to give
    dying(c.ReplicaComparer, "_find_verdict", 12, 1, late=True)     # when all has been given
    dying(c.ReplicaComparer, "_heal_replicas", 15, 0)                 # before it is compared again
"""


@pytest.mark.slow
def test_workers_die_while_replicas_are_compared(job: Jobs) -> None:
    alone, killed = out(job, "alone"), out(job, "killed")
    ended = job.run(script(start=start("alone", compare=None), nap=0), 1, OUT=str(alone)).end()
    assert ended.code == 0, ended
    text = script(
        start=start("killed", compare=3, differing="heal"),
        after=FLIP.format(steps=(3, 6, 9, 12, 15)),
        prepared=DYING,
        nap=0,
    )
    ended = job.run(text, 7, "--min-workers", "1", OUT=str(killed)).end()
    assert ended.code == 0, ended
    found, wanted = outcome(killed, killed), outcome(alone, alone)
    assert found.samples == wanted.samples and apart(found, wanted) < 1e-12
    assert found.size == 2 and sum("lost" in event for event in found.events) == 5, found.events
    healed = [event.split(":")[0] for event in found.events if "healed" in event]
    assert healed == [f"replicas differ after step {step}" for step in (3, 9, 12, 15)]


SEEN = """
class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))
    def forward(self, x):
        self.seen.lerp_(x.detach().mean(0), 0.1)
        return x
model = nn.Sequential(Seen(), nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 1)).double()"""  # noqa: E501
BACK = """if back is None and any("come" in event["what"] for event in run.events): back = run.steps
            if back is not None and run.steps == back + 4 and run.rank == 2: model[2].running_var.data.view(torch.int64)[0] ^= 1 << 45
            if back is not None and run.steps >= back + 12: run.stop()"""  # noqa: E501


@pytest.mark.slow
@pytest.mark.parametrize(
    "sync",
    ["AllReduce()", pytest.param("LocalSGD(4, outer=nesterov(0.7, 0.9))", marks=pytest.mark.soak)],
)
def test_who_comes_later_is_compared_with_the_others(job: Jobs, sync: str) -> None:
    """It differs in nothing, until a bit of it is flipped; what each worker has seen itself is
    its own.
    """
    folder = out(job, "killed")
    text = script(
        start=start("killed", compare=2, differing="heal"),
        model=SEEN,
        optimizer="torch.optim.Adam(model.parameters(), 0.003)",
        prepared="back = None",
        after=BACK,
        epochs=1000,
    )
    launched = job.run(
        text, 3, "--min-workers", "1", "--restarts", "1", "--sync", sync, OUT=str(folder)
    )
    trains(launched, folder, 3)
    kill(launched, random.Random(1))
    ended = launched.end()
    assert ended.code == 0, ended
    found = outcome(folder, folder)
    assert found.size == 3 and ["lost" in found.events[0], "come" in found.events[1]] == [
        True,
        True,
    ], found.events
    assert (
        len(found.events) == 3
        and "rank 2 on " in found.events[2]
        and " in 2.running_var; healed by" in found.events[2]
    )
