"""Ranks that come and go, under `paceline run --horovod --min-workers`: where they meet again.

a rank dies, or another one waits -> the launchers decide a new view -> its store
ranks in `hvd.init` -> here? -> all members of the newest view are here -> new groups
                         ^          |
                         +----------+ a newer view has come meanwhile
"""

from __future__ import annotations

import time
from dataclasses import replace

from paceline.bridges.horovod.common.exceptions import HorovodInternalError
from paceline.cluster.control import events
from paceline.cluster.control.commands import CommandPipe, Roster
from paceline.cluster.store import Store
from paceline.comm.cancellation import CancelScope
from paceline.comm.group_protocol import Group
from paceline.elastic.view_store import connect_store, move_to_view, serve_store
from paceline.errors import (
    RECOVERABLE_ERRORS,
    DeadlineExceeded,
    PacelineError,
    ViewChanged,
    WorkerLost,
)
from paceline.workers.groups import WorkerContext, gather_worker_numbers, make_group_of_all


class ChangingMembers:
    """The members of a job that goes on when ranks die.

    Args:
        worker: This worker at its start. Its place has a number.
    """

    def __init__(self, worker: WorkerContext) -> None:
        place = worker.place
        assert place.worker is not None
        assert place.orders_fd is not None
        self.number, self.view = place.worker, 0 if place.joining else 1
        self._worker = worker
        self._commands = CommandPipe(place.orders_fd)
        self._served = serve_store(place)
        self._meetings = 0  # in the current view
        self._first = () if place.joining else gather_worker_numbers(worker)
        events.report_joined(place)
        if not place.joining:
            # the launcher starts other workers only for a run that has begun; there is no folder
            events.report_run_folder(place, "", 0, time.time())

    def has_newer_view(self) -> bool:
        """Whether the launchers have decided on other members."""
        return self._commands.latest_view > self.view

    def meet(self) -> tuple[WorkerContext, Group]:
        """Meet all members of the newest view, and make their group. Collective.

        Raises:
            HorovodInternalError: They didn't come in time.
        """
        if self._worker.place.joining:
            events.report_ready(self._worker.place)
        deadline = time.monotonic() + self._worker.deadline
        last_error: PacelineError = DeadlineExceeded("the other ranks did not come in time")
        while time.monotonic() < deadline:
            # a new rank has no view before it is in one; the others wait only after a failure
            roster = self._commands.wait_for_newer_view(self.view, 0.0 if self.view else 1.0)
            if roster is not None:
                self.view, self._meetings = roster.number, 0
            elif self.view > 1:
                roster = self._commands.find_roster(self.view)
            if not self.view or (roster is not None and self.number not in roster.workers):
                self._commands.wait_for_newer_view(self.view, 1.0)
                continue
            try:
                if (met := self._meet_in_view(roster)) is not None:
                    events.report_surviving(self._worker.place)
                    return met
            except (*RECOVERABLE_ERRORS, DeadlineExceeded) as error:
                last_error = error
                self._commands.wait_for_newer_view(self.view, 1.0)
        raise HorovodInternalError(f"ranks could not meet again: {last_error}") from last_error

    def _meet_in_view(self, roster: Roster | None) -> tuple[WorkerContext, Group] | None:
        """Meet in one view, the first one without a roster; None if a newer one has come."""
        members = self._first if roster is None else roster.workers
        scope = CancelScope()
        error = ViewChanged(f"view {self.view} has ended")
        self._commands.watch_breaking_views(
            self.view, frozenset(members), lambda: scope.trip(error)
        )
        self._meetings += 1
        whole = self._worker.store if roster is None else connect_store(self._worker, roster, scope)
        store = whole.open_substore(f"horovod{self.view}.{self._meetings}")
        if not self._wait_for_members(store, members):
            return None
        groups = store.open_substore("groups")
        if roster is None:
            worker = replace(self._worker, store=groups, natives=0, cancel_scope=scope)
        else:
            worker = move_to_view(self._worker, roster, groups, members, scope)
        return worker, make_group_of_all(worker)

    def _wait_for_members(self, store: Store, members: tuple[int, ...]) -> bool:
        """Wait until all members are here; False if a newer view has come before."""
        keys = [f"here/{member}" for member in members]
        store.put(f"here/{self.number}", True)
        deadline = time.monotonic() + self._worker.deadline
        while time.monotonic() < deadline:
            # the first word counts for all: some may know of a newer view already
            if store.has_keys(keys):
                return bool(store.set_if_absent("word", "go") == "go")
            if self._commands.wait_for_newer_view(self.view, 0.02) is not None:
                return bool(store.set_if_absent("word", "void") == "go")
        raise WorkerLost(f"not all ranks of view {self.view} came together")
