"""Recovery of a run when workers are lost, and admission of others: new groups are made for each
view that the launchers agree on.

    loss      any call fails -> all living workers meet in the new view, say how far they are, and
              go on together (`fault.recover`)
    joining   a new worker waits; those that train let it in between two turns, and give it their
              state

Each launcher tells its workers of a view (`cluster.control.commands`); the first worker of a view
serves the store in which members meet.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from paceline.cluster.control import events
from paceline.cluster.control.commands import CommandPipe, Roster
from paceline.cluster.store import Store
from paceline.comm.agreement import Agreement, CallResult
from paceline.comm.cancellation import CancelScope
from paceline.comm.group_protocol import Group
from paceline.elastic.handover import WholeState, hand_over_result, hand_over_state
from paceline.elastic.missed_turns import MissedTurns
from paceline.elastic.recover import RecoveryPlan, WorkerProgress, decide
from paceline.elastic.view_store import moved, open_store, serve
from paceline.errors import (
    LOSSES,
    DeadlineExceeded,
    Mismatch,
    PacelineError,
    ServerLost,
    ViewChanged,
    WorkerLost,
)
from paceline.workers.groups import WorkerContext, everyone


@dataclass(frozen=True)
class ViewGroups:
    """The workers of a view, and the groups made for it."""

    worker_context: WorkerContext
    group: Group
    members: tuple[int, ...]  # numbers of the workers, by rank; none is used twice in a job
    # ranks of the workers at the start, or numbers of their own for later ones
    origins: tuple[int, ...]
    turn: int = 0  # the turn in which nothing more can be exchanged; 0: none
    layout: Any = None  # of what the strategy exchanges, for a worker that joins


@dataclass
class JoinRequest:
    """Where a worker waits to be let in: the store of one view."""

    roster: Roster
    cancel_scope: CancelScope
    here: Store | None = None  # once it is open


class SurvivingRun(WholeState, Protocol):
    """What a recovery needs of the run that survives."""

    def regroup(self, founded: ViewGroups) -> None:
        """Go on in other groups."""
        ...

    def turn(self) -> int:
        """Return the number of the turn of training under way, from 1 on; 0 if there is none."""
        ...

    def lost(self, text: str) -> None:
        """Announce what has happened, in words."""
        ...

    def figures(self) -> Any:
        """Small figures that are sent to the others now and then, for `hear`; msgpack can pack
        them.
        """
        ...

    def hear(self, all_figures: Sequence[Any], members: tuple[int, ...]) -> None:
        """Take in the `figures` of all workers, which have just taken the same step."""
        ...

    def depart(self) -> None:
        """Wait until what this worker is sending to others has arrived, before it leaves."""
        ...

    def fates(self, before: tuple[int, ...]) -> str:
        """Words about the fate of state that only lost members had; empty if they had none."""
        ...

    def servers_lost(self) -> list[str]:
        """Return the names of the servers lost since the last call."""
        ...

    def join_info(self) -> Any:
        """Facts about the strategy's exchanges for a joining worker."""
        ...

    def form(self) -> str:
        """Form of a state that fits this run; compared before a state is handed over."""
        ...


