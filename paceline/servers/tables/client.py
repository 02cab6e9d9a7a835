"""Sparse tables, seen from a worker: a batch pulls its rows, and sends their gradients back.

    forward    pull(ids) -- rows as of this worker's last step --> | loss, backward |
               push_gradients(ids, gradients) ... the servers step
    prefetch   pull(ids of the next batch), answered as soon as that step has been made

All tables of a run share its servers; row r is on server r % servers. `row_steps` has the steps of
runs that survive losses, and of workers out of lockstep.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.errors import LOSSES, DeadlineExceeded, UsageError
from paceline.servers.process import row_optimizers
from paceline.servers.process.endpoints import ServerEndpoints
from paceline.servers.process.table import TableSpec
from paceline.servers.protocol import rows
from paceline.servers.protocol.message import (
    Acknowledged,
    Index,
    R,
    Request,
    SentRequest,
    call,
    send,
)
from paceline.servers.worker.connections import ReplicaConnections, ServerTraffic
from paceline.servers.worker.replication import gone
from paceline.sync.context import SyncContext

PART_BYTES = 32 << 20  # bytes of values in one message when tables are saved


class PendingRows(NamedTuple):
    """Rows that have been requested, as they are after `step`."""

    step: int
    ids: Tensor
    # Shard, indices into `ids`, and request.
    parts: list[tuple[int, Tensor, SentRequest[rows.Rows]]]


class TableGradient(NamedTuple):
    """This worker's gradient of a table."""

    ids: Tensor  # of rows, sorted and unique
    values: Tensor  # (ids, dim)
    used: bool  # whether a backward reached the table


Step = tuple["TableClient", TableGradient, dict[str, Any]]  # table, gradient, optimizer settings


