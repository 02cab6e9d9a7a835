"""Hosts that come to a run that trains already: with the command that started it, and after they
were cut off from it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest

from paceline.timings import DEFAULT_TIMINGS
from tests.harness.jobs import Jobs, wait_for
from tests.harness.joining_hosts import EPOCHS, Hosts, kill
from tests.harness.survivors import Outcome, check, trains


@pytest.fixture
def hosts(job: Jobs) -> Hosts:
    return Hosts(job)


@pytest.mark.soak
def test_a_new_host_comes_by_the_same_line(hosts: Hosts, alone: Callable[..., Outcome]) -> None:
    first = hosts.come()
    trains(first, hosts.out, 2)
    second = hosts.come()
    trains(second, hosts.out, 4)
    found = hosts.ended(first, second)
    check(found, alone(epochs=EPOCHS))
    assert found.size == 4


@pytest.mark.slow
def test_hosts_come_and_go_until_none_of_the_first_is_left(
    hosts: Hosts, alone: Callable[..., Outcome]
) -> None:
    """Also the one that owned the meeting point: others listen there then."""
    launched = [hosts.come()]
    trains(launched[0], hosts.out, 2)
    for count in (4, 6):
        launched.append(hosts.come())
        trains(launched[-1], hosts.out, count)
    kill(launched[0])
    hosts.until_met()
    launched.append(hosts.come())
    trains(launched[-1], hosts.out, 8)
    found = hosts.ended(*launched[1:])
    check(found, alone(epochs=EPOCHS))
    assert found.size == 6


@pytest.mark.slow
def test_a_host_that_was_cut_off_comes_back(hosts: Hosts, alone: Callable[..., Outcome]) -> None:
    """Its launcher is stopped for so long that the others go on without it."""
    hosts.silence = DEFAULT_TIMINGS.membership.silence
    launched = [hosts.come(3) for _ in range(3)]
    trains(launched[0], hosts.out, 6)
    launched[2].process.send_signal(signal.SIGSTOP)
    wait_for(lambda: hosts.events() > 0)  # the others have gone on
    launched[2].process.send_signal(signal.SIGCONT)
    trains(launched[2], hosts.out, 8)
    found = hosts.ended(*launched)
    check(found, alone(epochs=EPOCHS))
    assert found.size == 6


@pytest.mark.slow
def test_a_host_with_another_model_is_refused_and_the_others_go_on(
    hosts: Hosts, alone: Callable[..., Outcome]
) -> None:
    first = hosts.come()
    trains(first, hosts.out, 2)
    second = hosts.come(model="model = nn.Linear(8, 1).double()")
    ended = second.end()
    assert ended.code == 1 and "has another model" in ended.err, ended
    found = hosts.ended(first)
    check(found, alone(epochs=EPOCHS))
    assert found.size == 2


@pytest.mark.soak
@pytest.mark.parametrize("time", range(5))
def test_hosts_that_come_at_the_same_time(
    hosts: Hosts, alone: Callable[..., Outcome], time: int
) -> None:
    """Two that are let in, while one is refused."""
    first = hosts.come()
    trains(first, hosts.out, 2)
    second, other, third = (
        hosts.come(),
        hosts.come(model="model = nn.Linear(8, 1).double()"),
        hosts.come(),
    )
    trains(second, hosts.out, 6)
    ended = other.end()
    assert ended.code == 1 and "has another model" in ended.err, ended
    found = hosts.ended(first, second, third)
    check(found, alone(epochs=EPOCHS))
    assert found.size == 6


@pytest.mark.slow
def test_without_min_workers_nobody_gets_in(hosts: Hosts, job: Jobs) -> None:
    """The line has to be the same."""
    first = hosts.come(epochs=3)
    trains(first, hosts.out, 2)
    environ = {"OUT": str(hosts.out), "PACELINE_SECRET": "5a" * 32, "PACELINE_INTERFACE": "lo"}
    ended = job.run("", 2, "--hosts", "2", "--join", hosts._point, **environ).end()
    assert ended.code == 2 and "--min-workers" in ended.err, ended
    hosts.ended(first)
