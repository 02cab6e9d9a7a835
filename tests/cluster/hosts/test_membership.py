"""Views are agreed by majorities, whatever the network does and whoever dies; checked on
thousands of random courses of events.
"""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import pytest

from paceline.cluster.hosts.membership import HostSeat, Membership, View


def view(*hosts: tuple[int, ...], number: int = 0) -> View:
    """A view whose hosts, numbered from 0, have these workers."""
    return View(
        number, tuple(HostSeat(host, workers) for host, workers in enumerate(hosts)), len(hosts)
    )


class Net:
    """Hosts in one process; the network between them loses, doubles, delays and reorders as it
    is told, and can be cut.
    """

    def __init__(
        self,
        start: View,
        seed: int = 0,
        *,
        loss: float = 0.0,
        twice: float = 0.0,
        delay: float = 0.01,
    ) -> None:
        self.chance = random.Random(seed)
        self.loss, self.twice, self.delay = loss, twice, delay
        self.now = 0.0
        self.hosts = {host: Membership(host, start) for host in start.hosts}
        self.dead: set[int] = set()
        self.cut: set[frozenset[int]] = set()
        self.known: dict[int, str] = {start.number: json.dumps(start.dump())}
        self._flying: list[tuple[float, int, int, int, str]] = []
        self._count = itertools.count()

    def reaches(self, one: int, other: int) -> bool:
        return (
            one not in self.dead
            and other not in self.dead
            and frozenset((one, other)) not in self.cut
        )

    def run(self, seconds: float, tick: float = 0.05) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += tick
            for host in self.living:
                self.hosts[host].run_timers(self.now)
            self.carry()

    def carry(self) -> None:
        """Deliver what is due by now."""
        self._collect()
        while due := [message for message in self._flying if message[0] <= self.now]:
            self._flying = [message for message in self._flying if message[0] > self.now]
            for _, _, sender, to, text in sorted(due):
                if self.reaches(sender, to) and to in self.hosts:
                    self.hosts[to].handle_message(sender, json.loads(text), self.now)
            self._collect()

    def _collect(self) -> None:
        for host, member in self.hosts.items():
            for to, message in member.outbox if host not in self.dead else ():
                for _ in range(2 if self.chance.random() < self.twice else 1):
                    if self.chance.random() >= self.loss:
                        late = self.now + self.chance.random() * self.delay
                        self._flying.append(
                            (late, next(self._count), host, to, json.dumps(message))
                        )
            member.outbox.clear()
            for found in member.decided_views:
                text = json.dumps(found.dump())
                assert self.known.setdefault(found.number, text) == text, (
                    f"view {found.number} was decided twice"
                )
            member.decided_views.clear()

    @property
    def living(self) -> list[int]:
        return [host for host in self.hosts if host not in self.dead]

    def kill(self, host: int) -> None:
        self.dead.add(host)

    def notice(self) -> None:
        """Everybody finds out who can't be heard, and who can."""
        for one in self.living:
            for other in self.hosts:
                if one != other:
                    if self.reaches(one, other):
                        self.hosts[one].note_heard_host(other)
                    else:
                        self.hosts[one].note_silent_host(other, self.now)

    def welcome(self) -> None:
        """Who joins begins with a view that has it."""
        for found in list(self.views().values()):
            for seat in found.seats:
                if seat.host not in self.hosts:
                    self.hosts[seat.host] = Membership(seat.host, found, now=self.now)

    def views(self) -> dict[int, View]:
        return {host: self.hosts[host].view for host in self.living}


def test_one_host_decides_at_once() -> None:
    member = Membership(0, view((0, 1, 2)))
    member.note_lost_workers([1], 0.0)
    assert member.view == View(1, (HostSeat(0, (0, 2)),), 1) and not member.outbox


def test_a_worker_dies() -> None:
    net = Net(view((0, 1), (2, 3), (4, 5)))
    net.hosts[2].note_lost_workers([4], net.now)
    net.run(0.5)
    assert set(net.views().values()) == {
        View(1, (HostSeat(0, (0, 1)), HostSeat(1, (2, 3)), HostSeat(2, (5,))), 3)
    }


