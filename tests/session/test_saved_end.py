"""SIGTERM to real jobs: a checkpoint is saved after the step under way, from which the run goes on
with each sample once.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from paceline.session.run import Run
from tests.harness import short_timings
from tests.harness.jobs import Ended, Job, Jobs, free_port, wait_for
from tests.harness.runs import workers
from tests.harness.survivors import Outcome, apart, outcome, script

ENDED = 128 + signal.SIGTERM
HELD = 5  # the step in which all workers are when the signal comes
TEXT = script(held=HELD, nap=0)
SAVES = ("--save-on-term", "--name", "run")


def start(job: Jobs, *options: str, workers: int = 2, text: str = TEXT, **environ: str) -> Job:
    """A job with a name, whose workers write into the folder of the test."""
    environ = short_timings.environ(supervisor=short_timings.UNHURRIED) | environ
    return job.run(text, workers, *options, OUT=str(job.folder), **environ)


def wait_until_held(job: Jobs, workers: int, step: int = HELD) -> None:
    """Wait until this number of workers are in the step in which they wait."""

    def are_held() -> bool:
        texts = [path.read_text().splitlines() for path in job.folder.glob("seen-*")]
        return sum(json.loads(text[-1])[0] == step for text in texts if text) == workers

    wait_for(are_held)


def terminate(launched: Job, answer: str) -> None:
    """Send SIGTERM to a launcher, and wait until it has said this."""
    launched.process.terminate()
    assert launched.process.stderr is not None
    for line in launched.process.stderr:
        if answer in line:
            return
    raise AssertionError(f"it never said: {answer}")


def let_go(job: Jobs) -> None:
    (job.folder / "go").touch()


def checkpoints(job: Jobs, name: str = "run") -> list[str]:
    return sorted(path.name for path in (job.folder / "runs" / name / "checkpoints").glob("step-*"))


def dealings(folder: Path) -> dict[int, list[int]]:
    """The samples of each step, however often it was taken."""
    found: dict[int, list[int]] = {}
    for path in folder.glob("seen-*"):
        for line in path.read_text().splitlines():
            step, _, samples = json.loads(line)
            found.setdefault(step, []).extend(samples)
    return {step: sorted(samples) for step, samples in found.items()}


def check_resumed(job: Jobs, wanted: Outcome, workers: int = 3) -> None:
    """Go on, and compare with a training that nobody disturbed."""
    ended = start(job, "--name", "run", "--resume", workers=workers).end()
    assert ended.code == 0 and "resumed from runs/run/checkpoints/step-" in ended.err, ended
    assert dealings(job.folder) == wanted.samples
    assert apart(outcome(job.folder, job.folder), wanted) < 1e-12


def check_saved(job: Jobs, *ends: Ended) -> None:
    """All ended with the checkpoint that the workers agreed on."""
    assert [ended.code for ended in ends] == [ENDED] * len(ends), ends
    (saved,) = checkpoints(job)
    assert f"asked to end (SIGTERM): saved {saved} in" in "".join(ended.err for ended in ends)
    assert "Traceback" not in "".join(ended.err for ended in ends)


def test_no_sample_is_lost_or_repeated(job: Jobs, alone: Callable[..., Outcome]) -> None:
    launched = start(job, *SAVES)
    wait_until_held(job, 2)
    launched.process.terminate()
    let_go(job)
    ended = launched.end()
    check_saved(job, ended)
    assert ended.last.startswith(
        "paceline: asked to end by SIGTERM: 2 workers ended; the run is in"
    )
    summary = json.loads((job.folder / "runs" / "run" / "summary.json").read_text())
    assert "asked to end (SIGTERM): saved" in summary["events"][-1]["what"]
    check_resumed(job, alone())


@pytest.mark.slow
@pytest.mark.alike(1)
@pytest.mark.parametrize("asked", [(1,), (0,), (0, 1)])
def test_one_host_or_all_are_asked(
    job: Jobs, alone: Callable[..., Outcome], asked: tuple[int, ...]
) -> None:
    """All hosts save at the same step, whichever was asked, and don't start again."""
    point = f"127.0.0.1:{free_port()}"
    options = (*SAVES, "--hosts", "2", "--join", point, "--restarts", "1")
    secret = {"PACELINE_SECRET": "5a" * 32, "PACELINE_INTERFACE": "lo"}
    hosts = [start(job, *options, "--host-rank", str(host), **secret) for host in range(2)]
    wait_until_held(job, 4)
    for host in asked:
        hosts[host].process.terminate()
    let_go(job)
    check_saved(job, *[host.end() for host in hosts])
    check_resumed(job, alone())


