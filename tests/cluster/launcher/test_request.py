"""The request of one launcher: nonsense is named before anything starts, and ranks are dealt to
hosts.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.cluster import topology_file
from paceline.cluster.launcher.request import (
    LaunchRequest,
    check_request,
    deal_ranks,
    parse_meeting_point,
)
from paceline.errors import UsageError
from tests.harness.clusters import measured


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"script": "absent.py"}, "absent.py doesn't exist"),
        ({"script": "."}, "without a __main__.py"),
        ({"workers": 0}, "--workers is 0"),
        ({"servers": 0}, "--servers is 0"),
        ({"hosts": 0}, "--hosts is 0"),
        ({"threads": 0}, "--threads is 0"),
        ({"hosts": 2}, "needs --join"),
        ({"join": "a:1"}, "needs --hosts"),
        ({"hosts": 2, "join": "a:1", "host_rank": 2}, "--host-rank is 2"),
        ({"restarts": -1}, "--restarts is -1, and has to be 0 or more"),
        ({"restarts": 201}, "--restarts is 201, and a whole job starts again 200 times at most"),
        (
            {"cluster": "absent.json"},
            r"absent.json can't be read .* measure the cluster with `paceline probe",
        ),
        ({"cluster": __file__}, "test_request.py isn't JSON"),
        (
            {"placement": "blocks"},
            "--placement is blocks; possible: block, round-robin; did you mean block?",
        ),
    ],
)
def test_nonsense_is_named(changes, words):
    with pytest.raises(UsageError, match=words):
        check_request(LaunchRequest(**{"script": __file__, **changes}))


def test_a_measured_cluster_is_of_hosts_that_stay(tmp_path):
    topology_file.write_topology(tmp_path / "cluster.json", measured({"a": 1e8, "b": 1e8}))
    check_request(LaunchRequest(__file__, hosts=2, join="a:1", cluster=tmp_path / "cluster.json"))
    with pytest.raises(UsageError, match="with --min-workers hosts change: leave one out"):
        check_request(
            LaunchRequest(
                __file__, hosts=2, join="a:1", cluster=tmp_path / "cluster.json", min_workers=1
            )
        )


@pytest.mark.parametrize(
    ("workers", "block", "turns"),
    [
        ((2, 2), [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        ((1, 3, 2), [[0], [1, 2, 3], [4, 5]], [[0], [1, 3, 5], [2, 4]]),
        ((2,), [[0, 1]], [[0, 1]]),
    ],
)
def test_ranks_are_dealt(workers, block, turns):
    assert deal_ranks(workers, "block") == block and deal_ranks(workers, "round-robin") == turns


@pytest.mark.parametrize("join", ["a", "a:", ":1", "a:0", "a:70000", "a:b"])
def test_join(join):
    with pytest.raises(UsageError, match="isn't HOST:PORT"):
        parse_meeting_point(join)


def test_join_reads_addresses():
    assert parse_meeting_point("[::1]:5") == ("::1", 5) and parse_meeting_point("a.b:29400") == (
        "a.b",
        29400,
    )


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_grace_period_is_above_0(tmp_path: Path, seconds: float) -> None:
    (tmp_path / "x.py").touch()
    with pytest.raises(UsageError, match="--grace-seconds is"):
        check_request(LaunchRequest(str(tmp_path / "x.py"), grace_seconds=seconds))
