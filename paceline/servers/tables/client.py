"""Sparse tables, seen from a worker: a batch pulls its rows, and sends their gradients back.

    forward    pull(ids) -- rows as of this worker's last step --> | loss, backward |
               give(ids, gradients) ... the servers step
    prefetch   pull(ids of the next batch), answered as soon as that step has been taken

Any number of tables share the servers of a run; row r lies on server r % servers. If losses are
survived, see `steps`.
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

PART_BYTES = 32 << 20  # of the values that travel in one message when tables are saved


class PendingRows(NamedTuple):
    """Rows that are on their way."""

    step: int
    ids: Tensor
    # shard, which of the ids, and the request
    parts: list[tuple[int, Tensor, SentRequest[rows.Rows]]]


class TableGradient(NamedTuple):
    """A gradient of a table from this worker: rows (in order, each once), and their values.

    `used`: whether a backward reached it.
    """

    ids: Tensor
    values: Tensor
    used: bool


Step = tuple["TableClient", TableGradient, dict[str, Any]]  # a step of one table, with its settings


class TableServers:
    """The servers of all tables of a run, as this worker reaches them: each shard of rows on a
    primary, and perhaps on copies.
    """

    def __init__(self, context: SyncContext, servers: int | None, replicas: int = 1) -> None:
        if context.table_servers is None:
            raise UsageError(
                "sparse tables need servers, and nobody starts any here: "
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
        # this worker isn't told yet where servers are
        self.waiting = self.endpoints.pool is not None and not self.endpoints.addresses
        # the number by which servers know this worker
        self._known = -1 if self.waiting else self.me
        if not self.waiting:
            self.wires.open(self.endpoints, self.me)
        # out of lockstep: each worker steps tables "alone", or "together" with those that make a
        # step (`steps`)
        self.free = ""
        self._given: list[SentRequest[Acknowledged]] = []  # requests that were not acknowledged yet
        self.tables: list[TableClient] = []

    def unlock(self, *, alone: bool) -> None:
        """Let servers step rows with the optimizers of a strategy under which workers are not in
        lockstep.
        """
        self.free = "alone" if alone else "together"

    def enter(self, endpoints: ServerEndpoints) -> None:
        """Use these servers, as a worker has joined, perhaps this one.

        A worker that tried to join before may have a new number.
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
        """How many shards rows are dealt to: as many as there are servers, not counting copies."""
        return len(self.wires.of)

    def open(self, name: str, spec: TableSpec, settings: dict[str, Any]) -> TableClient:
        """Open another table. All workers call it."""
        number = Index(len(self.tables))
        for shard in range(self.shards):
            self.tell(shard, rows.OpenTable(number, spec.plain(), settings, shard, self.shards))
        self.tables.append(TableClient(self, name, number, spec, settings))
        return self.tables[-1]

    def send(self, shard: int, request: Request[R]) -> SentRequest[R]:
        """Send a message to the copy of a shard that answers.

        Raises `StateLost` where none is left.
        """
        for caller in self.wires.of[shard]:
            try:
                return send(caller, request, self.context.deadline)
            except LOSSES:
                if self.endpoints.pool is None or self.wires.left:
                    raise
        raise gone([caller.who for caller in self.wires.of[shard]])

    def wait(self, sent: SentRequest[R]) -> R:
        """Return the answer to this message."""
        return sent.wait(self.context.deadline)

    def answer(self, sent: SentRequest[R], again: Callable[[], SentRequest[R]]) -> R:
        """Return the answer to this question. If the server is lost, `again` asks another."""
        while True:
            try:
                return self.wait(sent)
            except LOSSES:
                if self.endpoints.pool is None or self.wires.left:
                    raise
            sent = again()

    def call(self, shard: int, request: Request[R]) -> R:
        """Ask a shard, and return the answer of the first copy that is alive."""
        return self.answer(self.send(shard, request), lambda: self.send(shard, request))

    def tell(self, shard: int, request: Request[Acknowledged]) -> None:
        """Send to all copies of a shard."""
        for caller in self.wires.of[shard]:
            call(caller, request, self.context.deadline)

    def split(self, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each shard that has some of these rows, and which of them."""
        if self.shards == 1:
            yield from [(0, torch.arange(len(ids)))] if len(ids) else []
            return
        owner = ids % self.shards
        found = ((shard, (owner == shard).nonzero()[:, 0]) for shard in range(self.shards))
        yield from ((shard, where) for shard, where in found if len(where))

    def give(self, found: Sequence[Step]) -> None:
        """Send my part of the next step of these tables, without waiting.

        The step is made once all workers have sent theirs.
        """
        self.settle()
        workers = tuple(range(self.context.group.size))
        self._given = self.spread(
            found, lambda gradients: rows.PushRows(gradients, workers, decided=False)
        )
        for lookup, _, _ in found:
            lookup.advance()

    def spread(
        self,
        found: Sequence[Step],
        request: Callable[[tuple[rows.RowGradient, ...]], Request[Acknowledged]],
    ) -> list[SentRequest[Acknowledged]]:
        """Send a message to all servers, with my part of the next step of these tables."""
        parts = [dict(self.split(gradient.ids)) for _, gradient, _ in found]
        nothing = torch.empty(0, dtype=torch.int64)
        entries = [
            (lookup, gradient, lookup.told(settings)) for lookup, gradient, settings in found
        ]
        sent = []
        for shard in range(self.shards):
            gradients = []
            for (lookup, gradient, settings), part in zip(entries, parts, strict=True):
                where = part.get(shard, nothing)
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
            mine = request(tuple(gradients))
            sent += [send(caller, mine, self.context.deadline) for caller in self.wires.of[shard]]
        return sent

    def settle(self) -> None:
        """Wait until what was given has arrived."""
        while self._given:
            self.wait(self._given.pop())

    def close(self, *, left: bool) -> None:
        """Hang up, and end the servers that this worker has started; where losses are survived,
        all, unless others go on (`left`).
        """
        pool = self.endpoints.pool
        self.wires.dismiss(told=pool is not None and not left and self.context.group.rank == 0)
        if pool is not None and left:
            pool.leave()
        else:
            self.endpoints.close()


class TableClient:
    """One table.

    `waits` counts pulls that were not prefetched, `steps` the steps that this worker has given.
    """

    def __init__(
        self,
        library: TableServers,
        name: str,
        number: Index,
        spec: TableSpec,
        settings: dict[str, Any],
    ) -> None:
        self.name, self.number, self.spec, self.steps, self.waits = name, number, spec, 0, 0
        self.seconds = 0.0  # spent waiting for rows
        self._library, self._told = library, settings
        self._ahead: list[PendingRows] = []
        self._trained = False  # rows were pulled for training since the last step

    def pull(self, ids: Tensor, *, train: bool) -> Tensor:
        """Return the rows of these ids (1-D, int64, in order, each once), as they are after my
        last step; in memory of their own.
        """
        self._check()
        self._trained = self._trained or train
        began = time.perf_counter()
        found = next(
            (values for asked in self._ahead if (values := self._of(asked, ids)) is not None), None
        )
        if found is None:
            self.waits += 1
            asked = self._ask(ids, self.steps)
            found = self._library.context.agreement.wait_for_some(
                lambda: self._take(asked), f"the rows of {self.name}"
            )
        self.seconds += time.perf_counter() - began
        return found

    def prefetch(self, ids: Tensor) -> None:
        """Ask for rows of the next batch, as they will be after the step under way (after the
        last, if none is).
        """
        self._check()
        self._ahead.append(self._ask(ids, self.steps + self._trained))

    def _check(self) -> None:
        if self._library.waiting:
            raise UsageError(
                f"the rows of {self.name} are not to be had here yet: this worker is let in when "
                "its loop over the training loader begins; "
                "ask for rows inside of that"
            )

    def _of(self, asked: PendingRows, ids: Tensor) -> Tensor | None:
        """Return these rows, if all of them were asked for and are of this step; else None."""
        if asked.step != self.steps or not len(asked.ids):
            return None
        same = torch.equal(asked.ids, ids)
        places = torch.searchsorted(asked.ids, ids).clamp_(max=len(asked.ids) - 1)
        if not same and not torch.equal(asked.ids[places], ids):
            return None
        self._ahead = [other for other in self._ahead if other is not asked]
        values = self._library.context.agreement.wait_for_some(
            lambda: self._take(asked), f"the rows of {self.name}"
        )
        return values if same else values[places]

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

    def _take(self, asked: PendingRows) -> Tensor:
        answers = []
        for shard, where, sent in asked.parts:

            def again(shard: int = shard, where: Tensor = where) -> SentRequest[rows.Rows]:
                return self._send(shard, asked.ids[where], asked.step)

            try:
                answers.append((where, self._library.answer(sent, again).values))
            except DeadlineExceeded as error:
                lockstep = self._library.endpoints.pool is None and not self._library.free
                raise self._named(error, shard) if lockstep else error from error
        if len(answers) == 1:
            return answers[0][1]
        values = torch.empty(len(asked.ids), self.spec.dim, dtype=self.spec.kind)
        for where, part in answers:
            values[where] = part
        return values

    def _named(self, error: DeadlineExceeded, shard: int) -> DeadlineExceeded:
        """Return the error with the names of the workers that are waited for."""
        given = self._library.call(shard, rows.ListPushers(self.number)).workers
        missing = tuple(
            rank for rank in range(self._library.context.group.size) if rank not in given
        )
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return DeadlineExceeded(
            f"{error}: the rows of {self.name} wait for step {self.steps} of {ranks}", missing
        )

    # ---- steps

    def told(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Return the settings of the next step as servers are told them: None where they have not
        changed.

        They are always told where losses are survived or workers out of lockstep, as servers may
        have discarded them.
        """
        changed = (
            settings != self._told
            or self._library.endpoints.pool is not None
            or bool(self._library.free)
        )
        self._told = settings
        return settings if changed else None

    def advance(self, step: int | None = None) -> None:
        """Note that the next step has been given, or that `step` is the last one that I know of."""
        self.steps = self.steps + 1 if step is None else step
        self._trained = False
        old = [asked for asked in self._ahead if asked.step < self.steps]
        self._ahead = [asked for asked in self._ahead if asked.step >= self.steps]
        for asked in old:  # not needed any more, and the connection would keep the answer
            self._drop(asked)

    def _drop(self, asked: PendingRows) -> None:
        for _, _, sent in asked.parts:
            with contextlib.suppress(*LOSSES if self._library.endpoints.pool is not None else ()):
                self._library.wait(sent)

    def discard_ahead(self, step: int | None = None) -> None:
        """Discard what was asked for ahead without waiting for answers, as workers have changed,
        or a turn is dealt again after `step`.
        """
        self.steps = self.steps if step is None else step
        self._ahead.clear()
        self._trained = False

    def place(self, steps: int, seed: int) -> None:
        """Go to where the others are."""
        self.steps, self.spec = steps, replace(self.spec, seed=seed)

    # ---- state: everything here is done by one worker for all

    def facts(self) -> dict[str, Any]:
        """Return a digest of the rows in use, how many there are, and how many steps were made,
        over all servers.
        """
        request, shards = (
            rows.DigestTable(self.number, self.steps, self._library.free),
            range(self._library.shards),
        )
        found = [self._library.call(shard, request) for shard in shards]
        digest = sum(int(answer.digest, 16) for answer in found) % (1 << 64)
        return {
            "digest": f"{digest:016x}",
            "rows": sum(answer.rows for answer in found),
            "count": found[0].count,
        }

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """Yield all rows in use, with their optimizer state, some at a time."""
        for shard in range(self._library.shards):
            for answer in self.pieces(shard):
                yield dict(zip(answer.names, answer.tensors, strict=True))

    def pieces(self, shard: int) -> Iterator[rows.RowsPart]:
        """Yield the `parts` of one shard, as they are sent.

        Copies have their rows in the same order, so another can replace a lost one.
        """
        each = max(1, PART_BYTES // (self.spec.dim * self.spec.kind.itemsize))
        for start in itertools.count(0, each):
            answer = self._library.call(
                shard,
                rows.ReadRows(self.number, self.steps, self._library.free, start, start + each),
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
        """Load what `parts` has yielded."""
        for shard, where in self._library.split(part["ids"]):
            tensors = tuple(values[where] for values in part.values())
            self._library.tell(shard, rows.LoadRows(self.number, tuple(part), tensors))

    def forget(self, seed: int) -> None:
        """Discard what was asked for ahead, as the table has been replaced.

        Its rows begin by this seed. On all workers.
        """
        self.spec = replace(self.spec, seed=seed)
        old, self._ahead = self._ahead, []
        for asked in old:
            if asked.step <= self.steps:  # the others are answered after a step that may never come
                self._drop(asked)


def merged(
    found: Sequence[tuple[Tensor, Tensor]], dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Merge several gradients of some rows each into one."""
    if not found:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dim, dtype=dtype)
    return row_optimizers.summed(found, dim, dtype)
