"""`paceline run` on one host: output, exit codes, who is to blame, and that nothing is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from paceline.cluster.launcher.output import OutputStream, Screen
from tests.harness import short_timings
from tests.harness.jobs import PATIENCE, shared_memory, unused, wait_for
from tests.harness.launchers import JOINED, ROOT, alive_in, wait_gone


class TestOutput:
    def test_lines_have_prefixes_and_go_where_they_went(self, script, launch):
        code, out, err = launch(
            script("print('out', rank); print('err', rank, file=sys.stderr)"), 2
        ).end()
        assert code == 0
        assert sorted(out.splitlines()) == ["[0] out 0", "[1] out 1"]
        first, *lines, last = err.splitlines()
        assert sorted(lines) == ["[0] err 0", "[1] err 1"]
        assert (first, last) == (
            "paceline: starting 2 workers of script.py",
            "paceline: 2 workers ended well",
        )

    def test_quietly_nothing_is_said_of_what_goes_well(self, script, launch):
        body = script("import os; print(os.environ['PACELINE_STATUS_EVERY'])")
        assert launch(body, 1, progress=float("inf")).end() == (0, "[0] inf\n", "")

    def test_lines_never_mix(self, script, launch):
        body = (
            "for i in range(300):\n    for part in ('x' * 50, 'y' * 50, "
            "f'{i}\\n'):\n        os.write(1, (f'{rank}' + part).encode())"
        )
        code, out, _ = launch(script(body), 3).end()
        assert code == 0
        want = [f"[{r}] {r}{'x' * 50}{r}{'y' * 50}{r}{i}" for i in range(300) for r in range(3)]
        assert sorted(out.splitlines()) == sorted(want)

    def test_much_output_arrives_whole(self, script, launch):
        code, out, _ = launch(script("sys.stdout.write(('z' * 99 + '\\n') * 20000)"), 2).end()
        # a line whose second half comes late, on a busy machine, is shown in two parts
        assert code == 0 and out.count("z") == 2 * 99 * 20000 and len(out.splitlines()) >= 40000
        assert {line[:4] for line in out.splitlines()} == {"[0] ", "[1] "}

    @pytest.mark.jobs
    def test_bytes_that_are_no_text(self, script, tmp_path):
        path = script("os.write(1, b'\\xff\\xfe\\n')")
        command = (
            f"from paceline.cluster.launcher.launch import *; run_job(LaunchRequest({path!r}))"
        )
        done = subprocess.run(
            [sys.executable, "-c", command], capture_output=True, cwd=ROOT, check=True
        )
        assert done.stdout == b"[0] \xff\xfe\n"

    def test_a_reader_that_goes_away_ends_the_job(self, script, launch):
        launched = launch(script("while True: print('x' * 100)"), 2)
        launched.process.stdout.readline()
        launched.process.stdout.close()
        assert launched.process.wait(PATIENCE) == 128 + signal.SIGPIPE
        launched.process.stderr.close()

    def test_arguments_and_variables(self, script, launch):
        names = [
            "WORLD_SIZE",
            "RANK",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "MASTER_ADDR",
            "OMP_NUM_THREADS",
            "PACELINE_SYNC",
        ]
        body = (
            f"print(sys.argv[1:], *[os.environ[name] for name in {names}], "
            "int(os.environ['MASTER_PORT']) > 0)"
        )
        code, out, _ = launch(
            script(body), 2, args=["a", "--b=c"], sync="AllReduce()", threads=3
        ).end()
        assert code == 0
        assert sorted(out.splitlines()) == [
            f"[{r}] ['a', '--b=c'] 2 {r} {r} 2 0 127.0.0.1 3 AllReduce() True" for r in range(2)
        ]

    @pytest.mark.slow
    def test_more_workers_than_cores(self, script, launch):
        job = launch(
            script("print(os.environ['OMP_NUM_THREADS'])"), 4 * len(os.sched_getaffinity(0))
        )
        code, out, _ = job.end()
        assert code == 0 and {line.split()[-1] for line in out.splitlines()} == {"1"}

    def test_thread_counts(self, script, launch):
        path = script("print(os.environ['OMP_NUM_THREADS'])")
        cores = len(os.sched_getaffinity(0))
        assert launch(path, 1).end()[1] == f"[0] {cores}\n"
        assert launch(path, 1, OMP_NUM_THREADS="7").end()[1] == "[0] 7\n"

    def test_the_secret_is_inherited_and_not_in_the_environment(self, script, launch):
        body = """
            from paceline.cluster.discover import discover_place
            told = any('0123456789abcdef' in value for value in os.environ.values())
            secret = discover_place().secret
            print(secret.decode(), discover_place().secret == secret, told)
        """
        assert (
            launch(script(body), 1, PACELINE_SECRET="0123456789abcdef").end()[1]
            == "[0] 0123456789abcdef True False\n"
        )
        secrets = launch(script(body), 2).end()[1].split()
        assert len(secrets[1]) == 64 and secrets[1] == secrets[5]

    @pytest.mark.slow
    def test_a_script_of_torch_distributed_alone(self, script, launch):
        body = """
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            x = torch.tensor([rank + 1.0])
            dist.all_reduce(x)
            print(x.item())
            dist.destroy_process_group()
        """
        code, out, err = launch(script(body), 2).end()
        assert code == 0, err
        assert sorted(out.splitlines()) == ["[0] 3.0", "[1] 3.0"]


class Sink:
    """A screen on a pipe, and what came out of it."""

    def __init__(self) -> None:
        self.reader, writer = os.pipe()
        self.screen = Screen(writer)

    def text(self) -> bytes:
        while self.screen.has_pending:
            self.screen.write_pending()
        return os.read(self.reader, 1 << 16)


class TestScreen:
    def feed(self, *parts: tuple[int, bytes]) -> bytes:
        sink = Sink()
        streams: dict[int, tuple[int, OutputStream]] = {}
        for rank, data in parts:
            if rank not in streams:
                reader, writer = os.pipe()
                streams[rank] = (writer, OutputStream(rank, reader, sink.screen))
            writer, stream = streams[rank]
            os.write(writer, data)
            stream.read_output()
        for writer, stream in streams.values():
            os.close(writer)
            stream.close()
        return sink.text()

    def test_lines(self):
        assert self.feed((0, b"a\n"), (1, b"b\n\nc\n")) == b"[0] a\n[1] b\n[1] \n[1] c\n"

    def test_a_line_in_parts_is_held_together(self):
        assert self.feed((0, b"a"), (1, b"b\n"), (0, b"c\n")) == b"[1] b\n[0] ac\n"

    def test_the_last_line_needs_no_end(self):
        assert self.feed((0, b"a"), (1, b"b")) == b"[0] a\n[1] b"

    def test_a_long_line_comes_in_many_parts(self):
        assert (
            self.feed(*[(0, b"a" * 4096)] * 12, (0, b"\nb\n"))
            == b"[0] " + b"a" * 49152 + b"\n[0] b\n"
        )

    def test_carriage_returns(self):
        assert (
            self.feed((0, b"\r1%"), (0, b"\r2%"), (0, b"\rdone\n"))
            == b"\r[0] 1%\r[0] 2%\r[0] done\n"
        )
        assert self.feed((0, b"1%\r2%\r\nx\n")) == b"[0] 1%\r[0] 2%\r\n[0] x\n"
        assert self.feed((0, b"1%\r"), (1, b"b\n"), (0, b"2%\n")) == b"[0] 1%\r\n[1] b\n[0] 2%\n"

    def test_a_prompt_is_shown_after_a_while(self):
        sink = Sink()
        reader, writer = os.pipe()
        stream = OutputStream(0, reader, sink.screen)
        os.write(writer, b"ready? ")
        stream.read_output()
        stream.show_if_idle(stream._read_at)
        assert not sink.screen.has_pending
        stream.show_if_idle(time.monotonic() + 1)
        assert sink.text() == b"[0] ready? "
        os.write(writer, b"yes\n")
        stream.read_output()
        assert sink.text() == b"yes\n"


def test_breakpoints_say_that_there_is_no_terminal(script, launch):
    code, _, err = launch(script("breakpoint()"), 2).end()
    assert code == 1 and "breakpoint() needs a terminal" in err and "BdbQuit" not in err
    assert launch(script("breakpoint()"), 2, PYTHONBREAKPOINT="0").end()[0] == 0


SHOWN = short_timings.environ(supervisor=short_timings.CAUSE)


class TestFailure:
    def test_the_culprit_speaks_last(self, script, launch):
        """Rank 1 raises, and rank 0 notices: whatever rank 0 says, and rank 1 at its exit, rank
        1's traceback comes last.
        """
        body = (
            JOINED
            + """
