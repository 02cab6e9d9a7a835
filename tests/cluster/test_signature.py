"""What others write into the store, or keep from another job with the same secret, is refused,
with one kind of error.
"""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import HashStore, TCPStore

from paceline.cluster import network
from paceline.cluster import store as stores
from paceline.cluster.control.commands import Member, Roster
from paceline.cluster.discover import Place
from paceline.cluster.signature import Signer
from paceline.cluster.store import Store
from paceline.comm.native.sockets import GroupSockets
from paceline.comm.native.waitposts import GroupEnd, Waitposts
from paceline.comm.waitgraph import RankWait
from paceline.errors import Mismatch, PlaceError, SecretError

SECRET = b"s" * 32
GARBAGE = [
    *(
        b"",
        b"\xff\xfe",
        b"x",
        b"0",
        b"1",
        b"1zz",
        b"0{",
        b"0" + b"[" * 5000,
        b"1" + b"0" * 64,
        b"1" + b"0" * 64 + b"{}",
        b"1\xc3\xa9",
    ),
    *(b'0"\xff"', b"0NaN,", b"2{}", b"{}", b"\0" * 200, b"1" + "\ud7ff".encode() * 64 + b"{}"),
]


def met(base: Any, size: int = 2) -> list[Store]:
    """The stores of so many workers that have met over this one."""

    def meet(rank: int) -> Store:
        found = Store(base, SECRET, path="paceline/0/1", deadline=60)
        place = Place(rank=rank, size=size, local_rank=rank, local_size=size, secret=SECRET)
        assert stores.discover_hosts(found, place).size == size
        return found

    with ThreadPoolExecutor(size) as pool:
        return [*pool.map(meet, range(size))]


class TestGarbage:
    @pytest.mark.parametrize("secret", [SECRET, None], ids=["secret", "none"])
    @pytest.mark.parametrize("raw", GARBAGE, ids=range(len(GARBAGE)))
    def test_is_a_secret_error(self, raw: bytes, secret: bytes | None) -> None:
        with pytest.raises(SecretError, match="k in the store"):
            Signer(secret, "paceline").verify_value("k", raw)

    @pytest.mark.parametrize("count", [5000, pytest.param(100_000, marks=pytest.mark.soak)])
    def test_what_is_nearly_right(self, count: int) -> None:
        drawn, seal = random.Random(31), Signer(SECRET, "paceline", "a start")
        right = seal.sign_value("k", {"rank": 3, "x": [1.5, None, "é"]}).encode()
        for _ in range(count):
            wrong, place = bytearray(right), drawn.randrange(len(right))
            wrong[place : place + drawn.randrange(1, 3)] = drawn.randbytes(drawn.randrange(3))
            if bytes(wrong).lower() != right.lower():
                with pytest.raises(SecretError):
                    seal.verify_value("k", bytes(wrong))
        assert seal.verify_value("k", right) == {"rank": 3, "x": [1.5, None, "é"]}

    def test_in_a_store(self) -> None:
        found = stores.make_local_store(SECRET)
        for raw in ("\x00", "[]", "1" * 70):
            found.torch.set("k", raw)
            with pytest.raises(SecretError):
                found.take("k")
        assert found.read_values(["k"]) == [None]

    def test_where_starts_are_counted(self) -> None:
        """What torch itself keeps there isn't signed; who writes to it keeps a job from
        starting, and is told of.
        """
        with network.open_listener("127.0.0.1") as probe:
            port = int(probe.getsockname()[1])
        other = TCPStore(
            "127.0.0.1",
            port,
            None,
            True,
            timedelta(seconds=10),
            wait_for_workers=False,
            multi_tenant=True,
        )
        other.set("paceline/0/claims/starts/0", "garbage")
        place = Place(
            rank=0, size=2, local_rank=0, local_size=2, secret=SECRET, meeting=("127.0.0.1", port)
        )
        with pytest.raises(PlaceError, match="another program has written there"):
            stores.connect_store(place, deadline=60)
        other.set("paceline/0/claims/0", "\x00\xff")
        with pytest.raises(PlaceError, match="another process is already rank 0"):
            stores.connect_store(place, deadline=60)


