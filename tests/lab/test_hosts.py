"""A cluster that is built: what a host is, what it may use, what can be done to it, and that
nothing is left of it.
"""

from __future__ import annotations

import gc
import os
import socket
import subprocess
import sys
from contextlib import suppress

import pytest

from paceline import lab
from paceline.errors import ResourceError, UsageError
from paceline.lab import cgroups, kernel, remains
from paceline.lab.description import Description, Host
from paceline.lab.hosts import Cluster
from tests.harness.jobs import PATIENCE, wait_for
from tests.harness.labs import ask, left, measure, spaces, spin, traces

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


class TestHost:
    def test_has_a_name_and_an_address_of_its_own(self, pair):
        cluster = pair()
        assert [ask(cluster, host, "hostname") for host in (0, 1)] == ["host0", "host1"]
        code = (
            "import socket; print(socket.gethostbyname('host1'), *[name for _, name in "
            "socket.if_nameindex()])"
        )
        for host in (0, 1):
            assert ask(cluster, host, sys.executable, "-c", code) == "10.77.0.2 lo eth0"
        assert socket.gethostname() != "host0"

    def test_reaches_the_others_and_nobody_else(self, pair):
        cluster = pair()
        wait_for(lambda: measure(cluster, 0, 1, 0.2) > 10**6)
        code = (
            "import socket; s = socket.socket(); s.settimeout(5); "
            "print(s.connect_ex(('192.0.2.1', 80)))"
        )
        assert int(ask(cluster, 0, sys.executable, "-c", code)) == 101  # network is unreachable
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        code = f"import socket; print(socket.socket().connect_ex(('127.0.0.1', {port})))"
        # nobody listens on its own loopback
        assert int(ask(cluster, 0, sys.executable, "-c", code)) == 111
        listening.close()

    def test_has_shared_memory_of_its_own(self, pair):
        cluster = pair()
        ask(cluster, 0, "touch", "/dev/shm/paceline-test")
        assert ask(cluster, 0, "ls", "/dev/shm") == "paceline-test"
        assert ask(cluster, 1, "ls", "/dev/shm") == "" and not os.path.exists(
            "/dev/shm/paceline-test"
        )

    def test_starts_commands_here(self, pair, tmp_path, monkeypatch):
        cluster = pair()
        monkeypatch.chdir(tmp_path)
        assert ask(cluster, 0, "pwd") == str(tmp_path)
        assert (
            ask(cluster, 0, "sh", "-c", "echo $PACELINE_LAB $TMPDIR")
            == f"{cluster.identity} {cluster.folder}/host0"
        )
        process = cluster.spawn(0, ["/no/such"], stderr=subprocess.PIPE)
        assert (
            process.communicate()[1].decode()
            == "paceline: /no/such can't be started in this host (No such file or directory)\n"
        )
        assert process.returncode == 126

    def test_may_be_called_as_it_likes(self, build):
        """Also as what a lab keeps beside the folders of its hosts, at any time."""
        names = ("hosts", "secret", "job", "run", "run1", "table")
        cluster = build(description=Description("c", tuple(Host(name) for name in names)))
        cluster.pages(1).mkdir()
        assert [
            ask(cluster, host, "sh", "-c", "hostname; ls -d $TMPDIR").split()
            for host in range(len(names))
        ] == [[name, str(cluster.folder / name)] for name in names]
        assert len(cluster.secret.read_bytes()) == 64