@pytest.mark.slow
@pytest.mark.alike(1)
@pytest.mark.parametrize("asked", [(0, 1), (0,)])
def test_hosts_that_all_leave_an_elastic_job_save(
    job: Jobs, alone: Callable[..., Outcome], asked: tuple[int, ...]
) -> None:
    point = f"127.0.0.1:{free_port()}"
    count = str(len(asked))
    options = (*SAVES, "--min-workers", "1", "--hosts", count, "--join", point)
    environ = {
        "PACELINE_SECRET": "5a" * 32,
        "PACELINE_INTERFACE": "lo",
        **short_timings.environ(**short_timings.MEETING),
    }
    hosts = [start(job, *options, **environ) for _ in asked]
    wait_until_held(job, 2 * len(asked))
    for host in asked:
        hosts[host].process.terminate()
    let_go(job)
    ends = [host.end() for host in hosts]
    assert [ended.code for ended in ends] == [ENDED] * len(asked), ends
    assert len(checkpoints(job)) == 1, ends
    check_resumed(job, alone())


@pytest.mark.slow
def test_one_host_leaves_an_elastic_job_and_the_others_go_on(
    job: Jobs, alone: Callable[..., Outcome]
) -> None:
    point = f"127.0.0.1:{free_port()}"
    options = (*SAVES, "--min-workers", "1", "--hosts", "2", "--join", point)
    environ = {
        "PACELINE_SECRET": "5a" * 32,
        "PACELINE_INTERFACE": "lo",
        **short_timings.environ(**short_timings.MEETING),
    }
    hosts = [start(job, *options, **environ) for _ in range(2)]
    wait_until_held(job, 4)
    hosts[1].process.terminate()
    let_go(job)
    ends = [host.end() for host in hosts]
    assert [ended.code for ended in ends] == [0, ENDED], ends
    assert "asked to leave" in ends[1].err and checkpoints(job) == []
    assert outcome(job.folder, job.folder).samples == alone().samples


SAVING = """
            if run.steps == 5:
                from paceline.checkpoint.files import disk
                whole = disk.write_file
                def write(path, parts, **options):
                    while not (out / "asked").exists(): time.sleep(0.01)
                    return whole(path, parts, **options)
                disk.write_file = write
                run.save(background=True, keep=5)
"""


@pytest.mark.slow
def test_a_save_in_the_background_is_finished_first(
    job: Jobs, alone: Callable[..., Outcome]
) -> None:
    launched = start(job, *SAVES, text=script(held=HELD, nap=0, after=SAVING))
    wait_until_held(job, 2)
    launched.process.terminate()
    let_go(job)
    (job.folder / "asked").touch()
    ended = launched.end()
    assert ended.code == ENDED and len(checkpoints(job)) >= 1, ended
    check_resumed(job, alone())


@pytest.mark.slow
def test_a_second_sigterm_changes_nothing(job: Jobs) -> None:
    launched = start(job, *SAVES)
    wait_until_held(job, 2)
    terminate(launched, "the run saves a checkpoint")
    terminate(launched, "a checkpoint is being saved already")
    let_go(job)
    ended = launched.end()
    assert ended.code == ENDED and len(checkpoints(job)) == 1, ended


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, signal.SIGINT])
def test_without_time_or_patience_nothing_is_saved(job: Jobs, number: int | None) -> None:
    """The workers never come out of their step."""
    grace = "0.5" if number is None else "600"
    launched = start(job, *SAVES, "--grace-seconds", grace)
    wait_until_held(job, 2)
    terminate(launched, "the run saves a checkpoint")
    if number is not None:
        launched.process.send_signal(number)
    ended = launched.end()
    assert ended.code == ENDED and checkpoints(job) == [], ended
    assert ended.last.startswith("paceline: asked to end by SIGTERM: 2 workers ended")


LOOSE = """
with pl.start(name="run") as run:
    {body}
    (run.folder.path.parent / f"ready-{{run.rank}}").touch()
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.alike(1)
@pytest.mark.parametrize("body", ["parts(run)", "pass"])
def test_before_training_there_is_nothing_to_save(job: Jobs, body: str) -> None:
    launched = start(job, "--save-on-term", text=LOOSE.format(body=body))
    wait_for(lambda: len([*job.folder.glob("runs/ready-*")]) == 2)
    launched.process.terminate()
    ended = launched.end()
    assert ended.code == ENDED and "saves a checkpoint" not in ended.err, ended
    assert ended.last.endswith("the run is in runs/run, without a checkpoint")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("environ", "options", "saves"),
    [
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, (), True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, ("--no-save-on-term",), False),
        ({}, (), False),
    ],
)
def test_where_it_is_the_default(
    job: Jobs, environ: dict[str, str], options: tuple[str, ...], saves: bool
) -> None:
    launched = start(job, "--name", "run", *options, workers=1, **environ)
    wait_until_held(job, 1)
    launched.process.terminate()
    let_go(job)
    ended = launched.end()
    assert ended.code == ENDED and bool(checkpoints(job)) == saves, ended


def start_without_launcher(job: Jobs, **environ: str) -> list[Job]:
    """Two workers whose launcher isn't ours."""
    (job.folder / "script.py").write_text("")
    path, port = job.write(TEXT.replace("name='run'", "name='run', seed=1")), str(free_port())
    place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    place |= {"MASTER_PORT": port, "OUT": str(job.folder), "PACELINE_SAVE_ON_TERM": "1"}

    return [
        job.start([sys.executable, path], RANK=str(rank), LOCAL_RANK=str(rank), **place, **environ)
        for rank in range(2)
    ]