if rank == 1:
    import atexit
    atexit.register(print, "goodbye", file=sys.stderr)
    raise ValueError("boom")
time.sleep(0.05)
raise WorkerLost("rank 1 is gone")
"""
        )
        for _ in range(2):
            code, _, err = launch(script(body), 2, **SHOWN).end()
            lines = err.splitlines()
            assert code == 1
            assert lines[-1] == (
                f"paceline: rank 1 on {socket.gethostname()} failed with exit code 1 "
                "(ValueError); its last words are above"
            )
            assert (
                lines[-2] == "[1] ValueError: boom"
                and "[1] Traceback (most recent call last):" in lines
            )

    def test_an_echo_that_comes_first_is_still_an_echo(self, script, launch):
        body = (
            JOINED
            + """
if rank == 0:
    raise Mismatch("workers have come apart")
time.sleep(0.3)
raise ValueError("boom")
"""
        )
        code, _, err = launch(script(body), 3, **SHOWN).end()
        assert code == 1
        assert err.splitlines()[-1].startswith("paceline: rank 1 on ") or err.splitlines()[
            -1
        ].startswith("paceline: rank 2 on ")
        assert err.splitlines()[-2].endswith("ValueError: boom")

    @pytest.mark.slow
    def test_echoes_alone_are_named(self, script, launch):
        code, _, err = launch(
            script(
                JOINED
                + "if rank == 1: raise DeadlineExceeded('rank 0 never came')\ntime.sleep(600)"
            ),
            2,
        ).end()
        assert (
            code == 1
            and "rank 1 on" in err.splitlines()[-1]
            and "DeadlineExceeded" in err.splitlines()[-1]
        )

    def test_without_paceline_the_first_to_exit_is_named(self, script, launch):
        code, _, err = launch(script("if rank == 1: sys.exit(7)\ntime.sleep(600)"), 3).end()
        assert code == 7
        assert (
            err.splitlines()[-1]
            == f"paceline: rank 1 on {socket.gethostname()} failed with exit code 7"
        )

    def test_killed_by_a_signal(self, script, launch):
        code, _, err = launch(
            script("if rank == 0: os.kill(os.getpid(), 9)\ntime.sleep(600)"), 2
        ).end()
        assert (
            code == 137
            and "rank 0" in err.splitlines()[-1]
            and "was killed by SIGKILL" in err.splitlines()[-1]
        )

    def test_a_killed_worker_and_the_echo_of_another(self, script, launch, tmp_path):
        """Rank 0 notices the death as fast as a broken connection would tell it, maybe before
        the launcher does.
        """
        body = (
            JOINED
            + """
