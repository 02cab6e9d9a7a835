"""Servers as programs of their own: with one host and two, with a foreign launcher, and when
something of all that dies.
"""

from __future__ import annotations

import json
import signal
import sys
from statistics import fmean
from typing import Any

import psutil
import pytest
import torch

from tests.harness.jobs import Job, Jobs, free_port, wait_for
from tests.harness.served_training import script, weights
from tests.harness.surviving_servers import servers

SOAK = pytest.mark.soak
SEEN = "while not os.path.exists('seen'): time.sleep(0.01)"  # the servers, by the test


@pytest.fixture
def alone(job: Jobs) -> torch.Tensor:
    ended = job.run(script("alone", "None"), 1).end()
    assert ended.code == 0, ended
    return weights(job, "alone")


def near(one: torch.Tensor, other: torch.Tensor) -> bool:
    return float((one - other).norm() / other.norm()) < 1e-9


@SOAK
def test_on_one_host(job: Jobs, alone: torch.Tensor) -> None:
    launched = job.run(script("served", after=SEEN), 2)
    wait_for(lambda: len(servers(launched)) == 3 or launched.process.poll() is not None)
    assert not any(process.net_connections("tcp") for process in servers(launched)), (
        "inside a host nobody listens to the network"
    )
    (job.folder / "seen").touch()
    ended = launched.end()
    assert ended.code == 0 and near(weights(job, "served"), alone), ended


@pytest.mark.slow
def test_on_two_hosts(job: Jobs, alone: torch.Tensor) -> None:
    """Each has servers, and reaches the other's by TCP."""
    environ = {"PACELINE_SECRET": "5a" * 32, "PACELINE_INTERFACE": "lo"}
    point = f"127.0.0.1:{free_port()}"
    launched = [
        job.run(script("served", after=SEEN), 2, "--hosts", "2", "--join", point, **environ)
        for _ in range(2)
    ]
    counts = [0, 0]

    def all_there() -> bool:
        counts[:] = [len(servers(each)) for each in launched]
        return sum(counts) == 3 or any(each.process.poll() is not None for each in launched)

    wait_for(all_there)
    (job.folder / "seen").touch()
    assert sorted(counts) == [1, 2]
    for each in launched:
        ended = each.end()
        assert ended.code == 0, ended
    assert near(weights(job, "served"), alone)


SYNCS = [
    "ParameterServer(staleness=3)",
    "ParameterServer(staleness=inf)",
    "ParameterServer(backup_workers=1)",
]


@pytest.mark.slow
@pytest.mark.alike(2)
@pytest.mark.parametrize(
    ("sync", "readers"), [(SYNCS[0], 0), (SYNCS[2], 1), (SYNCS[1], 1), (SYNCS[2], 0)]
)
def test_not_in_lockstep_as_the_command_line_says(job: Jobs, sync: str, readers: int) -> None:
    """Three workers of unequal speed share the samples of an epoch, read ahead or not; the
    summary tells what servers did.
    """
    slow = "time.sleep(0.05 * (rank == 2))"
    body = script("loose", "None", epochs=2, after=slow, readers=readers)
    ended = job.run(body, 3, "--servers", "2", "--sync", sync).end()
    assert ended.code == 0, ended
    summary = json.loads((job.folder / "runs" / "loose" / "summary.json").read_text())
    assert summary["sync"] == sync and summary["samples"] == 320 and len(summary["servers"]) == 2
    assert (
        sum(summary["servers"][0]["staleness"].values())
        == summary["servers"][0]["messages"]["complete_turn"]
        > 40
    )
    events = json.loads((job.folder / "runs" / "loose" / "trace.json").read_text())["traceEvents"]
    processes = {
        event["args"]["name"].partition(" on ")[0]
        for event in events
        if event["name"] == "process_name"
    }
    kinds = {event["name"] for event in events if event.get("cat") == "serve"}
    assert {"server 0", "server 1", "rank 0"} <= processes and {
        "push_gradient",
        "pull_unit",
        "complete_turn",
    } <= kinds
    lines = [
        json.loads(line)
        for line in (job.folder / "runs" / "loose" / "metrics.jsonl").read_text().splitlines()
    ]
    losses = [line["loss"] for line in lines]
    assert sum(line["samples"] for line in lines) == 320
    assert fmean(losses[len(losses) // 2 :]) < fmean(losses[: len(losses) // 4]), (
        "one step may be of few samples"
    )


@SOAK
def test_with_torchrun_and_no_secret(job: Jobs, alone: torch.Tensor) -> None:
    path = job.write(script("served"))
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
        path,
    ]
    ended = job.start(command).end()
    assert ended.code == 0 and near(weights(job, "served"), alone), ended


class TestEndings:
    def started(self, job: Jobs, **parts: Any) -> Job:
        launched = job.run(
            script("ends", epochs=100, nap=0.05, after="open('trains', 'w')", **parts), 2
        )
        wait_for(
            lambda: (job.folder / "trains").exists() or launched.process.poll() is not None, 60
        )
        assert launched.process.poll() is None, launched.end()
        return launched

    @pytest.mark.slow
    def test_a_server_is_killed(self, job: Jobs) -> None:
        launched = self.started(job, sync="ParameterServer(servers=2, bucket_mb=0.05)")
        servers(launched)[0].kill()
        ended = launched.end()
        assert (
            ended.code == 1
            and "was killed by SIGKILL" in ended.err
            and "what it kept is lost" in ended.err
        ), ended

    @SOAK
    def test_a_worker_is_killed(self, job: Jobs) -> None:
        launched = self.started(job)
        launched.worker(0).kill()
        ended = launched.end()
        assert ended.code == 137 and "rank 0" in ended.last, ended

    @SOAK
    def test_all_is_killed(self, job: Jobs) -> None:
        launched = self.started(job)
        for process in [psutil.Process(launched.process.pid), *launched.workers()]:
            process.kill()
        launched.process.wait()

    @SOAK
    def test_ctrl_c(self, job: Jobs) -> None:
        launched = self.started(job)
        launched.process.send_signal(signal.SIGINT)
        ended = launched.end()
        assert ended.code == 130 and "Traceback" not in ended.err.split("KeyboardInterrupt")[-1], (
            ended
        )

    @SOAK
    def test_a_script_that_raises(self, job: Jobs) -> None:
        ended = job.run(script("ends", epochs=100, after="1 / 0 if rank else None"), 2).end()
        assert (
            ended.code == 1
            and "ZeroDivisionError" in ended.err
            and ended.last.startswith("paceline: rank 1")
        ), ended

    @SOAK
    def test_surviving_is_refused(self, job: Jobs) -> None:
        ended = job.run(script("ends"), 2, "--min-workers", "1").end()
        assert (
            ended.code == 1 and "ParameterServer can't go on yet when workers are lost" in ended.err
        ), ended


@SOAK
def test_between_hosts_a_secret_is_needed(job: Jobs) -> None:
    for ended in job.without_secret(script("ends")):
        assert (
            ended.code == 1
            and "ParameterServer listens on 2 hosts, and this job has no secret" in ended.err
        ), ended
