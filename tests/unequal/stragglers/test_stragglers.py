"""Who makes the others wait is named while the run goes on, with what it costs and what to do;
nobody is, where all are alike.
"""

from __future__ import annotations

import gc
import hashlib
import json
import random
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from paceline.cluster.mesh import Mesh
from paceline.loop.interruptions import InterruptionMeter
from paceline.observe.report import format_report
from paceline.session.run import Run
from paceline.trace import MEASURED_CAUSES
from paceline.unequal.stragglers import stragglers
from paceline.unequal.stragglers.causes import CAUSES, REMEDIES, WORDS
from paceline.unequal.stragglers.stragglers import AGAIN, FLUSHES, PAUSE, StragglerSensor
from tests.harness.garbage import litter
from tests.harness.jobs import Jobs
from tests.harness.runs import batches, workers

HOSTS = ("a", "a", "b", "b")


def flush(
    found: StragglerSensor,
    *work: float,
    steps: int = 10,
    times: int = 1,
    hosts: tuple[str, ...] = HOSTS,
    **parts: float,
) -> list[str]:
    """What is said in so many flushes of steps in which each rank has so much work (seconds),
    and waits for who has most.
    """
    exchange, data, said = parts.get("exchange", 0.01), parts.get("data", 0.0), []
    for _ in range(times):
        seconds = [[[mine - data, exchange, max(work) - mine, data]] * steps for mine in work]
        said.append(found.take_flush(range(len(work)), seconds, hosts))
    return [line for line in said if line is not None]


ALIKE, SLOW = (0.1, 0.1, 0.1, 0.1), (0.1, 0.1, 0.15, 0.1)
LINE = (
    "rank 2 on b makes the others wait: 50.0 ms in each step, 31% of it, for compute. "
    "See what else runs there; if it is a slower machine "
    "and the shares are equal now, deal by speed: prepare(..., shares='auto'), "
    "or shares=[1, 1, 0.67, 1]"
)


def test_one_is_named_once() -> None:
    found = StragglerSensor()
    assert flush(found, *SLOW, times=FLUSHES - 1) == []
    assert flush(found, *SLOW, times=20) == [LINE]


def test_workers_with_the_same_samples_have_one_share() -> None:
    """Ranks 2 and 3 cut layers between them, and so do 0 and 1."""
    mesh = Mesh((("data", 2), ("tensor", 2)), (0, 1, 2, 3))
    (line,) = flush(StragglerSensor(mesh), *SLOW, times=20)
    assert line.startswith(
        "rank 2 (data 1, tensor 0) on b makes the others wait"
    ) and line.endswith("shares=[1, 0.67]")
    (line,) = flush(StragglerSensor(Mesh((("tensor", 4),), (0, 1, 2, 3))), *SLOW, times=20)
    assert (
        line.startswith("rank 2 (tensor 2) on b")
        and "shares=[" not in line
        and "all workers have the same samples" in line
    )


def test_slow_data_are_work_too() -> None:
    assert flush(StragglerSensor(), *SLOW, times=FLUSHES, data=0.05) == [LINE]


@pytest.mark.parametrize("cause", MEASURED_CAUSES)
def test_the_cause_is_named_with_what_helps(cause: str) -> None:
    """Rank 2 is 50 ms late, 40 of them for the cause; all have 5 ms of each, which isn't late."""
    found, said = StragglerSensor(), []
    for _ in range(FLUSHES):
        measured = [
            [5000 + 40_000 * (rank == 2 and each == cause) for each in MEASURED_CAUSES]
            for rank in range(4)
        ]
        steps = [[[mine - 0.005, 0.01, 0.15 - mine, 0.005]] * 10 for mine in SLOW]
        said.append(found.take_flush(range(4), steps, HOSTS, [[each] * 10 for each in measured]))
    assert said[-1] == (
        "rank 2 on b makes the others wait: 50.0 ms in each step, 31% of it, for "
        f"{WORDS[cause]}. {REMEDIES[cause]}"
    )


def test_those_who_are_alike_are_not_named_whatever_the_noise() -> None:
    found, chance = StragglerSensor(), random.Random(1)
    for _ in range(200):
        assert flush(found, *(mine * chance.uniform(0.9, 1.1) for mine in ALIKE), hosts=HOSTS) == []


def test_a_moment_is_not_enough() -> None:
    """An evaluation, a checkpoint, the first steps."""
    found = StragglerSensor()
    for _ in range(10):
        assert flush(found, 2.0, 0.1, 0.1, 0.1) == flush(found, *ALIKE, times=3) == []


def test_a_moment_in_which_all_are_alike_hides_nobody() -> None:
    found = StragglerSensor()
    assert flush(found, *SLOW, times=3) + flush(found, *ALIKE) + flush(found, *SLOW) == [LINE]


