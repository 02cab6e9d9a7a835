"""Local SGD with a quorum: on threads, and in jobs whose workers are stopped or killed."""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import paceline as pl
from paceline.session.run import Run, parts_of_run
from tests.harness.jobs import PATIENCE, Jobs, wait_for
from tests.harness.runs import Numbered, parameters, workers

COUNT, BATCH = 240, 12


class Indexed(Numbered):
    """Numbered samples with their number."""

    def __getitem__(self, index: int) -> Any:
        return index, *super().__getitem__(index)


def make_model() -> Any:
    model = nn.Linear(6, 2).double()
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def train(run: Run, *, epochs: int = 1, delay: float = 0.0, seed: int = 0) -> Any:
    """Train on all samples; with `delay` each worker takes random times for its steps."""
    chance = random.Random(100 * seed + run.rank)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    loader = DataLoader(Indexed(COUNT), batch_size=BATCH)
    model, optimizer, loader = run.prepare(model, optimizer, loader)
    seen: Counter[int] = Counter()
    for _ in run.epochs(epochs):
        for index, x, y in loader:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.update(index.tolist())
            if delay:
                time.sleep(chance.choice([0.0, 0.0, delay]))
    sync: Any = parts_of_run(run).loop.backward.sync
    facts = sync.facts() if run.rank == 0 and run.size > 1 else []
    return parameters(model), seen, facts[0]["rounds"] if facts else {}


def check_outcome(found: list[Any], epochs: int = 1) -> dict[str, Any]:
    """Replicas are equal and every sample was trained on once an epoch; returns the rounds."""
    for weights, _, _ in found:
        assert torch.equal(weights, found[0][0])
    seen = sum((each for _, each, _ in found), Counter[int]())
    assert seen == Counter({number: epochs for number in range(COUNT)})
    rounds: dict[str, Any] = found[0][2]
    assert sum(rounds["by_workers"].values()) == rounds["count"]
    return rounds


@pytest.mark.parametrize("outer", [pl.average(), pl.nesterov(0.7, 0.5)])
@pytest.mark.parametrize("size", [2, 3])
def test_replicas_are_equal_and_each_sample_counts_once(size: int, outer: Any) -> None:
    strategy = pl.LocalSGD(3, outer=outer, quorum=0.5, grace_seconds=0.01)
    found = workers(size, lambda run: train(run, epochs=2, delay=0.01), strategy=strategy)
    assert check_outcome(found, epochs=2)["count"] > 2


@pytest.mark.parametrize("shares", [None, [3, 1]])
def test_rounds_of_one_step_of_all_are_steps_of_the_global_batch(shares: Any) -> None:
    """Each worker takes a piece of each batch, as it waits for the other's change then."""

    def body(run: Run) -> Any:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        loader = DataLoader(Numbered(COUNT), batch_size=BATCH)
        dealt = shares if run.size > 1 else None
        model, optimizer, loader = run.prepare(model, optimizer, loader, shares=dealt)
        for x, y in loader:
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
        return parameters(model)

    wanted = workers(1, body)[0]
    strategy = pl.LocalSGD(1, quorum=1.0, grace_seconds=0.0)
    for weights in workers(2, body, strategy=strategy):
        torch.testing.assert_close(weights, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_races_with_injected_delays(seed: int) -> None:
    chance = random.Random(seed)
    strategy = pl.LocalSGD(
        chance.randint(1, 4),
        outer=chance.choice([pl.average(), pl.nesterov(0.7, 0.5)]),
        quorum=chance.choice([0.3, 0.6, 0.8, 1.0]),
        grace_seconds=chance.choice([0.0, 0.002, 0.02]),
    )
    size = chance.randint(2, 4)
    found = workers(
        size, lambda run: train(run, epochs=2, delay=0.01, seed=seed), strategy=strategy
    )
    check_outcome(found, epochs=2)


def test_a_checkpoint_of_two_workers_goes_on_with_three(tmp_path: Path) -> None:
    """The momentum of the rounds is saved: without it the next change would move less."""
    strategy = pl.LocalSGD(2, outer=pl.nesterov(0.7, 0.9), quorum=0.5, grace_seconds=0.0)

    def save(run: Run) -> Any:
        weights, _, _ = train(run)
        run.save()
        sync: Any = parts_of_run(run).loop.backward.sync
        return weights, sync.state_dict()["outer_memories"]

    def resume(run: Run) -> Any:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        loader = DataLoader(Indexed(COUNT), batch_size=BATCH)
        model, optimizer, loader = run.prepare(model, optimizer, loader)
        assert run.resume(tmp_path / "test")
        sync: Any = parts_of_run(run).loop.backward.sync
        return parameters(model), sync.state_dict()["outer_memories"]

    saved = workers(2, save, strategy=strategy, folder=tmp_path)
    resumed = workers(3, resume, strategy=strategy, folder=tmp_path)
    for weights, _ in resumed:
        assert torch.equal(weights, saved[0][0])
    (before,), (after,) = saved[0][1], resumed[0][1]
    assert torch.equal(before, after) and bool(before.any())
    with pytest.raises(pl.UsageError, match="another kind of strategy"):
        workers(2, resume, strategy=pl.LocalSGD(2), folder=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grace_seconds": 5}, "give quorum too"),
        ({"quorum": 0.0}, "more than 0 and at most 1"),
        ({"quorum": 1.5}, "more than 0 and at most 1"),
        ({"quorum": 0.5, "grace_seconds": -1}, "no time to wait"),
        ({"quorum": 0.5, "codec": pl.int8()}, "leave out codec, or quorum"),
        ({"quorum": 0.5, "fragments": 2}, "leave out fragments, or quorum"),
        ({"quorum": 0.5, "delay": 1}, "leave out delay, or quorum"),
        ({"quorum": 0.5, "after": 5}, "leave out after, or quorum"),
        ({"quorum": 0.5, "momentum": "averaged"}, "leave out momentum='averaged', or quorum"),
    ],
)
def test_what_cannot_be_honoured_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(pl.UsageError, match=message):
        pl.LocalSGD(4, **options)


