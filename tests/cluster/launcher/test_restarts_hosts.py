"""Jobs of several hosts that start again as a whole, whichever host fails: launchers on this
machine, which meet on its loopback.
"""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.jobs import Ended, Job, Jobs, free_port, wait_for
from tests.harness.joining_hosts import kill
from tests.harness.launchers import JOINED, Launched
from tests.harness.survivors import apart, outcome, script

# steps 5, 10, 15, ..., after the loss is logged
SAVES = "0 * bool(run.steps % 5 == 4 and run.save())"
ENVIRON = {"PACELINE_SECRET": "5a" * 32, "PACELINE_INTERFACE": "lo"}


class Training:
    """The training of two hosts of two workers each, whose launchers are given the same line."""

    def __init__(self, job: Jobs, name: str, *options: str, **parts: Any) -> None:
        self.out = job.folder / name
        self.out.mkdir()
        self._job, self._options = (
            job,
            ("--hosts", "2", "--join", f"127.0.0.1:{free_port()}", *options),
        )
        self._script = script(
            **{"start": f"name='run', folder='{name}/runs', seed=5", "nap": SAVES} | parts
        )

    def come(self) -> Job:
        """One more launcher."""
        return self._job.run(self._script, 2, *self._options, **ENVIRON, OUT=str(self.out))

    def until(self, where: str, *launched: Job) -> None:
        """Wait until a worker is there."""
        wait_for(
            lambda: (
                (self.out / where).exists()
                or any(each.process.poll() is not None for each in launched)
            )
        )
        assert (self.out / where).exists(), [each.end() for each in launched]

    def losses(self) -> list[tuple[int, float]]:
        """What was logged."""
        lines = (self.out / "runs" / "run" / "metrics.jsonl").read_text().splitlines()
        return [(line["step"], line["loss"]) for line in map(json.loads, lines)]


def equal(found: Training, wanted: Training) -> list[str]:
    """Check that two trainings came to the same, and return what has happened in the first."""
    one, other = outcome(found.out, found.out), outcome(wanted.out, wanted.out)
    assert apart(one, other) == 0 and all(map(torch.equal, one.weights, other.weights))
    assert found.losses() == wanted.losses() and [step for step, _ in found.losses()] == list(
        range(1, 37)
    )
    assert [path.name for path in (found.out / "runs").iterdir()] == ["run"]
    return one.events


def ended(*launched: Job) -> list[Ended]:
    """How they ended, which was well."""
    ends = [each.end() for each in launched]
    assert not any(end.code for end in ends), ends
    return ends


LOST = "run.rank == {} and run.steps == {} and die(True, {!r})"
HELD = (
    "run.rank == {} and run.steps == {} and not (out / {!r}).exists() and ((out / {!r}).touch(), "
    "signal.pause())"
)


def test_killed_workers_and_hosts_leave_no_trace_but_events(job: Jobs) -> None:
    """Workers of both hosts are killed, the first one among them; then the launchers, which come
    back: first the second, then the first.
    """
    wanted = Training(job, "undisturbed")
    ended(wanted.come(), wanted.come())

    found = Training(
        job,
        "killed",
        *("--restarts", "4"),
        before=LOST.format(3, 7, "third"),
        between=LOST.format(0, 13, "first"),
        after=f"{HELD.format(3, 22, *['second host'] * 2)}; {HELD.format(3, 28, *['first host'] * 2)}",  # noqa: E501
    )
    launched = [found.come(), found.come()]
    found.until("second host", *launched)
    by_number = {int(each.workers()[0].environ()["GROUP_RANK"]): each for each in launched}
    for number, where in ((1, "second host"), (0, "first host")):
        found.until(where, *by_number.values())
        kill(by_number[number])
        by_number[number] = found.come()
    ended(*by_number.values())

    events = equal(found, wanted)
    assert len(events) == 4 and all(
        f"(restart {number} of 4)" in what for number, what in enumerate(events, 1)
    ), events
    for what, words in zip(events, ("rank 3 on", "rank 0 on", "host", "host"), strict=True):
        assert what.startswith(words) and ("once another host has come in its place" in what) == (
            words == "host"
        ), events
    for what, step in zip(events, (5, 10, 20, 25), strict=True):
        assert f"from step-000000{step:02}" in what, events