import pathlib, select
if rank == 1:
    pathlib.Path("new").write_text(str(os.getpid()))
    os.rename("new", "pid")
    time.sleep(0.2)
    os.kill(os.getpid(), 9)
while not os.path.exists("pid"):
    time.sleep(0.01)
poll = select.poll()
poll.register(os.pidfd_open(int(pathlib.Path("pid").read_text())), select.POLLIN)
poll.poll()
raise RuntimeError("connection reset by peer")
"""
        )
        for _ in range(2):
            code, _, err = launch(script(body), 2).end()
            assert code == 137 and err.splitlines()[-1].startswith("paceline: rank 1 on"), err
            (tmp_path / "pid").unlink()

    @pytest.mark.slow
    def test_workers_that_do_not_listen_are_killed(self, script, launch):
        body = """
            import signal
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(0.5)
            if rank == 0: sys.exit(3)
            while True: time.sleep(1)
        """
        assert (
            launch(
                script(body),
                2,
                **short_timings.environ(supervisor={"kill": 0.3, "last_words": 0.2}),
            ).end()[0]
            == 3
        )

    def test_the_only_worker(self, script, launch):
        code, _, err = launch(script("1 / 0"), 1).end()
        assert code == 1 and err.count("ZeroDivisionError: division by zero") == 1

    @pytest.mark.slow
    def test_leaving_without_a_word_while_others_train(self, script, launch):
        short = short_timings.environ(supervisor={"left": 0.3})
        code, _, err = launch(
            script(JOINED + "if rank == 1: os._exit(0)\ntime.sleep(600)"), 2, **short
        ).end()
        assert (
            code == 1
            and "rank 1 on" in err.splitlines()[-1]
            and "left in the middle" in err.splitlines()[-1]
        )

    def test_leaving_without_a_word_is_the_cause_of_echoes(self, script, launch):
        body = (
            JOINED
            + "if rank == 1: os._exit(0)\ntime.sleep(0.2)\nraise WorkerLost('rank 1 is gone')"
        )
        code, _, err = launch(script(body), 2, **SHOWN).end()
        assert (
            code == 1
            and "rank 1 on" in err.splitlines()[-1]
            and "left in the middle" in err.splitlines()[-1]
        )

    def test_leaving_without_a_word_is_the_cause_of_echoes_seen_at_the_same_time(
        self, script, launch, tmp_path
    ):
        """A launcher that had no processor for a moment finds both workers ended."""
        waits = "open(f'here{rank}', 'w')\nwhile not os.path.exists('go'): time.sleep(0.01)\n"
        launched = launch(
            script(
                JOINED + waits + "if rank == 1: os._exit(0)\nraise WorkerLost('rank 1 is gone')"
            ),
            2,
        )
        wait_for(lambda: all((tmp_path / f"here{rank}").exists() for rank in range(2)))
        children = psutil.Process(launched.process.pid).children()
        workers = [child for child in children if "script.py" in " ".join(child.cmdline())]
        launched.process.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        wait_for(lambda: all(worker.status() == psutil.STATUS_ZOMBIE for worker in workers))
        launched.process.send_signal(signal.SIGCONT)
        code, _, err = launched.end()
        assert len(workers) == 2 and code == 1
        assert (
            "rank 1 on" in err.splitlines()[-1] and "left in the middle" in err.splitlines()[-1]
        ), err

    @pytest.mark.slow
    def test_leaving_in_good_order_at_different_times(self, script, launch):
        joined = textwrap.indent(JOINED + "events.report_closed(place)\n", "    ")
        path = script(f"if sys.argv[1:]:\n{joined}time.sleep(0.6 * rank)")
        short = short_timings.environ(supervisor={"left": 0.3})
        assert [
            one.end()[0]
            for one in (launch(path, 2, **short), launch(path, 2, args=["joined"], **short))
        ] == [0, 0]

    def test_leaving_together_without_a_word(self, script, launch):
        assert launch(script(JOINED + "os._exit(0)"), 2).end()[0] == 0


CHILDREN = """
import multiprocessing as mp, pathlib
def sit():
    time.sleep(600)
