"""Copies of servers that are lost: who has what is left, and others that are started in their place, in the background.

a server is lost       its copies go on; one of the living begins to start another, on a host that has none of that shard
it has begun           between two steps, when nobody tells servers anything, it is given what the others have, and counts
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.comm.messages import Caller
from paceline.errors import DeadlineExceeded, ServerLost, StateLost
from paceline.sync.base import House, Room
from paceline.sync.parcels import packed
from paceline.sync.server import write

if TYPE_CHECKING:
    from paceline.sync.client import Client

ALIVE_SECONDS = 10.0  # for a server that is busy to say that it lives; one whose connection breaks is known sooner


class Anew(NamedTuple):
    """A copy that is being started: of which shard, and by which worker."""

    shard: int
    starter: int


class Replacing:
    """One worker's part in that. `house` is where servers are, each of which there ought to be `copies` times."""

    def __init__(self, client: Client, house: House, copies: int) -> None:
        self._client, self.house, self._copies = client, house, copies
        self._lost: list[str] = []  # servers, as they are called
        self._anew: dict[int, Anew] = {}  # by number
        self._early: dict[int, Caller] = {}  # my ends to copies that are about to be

    @property
    def me(self) -> int:
        """What I am called."""
        return self._client.workers[self._client.scene.group.rank]

    @property
    def waits(self) -> bool:
        """Whether a copy is being started."""
        return bool(self._anew)

    def survey(self) -> list[Any]:
        """Which servers are left, as all the living see it: go on with those, and begin to start what is missing. Collective.

        Gives what each of them has said with it. Raises `StateLost` where nobody has a shard any more.
        """
        client = self._client
        lost = client.wires.lost(min(client.seconds, ALIVE_SECONDS))
        mine = {"lost": lost, "here": self.house.here, "next": self.house.next, "anew": self.layout()}
        told = [json.loads(body) for body in client.scene.group.agree(json.dumps(mine).encode())]
        gone = {number for each in told for number in each["lost"]}
        self.house.next = max(each["next"] for each in told)  # some may have come further than others when the next was lost
        self._anew = {number: Anew(*found) for each in told for number, found in each["anew"]}
        shards = len(client.wires.of)
        self._lost += (names := client.wires.names(gone))
        room = self.house.lose(gone)
        bare = sorted({*range(shards)} - {*room.shards})
        if bare:
            raise StateLost(
                f"{' and '.join(names)}: gone, and nobody else has what was kept there; resume from a checkpoint (with replicas=2 a copy "
                "on another host goes on)"
            )
        client.wires.reach(room, self.me)
        self._replace([each["here"] for each in told], room)
        return told

    def _replace(self, hosts: Sequence[str], room: Room) -> None:
        """Begin to start what is missing: on hosts that have no copy of the shard, those with the fewest servers first."""
        client, house = self._client, self.house
        self._anew = {number: found for number, found in self._anew.items() if found.starter in client.workers}
        homes = house.homes()
        wanted = [shard for shard in range(len(client.wires.of)) for _ in range(self._copies - room.shards.count(shard))]
        for found in self._anew.values():
            homes.append((hosts[client.workers.index(found.starter)], found.shard))
            if found.shard in wanted:
                wanted.remove(found.shard)
        for shard in wanted:
            free = [host for host in dict.fromkeys(hosts) if (host, shard) not in homes]
            if not free and len(set(hosts)) > 1:
                continue  # each host has one: another there would die with it
            home = min(free or hosts, key=lambda host: sum(host == other for other, _ in homes))
            homes.append((home, shard))
            starter = client.workers[hosts.index(home)]
            self._anew[house.spawn(shard, mine=starter == self.me)] = Anew(shard, starter)

    def begun(self) -> list[Any]:
        """Of those that I start: which have begun, or failed to, with what the others have to know of them."""
        mine = {number: self.house.spawned(number) for number, found in self._anew.items() if found.starter == self.me}
        return [[number, found] for number, found in mine.items() if found is not None]

    def fill(self, told: Iterable[Any]) -> list[int]:
        """Give those that have begun what the others of their shards have; the numbers of those that live."""
        return [number for number, found in told if found and self._fill(found)]

    def _fill(self, told: Any) -> bool:
        client, room = self._client, self.house.at(told)
        number, shard = room.numbers[0], room.shards[0]
        state = client.wires.primaries[shard].call("state", seconds=client.seconds)
        try:
            caller = self._early.get(number) or client.wires.call(room, self.me)
            self._early[number], caller.breaker = caller, client.wires.breaker
            caller.call("plan", tensors=[packed(write(client.plans[shard]))], seconds=client.seconds)
            caller.call("become", tensors=state.tensors, seconds=client.seconds)
            if client.free:
                caller.call("reckon", body={"workers": client.workers}, seconds=client.seconds)
        except (ServerLost, DeadlineExceeded):
            return False
        return True

    def take_in(self, told: Iterable[Any], filled: Sequence[int]) -> list[str]:
        """Those that were filled count from now on; gives their names."""
        client, names = self._client, []
        for number, found in told:
            del self._anew[number]
            early = self._early.pop(number, None)
            if found and number in filled:
                client.wires.know(number, early)
                client.wires.reach(self.house.add(found), self.me)
                names += client.wires.names([number])
            else:
                client.scene.say("a copy of a server, to replace one that was lost, could not begin: there is one less")
        return names

    def take_lost(self) -> list[str]:
        """See `Steps.servers_lost`."""
        found, self._lost = self._lost, []
        return found

    def layout(self) -> Any:
        """Which copies are about to be, for who has just come."""
        return [[number, list(found)] for number, found in sorted(self._anew.items())]
