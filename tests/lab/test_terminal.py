"""`paceline lab shell`, `check` and `clean`, and the lab without root."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.lab.description import Description, Host, Rack, ready
from paceline.lab.hosts import Cluster
from paceline.lab.terminal import describe_cluster
from tests.harness.labs import left, traces

LAB = [sys.executable, "-m", "paceline", "lab"]
NOBODY = 65534


def call(*words: str, given: str = "", **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LAB, *words],
        capture_output=True,
        text=True,
        check=False,
        input=given,
        timeout=100,
        **options,
    )


@pytest.fixture
def cluster(pair: Callable[..., Cluster]) -> Cluster:
    return pair()


@pytest.mark.slow
class TestShell:
    def test_reads_commands(self, cluster):
        answer = call("shell", "--lab", cluster.identity, "host1", given="hostname\nexit 5\n")
        assert (answer.stdout, answer.returncode) == ("host1\n", 5)

    def test_runs_a_command(self, cluster):
        answer = call(
            "shell",
            "--lab",
            cluster.identity,
            "0",
            "echo",
            "--lab",
            "'a  b';",
            "getent hosts $(hostname)",
        )
        assert answer.stdout == "--lab a  b\n10.77.0.1       host0\n", answer.stderr
        assert (
            call("shell", "--lab", cluster.identity, "0", "hostname; echo $TMPDIR").stdout
            == f"host0\n{cluster.folder}/host0\n"
        )

    def test_ends_with_the_cluster(self, cluster):
        process = subprocess.Popen(
            [*LAB, "shell", "--lab", cluster.identity, "0", "echo in; sleep 600"],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None and process.stdout.readline() == b"in\n"
        assert process.pid in cluster.processes(0)
        cluster.close()
        assert process.wait(60) == -9
        process.stdout.close()

    def test_mistakes(self, cluster, build):
        answer = call("shell", "--lab", cluster.identity, "host2")
        assert (answer.returncode, answer.stderr.count("\n")) == (2, 1)
        assert (
            f"lab {cluster.identity} (2x1) has no host host2; possible: host0, host1"
            in answer.stderr
        )
        assert "no lab x runs; possible: " in call("shell", "--lab", "x", "0").stderr
        build(hosts=1)
        assert (
            "labs run: " in (answer := call("shell", "0")).stderr
            and "choose one with --lab" in answer.stderr
            and answer.returncode == 2
        )


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="there is no mpirun")
def test_mpirun_finds_its_way_through_shells(cluster: Cluster, tmp_path: Path) -> None:
    agent = tmp_path / "agent"
    agent.write_text(f'#!/bin/sh\nexec {" ".join(LAB)} shell --lab {cluster.identity} "$@"\n')
    agent.chmod(0o755)
    words = [
        "mpirun",
        "--allow-run-as-root",
        "--host",
        "host0,host1",
        "--mca",
        "plm_rsh_agent",
        str(agent),
        "hostname",
    ]
    version = subprocess.run(
        ["mpirun", "--version"], capture_output=True, text=True, check=False
    ).stdout
    if "Open MPI" not in version:
        pytest.skip("mpirun isn't Open MPI's")
    answer = call("shell", "--lab", cluster.identity, "host0", *words)
    assert sorted(answer.stdout.split()) == ["host0", "host1"], answer.stderr


class TestCheck:
    def test_says_what_there_is(self, clean):
        answer = call("check")
        assert answer.returncode == 0 and answer.stdout.splitlines()[-1] == "a lab can run here"
        names = [line.split("  ")[0] for line in answer.stdout.splitlines()[1:-1]]
        assert names == [
            "namespaces",
            "veth, bridge",
            "tbf",
            "htb",
            "netem",
            "control group cpu",
            "control group memory",
        ]

    def test_says_what_is_missing(self, clean):
        if os.geteuid() != 0 or shutil.which("setpriv") is None:
            pytest.skip("only root can give up its rights")
        # and user 0 may not map itself either
        powerless = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
        answer = subprocess.run(
            [*powerless, *LAB, "check"], capture_output=True, text=True, check=False
        )
        if answer.returncode == 0:
            pytest.skip("this kernel lets user 0 without rights make user namespaces")
        assert answer.returncode == 1 and answer.stdout.splitlines()[-1] == "no lab can run here"
        assert answer.stdout.startswith(
            "rights: MISSING: this user isn't root, and may not make a user namespace (the "
            "kernel refused "
        )
        answer = subprocess.run(
            [*powerless, *LAB, "run", "two-hosts", __file__],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (
            answer.returncode == 1
            and answer.stderr.count("\n") == 1
            and "or run as root" in answer.stderr
        )


def test_clean_with_nothing_to_do(clean: None) -> None:
    answer = call("clean")
    assert answer.returncode == 0 and answer.stderr == ""


@pytest.mark.slow
class TestWithoutRoot:
    @pytest.fixture(scope="class")
    def nobody(
        self, able: None, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[dict[str, object]]:
        """What a process of another user needs to run paceline: a Python that it may read, and a
        folder of its own.
        """
        if os.geteuid() != 0:
            pytest.skip("only root can become another user")
        python = next(
            (
                path
                for path in ("/usr/bin/python3.11", "/usr/bin/python3")
                if os.access(path, os.X_OK)
            ),
            None,
        )
        if python is None:
            pytest.skip("there is no Python that every user can read")
        before = traces()
        folder = Path(f"/tmp/pl-nobody-{os.getpid()}")
        folder.mkdir()
        os.chown(folder, NOBODY, NOBODY)
        path = os.pathsep.join(
            [
                str(Path(__file__).parents[2]),
                *(entry for entry in sys.path if "site-packages" in entry),
            ]
        )
        who = {"user": NOBODY, "group": NOBODY, "extra_groups": []}
        surroundings = {
            "PYTHONPATH": path,
            "PATH": os.environ["PATH"],
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(folder),
        }
        options: dict[str, Any] = {
            "cwd": folder,
            "env": surroundings,
            **who,
            "capture_output": True,
            "text": True,
            "timeout": 100,
        }
        probe = subprocess.run(
            [python, "-c", "import pyroute2, paceline.cli"], check=False, **options
        )
        if probe.returncode != 0:
            shutil.rmtree(folder)
            pytest.skip(
                f"another user can't import paceline here: {probe.stderr.strip().splitlines()[-1]}"
            )
        checked = subprocess.run([python, "-m", "paceline", "lab", "check"], check=False, **options)
        if checked.returncode != 0:
            shutil.rmtree(folder)
            pytest.skip(f"another user can't have a lab here: {checked.stdout}")
        yield {"python": python, "options": options, "folder": folder}
        rest = [path.name for path in folder.iterdir() if path.name != "s.py"]
        shutil.rmtree(folder)
        assert (
            rest == []
            and left(before) == set()
            and not Path(f"/tmp/paceline-lab-{NOBODY}").exists()
        )

    def test_runs_and_has_shells(self, nobody):
        (nobody["folder"] / "s.py").write_text(
            "import socket, os\nprint(socket.gethostname(), os.environ['WORLD_SIZE'])"
        )
        command = [nobody["python"], "-m", "paceline", "lab", "run", "two-hosts", "s.py"]
        ended = subprocess.run(command, check=False, **nobody["options"])
        assert ended.returncode == 0, ended.stderr
        assert sorted(ended.stdout.splitlines()) == [
            "[host0 0] host0 4",
            "[host0 1] host0 4",
            "[host1 2] host1 4",
            "[host1 3] host1 4",
        ]

    def test_a_shell_in_it(self, nobody):
        # The script opens the shell itself: the lab runs by then.
        shell = f"{nobody['python']} -m paceline lab shell host1 'hostname; id -u'"
        (nobody["folder"] / "s.py").write_text(
            f"import os\nif os.environ['RANK'] == '0': os.system({shell!r})"
        )
        ended = subprocess.run(
            [nobody["python"], "-m", "paceline", "lab", "run", "two-hosts", "s.py"],
            check=False,
            **nobody["options"],
        )
        assert (ended.returncode, ended.stdout) == (0, "[host0 0] host1\n[host0 0] 0\n"), (
            ended.stderr
        )

    def test_quotas_are_refused(self, nobody):
        (nobody["folder"] / "s.py").write_text("")
        ended = subprocess.run(
            [nobody["python"], "-m", "paceline", "lab", "run", "unequal", "s.py"],
            check=False,
            **nobody["options"],
        )
        assert ended.returncode == 1 and "quotas need root" in ended.stderr


def test_a_cluster_in_a_line() -> None:
    assert (
        describe_cluster(ready("racks"))
        == "lab racks: 4 hosts in 2 racks, 4 workers dealt in blocks, links of 1gbit"
    )
    assert (
        describe_cluster(ready("unequal"))
        == "lab unequal: 3 hosts, 3 workers dealt in blocks, unequal links"
    )
    plain = Description("x", (Host("a", 2),), (Rack("r", ("a",)),), "round-robin")
    assert (
        describe_cluster(plain)
        == "lab x: 1 hosts in 1 racks, 2 workers dealt round-robin, unlimited links"
    )
