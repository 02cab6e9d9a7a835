"""Departure of a host that was told to leave.

First the data that only its servers have is copied to other hosts. Then it leaves, between two
turns.

    run.log             the workers of the host tell all others that it has to leave
    after that step     all workers meet; hosts that stay begin to copy data that only leaving hosts
                        have
    some steps later    the copies are complete and replace the servers of the leaving host, and its
                        workers leave

If all hosts leave, or if copying takes too long, they leave at once, and their data is lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from paceline.cluster.control.commands import CommandPipe
from paceline.servers.worker.replication import ServerReplication
from paceline.sync.context import SyncContext


class Departure:
    """One worker's part in the departure of a host.

    Args:
        worker: Number of this worker.
        members: Numbers of all workers, by rank.
        orders: Commands of this worker's launcher.
        context: Groups and settings of the strategy.
        home: Name of this worker's launcher.
        keepers: Returns the objects that look after servers.
        agreed: Whether this worker leaves only after all have heard of it, so that the last ones
            can save a checkpoint. Default: False.
    """

    def __init__(
        self,
        worker: int,
        members: tuple[int, ...],
        orders: CommandPipe,
        context: SyncContext,
        *,
        home: str,
        keepers: Callable[[], list[ServerReplication]],
        agreed: bool = False,
    ) -> None:
        self._worker, self._members, self._orders = worker, members, orders
        self._context, self._launcher, self._get_server_keepers = context, home, keepers
        self._is_agreed = agreed
        self._leaving_workers: set[int] = (
            set()
        )  # workers of leaving hosts, as far as all workers know
        self._wait_start: float | None = None  # when this worker began to wait for the copies
        self._may_leave = False  # whether this worker may leave now

    @property
    def has_to_leave(self) -> bool:
        """Whether this worker has to leave now."""
        asked = self._orders.asked_to_leave
        if self._is_agreed:
            # If all leave, they end the run together.
            everyone_leaves = self._leaving_workers.issuperset(self._members)
            asked = asked and self._worker in self._leaving_workers and not everyone_leaves
        return self._may_leave or (asked and not self._get_server_keepers())

    def ask_to_leave(self) -> None:
        """Ask this worker to leave, as its launcher can."""
        self._orders.ask_to_leave()

    def release_worker(self) -> None:
        """Let this worker leave between two turns, although its host stays."""
        self._may_leave = True

    # ---- requests

    @property
    def leave_request(self) -> int | None:
        """Number of this worker if its host has to leave, else None. Sent to all with the logs."""
        return self._worker if self._orders.asked_to_leave else None

    def note_requests(self, wishes: Iterable[int | None]) -> None:
        """Note the `leave_request` of each worker. All of them are at the same step."""
        self._leaving_workers |= {wish for wish in wishes if wish is not None}

    def regroup(self, members: tuple[int, ...], wishes: Iterable[int | None]) -> None:
        """Move to a view with these members. A new worker also learns earlier requests."""
        self._members = members
        self.note_requests(wishes)

    def join_info(self) -> list[int]:
        """Numbers of the workers with a known request to leave, for a worker that joins."""
        return sorted(self._leaving_workers)

    # ---- in lockstep

    def copy_before_leaving(self) -> None:
        """Copy the data of leaving hosts, after each step while a host has to leave.

        Collective if any known worker has to leave and there are servers.
        """
        if not self._leaving_workers.isdisjoint(self._members) and self._get_server_keepers():
            leaving, staying, relieved = self._context.agreement.repeat_until_settled(
                self._relieve_hosts, what="a host leaves"
            )
            for keeper in self._get_server_keepers() if relieved else ():
                keeper.drop_leaving_servers(leaving)
            self._may_leave = self._launcher in leaving and (
                relieved or not staying or self._has_waited_too_long()
            )

    def _relieve_hosts(self) -> tuple[set[str], set[str], bool]:
        """Start or continue the copies of leaving hosts' data. Collective.

        Returns the hosts that leave, the hosts that stay, and whether these have all copies.
        """
        agreement = self._context.agreement
        own_answer = [
            agreement.origins[agreement.group.rank],
            self._launcher,
            self._orders.asked_to_leave,
        ]
        answers: list[Any] = [
            json.loads(body)
            for body in agreement.meet("a host leaves", json.dumps(own_answer).encode())
        ]
        hosts, leaving = (
            {worker: home for worker, home, _ in answers},
            {home for _, home, has_to_leave in answers if has_to_leave},
        )
        staying = {*hosts.values()} - leaving
        return (
            leaving,
            staying,
            bool(staying)
            and all(
                [keeper.relieve_hosts(hosts, leaving) for keeper in self._get_server_keepers()]
            ),
        )

    def _has_waited_too_long(self) -> bool:
        """Whether copying takes too long.

        Workers may find this out at different times. Those that leave earlier count as lost.
        """
        now, deadline_seconds = time.monotonic(), self._context.deadline
        self._wait_start = now if self._wait_start is None else self._wait_start
        if now - self._wait_start > deadline_seconds:
            self._context.announce(
                f"no other host has copied the data of this host's servers within "
                f"{deadline_seconds:g} s: it leaves all the same"
            )
        return now - self._wait_start > deadline_seconds
