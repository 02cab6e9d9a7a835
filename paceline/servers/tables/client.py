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

from paceline.errors import RECOVERABLE_ERRORS, DeadlineExceeded, UsageError
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
    call_server,
    send_request,
)
from paceline.servers.worker.connections import ReplicaConnections, ServerTraffic
from paceline.servers.worker.replication import make_state_lost
from paceline.sync.context import SyncContext

PART_BYTES = 32 << 20  # bytes of values in one message when tables are saved


class PendingRows(NamedTuple):
    """Rows that have been requested, as they are after `step`."""

    step: int
    ids: Tensor
    # Shard, indices into `ids`, and request.
    requests: list[tuple[int, Tensor, SentRequest[rows.Rows]]]


class TableGradient(NamedTuple):
    """This worker's gradient of a table."""

    ids: Tensor  # of rows, sorted and unique
    values: Tensor  # (ids, dim)
    used: bool  # whether a backward reached the table


TableStep = tuple[
    "TableClient", TableGradient, dict[str, Any]
]  # table, gradient, optimizer settings


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
        self.connections = ReplicaConnections(timings=context.timings.servers)
        context.extra_groups.append(ServerTraffic(self.connections))
        self.endpoints = context.table_servers(servers, replicas)
        if self.endpoints.pool is None and replicas > 1:
            self.endpoints.close()
            raise UsageError(
                f"SparseEmbedding(replicas={replicas}) is for runs that go on when a server is "
                "lost: start them with `paceline run --min-workers N`, or leave it out"
            )
        # Whether this worker has just joined, and has no addresses of servers yet.
        self.is_waiting = self.endpoints.pool is not None and not self.endpoints.addresses
        # The number by which servers know this worker.
        self._registered_number = -1 if self.is_waiting else self.worker_number
        if not self.is_waiting:
            self.connections.connect_all(self.endpoints, self.worker_number)
        # Sent to servers. Out of lockstep a worker steps tables "alone", or "together" with the
        # other workers of a step (see `row_steps`).
        self.stepping_mode = ""
        self._pending_pushes: list[
            SentRequest[Acknowledged]
        ] = []  # pushes that were not acknowledged yet
        self.tables: list[TableClient] = []

    def leave_lockstep(self, *, alone: bool) -> None:
        """Let workers step tables out of lockstep, each gradient alone or several together."""
        self.stepping_mode = "alone" if alone else "together"

    def use_servers(self, endpoints: ServerEndpoints) -> None:
        """Use these servers, after a worker has joined (perhaps this one).

        A worker that tried to join before may have a new number, and then connects anew.
        """
        self.endpoints = endpoints
        if self.worker_number != self._registered_number:
            self.connections.close()
            self.connections.connect_all(endpoints, self.worker_number)
        else:
            self.connections.update_servers(endpoints, self.worker_number)
        self._registered_number, self.is_waiting = self.worker_number, False

    @property
    def worker_number(self) -> int:
        """Number of this worker."""
        return self.context.agreement.origins[self.context.group.rank]

    @property
    def shard_count(self) -> int:
        """Number of shards that rows are dealt to: the number of servers without copies."""
        return len(self.connections.callers_by_shard)

    def open_table(self, name: str, spec: TableSpec, settings: dict[str, Any]) -> TableClient:
        """Open a table on the servers. All workers call it, in the same order."""
        number = Index(len(self.tables))
        for shard in range(self.shard_count):
            self.tell_all_copies(
                shard,
                rows.OpenTable(number, spec.to_plain_data(), settings, shard, self.shard_count),
            )
        self.tables.append(TableClient(self, name, number, spec, settings))
        return self.tables[-1]

    def send_to_shard(self, shard: int, request: Request[R]) -> SentRequest[R]:
        """Send a request to the first copy of a shard that is alive.

        Raises `StateLost` if no copy is left.
        """
        for caller in self.connections.callers_by_shard[shard]:
            try:
                return send_request(caller, request, self.context.deadline)
            except RECOVERABLE_ERRORS:
                if self.endpoints.pool is None or self.connections.is_leaving:
                    raise
        raise make_state_lost([caller.who for caller in self.connections.callers_by_shard[shard]])

    def await_answer(self, sent: SentRequest[R]) -> R:
        """Wait for the answer to a request."""
        return sent.wait_for_reply(self.context.deadline)

    def await_or_retry(self, sent: SentRequest[R], again: Callable[[], SentRequest[R]]) -> R:
        """Wait for an answer. If the server is lost, `again` sends the request to another copy."""
        while True:
            try:
                return self.await_answer(sent)
            except RECOVERABLE_ERRORS:
                if self.endpoints.pool is None or self.connections.is_leaving:
                    raise
            sent = again()

    def ask_shard(self, shard: int, request: Request[R]) -> R:
        """Ask a shard, and return the answer of the first copy that answers."""
        return self.await_or_retry(
            self.send_to_shard(shard, request), lambda: self.send_to_shard(shard, request)
        )

    def tell_all_copies(self, shard: int, request: Request[Acknowledged]) -> None:
        """Send a request to all copies of a shard, and wait until each has answered."""
        for caller in self.connections.callers_by_shard[shard]:
            call_server(caller, request, self.context.deadline)

    def split_by_shard(self, ids: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each shard that has some of these rows, and their indices in `ids`."""
        if self.shard_count == 1:
            yield from [(0, torch.arange(len(ids)))] if len(ids) else []
            return
        owner = ids % self.shard_count
        for shard in range(self.shard_count):
            indices = (owner == shard).nonzero()[:, 0]
            if len(indices):
                yield shard, indices

    def push_gradients(self, steps: Sequence[TableStep]) -> None:
        """Send this worker's part of the next step of these tables, without waiting.

        Servers make the step once all workers have sent their parts.
        """
        self.await_pushes()
        workers = tuple(range(self.context.group.size))
        self._pending_pushes = self.send_gradients(
            steps, lambda gradients: rows.PushRows(gradients, workers, decided=False)
        )
        for lookup, _, _ in steps:
            lookup.advance_step()

    def send_gradients(
        self,
        steps: Sequence[TableStep],
        request: Callable[[tuple[rows.RowGradient, ...]], Request[Acknowledged]],
    ) -> list[SentRequest[Acknowledged]]:
        """Send each server its rows of this worker's part of the next step of these tables.

        A server without any of the rows gets a message, too: it counts the workers of a step.

        Args:
            steps: The tables, their gradients and settings.
            request: Makes the request from the gradients of one shard.
        """
        indices_by_shard = [dict(self.split_by_shard(gradient.ids)) for _, gradient, _ in steps]
        no_rows = torch.empty(0, dtype=torch.int64)
        entries = [
            (lookup, gradient, lookup.get_changed_settings(settings))
            for lookup, gradient, settings in steps
        ]
        sent = []
        for shard in range(self.shard_count):
            gradients = []
            for (lookup, gradient, settings), table_indices in zip(
                entries, indices_by_shard, strict=True
            ):
                where = table_indices.get(shard, no_rows)
                gradients.append(
                    rows.RowGradient(
                        lookup.number,
                        lookup.steps_made + 1,
                        gradient.used,
                        settings,
                        gradient.ids[where],
                        gradient.values[where],
                    )
                )
            message = request(tuple(gradients))
            sent += [
                send_request(caller, message, self.context.deadline)
                for caller in self.connections.callers_by_shard[shard]
            ]
        return sent

    def await_pushes(self) -> None:
        """Wait until all pushes have arrived."""
        while self._pending_pushes:
            self.await_answer(self._pending_pushes.pop())

    def close(self, *, left: bool) -> None:
        """Hang up, and end the servers that this worker has started.

        In runs that survive losses the first worker ends all servers, unless other workers go on
        (`left`).
        """
        pool = self.endpoints.pool
        self.connections.dismiss_servers(
            told=pool is not None and not left and self.context.group.rank == 0
        )
        if pool is not None and left:
            pool.leave_pool()
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
        self.name, self.number, self.spec, self.steps_made = name, number, spec, 0
        self.blocking_pulls = 0  # pulls that were not prefetched
        self.waiting_seconds = 0.0  # spent waiting for rows
        self._servers, self._known_settings = library, settings
        self._prefetched: list[PendingRows] = []
        self._has_trained = False  # whether rows were pulled for training since the last step

    def pull(self, ids: Tensor, *, train: bool) -> Tensor:
        """Pull rows as they are after this worker's last step, into memory of their own.

        Args:
            ids: Ids of the rows: 1-D, int64, sorted, unique.
            train: Whether the rows will get a gradient.
        """
        self._check_admitted()
        self._has_trained = self._has_trained or train
        began = time.perf_counter()
        values = next(
            (
                rows
                for pending in self._prefetched
                if (rows := self._take_prefetched(pending, ids)) is not None
            ),
            None,
        )
        if values is None:
            self.blocking_pulls += 1
            pending = self._request_rows(ids, self.steps_made)
            values = self._servers.context.agreement.wait_for_some(
                lambda: self._receive_rows(pending), f"the rows of {self.name}"
            )
        self.waiting_seconds += time.perf_counter() - began
        return values

    def prefetch(self, ids: Tensor) -> None:
        """Request rows of the next batch, as they will be after the step under way.

        Without a step under way: as they are after the last step.
        """
        self._check_admitted()
        self._prefetched.append(self._request_rows(ids, self.steps_made + self._has_trained))

    def _check_admitted(self) -> None:
        if self._servers.is_waiting:
            raise UsageError(
                f"the rows of {self.name} can't be read yet: this worker joins the run when its "
                "loop over the training loader begins; use the table inside that loop"
            )

    def _take_prefetched(self, pending: PendingRows, ids: Tensor) -> Tensor | None:
        """Take rows from a request, if it has all of them as of this step; else None."""
        if pending.step != self.steps_made or not len(pending.ids):
            return None
        is_same = torch.equal(pending.ids, ids)
        # Both are sorted, so a binary search finds each id, or another one if it is missing.
        indices = torch.searchsorted(pending.ids, ids).clamp_(max=len(pending.ids) - 1)
        if not is_same and not torch.equal(pending.ids[indices], ids):
            return None
        self._prefetched = [other for other in self._prefetched if other is not pending]
        values = self._servers.context.agreement.wait_for_some(
            lambda: self._receive_rows(pending), f"the rows of {self.name}"
        )
        return values if is_same else values[indices]

    def _request_rows(self, ids: Tensor, step: int) -> PendingRows:
        return PendingRows(
            step,
            ids,
            [
                (shard, where, self._send_pull(shard, ids[where], step))
                for shard, where in self._servers.split_by_shard(ids)
            ],
        )

    def _send_pull(self, shard: int, ids: Tensor, step: int) -> SentRequest[rows.Rows]:
        return self._servers.send_to_shard(
            shard, rows.PullRows(self.number, step, self._servers.stepping_mode, ids)
        )

    def _receive_rows(self, pending: PendingRows) -> Tensor:
        """Wait for the rows of a request, and put the parts of all shards together."""
        answers = []
        for shard, where, sent in pending.requests:

            def again(shard: int = shard, where: Tensor = where) -> SentRequest[rows.Rows]:
                return self._send_pull(shard, pending.ids[where], pending.step)

            try:
                answers.append((where, self._servers.await_or_retry(sent, again).values))
            except DeadlineExceeded as error:
                # In lockstep the server waits for the pushes of certain workers: name them.
                lockstep = self._servers.endpoints.pool is None and not self._servers.stepping_mode
                raise self._name_missing_workers(error, shard) if lockstep else error from error
        if len(answers) == 1:
            return answers[0][1]
        values = torch.empty(len(pending.ids), self.spec.dim, dtype=self.spec.torch_dtype)
        for where, part in answers:
            values[where] = part
        return values

    def _name_missing_workers(self, error: DeadlineExceeded, shard: int) -> DeadlineExceeded:
        """Add the ranks of the workers that have not pushed to an error."""
        pushers = self._servers.ask_shard(shard, rows.ListPushers(self.number)).workers
        missing = tuple(
            rank for rank in range(self._servers.context.group.size) if rank not in pushers
        )
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        return DeadlineExceeded(
            f"{error}: the rows of {self.name} wait for step {self.steps_made} of {ranks}", missing
        )

    # ---- steps

    def get_changed_settings(self, settings: dict[str, Any]) -> dict[str, Any] | None:
        """Get the optimizer settings to send with the next step; None if they have not changed.

        They are always sent in runs that survive losses and out of lockstep: servers may have
        discarded the step that changed them.
        """
        is_sent = (
            settings != self._known_settings
            or self._servers.endpoints.pool is not None
            or bool(self._servers.stepping_mode)
        )
        self._known_settings = settings
        return settings if is_sent else None

    def advance_step(self, step: int | None = None) -> None:
        """Go on from the step that was just pushed, or from `step`."""
        self.steps_made = self.steps_made + 1 if step is None else step
        self._has_trained = False
        outdated = [pending for pending in self._prefetched if pending.step < self.steps_made]
        self._prefetched = [
            pending for pending in self._prefetched if pending.step >= self.steps_made
        ]
        for pending in outdated:
            self._drop_request(pending)

    def _drop_request(self, pending: PendingRows) -> None:
        """Wait for an answer that isn't needed: the connection would keep it otherwise."""
        for _, _, sent in pending.requests:
            with contextlib.suppress(
                *RECOVERABLE_ERRORS if self._servers.endpoints.pool is not None else ()
            ):
                self._servers.await_answer(sent)

    def discard_prefetched(self, step: int | None = None) -> None:
        """Discard prefetched rows without waiting for their answers.

        For changed workers, and for a turn whose samples are dealt again: the table is then back
        at `step`.
        """
        self.steps_made = self.steps_made if step is None else step
        self._prefetched.clear()
        self._has_trained = False

    def set_position(self, steps: int, seed: int) -> None:
        """Take over the step and the seed of the other workers."""
        self.steps_made, self.spec = steps, replace(self.spec, seed=seed)

    # ---- state: one worker does all of this for the others

    def summarize_rows(self) -> dict[str, Any]:
        """Digest of the rows in use, their number, and the number of steps, over all servers."""
        request = rows.DigestTable(self.number, self.steps_made, self._servers.stepping_mode)
        answers = [
            self._servers.ask_shard(shard, request) for shard in range(self._servers.shard_count)
        ]
        # A sum: it doesn't depend on how rows are dealt to servers.
        digest = sum(int(answer.digest, 16) for answer in answers) % (1 << 64)
        return {
            "digest": f"{digest:016x}",
            "rows": sum(answer.rows for answer in answers),
            "count": answers[0].count,
        }

    def read_parts(self) -> Iterator[dict[str, Tensor]]:
        """Yield all rows in use with their optimizer state, at most `PART_BYTES` at a time."""
        for shard in range(self._servers.shard_count):
            for answer in self.read_shard(shard):
                yield dict(zip(answer.names, answer.tensors, strict=True))

    def read_shard(self, shard: int) -> Iterator[rows.RowsPart]:
        """Yield the rows of one shard in parts, as they are sent.

        Copies have their rows in the same order, so another copy can go on for a lost one.
        """
        count = max(1, PART_BYTES // (self.spec.dim * self.spec.torch_dtype.itemsize))
        for start in itertools.count(0, count):
            answer = self._servers.ask_shard(
                shard,
                rows.ReadRows(
                    self.number, self.steps_made, self._servers.stepping_mode, start, start + count
                ),
            )
            if not len(answer.tensors[0]):
                return
            yield answer

    def clear_rows(self, seed: int, count: int) -> None:
        """Drop all rows, and set the count of steps."""
        for shard in range(self._servers.shard_count):
            self._servers.tell_all_copies(
                shard,
                rows.ClearTable(
                    self.number, self.steps_made, self._servers.stepping_mode, seed, count
                ),
            )

    def load_part(self, part: dict[str, Tensor]) -> None:
        """Load a part that `read_parts` has yielded."""
        for shard, where in self._servers.split_by_shard(part["ids"]):
            tensors = tuple(values[where] for values in part.values())
            self._servers.tell_all_copies(shard, rows.LoadRows(self.number, tuple(part), tensors))

    def reset_seed(self, seed: int) -> None:
        """Set the seed of the first values, and discard prefetched rows: the table was replaced.

        All workers call it.
        """
        self.spec = replace(self.spec, seed=seed)
        outdated, self._prefetched = self._prefetched, []
        for pending in outdated:
            # Requests for a later step may never be answered.
            if pending.step <= self.steps_made:
                self._drop_request(pending)


def merge_gradients(
    gradients: Sequence[tuple[Tensor, Tensor]], dim: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Add up gradients of some rows each: the rows are then sorted and unique."""
    if not gradients:
        return torch.empty(0, dtype=torch.int64), torch.empty(0, dim, dtype=dtype)
    return row_optimizers.sum_row_gradients(gradients, dim, dtype)
