"""Recovery of a run when workers are lost, and admission of new workers.

A view is a set of workers on which the launchers agree. New groups are made for each view.

    loss      any call fails -> the remaining workers meet in the new view, exchange their progress,
              and go on together (`elastic/recovery_plan.py`)
    joining   a new worker waits; the workers that train let it in between two turns, and send it
              their state

Each launcher tells its workers about a view (`cluster.control.commands`). The first worker of a
view serves the store in which its members meet.
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
from paceline.comm.agreement import Recovery as Heal
from paceline.comm.cancellation import CancelScope
from paceline.comm.group_protocol import Group
from paceline.elastic.handover import StateOwner, hand_over_result, hand_over_state
from paceline.elastic.missed_turns import MissedTurns
from paceline.elastic.recovery_plan import RecoveryPlan, WorkerProgress, make_recovery_plan
from paceline.elastic.view_store import connect_store, move_to_view, serve_store
from paceline.errors import (
    RECOVERABLE_ERRORS,
    DeadlineExceeded,
    Mismatch,
    PacelineError,
    ServerLost,
    ViewChanged,
    WorkerLost,
)
from paceline.workers.groups import WorkerContext, make_group_of_all


@dataclass(frozen=True)
class ViewGroups:
    """The workers of a view, and the groups made for it.

    Attributes:
        worker_context: Context of this worker in the view.
        group: Group of all workers.
        members: Numbers of the workers, by rank. No number is used twice in a job.
        origins: Ranks of the workers at the start of the job. A worker that joined later has a
            number of its own.
        turn: The turn in which nothing more can be exchanged. 0: none.
        layout: The `join_info` of the run, for a worker that joins.
    """

    worker_context: WorkerContext
    group: Group
    members: tuple[int, ...]
    origins: tuple[int, ...]
    failed_turn: int = 0
    join_info: Any = None


@dataclass
class JoinRequest:
    """A request of a new worker to be let in, in the store of one view."""

    roster: Roster
    cancel_scope: CancelScope
    store: Store | None = None  # None until it is open


class SurvivingRun(StateOwner, Protocol):
    """The run that survives losses, as its recovery sees it."""

    def regroup(self, groups: ViewGroups) -> None:
        """Move to other groups. Collective."""
        ...

    def get_turn(self) -> int:
        """Number of the turn of training under way, counted from 1; 0 if there is none."""
        ...

    def announce_event(self, text: str) -> None:
        """Announce an event to the user."""
        ...

    def measure_healing(self, recover: Heal) -> Heal:
        """Return a function that recovers as `recover` does, and is measured."""
        ...

    def collect_news(self) -> Any:
        """News of this worker for the others, which msgpack can pack."""
        ...

    def hear_news(self, all_figures: Sequence[Any], members: tuple[int, ...]) -> None:
        """Handle the news of all workers. All of them have just taken the same step."""
        ...

    def finish_sending(self) -> None:
        """Wait until all data that this worker sends has arrived, before it leaves."""
        ...

    def describe_fates(self, before: tuple[int, ...]) -> str:
        """Text about the fate of state that only lost members had; empty if there was none."""
        ...

    def take_lost_servers(self) -> list[str]:
        """Names of the servers that were lost since the last call."""
        ...

    def join_info(self) -> Any:
        """Facts about the strategy's exchanges for a joining worker."""
        ...

    def compute_model_digest(self) -> str:
        """Digest of the models and options. A state fits only a run with an equal digest."""
        ...


