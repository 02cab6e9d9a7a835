"""However a job ends, nothing of it is left: processes (DataLoader's too), ports, shared memory,
temporary files. Real jobs, killed.
"""

from __future__ import annotations

import random
import re
import signal
import socket
import time

import pytest

from tests.harness import short_timings
from tests.harness.jobs import SHARED, Ended, Job, Jobs, wait_for

HOST = socket.gethostname()
ENDLESS = """
from pathlib import Path

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        time.sleep(0.001)
        return torch.full((4,), index % 7.0), torch.ones(1)

if __name__ == "__main__":
    with pl.start({start}) as run:
        model = nn.Linear(4, 1)
        loader = DataLoader(Slow(), batch_size=8, num_workers=2)
        model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), 1e-4), loader)
        for x, y in loader:
            if run.steps == 3:
                Path(f"ready{{rank}}").touch()
            {inside}
            step(run, model, optimizer, x, y)
"""  # noqa: E501


def endless(inside: str = "pass", start: str = "") -> str:
    """A training without an end, whose loader has two processes of its own in each worker."""
    return ENDLESS.format(inside=inside, start=start)


def trains(job: Jobs, launched: Job, workers: int = 2) -> None:
    """Wait until all workers train, and remember the ports on which the job listens."""
    wait_for(
        lambda: (
            launched.process.poll() is not None
            or all((job.folder / f"ready{rank}").exists() for rank in range(workers))
        ),
        60,
    )
    assert launched.process.poll() is None, launched.end()
    job.ports |= launched.ports()


class TestAWorkerGoes:
    @pytest.mark.slow
    @pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.real_processes)])
    def test_killed(self, job, rank):
        launched = job.run(endless())
        trains(job, launched)
        # the launcher, two workers, four readers
        assert len(launched.processes()) >= 7 and job.ports
        launched.worker(rank).kill()
        ended = launched.end()
        assert ended.code == 137 and ended.last.startswith(
            f"paceline: rank {rank} on {HOST} was killed by SIGKILL"
        ), ended.err
        assert not job.left()

    @pytest.mark.slow
    def test_exits_with_0_in_the_middle(self, job):
        ended = job.run(endless("if rank == 1 and run.steps == 5: os._exit(0)")).end()
        assert ended.code == 1 and ended.last.startswith(
            f"paceline: rank 1 on {HOST} left in the middle (exit code 0)"
        ), ended.err

    @pytest.mark.slow
    def test_crashes_in_native_code(self, job):
        ended = job.run(
            endless("if rank == 1 and run.steps == 5: __import__('ctypes').string_at(0)")
        ).end()
        assert ended.code == 139 and ended.last.startswith(
            f"paceline: rank 1 on {HOST} was killed by SIGSEGV"
        ), ended.err

    @pytest.mark.slow
    def test_a_reader_of_its_loader_is_killed(self, job):
        launched = job.run(endless())
        trains(job, launched)
        time.sleep(2.0)  # the launcher looks once a second where readers listen
        next(iter(launched.worker(1).children())).kill()
        ended = launched.end()
        assert ended.code == 1 and f"rank 1 on {HOST}" in ended.last, ended.err
        # torch's own words where its signal comes while the script computes, and ours where it
        # waits for the reader
        assert (
            "DataLoader over Slow was killed" in ended.err or "is killed by signal" in ended.err
        ), ended.err
        # of ten that torch makes when a reader is gone, and forgets if its signal comes just then
        for path in job.temporary.glob("tmp*"):
            assert path.is_file() and path.stat().st_size == 0
            path.unlink()


