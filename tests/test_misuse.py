"""Bad input, each with one clear error within seconds, the right exit code, and nothing left
running: real jobs, as a user types them.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.jobs import Ended, Job, Jobs, free_port

HOST = socket.gethostname()
# who has left the loop may come first to where logs are brought together; the others, to where
# gradients are looked at
EARLIER, THERE = "run.log of step 3", r"backward of step 3|optimizer\.step of step 2"
LOOP = """
with pl.start({start}) as run:
    model, optimizer, loader = parts(run)
    for epoch in run.epochs(2):
        for number, (x, y) in enumerate(loader):
            {inside}
            step(run, model, optimizer, x, y)
{after}
"""


def loop(inside: str = "pass", *, after: str = "", start: str = "") -> str:
    return LOOP.format(inside=inside, after=after, start=start)


def blames(ended: Ended, rank: int, text: str) -> None:
    """The job has ended of an error of `rank`, whose traceback ends with `text` and is the last
    thing that was printed.
    """
    assert ended.code == 1, ended.err
    assert ended.last.startswith(f"paceline: rank {rank} on {HOST} failed with exit code 1"), (
        ended.err
    )
    assert ended.last.endswith("; its last words are above")
    assert ended.said == text, ended.err
    traceback = [line for line in ended.err.splitlines() if line.startswith(f"[{rank}] ")]
    assert any(line.endswith("Traceback (most recent call last):") for line in traceback), ended.err


UNGUARDED = """
run = pl.start()
model, optimizer, loader = parts(run, num_workers=1, multiprocessing_context="spawn")
for x, y in loader:
    step(run, model, optimizer, x, y)
"""


@pytest.mark.slow
@pytest.mark.real_processes
def test_a_script_that_its_readers_import_again(job):
    ended = job.start([sys.executable, job.write(UNGUARDED)]).end()
    lines = ended.err.splitlines()
    assert ended.code == 1 and sum("__name__ ==" in line for line in lines) == 1, ended.err
    assert (
        sum(line.startswith("Traceback") for line in lines) == 1 and "spawn_main" not in ended.err
    ), ended.err


class TestCommand:
    """What is wrong is seen before any worker is started, and torch isn't even imported."""

    @pytest.mark.parametrize(
        ("options", "words"),
        [
            pytest.param(
                ["absent.py"],
                "the script absent.py doesn't exist",
                marks=pytest.mark.real_processes,
            ),
            (["--workers", "0", "script.py"], "--workers is 0, and has to be at least 1"),
            (["--hosts", "2", "script.py"], "--hosts 2 needs --join HOST:PORT"),
            (["--hosts", "2", "--join", "127.0.0.1:29400", "script.py"], "secret"),
            (["--secret-file", "absent", "script.py"], "absent"),
            (["--sync", "AlReduce()", "script.py"], "AllReduce"),
            (["--sync", "AllReduce(", "script.py"], "AllReduce("),
        ],
    )
    def test_is_one_message_and_2(self, job, options, words):
        job.write("raise SystemExit('a worker was started')")
        ended = job.start([sys.executable, *job.launcher, "run", *options]).end()
        assert ended.code == 2 and ended.out == ""
        assert (
            ended.err.startswith("paceline: ")
            and ended.err.count("paceline: ") == 1
            and words in ended.err
        ), ended.err
        assert "Traceback" not in ended.err

    def test_a_strategy_is_checked_with_its_arguments(self, job):
        job.write("raise SystemExit('a worker was started')")
        ended = job.start(
            [sys.executable, *job.launcher, "run", "--sync", "AllReduce(via='rign')", "script.py"]
        ).end()
        assert (ended.code, ended.out, len(ended.err.splitlines())) == (
            2,
            "",
            1,
        ) and "did you mean ring?" in ended.err, ended.err

    def test_a_secret_that_others_can_read(self, job, tmp_path):
        (tmp_path / "secret").write_text("0123456789abcdef" * 2)
        os.chmod(tmp_path / "secret", 0o644)
        job.write("")
        ended = job.start(
            [sys.executable, *job.launcher, "run", "--secret-file", "secret", "script.py"]
        ).end()
        assert ended.code == 2 and "chmod 600" in ended.err and len(ended.err.splitlines()) == 1

    @pytest.mark.parametrize(
        "who", ["nobody", pytest.param("another program", marks=pytest.mark.slow)]
    )
    def test_hosts_that_never_meet(self, job, who):
        job.write("")
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            port = other.getsockname()[1]
            if who == "another program":
                other.listen()
            options = ["--hosts", "2", "--join", f"127.0.0.1:{port}", "script.py"]
            started = job.start(
                [sys.executable, *job.launcher, "run", *options],
                PACELINE_SECRET="0123456789abcdef" * 2,
                PACELINE_DEADLINE="1",
            )
            ended = started.end()
        assert ended.code == 2 and f"127.0.0.1:{port}" in ended.last, ended.err
        assert (
            all(line.startswith("paceline: ") for line in ended.err.splitlines())
            and len(ended.err.splitlines()) <= 2
        )

    def test_hosts_with_different_secrets(self, job):
        job.write("")
        options = ["--hosts", "2", "--join", f"127.0.0.1:{free_port()}", "script.py"]
        started = [
            job.start(
                [sys.executable, *job.launcher, "run", *options],
                PACELINE_SECRET=letter * 32,
                PACELINE_DEADLINE="8",
            )
            for letter in "ab"
        ]
        for ended in [one.end() for one in started]:
            assert ended.code == 2 and "secret" in ended.err, ended.err


