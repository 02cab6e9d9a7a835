"""Who starts which copy where, when servers are lost or leave: the same on all workers, with
hosts and ends that are made up.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

from paceline.comm.agreement import Agreement
from paceline.comm.group_protocol import Group
from paceline.comm.rpc import derive_rpc_keys
from paceline.errors import ServerLost, StateLost
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.servers.worker.replication import ServerReplication
from paceline.sync.context import SyncContext
from tests.harness.thread_groups import spawn

Server = tuple[int, int, str]  # number, shard, host


class Town:
    """A `House` whose servers begin as soon as they are started."""

    def __init__(self, here: str, servers: list[Server]) -> None:
        self.host_name, self.servers, self.next_server = (
            here,
            list(servers),
            1 + max(number for number, _, _ in servers),
        )
        self.started: dict[int, Server] = {}

    def _endpoints(self, servers: list[Server]) -> ServerEndpoints:
        numbers, shards, _ = zip(*servers, strict=True) if servers else ((), (), ())
        names = tuple(f"server {shard}" for shard in shards)
        return ServerEndpoints(
            names,
            names,
            derive_rpc_keys(b"k" * 32, "job"),
            lambda told: None,
            lambda: None,
            numbers,
            shards,
        )

    def remove_servers(self, numbers: Collection[int]) -> ServerEndpoints:
        self.servers = [each for each in self.servers if each[0] not in numbers]
        return self._endpoints(self.servers)

    def spawn_server(self, shard: int, *, mine: bool) -> int:
        self.next_server += 1
        if mine:
            self.started[self.next_server - 1] = self.next_server - 1, shard, self.host_name
        return self.next_server - 1

    def get_spawned_server(self, number: int) -> Any:
        return self.started[number]

    def add_server(self, told: Any) -> ServerEndpoints:
        self.servers.append(tuple(told))
        return self._endpoints(self.servers)

    def make_endpoints_of(self, told: Any) -> ServerEndpoints:
        return self._endpoints([tuple(told)])

    def list_homes(self) -> list[tuple[str, int]]:
        return [(host, shard) for _, shard, host in self.servers]

    def list_servers_on(self, hosts: Collection[str]) -> list[int]:
        return [number for number, _, host in self.servers if host in hosts]


class Ends:
    """What `ReplicaConnections` is here: numbers instead of connections, of which some answer no
    more.
    """

    cancel_scope = None

    def __init__(self, shards: int) -> None:
        self.callers_by_shard: list[list[int]] = [[] for _ in range(shards)]
        self.dead: list[int] = []

    def find_lost_servers(self, seconds: float) -> list[int]:
        return [
            number for copies in self.callers_by_shard for number in copies if number in self.dead
        ]

    def get_server_names(self, numbers: Collection[int]) -> list[str]:
        return [f"server {number}" for number in sorted(numbers)]

    def update_servers(self, endpoints: ServerEndpoints, me: int) -> None:
        self.callers_by_shard = [[] for _ in self.callers_by_shard]
        for number, shard in zip(endpoints.numbers, endpoints.shards, strict=True):
            self.callers_by_shard[shard].append(number)

    def add_connection(self, number: int, end: Any) -> None:
        pass

    def connect_server(self, endpoints: ServerEndpoints, me: int) -> Any:
        return type("End", (), {"number": endpoints.numbers[0], "close": lambda self: None})()


HOSTS = ["a", "a", "b", "c"]  # of each worker
SERVERS: list[Server] = [(0, 0, "a"), (1, 1, "b"), (2, 2, "c")]


def play(
    act: Callable[[ServerReplication, Town, Ends], Any],
    servers: list[Server],
    copies: int = 1,
    hosts: list[str] = HOSTS,
) -> list[Any]:
    """What each worker found."""

    def work(group: Group) -> Any:
        pool, ends = Town(hosts[group.rank], servers), Ends(len({shard for _, shard, _ in servers}))
        ends.update_servers(pool.remove_servers(()), 0)

        def fill(shard: int, end: Any) -> Iterator[None]:
            yield
            if end.number in ends.dead:
                raise ServerLost("gone")

        context = SyncContext(group, Agreement(group), announce=lambda text: None)
        return act(ServerReplication(context, pool, ends, copies, fill=fill), pool, ends)  # type: ignore[arg-type]

    return spawn(len(hosts), work)


def filled(replacing: ServerReplication, told: list[Any]) -> list[int]:
    """Fill these, and return the numbers of those that live."""
    return [number for number, found in told if found and all(replacing.fill_new_copy(found))]


def all_in(replacing: ServerReplication) -> None:
    """Take in what has begun, wherever."""
    told = [
        found
        for answer in replacing.context.group.gather_bytes(
            json.dumps(replacing.list_begun_copies()).encode()
        )
        for found in json.loads(answer)
    ]
    replacing.take_in_copies(told, filled(replacing, told))


@pytest.mark.parametrize("leaving", [["a"], ["c"], ["a", "b"], ["b", "c"]])
def test_what_leaving_hosts_keep_is_copied_to_those_that_stay(leaving: list[str]) -> None:
    def act(replacing: ServerReplication, pool: Town, ends: Ends) -> Any:
        hosts = dict(enumerate(HOSTS))
        assert not replacing.relieve_hosts(hosts, leaving) and replacing.has_starting_copies
        # they are under way
        assert not replacing.relieve_hosts(hosts, leaving) and pool.next_server == 3 + len(leaving)
        all_in(replacing)
        assert replacing.relieve_hosts(hosts, leaving) and not replacing.has_starting_copies
        replacing.drop_leaving_servers(leaving)
        return pool.servers, ends.callers_by_shard

    found = play(act, SERVERS)
    servers, ends = found[0]
    assert all(each == found[0] for each in found)
    assert not {host for _, _, host in servers} & {*leaving} and sorted(
        shard for _, shard, _ in servers
    ) == [0, 1, 2]
    assert [len(copies) for copies in ends] == [1, 1, 1]
    kept = {host: sum(home == host for _, _, home in servers) for host in {*HOSTS} - {*leaving}}
    assert max(kept.values()) - min(kept.values()) <= 1 or len(kept) == 1


def test_where_others_have_copies_nothing_is_started() -> None:
    twice = [*SERVERS, *((3 + shard, shard, "bca"[shard]) for shard in range(3))]

    def act(replacing: ServerReplication, pool: Town, ends: Ends) -> Any:
        assert (
            replacing.relieve_hosts(dict(enumerate(HOSTS)), ["a"])
            and not replacing.has_starting_copies
        )
        replacing.drop_leaving_servers(["a"])
        return pool.servers

    assert play(act, twice, copies=2)[0] == [each for each in twice if each[2] != "a"]


def test_a_copy_that_starts_on_a_leaving_host_is_not_counted_on() -> None:
    twice = [(0, 0, "a"), (1, 0, "b")]

    def act(replacing: ServerReplication, pool: Town, ends: Ends) -> Any:
        ends.dead.append(0)
        replacing.agree_on_losses(
            replacing.context
        )  # the new one is started on the first of two free hosts
        (first,) = replacing._starting_copies.values()
        leaving = [HOSTS[first.starter], "b"]
        assert not replacing.relieve_hosts(dict(enumerate(HOSTS)), leaving)
        return leaving, [HOSTS[found.starter] for found in replacing._starting_copies.values()]

    leaving, starters = play(act, twice, copies=2)[0]
    assert starters[0] == leaving[0] and {*starters[1:]} == {*HOSTS} - {*leaving}


def test_who_has_not_heard_yet_that_servers_left_hears_it_after_a_loss() -> None:
    """The next is lost when some have gone on from there, and others have not."""

    def act(replacing: ServerReplication, pool: Town, ends: Ends) -> Any:
        assert replacing.relieve_hosts(dict(enumerate(HOSTS)), ["b"])
        if replacing.context.group.rank % 2:
            replacing.drop_leaving_servers(["b"])
        replacing.agree_on_losses(replacing.context)
        return (
            pool.servers,
            ends.callers_by_shard,
            dict(replacing._starting_copies),
            replacing.take_lost_names(),
        )

    found = play(act, [(0, 0, "a"), (1, 0, "b")], copies=2)
    assert all(each == found[0] for each in found)
    servers, _, anew, lost = found[0]
    assert servers == [(0, 0, "a")] and [one.shard for one in anew.values()] == [0] and not lost


@pytest.mark.parametrize("quick", [(0,), (2,), (1, 2), (3,)])
def test_who_has_not_taken_a_copy_in_yet_does_so_after_a_loss(quick: tuple[int, ...]) -> None:
    """The same for copies that have been filled: also where who has started one is among the
    quick ones, or isn't.
    """

    def act(replacing: ServerReplication, pool: Town, ends: Ends) -> Any:
        replacing.relieve_hosts(dict(enumerate(HOSTS)), ["a"])
        told = [
            found
            for answer in replacing.context.group.gather_bytes(
                json.dumps(replacing.list_begun_copies()).encode()
            )
            for found in json.loads(answer)
        ]
        alive = filled(replacing, told)
        if replacing.context.group.rank in quick:
            replacing.take_in_copies(told, alive)
        ends.dead.append(0)  # or this would be the only one
        replacing.agree_on_losses(replacing.context)
        if replacing.context.group.rank not in quick:
            replacing.take_in_copies(told, alive)
        return sorted(pool.servers), ends.callers_by_shard, replacing.has_starting_copies

    found = play(act, SERVERS)
    assert all(each == found[0] for each in found) and not found[0][2]
    assert [number for number, _, _ in found[0][0]] == [1, 2, 3]


def test_a_copy_that_its_starter_has_not_heard_of_is_not_waited_for() -> None:
    """A loss in the middle of a call in which some have heard already who is to start it."""

    where = ["c", "c", "a", "b"]

    def act(replacing: ServerReplication, pool: Town, ends: Ends) -> Any:
        if replacing.context.group.rank < 2:
            replacing.relieve_hosts(dict(enumerate(where)), ["c"])
        replacing.agree_on_losses(replacing.context)
        assert not replacing.has_starting_copies
        replacing.relieve_hosts(dict(enumerate(where)), ["c"])
        all_in(replacing)
        return pool.next_server, sorted(pool.servers), ends.callers_by_shard

    found = play(act, SERVERS, hosts=where)
    assert all(each == found[0] for each in found), found


def test_a_server_that_dies_before_it_has_handed_over_is_lost() -> None:
    def act(replacing: ServerReplication, pool: Town, ends: Ends) -> Any:
        replacing.relieve_hosts(dict(enumerate(HOSTS)), ["b"])
        ends.dead.append(1)
        with pytest.raises(
            StateLost, match="server 1: lost, and no other server has a copy of its state"
        ):
            replacing.agree_on_losses(replacing.context)

    play(act, SERVERS)


def test_a_copy_that_dies_while_it_is_filled_is_started_again() -> None:
    def act(replacing: ServerReplication, pool: Town, ends: Ends) -> Any:
        hosts = dict(enumerate(HOSTS))
        replacing.relieve_hosts(hosts, ["c"])
        ends.dead.append(3)
        all_in(replacing)
        assert (
            not replacing.has_starting_copies
            and not replacing.relieve_hosts(hosts, ["c"])
            and replacing.has_starting_copies
        )
        all_in(replacing)
        return replacing.relieve_hosts(hosts, ["c"])

    assert play(act, SERVERS) == [True] * len(HOSTS)