@pytest.mark.slow
def test_workers_of_another_launcher_save_when_one_is_asked(
    job: Jobs, alone: Callable[..., Outcome]
) -> None:
    started = start_without_launcher(job)
    wait_until_held(job, 2)
    started[1].process.terminate()
    started[1].process.terminate()  # Slurm sends it twice
    let_go(job)
    check_saved(job, *[worker.end() for worker in started])
    check_resumed(job, alone())


@pytest.mark.slow
def test_a_worker_of_another_launcher_ends_by_itself_in_time(job: Jobs) -> None:
    started = start_without_launcher(job, PACELINE_GRACE_SECONDS="0.5")
    wait_until_held(job, 2)
    started[0].process.terminate()
    ended = started[0].end()
    assert ended.code == ENDED, ended
    assert ended.last == "paceline: no checkpoint was written within 0.5 s after SIGTERM"
    let_go(job)
    assert started[1].end().code != 0


OWN = """
    signal.signal(signal.SIGTERM, lambda *_: (out / "heard").touch())
"""


@pytest.mark.slow
def test_a_handler_of_the_script_stays(job: Jobs) -> None:
    text = script(held=HELD, nap=0, prepared=OWN)
    launched = start(job, *SAVES, workers=1, text=text)
    wait_until_held(job, 1)
    os.kill(launched.worker(0).pid, signal.SIGTERM)
    let_go(job)
    ended = launched.end()
    assert ended.code == 0 and (job.folder / "heard").exists(), ended
    assert "SIGTERM saves no checkpoint, as the script handles it by itself" in ended.err


# ---- on threads: Ray asks through a descriptor


def train(run: Run, write_fd: int, *, asked_at: int, turns: int = 1) -> None:
    """Train three epochs of eight batches; the optimizer steps after each `turns` batches.

    In step `asked_at` the first worker is asked to end.
    """
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(32, 4), torch.randn(32, 1))
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    model, optimizer, loader = run.prepare(model, optimizer, DataLoader(data, batch_size=4))

    for _ in run.epochs(3):
        for number, (x, y) in enumerate(loader, 1):
            ((model(x) - y) ** 2).mean().backward()
            if number % turns == 0:
                optimizer.step()
                optimizer.zero_grad()
            if run.steps == asked_at and run.is_first:
                os.write(write_fd, b"x")
                wait_for(lambda: "paceline SIGTERM" not in {t.name for t in threading.enumerate()})


@pytest.mark.parametrize(("asked_at", "turns"), [(1, 1), (4, 4), (2, 4), (7, 1)])
def test_gradients_that_add_up_are_waited_for(tmp_path: Path, asked_at: int, turns: int) -> None:
    """The checkpoint is after a step of the optimizer."""
    read_fd, write_fd = os.pipe()

    def body(run: Run) -> None:
        with pytest.raises(SystemExit, match=str(ENDED)):
            train(run, write_fd, asked_at=asked_at, turns=turns)

    workers(
        2,
        body,
        folder=tmp_path,
        place=lambda rank: {"save_request_fd": read_fd} if rank == 0 else {},
    )
    (saved,) = (tmp_path / "test" / "checkpoints").iterdir()
    step = int(saved.name.removeprefix("step-"))
    assert step % turns == 0 and step > asked_at


def test_before_the_first_step_nothing_is_saved(tmp_path: Path) -> None:
    """All hear of it where they meet before an epoch."""
    read_fd, write_fd = os.pipe()
    os.write(write_fd, b"x")

    def body(run: Run) -> None:
        with pytest.raises(SystemExit, match=str(ENDED)):
            train(run, write_fd, asked_at=-1)

    workers(
        2,
        body,
        folder=tmp_path,
        place=lambda rank: {"save_request_fd": read_fd} if rank == 0 else {},
    )
    assert not (tmp_path / "test" / "checkpoints").exists()
