"""How a run goes on when workers die, and when others come: the groups are made anew for each view that the launchers have agreed on.

    loss     any call fails -> all living meet in the new view, say how far they are, and go on together (`fault.recover`)
    coming   who has just come waits; those who train let it in between two turns, and give it their state

A view is told to every worker by its launcher (`cluster.orders`); the first worker of a view serves the store in which its members meet.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

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
from paceline.errors import LOSSES, DeadlineExceeded, PacelineError, ViewChanged, WorkerLost
from paceline.fault.recover import Plan, Reach, decide
from paceline.session.groups import Surroundings, everyone

if TYPE_CHECKING:  # torch's stubs know this name only where it comes from
    from torch._C._distributed_c10d import TCPStore
else:
    from torch.distributed import TCPStore

TOLD_SECONDS = 5.0  # how long a launcher may take to tell of a new view, before it is told that the group has broken
CONNECT_SECONDS = 4.0  # to the store of a view: its server lives, or there is a newer view soon


@dataclass(frozen=True)
class Founded:
    """The workers of a view, in their groups."""

    around: Surroundings
    group: Group
    plan: Plan
    origins: tuple[int, ...]  # what the members were called at the start


class Survival:
    """One worker's part in surviving. `regroup` takes the run over to new groups; `turn` is the turn of training under way, 0 if none."""

    def __init__(self, around: Surroundings, agreement: Agreement, regroup: Callable[[Founded], None], turn: Callable[[], int]) -> None:
        place = around.place
        assert place.worker is not None and place.orders_fd is not None
        self.worker = place.worker
        self.orders = Orders(place.orders_fd)
        self.generation = 0  # how often the workers have become others
        self.view = 0 if place.joining else 1
        self._around, self._agreement, self._regroup, self._turn = around, agreement, regroup, turn
        self._server = _serve(place)
        self._fresh = place.joining
        self.lost: Callable[[str], None] = lambda text: None  # told in words what has happened
        here = around.store.sub("workers")
        here.put(str(place.rank), place.worker)
        self.members: tuple[int, ...] = tuple(here.take(str(rank)) for rank in range(place.size))

    def arm(self) -> None:
        """From now on losses are survived: all workers are about to make the same call."""
        if self._agreement.recovery is not None:
            return
        self.orders.arm(self.view, frozenset(self.members), lambda: self._trip(self._around.breaker))
        self._agreement.recovery = self.recover
        report.surviving(self._around.place)

    # ---- losses

    def recover(self, error: PacelineError) -> Result[Any] | None:
        """Come together with the living; gives what others got from the call that failed here, None if nobody has completed it."""
        began, complained = time.monotonic(), False
        while True:
            roster = self.orders.newer(self.view, TOLD_SECONDS)
            if roster is None and complained:
                raise error
            if roster is None:  # nobody has died: a connection broke
                complained = True
                report.broken(self._around.place, self.view)
                continue
            complained, self.view = False, roster.number
            if self.worker not in roster.workers:
                raise WorkerLost("the others went on without this worker: it was out of reach, or they took it for dead") from error
            with contextlib.suppress(*LOSSES, DeadlineExceeded):
                return self._recover(roster, began)

    def _recover(self, roster: Roster, began: float) -> Result[Any] | None:
        breaker = Breaker()
        self.orders.arm(roster.number, frozenset(roster.workers), lambda: self._trip(breaker))
        store = self._open(roster, breaker)
        here = store.sub(f"view{roster.number}")
        reaches = self._meet(here, roster)
        plan = decide(reaches)
        around = self._moved(roster, here.sub("groups"), plan.members, breaker)
        group = everyone(around)
        gone = [rank for rank, member in enumerate(self.members) if member not in plan.members]
        origins = tuple(self._agreement.origins[reaches[worker].rank] for worker in plan.members)
        self.members, self._around = plan.members, around
        self.generation += 1
        self._regroup(Founded(around, group, plan, origins))
        told = self._tell(group, plan)
        self._say(gone, time.monotonic() - began)
        return told

    def _meet(self, here: Store, roster: Roster) -> dict[int, Reach]:
        """How far each worker of a view has come."""
        rank = self.members.index(self.worker) if self.worker in self.members and not self._fresh else -1
        mine = Reach(rank, self._agreement.calls, self._turn())
        here.put(f"reach/{self.worker}", mine.dump())
        return {worker: Reach(*here.take(f"reach/{worker}", self._around.deadline)) for worker in roster.workers}

    def _tell(self, group: Group, plan: Plan) -> Result[Any] | None:
        """Hand what the last call gave to those who were cut off in it."""
        if not plan.behind:
            return None
        body = pack([self._agreement.last]).dumps() if self.worker == plan.teller else b""
        found = group.agree(body)[plan.members.index(plan.teller)]
        return Result(loads(found).unpack()[0]) if self.worker in plan.behind else None

    def _say(self, gone: list[int], seconds: float) -> None:
        ranks = ", ".join(map(str, gone))
        who = f"ranks {ranks} were lost" if len(gone) > 1 else f"rank {ranks} was lost" if gone else "a connection broke"
        workers = f"{len(self.members)} worker{'s' * (len(self.members) > 1)}"
        self.lost(f"{who}: {workers} went on after {seconds:.2f} s (view {self.view})")

    def _trip(self, breaker: Breaker) -> None:
        breaker.trip(ViewChanged("the workers are others now"))

    # ---- places

    def _open(self, roster: Roster, breaker: Breaker) -> Store:
        """The store of a view."""
        first, place = roster.members[0], self._around.place
        try:
            before = wires.leading(first.address, first.port)
            client = TCPStore(first.address, first.port, None, False, timedelta(seconds=CONNECT_SECONDS), wait_for_workers=False)
        except DistError as error:
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
