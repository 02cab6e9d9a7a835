"""Launchers that agree on who takes part, over real connections."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from paceline.cluster import network
from paceline.cluster.hosts.elastic import ElasticPeers, connect_all_launchers
from paceline.cluster.hosts.membership import HostSeat, View
from paceline.cluster.hosts.peers import Failure, LateCall
from paceline.cluster.hosts.rendezvous import Offer
from paceline.errors import DeadlineExceeded
from paceline.timings import DEFAULT_TIMINGS, MembershipTimings, Timings
from tests.harness.elastic_peers import SECRET, run


def meet(
    size: int,
    *,
    absent: int | None = None,
    seconds: float = 60.0,
    timings: Timings = DEFAULT_TIMINGS,
) -> list[ElasticPeers | Exception]:
    """The launchers of so many hosts with two workers each, connected; or what went wrong on
    each.
    """
    sockets = [network.open_listener("127.0.0.1") for _ in range(size)]
    offers = [
        Offer(f"h{n}", 2, "127.0.0.1", "m", 1, 2, "block", (10 * n, 10 * n + 1), s.getsockname()[1])
        for n, s in enumerate(sockets)
    ]
    view = View(1, tuple(HostSeat(n, o.numbers, o.seat_facts) for n, o in enumerate(offers)), size)
    found: list[ElasticPeers | Exception] = [RuntimeError("absent")] * size

    if absent is not None:
        sockets[absent].close()

    def come(host: int) -> None:
        try:
            channels = connect_all_launchers(offers, host, sockets[host], SECRET, seconds)
            found[host] = ElasticPeers(host, view, channels, timings=timings)
        except Exception as error:  # noqa: BLE001
            found[host] = error

    threads = [
        threading.Thread(target=come, args=(host,)) for host in range(size) if host != absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in sockets:
        each.close()
    return found


PATIENT = Timings(membership=MembershipTimings(silence=1000.0))


@pytest.fixture
def three(request: pytest.FixtureRequest) -> Iterator[list[ElasticPeers]]:
    found = [
        each
        for each in meet(3, timings=getattr(request, "param", PATIENT))
        if isinstance(each, ElasticPeers)
    ]
    assert len(found) == 3
    yield found
    for each in found:
        each.close()


def workers(assembly: ElasticPeers) -> tuple[int, ...]:
    return assembly.rosters[-1].workers if assembly.rosters else ()


def test_all_are_told_of_a_worker_that_died_and_of_one_that_came(three: list[ElasticPeers]) -> None:
    three[2].report_lost_workers([20])
    run(three, lambda: all(workers(each) == (0, 1, 10, 11, 21) for each in three))
    three[1].report_new_workers([15])
    run(three, lambda: all(workers(each) == (0, 1, 10, 11, 15, 21) for each in three))
    assert [[roster.number for roster in each.rosters] for each in three] == [[2, 3]] * 3
    assert not any(roster.broken for each in three for roster in each.rosters)


def test_two_hosts_lose_workers_at_once(three: list[ElasticPeers]) -> None:
    three[0].report_lost_workers([0])
    three[2].report_lost_workers([21])
    run(three, lambda: all(workers(each) == (1, 10, 11, 20) for each in three))


@pytest.mark.parametrize("gone", [0, 2])
def test_the_others_go_on_when_a_launcher_hangs_up(three: list[ElasticPeers], gone: int) -> None:
    rest = [each for host, each in enumerate(three) if host != gone]
    three[gone].close()
    # long before it would be missed
    run(rest, lambda: all(len(workers(each)) == 4 for each in rest))
    assert all(each.view.find_seat(gone) is None for each in rest)


@pytest.mark.slow
@pytest.mark.parametrize("leavers", [(0, 1), (1, 0), (2, 0)])
def test_hosts_that_leave_are_not_missed(
    three: list[ElasticPeers], leavers: tuple[int, int]
) -> None:
    """The last host goes on alone, though it is less than half of what there was before, whoever
    was the first.
    """
    left = list(three)
    for host in leavers:
        three[host].announce_leaving()
        run(left, lambda host=host: three[host].has_parted)
        three[host].close()
        left.remove(three[host])
    run(left, lambda: left[0].view.hosts == (3 - sum(leavers),))
    assert left[0].verdict is None and left[0].has_parted


@pytest.mark.parametrize(
    "three",
    [Timings(membership=MembershipTimings(beat=0.1, silence=1.0))],
    indirect=True,
    ids=["short"],
)
def test_a_launcher_that_says_nothing_is_left_out(three: list[ElasticPeers]) -> None:
    heard = min(each._channels[2].heard_at for each in three[:2])
    run(three[:2], lambda: all(workers(each) == (0, 1, 10, 11) for each in three[:2]))
    assert time.monotonic() - heard >= 1.0


def test_one_that_waited_for_the_last_one_is_not(three: list[ElasticPeers]) -> None:
    for channel in three[0]._channels.values():
        channel.heard_at -= 2000.0  # nothing is said while hosts wait until all are connected
    peers = ElasticPeers(0, three[0].view, three[0]._channels, timings=PATIENT)
    peers.run_timers()
    assert peers.verdict is None and not peers.membership.is_stranded


def test_who_is_cut_off_stops_and_says_so(three: list[ElasticPeers]) -> None:
    for channel in three[2]._channels.values():
        channel.connection.shutdown(socket.SHUT_RDWR)
    run(
        three,
        lambda: three[2].verdict is not None and all(len(workers(each)) == 4 for each in three[:2]),
    )
    verdict = three[2].verdict
    assert verdict is not None and verdict.summary_line() == (
        "paceline: host h2 was cut off from the other hosts: fewer than half of the hosts are "
        "within reach, so it stops here"
    )
    assert three[0].verdict is None and three[1].verdict is None


def test_a_new_view_for_those_whose_connections_broke(three: list[ElasticPeers]) -> None:
    three[1].request_renewal(1)
    run(three, lambda: all(each.rosters for each in three))
    assert [
        (each.rosters[-1].number, each.rosters[-1].broken, len(each.rosters[-1].workers))
        for each in three
    ] == [(2, True, 6)] * 3
    three[1].request_renewal(1)  # too late: there is a new one
    began = time.monotonic()
    run(three, lambda: time.monotonic() - began > 0.5)
    assert {each.view.number for each in three} == {2}


def test_the_job_is_over_when_all_hosts_that_are_left_have_ended(three: list[ElasticPeers]) -> None:
    three[2].close()
    run(three[:2], lambda: all(len(workers(each)) == 4 for each in three[:2]))
    three[0].tell_finished()
    assert not three[0].all_finished
    three[1].tell_finished()
    run(three[:2], lambda: three[0].all_finished and three[1].all_finished)


def test_a_failure_and_a_signal_reach_all(three: list[ElasticPeers]) -> None:
    failure = Failure(4, "h2", 3, "failed with exit code 3")
    three[2].tell_failed(replace(failure, tail="x" * 20_000))
    three[1].tell_stopped(15)
    run(
        three,
        lambda: (
            all(each.verdict is not None for each in three) and three[0].stop_request == (15, "h1")
        ),
    )
    assert (
        three[0].verdict is not None and three[0].verdict.summary_line() == failure.summary_line()
    )


def test_a_call_in_which_workers_wait_reaches_all(three: list[ElasticPeers]) -> None:
    late = LateCall(40, "backward of step 20", True)
    three[1].tell_late(late)
    run(three, lambda: all(each.late_calls == {40: late} for each in three))


def test_who_does_not_come_is_named() -> None:
    found = meet(3, absent=1, seconds=1.0)
    assert isinstance(found[0], DeadlineExceeded) and "h1 did not call h0" in str(found[0])
    assert isinstance(found[2], DeadlineExceeded)