class TableServers:
    """The servers of all tables of a run, as this worker reaches them.

    Each shard of rows is on a primary server, and perhaps on copies.

    Args:
        context: The group of workers, and the function that starts servers.
        servers: Number of shards. Default: one on each host.
        replicas: Number of servers that keep each shard. Default: 1.
    """

    def __init__(self, context: SyncContext, servers: int | None, replicas: int = 1) -> None:
        if context.table_servers is None:
            raise UsageError(
                "sparse tables need servers, and this launcher starts none: "
                "start the workers with `paceline run`"
            )
        self.context, self.replicas = context, replicas
        self.wires = ReplicaConnections(timings=context.timings.servers)
        context.extra_groups.append(ServerTraffic(self.wires))
        self.endpoints = context.table_servers(servers, replicas)
        if self.endpoints.pool is None and replicas > 1:
            self.endpoints.close()
            raise UsageError(
                f"SparseEmbedding(replicas={replicas}) is for runs that go on when a server is "
                "lost: start them with `paceline run --min-workers N`, or leave it out"
            )
        # Whether this worker has just joined, and has no addresses of servers yet.
        self.waiting = self.endpoints.pool is not None and not self.endpoints.addresses
        # The number by which servers know this worker.
        self._known = -1 if self.waiting else self.me
        if not self.waiting:
            self.wires.open(self.endpoints, self.me)
        # Sent to servers. Out of lockstep a worker steps tables "alone", or "together" with the
        # other workers of a step (see `row_steps`).
        self.free = ""
        self._given: list[SentRequest[Acknowledged]] = []  # pushes that were not acknowledged yet
        self.tables: list[TableClient] = []

    def unlock(self, *, alone: bool) -> None:
        """Let workers step tables out of lockstep, each gradient alone or several together."""
        self.free = "alone" if alone else "together"

    def enter(self, endpoints: ServerEndpoints) -> None:
        """Use these servers, after a worker has joined (perhaps this one).

        A worker that tried to join before may have a new number, and then connects anew.
        """
        self.endpoints = endpoints
        if self.me != self._known:
            self.wires.close()
            self.wires.open(endpoints, self.me)
        else:
            self.wires.reach(endpoints, self.me)
        self._known, self.waiting = self.me, False

    @property
    def me(self) -> int:
        """Number of this worker."""
        return self.context.agreement.origins[self.context.group.rank]

    @property
    def shards(self) -> int:
        """Number of shards that rows are dealt to: the number of servers without copies."""
        return len(self.wires.of)

    def open(self, name: str, spec: TableSpec, settings: dict[str, Any]) -> TableClient:
        """Open a table on the servers. All workers call it, in the same order."""
        number = Index(len(self.tables))
        for shard in range(self.shards):
            self.tell(shard, rows.OpenTable(number, spec.plain(), settings, shard, self.shards))
        self.tables.append(TableClient(self, name, number, spec, settings))
        return self.tables[-1]

    def send(self, shard: int, request: Request[R]) -> SentRequest[R]:
        """Send a request to the first copy of a shard that is alive.

        Raises `StateLost` if no copy is left.
        """
        for caller in self.wires.of[shard]:
            try:
                return send(caller, request, self.context.deadline)
            except LOSSES:
                if self.endpoints.pool is None or self.wires.left:
                    raise
        raise gone([caller.who for caller in self.wires.of[shard]])

    def wait(self, sent: SentRequest[R]) -> R:
        """Wait for the answer to a request."""
        return sent.wait(self.context.deadline)

    def answer(self, sent: SentRequest[R], again: Callable[[], SentRequest[R]]) -> R:
        """Wait for an answer. If the server is lost, `again` sends the request to another copy."""
        while True:
            try:
                return self.wait(sent)
            except LOSSES:
                if self.endpoints.pool is None or self.wires.left:
                    raise
            sent = again()

    def call(self, shard: int, request: Request[R]) -> R:
        """Ask a shard, and return the answer of the first copy that answers."""
        return self.answer(self.send(shard, request), lambda: self.send(shard, request))

    def tell(self, shard: int, request: Request[Acknowledged]) -> None:
        """Send a request to all copies of a shard, and wait until each has answered."""
        for caller in self.wires.of[shard]:
            call(caller, request, self.context.deadline)

    def split(self, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each shard that has some of these rows, and their indices in `ids`."""
        if self.shards == 1:
            yield from [(0, torch.arange(len(ids)))] if len(ids) else []
            return
        owner = ids % self.shards
        for shard in range(self.shards):
            indices = (owner == shard).nonzero()[:, 0]
            if len(indices):
                yield shard, indices

    def give(self, steps: Sequence[Step]) -> None:
        """Send this worker's part of the next step of these tables, without waiting.

        Servers make the step once all workers have sent their parts.
        """
        self.settle()
        workers = tuple(range(self.context.group.size))
        self._given = self.spread(
            steps, lambda gradients: rows.PushRows(gradients, workers, decided=False)
        )
        for lookup, _, _ in steps:
            lookup.advance()

    def spread(
        self,
        steps: Sequence[Step],
        request: Callable[[tuple[rows.RowGradient, ...]], Request[Acknowledged]],
    ) -> list[SentRequest[Acknowledged]]:
        """Send each server its rows of this worker's part of the next step of these tables.

        A server without any of the rows gets a message, too: it counts the workers of a step.

        Args:
            steps: The tables, their gradients and settings.
            request: Makes the request from the gradients of one shard.
        """
        indices_by_shard = [dict(self.split(gradient.ids)) for _, gradient, _ in steps]
        no_rows = torch.empty(0, dtype=torch.int64)
        entries = [
            (lookup, gradient, lookup.told(settings)) for lookup, gradient, settings in steps
        ]
        sent = []
        for shard in range(self.shards):
            gradients = []
            for (lookup, gradient, settings), table_indices in zip(
                entries, indices_by_shard, strict=True
            ):
                where = table_indices.get(shard, no_rows)
                gradients.append(
                    rows.RowGradient(
                        lookup.number,
                        lookup.steps + 1,
                        gradient.used,
                        settings,
                        gradient.ids[where],
                        gradient.values[where],
                    )
                )
            message = request(tuple(gradients))
            sent += [
                send(caller, message, self.context.deadline) for caller in self.wires.of[shard]
            ]
        return sent

    def settle(self) -> None:
        """Wait until all pushes have arrived."""
        while self._given:
            self.wait(self._given.pop())

    def close(self, *, left: bool) -> None:
        """Hang up, and end the servers that this worker has started.

        In runs that survive losses the first worker ends all servers, unless other workers go on
        (`left`).
        """
        pool = self.endpoints.pool
        self.wires.dismiss(told=pool is not None and not left and self.context.group.rank == 0)
        if pool is not None and left:
            pool.leave()
        else:
            self.endpoints.close()


class TableClient:
    """One table of a run.

    `steps` is the number of steps that this worker has pushed or knows of: its pulls get rows as
    they are after that step. `_prefetched` has requests for rows of this step or of the next one.

    Args:
        library: The servers.
        name: Name of the table in messages.
        number: Number of the table on the servers.
        spec: Size, dtype and first values of the rows.
        settings: Optimizer settings that the servers have.
    """

    def __init__(
        self,
        library: TableServers,
        name: str,
        number: Index,
        spec: TableSpec,
        settings: dict[str, Any],
    ) -> None:
        self.name, self.number, self.spec, self.steps = name, number, spec, 0
        self.waits = 0  # pulls that were not prefetched
        self.seconds = 0.0  # spent waiting for rows
        self._library, self._told = library, settings
        self._ahead: list[PendingRows] = []
        self._trained = False  # whether rows were pulled for training since the last step

    def pull(self, ids: Tensor, *, train: bool) -> Tensor:
        """Pull rows as they are after this worker's last step, into memory of their own.

        Args:
            ids: Ids of the rows: 1-D, int64, sorted, unique.
            train: Whether the rows will get a gradient.
        """
        self._check()
        self._trained = self._trained or train
        began = time.perf_counter()
        values = next(
            (rows for pending in self._ahead if (rows := self._of(pending, ids)) is not None), None
        )
        if values is None:
            self.waits += 1
            pending = self._ask(ids, self.steps)
            values = self._library.context.agreement.wait_for_some(
                lambda: self._take(pending), f"the rows of {self.name}"
            )
        self.seconds += time.perf_counter() - began
        return values

    def prefetch(self, ids: Tensor) -> None:
        """Request rows of the next batch, as they will be after the step under way.

        Without a step under way: as they are after the last step.
        """
        self._check()
        self._ahead.append(self._ask(ids, self.steps + self._trained))

    def _check(self) -> None:
        if self._library.waiting:
            raise UsageError(
                f"the rows of {self.name} can't be read yet: this worker joins the run when its "
                "loop over the training loader begins; use the table inside that loop"
            )

    def _of(self, pending: PendingRows, ids: Tensor) -> Tensor | None:
        """Take rows from a request, if it has all of them as of this step; else None."""
        if pending.step != self.steps or not len(pending.ids):
            return None
        is_same = torch.equal(pending.ids, ids)
        # Both are sorted, so a binary search finds each id, or another one if it is missing.
        indices = torch.searchsorted(pending.ids, ids).clamp_(max=len(pending.ids) - 1)
        if not is_same and not torch.equal(pending.ids[indices], ids):
            return None
        self._ahead = [other for other in self._ahead if other is not pending]
        values = self._library.context.agreement.wait_for_some(
            lambda: self._take(pending), f"the rows of {self.name}"
        )
        return values if is_same else values[indices]

    def _ask(self, ids: Tensor, step: int) -> PendingRows:
        return PendingRows(
            step,
            ids,
            [
                (shard, where, self._send(shard, ids[where], step))
                for shard, where in self._library.split(ids)
            ],
        )

    def _send(self, shard: int, ids: Tensor, step: int) -> SentRequest[rows.Rows]:
        return self._library.send(shard, rows.PullRows(self.number, step, self._library.free, ids))

    def _take(self, pending: PendingRows) -> Tensor:
        """Wait for the rows of a request, and put the parts of all shards together."""
        answers = []
        for shard, where, sent in pending.parts:

            def again(shard: int = shard, where: Tensor = where) -> SentRequest[rows.Rows]:
                return self._send(shard, pending.ids[where], pending.step)

            try:
                answers.append((where, self._library.answer(sent, again).values))
            except DeadlineExceeded as error:
                # In lockstep the server waits for the pushes of certain workers: name them.
                lockstep = self._library.endpoints.pool is None and not self._library.free
                raise self._named(error, shard) if lockstep else error from error
        if len(answers) == 1:
            return answers[0][1]
        values = torch.empty(len(pending.ids), self.spec.dim, dtype=self.spec.kind)
        for where, part in answers:
            values[where] = part
        return values

    def _named(self, error: DeadlineExceeded, shard: int) -> DeadlineExceeded:
        """Add the ranks of the workers that have not pushed to an error."""
        pushers = self._library.call(shard, rows.ListPushers(self.number)).workers
        missing = tuple(
            rank for rank in range(self._library.context.group.size) if rank not in pushers
        )
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return DeadlineExceeded(
            f"{error}: the rows of {self.name} wait for step {self.steps} of {ranks}", missing
        )

    # ---- steps

    def told(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Get the optimizer settings to send with the next step; None if they have not changed.

        They are always sent in runs that survive losses and out of lockstep: servers may have
        discarded the step that changed them.
        """
        is_sent = (
            settings != self._told
            or self._library.endpoints.pool is not None
            or bool(self._library.free)
        )
        self._told = settings
        return settings if is_sent else None

    def advance(self, step: int | None = None) -> None:
        """Go on from the step that was just pushed, or from `step`."""
        self.steps = self.steps + 1 if step is None else step
        self._trained = False
        outdated = [pending for pending in self._ahead if pending.step < self.steps]
        self._ahead = [pending for pending in self._ahead if pending.step >= self.steps]
        for pending in outdated:
            self._drop(pending)

    def _drop(self, pending: PendingRows) -> None:
        """Wait for an answer that isn't needed: the connection would keep it otherwise."""
        for _, _, sent in pending.parts:
            with contextlib.suppress(*LOSSES if self._library.endpoints.pool is not None else ()):
                self._library.wait(sent)

    def discard_ahead(self, step: int | None = None) -> None:
        """Discard prefetched rows without waiting for their answers.

        For changed workers, and for a turn whose samples are dealt again: the table is then back
        at `step`.
        """
        self.steps = self.steps if step is None else step
        self._ahead.clear()
        self._trained = False

    def place(self, steps: int, seed: int) -> None:
        """Take over the step and the seed of the other workers."""
        self.steps, self.spec = steps, replace(self.spec, seed=seed)

    # ---- state: one worker does all of this for the others

    def facts(self) -> dict[str, Any]:
        """Digest of the rows in use, their number, and the number of steps, over all servers."""
        request = rows.DigestTable(self.number, self.steps, self._library.free)
        answers = [self._library.call(shard, request) for shard in range(self._library.shards)]
        # A sum: it doesn't depend on how rows are dealt to servers.
        digest = sum(int(answer.digest, 16) for answer in answers) % (1 << 64)
        return {
            "digest": f"{digest:016x}",
            "rows": sum(answer.rows for answer in answers),
            "count": answers[0].count,
        }

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """Yield all rows in use with their optimizer state, at most `PART_BYTES` at a time."""
        for shard in range(self._library.shards):
            for answer in self.pieces(shard):
                yield dict(zip(answer.names, answer.tensors, strict=True))

    def pieces(self, shard: int) -> Iterator[rows.RowsPart]:
        """Yield the rows of one shard in parts, as they are sent.

        Copies have their rows in the same order, so another copy can go on for a lost one.
        """
        count = max(1, PART_BYTES // (self.spec.dim * self.spec.kind.itemsize))
        for start in itertools.count(0, count):
            answer = self._library.call(
                shard,
                rows.ReadRows(self.number, self.steps, self._library.free, start, start + count),
            )
            if not len(answer.tensors[0]):
                return
            yield answer

    def clear(self, seed: int, count: int) -> None:
        """Drop all rows, and set the count of steps."""
        for shard in range(self._library.shards):
            self._library.tell(
                shard, rows.ClearTable(self.number, self.steps, self._library.free, seed, count)
            )

    def put(self, part: dict[str, Tensor]) -> None:
        """Load a part that `read_parts` has yielded."""
        for shard, where in self._library.split(part["ids"]):
            tensors = tuple(values[where] for values in part.values())
            self._library.tell(shard, rows.LoadRows(self.number, tuple(part), tensors))

    def forget(self, seed: int) -> None:
        """Set the seed of the first values, and discard prefetched rows: the table was replaced.

        All workers call it.
        """
        self.spec = replace(self.spec, seed=seed)
        outdated, self._ahead = self._ahead, []
        for pending in outdated:
            # Requests for a later step may never be answered.
            if pending.step <= self.steps:
                self._drop(pending)


def merged(
    gradients: Sequence[tuple[Tensor, Tensor]], dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Add up gradients of some rows each: the rows are then sorted and unique."""
    if not gradients:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dim, dtype=dtype)
    return row_optimizers.summed(gradients, dim, dtype)