class TestOneRankRaises:
    @pytest.mark.slow
    def test_in_a_step(self, job):
        blames(
            job.run(loop("if rank == 1 and number == 2: raise ValueError('boom')")).end(),
            1,
            "ValueError: boom",
        )

    @pytest.mark.slow
    def test_before_the_start(self, job):
        blames(
            job.run("if rank == 0: raise ValueError('boom')" + loop()).end(), 0, "ValueError: boom"
        )

    @pytest.mark.slow
    def test_before_a_step(self, job):
        body = loop().replace(
            "    for epoch", "    if rank == 1: raise ValueError('boom')\n    for epoch"
        )
        blames(job.run(body, 3).end(), 1, "ValueError: boom")

    @pytest.mark.slow
    def test_after_the_last_step(self, job):
        blames(
            job.run(loop(after="    if rank == 1: raise ValueError('boom')")).end(),
            1,
            "ValueError: boom",
        )

    @pytest.mark.slow
    def test_without_a_with_block(self, job):
        body = (
            "run = pl.start()\nmodel, optimizer, loader = parts(run)\nfor x, y in loader:\n    if "
            "rank == 1: raise ValueError('boom')\n"
        )
        blames(job.run(body + "    step(run, model, optimizer, x, y)").end(), 1, "ValueError: boom")