def test_who_waits_itself_for_others_in_turn_is_not_named() -> None:
    found = StragglerSensor()
    for turn in range(40):
        assert flush(found, *(0.15 if rank == turn % 4 else 0.1 for rank in range(4))) == []


def test_a_fast_worker_is_no_reason_to_name_the_others() -> None:
    assert flush(StragglerSensor(), 0.15, 0.15, 0.05, 0.15, times=20) == []


def test_the_workers_of_a_host_are_named_together() -> None:
    (line,) = flush(StragglerSensor(), 0.1, 0.1, 0.2, 0.21, times=20)
    assert line.startswith(
        "the workers of b (ranks 2, 3) make the others wait: 105.0 ms in each step, "
        "48% of it, for compute. "
    )
    (line,) = flush(
        StragglerSensor(), 0.1, 0.2, 0.1, 0.1, 0.2, hosts=("a", "a", "b", "b", "c"), times=20
    )
    assert line.startswith("ranks 1, 4 on a, c make the others wait: 100.0 ms")


def test_a_change_is_said_and_the_same_after_long() -> None:
    found = StragglerSensor()
    assert flush(found, *SLOW, times=int(PAUSE / 1.6) + 1) == [LINE]
    (changed,) = flush(found, 0.3, 0.1, 0.1, 0.1, times=20)
    assert changed.startswith("rank 0 on a makes")
    long = int(AGAIN / 3.1)
    assert flush(found, 0.3, 0.1, 0.1, 0.1, times=long - 30) == []
    assert len(flush(found, 0.3, 0.1, 0.1, 0.1, times=60)) == 1


def test_who_comes_and_goes_is_not_said_each_time() -> None:
    found = StragglerSensor()
    said = [
        line
        for _ in range(10)
        for line in (*flush(found, *SLOW, times=FLUSHES), *flush(found, *ALIKE, times=FLUSHES))
    ]
    assert len(said) == 2  # in 130 seconds
    near = StragglerSensor()
    flush(near, *SLOW, times=60)
    # a little better, but no other one
    assert flush(near, 0.1, 0.1, 0.12, 0.1, times=40) == flush(near, *SLOW, times=40) == []


def test_few_steps_short_times_and_little_are_not_judged() -> None:
    assert flush(StragglerSensor(), *(100 * mine for mine in SLOW), steps=1, times=19) == []
    assert len(flush(StragglerSensor(), *(100 * mine for mine in SLOW), steps=1, times=20)) == 1
    # 0.05 ms
    assert (
        flush(
            StragglerSensor(), *(mine / 1000 for mine in SLOW), steps=1000, times=50, exchange=0.0
        )
        == []
    )
    # less than three seconds
    assert flush(StragglerSensor(), *(mine / 10 for mine in SLOW), steps=20, times=5) == []


def test_other_workers_are_judged_anew() -> None:
    found = StragglerSensor()
    flush(found, *SLOW, times=FLUSHES - 1)
    assert found.take_flush([0, 1, 3], [[[0.1, 0.0, 0.0, 0.0]] * 10] * 3, HOSTS) is None
    assert flush(found, *SLOW, times=FLUSHES - 1) == []


def test_who_is_late_in_most_steps_is_told_from_chance() -> None:
    random.seed(7)
    noise = [{0: random.uniform(0.05, 0.15), 1: random.uniform(0.05, 0.15)} for _ in range(200)]
    assert all(0.2 < found["late"] < 0.6 for found in stragglers.measure_inequality(noise))
    slow = [{rank: seconds * (1 + rank) for rank, seconds in step.items()} for step in noise]
    first, second = stragglers.measure_inequality(slow)
    assert (
        first["late"] < 0.2
        and second["late"] > 0.8
        and second["seconds"] == pytest.approx(2 * first["seconds"], rel=0.2)
    )
    gone = [{0: 1.0, 1: 1.0}] * 50 + [{0: 1.0, 2: 3.0}] * 30
    assert [found["seconds"] for found in stragglers.measure_inequality(gone)] == [1.0, 3.0]
    assert stragglers.measure_inequality([]) == [] and stragglers.measure_inequality(
        [{0: 1.0}, {0: 1.0, 2: 2.0}]
    )[1] == {
        "seconds": 2.0,
        "late": 1.0,
    }


def test_the_summary_has_how_samples_are_dealt_and_who_had_more_to_do(tmp_path: Path) -> None:
    def train(run: Run) -> None:
        model = nn.Linear(6, 2).double()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        model, optimizer, loader, _ = run.prepare(
            model, optimizer, batches(40, 8), batches(16, 4), shares=[3, 1]
        )
        for x, y in loader:
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()

    workers(2, train, folder=tmp_path)
    found = json.loads((tmp_path / "test/summary.json").read_text())
    assert found["loader"] == {"num_workers": 0, "shares": [6, 2]}
    assert [sorted(rank) for rank in found["rank_work"]] == [["late", "seconds"]] * 2


