"""Leaving of a host that was asked to: first its servers' unique data is copied to other hosts,
then it goes, between two turns.

    run.log             its workers say that they are asked to go
    after that step     all meet, and start copies on hosts that stay of what only leaving hosts
                        keep
    some steps later    the copies are complete and count; the servers of the leaving host don't any
                        more, and its workers go

If all hosts leave, or if copying takes too long, they go at once, and what they kept is lost.
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
    """One worker's part in a departure; the worker is one of these `members`.

    `home` is its launcher, from which `orders` come; `keepers` returns the objects that look after
    servers.
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
        self._asked: set[int] = set()  # workers of hosts that are asked to leave, as all know
        self._since: float | None = None  # when this worker began to wait for the copies
        self._ready = False  # nothing keeps this worker any more

    @property
    def goes(self) -> bool:
        """Whether this worker is to go now."""
        return self._ready or (self._orders.leaving and not self._keepers())

    def let_go(self) -> None:
        """Let this worker go between two turns, though its host stays."""
        self._ready = True

    # ---- what is told

    @property
    def wish(self) -> int | None:
        """Number of this worker if it is asked to leave, else None; sent to all with the logs."""
        return self._worker if self._orders.leaving else None

    def hear(self, wishes: Iterable[int | None]) -> None:
        """Take in the `wish` of every worker, at the same step."""
        self._asked |= {wish for wish in wishes if wish is not None}

    def regroup(self, members: tuple[int, ...], wishes: Iterable[int | None]) -> None:
        """Go on among these members, with wishes that a worker which has just joined doesn't
        know.
        """
        self._members = members
        self.hear(wishes)

    def join_info(self) -> list[int]:
        """Numbers of the workers whose wish to leave is known to all, for a worker that joined."""
        return sorted(self._asked)

    # ---- in lockstep

    def step_ended(self) -> None:
        """Copy what leaving hosts keep, after each step while a host is to leave.

        Collective then.
        """
        if not self._asked.isdisjoint(self._members) and self._keepers():
            leaving, staying, relieved = self._context.agreement.repeat_until_settled(
                self._relieve, what="a host leaves"
            )
            for keeper in self._keepers() if relieved else ():
                keeper.part(leaving)
            self._ready = self._home in leaving and (relieved or not staying or self._waited())

    def _relieve(self) -> tuple[set[str], set[str], bool]:
        """Hosts that leave, hosts that stay, and whether these have copies of all that the
        others keep.
        """
        agreement = self._context.agreement
        mine = [agreement.origins[agreement.group.rank], self._home, self._orders.leaving]
        answers: list[Any] = [
            json.loads(body) for body in agreement.meet("a host leaves", json.dumps(mine).encode())
        ]
        hosts, leaving = (
            {worker: home for worker, home, _ in answers},
            {home for _, home, asked in answers if asked},
        )
        staying = {*hosts.values()} - leaving
        return (
            leaving,
            staying,
            bool(staying) and all([keeper.relieve(hosts, leaving) for keeper in self._keepers()]),
        )

    def _waited(self) -> bool:
        """Whether copying takes too long.

        Where workers find so at different times, the earlier ones count as lost.
        """
        now, patience = time.monotonic(), self._context.deadline
        self._since = now if self._since is None else self._since
        if now - self._since > patience:
            self._context.announce(
                f"nobody has taken over within {patience:g} s what servers of this host keep: "
                "it leaves all the same"
            )
        return now - self._since > patience
