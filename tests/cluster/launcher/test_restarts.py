"""Jobs that start again as a whole: what is decided after a failure, and whole jobs whose
workers are killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.cluster.discover import JobStart
from paceline.cluster.hosts.peers import Failure, NoPeers
from paceline.cluster.hosts.restart_messages import HostReport
from paceline.cluster.launcher.restarts import JobRestarts, find_newest_checkpoint
from tests.harness.jobs import ROOT, Job, Jobs, wait_for
from tests.harness.survivors import Outcome, apart, outcome, script

KILLED = Failure(1, "box", 137, "was killed by SIGKILL (exit code 137)")
FAILED = Failure(1, "box", 1, "failed with exit code 1 (ValueError)")


def worker(rank: int, *records: dict[str, Any]) -> Any:
    return SimpleNamespace(rank=rank, records=list(records))


def opened(folder: Path | str) -> dict[str, Any]:
    return {"event": "opened", "folder": str(folder), "seed": 7, "began": 3.0}


def error(
    kind: str = "ValueError", message: str = "no", *, is_final: bool = False
) -> dict[str, Any]:
    return {
        "event": "failed",
        "type": kind,
        "message": message,
        "is_echo": False,
        "is_final": is_final,
    }


def saved(folder: Path, name: str, at: int) -> None:
    (folder / "checkpoints" / name).mkdir(parents=True)
    manifest = folder / "checkpoints" / name / "manifest.json"
    manifest.write_text("{}")
    os.utime(manifest, (at, at))


class Reported(NoPeers):
    """Launchers of several hosts, which have reported already."""

    def tell_ended(self, report: HostReport) -> None:
        assert self.host_reports is not None


def judged(restarts: JobRestarts, failure: Failure, *hosts: list[Any]) -> str:
    """What follows, in words, on a failure that these hosts report, each with its workers."""
    peers = Reported()
    restarts.begin_start(peers)
    peers.host_reports = {
        number: restarts.make_report(failure, workers) for number, workers in enumerate(hosts)
    }
    assert restarts.settle_sequel(failure, hosts[0])
    return restarts.sequel_words


class TestJudge:
    def test_a_killed_worker_as_often_as_is_allowed(self, tmp_path):
        restarts = JobRestarts(2)
        assert not restarts.take_due()
        assert judged(restarts, KILLED, [worker(0)]) == "all start again (restart 1 of 2)"
        assert restarts.take_due() and not restarts.take_due()
        assert restarts.present_start.folder is None
        saved(tmp_path, "step-00000005", 1)
        job = [worker(0, opened(tmp_path)), worker(1)]
        assert (
            judged(restarts, KILLED, job) == "all start again from step-00000005 (restart 2 of 2)"
        )
        assert restarts.take_due()
        assert (
            restarts.present_start.folder,
            restarts.present_start.seed,
            restarts.present_start.began,
        ) == (
            str(tmp_path),
            7,
            3.0,
        )
        assert [what for _, what in restarts.present_start.events] == [
            "rank 1 on box was killed by SIGKILL (exit code 137); all start again (restart 1 of 2)",
            (
                "rank 1 on box was killed by SIGKILL (exit code 137); "
                "all start again from step-00000005 (restart 2 of 2)"
            ),
        ]
        assert (
            judged(restarts, KILLED, [worker(0, opened(tmp_path))]) == ""
            and not restarts.take_due()
        )

    def test_nothing_saved(self, tmp_path):
        words = judged(JobRestarts(1), KILLED, [worker(0, opened(tmp_path))])
        assert (
            words
            == "all start again from where the run began, as it has saved nothing (restart 1 of 1)"
        )

    def test_an_error_comes_once_from_each_checkpoint(self, tmp_path):
        restarts, job = (
            JobRestarts(9),
            [worker(0, opened(tmp_path)), worker(1, opened(tmp_path), error())],
        )
        assert "restart 1 of 9" in judged(restarts, FAILED, job) and restarts.take_due()
        saved(tmp_path, "step-00000010", 10)
        assert "restart 2 of 9" in judged(restarts, FAILED, job) and restarts.take_due()
        assert (
            judged(restarts, FAILED, job)
            == "it isn't started again: the same error has come before, from the same place on"
        )
        assert not restarts.take_due()
        other = [worker(0, opened(tmp_path)), worker(1, opened(tmp_path), error(message="another"))]
        assert "restart 3 of 9" in judged(restarts, FAILED, other)

    def test_exit_codes_are_told_apart_by_last_words(self):
        restarts, job = JobRestarts(9), [worker(0), worker(1)]
        first, second = (
            Failure(0, "box", 1, "failed with exit code 1", tail=f"Traceback\nValueError: {text}")
            for text in "ab"
        )
        assert "restart 1" in judged(restarts, first, job) and "restart 2" in judged(
            restarts, second, job
        )
        assert judged(restarts, first, job).startswith("it isn't started again")

    def test_what_every_start_would_come_to(self):
        restarts = JobRestarts(9)
        words = judged(restarts, FAILED, [worker(0), worker(1, error("DataError", is_final=True))])
        assert (
            words == "it isn't started again: every start would end in this DataError"
            and not restarts.take_due()
        )
        assert restarts.present_start == JobStart()

    def test_a_job_of_several_runs(self):
        restarts = JobRestarts(9)
        words = judged(
            restarts, KILLED, [worker(0, opened("a"), opened("b")), worker(1, opened("a"))]
        )
        assert "has opened 2 runs" in words and not restarts.take_due()

    def test_the_error_of_a_worker_of_another_host(self, tmp_path):
        hosts = [worker(0, opened(tmp_path))], [worker(1, opened(tmp_path), error())]
        restarts = JobRestarts(9)
        assert (
            "from where the run began" in judged(restarts, FAILED, *hosts) and restarts.take_due()
        )
        assert judged(restarts, FAILED, *hosts).startswith("it isn't started again: the same error")
        final = [worker(1, error("UsageError", is_final=True))]
        assert (
            judged(JobRestarts(9), FAILED, [worker(0)], final)
            == "it isn't started again: every start would end in this UsageError"
        )

    def test_a_host_that_is_gone(self, tmp_path):
        gone, job = Failure(None, "far", 1, "is gone: it hung up"), [worker(0, opened(tmp_path))]
        saved(tmp_path, "step-00000005", 1)
        waits = "once another host has come in its place, for which they wait 60 s"
        restarts = JobRestarts(2, patience=60.0)
        for number in (1, 2):
            assert (
                judged(restarts, gone, job)
                == f"all start again from step-00000005 {waits} (restart {number} of 2)"
            )
        assert restarts.take_due() and restarts.present_start.events[1][1].startswith(
            "host far is gone: it hung up; all start again"
        )
        assert judged(restarts, gone, job) == ""
        assert (
            judged(JobRestarts(2), gone, job)
            == "it isn't started again: --patience 0 waits for no other host in its place"
        )

    def test_what_a_lost_first_host_has_saved_is_not_known(self, tmp_path):
        restarts, peers, gone = (
            JobRestarts(1, patience=5.0),
            Reported(),
            Failure(None, "first", 1, "is gone"),
        )
        restarts.begin_start(peers)
        peers.host_reports = {1: restarts.make_report(gone, [worker(2, opened(tmp_path))])}
        assert restarts.settle_sequel(gone, [])
        assert restarts.sequel_words == (
            "all start again once another host has come in its place, for which they wait 5 s "
            "(restart 1 of 1)"
        )


def test_hosts_may_have_the_folder_of_a_run_in_different_places(tmp_path):
    """Each tells its own workers of its own; one that has seen none gets that of the others.

    The latest state counts.
    """
    peers, first, second, third = NoPeers(), JobRestarts(3), JobRestarts(3), JobRestarts(3)
    hosts = {0: (first, tmp_path / "a"), 1: (second, tmp_path / "b")}
    reports = {
        number: each.make_report(KILLED, [worker(number, opened(folder))])
        for number, (each, folder) in hosts.items()
    }
    peers.sequel = first.decide_sequel(KILLED, reports)
    for each in (first, second):
        each.begin_start(peers)
        assert each.settle_sequel(KILLED, []) and each.take_due()
    peers.state = peers.sequel.state
    third.begin_start(peers)
    assert [each.present_start.folder for each in (first, second, third)] == [
        str(tmp_path / name) for name in "aba"
    ]
    assert {each.present_start.seed for each in (first, second, third)} == {7} and len(
        third.present_start.events
    ) == 1


def test_the_newest_checkpoint_is_the_one_written_last(tmp_path):
    assert find_newest_checkpoint(tmp_path / "checkpoints") is None
    saved(tmp_path, "step-00000300", 10)
    saved(tmp_path, "step-00000100", 20)  # after the run began anew
    (tmp_path / "checkpoints" / ".saving-x").mkdir()
    (tmp_path / "checkpoints" / "step-00000400").mkdir()  # without a manifest it is none
    assert find_newest_checkpoint(tmp_path / "checkpoints") == "step-00000100"


def test_starts_are_told_in_text():
    start = JobStart("runs/ü", 3, 1.5, ((2.0, "x"), (3.0, "y")))
    assert JobStart.load(start.dump()) == start and JobStart.load(JobStart().dump()) == JobStart()


# ---- whole jobs of a run: three epochs of twelve steps, with different samples on each worker

# steps 5, 10, 15, ..., after the loss is logged
SAVES = "0 * bool(run.steps % 5 == 4 and run.save())"
LOST = "run.rank == 1 and run.steps == {} and die(True, {!r})"


def launched(job: Jobs, name: str, *options: str, **parts: Any) -> tuple[Job, Path]:
    """The training of two workers, with a folder of its own."""
    out = job.folder / name
    out.mkdir()
    text = script(**{"start": f"name='run', folder='{name}/runs', seed=5", "nap": SAVES} | parts)
    return job.run(text, 2, *options, OUT=str(out)), out


def trained(job: Jobs, name: str, *options: str, **parts: Any) -> tuple[Outcome, str, Path]:
    """What it comes to, and what it says."""
    started, out = launched(job, name, *options, **parts)
    ended = started.end()
    assert ended.code == 0, ended
    return outcome(out, out), ended.err, out / "runs" / "run"


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in lines(folder)]


@pytest.mark.alike(2)
@pytest.mark.parametrize(
    "parts",
    [
        {"before": LOST.format(12, "first"), "between": LOST.format(13, "second")},
        {
            "before": LOST.format(3, "first"),
            "between": LOST.format(23, "second"),
            "prepared": "run.resume('nowhere')",
        },
        {
            "before": LOST.format(12, "first"),
            "between": LOST.format(13, "second"),
            "prepared": "run.resume()",
        },
    ],
    ids=["by itself", "nothing saved at first", "resume"],
)
def test_a_killed_worker_leaves_no_trace_but_events(job: Jobs, parts: dict[str, Any]) -> None:
    wanted, _, folder = trained(job, "undisturbed")
    found, said, again = trained(job, "killed", "--restarts", "2", **parts)
    assert apart(found, wanted) == 0 and all(map(torch.equal, found.weights, wanted.weights))
    assert losses(again) == losses(folder) and [step for step, _ in losses(again)] == list(
        range(1, 37)
    )
    assert [path.name for path in again.parent.iterdir()] == ["run"]
    assert (
        len(found.events) == 2
        and "restart 1 of 2" in found.events[0]
        and "restart 2 of 2" in found.events[1]
    )
    assert "was killed by SIGKILL (exit code 137)" in found.events[0] and found.events[0] in said
    first = "from step-00000010" if " 12 " in parts["before"] else "as it has saved nothing"
    assert first in found.events[0], found.events
    assert json.loads((again / "summary.json").read_text())["events"][1]["what"] == found.events[1]


def test_no_restart_is_left(job: Jobs) -> None:
    dies = "run.rank == 1 and run.steps == 7 and os.kill(os.getpid(), signal.SIGKILL)"
    started, out = launched(job, "killed", "--restarts", "1", before=dies)
    ended = started.end()
    assert (
        ended.code == 137 and "all start again from step-00000005 (restart 1 of 1)" in ended.err
    ), ended
    assert (
        ended.last.startswith("paceline: rank 1 on ")
        and "was killed by SIGKILL (exit code 137); the run is in" in ended.last
    )
    steps = [line["step"] for line in lines(out / "runs" / "run")]
    # those that the second start has written again are there once
    assert len(steps) >= 6 and steps == list(range(1, len(steps) + 1))
    assert not (out / "runs" / "run" / "summary.json").exists()


def test_errors(job: Jobs) -> None:
    """One that comes again from the same checkpoint ends the job; a wrong request is not tried
    again.
    """
    wrong, _ = launched(
        job, "wrong", "--restarts", "5", after="run.rank == 1 and run.steps == 7 and {}['lost']"
    )
    ended = wrong.end()
    assert (
        ended.code == 1
        and ended.err.count("(restart ") == 1
        and "all start again from step-00000005 (restart 1 of 5)" in ended.err
    )
    assert ended.last.endswith(
        "it isn't started again: the same error has come before, from the same place on"
    ), ended
    usage, _ = launched(job, "usage", "--restarts", "5", after="run.rank == 1 and run.log(step=1)")
    ended = usage.end()
    assert ended.code == 1 and "(restart " not in ended.err
    assert ended.last.endswith(
        "it isn't started again: every start would end in this UsageError"
    ), ended


def test_ctrl_c_during_a_restart(job: Jobs) -> None:
    held = "(out / 'first').exists() and ((out / 'again').touch(), signal.pause())"
    started, out = launched(
        job,
        "held",
        "--restarts",
        "3",
        before="die(run.rank == 1 and run.steps == 7, 'first')",
        prepared=held,
    )
    wait_for(lambda: (out / "again").exists() or started.process.poll() is not None)
    started.process.send_signal(signal.SIGINT)
    ended = started.end()
    assert (
        ended.code == 130
        and "(restart 1 of 3)" in ended.err
        and "(restart 2 of 3)" not in ended.err
    ), ended


UNLOOPED = """
with pl.start(name="run", seed=5) as run:
    model, optimizer, loader = parts(run)
    for x, y in loader:
        step(run, model, optimizer, x, y)
        run.save()
        if run.rank == 1 and run.steps == 3 and not run.events:
            os.kill(os.getpid(), 9)
    run.print(run.steps, len(run.events))
