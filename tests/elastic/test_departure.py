"""Hosts that are asked to leave (SIGTERM to their launchers), and hand over what only their
servers keep.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness.jobs import Job, Jobs, wait_for
from tests.harness.joining_hosts import EPOCHS, Hosts
from tests.harness.joining_hosts import kill as kill_host
from tests.harness.surviving_servers import servers
from tests.harness.surviving_tables import parts
from tests.harness.survivors import Outcome, check, trains

SOAK = pytest.mark.soak

DENSE = ("--sync", "ParameterServer(bucket_mb=0.001)")
TWO = ("--sync", "ParameterServer(servers=2, bucket_mb=0.001)")
CODED = ("--sync", "ParameterServer(bucket_mb=0.001, codec=error_feedback(int8()))")
LEFT = 128 + signal.SIGTERM


def leave(*launched: Job) -> None:
    """Ask these hosts to leave, and wait until they have."""
    for each in launched:
        each.process.terminate()
    for each in launched:
        end = each.end()
        if end.code != LEFT or "asked to leave" not in end.err or "Traceback" in end.err:
            pytest.fail(f"{end.code}\n{end.err}")


def check_parting(found: Outcome) -> None:
    """No server was lost."""
    assert not any("server" in event for event in found.events), found.events


KINDS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "dense": (DENSE, {}),
    "tables": ((), parts()),
    "both": (DENSE, parts()),
}


@SOAK
@pytest.mark.parametrize("kind", ["dense", "tables", "both"])
def test_hosts_leave_one_after_another_until_none_of_the_first_is_left(
    job: Jobs, alone: Callable[..., Outcome], kind: str
) -> None:
    options, more = KINDS[kind]
    hosts = Hosts(job, *options)
    launched = [hosts.come(**more)]
    trains(launched[0], hosts.out, 2)
    for count in (4, 6):
        launched.append(hosts.come(**more))
        trains(launched[-1], hosts.out, count)
        leave(launched[-2])
        hosts.until_met()
    found = hosts.ended(launched[-1])
    check(found, alone(epochs=EPOCHS, **more))
    check_parting(found)
    assert found.size == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "leavers",
    [(1,), *(pytest.param(found, marks=SOAK) for found in ((0,), (0, 1), (1, 2), (0, 2)))],
)
@pytest.mark.parametrize(
    "kind", [pytest.param("dense", marks=SOAK), pytest.param("tables", marks=SOAK), "both"]
)
def test_some_of_three_hosts_leave_at_once(
    job: Jobs, alone: Callable[..., Outcome], kind: str, leavers: tuple[int, ...]
) -> None:
    """Each has a server of the dense part; the tables have two."""
    options, more = KINDS[kind]
    hosts = Hosts(job, *options)
    launched = [hosts.come(3, **more) for _ in range(3)]
    trains(launched[0], hosts.out, 6)
    leave(*(launched[which] for which in leavers))
    found = hosts.ended(*(each for which, each in enumerate(launched) if which not in leavers))
    check(found, alone(epochs=EPOCHS, **more))
    check_parting(found)
    assert found.size == 6 - 2 * len(leavers)


@SOAK
def test_copies_elsewhere_are_enough(job: Jobs, alone: Callable[..., Outcome]) -> None:
    hosts = Hosts(job, "--sync", "ParameterServer(replicas=2, bucket_mb=0.001)")
    launched = [hosts.come(3) for _ in range(3)]
    trains(launched[0], hosts.out, 6)
    for which in (1, 0):
        leave(launched[which])
    found = hosts.ended(launched[2])
    check(found, alone(epochs=EPOCHS))
    check_parting(found)
    assert found.size == 2


@SOAK
def test_through_a_codec(job: Jobs, alone: Callable[..., Outcome]) -> None:
    hosts = Hosts(job, *CODED)
    launched = [
        hosts.come(2, start="name='run', folder='killed/runs', compare=5") for _ in range(2)
    ]
    trains(launched[0], hosts.out, 4)
    leave(launched[0])
    found = hosts.ended(launched[1])
    assert found.samples == alone(epochs=EPOCHS).samples and found.size == 2
    check_parting(found)


@SOAK
def test_killed_before_that_it_takes_with_it_what_it_keeps(job: Jobs) -> None:
    hosts = Hosts(job, *DENSE)
    launched = [hosts.come(2) for _ in range(2)]
    trains(launched[0], hosts.out, 4)
    launched[1].process.terminate()
    kept = servers(launched[1])
    kill_host(launched[1])
    for server in kept:
        server.kill()
    end = launched[0].end()
    assert end.code == 1 and "no other server has a copy of its state" in end.err, end


@SOAK
def test_where_nobody_can_take_over_it_goes_in_the_end(job: Jobs) -> None:
    """The server that is to do that is stopped before it has begun."""
    hosts = Hosts(job, *DENSE)
    launched = [
        hosts.come(2, start="name='run', folder='killed/runs', deadline=15.0") for _ in range(2)
    ]
    trains(launched[0], hosts.out, 4)
    launched[1].process.terminate()
    wait_for(lambda: len(servers(launched[0])) == 2, 30)
    servers(launched[0])[1].suspend()
    assert launched[1].end().code == LEFT
    end = launched[0].end()
    assert end.code == 1 and "no other server has a copy of its state" in end.err, end


@SOAK
def test_asked_twice_the_job_ends(job: Jobs) -> None:
    hosts = Hosts(job, *DENSE)
    launched = [hosts.come(2, nap=2) for _ in range(2)]
    trains(launched[0], hosts.out, 4)
    launched[1].process.terminate()
    time.sleep(0.7)  # in the middle of a turn of two seconds
    launched[1].process.terminate()
    ends = [each.end() for each in launched]
    assert [end.code for end in ends] == [LEFT, LEFT], ends


@SOAK
def test_where_everybody_leaves_nobody_is_waited_for(job: Jobs) -> None:
    hosts = Hosts(job, *DENSE)
    launched = [hosts.come(2) for _ in range(2)]
    trains(launched[0], hosts.out, 4)
    for each in launched:
        each.process.terminate()
    assert [each.end().code for each in launched] == [LEFT, LEFT]