class TestReplay:
    def test_values_of_another_start_are_refused(self) -> None:
        """The secret is the same, and so is every key."""
        one, other = HashStore(), HashStore()
        (before, _), (here, there) = met(one), met(other)
        before.put("lr", 0.1)
        other.set("paceline/0/1/lr", one.get("paceline/0/1/lr"))
        with pytest.raises(SecretError, match="another start of a job"):
            there.take("lr")
        here.put("lr", 0.2)
        assert there.take("lr") == 0.2 and there.open_substore("x").read_values([]) == []

    def test_a_table_of_another_start_is_none(self) -> None:
        """Before a start is known by anything, by what each rank has drawn for it."""
        one, other = HashStore(), HashStore()
        met(one)
        other.set("paceline/0/1/hosts/table", one.get("paceline/0/1/hosts/table"))
        place = Place(rank=1, size=2, local_rank=1, local_size=2, secret=SECRET)
        with pytest.raises(Mismatch, match="rank 1 is known to rank 0"):
            stores.discover_hosts(Store(other, SECRET, path="paceline/0/1", deadline=60), place)

    def test_parts_of_a_store_are_bound_with_it(self) -> None:
        base = HashStore()
        here, there = met(base)
        here.open_substore("a").open_substore("b").put("k", 1)
        assert there.open_substore("a/b").take("k") == 1
        with pytest.raises(SecretError):
            Store(base, SECRET, path="paceline/0/1/a/b").take("k")

    def test_each_view_of_each_start_is_another(self) -> None:
        members = tuple(
            Member(worker, 0, "h", "127.0.0.1") for worker in (65536 * 7 + 9, 65536 * 8 + 9)
        )
        again = tuple(member._replace(worker=member.worker + 65536) for member in members)
        marks = {
            Roster(number, found).unique_text
            for number in (1, 2)
            for found in (members, again, members[:1])
        }
        assert (
            len(marks) == 6
            and Roster(1, members, broken=True).unique_text == Roster(1, members).unique_text
        )


class TestGroups:
    """What ranks tell each other through the store when they make a group, and while they wait."""

    def sealed(self, base: Any, secret: bytes = SECRET) -> Store:
        return Store(base, secret, path="g", deadline=60)

    def test_where_a_rank_listens_is_signed(self) -> None:
        base = HashStore()
        base.set("g/listen/0", json.dumps(["198.51.100.7", [1]]))
        with pytest.raises(SecretError):
            GroupSockets("127.0.0.1", 1).announce_listeners(self.sealed(base), 1, 2, 5.0)

    def test_whom_a_connection_leads_to_is_signed(self) -> None:
        base = HashStore()
        base.set("g/ends/0", "[]")
        wires = GroupSockets("127.0.0.1", 1)
        wires._rank, wires._size = 1, 2
        with pytest.raises(SecretError):
            wires.trace_connections(self.sealed(base), 5.0)

    def test_waits_that_nobody_has_signed_are_none(self) -> None:
        base = HashStore()
        one = Waitposts(self.sealed(base), 0, 3)
        Waitposts(self.sealed(base), 1, 3)
        Waitposts(self.sealed(base, b"t" * 32), 2, 3)
        base.set("g/wait/1", json.dumps(["calls", 0, "barrier", {}]))
        assert (
            one._look_at_others(RankWait("agree", 0, "agree", {"agree": 1})) == {}
            and one.others == {}
        )
        self.sealed(base).put("wait/1", RankWait("calls", 0, "barrier", {"calls": 1}))
        assert len(one._look_at_others(RankWait("agree", 0, "agree", {"agree": 1}))) == 2

    def test_a_verdict_that_nobody_has_signed_does_not_count(self) -> None:
        base = HashStore()
        base.set("g/verdict", json.dumps(["ViewChanged", "a stranger says so", [1]]))
        mine = GroupEnd("WorkerLost", "rank 2 is gone", (2,))
        assert Waitposts(self.sealed(base), 0, 1).decide_end(mine) == mine