@pytest.mark.slow
def test_in_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that sleeps in its loop is named in a line, and in the events of the summary."""
    monkeypatch.setattr(stragglers, "SECONDS", 0.2)
    said: list[str] = []

    def train(run: Run) -> None:
        torch.manual_seed(0)
        model = nn.Linear(6, 2).double()
        model, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), 0.01), batches(320)
        )
        for x, y in loader:
            ((model(x) - y) ** 2).mean().backward()
            optimizer.step()
            time.sleep(0.04 if run.rank == 1 else 0.0)

    workers(3, train, said=said, folder=tmp_path)
    events = [
        event["what"]
        for event in json.loads((tmp_path / "test/summary.json").read_text())["events"]
    ]
    assert [line for line in said if "wait" in line] == events
    assert [event.partition(" wait:")[0] for event in events] == ["rank 1 on here makes the others"]


class Slow(Dataset[Tensor]):
    """Samples, each of which takes a while to load on the rank that is `slow`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.full((4,), float(index), dtype=torch.float64)


def burn() -> None:
    """Use a processor for some milliseconds, without Python's lock."""
    hashlib.pbkdf2_hmac("sha256", b"all the same", b"work", 10_000)


@pytest.mark.slow
@pytest.mark.parametrize("cause", ["compute", "reading", "collection", "stolen"])
def test_planted_causes_are_told_apart(
    tmp_path: Path, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three ranks with different samples do the same; rank 1 has more to do, or the same with
    something in its way.
    """
    counted, stolen = InterruptionMeter._read_counters, defaultdict[int, float](float)

    def read(meter: InterruptionMeter) -> Any:
        """What is planted, and nothing of what this machine takes: it may be busy, and what is
        usual there isn't told apart.
        """
        return counted(meter)._replace(delayed=stolen[threading.get_ident()])

    if cause == "stolen":
        monkeypatch.setattr(InterruptionMeter, "_read_counters", read)

    def train(run: Run) -> None:
        torch.manual_seed(0)
        here = run.rank == 1
        model = nn.Linear(4, 1).double()
        loader = DataLoader(Slow(0.03 if here and cause == "reading" else 0.0), batch_size=6)
        model, optimizer, loader = run.prepare(
            model, torch.optim.SGD(model.parameters(), 0.001), loader
        )
        for _ in run.epochs(2):
            for x in loader:
                burn()
                if here and cause == "compute":
                    time.sleep(0.06)
                if here and cause == "stolen":
                    time.sleep(0.3)
                    stolen[threading.get_ident()] += 0.3
                if here and cause == "collection":
                    litter()
                    gc.collect()
                model(x).pow(2).mean().backward()
                optimizer.step()

    # one rank that stands still on a busy machine may outweigh what is planted
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        workers(3, train, folder=folder)
        late = json.loads((folder / "test/summary.json").read_text())["rank_late"]
        assert [sorted(rank) for rank in late] == [sorted(CAUSES)] * 3
        latest = max(range(3), key=lambda rank: sum(late[rank].values()))
        if told_apart := latest == 1 and max(late[1], key=late[1].__getitem__) == cause:
            break
    assert told_apart, late
    drawn = [
        event["name"]
        for event in json.loads((folder / "test/trace.json").read_text())["traceEvents"]
        if event.get("cat") == "late"
    ]
    assert WORDS[cause] in drawn
    assert (
        WORDS[cause] in format_report(folder / "test").partition("and why:")[2].partition("\n\n")[0]
    )


CUT = """
import time
from paceline.observe.report import format_report
from paceline.unequal.stragglers import stragglers
stragglers.SECONDS = 0.2
with pl.start(name="cut", mesh="tensor") as run:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    cut = pl.tensor({"0": pl.column(), "2": pl.row()})
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = DataLoader(TensorDataset(torch.ones(320, 4), torch.ones(320, 1)), batch_size=8)
    model, optimizer, loader = run.prepare(model, optimizer, loader, cut=cut)
    for x, y in loader:
        time.sleep(0.04 if run.rank == 1 else 0.0)
        step(run, model, optimizer, x, y)
"""


@pytest.mark.slow
def test_in_a_run_of_a_cut_model(job: Jobs, tmp_path: Path) -> None:
    """Who waits inside of its layers has no more to do for that; shares can't help where all
    have the same samples.
    """
    ended = job.run(CUT, 2).end()
    assert ended.code == 0, ended.err
    (event,) = json.loads((tmp_path / "runs/cut/summary.json").read_text())["events"]
    assert event["what"].startswith("rank 1 (tensor 1) on ") and event["what"].endswith(
        "all workers have the same samples, so shares can't help"
    )
