"""The recommender: tables on servers and on workers learn the same, and the AUC is in the
summary.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.apps import recommender
from paceline.apps.clicks import ClickLog, ClickSamples
from paceline.servers.worker.strategy import ParameterServer
from paceline.session.run import Run
from tests.harness import nursery
from tests.harness.jobs import Jobs, wait_for
from tests.harness.runs import workers
from tests.harness.surviving_servers import servers

LOG = ClickLog(tables=2, rows=500, bag=2)


def train(run: Run, model: recommender.Recommender, *, ahead: bool = False) -> float:
    optimizer = recommender.make_optimizer("adagrad", model)
    loaders = (
        ClickSamples(LOG, 0, 24 * 64).make_loader(64),
        ClickSamples(LOG, 1 << 20, 1000).make_loader(500),
    )
    model, optimizer, batches, held_out = run.prepare(model, optimizer, *loaders)
    before = recommender.evaluate_auc(run, model, held_out)
    for numbers, ids, clicked in batches:
        loss = recommender.compute_loss(model(numbers, ids), clicked)
        model.prefetch(batches.peek() if ahead else None)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = recommender.evaluate_auc(run, model, held_out)
    assert after > before + 0.05
    return after


@pytest.mark.slow
def test_tables_on_servers_learn_the_same() -> None:
    wanted = workers(
        1, lambda run: train(run, recommender.build_model(LOG, 4, served=False, servers=None))
    )[0]
    for strategy, ahead in ((None, False), (None, True), (ParameterServer(), False)):
        # threads share torch's generator
        models = [recommender.build_model(LOG, 4, served=True, servers=2) for _ in range(2)]
        found = workers(
            2,
            lambda run, models=models, ahead=ahead: train(run, models[run.rank], ahead=ahead),
            strategy=strategy,
        )
        assert found[0] == found[1] == pytest.approx(wanted, abs=1e-4)


def test_prefetching_saves_waits() -> None:
    def body(run: Run, *, ahead: bool) -> int:
        model = recommender.build_model(LOG, 4, served=True, servers=1)
        optimizer = recommender.make_optimizer("sgd", model)
        model, optimizer, batches = run.prepare(
            model, optimizer, ClickSamples(LOG, 0, 640).make_loader(64)
        )
        for numbers, ids, clicked in batches:
            loss = recommender.compute_loss(model(numbers, ids), clicked)
            model.prefetch(batches.peek() if ahead else None)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return sum(table.source._lookup.blocking_pulls for table in model.tables)

    assert workers(2, lambda run: body(run, ahead=False)) == [20, 20]
    assert workers(2, lambda run: body(run, ahead=True)) == [2, 2]


def test_the_model_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    one, other = (
        recommender.build_model(LOG, 4, served=served, servers=None) for served in (True, False)
    )
    assert torch.equal(before, torch.get_rng_state())
    assert all(
        torch.equal(p, q) for p, q in zip(one.top.parameters(), other.top.parameters(), strict=True)
    )


ASKED = ("--rows", "2000", "--steps", "20", "--batch", "256", "--held-out", "2000", "--name", "x")


def summary_of(folder: Path) -> dict[str, Any]:
    """The summary of a run of the program."""
    summary: dict[str, Any] = json.loads((folder / "x" / "summary.json").read_text())
    return summary


# Each worker says when it has come to its 40th step of 150, and trains on once there is the file
# `go`.
HELD = """
import os, time
from itertools import count
from pathlib import Path
from paceline.apps import recommender

steps, loss_of = count(1), recommender.compute_loss

def held(*given):
    if next(steps) == 40:
        Path(f"held-{os.getpid()}").touch()
        while not Path("go").exists():
            time.sleep(0.01)
    return loss_of(*given)

recommender.compute_loss = held
recommender.main()
"""


@pytest.mark.slow
def test_the_program_survives(job: Jobs) -> None:
    """A worker and a server are killed: the loss and the AUC are those of a run that nobody
    disturbed.
    """
    common = ("--rows", "2000", "--steps", "100", "--batch", "64", "--held-out", "2000")
    options = (*common, "--servers", "1", "--replicas", "2", "--name", "x")
    launched = job.run(HELD, 2, "--min-workers", "1", args=options)
    wait_for(
        lambda: launched.process.poll() is not None or len(list(job.folder.glob("held-*"))) == 2
    )
    servers(launched)[0].kill()
    launched.worker(1).kill()
    (job.folder / "go").touch()
    ended = launched.end()
    assert ended.code == 0, ended
    wanted = job.program(Path(recommender.__file__), 1, args=(*common, "--name", "y")).end()
    assert wanted.code == 0, wanted
    found, alone = (
        json.loads((job.folder / "runs" / name / "summary.json").read_text()) for name in "xy"
    )
    assert found["workers"] == 1 and any(
        "table server 0" in event["what"] for event in found["events"]
    ), found["events"]
    # Adagrad magnifies the rounding of float32
    assert found["results"]["auc"] == pytest.approx(alone["results"]["auc"], abs=5e-3)
    assert found["final_loss"] == pytest.approx(alone["final_loss"], rel=5e-3)


@pytest.mark.slow
def test_the_program(job: Jobs, tmp_path: Path) -> None:
    """With two workers and servers of its own beside a parameter server; and alone, with its
    tables.
    """
    path = Path(recommender.__file__)
    options = ("--folder", str(tmp_path / "served"), "--servers", "1", "--dense-by", "server")
    served = job.program(path, 2, args=(*ASKED, *options)).end()
    assert served.code == 0, served
    alone = nursery.run_script(
        path,
        tmp_path,
        *ASKED,
        "--folder",
        str(tmp_path / "alone"),
        "--tables-by",
        "worker",
        "--no-prefetch",
    )
    assert alone.returncode == 0, alone.stderr
    found, wanted = summary_of(tmp_path / "served"), summary_of(tmp_path / "alone")
    assert found["sync"] == "ParameterServer(servers=1)" and found["workers"] == 2
    assert 0.5 < found["results"]["auc"] == pytest.approx(wanted["results"]["auc"], abs=2e-3)
    assert found["final_loss"] == pytest.approx(wanted["final_loss"], rel=1e-4)
    assert 0 < found["results"]["worker_memory_mb"] < 1000
    dense, table = found["servers"]
    assert (
        table["name"].startswith("table server 0")
        and 2000 < table["rows"] < 10_000
        and table["memory_bytes"] > 4 * table["rows"]
    )
    assert (
        table["messages"]["push_rows"] == 2 * 20
        and "push_gradient" in dense["messages"]
        and "rows" not in dense
    )
    trace = json.loads((tmp_path / "served" / "x" / "trace.json").read_text())
    assert {dense["name"], table["name"]} <= {
        event["args"].get("name") for event in trace["traceEvents"] if "args" in event
    }