if __name__ == "__main__":
    for _ in range(2):
        mp.get_context("fork").Process(target=sit, daemon=True).start()
    pathlib.Path(f"ready{rank}").touch()
    time.sleep(600)
"""
LOADER = """
import pathlib, torch
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 10**6
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.zeros(100) + i
if __name__ == "__main__":
    for i, batch in enumerate(DataLoader(Data(), batch_size=4, num_workers=2)):
        if i == 3: pathlib.Path(f"ready{rank}").touch()
"""


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A folder for temporary files whose name is short enough for sockets."""
    with tempfile.TemporaryDirectory(prefix="pl-") as folder:
        yield Path(folder)


ASKED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
WORKERS = {CHILDREN: 2, LOADER: 1}  # that import torch take a second of a processor each
BODIES = [
    pytest.param(CHILDREN, id="children"),
    pytest.param(LOADER, id="loader", marks=pytest.mark.slow),
]


class TestNothingIsLeft:
    def ready(self, tmp_path: Path, body: str) -> None:
        wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(WORKERS[body])))

    @pytest.mark.parametrize("body", BODIES)
    def test_launcher_killed(self, body, script, launch, tmp_path, temporary):
        before = shared_memory()
        launched = launch(script(body), WORKERS[body], TMPDIR=str(temporary))
        self.ready(tmp_path, body)
        assert list(temporary.iterdir()) or body is CHILDREN
        assert len(alive_in(tmp_path)) >= 1 + 3 * WORKERS[body]
        launched.process.kill()
        launched.process.wait()
        assert not wait_gone(tmp_path)
        wait_for(lambda: not list(temporary.iterdir()))
        wait_for(lambda: not unused(shared_memory() - before))

    @pytest.mark.parametrize("body", BODIES)
    def test_worker_killed(self, body, script, launch, tmp_path, temporary):
        before = shared_memory()
        launched = launch(script(body), WORKERS[body], TMPDIR=str(temporary))
        self.ready(tmp_path, body)
        worker = next(
            child
            for child in psutil.Process(launched.process.pid).children()
            if "script.py" in " ".join(child.cmdline())
        )
        worker.kill()
        assert launched.end()[0] == 137
        assert not wait_gone(tmp_path)
        assert not list(temporary.iterdir())
        wait_for(lambda: not unused(shared_memory() - before))

    @pytest.mark.parametrize(
        ("body", "number"),
        [
            *(pytest.param(CHILDREN, number, id=f"children-{number}") for number in ASKED),
            pytest.param(LOADER, signal.SIGTERM, id="loader-15", marks=pytest.mark.slow),
            *(
                pytest.param(LOADER, number, id=f"loader-{number}", marks=pytest.mark.soak)
                for number in ASKED[1:]
            ),
        ],
    )
    def test_launcher_asked(self, body, number, script, launch, tmp_path, temporary):  # noqa: PLR0917
        before = shared_memory()
        launched = launch(script(body), WORKERS[body], TMPDIR=str(temporary))
        self.ready(tmp_path, body)
        launched.process.send_signal(number)
        assert launched.end()[0] == 128 + number
        assert not wait_gone(tmp_path)
        assert not list(temporary.iterdir())
        wait_for(lambda: not unused(shared_memory() - before))


