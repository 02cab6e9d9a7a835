"""How a run goes on when workers die, and when others come: the groups are made anew for each view that the launchers have agreed on.

    loss     any call fails -> all living meet in the new view, say how far they are, and go on together (`fault.recover`)
    coming   who has just come waits; those who train let it in between two turns, and give it their state

A view is told to every worker by its launcher (`cluster.orders`); the first worker of a view serves the store in which its members meet.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch.distributed import DistError

from paceline.cluster import report
from paceline.cluster.discover import Place
from paceline.cluster.orders import PORTS, Orders, Roster
from paceline.cluster.snapshot import loads, pack
from paceline.cluster.store import Store, address, hosts
from paceline.comm import wires
from paceline.comm.breaker import Breaker
from paceline.comm.group import Group
from paceline.comm.ordered import Agreement, Result
from paceline.errors import LOSSES, DeadlineExceeded, Mismatch, PacelineError, ViewChanged, WorkerLost
from paceline.fault.recover import Plan, Reach, decide, majority, nearest
from paceline.session.groups import Surroundings, everyone
from paceline.session.watching import Watching

if TYPE_CHECKING:  # torch's stubs know this name only where it comes from
    from torch._C._distributed_c10d import TCPStore
else:
    from torch.distributed import TCPStore

TOLD_SECONDS = 5.0  # how long a launcher may take to tell of a new view, before it is told that the group has broken
LOOK_SECONDS = 0.5  # between two looks of who waits whether there is a newer view
CONNECT_SECONDS = 4.0  # to the store of a view: its server lives, or there is a newer view soon


@dataclass(frozen=True)
class Founded:
    """The workers of a view, in their groups."""

    around: Surroundings
    group: Group
    origins: tuple[int, ...]  # what the members were called at the start
    turn: int = 0  # the turn in which nothing more can be exchanged; 0: none
    layout: Any = None  # of what the strategy exchanges, for who has just come


class Heart(Protocol):
    """What survives: the run, as its survival sees it."""

    def regroup(self, founded: Founded) -> None:
        """Take everything over to other groups."""
        ...

    def turn(self) -> int:
        """The turn of training under way, from 1 on; 0 if there is none."""
        ...

    def lost(self, text: str) -> None:
        """Told in words what has happened."""
        ...

    def layout(self) -> Any:
        """Of what the strategy exchanges."""
        ...

    def form(self) -> str:
        """What a state has to look like to be this run's; compared before one is handed over."""
        ...

    def give(self) -> tuple[bytes, str]:
        """All of the state, and the hash of what is equal on all workers."""
        ...

    def take(self, state: bytes) -> str:
        """Become that; gives the hash of it."""
        ...


