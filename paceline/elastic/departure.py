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
    ) -> None:
        self._worker, self._members, self._orders = worker, members, orders
        self._context, self._home, self._keepers = context, home, keepers
        self._asked: set[int] = set()  # workers of leaving hosts, as far as all workers know
        self._since: float | None = None  # when this worker began to wait for the copies
        self._ready = False  # whether this worker may leave now

    @property
    def goes(self) -> bool:
        """Whether this worker has to leave now."""
        return self._ready or (self._orders.leaving and not self._keepers())

    def let_go(self) -> None:
        """Let this worker leave between two turns, although its host stays."""
        self._ready = True

    # ---- requests

    @property
    def wish(self) -> int | None:
        """Number of this worker if its host has to leave, else None. Sent to all with the logs."""
        return self._worker if self._orders.leaving else None

    def hear(self, wishes: Iterable[int | None]) -> None:
        """Note the `leave_request` of each worker. All of them are at the same step."""
        self._asked |= {wish for wish in wishes if wish is not None}

    def regroup(self, members: tuple[int, ...], wishes: Iterable[int | None]) -> None:
        """Move to a view with these members. A new worker also learns earlier requests."""
        self._members = members
        self.hear(wishes)

    def join_info(self) -> list[int]:
        """Numbers of the workers with a known request to leave, for a worker that joins."""
        return sorted(self._asked)

    # ---- in lockstep

    def step_ended(self) -> None:
        """Copy the data of leaving hosts, after each step while a host has to leave.

        Collective if any known worker has to leave and there are servers.
        """
        if not self._asked.isdisjoint(self._members) and self._keepers():
            leaving, staying, relieved = self._context.agreement.repeat_until_settled(
                self._relieve, what="a host leaves"
            )
            for keeper in self._keepers() if relieved else ():
                keeper.part(leaving)
            self._ready = self._home in leaving and (relieved or not staying or self._waited())

    def _relieve(self) -> tuple[set[str], set[str], bool]:
        """Start or continue the copies of leaving hosts' data. Collective.

        Returns the hosts that leave, the hosts that stay, and whether these have all copies.
        """
        agreement = self._context.agreement
        own_answer = [agreement.origins[agreement.group.rank], self._home, self._orders.leaving]
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
            bool(staying) and all([keeper.relieve(hosts, leaving) for keeper in self._keepers()]),
        )

    def _waited(self) -> bool:
        """Whether copying takes too long.

        Workers may find this out at different times. Those that leave earlier count as lost.
        """
        now, deadline_seconds = time.monotonic(), self._context.deadline
        self._since = now if self._since is None else self._since
        if now - self._since > deadline_seconds:
            self._context.announce(
                f"no other host has copied the data of this host's servers within "
                f"{deadline_seconds:g} s: it leaves all the same"
            )
        return now - self._since > deadline_seconds
