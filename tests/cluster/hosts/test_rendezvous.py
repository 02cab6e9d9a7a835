"""Launchers of several hosts: they meet, number themselves, know each other's secret, and end
together.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster import network
from paceline.cluster.hosts import rendezvous
from paceline.cluster.hosts.channel import Channel, ChannelBroken, Introduction, introduce_launcher
from paceline.cluster.hosts.rendezvous import Offer, assemble_hosts
from paceline.errors import DeadlineExceeded, Mismatch, PlaceError, SecretError
from paceline.timings import ChannelTimings, RendezvousTimings, Timings
from tests.harness.clocks import Clock
from tests.harness.jobs import PATIENCE, Jobs, free_port, listening, wait_for
from tests.harness.launchers import JOINED, Launched
from tests.harness.meetings import SECRET, gather, invitation

ENVIRON = {"PACELINE_SECRET": SECRET.decode()}


# A launcher says at once for whom it waits, and again and again.
BRIEF = Timings(
    channel=ChannelTimings(hello=PATIENCE, look=0.02),
    rendezvous=RendezvousTimings(reminder=0.0, next_reminder=0.0),
)


@pytest.fixture
def over(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Callable[[str], None]]:
    """Deadlines pass as soon as a launcher has said certain words, and not before."""
    clock = Clock()
    clock.now = time.monotonic()
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))

    def make(words: str, said: list[str]) -> Callable[[str], None]:
        def say(text: str) -> None:
            said.append(text)
            clock.now += 2 * PATIENCE * (words in text)

        return say

    return make


class TestAssemble:
    def test_all_get_one_table(self):
        for _ in range(20):
            port = free_port()
            found = [
                future.result()
                for future in gather(*(invitation(name, port, hosts=3) for name in "abc"))
            ]
            assert sorted(council.host_rank for council in found) == [0, 1, 2]
            assert found[0].offers == found[1].offers == found[2].offers
            for name, council in zip("abc", found, strict=True):
                assert council.offers[council.host_rank].name == name
                council.close()

    def test_wishes_are_granted(self):
        port = free_port()
        wished = gather(
            *(
                invitation(name, port, hosts=3, host_rank=rank)
                for name, rank in (("a", 2), ("b", None), ("c", 0))
            )
        )
        assert [future.result().host_rank for future in wished] == [2, 1, 0]
        for future in wished:
            future.result().close()

    def test_two_hosts_of_one_number(self):
        port = free_port()
        for future in gather(
            invitation("a", port, host_rank=1), invitation("b", port, host_rank=1), led=True
        ):
            assert isinstance(future.exception(), Mismatch) and "both say --host-rank 1" in str(
                future.exception()
            )

    def test_different_numbers_of_hosts(self):
        port = free_port()
        for future in gather(invitation("a", port), invitation("b", port, hosts=3), led=True):
            assert isinstance(
                future.exception(), Mismatch
            ) and "b was started with --hosts 3" in str(future.exception())

    def test_different_placements(self):
        port, other = free_port(), Offer("b", 2, "127.0.0.1", "machine", 1000, 2000, "round-robin")
        for future in gather(invitation("a", port), invitation("b", port, offer=other), led=True):
            assert isinstance(future.exception(), Mismatch)
            assert (
                "b was started with --placement round-robin, and a with --placement block"
                in str(future.exception())
            )

    def test_another_secret_ends_who_came_with_it(self, over):
        port, said = free_port(), []
        first, second = gather(
            invitation("a", port, say=over("came with another secret", said)),
            invitation("b", port, secret=b"another secret!!"),
            led=True,
        )
        assert isinstance(second.exception(), SecretError)
        assert isinstance(
            first.exception(), DeadlineExceeded
        ) and "came with another secret" in str(first.exception())
        assert (
            len(said) == len({*said})
            and sum("came with another secret" in line for line in said) == 1
        )

    def test_more_hosts_than_launchers_can_tell_of(self):
        port = free_port()
        # two hosts for hundreds
        offers = [replace(invitation(name, port).offer, name=name * 70_000) for name in "ab"]
        for future in gather(*(invitation("", port, offer=offer) for offer in offers), led=True):
            assert isinstance(
                future.exception(), PlaceError
            ) and "the job has too many hosts" in str(future.exception())

    def test_who_does_not_come_is_missed(self):
        with pytest.raises(DeadlineExceeded, match=r"1 of 2 hosts came .* \(a\).*loopback"):
            assemble_hosts(invitation("a", free_port(), deadline=0.5))

    def test_who_came_is_told_who_did_not(self, over):
        port, terms = free_port(), {"hosts": 3, "timings": BRIEF, "say": over("(here: a, b)", [])}
        for future in gather(*(invitation(name, port, **terms) for name in "ab"), led=True):
            assert isinstance(future.exception(), DeadlineExceeded) and "2 of 3 hosts came" in str(
                future.exception()
            )

    def test_nobody_at_the_meeting_point(self, monkeypatch):
        """As on a machine that doesn't own the address."""
        monkeypatch.setattr(network, "is_own_address", lambda address: False)
        with pytest.raises(
            DeadlineExceeded,
            match=r"127.0.0.1:\d+ could not be reached from a within 1 s \(Connection refused\)",
        ):
            assemble_hosts(invitation("a", free_port(), deadline=1.0))

    def test_a_forwarder_hangs_up_until_somebody_is_there(self, monkeypatch, over):
        monkeypatch.setattr(network, "is_own_address", lambda address: False)
        with network.open_listener("127.0.0.1") as forwarder:
            port = forwarder.getsockname()[1]

            def forward() -> None:
                for _ in range(3):
                    forwarder.accept()[0].close()
                forwarder.close()

            thread = threading.Thread(target=forward)
            thread.start()
            with pytest.raises(DeadlineExceeded, match="Connection refused"):
                assemble_hosts(
                    invitation("a", port, timings=BRIEF, say=over("Connection refused", []))
                )
            thread.join(60)
            assert not thread.is_alive()

    def test_a_name_that_means_nothing(self):
        with pytest.raises(PlaceError, match="can't be resolved"):
            assemble_hosts(invitation("a", 0, point=("no.such.host.invalid", 29400)))

    def test_a_port_of_another_program(self):
        with network.open_listener("127.0.0.1") as other:

            def answer() -> None:
                with other.accept()[0] as connection:
                    connection.sendall(b"220 mail ready\n")

            thread = threading.Thread(target=answer)
            thread.start()
            with pytest.raises(PlaceError, match="isn't a launcher of paceline"):
                assemble_hosts(invitation("a", other.getsockname()[1]))
            thread.join()

    def test_a_silent_port(self):
        timings = Timings(channel=ChannelTimings(hello=0.1))
        with (
            network.open_listener("127.0.0.1") as other,
            pytest.raises(PlaceError, match="doesn't say anything"),
        ):
            assemble_hosts(invitation("a", other.getsockname()[1], timings=timings))

    def test_strangers_do_not_disturb(self):
        port = free_port()
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(assemble_hosts, invitation("a", port))
            strangers = []
            for noise in (
                b"",
                b"GET / HTTP/1.1\r\n\r\n",
                b"x" * 10_000,
                b'{"paceline": 7}\n',
                b"[1]\n",
            ):
                wait_for(lambda: bool(strangers.append(connected(port)) or strangers[-1]))
                strangers[-1].sendall(noise)
            second = pool.submit(assemble_hosts, invitation("b", port))
            assert second.result().host_rank == 1 and first.result().host_rank == 0
        for stranger in strangers:
            if stranger is not None:
                stranger.close()
        first.result().close()
        second.result().close()

    def test_loopback_between_machines(self):
        port = free_port()
        other = replace(invitation("b", port).offer, name="b", machine="other")
        for future in gather(invitation("a", port), invitation("b", port, offer=other), led=True):
            assert isinstance(future.exception(), PlaceError) and "PACELINE_INTERFACE" in str(
                future.exception()
            )


