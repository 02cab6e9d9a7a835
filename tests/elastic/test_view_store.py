"""The store of a view: served by its first member, and cut when the view is over."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from paceline.cluster import network
from paceline.cluster.control.commands import Member, Roster, make_worker_number
from paceline.cluster.discover import Place
from paceline.cluster.store import make_local_store
from paceline.cluster.topology import Topology
from paceline.comm.cancellation import CancelScope
from paceline.elastic.view_store import connect_store, move_to_view, serve_store
from paceline.errors import ViewChanged, WorkerLost
from paceline.workers.groups import WorkerContext

SECRET = b"a secret of this job"


def context(place: Place) -> WorkerContext:
    return WorkerContext(
        place, make_local_store(SECRET), Topology(()), torch.device("cpu"), 10.0, print
    )


def served() -> tuple[Place, Roster, Any]:
    """The place of a worker that serves a view of which it is the only member."""
    with network.open_listener("127.0.0.1") as listening:
        port = listening.getsockname()[1]
        place = Place(
            worker=make_worker_number(7, port),
            store_fd=listening.fileno(),
            secret=SECRET,
            rank=3,
            size=9,
            local_size=9,
            joining=True,
        )
        assert place.worker is not None
        return place, Roster(4, (Member(place.worker, 2, "box", "127.0.0.1"),)), serve_store(place)


def test_members_meet_in_the_store_until_the_view_is_over() -> None:
    place, roster, _server = served()
    cancel_scope = CancelScope()
    mine, other = (
        connect_store(context(place), roster, cancel_scope),
        connect_store(context(place), roster, CancelScope()),
    )
    mine.put("a", 1)
    assert other.take("a") == 1
    cancel_scope.trip(ViewChanged("the workers are others now"))
    with pytest.raises(WorkerLost):
        mine.take("a")
    assert other.take("a") == 1  # of another view


def test_a_store_that_is_gone() -> None:
    with network.open_listener("127.0.0.1") as listening:
        port = listening.getsockname()[1]
    roster = Roster(4, (Member(make_worker_number(7, port), 0, "box", "127.0.0.1"),))
    with pytest.raises(WorkerLost, match="the store of view 4 can't be reached"):
        connect_store(context(Place(secret=SECRET)), roster, CancelScope())


def test_the_place_of_a_worker_in_a_view() -> None:
    place, roster, _server = served()
    cancel_scope = CancelScope()
    assert place.worker is not None
    found = move_to_view(
        context(place), roster, make_local_store(SECRET), (place.worker,), cancel_scope
    )
    after = found.place
    assert (after.rank, after.size, after.local_rank, after.local_size) == (0, 1, 0, 1)
    assert (after.host_rank, after.hosts, after.joining) == (2, 1, False)
    assert (
        after.meeting == ("127.0.0.1", roster.members[0].port)
        and found.cancel_scope is cancel_scope
    )
    assert [host.ranks for host in found.cluster.hosts] == [(0,)]