def test_it_takes_two_rounds_of_messages() -> None:
    """wish, accept, accepted, decided: no timer is waited for."""
    net = Net(view((0,), (1,), (2,)), delay=0.0)
    net.hosts[1].note_lost_workers([1], net.now)
    net.carry()
    assert {found.workers for found in net.views().values()} == {(0, 2)} and net.now == 0.0


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_a_host_dies(gone: int) -> None:
    net = Net(view((0, 1), (2, 3), (4, 5)))
    net.kill(gone)
    net.notice()
    net.run(1.0)
    found = set(net.views().values())
    assert len(found) == 1 and found.pop().hosts == tuple(host for host in range(3) if host != gone)


def test_a_minority_is_stranded_and_learns_the_truth() -> None:
    net = Net(view((0,), (1,), (2,), (3,), (4,)))
    net.cut = {frozenset((one, other)) for one in (0, 1) for other in (2, 3, 4)}
    net.notice()
    net.run(2.0)
    assert all(net.hosts[host].is_stranded and net.hosts[host].view.number == 0 for host in (0, 1))
    assert all(
        net.hosts[host].view.hosts == (2, 3, 4) and not net.hosts[host].is_stranded
        for host in (2, 3, 4)
    )
    net.cut = set()
    net.notice()
    net.run(2.0)
    assert all(net.hosts[host].is_expelled for host in (0, 1))


def test_of_two_halves_the_one_with_the_first_host_goes_on() -> None:
    net = Net(view((0,), (1,), (2,), (3,)))
    net.cut = {frozenset((one, other)) for one in (0, 1) for other in (2, 3)}
    net.notice()
    net.run(2.0)
    assert net.hosts[0].view.hosts == net.hosts[1].view.hosts == (0, 1)
    assert net.hosts[2].is_stranded and net.hosts[3].is_stranded and net.hosts[2].view.number == 0


