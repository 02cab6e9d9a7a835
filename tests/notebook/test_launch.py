"""`pl.launch`: what is called and with what, what comes back, who is to blame, and that nothing is
left however it ends.

Functions here need no torch, so that workers start in a moment; training is in
`test_a_training_gives_what_one_worker_gives`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline as pl
from paceline.cluster.discover import discover_place
from tests.harness import calls, short_timings
from tests.harness.jobs import Jobs, jobs, wait_for

SHORT = short_timings.environ(supervisor={"culprit": 0.2, "echo": 0.4, "left": 0.5})


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """`pl.launch` in a folder of its own; nothing may be left there, and no temporary file."""
    monkeypatch.chdir(tmp_path)
    for name, value in SHORT.items():
        monkeypatch.setenv(name, value)
    with jobs(tmp_path) as watched:
        monkeypatch.setenv("TMPDIR", str(watched.temporary))
        yield pl.launch


class TestResults:
    def test_closures_arguments_and_classes_of_here_go_and_come_back(self, launch, capsys):
        class Found:
            def __init__(self, rank: int, seen: Any) -> None:
                self.rank, self.seen = rank, seen

        factor = 3

        def work(numbers: list[int], more: str) -> Found:
            rank = int(os.environ["RANK"])
            print("out", rank, "torch" in sys.modules)
            print("err", rank, file=sys.stderr)
            return Found(rank, [*(factor * number for number in numbers), more, "x" * 3_000_000])

        numbers = [1, 2]
        found = launch(work, numbers, "more")
        assert [(each.rank, each.seen[:3], len(each.seen[3])) for each in found] == [
            (r, [3, 6, "more"], 3_000_000) for r in range(2)
        ]
        assert all(type(each) is Found for each in found)
        out, err = capsys.readouterr()
        assert sorted(out.splitlines()) == ["[0] out 0 False", "[1] out 1 False"]
        assert sorted(err.splitlines()) == ["[0] err 0", "[1] err 1"]

    def test_names_that_are_no_options_go_to_the_function(self, launch):
        def work(number: int, rate: float = 1.0, *, name: str = "") -> tuple[float, str]:
            return int(os.environ["RANK"]) + number * rate, name

        assert launch(partial(work, name="mine"), 3, rate=0.5) == [(1.5, "mine"), (2.5, "mine")]

    def test_options_reach_the_workers(self, launch):
        given = {
            "sync": pl.LocalSGD(every=4),
            "mesh": "data=2",
            "cut": [pl.shard("a")],
            "shares": (2, 1),
            "name": "circle",
            "servers": 3,
        }
        given |= {"straggler": "drop", "threads": 5}
        (one, threads), (other, _) = launch(
            lambda: (discover_place(), os.environ["OMP_NUM_THREADS"]), **given
        )
        wanted = ("LocalSGD(4)", "data=2", "(shard(units='a'),)", "2,1", "circle", 3, "drop")
        assert (
            one.sync,
            one.mesh,
            one.cut,
            one.shares,
            one.run_name,
            one.servers,
            one.straggler,
        ) == wanted
        assert threads == "5" and (one.rank, other.rank, other.size) == (0, 1, 2)
        assert one.worker is one.job_start is None

    def test_a_job_that_may_lose_workers(self, launch):
        places = launch(discover_place, min_workers=1, patience=5.0)
        assert [place.min_workers for place in places] == [1, 1] and all(
            place.worker is not None for place in places
        )

    def test_a_job_starts_again_and_gives_the_last_results(self, launch, capsys):
        def work() -> int:
            start = discover_place().job_start
            assert start is not None
            if not start.events and os.environ["RANK"] == "1":
                raise ValueError("the first time")
            return len(start.events)

        assert launch(work, restarts=1) == [1, 1]
        assert "ValueError: the first time" in capsys.readouterr().err  # as nothing is raised here

    def test_leaving_early(self, launch):
        assert launch(lambda: sys.exit(0) if os.environ["RANK"] == "0" else 7) == [None, 7]

    @pytest.mark.slow
    def test_a_training_gives_what_one_worker_gives(self, launch, capsys):
        """Two workers have different samples; the status line is that of a run in this process."""
        alone = calls.train(12)
        found = launch(calls.train, 12)
        assert [rank for rank, _, _ in found] == [0, 1] and all(
            seen < 12 * 8 for _, seen, _ in found
        )
        assert sum(seen for _, seen, _ in found) == alone[1] == 12 * 8
        for _, _, weights in found:
            for one, other in zip(weights, alone[2], strict=True):
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
        err = capsys.readouterr().err
        assert (
            "paceline: 2 workers on 1 host" in err
            and "step 12/12  loss" in err
            and "[0] step" not in err
        )

    @pytest.mark.slow
    def test_torch_s_own_distributed_gets_our_backend(self, launch):
        assert launch(calls.summed, backend="paceline") == [("paceline", 3.0), ("paceline", 3.0)]


class TestFailures:
    def test_a_worker_that_fails_is_named_with_its_traceback(self, launch, capsys):
        def work() -> None:
            if os.environ["RANK"] == "1":
                raise ValueError("no such luck")
            time.sleep(600)

        with pytest.raises(pl.WorkerFailed) as failed:
            launch(work)
        text = str(failed.value)
        assert failed.value.rank == 1 and text.startswith(
            "rank 1 failed: ValueError: no such luck\n\nTraceback (most recent call last):\n"
        )
        assert f'File "{__file__}", line' in text and 'raise ValueError("no such luck")' in text
        assert "launch/worker.py" not in text
        assert "Traceback" not in capsys.readouterr().err  # it is said once

    def test_a_worker_that_is_killed(self, launch):
        def work() -> None:
            if os.environ["RANK"] == "0":
                print("last words", file=sys.stderr, flush=True)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(600)

        with pytest.raises(
            pl.WorkerFailed,
            match=r"(?s)^rank 0 on .* was killed by SIGKILL \(exit code 137\).*last words",
        ) as failed:
            launch(work)
        assert failed.value.rank == 0

    @pytest.mark.parametrize(
        ("leave", "said"),
        [
            (lambda: sys.exit(3), r"rank \d failed: SystemExit: 3"),
            (
                lambda: os._exit(0),
                r"rank 0 ended with exit code 0 before the function had returned",
            ),
            (
                lambda: (print for _ in ()),
                (
                    r"(?s)rank \d failed: .*UsageError: the function returned a generator that "
                    r"can't be sent back"
                ),
            ),
        ],
    )
    def test_leaving_without_a_result(self, launch, leave, said):
        with pytest.raises(pl.WorkerFailed, match=said):
            launch(leave)

    def test_nothing_is_launched_in_a_worker(self, launch):
        with pytest.raises(
            pl.WorkerFailed,
            match=r"UsageError: pl.launch was called in a worker, rank \d of 2 \(paceline\)",
        ):
            launch(lambda: pl.launch(print))

    def test_the_launcher_can_t_start(self, launch, monkeypatch):
        monkeypatch.setenv("PACELINE_INTERFACE", "no-such-interface")
        with pytest.raises(
            pl.WorkerFailed, match=r"last output of their launcher: paceline: .*no-such-interface"
        ):
            launch(print)


class TestRefusals:
    def refused(self, function: Any = print, *args: Any, **options: Any) -> str:
        with pytest.raises(pl.UsageError) as error:
            pl.launch(function, *args, **options)
        return str(error.value)

    def test_options_have_the_names_of_arguments(self):
        assert self.refused(workers=0) == "workers is 0, and has to be at least 1"
        assert self.refused(min_workers=3).startswith("min_workers is 3, and has to be 1 to 2")
        assert self.refused(straggler="evict").endswith(
            "say how many workers the job needs: min_workers N"
        )
        assert "shares 1,2,3 has 3 numbers for 2 workers" in self.refused(shares=(1, 2, 3))
        assert "a run can't be called 'a/b'" in self.refused(name="a/b")
        assert "Nothing is not a word" in self.refused(sync="Nothing()")
        assert "shart" in self.refused(cut="shart('a')")

    def test_names_that_neither_launch_nor_the_function_has(self):
        def work(number: int, rate: float = 1.0) -> None:
            raise AssertionError

        assert self.refused(work, 1, worker=3).endswith("did you mean workers?")
        assert self.refused(work, 1, rat=3).endswith("did you mean rate?")
        assert self.refused(work, 1, 2.0, rate=3).endswith("multiple values for argument 'rate'")

    def test_what_can_t_be_called_or_sent(self):
        assert (
            self.refused("train.py")
            == "pl.launch got a str; give a function that each worker can call"
        )
        assert "can't be sent to workers" in self.refused(print, iter([].append for _ in ()))
        said = self.refused(pl.launch, lambda: 0, __import__("threading").Lock())
        assert said.startswith("launch can't be sent to workers") and "such as a lock" in said

    def test_without_cloudpickle(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "cloudpickle", None)
        assert self.refused().endswith("pip install 'paceline[notebook]'")

    def test_in_a_worker_of_any_launcher(self, monkeypatch):
        for name, value in {
            "RANK": "1",
            "WORLD_SIZE": "4",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "1",
        }.items():
            monkeypatch.setenv(name, value)
        assert self.refused().startswith(
            "pl.launch was called in a worker, rank 1 of 4 (torchrun), and workers can't start"
        )


# No `if __name__ == "__main__":`, which other ways to start processes need.
CALLER = """
import os, pathlib, signal, sys, threading, time
import paceline as pl