class Survival:
    """One worker's part in surviving."""

    def __init__(self, around: Surroundings, agreement: Agreement, heart: Heart) -> None:
        place = around.place
        assert place.worker is not None and place.orders_fd is not None
        self.worker = place.worker
        self.orders = Orders(place.orders_fd)
        self.generation = 0  # how often the workers have become others
        self.view = 0 if place.joining else 1
        self.fresh = place.joining  # I have no state yet
        self.pending = 0  # the view in which somebody waits to be let in, as all know; 0: none
        self._around, self._agreement, self._heart = around, agreement, heart
        self._server = _serve(place)
        self.watching: Watching | None = None
        here = around.store.sub("workers")
        here.put(str(place.rank), place.worker)
        self.members: tuple[int, ...] = tuple(here.take(str(rank)) for rank in range(place.size))

    def arm(self) -> None:
        """From now on losses are survived: all workers are about to make the same call."""
        if self._agreement.recovery is not None:
            return
        self.orders.arm(self.view, frozenset(self.members), lambda: self._trip(self._around.breaker))
        self._survive()

    def _survive(self) -> None:
        self._agreement.recovery = self.recover
        self.watching = Watching(self._around.place, self._agreement, self._around.deadline)
        self.orders.asked = self.watching.answer
        report.surviving(self._around.place)

    def end(self) -> None:
        """The run is over."""
        if self.watching is not None:
            self.watching.stop()

    # ---- losses

    def recover(self, error: PacelineError) -> Result[Any] | None:
        """Come together with the living; gives what others got from the call that failed here, None if nobody has completed it."""
        began, complained = time.monotonic(), False
        while True:
            roster = self.orders.breaking(TOLD_SECONDS)
            if roster is None and complained:
                raise error
            if roster is None:  # nobody has died: a connection broke
                complained = True
                report.broken(self._around.place, self.orders.latest)
                continue
            complained, self.view = False, roster.number
            if self.worker not in roster.workers:
                raise WorkerLost("the others went on without this worker: it was out of reach, or they took it for dead") from error
            with contextlib.suppress(*LOSSES, DeadlineExceeded):
                return self._recover(roster, began, error)

    def _recover(self, roster: Roster, began: float, error: PacelineError) -> Result[Any] | None:
        breaker = Breaker()
        self.orders.arm(roster.number, frozenset(roster.workers), lambda: self._trip(breaker))
        store = self._open(roster, breaker)
        here = store.sub(f"view{roster.number}")
        reaches = self._meet(here, roster)
        plan = decide(reaches)
        around = self._moved(roster, here.sub("groups"), plan.members, breaker)
        group = everyone(around)
        gone = [rank for rank, member in enumerate(self.members) if member not in plan.members]
        self._found(Founded(around, group, plan.origins, plan.turn), plan.members)
        self.pending = roster.number if plan.fresh else 0
        told = self._tell(group, plan)
        self._say(gone, time.monotonic() - began, error)
        return told

    def _found(self, founded: Founded, members: tuple[int, ...]) -> None:
        self.members, self._around = members, founded.around
        self.generation += 1
        self._heart.regroup(founded)

    def _meet(self, here: Store, roster: Roster) -> dict[int, Reach]:
        """How far each worker of a view has come."""
        agreement = self._agreement
        origin = -1 if self.fresh else agreement.origins[agreement.group.rank]
        mine = Reach(origin, agreement.calls, self._heart.turn())
        here.put(f"reach/{self.worker}", mine.dump())
        return {worker: Reach(*here.take(f"reach/{worker}", self._around.deadline)) for worker in roster.workers}

    def _tell(self, group: Group, plan: Plan) -> Result[Any] | None:
        """Hand what the last call gave to those who were cut off in it."""
        if not plan.behind:
            return None
        body = pack([self._agreement.last]).dumps() if self.worker == plan.teller else b""
        found = group.agree(body)[plan.members.index(plan.teller)]
        return Result(loads(found).unpack()[0]) if self.worker in plan.behind else None

    def _say(self, gone: list[int], seconds: float, error: PacelineError) -> None:
        ranks = ", ".join(map(str, gone))
        who = f"ranks {ranks} were lost" if len(gone) > 1 else f"rank {ranks} was lost" if gone else f"a connection broke ({error})"
        workers = f"{len(self.members)} worker{'s' * (len(self.members) > 1)}"
        self._heart.lost(f"{who}: {workers} went on after {seconds:.2f} s (view {self.view})")

    def _trip(self, breaker: Breaker) -> None:
        breaker.trip(ViewChanged("the workers are others now"))

    # ---- coming

    def note(self, latest: int) -> None:
        """All workers have heard of this view: who is new in it can be let in."""
        if latest > self.view and not {*self.orders.roster(latest).workers} <= {*self.members}:
            self.pending = latest

    def admit(self) -> None:
        """Let in who waits, between two turns; all members call it at the same place."""
        self._agreement.attempt(self._admit)

    def _admit(self) -> None:
        number, self.pending = max(self.view, self.pending), 0
        roster = self.orders.roster(number)
        fresh = tuple(worker for worker in roster.workers if worker not in self.members)
        if not fresh:
            return
        breaker = Breaker()
        self.orders.arm(number, frozenset(roster.workers), lambda: self._trip(breaker))
        here = self._open(roster, breaker).sub(f"view{number}")
        forms = {worker: here.take(f"form/{worker}", self._around.deadline) for worker in fresh}
        refused = [worker for worker in fresh if forms[worker] != self._heart.form()]
        fresh = tuple(worker for worker in fresh if worker not in refused)
        members, old = (*self.members, *fresh), len(self.members)
        numbers = itertools.count(max(self._agreement.origins, default=-1) + 1)
        origins = (*self._agreement.origins, *(number for number, _ in zip(numbers, fresh, strict=False)))
        layout = self._heart.layout()
        if self.members[0] == self.worker:
            here.put("admitted", {"members": members, "origins": origins, "old": old, "layout": layout, "calls": self._agreement.calls})
        self.view = number
        if refused:
            self._heart.lost(f"{len(refused)} new worker(s) were refused: they are of another model, or version of paceline")
        if fresh:
            around = self._moved(roster, here.sub("let in"), members, breaker)
            self._found(Founded(around, everyone(around), origins, layout=layout), members)
            self._hand_over(old)
            self._agreement.meet("let in")
            self._welcome(old)

    def _welcome(self, old: int) -> None:
        ranks = ", ".join(str(rank) for rank in range(old, len(self.members)))
        self._heart.lost(f"rank {ranks} has come: {len(self.members)} workers go on (view {self.view})")

    def _hand_over(self, old: int) -> None:
        """Those from `old` on are given the state, each by somebody near; checked by the hash that most of the others have."""
        group, hosts = self._agreement.group, self._around.cluster.where()
        givers = {rank: nearest(rank, range(old), hosts) for rank in range(old, group.size)}
        body, digest = self._heart.give() if group.rank < old else (b"", "")
        mine = body if group.rank in givers.values() else b""
        heads = [json.loads(head) for head in group.agree(json.dumps([len(mine), digest]).encode())]
        sends = [(rank, torch.frombuffer(bytearray(mine), dtype=torch.uint8)) for rank, giver in givers.items() if giver == group.rank]
        room = torch.empty(heads[givers[group.rank]][0], dtype=torch.uint8) if group.rank in givers else None
        group.exchange(sends, [] if room is None else [(givers[group.rank], room)]).wait()
        right, wrong = majority({rank: heads[rank][1] for rank in range(old)})
        if room is not None:
            found = self._heart.take(room.numpy().tobytes())
            self.fresh = False
            if found != right:
                raise Mismatch(f"the state that rank {givers[group.rank]} handed over is not what most workers have")
        if wrong:
            self._heart.lost(f"rank {', '.join(map(str, wrong))} has other parameters than most workers")

    def join(self) -> None:
        """Wait to be let in, and become what the others are."""
        place = self._around.place
        report.ready(place)
        while self.fresh:
            roster = self.orders.newer(self.view, self._around.deadline)
            if roster is None:
                raise DeadlineExceeded(f"nobody let this worker in within {self._around.deadline:g} s")
            self.view = roster.number
            if self.worker in roster.workers:
                try:
                    self._join(roster)
                except LOSSES:
                    if self.orders.latest == self.view:
                        raise  # nobody is left to join
        self._agreement.attempt(lambda: self._agreement.meet("let in") if self.generation == 1 else self._admit())

    def _join(self, roster: Roster) -> None:
        breaker = Breaker()
        self.orders.arm(roster.number, frozenset(roster.workers), lambda: self._trip(breaker))
        here = self._open(roster, breaker).sub(f"view{roster.number}")
        here.put(f"form/{self.worker}", self._heart.form())
        here.put(f"reach/{self.worker}", Reach(-1).dump())
        found = self._admitted(here, roster)
        members = tuple(found["members"])
        if self.worker not in members:
            raise Mismatch("this worker trains another model than those who run, or has another version of paceline: they go on without it")
        around = self._moved(roster, here.sub("let in"), members, breaker)
        self._agreement.calls = found["calls"]
        self.generation = 0
        self._found(Founded(around, everyone(around), tuple(found["origins"]), layout=found["layout"]), members)
        self._hand_over(found["old"])
        self._welcome(found["old"])
        self._survive()

    def _admitted(self, here: Store, roster: Roster) -> dict[str, Any]:
        """What those who train say when they let me in; `ViewChanged` where they do so in a newer view."""
        end = time.monotonic() + self._around.deadline
        while time.monotonic() < end:
            with contextlib.suppress(DeadlineExceeded):
                found: dict[str, Any] = here.take("admitted", LOOK_SECONDS)
                return found
            if self.orders.latest > self.view:
                raise ViewChanged("there is a newer view")
            if here.has([f"reach/{worker}" for worker in roster.workers]):  # as all say after a loss
                decide({worker: Reach(*here.take(f"reach/{worker}")) for worker in roster.workers})  # raises if nobody has the state
        raise DeadlineExceeded(f"nobody let this worker in within {self._around.deadline:g} s")

    # ---- places

    def _open(self, roster: Roster, breaker: Breaker) -> Store:
        """The store of a view."""
        first, place = roster.members[0], self._around.place
        try:
            socket.create_connection((first.address, first.port), timeout=CONNECT_SECONDS).close()  # torch would be loud about it
            before = wires.leading(first.address, first.port)
            client = TCPStore(first.address, first.port, None, False, timedelta(seconds=CONNECT_SECONDS), wait_for_workers=False)
        except (OSError, DistError) as error:
            raise WorkerLost(f"the store of view {roster.number} can't be reached: {str(error).splitlines()[0]}") from error
        mine = wires.leading(first.address, first.port) - before
        breaker.add(lambda error: wires.sever(mine))
        return Store(client, place.secret, path="paceline", deadline=self._around.deadline)

    def _moved(self, roster: Roster, store: Store, members: tuple[int, ...], breaker: Breaker) -> Surroundings:
        """Where I stand among the members."""
        by_worker = {member.worker: member for member in roster.members}
        here = by_worker[self.worker]
        local = [worker for worker in members if by_worker[worker].host == here.host]
        place = replace(
            self._around.place,
            rank=members.index(self.worker),
            size=len(members),
            local_rank=local.index(self.worker),
            local_size=len(local),
            host_rank=here.host,
            hosts=len({by_worker[worker].host for worker in members}),
            meeting=(roster.members[0].address, roster.members[0].port),
            joining=False,
        )
        return replace(self._around, place=place, store=store, cluster=hosts(store, place), natives=0, breaker=breaker)


def _serve(place: Place) -> Any:
    """A store for views whose first worker I am."""
    assert place.store_fd is not None and place.worker is not None
    descriptor = os.dup(place.store_fd)
    where, seconds = (address(place), place.worker % PORTS), timedelta(seconds=30)
    return TCPStore(*where, None, True, seconds, wait_for_workers=False, multi_tenant=True, master_listen_fd=descriptor)


def reap(groups: list[Any]) -> None:
    """Let go of groups that have broken, without anyone waiting for it."""

    def close() -> None:
        for group in groups:
            group.close()

    threading.Thread(target=close, name="paceline reaper", daemon=True).start()