class TestQuotas:
    @pytest.mark.slow
    def test_processors(self, quotas, pair):
        cluster = pair(processors=0.25)
        assert cluster.quota_of(0) == 0.25
        assert spin(cluster, 0) < 0.35
        cluster.quota(0, 0.5)
        # others may need the cores
        seen = "from paceline.cluster import machine; print(machine.read_cpu_quota())"
        assert spin(cluster, 0) < 0.6 and ask(cluster, 0, sys.executable, "-c", seen) == "0.5"
        cluster.quota(0, None)
        assert cluster.quota_of(0) is None and cluster.quota_of(1) == 0.25
        assert [ask(cluster, host, sys.executable, "-c", seen) for host in range(2)] == [
            "None",
            "0.25",
        ]

    def test_a_first_quota_reaches_processes_that_run_already(self, quotas, pair):
        cluster = pair()
        fork = (
            "import os, time\nwhile True:\n    os.fork() or (time.sleep(0.2), "
            "os._exit(0))\n    time.sleep(0.01)\n"
        )
        processes = [cluster.spawn(0, SLEEP), cluster.spawn(0, [sys.executable, "-S", "-c", fork])]
        group = cluster.hosts[0].group.list_entry_files(("cpu",))[0]
        wait_for(lambda: len(cluster.processes(0)) > 4)
        cluster.quota(0, None)
        # without a quota a host has no group: its threads share the cores with all others
        assert group.read_text() == ""
        cluster.quota(0, 0.7)
        inside = {int(number) for number in group.read_text().split()}
        assert {process.pid for process in processes} <= inside and len(inside) > 4
        later = cluster.spawn(0, SLEEP)
        wait_for(lambda: str(later.pid) in group.read_text().split())
        assert cluster.hosts[1].group.list_entry_files(("cpu",))[0].read_text() == ""

    def test_memory(self, quotas, pair):
        cluster = pair(memory="64MiB")
        code = "x = bytearray(%d); print(len(x))"
        assert ask(cluster, 0, sys.executable, "-S", "-c", code % 2**20) == str(2**20)
        process = cluster.spawn(
            0, [sys.executable, "-S", "-c", code % 2**28], stdout=subprocess.DEVNULL
        )
        assert process.wait(PATIENCE) == -9

    def test_cores_that_a_worker_sees(self, quotas, pair):
        cluster = pair(processors=1)
        code = "from paceline.cluster.machine import *; print(read_cpu_quota(), count_cores())"
        assert ask(cluster, 0, sys.executable, "-c", code) == "1.0 1"

    def test_where_there_are_none(self, able, monkeypatch):
        def nowhere(controller: str, mounts: object = None) -> None:
            raise ResourceError(f"no {controller}")

        monkeypatch.setattr(cgroups, "find_base", nowhere)
        with pytest.raises(ResourceError, match="no cpu"), lab.cluster(processors=1):
            pass
        with lab.cluster() as cluster, pytest.raises(ResourceError, match="no cpu"):
            cluster.quota(0, 1)


class TestActs:
    def test_cut_and_mend(self, pair):
        cluster = pair()
        server = cluster.hosts[1].space.call_inside(socket.socket)
        server.bind((cluster.hosts[1].address, 0))
        server.listen()
        client = cluster.hosts[0].space.call_inside(socket.socket)
        client.connect(server.getsockname())
        other, _ = server.accept()
        other.settimeout(0.3)
        for _ in range(2):
            cluster.cut(1)
        client.sendall(b"late")
        with pytest.raises(TimeoutError):
            other.recv(4)
        for _ in range(2):
            cluster.mend(1)
        other.settimeout(20)
        assert other.recv(4) == b"late"
        for each in (server, client, other):
            each.close()

    def test_processes_and_crash(self, pair):
        cluster = pair()
        stopped, running = cluster.spawn(0, SLEEP), cluster.spawn(1, SLEEP)
        ignoring = cluster.spawn(0, ["sh", "-c", "trap '' TERM INT; sleep 600 & sleep 600"])
        wait_for(lambda: len(cluster.processes(0)) >= 4 and cluster.processes(1) == [running.pid])
        assert stopped.pid in cluster.processes(0)
        for _ in range(2):
            cluster.crash(0)
        assert cluster.processes(0) == [] and cluster.processes(1) == [running.pid]
        assert stopped.wait(PATIENCE) == ignoring.wait(PATIENCE) == -9

    def test_start_needs_a_run(self, pair):
        with pytest.raises(UsageError, match="no run is under way that host1 could join"):
            pair().start(1)

    def test_hosts_that_are_not_there(self, pair):
        with pytest.raises(UsageError, match="there is no host 2: 2x1 has hosts 0 to 1"):
            pair().cut(2)