def connected(port: int) -> socket.socket | None:
    try:
        return socket.create_connection(("127.0.0.1", port), timeout=60)
    except OSError:
        return None


class TestChannel:
    def pair(self) -> tuple[Channel, Introduction]:
        here, there = socket.socketpair()
        caller = Introduction(there, SECRET, "here", PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(introduce_launcher, here, SECRET, "there", PATIENCE)
            wait_for(lambda: caller.receive_first_message() is not None or caller.is_trusted)
            return calling.result(), caller

    def test_messages_pass_both_ways(self):
        client, caller = self.pair()
        client.send({"a": 1})
        client.send({"b": "é" * 1000})
        caller.channel.send({"c": None})
        wait_for(lambda: caller.receive_first_message() == {"a": 1})
        assert caller.receive_first_message() == {"b": "é" * 1000}
        assert client.wait_for_message(time.monotonic() + PATIENCE) == {"c": None}

    def test_a_line_that_was_changed_repeated_or_reflected(self):
        for forge in (
            lambda line: line.replace(b"1", b"2"),
            lambda line: line + line,
            lambda line: line[1:],
        ):
            client, caller = self.pair()
            client.connection.setblocking(True)
            sent: list[bytes] = []
            client.flush = lambda seconds=0.0, client=client, sent=sent: sent.append(
                client._outgoing
            )  # type: ignore[method-assign]
            client.send({"x": "1"})
            client.connection.sendall(forge(sent[0]))
            with pytest.raises(ChannelBroken):
                wait_for(lambda caller=caller: bool(caller.receive_first_message()) and False)
        client, caller = self.pair()
        client.send({"x": 1})
        wait_for(
            lambda: (
                bool(line := caller.channel.connection.recv(4096, socket.MSG_DONTWAIT))
                and caller.channel.connection.send(line) > 0
            )
        )
        with pytest.raises(ChannelBroken, match="isn't signed"):
            client.wait_for_message(time.monotonic() + PATIENCE)

    def test_a_line_without_end(self):
        client, caller = self.pair()
        client.connection.setblocking(True)
        client.connection.settimeout(PATIENCE)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(client.connection.sendall, b"x" * 10_000_000)
            with pytest.raises(ChannelBroken, match="too long"):
                wait_for(lambda: caller.receive_first_message() is not None)
            caller.channel.close()
            assert isinstance(sending.exception(), OSError)


MEETING = """
from paceline.cluster import store
from paceline.cluster.discover import discover_place
place = discover_place()
meeting = store.connect_store(place)
cluster = store.discover_hosts(meeting, place)
print(place.secret.decode(), cluster.size, len(cluster.hosts))
meeting.put(f"bye{rank}", 1)
if rank == 0: [meeting.take(f"bye{r}") for r in range(3)]
"""


class TestLaunchers:
    """Two launchers on this machine, meeting on loopback."""

    @pytest.fixture
    def both(self, script, launch) -> Callable[..., tuple[Launched, Launched]]:
        def start(
            body: str, workers: tuple[int, int] = (1, 1), **options: Any
        ) -> tuple[Launched, Launched]:
            path, join = script(body), f"127.0.0.1:{free_port()}"
            first = launch(path, workers[0], hosts=2, join=join, **ENVIRON, **options)
            return first, launch(path, workers[1], hosts=2, join=join, **ENVIRON, **options)

        return start

    def test_ranks_over_uneven_hosts(self, both):
        names = [
            "RANK",
            "WORLD_SIZE",
            "LOCAL_RANK",
            "LOCAL_WORLD_SIZE",
            "GROUP_RANK",
            "GROUP_WORLD_SIZE",
            "PACELINE_STORE",
            "MASTER_PORT",
        ]
        ended = [
            launched.end()
            for launched in both(
                f"import json; print(json.dumps([os.environ[n] for n in {names}]))", (2, 1)
            )
        ]
        assert [code for code, _, _ in ended] == [0, 0], ended
        rows = sorted(
            json.loads(line.split(" ", 1)[1]) for _, out, _ in ended for line in out.splitlines()
        )
        assert [row[0] for row in rows] == ["0", "1", "2"] and {row[1] for row in rows} == {"3"}
        assert len({(row[6], row[7]) for row in rows}) == 1
        assert sorted((row[4], row[3]) for row in rows) in (
            [("0", "1"), ("1", "2"), ("1", "2")],
            [("0", "2"), ("0", "2"), ("1", "1")],
        )

    def test_ranks_in_turn(self, both):
        names = ["GROUP_RANK", "LOCAL_RANK", "RANK", "LOCAL_WORLD_SIZE"]
        options = {"placement": "round-robin"}
        ended = [
            launched.end()
            for launched in both(f"print(*[os.environ[n] for n in {names}])", (2, 2), **options)
        ]
        assert [code for code, _, _ in ended] == [0, 0], ended
        rows = sorted(line.split(" ", 1)[1] for _, out, _ in ended for line in out.splitlines())
        assert rows == ["0 0 0 2", "0 1 2 2", "1 0 1 2", "1 1 3 2"]
        # each host says at once what it starts, whom it has met, and how that ended
        for _, out, err in ended:
            ranks = ", ".join(sorted(line.split()[3] for line in out.splitlines()))
            own = [
                line
                for line in err.splitlines()
                if "paceline: " in line and "take turns" not in line and "waits" not in line
            ]
            assert [line.split()[1] for line in own] == [
                "starting",
                "joined",
                "2",
            ] and f"ranks {ranks} of them here" in own[1], err

    @pytest.mark.slow
    def test_workers_meet_in_the_store(self, job: Jobs):
        options = ("--hosts", "2", "--join", f"127.0.0.1:{free_port()}")
        ended = [
            each.end()
            for each in [job.run(MEETING, workers, *options, **ENVIRON) for workers in (2, 1)]
        ]
        assert [code for code, _, _ in ended] == [0, 0], ended
        assert {line.split(" ", 1)[1] for _, out, _ in ended for line in out.splitlines()} == {
            "0123456789abcdef 3 2"
        }

    def test_a_failure_ends_both_and_is_named_on_both(self, both):
        body = JOINED + (
            "if rank == 1: raise ValueError('boom')\ntime.sleep(0.1)\nraise "
            "WorkerLost('rank 1 is gone')"
        )
        ended = [launched.end() for launched in both(body)]
        assert [code for code, _, _ in ended] == [1, 1]
        for _, _, err in ended:
            lines = err.splitlines()
            assert (
                lines[-1].startswith("paceline: rank 1 on ")
                and "ValueError" in lines[-1]
                and lines[-2] == "[1] ValueError: boom"
            ), err

    def test_a_worker_that_dies_ends_both(self, both):
        ended = [
            launched.end()
            for launched in both("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(600)")
        ]
        assert [code for code, _, _ in ended] == [137, 137]

    @pytest.mark.slow
    def test_a_worker_that_leaves_without_a_word(self, both):
        ended = [
            launched.end()
            for launched in both(JOINED + "if rank == 1: os._exit(0)\ntime.sleep(600)")
        ]
        assert [code for code, _, _ in ended] == [1, 1]
        assert all(
            "rank 1 on" in err.splitlines()[-1] and "left in the middle" in err.splitlines()[-1]
            for _, _, err in ended
        )

    def test_hosts_may_end_at_different_times(self, both):
        assert [launched.end()[0] for launched in both("time.sleep(0.8 * rank)")] == [0, 0]

    def test_a_killed_launcher_ends_the_other_host(self, both, tmp_path):
        launched = both("import pathlib; pathlib.Path(f'ready{rank}').touch(); time.sleep(600)")
        wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
        launched[0].process.kill()
        code, _, err = launched[1].end()
        assert (
            code == 1 and f"paceline: host {socket.gethostname()} is gone" in err.splitlines()[-1]
        )

    def test_ctrl_c_on_one_host_ends_both(self, both, tmp_path):
        launched = both("import pathlib; pathlib.Path(f'ready{rank}').touch(); time.sleep(600)")
        wait_for(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)))
        launched[1].process.send_signal(signal.SIGINT)
        ended = [one.end() for one in launched]
        assert [code for code, _, _ in ended] == [130, 130]
        assert "was asked to end the job (SIGINT)" in ended[0][2]

    def test_wrong_secrets(self, script, launch):
        path, join = script("print('ran')"), f"127.0.0.1:{free_port()}"
        launched = [
            launch(path, 1, hosts=2, join=join, deadline=8.0, PACELINE_SECRET=f"{number}" * 20)
            for number in range(2)
        ]
        for code, out, err in (one.end() for one in launched):
            assert code == 2 and out == "" and "secret" in err
            assert len(err.splitlines()) <= 4  # one is what it starts, one may be for whom it waits

    def test_a_secret_file(self, script, launch, tmp_path: Path):
        file = tmp_path / "secret"
        file.write_text("0123456789abcdef")
        file.chmod(0o644)
        path, join = script("print('ran')"), f"127.0.0.1:{free_port()}"
        code, _, err = launch(path, 1, hosts=2, join=join, secret_file=str(file)).end()
        assert code == 2 and "chmod 600" in err
        file.chmod(0o600)
        launched = [launch(path, 1, hosts=2, join=join, secret_file=str(file)) for _ in range(2)]
        assert [one.end()[0] for one in launched] == [0, 0]

    def test_the_deadline_can_be_set(self, script, launch):
        code, _, err = launch(
            script(""), 1, hosts=2, join=f"127.0.0.1:{free_port()}", deadline=1.0, **ENVIRON
        ).end()
        assert code == 2 and "1 of 2 hosts came" in err

    @pytest.mark.parametrize(
        ("number", "asked"),
        [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "asked to end by SIGTERM")],
    )
    def test_a_signal_while_waiting(self, script, launch, number, asked):
        port = free_port()
        launched = launch(script(""), 1, hosts=2, join=f"127.0.0.1:{port}", **ENVIRON)
        wait_for(lambda: port in listening({launched.process.pid}))
        launched.process.send_signal(number)
        code, _, err = launched.end()
        assert (code, err.splitlines()[-1]) == (
            128 + number,
            f"paceline: {asked} before its workers started",
        )
