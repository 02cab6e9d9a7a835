"""Workers and servers of sparse tables are killed, and nothing shows it but an event: rows and layers have made the same steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from tests.launches import Job, Jobs, free_port, wait_for
from tests.session.test_servers_surviving import ended, servers, until_there
from tests.session.test_survival import AT, PLACES
from tests.survivors import Outcome, check, gap, outcome, pause, play, script, trains, until

pytestmark = pytest.mark.preloaded
SOAK = pytest.mark.soak
SURVIVES = ("--min-workers", "1")
SERVED = ("--sync", "ParameterServer(servers=1, bucket_mb=0.001)")

# Two tables, whose ids follow from the samples; rows are used often, seldom and never.
NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        given = dict(servers=2, replicas={replicas}, dtype=torch.float64)
        self.many, self.few = pl.SparseEmbedding(5000, 4, "sum", seed=1, **given), pl.SparseEmbedding(40, 3, seed=2, **given)
        self.top = nn.Linear(7, 1).double()
    def forward(self, x):
        ids = (x * 1000).long()
        return self.top(torch.cat([self.many(ids % 5000), self.few(ids % 37)], dim=1).tanh())
model = Net()
"""
SAVED = "[*model.parameters(), model.many.lookup(torch.arange(5000)), model.few.lookup(torch.arange(40))]"


def parts(replicas: int = 1, optimizer: str = "torch.optim.Adagrad(model.parameters(), 0.1)", **more: Any) -> dict[str, Any]:
    return {"model": NET.format(replicas=replicas), "optimizer": optimizer, "saved": SAVED, **more}


def begun(job: Jobs, *options: str, workers: int = 3, replicas: int = 2, **more: Any) -> Job:
    """A training whose workers and servers are all there."""
    out = job.folder / "killed"
    out.mkdir()
    text = script(**parts(replicas, **({"start": "name='run', folder='killed/runs'", "epochs": 6} | more)))
    launched = job.run(text, workers, *SURVIVES, *options, OUT=str(out))
    trains(launched, out, workers)
    return launched


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "dense"), [("0", ()), *(pytest.param(*case, marks=SOAK) for case in (("run.size - 1", ()), ("0", SERVED), ("run.size - 1", SERVED)))]
)
def test_workers_killed_in_every_place(job: Jobs, alone: Callable[..., Outcome], rank: str, dense: tuple[str, ...]) -> None:
    places = {name: text.format(rank=rank, at=AT.format(rank=rank)) for name, text in PLACES.items() if name != "prepared"}
    places["prepared"] = f"model.top.weight.register_hook(lambda _: die({AT.format(rank=rank)}7, 'the last gradient'))"
    found = play(job, "killed", *SURVIVES, *dense, workers=6, nap=0, **parts(**places))
    check(found, alone(**parts()))
    assert found.size == 1 and [event.partition(" lost")[0] for event in found.events] == [
        f"rank {0 if rank == '0' else last} was" for last in (5, 4, 3, 2, 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("which", [0, *(pytest.param(which, marks=SOAK) for which in (1, 2, 3))])
def test_a_server_is_killed(job: Jobs, alone: Callable[..., Outcome], which: int) -> None:
    """A primary, or a copy: nothing is lost, and there are as many again soon."""
    launched = begun(job, nap=until(1))
    pause(random.Random(which), 0.3)
    before = servers(launched)
    assert len(before) == 4
    before[which].kill()
    until_there(launched, 4)
    found = ended(job, launched)
    check(found, alone(**parts(epochs=6)))
    assert found.size == 3 and len(found.events) == 1 and f"table server {which % 2} on" in found.events[0], found.events
    assert gap(job.folder / "killed") < 5


@pytest.mark.slow
def test_a_server_without_a_copy_ends_the_run(job: Jobs) -> None:
    launched = begun(job, workers=2, replicas=1, nap=0.05)
    servers(launched)[1].kill()
    end = launched.end(60)
    assert end.code == 1 and "nobody else has what was kept there" in end.err, end.err