@pytest.mark.parametrize("leavers", [(0,), (1,), (0, 1), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("seed", range(10))
def test_hosts_leave_until_one_is_left(leavers: tuple[int, ...], seed: int) -> None:
    """Also the first of two, and several at once: half of them isn't heard afterwards, and
    doesn't have to be.
    """
    net = Net(view((1,), (2,), *[(3,)] * (max(leavers) > 1)), seed, loss=0.2, twice=0.1, delay=0.1)
    for host in leavers:
        net.hosts[host].announce_leaving(net.now)
    net.run(20)
    staying = tuple(host for host in net.hosts if host not in leavers)
    for host, member in net.hosts.items():
        assert member.is_expelled == (host in leavers) and (
            host in leavers or member.view.hosts == staying
        ), (host, member.view)
    for host in leavers:
        net.kill(host)
    net.notice()
    assert not any(net.hosts[host].is_stranded for host in staying)


def test_workers_and_hosts_come() -> None:
    net = Net(view((0, 1), (2, 3)))
    net.hosts[1].note_lost_workers([2], net.now)
    net.run(0.3)
    net.hosts[1].note_new_workers([7], net.now)
    net.hosts[0].note_joining_host("abc", [8, 9], {"address": "10.0.0.3"}, net.now)
    net.run(0.5)
    last = net.hosts[0].view
    assert net.hosts[1].view == last
    assert (
        last.seats == (HostSeat(0, (0, 1)), HostSeat(1, (3, 7)), HostSeat(2, (8, 9)))
        and last.next_host == 3
    )
    assert last.seats[2].facts == {"address": "10.0.0.3", "word": "abc"}
    assert not net.hosts[0]._wishes and not net.hosts[1]._wishes


def test_who_comes_and_dies_at_once_is_left_out() -> None:
    net = Net(view((0,), (1,)))
    net.hosts[1].note_new_workers([5], net.now)
    net.hosts[1].note_lost_workers([5], net.now)
    net.run(0.5)
    assert net.hosts[0].view.workers == (0, 1) == net.hosts[1].view.workers
    net.run(2.0)
    assert net.hosts[0].view.number == net.hosts[1].view.number < 4, "it comes to rest"


def test_a_leader_that_dies_in_the_middle_of_its_ballot_has_decided_or_not() -> None:
    """The next leader has to find out: cut at each message in turn."""
    outcomes = set()
    for last in range(8):
        net = Net(view((0,), (1,), (2,)), delay=0.0)
        net.hosts[1].note_lost_workers([1], net.now)
        for _ in range(last):  # one message at a time
            net._collect()
            if net._flying:
                _, _, sender, to, text = net._flying.pop(0)
                net.hosts[to].handle_message(sender, json.loads(text), net.now)
        net._collect()
        net.kill(0)
        net.notice()
        net.run(2.0)
        found = set(net.views().values())
        assert len(found) == 1 and found.pop().workers == (2,)
        outcomes.add(max(net.known))
    assert len(outcomes) > 1, "in some the first ballot was decided, in others not"


@pytest.mark.parametrize("seed", range(40))
def test_any_course_of_events(seed: int) -> None:
    """Messages get lost and doubled, links are cut and mended, hosts and workers die and come;
    no number is decided twice, and when the network is quiet again all that can be are in one view,
    without the dead.
    """
    chance = random.Random(seed)
    count = chance.randint(2, 5)
    numbers = itertools.count(2 * count)
    net = Net(
        view(*((2 * host, 2 * host + 1) for host in range(count))),
        seed,
        loss=0.2,
        twice=0.2,
        delay=0.4,
    )
    buried: set[int] = set()
    for _ in range(chance.randint(5, 40)):
        event = chance.random()
        alive = [host for host in net.living if not net.hosts[host].is_stranded]
        host = chance.choice(alive or net.living)
        member = net.hosts[host]
        if event < 0.3:
            mine = member.view.find_seat(host)
            if mine is not None and mine.workers:
                dying = chance.choice(mine.workers)
                buried.add(dying)
                member.note_lost_workers([dying], net.now)
        elif event < 0.45:
            member.note_new_workers([next(numbers)], net.now)
        elif event < 0.55:
            member.note_joining_host(f"word{next(numbers)}", [next(numbers)], {}, net.now)
        elif event < 0.75:
            net.cut = {
                frozenset(pair)
                for pair in itertools.combinations(net.hosts, 2)
                if chance.random() < 0.3
            }
        elif event < 0.8 and len(alive) > 2:
            net.kill(host)
        if chance.random() < 0.6:
            net.notice()
        net.run(chance.random())
        net.welcome()
    net.cut, net.loss = set(), 0.0
    for _ in range(10):
        net.notice()
        net.run(2.0)
        net.welcome()
    last = max((net.hosts[host].view for host in net.living), key=lambda found: found.number)
    reachable = set(last.hosts) & set(net.living)
    if not last.has_majority(reachable):
        return  # too many have died: nobody may go on, and nobody did
    assert all(net.hosts[host].view == last or net.hosts[host].is_stranded for host in net.living)
    assert all(
        net.hosts[host].view == last and not net.hosts[host].is_stranded for host in reachable
    )
    assert set(last.hosts) <= set(net.living)
    assert not buried & set(last.workers)


def test_a_mutant_that_needs_no_majority_is_found(monkeypatch: Any) -> None:
    monkeypatch.setattr(View, "has_majority", lambda self, hosts: True)
    with pytest.raises(AssertionError, match="decided twice"):
        for seed in range(40):
            test_any_course_of_events(seed)


@pytest.mark.parametrize("hosts", range(1, 9))
def test_no_two_sides_of_a_cut_may_both_decide(hosts: int) -> None:
    whole = view(*((host,) for host in range(hosts)))
    for size in range(hosts + 1):
        for side in itertools.combinations(range(hosts), size):
            assert not (
                whole.has_majority(side) and whole.has_majority(set(range(hosts)) - set(side))
            )
            assert whole.has_majority(side) or whole.has_majority(set(range(hosts)) - set(side))


def test_a_view_is_its_text() -> None:
    found = View(3, (HostSeat(1, (4, 5), {"address": "10.0.0.2"}), HostSeat(4, ())), 6)
    assert View.load(json.loads(json.dumps(found.dump()))) == found
    assert (
        found.workers == (4, 5)
        and found.find_seat(4) == HostSeat(4, ())
        and found.find_seat(0) is None
    )