def work():
    if sys.argv[1] == "deaf":
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pathlib.Path(os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)

if sys.argv[1] == "elsewhere":  # a signal to the process is taken by the other thread, and wakes no wait of this one
    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
pl.launch(work)
"""  # noqa: E501


@pytest.mark.real_processes
@pytest.mark.jobs
class TestEnds:
    def begin(self, job: Jobs, *args: str) -> Any:
        (job.folder / "caller.py").write_text(CALLER)
        timed = short_timings.environ(supervisor={"asked_term": 0.3, "asked_kill": 0.6})
        started = job.start([sys.executable, "caller.py", *args], **timed)

        def waits() -> bool:
            assert started.process.poll() is None, started.end()
            return all((job.folder / str(rank)).exists() for rank in range(2))

        wait_for(waits)
        return started

    def test_ctrl_c_ends_all(self, job):
        started = self.begin(job, "usual")
        started.process.send_signal(signal.SIGINT)
        code, _, err = started.end()
        assert code == -signal.SIGINT and err.splitlines()[-1] == "KeyboardInterrupt"

    def test_ctrl_c_ends_workers_that_are_deaf(self, job):
        started = self.begin(job, "deaf")
        started.process.send_signal(signal.SIGINT)
        assert started.end().code == -signal.SIGINT

    def test_an_interrupt_that_another_thread_takes_is_heard(self, job):
        """A kernel has many threads."""
        started = self.begin(job, "elsewhere")
        started.process.send_signal(signal.SIGINT)
        code, _, err = started.end()
        assert (
            code in (-signal.SIGINT, 128 + signal.SIGINT)
            and err.splitlines()[-1] == "KeyboardInterrupt"
        )

    def test_a_killed_caller_takes_its_workers_along(self, job):
        started = self.begin(job, "usual")
        assert len(started.processes()) > 3
        started.process.kill()
        wait_for(lambda: not started.processes())