class TestAsked:
    @pytest.mark.slow
    def test_workers_that_clean_up_have_the_time(self, script, launch, tmp_path):
        body = """
            import pathlib
            try:
                pathlib.Path(f"ready{rank}").touch()
                time.sleep(600)
            except KeyboardInterrupt:
                time.sleep(1)
                print("saved", flush=True)
        """
        launched = launch(
            script(body), 2, **short_timings.environ(supervisor=short_timings.UNHURRIED)
        )
        wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
        launched.process.send_signal(signal.SIGINT)
        code, out, _ = launched.end()
        assert code == 130 and sorted(out.splitlines()) == ["[0] saved", "[1] saved"]

    @pytest.mark.slow
    def test_stubborn_workers_are_killed_after_a_while(self, script, launch, tmp_path):
        body = """
            import signal, pathlib
            for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
            pathlib.Path(f"ready{rank}").touch()
            while True: time.sleep(1)
        """
        launched = launch(
            script(body),
            1,
            **short_timings.environ(supervisor={"asked_term": 0.5, "asked_kill": 1.0}),
        )
        wait_for((tmp_path / "ready0").exists)
        start = time.monotonic()
        launched.process.send_signal(signal.SIGTERM)
        assert launched.end()[0] == 143
        assert time.monotonic() - start > 1.0

    def test_twice_is_at_once(self, script, launch, tmp_path):
        body = """
            import signal, pathlib
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            pathlib.Path(f"ready{rank}").touch()
            while True: time.sleep(1)
        """
        launched = launch(script(body), 1)
        wait_for((tmp_path / "ready0").exists)
        launched.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        launched.process.send_signal(signal.SIGINT)
        assert launched.end()[0] == 130

    def test_a_child_that_left_its_group(self, script, launch, tmp_path):
        body = """
            import subprocess
            subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True, close_fds=False)
            print("started", flush=True)
        """  # noqa: E501
        assert launch(script(body), 1).end()[0] == 0
        assert not wait_gone(tmp_path)


class TestUsage:
    def test_one_line_and_exit_code_2(self, launch):
        code, out, err = launch("absent.py").end()
        assert (
            (code, out) == (2, "")
            and len(err.splitlines()) == 1
            and err.startswith("paceline: the script absent.py doesn't exist")
        )

    def test_several_hosts_need_a_secret(self, script, launch):
        code, _, err = launch(script(""), 1, hosts=2, join="127.0.0.1:29400").end()
        assert code == 2 and "token_hex" in err and "--secret-file" in err