class TestOneRankGoesItsOwnWay:
    def named(self, ended: Ended, mine: str, theirs: str) -> None:
        """The last words are a Mismatch that names both sides: rank 1 at `mine` and rank 0 at
        `theirs`, with the lines of the script.
        """
        assert ended.code == 1 and "(Mismatch)" in ended.last, ended.err
        there, here = (
            rf"rank 0 on {HOST} at ({theirs})( of step \d+)? \(script.py:\d+\)",
            rf"rank 1 on {HOST} at ({mine})",
        )
        assert re.search(there, ended.said) and re.search(here, ended.said), ended.err

    @pytest.mark.slow
    def test_returns_early(self, job):
        body = loop("if rank == 1 and number == 2: sys.exit()")
        self.named(job.run(body).end(), f"the end of the log|{EARLIER}", THERE)

    @pytest.mark.slow
    def test_returns_early_without_a_with_block(self, job):
        body = (
            "run = pl.start()\nmodel, optimizer, loader = parts(run)\nfor number, (x, y) in "
            "enumerate(loader):\n"
        )
        body += (
            "    if rank == 1 and number == 2: sys.exit()\n    step(run, model, optimizer, x, y)"
        )
        self.named(job.run(body).end(), f"the end of the log|{EARLIER}", THERE)

    @pytest.mark.slow
    def test_returns_early_with_an_exit_code(self, job):
        ended = job.run(loop("if rank == 1 and number == 2: sys.exit(7)")).end()
        assert ended.code == 7 and ended.last.startswith(
            f"paceline: rank 1 on {HOST} failed with exit code 7 (SystemExit)"
        ), ended.err

    @pytest.mark.slow
    def test_all_may_return_early(self, job):
        ended = job.run(loop("if number == 2: sys.exit()")).end()
        assert ended.code == 0 and "Error" not in ended.err, ended.err
        assert len(list(job.folder.glob("runs/*/summary.json"))) == 1

    @pytest.mark.slow
    def test_breaks_out_alone(self, job):
        self.named(
            job.run(loop("if rank == 1 and number == 2: break")).end(),
            f"run.epochs|{EARLIER}",
            THERE,
        )

    @pytest.mark.slow
    def test_takes_the_mean_alone(self, job):
        self.named(
            job.run(loop("if rank == 1 and number == 2: run.mean(1.0)")).end(),
            "run.mean of step 2",
            "backward of step 2",
        )

    @pytest.mark.slow
    def test_leaves_the_block_early(self, job):
        body = loop().replace("    for epoch", "    for epoch in range(1 if rank == 1 else 2):  #")
        self.named(job.run(body).end(), "the end of the log of step 8", "epoch of step 8")

    @pytest.mark.slow
    def test_is_started_otherwise(self, job):
        ended = job.run(loop(start="seed=rank")).end()
        assert (
            ended.code == 1
            and "(UsageError)" in ended.last
            and "rank 0: seed=0" in ended.said
            and "rank 1: seed=1" in ended.said
        )

    @pytest.mark.slow
    def test_has_another_model(self, job):
        ended = job.run(loop().replace("parts(run)", "parts(run, nn.Linear(4, 1 + rank))")).end()
        assert ended.code == 1 and "(UsageError)" in ended.last, ended.err
        for words in (
            "workers prepare different",
            "rank 0 has weight [1, 4]",
            "rank 1 has weight [2, 4]",
            "build the same model",
        ):
            assert words in ended.said, ended.err


class TestData:
    @pytest.mark.slow
    def test_a_loader_shorter_than_a_batch(self, job):
        body = loop().replace("parts(run)", "parts(run, samples=7, batch=8, drop_last=True)")
        ended = job.run(body, 1).end()
        assert ended.code == 1 and "(DataError)" in ended.last and "DataError: " in ended.said, (
            ended.err
        )
        assert "drop_last" in ended.said and "7" in ended.said, ended.err

    @pytest.mark.slow
    def test_a_data_set_without_length(self, job):
        body = """
class Endless:
    def __getitem__(self, index):
        return torch.zeros(4), torch.zeros(1)

with pl.start() as run:
    loader = run.prepare(DataLoader(Endless(), batch_size=8))
    for x, y in loader:
        pass
"""
        ended = job.run(body, 1).end()
        assert (
            ended.code == 1
            and "(DataError)" in ended.last
            and "__len__" in ended.said
            and "Endless" in ended.said
        ), ended.err


class TestNumbers:
    BAD = "x = x * (float('nan') if run.steps == 3 and rank == 1 else 1.0)"

    @pytest.mark.slow
    def test_a_loss_that_is_none_is_announced(self, job):
        ended = job.run(loop(self.BAD)).end()
        assert ended.code == 0, ended.err
        warnings = [line for line in ended.err.splitlines() if "loss was nan" in line]
        assert (
            len(warnings) == 1
            and "first on rank 1, at step 4" in warnings[0]
            and "on_nan='stop'" in warnings[0]
        ), ended.err

    @pytest.mark.slow
    def test_a_loss_that_is_none_can_stop(self, job):
        body = loop(self.BAD, start="on_nan='stop'", after="print('steps', run.steps)")
        ended = job.run(body.replace("epochs(2)", "epochs(10**9)")).end()
        assert ended.code == 0, ended.err
        assert "stopping: loss was nan first on rank 1, at step 4" in ended.err
        steps = {line.split()[-1] for line in ended.out.splitlines() if "steps" in line}
        assert len(steps) == 1