class Recovery:
    """One worker's part in surviving losses.

    `orders` come from its launcher; `members` are the numbers of all workers at the start.
    """

    def __init__(
        self,
        worker_context: WorkerContext,
        agreement: Agreement,
        heart: SurvivingRun,
        orders: CommandPipe,
        members: tuple[int, ...],
    ) -> None:
        place = worker_context.place
        assert place.worker is not None
        self.worker, self.orders, self.members = place.worker, orders, members
        self._timings = place.timings.recovery
        self.generation = 0  # how often the group of workers has changed
        self.view = 0 if place.joining else 1
        self.fresh = place.joining  # this worker has no state yet
        self.pending = 0  # the view in which a worker waits to be let in, as all know; 0: none
        self._worker_context, self._agreement, self._heart = worker_context, agreement, heart
        # as of when it is let in
        self.missed_turns = MissedTurns(lambda: agreement.calls, answer=int(place.joining))
        self._server = serve(place)
        self._before = self.members  # as of the last event

    def arm(self) -> None:
        """Survive losses from now on: all workers are about to make the same call."""
        if self._agreement.recovery is not None:
            return
        self.orders.arm(
            self.view, frozenset(self.members), lambda: _trip(self._worker_context.cancel_scope)
        )
        self._survive()

    def _survive(self) -> None:
        self._agreement.survive_losses_by(self.recover)
        events.surviving(self._worker_context.place)

    # ---- losses

    def recover(self, error: PacelineError) -> CallResult[Any] | None:
        """Meet with all living workers and go on.

        Returns the result of the call that failed here, or None if no worker completed it.
        """
        # the view in which I have said that groups are broken
        began, discarded, complained = time.monotonic(), False, math.inf
        # of a server no launcher may know
        seconds = 0.0 if isinstance(error, ServerLost) else self._timings.view
        while True:
            roster = (
                self.orders.newer(self.view, self._timings.view)
                if discarded
                else self.orders.breaking(seconds, complained)
            )
            if roster is None and (latest := max(self.view, self.orders.latest)) == complained:
                raise error
            # no worker has died: a connection broke; launchers that had decided on another view did
            # not hear it
            if roster is None:
                complained, seconds = latest, self._timings.view
                events.broken(self._worker_context.place, latest)
                continue
            complained, discarded, self.view = math.inf, False, roster.number
            if self.worker not in roster.workers:
                raise WorkerLost(
                    "the others went on without this worker: it was out of reach, "
                    "or they took it for dead"
                ) from error
            with contextlib.suppress(*LOSSES, DeadlineExceeded):
                cancel_scope = self._armed(roster, roster.workers)
                here = open_store(self._worker_context, roster, cancel_scope).sub(
                    f"view{roster.number}"
                )
                if (reaches := self._meet(here, roster)) is not None:
                    result = self._regroup(
                        roster, here.sub("groups"), decide(reaches), cancel_scope
                    )
                    self._say(time.monotonic() - began, error)
                    return result
                discarded = True

    def _regroup(
        self, roster: Roster, here: Store, plan: RecoveryPlan, cancel_scope: CancelScope
    ) -> CallResult[Any] | None:
        worker_context = moved(self._worker_context, roster, here, plan.members, cancel_scope)
        group = everyone(worker_context)
        self._found(ViewGroups(worker_context, group, plan.members, plan.origins, plan.turn))
        self.pending = roster.number if plan.admits else 0
        self.missed_turns.begin(plan.asked if self.worker in plan.behind else 0)
        return hand_over_result(group, plan, self._agreement.last)

    def _found(self, founded: ViewGroups) -> None:
        self.members, self._worker_context = founded.members, founded.worker_context
        self.generation += 1
        self._heart.regroup(founded)

    def _meet(self, here: Store, roster: Roster) -> dict[int, WorkerProgress] | None:
        """Exchange how far each worker of a view has come; None if all meet in a newer view
        instead.

        A worker may have heard of a newer view, and never come here. So the first word in the store
        counts for all: "go", or "void".
        """
        agreement, keys = self._agreement, [f"reach/{worker}" for worker in roster.workers]
        origin = -1 if self.fresh else agreement.origins[agreement.group.rank]
        mine = WorkerProgress(
            origin,
            agreement.calls,
            self._heart.turn(),
            self.missed_turns.asked,
            self.missed_turns.admits,
        )
        here.put(f"reach/{self.worker}", mine.dump())
        word, end = "", time.monotonic() + self._worker_context.deadline
        while not word:
            if here.has(keys):
                word = here.first("word", "go")
            elif self.orders.newer(roster.number, self._timings.meet_look) is not None:
                word = here.first("word", "void")
            elif time.monotonic() > end:
                raise DeadlineExceeded(
                    f"not all workers of view {roster.number} came together within "
                    f"{self._worker_context.deadline:g} s"
                )
        return (
            {
                worker: WorkerProgress(*here.take(key))
                for worker, key in zip(roster.workers, keys, strict=True)
            }
            if word == "go"
            else None
        )

    def _say(self, seconds: float, error: PacelineError) -> None:
        before, self._before = self._before, self.members
        gone = [str(rank) for rank, member in enumerate(before) if member not in self.members]
        who = _lost(gone, self._heart.servers_lost()) or f"a connection broke ({error})"
        workers = f"{len(self.members)} worker{'s' * (len(self.members) > 1)}"
        self._heart.lost(
            f"{who}: {workers} went on after {seconds:.2f} s (view "
            f"{self.view}){self._heart.fates(before)}"
        )

    def _armed(self, roster: Roster, members: tuple[int, ...]) -> CancelScope:
        """Scope that breaks the connections of this view once one of its members is lost."""
        cancel_scope = CancelScope()
        self.orders.arm(roster.number, frozenset(members), lambda: _trip(cancel_scope))
        return cancel_scope

    # ---- coming

    def depart(self) -> None:
        """Let arrive what this worker is sending to others, before it leaves between two turns."""
        self._heart.depart()

    def news(self) -> list[Any]:
        """News of this worker for the others, sent when all hand over their logs."""
        return [self.orders.latest, self._heart.figures()]

    def hear(self, news: Sequence[Any]) -> None:
        """Take in the `news` of all workers."""
        self.note(min(latest for latest, _ in news))
        self._heart.hear([figures for _, figures in news], self.members)

    def note(self, latest: int) -> None:
        """Note that all workers have heard of this view, so that its new workers can be let in."""
        if latest > self.view and not {*self.orders.roster(latest).workers} <= {*self.members}:
            self.pending = latest

    @property
    def waited(self) -> bool:
        """Whether a worker waits to be let in, as far as this worker knows."""
        latest = self.orders.latest
        return self.pending > 0 or (
            latest > self.view and not {*self.orders.roster(latest).workers} <= {*self.members}
        )

    @property
    def short(self) -> bool:
        """Whether fewer workers are left than the job needs."""
        return len(self.members) < self._worker_context.place.min_workers

    def wait(self) -> None:
        """Wait until there are enough workers, and agree on the view that lets others in.

        Collective.

        The launchers may end the job in the meantime.
        """
        while (
            len(self.orders.roster(self.orders.latest).workers)
            < self._worker_context.place.min_workers
        ):
            self.orders.newer(self.orders.latest, self._timings.look)
        self.note(
            min(
                int(body)
                for body in self._agreement.meet("enough workers", str(self.orders.latest).encode())
            )
        )

    def admit(self, prepare: Callable[[], None]) -> None:
        """Let waiting workers in, between two turns, after `prepare`, which makes calls of all.

        Collective.
        """
        with self.missed_turns.admission():
            prepare()
            self._agreement.attempt_call(self._admit)

    def _admit(self) -> None:
        number, self.pending = max(self.view, self.pending), 0
        roster = self.orders.roster(number)
        if {*roster.workers} <= {*self.members}:
            return
        # One worker decides which join, and all hear it in the group that they have: the joining
        # ones may be lost meanwhile.
        fresh, refused = json.loads(
            self._agreement.tell_everyone(
                "who comes", lambda: json.dumps(self._look(roster)).encode()
            )
        )
        self.view = number
        if refused:
            self._heart.lost(
                f"{len(refused)} new worker(s) were refused: "
                "they are of another model, or version of paceline"
            )
        if fresh:
            self._let_in(roster, tuple(fresh))
        else:
            self.orders.arm(
                number, frozenset(self.members), lambda: _trip(self._worker_context.cancel_scope)
            )

    def _look(self, roster: Roster) -> tuple[list[int], list[int]]:
        """New workers of this view that train the same model, and new workers that don't.

        Both are empty if a newer view has come.
        """
        forms: dict[int, str] = {}
        new = [worker for worker in roster.workers if worker not in self.members]
        with contextlib.suppress(*LOSSES):
            here = open_store(self._worker_context, roster, CancelScope()).sub(
                f"view{roster.number}"
            )
            end = time.monotonic() + self._timings.form
            while (
                len(forms) < len(new)
                and self.orders.latest == roster.number
                and time.monotonic() < end
            ):
                worker = new[len(forms)]
                with contextlib.suppress(DeadlineExceeded):
                    forms[worker] = here.take(f"form/{worker}", self._timings.look)
            fresh = [worker for worker in new if forms.get(worker) == self._heart.form()]
            refused = [worker for worker in forms if worker not in fresh]
            if self.orders.latest == roster.number:
                invitation = _invitation(
                    self._agreement, self.members, fresh, self._heart.join_info()
                )
                here.put("admitted", invitation | {"refused": refused})
                return fresh, refused
        return [], []

    def _let_in(self, roster: Roster, fresh: tuple[int, ...]) -> None:
        members, old = (*self.members, *fresh), len(self.members)
        invitation = _invitation(self._agreement, self.members, fresh, self._heart.join_info())
        cancel_scope = self._armed(roster, members)
        here = open_store(self._worker_context, roster, cancel_scope).sub(f"view{roster.number}")
        worker_context = moved(
            self._worker_context, roster, here.sub("let in"), members, cancel_scope
        )
        self._found(
            ViewGroups(
                worker_context,
                everyone(worker_context),
                members,
                invitation["origins"],
                layout=invitation["layout"],
            )
        )
        self._hand_over(old)
        self._agreement.meet("let in")
        self._welcome(old)

    def _welcome(self, old: int) -> None:
        self._before = self.members
        ranks = ", ".join(str(rank) for rank in range(old, len(self.members)))
        self._heart.lost(
            f"rank {ranks} has come: {len(self.members)} workers go on (view {self.view})"
        )

    def _hand_over(self, old: int) -> None:
        """Give the state to the workers from rank `old` on."""
        wrong = hand_over_state(
            self._agreement.group, self._worker_context.cluster.where(), old, self._heart
        )
        self.fresh = False
        if wrong:
            self._heart.lost(
                f"rank {', '.join(map(str, wrong))} has other parameters than most workers"
            )

    def join(self) -> None:
        """Wait to be let in, and take over the state of the others."""
        events.ready(self._worker_context.place)
        # one of each view: those that train may answer in an earlier one, as they hear of views
        # later
        doors: list[JoinRequest] = []
        heard, end = self.view, time.monotonic() + self._worker_context.deadline
        alone = DeadlineExceeded(
            f"nobody let this worker in within {self._worker_context.deadline:g} s"
        )
        lost: PacelineError = alone
        while self.fresh:
            if (roster := self.orders.newer(heard, self._timings.join_look)) is not None:
                heard, lost, end = (
                    roster.number,
                    alone,
                    time.monotonic() + self._worker_context.deadline,
                )
                doors += (
                    [JoinRequest(roster, CancelScope())] if self.worker in roster.workers else []
                )
            elif time.monotonic() > end:
                raise lost
            for door in list(doors):
                try:
                    if self._opens(door):
                        self._enter(door)
                        break
                except LOSSES as error:
                    doors.remove(door)
                    # those that train are lost, too: a newer view comes soon, or no worker is left
                    # to join
                    if door.roster.number == heard:
                        lost, end = error, time.monotonic() + self._timings.view
        self._agreement.attempt_call(
            lambda: self._agreement.meet("let in") if self.generation == 1 else self._admit()
        )

    def _opens(self, door: JoinRequest) -> bool:
        """Whether the workers that train have said in this view whom they let in."""
        if door.here is None:
            door.here = open_store(self._worker_context, door.roster, door.cancel_scope).sub(
                f"view{door.roster.number}"
            )
            door.here.put(f"form/{self.worker}", self._heart.form())
            door.here.put(f"reach/{self.worker}", WorkerProgress(-1).dump())
        # as all say after a loss
        if door.here.has([f"reach/{worker}" for worker in door.roster.workers]):
            # or raises
            decide(
                {
                    worker: WorkerProgress(*door.here.take(f"reach/{worker}"))
                    for worker in door.roster.workers
                }
            )
        return door.here.has(["admitted"])

    def _enter(self, door: JoinRequest) -> None:
        assert door.here is not None
        found = door.here.take("admitted")
        roster, members = door.roster, tuple(found["members"])
        if self.worker not in members:
            raise _turned_away(self._timings.form, refused=self.worker in found["refused"])
        self.orders.arm(roster.number, frozenset(members), lambda: _trip(door.cancel_scope))
        worker_context = moved(
            self._worker_context, roster, door.here.sub("let in"), members, door.cancel_scope
        )
        self._agreement.skip_calls(found["calls"])
        self.generation, self.view = 0, roster.number
        self._found(
            ViewGroups(
                worker_context,
                everyone(worker_context),
                members,
                tuple(found["origins"]),
                layout=found["layout"],
            )
        )
        self._hand_over(found["old"])
        self._welcome(found["old"])
        self._survive()