"""


def test_a_loop_of_its_own_begins_anew_and_that_is_said(job: Jobs) -> None:
    ended = job.run(UNLOOPED, 2, "--restarts", "1").end()
    assert ended.code == 0 and ended.out == "[0] 8 1\n", ended
    assert "trains from the beginning although it has checkpoints" in ended.err
    assert [line["step"] for line in lines(job.folder / "runs" / "run")] == list(range(1, 9))


PLAIN = """
import signal, torch.distributed as dist
from pathlib import Path
dist.init_process_group("gloo")
x = torch.ones(1)
dist.all_reduce(x)
if rank == 1 and not Path("died").exists():
    Path("died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
print(x.item(), flush=True)
dist.destroy_process_group()
"""


def test_a_script_without_a_run_starts_again(job: Jobs) -> None:
    ended = job.run(PLAIN, 2, "--restarts", "1").end()
    assert ended.code == 0 and sorted(ended.out.splitlines()) == ["[0] 2.0", "[1] 2.0"], ended
    assert "all start again (restart 1 of 1)" in ended.err


@pytest.mark.parametrize(
    "options",
    [
        ("--sync", "ParameterServer()"),
        ("--sync", "LocalSGD(4)"),
        ("--mesh", "shard=2", "--cut", "shard(zero=3)"),
    ],
    ids=["ParameterServer", "LocalSGD", "a cut model"],
)
def test_what_each_worker_has_for_itself(job: Jobs, options: tuple[str, ...]) -> None:
    wanted, _, folder = trained(job, "undisturbed", *options)
    found, _, again = trained(
        job, "killed", *options, "--restarts", "1", before=LOST.format(12, "first")
    )
    assert all(map(torch.equal, found.weights, wanted.weights)) and losses(again) == losses(folder)
    assert len([what for what in found.events if "restart 1 of 1" in what]) == 1


ONCE = """
if not os.path.exists("died"):
    open("died", "w").close()
    os.kill(os.getpid(), 9)
print("again", os.environ["PACELINE_JOB_START"] != "")
"""


def test_a_job_of_one_worker(script, launch):
    code, out, err = launch(script(ONCE), 1, restarts=1).end()
    assert (code, out) == (0, "[0] again True\n") and "(restart 1 of 1)" in err
    assert (
        launch(script("print(os.environ['PACELINE_JOB_START'] == '')"), 1).end()[1] == "[0] True\n"
    )


# Ctrl-C comes when the workers have ended, and the next start has been announced.
LATE = """
import os, signal
from paceline.cluster.launcher import launch, restarts

class Interrupted(restarts.JobRestarts):
    def settle_sequel(self, failure, workers):
        settled = super().settle_sequel(failure, workers)
        os.kill(os.getpid(), signal.SIGINT)
        return settled

launch.JobRestarts = Interrupted
raise SystemExit(launch.run_job(launch.LaunchRequest({!r}, workers=2, restarts=3)))
"""


@pytest.mark.jobs
def test_ctrl_c_between_two_starts(tmp_path, script):
    path = script("open(f'{rank}-{os.getpid()}', 'w'); os.kill(os.getpid(), 9)")
    done = subprocess.run(
        [sys.executable, "-c", LATE.format(path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (
        done.returncode == 130
        and "(restart 1 of 3)" in done.stderr
        and "restart 2" not in done.stderr
    ), done
    # whoever was there before the other's end was seen
    assert len(list(tmp_path.glob("[01]-*"))) <= 2