class Recovery:
    """One worker's part in surviving losses and letting new workers in.

    Invariants: `members`, `view` and `generation` describe the groups in use. They change together,
    at the same call on all workers. `pending_view` is 0, or a view newer than `view` that all
    workers know. `has_no_state` holds from the start of a new worker until it has the state of the
    others.

    Args:
        worker_context: Context of this worker.
        agreement: Agreement between all workers.
        heart: The run that survives.
        orders: Commands of this worker's launcher.
        members: Numbers of all workers at the start, by rank.
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
        self.generation = 0  # number of changes of the group of workers
        self.view = 0 if place.joining else 1
        self.has_no_state = place.joining  # this worker has no state yet
        self.pending_view = 0  # view in which a worker waits to be let in; 0: none
        self._worker_context, self._agreement, self._run = worker_context, agreement, heart
        # A new worker counts from the moment at which it is let in.
        self.missed_turns = MissedTurns(lambda: agreement.calls, answer=int(place.joining))
        self._store_daemon = serve_store(place)
        self._last_members = self.members  # members at the last announcement

    def arm_recovery(self) -> None:
        """Survive losses from now on. All workers are about to make the same call."""
        if self._agreement.recovery is not None:
            return
        self.orders.watch_breaking_views(
            self.view,
            frozenset(self.members),
            lambda: _cancel_view(self._worker_context.cancel_scope),
        )
        self._enable_survival()

    def _enable_survival(self) -> None:
        self._agreement.survive_losses_by(self._run.measure_healing(self.recover_from))
        events.report_surviving(self._worker_context.place)

    # ---- losses

    def recover_from(self, error: PacelineError) -> CallResult[Any] | None:
        """Meet with all remaining workers, and go on with them in new groups.

            wait for a view without a member -> meet in its store -> make groups -> announce
                    ^                                  |                 |
                    +---------- newer view ------------+---- loss -------+

        Returns the result of the call that failed here, or None if no worker completed it.
        """
        # `reported_view` is the view for which this worker has reported broken groups; inf: none.
        start, view_is_void, reported_view = time.monotonic(), False, math.inf
        # Launchers may never notice the loss of a server. So the report about it doesn't wait.
        seconds = 0.0 if isinstance(error, ServerLost) else self._timings.view
        while True:
            roster = (
                self.orders.wait_for_newer_view(self.view, self._timings.view)
                if view_is_void
                else self.orders.wait_for_breaking_view(seconds, reported_view)
            )
            if (
                roster is None
                and (latest := max(self.view, self.orders.latest_view)) == reported_view
            ):
                raise error
            # No new view came: no worker has died, but a connection broke. Report it to the
            # launchers, and wait for their next view. After a second timeout, give up.
            if roster is None:
                reported_view, seconds = latest, self._timings.view
                events.report_broken_view(self._worker_context.place, latest)
                continue
            reported_view, view_is_void, self.view = math.inf, False, roster.number
            if self.worker not in roster.workers:
                raise WorkerLost(
                    "the other workers went on without this one: it was out of reach, "
                    "or they took it for dead"
                ) from error
            # If another worker is lost in this block, the next view makes a new attempt.
            with contextlib.suppress(*RECOVERABLE_ERRORS, DeadlineExceeded):
                cancel_scope = self._arm_view(roster, roster.workers)
                store = connect_store(self._worker_context, roster, cancel_scope).open_substore(
                    f"view{roster.number}"
                )
                if (progress := self._exchange_progress(store, roster)) is not None:
                    result = self._make_groups(
                        roster,
                        store.open_substore("groups"),
                        make_recovery_plan(progress),
                        cancel_scope,
                    )
                    self._announce_recovery(time.monotonic() - start, error)
                    return result
                view_is_void = True

    def _make_groups(
        self, roster: Roster, store: Store, plan: RecoveryPlan, cancel_scope: CancelScope
    ) -> CallResult[Any] | None:
        """Make the groups of a view, and hand the result of the last call to workers behind."""
        worker_context = move_to_view(
            self._worker_context, roster, store, plan.members, cancel_scope
        )
        group = make_group_of_all(worker_context)
        self._enter_groups(
            ViewGroups(worker_context, group, plan.members, plan.origins, plan.failed_turn)
        )
        self.pending_view = roster.number if plan.is_admitting else 0
        self.missed_turns.begin_repeating(
            plan.repeated_answers if self.worker in plan.behind else 0
        )
        return hand_over_result(group, plan, self._agreement.last)

    def _enter_groups(self, groups: ViewGroups) -> None:
        self.members, self._worker_context = groups.members, groups.worker_context
        self.generation += 1
        self._run.regroup(groups)

    def _exchange_progress(self, store: Store, roster: Roster) -> dict[int, WorkerProgress] | None:
        """Exchange the progress of all workers of a view; None if they meet in a newer view.

        A worker may have heard of a newer view, and never come to this one. So the first word in
        the store counts for all workers: "go", or "void".
        """
        agreement, keys = self._agreement, [f"reach/{worker}" for worker in roster.workers]
        origin = -1 if self.has_no_state else agreement.origins[agreement.group.rank]
        own_progress = WorkerProgress(
            origin,
            agreement.calls,
            self._run.get_turn(),
            self.missed_turns.answers_since_call,
            self.missed_turns.is_admitting,
        )
        store.put(f"reach/{self.worker}", own_progress.to_list())
        word, deadline = "", time.monotonic() + self._worker_context.deadline
        while not word:
            if store.has_keys(keys):
                word = store.set_if_absent("word", "go")
            elif (
                self.orders.wait_for_newer_view(roster.number, self._timings.meet_look) is not None
            ):
                word = store.set_if_absent("word", "void")
            elif time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"not all workers of view {roster.number} came together within "
                    f"{self._worker_context.deadline:g} s"
                )
        return (
            {
                worker: WorkerProgress(*store.take(key))
                for worker, key in zip(roster.workers, keys, strict=True)
            }
            if word == "go"
            else None
        )

    def _announce_recovery(self, seconds: float, error: PacelineError) -> None:
        """Announce the losses, the duration of the recovery, and the fate of unreplicated state."""
        members_before, self._last_members = self._last_members, self.members
        lost_ranks = [
            str(rank) for rank, member in enumerate(members_before) if member not in self.members
        ]
        cause = (
            _describe_losses(lost_ranks, self._run.take_lost_servers())
            or f"a connection broke ({error})"
        )
        workers = f"{len(self.members)} worker{'s' * (len(self.members) > 1)}"
        self._run.announce_event(
            f"{cause}: {workers} went on after {seconds:.2f} s (view "
            f"{self.view}){self._run.describe_fates(members_before)}"
        )

    def _arm_view(self, roster: Roster, members: tuple[int, ...]) -> CancelScope:
        """Make a scope that is cancelled as soon as one of these members is lost."""
        cancel_scope = CancelScope()
        self.orders.watch_breaking_views(
            roster.number, frozenset(members), lambda: _cancel_view(cancel_scope)
        )
        return cancel_scope

    # ---- joining

    def finish_sending(self) -> None:
        """Wait until all data that this worker sends has arrived, before it leaves."""
        self._run.finish_sending()

    def collect_news(self) -> list[Any]:
        """Collect the news of this worker, which are sent when all hand over their logs."""
        return [self.orders.latest_view, self._run.collect_news()]

    def hear_news(self, news: Sequence[Any]) -> None:
        """Handle the news of all workers."""
        # The minimum is the newest view of which all workers have heard.
        self.note_view(min(latest for latest, _ in news))
        self._run.hear_news([figures for _, figures in news], self.members)

    def note_view(self, latest: int) -> None:
        """Note that all workers know the view `latest`, so its new workers can be let in."""
        if latest > self.view and not {*self.orders.find_roster(latest).workers} <= {*self.members}:
            self.pending_view = latest

    @property
    def has_waiting_workers(self) -> bool:
        """Whether a worker waits to be let in, as far as this worker knows."""
        latest = self.orders.latest_view
        return self.pending_view > 0 or (
            latest > self.view and not {*self.orders.find_roster(latest).workers} <= {*self.members}
        )

    @property
    def lacks_workers(self) -> bool:
        """Whether fewer workers are left than the job needs."""
        return len(self.members) < self._worker_context.place.min_workers

    def wait_for_workers(self) -> None:
        """Wait until there are enough workers, and agree on the view that lets new ones in.

        Collective. The launchers may end the job in the meantime.
        """
        while (
            len(self.orders.find_roster(self.orders.latest_view).workers)
            < self._worker_context.place.min_workers
        ):
            self.orders.wait_for_newer_view(self.orders.latest_view, self._timings.look)
        self.note_view(
            min(
                int(body)
                for body in self._agreement.meet(
                    "enough workers", str(self.orders.latest_view).encode()
                )
            )
        )

    def admit_workers(self, prepare: Callable[[], None]) -> None:
        """Let waiting workers in, between two turns. Collective.

        `prepare` comes first. It may make collective calls.
        """
        with self.missed_turns.mark_admission():
            prepare()
            self._agreement.attempt_call(self._admit_pending)

    def _admit_pending(self) -> None:
        view, self.pending_view = max(self.view, self.pending_view), 0
        roster = self.orders.find_roster(view)
        if {*roster.workers} <= {*self.members}:
            return
        # The first worker decides which workers join. The others hear it in the old group, because
        # the new workers may be lost meanwhile.
        accepted, refused = json.loads(
            self._agreement.tell_everyone(
                "who comes", lambda: json.dumps(self._check_new_workers(roster)).encode()
            )
        )
        self.view = view
        if refused:
            self._run.announce_event(
                f"{len(refused)} new worker(s) were refused: they have another model or another "
                "version of paceline; start them with the same script and version"
            )
        if accepted:
            self._add_workers(roster, tuple(accepted))
        else:
            self.orders.watch_breaking_views(
                view,
                frozenset(self.members),
                lambda: _cancel_view(self._worker_context.cancel_scope),
            )

    def _check_new_workers(self, roster: Roster) -> tuple[list[int], list[int]]:
        """Divide the new workers of a view into those with the same model and those without.

        Writes the answer for them into the store. Both lists are empty if a newer view has come.
        """
        digests: dict[int, str] = {}
        new = [worker for worker in roster.workers if worker not in self.members]
        with contextlib.suppress(*RECOVERABLE_ERRORS):
            store = connect_store(self._worker_context, roster, CancelScope()).open_substore(
                f"view{roster.number}"
            )
            # Each new worker has written the digest of its model. Wait for all of them.
            deadline = time.monotonic() + self._timings.form
            while (
                len(digests) < len(new)
                and self.orders.latest_view == roster.number
                and time.monotonic() < deadline
            ):
                worker = new[len(digests)]
                with contextlib.suppress(DeadlineExceeded):
                    digests[worker] = store.take(f"form/{worker}", self._timings.look)
            accepted = [
                worker for worker in new if digests.get(worker) == self._run.compute_model_digest()
            ]
            refused = [worker for worker in digests if worker not in accepted]
            if self.orders.latest_view == roster.number:
                invitation = _make_invitation(
                    self._agreement, self.members, accepted, self._run.join_info()
                )
                store.put("admitted", invitation | {"refused": refused})
                return accepted, refused
        return [], []

    def _add_workers(self, roster: Roster, new_workers: tuple[int, ...]) -> None:
        """Make groups with these new workers, and send them the state. Collective."""
        members, old_size = (*self.members, *new_workers), len(self.members)
        invitation = _make_invitation(
            self._agreement, self.members, new_workers, self._run.join_info()
        )
        cancel_scope = self._arm_view(roster, members)
        store = connect_store(self._worker_context, roster, cancel_scope).open_substore(
            f"view{roster.number}"
        )
        worker_context = move_to_view(
            self._worker_context, roster, store.open_substore("let in"), members, cancel_scope
        )
        self._enter_groups(
            ViewGroups(
                worker_context,
                make_group_of_all(worker_context),
                members,
                invitation["origins"],
                join_info=invitation["layout"],
            )
        )
        self._hand_over_state(old_size)
        self._agreement.meet("let in")
        self._announce_new_workers(old_size)

    def _announce_new_workers(self, old_size: int) -> None:
        self._last_members = self.members
        ranks = ", ".join(str(rank) for rank in range(old_size, len(self.members)))
        self._run.announce_event(
            f"rank {ranks} has come: {len(self.members)} workers go on (view {self.view})"
        )

    def _hand_over_state(self, old_size: int) -> None:
        """Send the state to the new workers, which have the ranks from `old_size` on."""
        odd_ranks = hand_over_state(
            self._agreement.group, self._worker_context.cluster.host_by_rank(), old_size, self._run
        )
        self.has_no_state = False
        if odd_ranks:
            self._run.announce_event(
                f"rank {', '.join(map(str, odd_ranks))} has other parameters than most workers"
            )

    def join_run(self) -> None:
        """Wait to be let in, and load the state of the other workers."""
        events.report_ready(self._worker_context.place)
        # One request for each view. The workers that train hear of views later, so they may answer
        # in an earlier one.
        requests: list[JoinRequest] = []
        newest_view, deadline = self.view, time.monotonic() + self._worker_context.deadline
        timeout_error = DeadlineExceeded(
            f"the workers of the run have not let this worker in within "
            f"{self._worker_context.deadline:g} s; start it again"
        )
        last_error: PacelineError = timeout_error
        while self.has_no_state:
            if (
                roster := self.orders.wait_for_newer_view(newest_view, self._timings.join_look)
            ) is not None:
                newest_view, last_error, deadline = (
                    roster.number,
                    timeout_error,
                    time.monotonic() + self._worker_context.deadline,
                )
                requests += (
                    [JoinRequest(roster, CancelScope())] if self.worker in roster.workers else []
                )
            elif time.monotonic() > deadline:
                raise last_error
            for request in list(requests):
                try:
                    if self._has_answer(request):
                        self._enter_view(request)
                        break
                except RECOVERABLE_ERRORS as error:
                    requests.remove(request)
                    # A worker that trains was lost, too. A newer view comes soon, or no worker is
                    # left to join.
                    if request.roster.number == newest_view:
                        last_error, deadline = error, time.monotonic() + self._timings.view
        self._agreement.attempt_call(
            lambda: (
                self._agreement.meet("let in") if self.generation == 1 else self._admit_pending()
            )
        )

    def _has_answer(self, request: JoinRequest) -> bool:
        """Whether the workers that train have answered in this view."""
        if request.store is None:
            request.store = connect_store(
                self._worker_context, request.roster, request.cancel_scope
            ).open_substore(f"view{request.roster.number}")
            request.store.put(f"form/{self.worker}", self._run.compute_model_digest())
            request.store.put(f"reach/{self.worker}", WorkerProgress(-1).to_list())
        # After a loss all workers of a view write their progress, and this worker isn't let in.
        # `make_recovery_plan` raises if no worker with state is left.
        if request.store.has_keys([f"reach/{worker}" for worker in request.roster.workers]):
            make_recovery_plan(
                {
                    worker: WorkerProgress(*request.store.take(f"reach/{worker}"))
                    for worker in request.roster.workers
                }
            )
        return request.store.has_keys(["admitted"])

    def _enter_view(self, request: JoinRequest) -> None:
        """Enter the groups of a view as a new worker, and load the state."""
        assert request.store is not None
        invitation = request.store.take("admitted")
        roster, members = request.roster, tuple(invitation["members"])
        if self.worker not in members:
            raise _make_refusal_error(
                self._timings.form, refused=self.worker in invitation["refused"]
            )
        self.orders.watch_breaking_views(
            roster.number, frozenset(members), lambda: _cancel_view(request.cancel_scope)
        )
        worker_context = move_to_view(
            self._worker_context,
            roster,
            request.store.open_substore("let in"),
            members,
            request.cancel_scope,
        )
        self._agreement.skip_calls(invitation["calls"])
        self.generation, self.view = 0, roster.number
        self._enter_groups(
            ViewGroups(
                worker_context,
                make_group_of_all(worker_context),
                members,
                tuple(invitation["origins"]),
                join_info=invitation["layout"],
            )
        )
        self._hand_over_state(invitation["old"])
        self._announce_new_workers(invitation["old"])
        self._enable_survival()


def _make_refusal_error(seconds: float, *, refused: bool) -> PacelineError:
    """Make the error of a worker that was not let in: it was refused, or came too late."""
    if refused:
        return Mismatch(
            "this worker has another model than the running workers, or another version of "
            "paceline: they go on without it; start it with the same script and version"
        )
    return DeadlineExceeded(
        f"the running workers waited {seconds:g} s for this worker, and went on without it: "
        "start it again"
    )


def _describe_losses(ranks: Sequence[str], servers: list[str]) -> str:
    """Describe which ranks and servers were lost; empty if none were."""
    names = [f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"] * bool(ranks) + servers
    return (
        f"{', '.join(names)} {'were' if len(ranks) > 1 or len(names) > 1 else 'was'} lost"
        if names
        else ""
    )


def _cancel_view(cancel_scope: CancelScope) -> None:
    cancel_scope.trip(ViewChanged("the workers are others now"))


def _make_invitation(
    agreement: Agreement, members: tuple[int, ...], new_workers: Sequence[int], layout: Any
) -> dict[str, Any]:
    """Make the facts that new workers need to enter the groups."""
    unused_numbers = itertools.count(agreement.highest + 1)
    origins = (
        *agreement.origins,
        *(number for number, _ in zip(unused_numbers, new_workers, strict=False)),
    )
    return {
        "members": (*members, *new_workers),
        "origins": origins,
        "old": len(members),
        "layout": layout,
        "calls": agreement.calls,
    }