class TestBuilding:
    def test_two_at_once_do_not_meet(self, build):
        one, other = build(hosts=2), build(hosts=2)
        assert one.identity != other.identity and one.hosts[0].address == other.hosts[0].address
        assert len({host.network for cluster in (one, other) for host in cluster.hosts}) == 4
        process = one.spawn(0, SLEEP)
        wait_for(lambda: one.processes(0) == [process.pid])
        assert other.processes(0) == []
        other.close()
        assert one.processes(0) == [process.pid] and ask(one, 1, "hostname") == "host1"

    def test_again(self, able):
        cluster = lab.cluster(hosts=1)
        for _ in range(2):
            with cluster, pytest.raises(UsageError, match="this cluster is built already"):
                assert ask(cluster, 0, "hostname") == "host0"
                cluster.__enter__()

    def test_nothing_is_left(self, able):
        gc.collect()  # what other tests have left
        before, opened = traces(), len(os.listdir("/proc/self/fd"))
        with lab.cluster(hosts=3, workers=2, bandwidth="1gbit") as cluster:
            processes = [cluster.spawn(host, SLEEP) for host in range(3)]
            wait_for(lambda: all(cluster.processes(host) for host in range(3)))
            hosts = cluster.hosts
            assert {host.network for host in hosts} <= spaces()
            assert not any(
                trace.startswith(("interface", "network")) for trace in traces() - before
            )
            assert traces() - before  # else the test sees nothing
        assert [process.wait(PATIENCE) for process in processes] == [-9] * 3
        cluster.close()
        del processes
        gc.collect()
        assert left(before) == set() and len(os.listdir("/proc/self/fd")) == opened
        assert not {host.network for host in hosts} & spaces()
        with pytest.raises(UsageError, match="this cluster isn't built"):
            cluster.cut(0)

    def test_nothing_is_left_of_an_error_inside(self, clean):
        with pytest.raises(ZeroDivisionError), lab.cluster() as cluster:
            cluster.spawn(0, SLEEP)
            1 / 0  # noqa: B018

    def test_nothing_is_left_of_a_cluster_that_can_not_be_built(self, clean, monkeypatch):
        def refuse(self: Cluster) -> None:
            raise ResourceError("no wires")

        monkeypatch.setattr(Cluster, "_connect_hosts", refuse)
        with pytest.raises(ResourceError, match="no wires"), lab.cluster():
            pass

    def test_commands_inherit_no_descriptors(self, pair):
        assert (
            ask(
                pair(),
                0,
                sys.executable,
                "-S",
                "-c",
                "import os; print(os.listdir('/proc/self/fd'))",
            )
            == "['0', '1', '2', '3']"
        )


class TestDelay:
    DELAYED = Description("d", (Host("a", delay=0.05), Host("b")))

    def test_where_the_kernel_has_it(self, build):
        if any(ability.name == "netem" and ability.reason for ability in kernel.try_abilities()):
            with pytest.raises(
                ResourceError, match="d has links with delay, and this kernel has no netem"
            ):
                build(description=self.DELAYED)
            pytest.skip("this kernel has no netem")
        code = (
            "import socket, time; s = socket.socket(); t = time.monotonic(); "
            "s.connect_ex(('10.77.0.2', 9)); print(time.monotonic() - t)"
        )
        cluster = build(description=self.DELAYED)
        found = [float(ask(cluster, 0, sys.executable, "-S", "-c", code)) for _ in range(10)]
        assert 0.05 < min(found) < 0.5  # a busy machine makes some of them later

    def test_where_it_may_be_left_out(self, build):
        cluster = build(description="wan-100m")
        lacking = any(
            ability.name == "netem" and ability.reason for ability in kernel.try_abilities()
        )
        assert cluster.notes == (
            ["this kernel has no netem: the links of wan-100m have no delay here"]
            if lacking
            else []
        )


def test_a_killed_labs_record_is_swept_by_the_next(able, tmp_path):
    with suppress(FileNotFoundError):
        remains.forget_record("0123abcd")
    folder = tmp_path / "left"
    folder.mkdir()
    sleeper = subprocess.Popen(SLEEP, env={remains.MARK: "0123abcd"})
    wait_for(lambda: sleeper.pid in remains.processes_marked("0123abcd"))
    host = {"name": "a", "address": "", "network": "net:[1]", "fds": {}, "cgroups": []}
    record = {
        "identity": "0123abcd",
        "name": "x",
        "process": sleeper.pid,
        "began": "1",
        "keeper": 0,
        "folder": str(folder),
        "hosts": [host],
    }
    remains.write_record(record)
    with lab.cluster(hosts=1):
        assert sleeper.wait(PATIENCE) == -9 and not folder.exists()
        assert "0123abcd" not in [found["identity"] for found in remains.read_records()]
