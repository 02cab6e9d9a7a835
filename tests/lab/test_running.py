"""Runs in a lab as a user starts them: what they show, their exit codes, and that nothing is
left, however they end.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline import cli
from paceline.errors import DeadlineExceeded, UsageError
from paceline.lab import remains
from tests.harness.jobs import PATIENCE, PRELOADED, Job, Jobs, jobs, wait_for
from tests.harness.jobs import PLAIN as PLAIN_LAUNCHER
from tests.harness.labs import left, traces

EXAMPLE = Path(__file__).parents[2] / "examples" / "train.py"
PLAIN = "import os, sys, time, socket\nrank = int(os.environ['RANK'])\n"
SLEEP = PLAIN + "open(f'up-{rank}', 'w').close()\ntime.sleep(600)\n"


@pytest.fixture
def started(able: None, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Jobs]:
    before = traces()
    with jobs(
        tmp_path, PLAIN_LAUNCHER if request.node.get_closest_marker("real_processes") else PRELOADED
    ) as found:
        yield found
    assert left(before) == set()


def lab(started: Jobs, cluster: str, body: str, *options: str, args: tuple[str, ...] = ()) -> Job:
    """`paceline lab run CLUSTER OPTIONS script.py ARGS`."""
    (started.folder / "script.py").write_text(body)
    return started.start(
        [sys.executable, *started.launcher, "lab", "run", cluster, *options, "script.py", *args]
    )


def sleeps(started: Jobs) -> Job:
    """Four workers on two hosts that sleep by now."""
    job = lab(started, "two-hosts", SLEEP)
    wait_for(lambda: job.process.poll() is not None or len([*started.folder.glob("up-*")]) == 4)
    return job


def waiting(pipe: int) -> int:
    """Bytes that are written and not read yet."""
    return struct.unpack("i", fcntl.ioctl(pipe, termios.FIONREAD, bytes(4)))[0]  # type: ignore[no-any-return]


def pairs(folder: Path) -> str:
    """A cluster of two hosts, with one and two workers."""
    (folder / "c.toml").write_text("[[host]]\nname = 'a'\n[[host]]\nname = 'b'\nworkers = 2\n")
    return "c.toml"


class TestCommand:
    @pytest.mark.real_processes
    def test_shows_host_and_rank(self, started):
        body = PLAIN + (
            "print(socket.gethostname(), os.environ['LOCAL_RANK'], os.environ['GROUP_RANK'], "
            "sys.argv[1:])\nprint('e', file=sys.stderr)"
        )
        ended = lab(started, pairs(started.folder), body, args=("--name", "x")).end()
        words = "['--name', 'x']"
        assert (ended.code, sorted(ended.out.splitlines())) == (
            0,
            [f"[a 0] a 0 0 {words}", f"[b 1] b 0 1 {words}", f"[b 2] b 1 1 {words}"],
        )
        assert sorted(ended.err.splitlines())[:3] == ["[a 0] e", "[b 1] e", "[b 2] e"]
        assert (
            ended.err.splitlines()[0]
            == "paceline: lab c: 2 hosts, 3 workers dealt in blocks, unlimited links"
        )

    @pytest.mark.slow
    def test_what_lies_in_the_folder_is_for_the_script_alone(self, started):
        """Launchers may be root: they take no module from where they are started.

        The script finds what lies beside it.
        """
        for name in ("typer", "click", "rich"):
            (started.folder / f"{name}.py").write_text("open('taken', 'w'); raise SystemExit(9)")
        (started.folder / "sibling.py").write_text("WORDS = 'from beside'")
        (started.folder / "script.py").write_text(
            PLAIN + "import sibling\nprint(sibling.WORDS, rank)"
        )
        command = [
            sys.executable,
            "-P",
            "-m",
            "paceline",
            "lab",
            "run",
            pairs(started.folder),
            "script.py",
        ]
        ended = started.start(command).end()
        assert (ended.code, sorted(ended.out.splitlines())) == (
            0,
            ["[a 0] from beside 0", "[b 1] from beside 1", "[b 2] from beside 2"],
        ), ended.err
        assert not (started.folder / "taken").exists()

    @pytest.mark.slow
    def test_placement(self, started):
        body = PLAIN + "print(os.environ['LOCAL_RANK'])"
        ended = lab(started, pairs(started.folder), body, "--placement", "round-robin").end()
        assert (ended.code, sorted(ended.out.splitlines())) == (
            0,
            ["[a 0] 0", "[b 1] 0", "[b 2] 1"],
        )
        ended = lab(started, "two-hosts", body, "--placement", "round-robin").end()
        assert sorted(ended.out.splitlines()) == [
            "[host0 0] 0",
            "[host0 2] 1",
            "[host1 1] 0",
            "[host1 3] 1",
        ]

    @pytest.mark.slow
    def test_an_error_ends_all_and_is_said_last(self, started):
        body = PLAIN + "if rank == 1: raise ValueError('wrong')\ntime.sleep(600)"
        ended = lab(started, pairs(started.folder), body).end()
        assert ended.code == 1
        assert ended.err.splitlines()[-2:] == [
            "[b 1] ValueError: wrong",
            "paceline: rank 1 on b failed with exit code 1; its last words are above",
        ]
        assert ended.err.count("failed with exit code 1") == 1

    @pytest.mark.slow
    def test_exit_codes_are_the_workers(self, started):
        assert (
            lab(started, pairs(started.folder), PLAIN + "sys.exit(7 if rank == 2 else 0)")
            .end()
            .code
            == 7
        )

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "number", [pytest.param(signal.SIGINT, marks=pytest.mark.real_processes), signal.SIGTERM]
    )
    def test_signals(self, started, number):
        job = sleeps(started)
        job.process.send_signal(number)
        ended = job.end()
        assert ended.code == 128 + number
        assert 'Traceback (most recent call last):\n  File "/' not in ended.err.replace("[host", "")

    @pytest.mark.slow
    def test_the_reader_of_its_output_leaves(self, started):
        job = lab(started, "two-hosts", PLAIN + "while True: print('x' * 100, flush=True)")
        job.process.stdout.readline()
        job.process.stdout.close()
        assert job.process.wait(PATIENCE) == 128 + signal.SIGPIPE
        job.process.stderr.close()

    @pytest.mark.real_processes
    def test_sigkill_leaves_nothing(self, started):
        before = traces()
        job = sleeps(started)
        job.process.kill()
        job.end()
        wait_for(lambda: job.processes() == [])
        assert left(before) == set()

    @pytest.mark.slow
    def test_a_reader_that_stops_reading(self, started):
        job = lab(started, "two-hosts", PLAIN + "while True: print('x' * 1000, flush=True)")
        assert job.process.stdout is not None
        pipe = job.process.stdout.fileno()
        wait_for(lambda: waiting(pipe) > 60_000)  # it is full
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(PATIENCE) == 128 + signal.SIGINT
        assert job.process.stdout.read(1000)
        job.end()

    @pytest.mark.slow
    def test_a_process_that_keeps_the_pipes(self, started):
        body = PLAIN + (
            "import subprocess\n"
            "if rank == 0:\n"
            "    launcher = os.getppid()\n"
            "    out = open(f'/proc/{launcher}/fd/1', 'w')\n"
            "    subprocess.Popen(['sleep', '600'], stdout=out, stderr=out, "
            "start_new_session=True, env={'PATH': os.environ['PATH']})\n"
        )
        ended = lab(started, "two-hosts", body).end()
        assert ended.code == 0

    @pytest.mark.slow
    @pytest.mark.real_processes
    def test_sigkill_of_its_keeper_too(self, started):
        before = traces()
        job = sleeps(started)
        record = next(
            record for record in remains.read_records() if record["process"] == job.process.pid
        )
        os.kill(record["keeper"], signal.SIGKILL)
        job.process.kill()
        job.end()
        assert job.processes() and any(record["identity"] in trace for trace in left(before, 0))
        cleaned = subprocess.run(
            [sys.executable, "-m", "paceline", "lab", "clean"],
            capture_output=True,
            text=True,
            check=True,
        )
        assert (
            f"lab {record['identity']} (two-hosts) was killed: its processes, control groups and "
            "files are removed" in cleaned.stdout
        )
        assert job.processes() == [] and left(before) == set()

    @pytest.mark.slow
    def test_mistakes_are_one_line_and_build_nothing(self, started, monkeypatch, capsys):
        (started.folder / "script.py").write_text("")
        wrong = [
            (["two-host", "script.py"], "there is no ready-made cluster two-host; possible: "),
            (
                ["c.toml", "script.py"],
                "the cluster file c.toml can't be read (No such file or directory)",
            ),
            (["--name", "a/b", "two-hosts", "script.py"], "a run can't be called 'a/b'"),
            (["two-hosts", "none.py"], "the script none.py doesn't exist (looked in "),
            (["two-hosts", "--fault", "kil(rank=1, step=1)", "script.py"], "did you mean kill?"),
            (
                ["two-hosts", "--fault", "kill(rank=4, step=1)", "script.py"],
                "there is no rank 4: two-hosts has ranks 0 to 3",
            ),
            (["two-hosts", "--sync", "AllReduse()", "script.py"], "did you mean AllReduce?"),
            (["two-hosts", "--sync", "AllReduce(via='rign')", "script.py"], "did you mean ring?"),
            (
                ["--placement", "spread", "two-hosts", "script.py"],
                "--placement is spread; possible: block, round-robin",
            ),
        ]
        ended = started.start([sys.executable, "-m", "paceline", "lab", "run", *wrong[0][0]]).end()
        assert (
            ended.code == 2
            and ended.out == ""
            and len(ended.err.splitlines()) == 1
            and wrong[0][1] in ended.err
        ), ended
        monkeypatch.chdir(started.folder)
        for words, said in wrong:
            monkeypatch.setattr(sys, "argv", ["paceline", "lab", "run", *words])
            with pytest.raises(SystemExit) as left_with:
                cli.main()
            out, err = capsys.readouterr()
            assert (
                left_with.value.code == 2
                and out == ""
                and len(err.splitlines()) == 1
                and said in err
            ), err

    @pytest.mark.slow
    def test_the_example_on_two_hosts(self, started):
        options = ("--name", "mine", "--fault", "cut(host=1, seconds=0.2, step=9)")
        ended = lab(
            started,
            "two-hosts",
            EXAMPLE.read_text().replace("rand(4096, 2)", "rand(1024, 2)"),
            *options,
        ).end()
        assert ended.code == 0, ended.err
        assert "paceline: 4 workers on 2 hosts, AllReduce(), global batch 64 = 4 x 16" in ended.err
        assert ended.err.splitlines()[-1] == "paceline: the run's folder is runs/mine"
        summary = json.loads((started.folder / "runs" / "mine" / "summary.json").read_text())
        assert (summary["workers"], summary["hosts"], summary["steps"]) == (4, 2, 48)
        assert summary["bytes_sent"]["between"] > 0
        assert [event["what"] for event in summary["events"]][:1] == [
            "cut(host=1, seconds=0.2, step=9)"
        ]


class TestRun:
    def write(self, folder: Path, body: str) -> str:
        path = folder / "script.py"
        path.write_text(PLAIN + body)
        return str(path)

    def test_output_is_kept_and_not_shown(self, pair, tmp_path, capfd):
        outcome = pair().run(
            self.write(tmp_path, "print(sys.argv[1:], os.environ['WORLD_SIZE'], flush=True)"),
            "a",
            "b",
        )
        assert (outcome.code, outcome.folder, outcome.events) == (0, None, ())
        assert sorted(outcome.output.splitlines()) == [
            "[host0 0] ['a', 'b'] 2",
            "[host1 1] ['a', 'b'] 2",
        ]
        assert capfd.readouterr() == ("", "")

    @pytest.mark.slow
    def test_options_reach_the_launchers(self, pair, tmp_path):
        script = self.write(
            tmp_path,
            (
                "e = os.environ; print(e['PACELINE_SYNC'], e['PACELINE_MESH'], e['PACELINE_NAME'], "
                "e['OMP_NUM_THREADS'], os.getcwd(), e['X'])"
            ),
        )
        asked = {
            "sync": "AllReduce()",
            "mesh": "data",
            "name": "n",
            "threads": 3,
            "environ": {"X": "7"},
            "folder": tmp_path,
        }
        assert (
            f"[host1 1] AllReduce() data n 3 {tmp_path} 7\n"
            in pair().run("script.py", **asked).output
        )
        assert script

    @pytest.mark.slow
    def test_cores_are_dealt_once(self, build, tmp_path, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setattr("paceline.cluster.machine.count_cores", lambda: 8)
        outcome = build(hosts=2, workers=2).run(
            self.write(tmp_path, "print(os.environ['OMP_NUM_THREADS'])")
        )
        assert [line.partition("] ")[2] for line in outcome.output.splitlines()] == ["2"] * 4

    @pytest.mark.slow
    def test_several_runs_in_one_cluster(self, pair, tmp_path):
        cluster = pair()
        script = self.write(tmp_path, "sys.exit(int(sys.argv[1]))")
        assert [cluster.run(script, code).code for code in ("0", "3", "0")] == [0, 3, 0]

    @pytest.mark.slow
    def test_one_host(self, build, tmp_path):
        assert (
            build(hosts=1, workers=2)
            .run(self.write(tmp_path, "print(rank)"))
            .output.count("[host0 ")
            == 2
        )

    @pytest.mark.slow
    def test_a_deadline(self, pair, tmp_path):
        cluster = pair()
        for deadline in (2, 20, 60):  # on a busy machine it may be long until there is output
            with pytest.raises(DeadlineExceeded) as caught:
                cluster.run(
                    self.write(tmp_path, "print('up', flush=True)\ntime.sleep(600)"),
                    deadline=deadline,
                )
            assert cluster.processes(0) == cluster.processes(1) == []
            if " up" in str(caught.value):
                break
        words = (
            rf"has not ended within {deadline} s; still running on host0, host1\. "
            r"Last output:\n(?s:.*) up"
        )
        assert re.search(words, str(caught.value)), caught.value

    @pytest.mark.slow
    def test_mistakes(self, pair, tmp_path):
        cluster, script = pair(), self.write(tmp_path, "")
        with pytest.raises(UsageError, match=r"the script none.py doesn't exist"):
            cluster.run("none.py")
        with pytest.raises(UsageError, match="deadline is 0; give a number of seconds above 0"):
            cluster.run(script, deadline=0)
        with pytest.raises(UsageError, match="--threads is 0"):
            cluster.run(script, threads=0)
        with pytest.raises(UsageError, match="--restarts is -1"):
            cluster.run(script, restarts=-1)

    def test_a_job_that_starts_again(self, pair, tmp_path):
        body = """
            import json
            starts = len(json.loads(os.environ["PACELINE_JOB_START"])["events"])
            print("start", starts, flush=True)
            if starts == 0 and rank == 1:
                os.kill(os.getpid(), 9)
            time.sleep(0.0 if starts else 600.0)
        """
        cluster = pair()
        outcome = cluster.run(self.write(tmp_path, textwrap.dedent(body)), restarts=1)
        assert (
            outcome.code == 0 and outcome.output.count(" start 1\n") == len(cluster.hosts) == 2
        ), outcome.output
        assert (
            outcome.output.count(
                "was killed by SIGKILL (exit code 137); all start again (restart 1 of 1)"
            )
            == 1
        ), outcome.output

    @pytest.mark.slow
    def test_scripts_of_torch_distributed_alone(self, build, tmp_path):
        body = """
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            x = torch.tensor([rank + 1.0])
            dist.all_reduce(x)
            print(x.item())
            dist.destroy_process_group()
        """
        outcome = build(hosts=2, bandwidth="1gbit").run(self.write(tmp_path, textwrap.dedent(body)))
        assert outcome.code == 0 and outcome.output.count("3.0") == 2, outcome.output
