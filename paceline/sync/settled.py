"""In lockstep, where losses are survived: a step is settled once the gradients of all are where they have to be, and is made then.

    push all  |  settled: all workers' pushes are on all copies  |  close, read       by each worker; the first to close makes the step
      a worker is lost here: none of it counts,                     lost here: the step is made, with what
      the turn is dealt again                                       the lost one had pushed
      a server is lost here: the same                               lost here: its copies have all of it

A copy that was lost is started anew in the background, and is given what the others have between two steps.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.comm.messages import Caller
from paceline.comm.ordered import Voided
from paceline.errors import LOSSES, DeadlineExceeded, StateLost
from paceline.sync import recipe
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


class Settled:
    """Bulk synchronous, where losses are survived. `house` is where servers are."""

    free = drops = False

    def __init__(self, client: Client, house: House, copies: int) -> None:
        self._client, self.house, self._copies = client, house, copies
        self._makers: dict[int, list[int]] = {}  # by optimizer: the workers whose gradients make its next step, once that is settled
        self._made: list[int] = []  # the optimizers that have stepped in this turn
        self._lost: list[str] = []  # servers, as they are called
        self._anew: dict[int, Anew] = {}  # by number
        self._early: dict[int, Caller] = {}  # the first worker's ends to copies that are about to be

    # ---- a step

    def begin(self) -> None:
        """See `Pace`."""

    def weight(self, part: float) -> float:
        """See `Pace`."""
        return part

    def pushing(self, number: int) -> None:
        """See `Pace`."""

    def _settle(self, number: int) -> None:
        """What this step is made of is on all servers, for all workers. Raises `Voided`, on all, if that can't be any more."""
        client = self._client
        if number in self._makers:
            client.settle(number)  # raises if p.grad has been changed since
            return
        if client.scene.moment.cut:
            raise Voided("a worker was lost in this turn")

        def act() -> list[int]:
            client.settle(number)
            return list(client.workers)

        self._makers[number] = client.scene.agreement.settle(act, "optimizer.step")

    def step(self, number: int) -> None:
        """See `Pace`. Raises `Voided` where the turn comes again."""
        client = self._client
        self._settle(number)
        parcels = client.units(number)
        settings, step = recipe.settings(client.optimizers[number]), client.steps_taken[number] + 1
        body = {"workers": self._makers[number], "factor": client.factors.get(number, 1.0), "settings": list(enumerate(settings))}
        body |= {"decided": True, "same": True, "undo": len(client.optimizers) > 1}  # another may fail in the same turn

        def act() -> list[Any]:
            closes = client.everywhere("close", number, step, body)
            reads = client.ask_for(parcels, step)
            for caller, message in closes:
                caller.wait(message, client.seconds)
            client.take_in(parcels, reads)
            return self._begun() if self._anew else []

        begun = client.scene.agreement.repeat(act, what="optimizer.step")
        self._made.append(number)
        del self._makers[number]
        client.factors.pop(number, None)
        client.steps_taken[number] = step
        if begun:
            self._take_in(begun)

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        """See `Pace`. Raises `Voided` where the turn comes again."""
        client = self._client
        for number in numbers:
            self._settle(number)

        def act() -> list[float]:
            asked = []
            for number in numbers:
                body = {"workers": self._makers[number], "kind": None if kind == math.inf else kind, "decided": True}
                asked += client.everywhere("norm", number, client.steps_taken[number] + 1, body, ask=True)
            return [float(caller.wait(message, client.seconds).body["norm"]) for caller, message in asked]

        return client.scene.agreement.repeat(act, what="run.clip")

    def commit(self) -> None:
        """See `Pace`."""
        self._made.clear()

    def abort(self) -> None:
        """The turn comes again: nothing of it has happened on servers. Raises `StateLost` where one optimizer steps twice in it."""
        client, made = self._client, self._made
        self._makers.clear()
        client.factors.clear()
        if len({*made}) < len(made) or (made and len(client.optimizers) == 1):
            raise StateLost(
                "a worker was lost in a turn in which an optimizer steps twice, and servers go back by one step of each alone: resume from "
                "a checkpoint"
            )
        back = [[number, client.steps_taken[number]] for number in made]
        for caller in client.wires.callers:
            with contextlib.suppress(*LOSSES):  # one that is lost now shows it in the next call
                caller.call("back", body={"steps": back}, seconds=client.seconds)
        for number in made:
            client.steps_taken[number] -= 1
            client.wrapper.unlearn(client.units(number))
        self._made.clear()

    # ---- other workers, other servers

    def regroup(self, layout: Any) -> None:
        """The workers are others, or servers were lost. Collective. Raises `StateLost` where nobody has a shard any more."""
        client, house = self._client, self.house
        group, me = client.scene.group, client.workers[client.scene.group.rank]
        mine = {"lost": client.wires.lost(min(client.seconds, ALIVE_SECONDS)), "here": house.here}
        told = [json.loads(body) for body in group.agree(json.dumps(mine).encode())]
        lost = {number for each in told for number in each["lost"]}
        if layout is not None:
            self._anew = {number: Anew(*found) for number, found in layout}
        shards = len(client.wires.of)
        self._lost += (names := client.wires.names(lost))
        room = house.lose(lost)
        bare = sorted({*range(shards)} - {*room.shards})
        if bare:
            raise StateLost(
                f"{' and '.join(names)}: gone, and nobody else has what was kept there; resume from a checkpoint (with replicas=2 a copy "
                "on another host goes on)"
            )
        client.wires.reach(room, me)
        self._replace([each["here"] for each in told], room)

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
            mine = starter == client.workers[client.scene.group.rank]
            self._anew[house.spawn(shard, mine=mine)] = Anew(shard, starter)

    def _begun(self) -> list[Any]:
        """The servers that have begun since, with what they are to keep: between two steps, when nobody tells servers anything."""
        client, house = self._client, self.house
        me = client.workers[client.scene.group.rank]
        mine = {number: house.spawned(number) for number, found in self._anew.items() if found.starter == me}
        answers = client.scene.agreement.meet("servers begin", json.dumps(list(mine.items())).encode())
        told = [found for answer in answers for found in json.loads(answer) if found[1] is not None]
        if not told:
            return []
        filled = [number for number, found in told if client.scene.group.rank == 0 and found and self._fill(found)]
        filled = json.loads(client.scene.agreement.meet("servers are filled", json.dumps(filled).encode())[0])
        return [(number, found if number in filled else None) for number, found in told]

    def _fill(self, told: Any) -> bool:
        """Give a server that has begun what the others of its shard have; False if it is lost already."""
        client, room = self._client, self.house.at(told)
        number, shard = room.numbers[0], room.shards[0]
        state = client.wires.primaries[shard].call("state", seconds=client.seconds)
        try:
            caller = self._early.get(number) or client.wires.call(room, client.workers[0])
            self._early[number] = caller
            caller.call("plan", tensors=[packed(write(client.plans[shard]))], seconds=client.seconds)
            caller.call("become", tensors=state.tensors, seconds=client.seconds)
        except (*LOSSES, DeadlineExceeded):
            return False
        return True

    def _take_in(self, begun: Sequence[Any]) -> None:
        """Servers that have begun count from now on."""
        client = self._client
        me = client.workers[client.scene.group.rank]
        for number, found in begun:
            del self._anew[number]
            early = self._early.pop(number, None)
            if found is None:
                client.scene.say("a copy of a server, to replace one that was lost, could not begin: there is one less")
            else:
                client.wires.know(number, early)
                client.wires.reach(self.house.add(found), me)

    def take_lost(self) -> list[str]:
        """See `Steps.servers_lost`."""
        found, self._lost = self._lost, []
        return found

    def layout(self) -> Any:
        """Which copies are about to be, for who has just come."""
        return [[number, list(found)] for number, found in self._anew.items()]
