"""Copies of servers that are lost, and made anew: who starts which, and when they are filled.

    a server is lost      all say whom they miss: the others of its shard go on; one worker starts a program, in the background
    some turns later      it has begun: between two turns, when nobody tells servers anything, the first worker gives it what others have,
                          piece by piece; the rest wait, and meet now and then, as long as that takes
    the next turn         it counts

Some workers may have come further than others when the next is lost: so all say with whom they are missing which copies are about to be.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from paceline.comm.messages import Caller
from paceline.errors import LOSSES, DeadlineExceeded, StateLost
from paceline.sync.base import House, Room, Scene
from paceline.sync.copies import Copies

ALIVE_SECONDS = 10.0  # for a server that is busy to say that it lives; one whose connection breaks is known sooner
SLICE_SECONDS = 1.0  # between two meetings while copies are filled


class Anew(NamedTuple):
    """A copy that is being started: of which shard, and by which worker."""

    shard: int
    starter: int


Fill = Callable[[int, Caller], Iterator[None]]  # gives a copy of this shard what it is to keep, a piece at a time


def gone(names: Collection[str]) -> StateLost:
    """The error where nobody has what these servers kept."""
    return StateLost(
        f"{' and '.join(names)}: gone, and nobody else has what was kept there; resume from a checkpoint (with replicas=2 a copy "
        "on another host goes on)"
    )


class Renewal:
    """Keeps as many `copies` of each shard as there are to be. `house` is where servers are, `wires` the ends towards them."""

    def __init__(self, scene: Scene, house: House, wires: Copies, copies: int) -> None:
        self._scene, self.house, self._wires, self._copies = scene, house, wires, copies
        self.anew: dict[int, Anew] = {}  # by number
        self._lost: list[str] = []  # servers, as they are called
        self._early: dict[int, Caller] = {}  # the first worker's ends to copies that are about to be
        self.fill: Fill = lambda shard, caller: iter(())

    @property
    def workers(self) -> list[int]:
        """What workers are called, by rank."""
        return list(self._scene.agreement.origins)

    @property
    def me(self) -> int:
        """What this one is."""
        return self.workers[self._scene.group.rank]

    # ---- other workers, other servers

    def regroup(self, scene: Scene) -> None:
        """The workers are others, or servers were lost. Collective. Raises `StateLost` where nobody has a shard any more."""
        self._scene, wires, house = scene, self._wires, self.house
        mine = {"lost": wires.lost(min(scene.deadline, ALIVE_SECONDS)), "here": house.here, "next": house.next, "anew": self._told()}
        told = [json.loads(body) for body in scene.group.agree(json.dumps(mine).encode())]
        lost = {number for each in told for number in each["lost"]}
        house.next = max(each["next"] for each in told)
        self.anew = {number: Anew(*found) for each in told for number, found in each["anew"] if found[1] in self.workers}
        shards = len(wires.of)
        self._lost += (names := wires.names(lost))
        room = house.lose(lost)
        if {*range(shards)} - {*room.shards}:
            raise gone(names or ["a server"])
        wires.reach(room, self.me)
        self._replace([each["here"] for each in told], room)

    def _replace(self, hosts: Sequence[str], room: Room) -> None:
        """Begin to start what is missing: on hosts that have no copy of the shard, those with the fewest servers first."""
        homes, workers = self.house.homes(), self.workers
        wanted = [shard for shard in range(len(self._wires.of)) for _ in range(self._copies - room.shards.count(shard))]
        for _, found in sorted(self.anew.items()):
            homes.append((hosts[workers.index(found.starter)], found.shard))
            if found.shard in wanted:
                wanted.remove(found.shard)
        for shard in wanted:
            free = [host for host in dict.fromkeys(hosts) if (host, shard) not in homes]
            if not free and len(set(hosts)) > 1:
                continue  # each host has one: another there would die with it
            home = min(free or hosts, key=lambda host: sum(host == other for other, _ in homes))
            homes.append((home, shard))
            starter = workers[hosts.index(home)]
            self.anew[self.house.spawn(shard, mine=starter == self.me)] = Anew(shard, starter)

    def _told(self) -> list[Any]:
        return [[number, list(found)] for number, found in sorted(self.anew.items())]

    # ---- between two turns

    def renew(self) -> None:
        """Take in the copies that have begun since. Collective, if there are any about to be."""
        if not self.anew:
            return
        agreement = self._scene.agreement
        for number, found in agreement.repeat(self._begun, what="table servers begin"):
            self._take_in(number, found)

    def _begun(self) -> list[Any]:
        """The numbers of those that have begun, with what all have to know of them: None, if they are lost already."""
        agreement = self._scene.agreement
        mine = {number: self.house.spawned(number) for number, found in self.anew.items() if found.starter == self.me}
        answers = agreement.meet("table servers begin", json.dumps(list(mine.items())).encode())
        told = sorted(found for answer in answers for found in json.loads(answer) if found[1] is not None)
        return [(number, found if found and self._filled(found) else None) for number, found in told]

    def _filled(self, told: Any) -> bool:
        """Whether the first worker could give this one what it is to keep. Collective."""
        first = self._scene.group.rank == 0
        filling = self._filling(told) if first else iter(())
        while True:
            word = self._slice(filling) if first else b""
            answer = self._scene.agreement.meet("table servers are filled", word)[0]
            if answer != b"on":
                return answer == b"filled"

    def _slice(self, filling: Iterator[bool]) -> bytes:
        """Fill for a while: "on" if there is more to do."""
        end = time.monotonic() + min(SLICE_SECONDS, self._scene.deadline / 4)
        for alive in filling:
            if not alive:
                return b"lost"
            if time.monotonic() > end:
                return b"on"
        return b"filled"

    def _filling(self, told: Any) -> Iterator[bool]:
        """Gives True after each piece; False where the copy is lost already."""
        room = self.house.at(told)
        number, shard = room.numbers[0], room.shards[0]
        caller = self._early.get(number) or self._wires.call(room, self.me)
        self._early[number] = caller
        pieces = self.fill(shard, caller)
        while True:
            try:
                next(pieces)
            except StopIteration:
                return
            except (*LOSSES, DeadlineExceeded):
                yield False
                return
            yield True

    def _take_in(self, number: int, found: Any) -> None:
        """A copy that has begun counts from now on."""
        self.anew.pop(number, None)
        early = self._early.pop(number, None)
        if found is None:
            if early is not None:
                early.close()
            self._scene.say("a copy of a table server, to replace one that was lost, could not begin: there is one less")
            return
        self._wires.know(number, early)
        self._wires.reach(self.house.add(found), self.me)

    # ---- for others

    def take_lost(self) -> list[str]:
        """What those servers are called that were lost since this was asked last."""
        found, self._lost = self._lost, []
        return found

    def close(self) -> None:
        """Hang up with copies that are about to be."""
        for caller in self._early.values():
            with contextlib.suppress(*LOSSES):
                caller.close()
        self._early.clear()
