"""The request of one launcher: nonsense is named before anything starts, and ranks are dealt to hosts."""

from __future__ import annotations

import pytest

from paceline.cluster.launcher.request import LaunchRequest, check, deal, meeting_point
from paceline.errors import UsageError


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
        ({"placement": "blocks"}, "--placement is blocks; possible: block, round-robin; did you mean block?"),
    ],
)
def test_nonsense_is_named(changes, words):
    with pytest.raises(UsageError, match=words):
        check(LaunchRequest(**{"script": __file__, **changes}))


@pytest.mark.parametrize(
    ("workers", "block", "turns"),
    [
        ((2, 2), [[0, 1], [2, 3]], [[0, 2], [1, 3]]),
        ((1, 3, 2), [[0], [1, 2, 3], [4, 5]], [[0], [1, 3, 5], [2, 4]]),
        ((2,), [[0, 1]], [[0, 1]]),
    ],
)
def test_ranks_are_dealt(workers, block, turns):
    assert deal(workers, "block") == block and deal(workers, "round-robin") == turns


@pytest.mark.parametrize("join", ["a", "a:", ":1", "a:0", "a:70000", "a:b"])
def test_join(join):
    with pytest.raises(UsageError, match="isn't HOST:PORT"):
        meeting_point(join)


def test_join_reads_addresses():
    assert meeting_point("[::1]:5") == ("::1", 5) and meeting_point("a.b:29400") == ("a.b", 29400)