def test_each_host_has_the_run_in_a_folder_of_its_own(job: Jobs) -> None:
    """The first worker saves and resumes; what another host has lies elsewhere.

    The same error ends the job on both in the end.
    """
    parts = {
        "start": "name='run', folder=os.environ['GROUP_RANK'], seed=5",
        "before": LOST.format(3, 7, "third"),
    }
    apart_folders = Training(
        job,
        "apart",
        "--restarts",
        "3",
        **parts,
        after="run.rank == 2 and run.steps == 12 and {}['lost']",
    )
    ends = [each.end() for each in (apart_folders.come(), apart_folders.come())]
    for end in ends:
        assert (
            end.code == 1
            and "from step-00000005 (restart 1 of 3)" in end.err
            and "from step-00000010 (restart 2 of 3)" in end.err
        ), end
        assert end.last.endswith(
            "it isn't started again: the same error has come before, from the same place on"
        ), end
        assert "KeyError: 'lost'" in end.err and "(restart 3 of 3)" not in end.err, end
    assert [path.name for path in (job.folder / "0").iterdir()] == ["run"]


# ---- launchers alone, with scripts that know nothing of torch

Both = Callable[..., list[Launched]]
NAME = socket.gethostname()


@pytest.fixture
def hosts(script, launch) -> Both:
    def start(body: str, count: int = 2, **options: Any) -> list[Launched]:
        path, join = script(body), f"127.0.0.1:{free_port()}"
        request = {"hosts": count, "join": join, "restarts": 3} | options
        started = [launch(path, 1, **request, **ENVIRON) for _ in range(count)]
        start.make_another_group = lambda: launch(path, 1, **request, **ENVIRON)  # type: ignore[attr-defined]
        return started

    return start


STARTS = """
import json, pathlib, signal, time
starts = len(json.loads(os.environ["PACELINE_JOB_START"])["events"])
pathlib.Path(f"{rank}-{starts}-{os.getppid()}-{os.environ['MASTER_PORT']}-{os.environ['PACELINE_STORE'].partition(':')[2]}").touch()
"""


ALL_HERE = """
while len(list(pathlib.Path().glob(f"*-{starts}-*-*-*"))) < 3: time.sleep(0.01)
"""


def starts(folder: Path) -> list[list[int]]:
    """Rank, number of the start, launcher, and two ports, of each worker that has been started."""
    return sorted(
        [int(part) for part in path.name.split("-")] for path in folder.glob("[0-9]*-*-*-*-*")
    )


def there(folder: Path, number: int, workers: int) -> None:
    """Wait until so many workers of this start are there."""
    wait_for(lambda: len([each for each in starts(folder) if each[1] == number]) == workers)


def launcher(launched: list[Launched], folder: Path, rank: int) -> Launched:
    """Return the launcher of a rank."""
    pid = next(each[2] for each in starts(folder) if each[:2] == [rank, 0])
    return next(each for each in launched if each.process.pid == pid)


def test_hosts_keep_their_numbers_and_ports_are_fresh(hosts: Both, tmp_path: Path) -> None:
    launched = hosts(
        (
            f"{STARTS}{ALL_HERE}if starts < 2 and rank == 2 - starts: os.kill(os.getpid(), 9)\nif "
            "starts < 2: signal.pause()"
        ),
        3,
    )
    ends = [each.end() for each in launched]
    assert [code for code, _, _ in ends] == [0] * 3, ends
    for _, _, err in ends:
        told = [line for line in err.splitlines() if "(restart " in line]
        wanted = [
            (
                f"paceline: rank {rank} on {NAME} was killed by SIGKILL (exit code 137); "
                f"all start again (restart {3 - rank} of 3)"
            )
            for rank in (2, 1)
        ]
        assert told == wanted, err
    found = starts(tmp_path)
    assert [each[:2] for each in found] == [
        [rank, start] for rank in range(3) for start in range(3)
    ]
    assert all(len({each[2] for each in found if each[0] == rank}) == 1 for rank in range(3)), found
    assert len({tuple(each[3:]) for each in found}) == 3, found  # one pair of ports for each start


def test_what_another_start_would_not_mend(hosts: Both) -> None:
    final = JOINED + "if rank == 1: raise UsageError('no such mesh')\ntime.sleep(600)"
    ends = [each.end() for each in hosts(final)]
    for code, _, err in ends:
        assert code == 1 and "(restart " not in err
        assert err.splitlines()[-1].endswith(
            "it isn't started again: every start would end in this UsageError"
        ), err