class TestTheLauncherGoes:
    @pytest.mark.real_processes
    def test_killed(self, job):
        """Soon everything is gone."""
        launched = job.run(endless())
        trains(job, launched)
        time.sleep(1.0)  # its deputy looks twice a second where readers listen
        launched.process.kill()
        launched.end()
        assert not job.left()

    def test_only_the_semaphores_of_the_job_go_with_it(self, job):
        """Not those that others made meanwhile, and that nobody has open as far as can be seen."""
        body = """
import multiprocessing
from pathlib import Path
run = pl.start()
locks = [multiprocessing.get_context("spawn").Lock() for _ in range(3)]  # they have names while they live
Path(f"ready{rank}").touch()
time.sleep(600)
"""  # noqa: E501
        launched = job.run(body)
        trains(job, launched)
        mine = [*SHARED.glob(f"sem.mp-{launched.worker(0).environ()['PACELINE_JOB'][:8]}-*")]
        assert len(mine) == 6
        draw = random.SystemRandom()
        others = [
            SHARED / f"sem.{kind}{''.join(draw.choices('abcdefgh', k=size))}"
            for kind, size in (("", 6), ("mp-", 8))
        ]
        try:
            for path in others:
                path.write_bytes(bytes(32))
            launched.process.kill()
            launched.end()
            wait_for(lambda: not launched.processes() and not any(path.exists() for path in mine))
            assert all(path.exists() for path in others)
        finally:
            for path in others:
                path.unlink(missing_ok=True)

    @pytest.mark.slow
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    def test_asked(self, job, number):
        launched = job.run(endless())
        trains(job, launched)
        launched.process.send_signal(number)
        ended = launched.end()
        assert ended.code == 128 + number, ended.err
        assert not job.left()

    @pytest.mark.slow
    @pytest.mark.parametrize("via", ["auto", "native"])
    def test_ctrl_c_while_a_worker_waits_for_another(self, job, via):
        """Our own waits hear it at once."""
        launched = job.run(
            endless(
                "time.sleep(600 * (rank == 1 and run.steps == 4))",
                f"sync=pl.AllReduce(via={via!r})",
            )
        )
        trains(job, launched)
        time.sleep(1.0)  # rank 0 waits
        launched.process.send_signal(signal.SIGINT)
        ended = launched.end()
        assert ended.code == 130, ended.err

    @pytest.mark.slow
    def test_ctrl_c_in_a_wait_of_native_code(self, job):
        """torch's own waits don't hear it: SIGTERM follows after a while."""
        body = """
from datetime import timedelta
from pathlib import Path
store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
Path(f"ready{rank}").touch()
store.wait(["never"], timedelta(seconds=600))
"""
        launched = job.run(body, **short_timings.environ(supervisor={"asked_term": 0.5}))
        trains(job, launched)
        began = time.monotonic()
        launched.process.send_signal(signal.SIGINT)
        ended = launched.end()
        assert ended.code == 130 and time.monotonic() - began > 0.5, ended.err


class TestAWorkerHangs:
    @pytest.mark.slow
    @pytest.mark.parametrize("via", ["auto", pytest.param("native", marks=pytest.mark.soak)])
    def test_the_one_that_is_missing_is_named(self, job, via):
        launched = job.run(
            endless(start=f"deadline=6, sync=pl.AllReduce(via={via!r})"),
            **short_timings.environ(supervisor={"kill": 0.5}),
        )
        trains(job, launched)
        launched.worker(1).suspend()
        ended = launched.end()
        self.named(ended)

    def named(self, ended: Ended) -> None:
        assert ended.code == 1 and "(DeadlineExceeded)" in ended.last, ended.err
        place = re.search(
            r"step \d+(, \S+)?: .*rank 1 on (\S+), last seen at \S+ of step \d+, \d+\.\d s ago",
            ended.err,
        )
        assert place is not None and place[2] == HOST, ended.err


KINDS = ("worker killed", "launcher killed", "SIGTERM", "SIGINT", "worker stopped")


def end_somehow(job: Jobs, kind: str, seconds: float) -> None:
    """End a job in this way, this long after its start; nothing may be left soon after its
    launcher's end.
    """
    launched = job.run(endless(start="deadline=2"))
    time.sleep(seconds)
    workers = launched.workers() if launched.process.poll() is None else []
    if kind.startswith("worker") and workers:
        workers[-1].send_signal(signal.SIGKILL if kind == "worker killed" else signal.SIGSTOP)
    elif kind == "launcher killed":
        launched.process.kill()
    else:
        launched.process.send_signal(signal.SIGINT if kind == "SIGINT" else signal.SIGTERM)
    ended = launched.end()
    assert ended.code != 0, (kind, seconds, ended.err)
    left = job.left()
    assert not left, (kind, seconds, left, ended.err)


@pytest.mark.real_processes
class TestAtAnyMoment:
    @pytest.mark.slow
    def test_a_few(self, job):
        drawn = random.Random(2)
        for kind in KINDS[:4]:
            end_somehow(job, kind, drawn.uniform(0.1, 3.0))

    @pytest.mark.soak
    @pytest.mark.timeout(3600)
    def test_a_hundred(self, job):
        drawn = random.Random()
        for _ in range(100):
            end_somehow(job, drawn.choice(KINDS), drawn.uniform(0.05, 4.0))
