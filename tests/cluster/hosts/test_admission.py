"""Hosts that ask to be taken into a job that runs, over real connections."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

import pytest

from paceline.cluster import network
from paceline.cluster.hosts.admission import MeetingPoint
from paceline.cluster.hosts.elastic import ElasticPeers, connect_joining_host
from paceline.cluster.hosts.meeting import Meeting
from paceline.cluster.hosts.membership import HostSeat, View
from paceline.cluster.hosts.rendezvous import (
    Admission,
    FixedPeers,
    Offer,
    assemble_hosts,
    seek_admission,
)
from paceline.errors import DeadlineExceeded, PlaceError
from paceline.timings import DEFAULT_TIMINGS, MembershipTimings, Timings
from tests.harness.elastic_peers import SECRET, run
from tests.harness.jobs import free_port

RUN = '["runs/x", 7]'


class Running:
    """A job of one host that runs, and newcomers to it."""

    def __init__(self, point: tuple[str, int], timings: Timings = DEFAULT_TIMINGS) -> None:
        self.point, self._timings = point, timings
        self.all: list[ElasticPeers] = []
        self._threads = ThreadPoolExecutor(4)

    def start(self) -> None:
        """Its only launcher, as yet."""
        self.first = self.launcher(0, None)
        self.first.run_facts = RUN
        self.all.append(self.first)
        # it listens at the port of the meeting point, too
        run([self.first], lambda: len(self.first.list_descriptors()) == 2)

    def launcher(self, host: int, view: View | None) -> ElasticPeers:
        """A launcher of the job; its door is open."""
        listening = network.open_listener("127.0.0.1")
        facts = {"name": f"h{host}", "address": "127.0.0.1", "port": listening.getsockname()[1]}
        view = view or View(1, (HostSeat(0, (10, 11), facts),), 1)
        return ElasticPeers(
            host,
            view,
            connect_joining_host(view, host, SECRET),
            MeetingPoint(listening, SECRET, self.point, timings=self._timings),
            timings=self._timings,
        )

    def meeting(self, *, deadline: float = 8.0, hosts: int = 1, elastic: bool = True) -> Meeting:
        """What a newcomer brings."""
        self.listening = network.open_listener("127.0.0.1")
        offer = Offer(
            "new",
            2,
            "127.0.0.1",
            "m",
            1,
            2,
            "block",
            (20, 21) if elastic else (),
            self.listening.getsockname()[1],
        )
        return Meeting(self.point, SECRET, offer, hosts, None, deadline)

    def asks(self, meeting: Meeting) -> Future[FixedPeers | Admission]:
        return self._threads.submit(assemble_hosts, meeting)

    def until(self, done: Future[FixedPeers | Admission]) -> None:
        run(self.all, done.done)

    def enters(self, place: Admission) -> ElasticPeers:
        door = MeetingPoint(self.listening, SECRET, self.point)
        calling = self._threads.submit(connect_joining_host, place.view, place.host, SECRET)
        run(self.all, calling.done)
        self.all.append(ElasticPeers(place.host, place.view, calling.result(), door))
        return self.all[-1]

    def close(self) -> None:
        for each in self.all:
            each.close()
        self._threads.shutdown()


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Iterator[Running]:
    found = Running(("127.0.0.1", free_port()), getattr(request, "param", DEFAULT_TIMINGS))
    found.start()
    yield found
    found.close()


def test_a_newcomer_is_told_of_a_view_that_has_it(job: Running) -> None:
    asked = job.asks(job.meeting())
    job.until(asked)
    place = asked.result()
    assert isinstance(place, Admission)
    assert (place.host, place.run, place.view.hosts) == (1, RUN, (0, 1)) and place.view.workers == (
        10,
        11,
    )
    second = job.enters(place)
    second.report_new_workers([20])
    run(job.all, lambda: job.first.view.workers == second.view.workers == (10, 11, 20))


def test_it_waits_until_the_run_can_be_joined(job: Running) -> None:
    job.first.run_facts = None
    asked = job.asks(job.meeting())
    with pytest.raises(AssertionError):
        run(job.all, asked.done, 1.0)
    job.first.run_facts = RUN
    job.until(asked)
    assert isinstance(asked.result(), Admission)


@pytest.mark.parametrize(
    "job", [Timings(membership=MembershipTimings(call=0.3))], indirect=True, ids=["calls soon"]
)
def test_who_is_taken_in_and_never_calls_is_left_out_again(job: Running) -> None:
    job.until(job.asks(job.meeting()))
    run(job.all, lambda: job.first.view.hosts == (0,))
    assert not job.first.membership.is_stranded


@pytest.mark.parametrize("why", ["closing", "other options"])
def test_who_cannot_take_part_is_told_why(job: Running, why: str) -> None:
    if why == "closing":
        job.first.tell_closing()
    asked = job.asks(job.meeting(elastic=why == "closing"))
    job.until(asked)
    with pytest.raises(PlaceError, match="at its end" if why == "closing" else "--min-workers"):
        asked.result()
    assert job.first.view.number == 1


def test_a_stranger_gets_nowhere(job: Running) -> None:
    asked = job.asks(replace(job.meeting(), secret=b"t" * 32))
    job.until(asked)
    assert asked.exception() is not None and job.first.view.number == 1


@pytest.mark.slow
def test_who_waits_at_the_meeting_point_is_invited() -> None:
    """Nobody of the job listens there: its host was gone when the newcomer came."""
    job = Running(("127.0.0.2", free_port()), Timings(membership=MembershipTimings(visit=0.1)))
    asked = job.asks(job.meeting(hosts=2))
    time.sleep(0.5)  # it listens at the meeting point by now; if not, the job takes it in there
    job.start()
    job.until(asked)
    place = asked.result()
    assert isinstance(place, Admission) and place.host == 1
    job.close()


def test_nobody_answers(job: Running) -> None:
    with pytest.raises(DeadlineExceeded, match=r"127.0.0.1:1\b"):
        seek_admission([("127.0.0.1", 1)], job.meeting(deadline=0.5))