def test_no_restart_is_left(hosts: Both) -> None:
    ends = [
        each.end()
        for each in hosts("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(600)", restarts=1)
    ]
    for code, _, err in ends:
        assert code == 137 and err.count("(restart 1 of 1)") == 1
        assert (
            err.splitlines()[-1]
            == f"paceline: rank 1 on {NAME} was killed by SIGKILL (exit code 137)"
        ), err


@pytest.mark.alike(2)
@pytest.mark.parametrize("gone", [0, 1, 2])
def test_nobody_comes_in_the_place_of_a_host(hosts: Both, tmp_path: Path, gone: int) -> None:
    launched = hosts(STARTS + "signal.pause()", 3, patience=1.5)
    there(tmp_path, 0, 3)
    lost = launcher(launched, tmp_path, gone)
    lost.process.kill()
    for each in launched:
        if each is not lost:
            code, _, err = each.end()
            assert (
                code == 1
                and (
                    "once another host has come in its place, "
                    "for which they wait 1.5 s (restart 1 of 3)"
                )
                in err
            ), err
            assert (
                "2 of 3 hosts came to 127.0.0.1:" in err.splitlines()[-1]
                or "could not be reached" in err.splitlines()[-1]
            ), err
    assert {each[1] for each in starts(tmp_path)} == {0}


@pytest.mark.alike(1)
@pytest.mark.parametrize(
    ("gone", "asked", "number"),
    [(2, 0, signal.SIGTERM), (2, 1, signal.SIGINT), (0, 1, signal.SIGTERM)],
)
def test_a_launcher_that_is_asked_to_end_while_all_wait_for_another(
    hosts: Both, tmp_path: Path, gone: int, asked: int, number: int
) -> None:
    launched = hosts(STARTS + "signal.pause()", 3)
    there(tmp_path, 0, 3)
    by_rank = {rank: launcher(launched, tmp_path, rank) for rank in range(3)}
    by_rank.pop(gone).process.kill()
    told = []
    # until all that are left have met, and wait for the one that is gone
    for each in by_rank.values():
        stream = each.process.stderr
        assert stream is not None
        for line in stream:
            told.append(line)
            if "(here: " + ", ".join([NAME] * 2) + ")" in line or "has come to" in line:
                break
    by_rank[asked].process.send_signal(number)
    ends = {rank: each.end() for rank, each in by_rank.items()}
    assert [code for code, _, _ in ends.values()] == [128 + number] * 2, ends
    other = next(ends[rank][2] for rank in ends if rank != asked)
    assert (
        f"the launcher on {NAME} was asked to end the job ({signal.Signals(number).name})" in other
    ), (other, told)
    assert {each[1] for each in starts(tmp_path)} == {0}


def test_another_launcher_in_the_place_of_one_that_was_killed(hosts: Both, tmp_path: Path) -> None:
    """It gets the number of the one that is gone, and knows how often the job has started again."""
    launched = hosts(STARTS + "if starts < 2: signal.pause()", 3, restarts=2)
    there(tmp_path, 0, 3)
    for start, rank in enumerate((1, 0)):
        lost = launcher(launched, tmp_path, rank)
        lost.process.kill()
        lost.end()
        launched.remove(lost)
        launched.append(hosts.make_another_group())  # type: ignore[attr-defined]
        there(tmp_path, start + 1, 3)
    ends = [each.end() for each in launched]
    assert [code for code, _, _ in ends] == [0] * 3, ends
    stayed = {rank: {each[2] for each in starts(tmp_path) if each[0] == rank} for rank in range(3)}
    assert [len(stayed[rank]) for rank in range(3)] == [2, 2, 1], stayed


def test_hosts_have_to_be_given_the_same_restarts(script, launch) -> None:
    path, join = script(""), f"127.0.0.1:{free_port()}"
    ends = [
        launch(path, 1, hosts=2, join=join, restarts=number, **ENVIRON).end for number in (1, 2)
    ]
    for code, _, err in (end() for end in ends):
        assert (
            code == 2
            and "--restarts" in err.splitlines()[-1]
            and "use the same command on all hosts" in err
        ), err


def test_ctrl_c_ends_all_hosts_without_a_restart(hosts: Both, tmp_path: Path) -> None:
    launched = hosts(STARTS + "signal.pause()")
    there(tmp_path, 0, 2)
    os.kill(launched[1].process.pid, signal.SIGINT)
    ends = [each.end() for each in launched]
    assert [code for code, _, _ in ends] == [130] * 2 and not any(
        "(restart " in err for _, _, err in ends
    ), ends