def _turned_away(seconds: float, *, refused: bool) -> PacelineError:
    """Error of a worker that was not let in: it was refused, or waited too long."""
    if refused:
        return Mismatch(
            "this worker trains another model than those who run, or has another version of "
            "paceline: they go on without it"
        )
    return DeadlineExceeded(
        f"those who run waited {seconds:g} s for this worker, and went on without it: "
        "start it again"
    )


def _lost(ranks: Sequence[str], servers: list[str]) -> str:
    """Say which ranks and servers were lost; empty if none were."""
    names = [f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"] * bool(ranks) + servers
    return (
        f"{', '.join(names)} {'were' if len(ranks) > 1 or len(names) > 1 else 'was'} lost"
        if names
        else ""
    )


def _trip(cancel_scope: CancelScope) -> None:
    cancel_scope.trip(ViewChanged("the workers are others now"))


def _invitation(
    agreement: Agreement, members: tuple[int, ...], fresh: Sequence[int], layout: Any
) -> dict[str, Any]:
    """Facts for new workers, whose numbers are `fresh`."""
    numbers = itertools.count(agreement.highest + 1)
    origins = (*agreement.origins, *(number for number, _ in zip(numbers, fresh, strict=False)))
    return {
        "members": (*members, *fresh),
        "origins": origins,
        "old": len(members),
        "layout": layout,
        "calls": agreement.calls,
    }
