"""Sparse tables, seen from a worker: a batch pulls the rows that it uses, and sends their gradients back.

    forward   pull(ids) ------ rows as of my last step ------>   | loss, backward | give(ids, gradients) ... the servers step
    prefetch       pull(ids of the next batch), answered as soon as that step has been taken

Any number of tables share the servers of a run; row r lies on server r % servers. Where losses are survived, see `steps`.
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

from paceline.comm.rpc import RpcClient, RpcMessage
from paceline.errors import LOSSES, DeadlineExceeded, UsageError
from paceline.server import row_optimizers
from paceline.server.table import TableSpec
from paceline.sync.context import SyncContext
from paceline.sync.parameterserver.connections import ReplicaConnections, ServerTraffic
from paceline.sync.parameterserver.replication import gone

PART_BYTES = 32 << 20  # of the values that travel in one message when tables are saved


class SentMessage(NamedTuple):
    """A message under way."""

    caller: RpcClient
    number: int


class PendingRows(NamedTuple):
    """Rows that are on their way."""

    step: int
    ids: Tensor
    parts: list[tuple[int, Tensor, SentMessage]]  # shard, which of the ids, and the message


class TableGradient(NamedTuple):
    """A gradient of a table from this worker: rows (in order, each once), and their values. `used`: whether a backward reached it."""

    ids: Tensor
    values: Tensor
    used: bool


Step = tuple["TableClient", TableGradient, dict[str, Any]]  # a step of one table, with its settings


class TableServers:
    """The servers of all tables of a run, as this worker reaches them: each shard of rows on a primary, and perhaps on copies."""

    def __init__(self, context: SyncContext, servers: int | None, replicas: int = 1) -> None:
        if context.table_servers is None:
            raise UsageError("sparse tables need servers, and nobody starts any here: start the workers with `paceline run`")
        self.context, self.replicas = context, replicas
        self.wires = ReplicaConnections(timings=context.timings.servers)
        context.extra_groups.append(ServerTraffic(self.wires))
        self.endpoints = context.table_servers(servers, replicas)
        if self.endpoints.pool is None and replicas > 1:
            self.endpoints.close()
            raise UsageError(
                f"SparseEmbedding(replicas={replicas}) is for runs that go on when a server is lost: start them with `paceline run "
                "--min-workers N`, or leave it out"
            )
        self.waiting = (
            self.endpoints.pool is not None and not self.endpoints.addresses
        )  # this worker hasn't been told yet where servers are
        if not self.waiting:
            self.wires.open(self.endpoints, self.me)
        self.free = ""  # out of lockstep: each worker steps tables "alone", or "together" with those that make a step (`freerows`)
        self._given: list[SentMessage] = []  # messages that were not acknowledged yet
        self.tables: list[TableClient] = []

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
        number = len(self.tables)
        for shard in range(self.shards):
            body = {"table": number, "spec": spec.plain(), "settings": settings, "server": shard, "servers": self.shards}
            self.tell(shard, "rows.table", body)
        self.tables.append(TableClient(self, name, number, spec, settings))
        return self.tables[-1]

    def send(self, shard: int, kind: str, body: dict[str, Any], tensors: Sequence[Tensor] = ()) -> SentMessage:
        """Send a message to the copy of a shard that answers. Raises `StateLost` where none is left."""
        for caller in self.wires.of[shard]:
            try:
                return SentMessage(caller, caller.send(kind, body=body, tensors=tensors, seconds=self.context.deadline))
            except LOSSES:
                if self.endpoints.pool is None or self.wires.left:
                    raise
        raise gone([caller.who for caller in self.wires.of[shard]])

    def wait(self, sent: SentMessage) -> RpcMessage:
        """Return the answer to this message."""
        return sent.caller.wait(sent.number, self.context.deadline)

    def answer(self, sent: SentMessage, again: Callable[[], SentMessage]) -> RpcMessage:
        """Return the answer to this question. If the server is lost, `again` asks another."""
        while True:
            try:
                return self.wait(sent)
            except LOSSES:
                if self.endpoints.pool is None or self.wires.left:
                    raise
            sent = again()

    def call(self, shard: int, kind: str, body: dict[str, Any], tensors: Sequence[Tensor] = ()) -> RpcMessage:
        """Ask a shard, and return the answer of the first copy that is alive."""
        return self.answer(self.send(shard, kind, body, tensors), lambda: self.send(shard, kind, body, tensors))

    def tell(self, shard: int, kind: str, body: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Send to all copies of a shard."""
        self.wires.tell(shard, kind, body, tensors, self.context.deadline)

    def split(self, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each shard that has some of these rows, and which of them."""
        if self.shards == 1:
            yield from [(0, torch.arange(len(ids)))] if len(ids) else []
            return
        owner = ids % self.shards
        found = ((shard, (owner == shard).nonzero()[:, 0]) for shard in range(self.shards))
        yield from ((shard, where) for shard, where in found if len(where))

    def give(self, found: Sequence[Step]) -> None:
        """Send my part of the next step of these tables, without waiting. The step is made once all workers have sent theirs."""
        self.settle()
        self._given = self.spread("rows.give", found, {"workers": list(range(self.context.group.size))})
        for lookup, _, _ in found:
            lookup.advance()

    def spread(self, kind: str, found: Sequence[Step], body: dict[str, Any]) -> list[SentMessage]:
        """Send a message to all servers, with my part of the next step of these tables."""
        parts = [dict(self.split(gradient.ids)) for _, gradient, _ in found]
        nothing = torch.empty(0, dtype=torch.int64)
        body = {**body, "tables": [lookup.entry(gradient, settings) for lookup, gradient, settings in found]}
        sent = []
        for shard in range(self.shards):
            tensors = []
            for (_, gradient, _), part in zip(found, parts, strict=True):
                where = part.get(shard, nothing)
                tensors += [gradient.ids[where], gradient.values[where]]
            for caller in self.wires.of[shard]:
                sent.append(SentMessage(caller, caller.send(kind, body=body, tensors=tensors, seconds=self.context.deadline)))
        return sent

    def settle(self) -> None:
        """Wait until what was given has arrived."""
        while self._given:
            self.wait(self._given.pop())

    def close(self, *, left: bool) -> None:
        """Hang up, and end the servers that this worker has started; where losses are survived, all, unless others go on (`left`)."""
        pool = self.endpoints.pool
        self.wires.dismiss(told=pool is not None and not left and self.context.group.rank == 0)
        if pool is not None and left:
            pool.leave()
        else:
            self.endpoints.close()


class TableClient:
    """One table. `waits` counts pulls that were not prefetched, `steps` the steps that this worker has given."""

    def __init__(self, library: TableServers, name: str, number: int, spec: TableSpec, settings: dict[str, Any]) -> None:
        self.name, self.number, self.spec, self.steps, self.waits = name, number, spec, 0, 0
        self.seconds = 0.0  # spent waiting for rows
        self._library, self._told = library, settings
        self._ahead: list[PendingRows] = []
        self._trained = False  # rows were pulled for training since the last step

    def pull(self, ids: Tensor, *, train: bool) -> Tensor:
        """Return the rows of these ids (1-D, int64, in order, each once), as they are after my last step; in memory of their own."""
        self._check()
        self._trained = self._trained or train
        began = time.perf_counter()
        found = next((values for asked in self._ahead if (values := self._of(asked, ids)) is not None), None)
        if found is None:
            self.waits += 1
            asked = self._ask(ids, self.steps)
            found = self._library.context.agreement.wait(lambda: self._take(asked), f"the rows of {self.name}")
        self.seconds += time.perf_counter() - began
        return found

    def prefetch(self, ids: Tensor) -> None:
        """Ask for rows of the next batch, as they will be after the step under way (after the last, if none is)."""
        self._check()
        self._ahead.append(self._ask(ids, self.steps + self._trained))

    def _check(self) -> None:
        if self._library.waiting:
            raise UsageError(
                f"the rows of {self.name} are not to be had here yet: this worker is let in when its loop over the training loader begins; "
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
        values = self._library.context.agreement.wait(lambda: self._take(asked), f"the rows of {self.name}")
        return values if same else values[places]

    def _ask(self, ids: Tensor, step: int) -> PendingRows:
        return PendingRows(step, ids, [(shard, where, self._send(shard, ids[where], step)) for shard, where in self._library.split(ids)])

    def _send(self, shard: int, ids: Tensor, step: int) -> SentMessage:
        return self._library.send(shard, "rows.pull", self._at(step), [ids])

    def _at(self, step: int) -> dict[str, Any]:
        """Return the body of a message that waits for this step."""
        return {"table": self.number, "step": step, "free": self._library.free}

    def _take(self, asked: PendingRows) -> Tensor:
        answers = []
        for shard, where, sent in asked.parts:

            def again(shard: int = shard, where: Tensor = where) -> SentMessage:
                return self._send(shard, asked.ids[where], asked.step)

            try:
                answers.append((where, self._library.answer(sent, again).tensors[0]))
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
        given = self._library.call(shard, "rows.given", {"table": self.number}).body["workers"]
        missing = tuple(rank for rank in range(self._library.context.group.size) if rank not in given)
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return DeadlineExceeded(f"{error}: the rows of {self.name} wait for step {self.steps} of {ranks}", missing)

    # ---- steps

    def entry(self, gradient: TableGradient, settings: dict[str, Any]) -> dict[str, Any]:
        """Return what servers are told of the next step beside the gradient.

        Settings are sent when they have changed; always where losses are survived or workers out of lockstep, as servers may have discarded
        them.
        """
        changed = settings != self._told or self._library.endpoints.pool is not None or bool(self._library.free)
        self._told = settings
        return {"table": self.number, "step": self.steps + 1, "used": gradient.used, "settings": settings if changed else None}

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

    def void(self) -> None:
        """Discard what was asked for ahead without waiting for answers, as a turn is dealt again, or workers have changed."""
        self._ahead.clear()
        self._trained = False

    def place(self, steps: int, seed: int) -> None:
        """Go to where the others are."""
        self.steps, self.spec = steps, replace(self.spec, seed=seed)

    # ---- state: everything here is done by one worker for all

    def facts(self) -> dict[str, Any]:
        """Return a digest of the rows in use, how many there are, and how many steps were made, over all servers."""
        found = [self._library.call(shard, "rows.digest", self._at(self.steps)).body for shard in range(self._library.shards)]
        digest = sum(int(answer["digest"], 16) for answer in found) % (1 << 64)
        return {"digest": f"{digest:016x}", "rows": sum(answer["rows"] for answer in found), "count": found[0]["count"]}

    def parts(self) -> Iterator[dict[str, Tensor]]:
        """Yield all rows in use, with their optimizer state, some at a time."""
        for shard in range(self._library.shards):
            for answer in self.pieces(shard):
                yield dict(zip(answer.body["names"], answer.tensors, strict=True))

    def pieces(self, shard: int) -> Iterator[RpcMessage]:
        """Yield the `parts` of one shard, as they are sent. Copies have their rows in the same order, so another can replace a lost one."""
        each = max(1, PART_BYTES // (self.spec.dim * self.spec.kind.itemsize))
        for start in itertools.count(0, each):
            answer = self._library.call(shard, "rows.part", {**self._at(self.steps), "start": start, "stop": start + each})
            if not len(answer.tensors[0]):
                return
            yield answer

    def clear(self, seed: int, count: int) -> None:
        """Drop all rows, and set the count of steps."""
        for shard in range(self._library.shards):
            self._library.tell(shard, "rows.clear", {**self._at(self.steps), "seed": seed, "count": count})

    def put(self, part: dict[str, Tensor]) -> None:
        """Load what `parts` has yielded."""
        for shard, where in self._library.split(part["ids"]):
            tensors = [values[where] for values in part.values()]
            self._library.tell(shard, "rows.put", {"table": self.number, "names": list(part)}, tensors)

    def forget(self, seed: int) -> None:
        """Discard what was asked for ahead, as the table has been replaced. Its rows begin by this seed. On all workers."""
        self.spec = replace(self.spec, seed=seed)
        old, self._ahead = self._ahead, []
        for asked in old:
            if asked.step <= self.steps:  # the others are answered after a step that may never come
                self._drop(asked)


def merged(found: Sequence[tuple[Tensor, Tensor]], dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge several gradients of some rows each into one."""
    if not found:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dim, dtype=dtype)
    return row_optimizers.summed(found, dim, dtype)
