"""The launchers of a job of fixed size: what one of them says reaches all, and one that is gone
is named; they may meet again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.cluster import network
from paceline.cluster.discover import JobStart
from paceline.cluster.hosts import channel, fixed
from paceline.cluster.hosts.fixed import FixedPeers
from paceline.cluster.hosts.peers import Failure, LateCall
from paceline.cluster.hosts.restart_messages import (
    HostReport,
    JobStopped,
    Links,
    RestartState,
    Sequel,
)
from paceline.errors import DeadlineExceeded, Mismatch
from paceline.timings import RendezvousTimings, Timings
from tests.harness.clocks import Clock
from tests.harness.jobs import free_port
from tests.harness.meetings import gather, invitation, turn


@pytest.fixture
def councils() -> Iterator[Callable[..., list[FixedPeers]]]:
    """Councils of as many hosts as names are given; the first one listens."""
    made: list[FixedPeers] = []

    def make(*names: str, **changes: Any) -> list[FixedPeers]:
        port = free_port()
        meetings = [
            invitation(name, port, hosts=len(names), host_rank=number, **changes)
            for number, name in enumerate(names)
        ]
        made.extend(future.result() for future in gather(*meetings, led=True))
        return made[-len(names) :]

    yield make
    for council in made:
        council.close()


class TestCouncil:
    def test_the_end_is_told_to_all(self, councils):
        members = councils("a", "b", "c")
        members[2].tell_failed(Failure(5, "c", 3, "failed with exit code 3", tail="x" * 100_000))
        turn(*members, until=lambda: all(council.verdict for council in members))
        assert {council.verdict.rank for council in members} == {5}
        assert len(members[0].verdict.tail) <= 8000

    def test_the_earliest_cause_wins(self, councils):
        members = councils("a", "b", "c")
        members[1].tell_failed(Failure(1, "b", 1, "lost a worker", is_echo=True, age=9.0))
        members[0].tell_failed(Failure(0, "a", 1, "late", age=0.0))
        members[2].tell_failed(Failure(2, "c", 1, "early", age=1.0))
        turn(*members, until=lambda: all(council.verdict for council in members))
        assert {council.verdict.words for council in members} == {"early"}

    def test_all_wait_for_the_last(self, councils):
        members = councils("a", "b")
        members[1].tell_finished()
        turn(*members, until=lambda: members[0]._finished_hosts == {1})
        assert not any(council.all_finished for council in members)
        members[0].tell_finished()
        turn(*members, until=lambda: all(council.all_finished for council in members))
        members[0].close()
        turn(members[1], until=lambda: not members[1].list_descriptors())
        assert members[1].verdict is None

    @pytest.mark.parametrize("gone", [0, 1])
    def test_a_launcher_that_is_gone_is_named(self, councils, gone):
        members = councils("a", "b", "c")
        for descriptor in members[gone].list_descriptors():
            os.close(os.dup(descriptor))
        members[gone].close()
        others = [council for council in members if council is not members[gone]]
        turn(*others, until=lambda: all(council.verdict for council in others))
        assert {council.verdict.summary_line().split(" is gone")[0] for council in others} == {
            f"paceline: host {'ab'[gone]}"
        }

    def test_a_silent_launcher_is_named(self, councils):
        members = councils("a", "b", timings=Timings(rendezvous=RendezvousTimings(silence=0.3)))
        turn(members[0], until=lambda: members[0].verdict is not None)
        assert members[0].verdict.host == "b" and "nothing was heard" in members[0].verdict.words

    def test_one_that_waited_for_the_last_one_is_not(self, councils):
        members = councils("a", "b", "c")
        for link in members[0]._channels.values():
            # nothing is said while hosts wait to be as many as they have to be
            link.heard_at -= 1000.0
        peers = FixedPeers(members[0].offers, members[0].host_rank, members[0]._channels, server=0)
        peers.run_timers()
        assert len(peers.list_descriptors()) == 2

    def test_heartbeats_keep_it_alive(self, councils, monkeypatch):
        members, clock = (
            councils(
                "a", "b", timings=Timings(rendezvous=RendezvousTimings(beat=0.05, silence=2.0))
            ),
            Clock(),
        )
        for module in (fixed, channel):
            monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep))
        links = [link for council in members for link in council._channels.values()]
        for link in links:
            link.count_silence()
        for _ in range(25):
            clock.now += 0.1
            turn(*members, until=lambda: all(link.heard_at == clock.now for link in links))
        assert not any(council.verdict for council in members)

    @pytest.mark.parametrize("asked", [0, 1])
    def test_a_stop_reaches_all(self, councils, asked):
        members = councils("a", "b", "c")
        members[asked].tell_stopped(signal.SIGTERM)
        others = [council for council in members if council is not members[asked]]
        turn(*members, until=lambda: all(council.stop_request for council in others))
        assert {council.stop_request for council in others} == {(signal.SIGTERM, "ab"[asked])}

    @pytest.mark.parametrize("teller", [0, 1])
    def test_a_call_in_which_workers_wait_reaches_all(self, councils, teller):
        members = councils("a", "b", "c")
        late = LateCall(40, "backward of step 20", False)
        members[teller].tell_late(late)
        turn(*members, until=lambda: all(council.late_calls == {40: late} for council in members))


class TestRestarts:
    """What follows on a failure, and the next meeting."""

    AGAIN = Sequel(
        "all start again",
        RestartState(3, JobStart("runs/x", 7, 1.5, ((2.0, "rank 1 was killed"),)), ("digest",)),
    )

    def kept(self, members: list[FixedPeers], sequel: Sequel) -> list[Links]:
        """Let all end with this sequel, and return the connections that are left."""
        for number, council in enumerate(members):
            council.tell_ended(HostReport(folder=f"{number}", runs=1))
        turn(*members, until=lambda: members[0].host_reports is not None)
        assert {number: report.folder for number, report in members[0].host_reports.items()} == {
            number: f"{number}" for number in range(len(members))
        }
        assert all(council.host_reports is None for council in members[1:])
        members[0].tell_sequel(sequel)
        turn(*members, until=lambda: all(council.sequel == sequel for council in members))
        for council in members:
            council.close()
        return [council.hand_over_links() for council in members]

    def test_one_decides_for_all_that_are_there(self, councils):
        members = councils("a", "b", "c")
        members[2].tell_ended(HostReport())
        members[0].tell_ended(HostReport())
        turn(*members, until=lambda: 2 in members[0]._host_reports)
        assert members[0].host_reports is None
        members[1].close()
        turn(members[0], members[2], until=lambda: members[0].host_reports is not None)
        assert {*members[0].host_reports} == {0, 2}

    def test_each_decides_if_that_one_is_gone(self, councils):
        members = councils("a", "b", "c")
        members[1].tell_ended(HostReport())
        assert members[1].host_reports is None
        members[0].close()
        turn(*members[1:], until=lambda: members[1].host_reports is not None)
        assert {*members[1].host_reports} == {1} and members[2].host_reports is None

    def test_connections_stay_where_the_job_starts_again(self, councils):
        links = self.kept(councils("a", "b", "c"), self.AGAIN)
        assert [{*each.channels} for each in links] == [{1, 2}, {0}, {0}] and not any(
            each.is_host_missing for each in links
        )
        for each in links:
            each.close()
        assert all(each.is_host_missing for each in links)

    def test_nothing_stays_where_it_doesnt(self, councils):
        assert not any(each.channels for each in self.kept(councils("a", "b"), Sequel("")))
        stopped = councils("a", "b")
        stopped[0].sequel = self.AGAIN
        stopped[0].tell_stopped(signal.SIGTERM)
        stopped[0].close()
        turn(stopped[1], until=lambda: stopped[1].stop_request is not None)
        assert not stopped[0].hand_over_links().channels

    def test_hosts_meet_again_and_keep_their_numbers(self, councils):
        """One without connections comes in the place of the second; all know what the latest
        knows.
        """
        links, port = self.kept(councils("a", "b", "c"), self.AGAIN), free_port()
        links[1].close()
        states = [RestartState(3), RestartState(3), self.AGAIN.state]
        known = [links[0], None, links[2]]
        wishes = [0, None, 2]
        meetings = [
            invitation(name, port, hosts=3, links=link, restarts=state, host_rank=wish)
            for name, link, state, wish in zip("axc", known, states, wishes, strict=True)
        ]
        members = [future.result() for future in gather(*meetings)]
        try:
            assert [council.host_rank for council in members] == [0, 1, 2]
            assert all(
                [offer.name for offer in council.offers] == ["a", "x", "c"] for council in members
            )
            assert all(council.state == self.AGAIN.state for council in members)
        finally:
            for council in members:
                council.close()

    def test_another_one_listens_if_the_first_is_gone(self, councils):
        links, port = self.kept(councils("a", "b", "c"), self.AGAIN), free_port()
        links[0].close()
        meetings = [
            invitation(name, port, hosts=2, links=link, host_rank=n)
            for n, (name, link) in enumerate(zip("bc", links[1:], strict=True))
        ]
        members = [future.result() for future in gather(*meetings)]
        assert [[offer.name for offer in council.offers] for council in members] == [["b", "c"]] * 2
        for council in members:
            council.close()

    @pytest.mark.parametrize("asked", [0, 1, 2])
    def test_a_stop_reaches_those_who_meet(self, councils, asked):
        links, port = self.kept(councils("a", "b", "c"), self.AGAIN), free_port()
        links[asked].stop_job(JobStopped(signal.SIGTERM, "abc"[asked]), 5.0)
        others = [
            invitation(name, port, hosts=3, links=link, deadline=60.0)
            for name, link in zip("abc", links, strict=True)
            if link is not links[asked]
        ]
        for future in gather(*others if asked else others[:1]):
            stop = future.exception()
            assert isinstance(stop, JobStopped) and (stop.signum, stop.host, stop.is_here) == (
                signal.SIGTERM,
                "abc"[asked],
                False,
            )

    def test_a_stop_reaches_those_who_find_the_port_in_use(self, councils):
        """The first one would go to whoever listens there, and hang up on the others: it tells
        them of the stop before.
        """
        links, port = self.kept(councils("a", "b", "c"), self.AGAIN), free_port()
        links[2].stop_job(JobStopped(signal.SIGTERM, "c"), 5.0)
        others = [
            invitation(name, port, hosts=3, links=link, deadline=60.0)
            for name, link in zip("ab", links[:2], strict=True)
        ]
        with network.open_listener("127.0.0.1", port):
            for future in gather(*others):
                stop = future.exception()
                assert isinstance(stop, JobStopped) and (stop.signum, stop.host) == (
                    signal.SIGTERM,
                    "c",
                )

    def test_one_that_gives_up_says_so(self, councils):
        links, port = self.kept(councils("a", "b"), self.AGAIN), free_port()
        meetings = [
            invitation(name, port, hosts=3, links=link, deadline=seconds)
            for name, link, seconds in zip("ab", links, (0.3, 60.0), strict=True)
        ]
        for future in gather(*meetings):
            assert isinstance(future.exception(), DeadlineExceeded) and "of 3 hosts came" in str(
                future.exception()
            )

    def test_different_restarts(self):
        port = free_port()
        meetings = [
            invitation(name, port, restarts=state)
            for name, state in (("a", RestartState(2)), ("b", None))
        ]
        for future in gather(*meetings):
            assert isinstance(future.exception(), Mismatch) and "--restarts 0" in str(
                future.exception()
            )
            assert "--restarts 2" in str(future.exception())
