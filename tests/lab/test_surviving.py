"""Hosts that are cut off, that crash and that come, while a run survives: on hosts of their own,
with real links.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from paceline import lab
from paceline.lab.running import Outcome as Ended
from tests.harness import short_timings
from tests.harness.jobs import PRELUDE
from tests.harness.survivors import Outcome, apart, check, gap, outcome, script, until

pytestmark = [pytest.mark.usefixtures("clean"), pytest.mark.slow]


def train(
    folder: Path,
    faults: Any,
    *,
    hosts: int = 3,
    each: int = 2,
    restarts: int = 3,
    sync: str | None = None,
    **parts: Any,
) -> tuple[Ended, Outcome]:
    """A training on hosts of so many workers each, with these faults."""
    out = folder / "killed"
    out.mkdir()
    (folder / "script.py").write_text(
        PRELUDE + script(start=f"name='run', folder='{out}/runs'", **parts)
    )
    with lab.cluster(hosts=hosts, workers=each) as cluster:
        options = {
            "min_workers": 1,
            "restarts": restarts,
            "patience": 60.0,
            "folder": folder,
            "deadline": 300,
            "sync": sync,
        }
        ended = cluster.run(
            folder / "script.py",
            faults=faults,
            environ={"OUT": str(out), "OMP_NUM_THREADS": "1", **short_timings.environ()},
            **options,
        )
    assert ended.code == 0, ended.output
    return ended, outcome(out, out)


def test_a_minority_that_was_cut_off_stops_and_comes_back(
    tmp_path: Path, alone: Callable[..., Outcome]
) -> None:
    ended, found = train(tmp_path, "cut(host=2, step=6, seconds=5)", each=1, epochs=5, nap=until(2))
    check(found, alone(epochs=5))
    assert (
        "was cut off from the other hosts" in ended.output
        and "looks for the other hosts" in ended.output
    )
    assert found.size == 3, ended.output


@pytest.mark.soak
def test_the_first_host_is_cut_off(tmp_path: Path, alone: Callable[..., Outcome]) -> None:
    """The meeting point is on it, and the first worker."""
    ended, found = train(tmp_path, "cut(host=0, step=6, seconds=5)", epochs=5, nap=until(2))
    check(found, alone(epochs=5))
    assert found.size == 6, ended.output


@pytest.mark.soak
@pytest.mark.parametrize("host", [1, 0])
def test_a_host_crashes_and_its_next_launcher_takes_part(
    tmp_path: Path, alone: Callable[..., Outcome], host: int
) -> None:
    """The command is the same; where the meeting point was on that host, it is called by those
    who go on.
    """
    faults = [lab.crash(host=host, step=4), lab.join(host=host, step=8)]
    ended, found = train(tmp_path, faults, epochs=5, nap=until(2))
    check(found, alone(epochs=5))
    assert found.size == 6, ended.output


@pytest.mark.soak
def test_a_host_that_was_not_there_takes_part(
    tmp_path: Path, alone: Callable[..., Outcome]
) -> None:
    ended, found = train(tmp_path, lab.join(host=1, step=4), hosts=2, epochs=5, nap=until(1))
    check(found, alone(epochs=5))
    assert found.size == 4, ended.output


def test_one_strategy_inside_hosts_and_another_between(
    tmp_path: Path, alone: Callable[..., Outcome]
) -> None:
    """A worker of a host is lost, and comes back: the other one of its host has the same
    replica.
    """
    sync = "Sequence((AllReduce(), 'local'), (LocalSGD(4), 'host'))"
    ended, found = train(
        tmp_path,
        [lab.kill(rank=3, step=6), lab.kill(rank=0, step=18)],
        hosts=2,
        sync=sync,
        epochs=4,
        nap=until(4, 0.2),
    )
    wanted = alone(epochs=4)
    assert found.samples == wanted.samples and found.size == 4, ended.output
    assert apart(found, wanted) < 0.05


LOSSY = "AllReduce(codec=error_feedback(topk(0.1)))"


def test_what_the_leader_of_a_host_had_kept_lives_on_when_the_host_dies(
    tmp_path: Path, alone: Callable[..., Outcome]
) -> None:
    """On the next host; how often there are copies is decided and said."""
    ended, found = train(tmp_path, lab.crash(host=1, step=10), sync=LOSSY, nap=until(1))
    assert found.samples == alone().samples and found.size == 4, ended.output
    assert "paceline: buddy snapshots every " in ended.output
    assert re.search(
        (
            r"ranks 2, 3 were lost: .*; what rank 2 alone had is kept by rank 2, as of step \d+ "
            r"\(\d+ steps? ago\)"
        ),
        found.events[0],
    )


@pytest.mark.soak
@pytest.mark.parametrize(("hosts", "all_kept"), [((1, 3), True), ((1, 2), False)])
def test_two_hosts_may_die_that_are_no_buddies(
    tmp_path: Path, alone: Callable[..., Outcome], hosts: tuple[int, int], all_kept: bool
) -> None:
    faults = [lab.crash(host=host, step=10) for host in hosts]
    ended, found = train(tmp_path, faults, hosts=5, each=1, sync=LOSSY, nap=0.3)
    assert found.samples == alone().samples and found.size == 3, ended.output
    told = "; ".join(found.events)  # of both at once, or one after the other
    assert (
        len(re.findall("alone had is kept by rank", told)) == 1 + all_kept
        or "had taken over since is lost" in told
    ), told
    assert bool(re.search("alone had is lost|taken over since is lost", told)) != all_kept, told


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm(tmp_path: Path, alone: Callable[..., Outcome], seed: int) -> None:
    """Workers that die and stand still, hosts that are slow and cut off: thirty in three hundred
    steps, after which all can come back.
    """
    storm = lab.storm(
        seed=seed,
        faults=30,
        steps=300,
        kinds=("kill", "stop", "cut", "slow", "link"),
        seconds=(0.5, 4.0),
    )
    ended, found = train(tmp_path, storm, hosts=5, each=1, restarts=30, epochs=32, nap=0.05)
    check(found, alone(epochs=32))
    assert gap(tmp_path / "killed") < 60, found.events  # nobody waited for a deadline
    assert len([event for event in ended.events if event["event"] == "fault"]) > 20, ended.events


SERVED = "ParameterServer(replicas={copies}, bucket_mb=0.001)"


@pytest.mark.parametrize("host", [0, pytest.param(1, marks=pytest.mark.soak)])
def test_a_host_crashes_with_its_servers_and_comes_back(
    tmp_path: Path, alone: Callable[..., Outcome], host: int
) -> None:
    faults = [lab.crash(host=host, step=4), lab.join(host=host, step=8)]
    ended, found = train(
        tmp_path, faults, each=1, epochs=5, nap=until(2), sync=SERVED.format(copies=2)
    )
    check(found, alone(epochs=5))
    assert found.size == 3 and f"server {host} on host{host}" in found.events[0], (
        found.events,
        ended.output,
    )


@pytest.mark.soak
@pytest.mark.parametrize("host", [0, 2])
def test_a_host_is_cut_off_with_its_servers(
    tmp_path: Path, alone: Callable[..., Outcome], host: int
) -> None:
    ended, found = train(
        tmp_path,
        f"cut(host={host}, step=6, seconds=5)",
        epochs=5,
        nap=until(2),
        sync=SERVED.format(copies=2),
    )
    check(found, alone(epochs=5))
    assert found.size == 6, ended.output


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_storm_over_servers(tmp_path: Path, alone: Callable[..., Outcome], seed: int) -> None:
    """Five servers on five hosts, each with two copies: a host that is cut off takes its own
    with it.
    """
    storm = lab.storm(
        seed=seed,
        faults=15,
        steps=300,
        kinds=("kill", "stop", "cut", "slow", "link"),
        seconds=(0.5, 4.0),
    )
    _, found = train(
        tmp_path,
        storm,
        hosts=5,
        each=1,
        restarts=30,
        epochs=32,
        nap=0.05,
        sync=SERVED.format(copies=3),
    )
    check(found, alone(epochs=32))
    assert gap(tmp_path / "killed") < 60, found.events