class TestStart:
    @pytest.mark.parametrize(
        ("given", "words"),
        [
            ("sync='AlReduce()'", ("AlReduce", "AllReduce")),
            ("sync='AllReduce(vai=1)'", ("vai", "via")),
            ("sync=pl.AllReduce(via='rang')", ("'rang'", "ring")),
            ("sync=3", ("sync=3", "AllReduce()")),
            ("on_nan='halt'", ("'halt'", "stop, warn")),
            ("trace='some'", ("'some'", "all, last, off")),
            ("deadline=0", ("deadline=0", "above 0")),
            ("replicate=0", ("auto, off", "a number of steps")),
            ("device='tpu'", ("tpu", "cpu")),
            ("name='a/b'", ("a/b", "without slashes")),
        ],
    )
    def test_is_one_line_of_a_user_error(self, given, words, tmp_path, monkeypatch):
        """Alone, in this process: what is refused, and in which words."""
        import paceline as pl

        monkeypatch.chdir(tmp_path)
        for name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(pl.UsageError) as caught:
            eval(f"pl.start({given})", {"pl": pl})
        assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), (
            caught.value
        )

    @pytest.mark.slow
    def test_an_argument_that_there_is_not(self, job):
        ended = job.run(loop(), 2, "--sync", "AllReduce(vai='ring')").end()
        assert ended.code == 2 and "did you mean via?" in ended.last and "ring" in ended.last, (
            ended.err
        )


class TestMeeting:
    """Under a launcher that tells no more than torchrun's variables."""

    def worker(
        self,
        job: Jobs,
        rank: int,
        port: int,
        body: str = "with pl.start(deadline=2) as run: run.barrier()",
    ) -> Job:
        script = job.write(body)
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "LOCAL_WORLD_SIZE": "2",
        }
        return job.start([sys.executable, script], **variables, LOCAL_RANK=str(rank))

    def test_a_port_in_use(self, job):
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            ended = self.worker(job, 0, port).end()
        assert (
            ended.code == 1
            and f"port {port} of 127.0.0.1 is in use" in ended.last
            and "MASTER_PORT" in ended.last
        ), ended.err

    @pytest.mark.slow
    def test_nobody_there(self, job):
        port = free_port()
        ended = self.worker(job, 1, port).end()
        assert ended.code == 1 and f"found no store at 127.0.0.1:{port} within 2 s" in ended.last, (
            ended.err
        )

    @pytest.mark.slow
    def test_others_that_never_come(self, job):
        ended = self.worker(job, 0, free_port()).end()
        assert ended.code == 1 and "rank 1 of 2 never came" in ended.last, ended.err

    @pytest.mark.slow
    def test_a_worker_without_the_secret(self, job):
        port = free_port()
        script = job.write("with pl.start(deadline=10) as run: run.barrier()")
        started = []
        for rank, secret in enumerate([{"PACELINE_SECRET": "0123456789abcdef" * 2}, {}]):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
            }
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            started.append(job.start([sys.executable, script], **place, **meeting, **secret))
        for ended in [one.end() for one in started]:
            assert (
                ended.code == 1 and "SecretError" in ended.last and "PACELINE_SECRET" in ended.last
            ), ended.err


SAVE = """
with pl.start(folder="{folder}", name="full") as run:
    model, optimizer, loader = parts(run, nn.Linear(4, 1))
    big = run.prepare(nn.Linear(256, 1024))  # 1 MB
    for number, (x, y) in enumerate(loader):
        step(run, model, optimizer, x, y)
        run.save(keep=10)
"""

RESUME = """
with pl.start() as run:
    parts(run)
    run.prepare(nn.Linear(256, 1024))
    run.resume("{folder}")
    print(run.steps)
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=3m", "none", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip(f"no small file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


class TestDisk:
    @pytest.mark.slow
    def test_full_while_saving(self, job, tiny):
        ended = job.run(SAVE.format(folder=tiny)).end()
        assert (
            ended.code == 1
            and "(CheckpointError)" in ended.last
            and f"rank 0 on {HOST}" in ended.last
        ), ended.err
        assert "space" in ended.said and str(tiny) in ended.said, ended.err
        kept = sorted(path.name for path in (tiny / "full" / "checkpoints").iterdir())
        assert len(kept) == 2 and not any(name.startswith(".") or "tmp" in name for name in kept), (
            kept
        )
        ended = job.run(RESUME.format(folder=tiny / "full"), 1).end()
        assert ended.code == 0 and ended.out == "[0] 2\n", ended.err