def test_adaptive_rounds_and_hosts_are_refused() -> None:
    with pytest.raises(pl.UsageError, match=r"leave out every=adaptive"):
        pl.LocalSGD(pl.adaptive(), quorum=0.5)
    with pytest.raises(pl.UsageError, match="leave quorum out"):
        pl.Sequence((pl.AllReduce(), "local"), (pl.LocalSGD(4, quorum=0.5), "host"))


def test_collective_calls_inside_the_loop_are_refused() -> None:
    def body(run: Run) -> None:
        _, batches = run.prepare(nn.Linear(2, 1), pl.own_batches(4, steps=2))
        for _ in batches:
            run.barrier()

    with pytest.raises(pl.UsageError, match="not in lockstep inside the loop"):
        workers(2, body, strategy=pl.LocalSGD(2, quorum=0.5))


def test_a_round_without_a_quorum_ends_with_the_names_of_the_missing() -> None:
    has_failed, messages = threading.Event(), list[str]()

    def body(run: Run) -> None:
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        _, optimizer, batches = run.prepare(model, optimizer, pl.own_batches(4, steps=9))
        parts_of_run(run).axes.replicas.deadline = 2.0  # seconds
        try:
            for _ in batches:
                if run.rank == 1:
                    assert has_failed.wait(PATIENCE)
                    raise RuntimeError("this worker has come to no round")
                optimizer.step()
        except pl.DeadlineExceeded as error:
            messages.append(str(error))
            raise
        finally:
            has_failed.set()

    with pytest.raises((pl.DeadlineExceeded, RuntimeError)):
        workers(2, body, strategy=pl.LocalSGD(1, quorum=1.0, grace_seconds=0.5))
    (message,) = messages
    assert message.startswith("the end of a round: rank 0 waited 2.5 s in vain for rank 1, which")


# Each worker writes the rows that it trains on, and waits where a test says so.
SCRIPT = """
import json
from pathlib import Path

out = Path(os.environ["OUT"])
torch.manual_seed(0)
model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with pl.start(name="run", sync=pl.LocalSGD(2, quorum=0.5, grace_seconds=0.05)) as run:
    model, optimizer, batches = run.prepare(model, optimizer, pl.own_batches(12, steps=60))
    seen = (out / f"seen-{os.getpid()}").open("a")
    for share in batches:
        model(torch.ones(len(share), 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.write(json.dumps([share.step, share.rows]) + "\\n"); seen.flush()
        while run.rank != 1 and share.step >= 45 and not (out / "go").exists(): time.sleep(0.01)
        time.sleep(0.01)
    (out / f"weights-{run.rank}").write_text(json.dumps([p.flatten().tolist() for p in model.parameters()]))
    if run.is_first:
        (out / "events").write_text(json.dumps([event["what"] for event in run.events]))
"""  # noqa: E501


def read_rows(out: Path) -> Counter[tuple[int, int]]:
    lines = [line for path in out.glob("seen-*") for line in path.read_text().splitlines()]
    return Counter((step, row) for step, rows in map(json.loads, lines) for row in rows)


def has_come_to(out: Path, step: int) -> bool:
    return any(each >= step for each, _ in read_rows(out))


@pytest.mark.slow
def test_a_stopped_worker_stops_nobody_and_joins_the_next_round(job: Jobs) -> None:
    started = job.run(SCRIPT, 3, OUT=str(job.folder))
    wait_for(lambda: has_come_to(job.folder, 5), PATIENCE)
    stopped = started.worker(1)
    stopped.suspend()
    # The others make three quarters of all steps meanwhile, then wait for this test.
    wait_for(lambda: has_come_to(job.folder, 45), PATIENCE)
    stopped.resume()
    (job.folder / "go").touch()
    ended = started.end()
    assert ended.code == 0, ended
    assert read_rows(job.folder) == Counter(
        {(step, row): 1 for step in range(60) for row in range(12)}
    )
    weights = {(job.folder / f"weights-{rank}").read_text() for rank in range(3)}
    assert len(weights) == 1
    (summary,) = (job.folder / "runs").glob("*/summary.json")
    rounds = json.loads(summary.read_text())["servers"][0]["rounds"]
    assert rounds["late"] >= 1 and rounds["by_workers"].get("2"), rounds


@pytest.mark.slow
def test_a_killed_worker_loses_no_sample(job: Jobs) -> None:
    started = job.run(SCRIPT, 3, "--min-workers", "1", OUT=str(job.folder))
    wait_for(lambda: has_come_to(job.folder, 20), PATIENCE)
    started.worker(1).kill()
    (job.folder / "go").touch()
    ended = started.end()
    assert ended.code == 0, ended
    rows = read_rows(job.folder)
    # What the lost worker trained on since its last round is dealt again.
    assert set(rows) == {(step, row) for step in range(60) for row in range(12)}
    assert sum(rows.values()) - len(rows) <= 3 * 4
    assert "1 was lost" in (job.folder / "events").read_text()
    assert (job.folder / "weights-0").read_text() == (job.folder / "weights-1").read_text()
