"""The sparse tables of a run, from the models that have them to the servers that keep them.

model.parameters() -- handle of a table --> optimizer group       the group says how the table is
                                                                  stepped
optimizer.step     -- gradients of rows --> servers               then its own step, for everything
                                                                  else in it

Out of lockstep the servers make both steps. If the run survives lost workers, both steps are made
on all workers or on none, and a turn that is dealt again begins with the same gradients as before
(`servers/tables/row_steps.py`).
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgpack
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.errors import UsageError
from paceline.servers.process import row_optimizers
from paceline.servers.process.table import TableSpec
from paceline.servers.tables.client import TableClient, TableGradient, TableServers, merge_gradients
from paceline.servers.tables.embedding import SparseEmbedding
from paceline.servers.tables.row_steps import LockstepRowSteps, PerWorkerRowSteps
from paceline.servers.worker.replication import ServerReplication
from paceline.sync.autograd import GradientTracker
from paceline.sync.context import SyncContext
from paceline.trace import ServerWork


class TableView:
    """A table as its module sees it (a `RowSource`)."""

    def __init__(self, lookup: TableClient, backward: GradientTracker, *, frozen: bool) -> None:
        self._lookup, self._backward, self._frozen = lookup, backward, frozen

    def pull(self, ids: Tensor, *, train: bool) -> Tensor:
        with _count_as_exchange(self._backward, "rows"):
            return self._lookup.pull(ids, train=train)

    def prefetch(self, ids: Tensor) -> None:
        self._lookup.prefetch(ids)

    def report_backward(self) -> float:
        if self._frozen:
            raise UsageError(
                f"the sparse table {self._lookup.name} was frozen when it was prepared, and "
                "nothing steps it: thaw it before that"
            )
        return self._backward.unhooked_scale()


@dataclass
class RunTable:
    """A table, and the optimizer that steps it."""

    name: str
    module: SparseEmbedding
    lookup: TableClient
    optimizer: Optimizer | None
    group: int

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the table's parameter group as they are now."""
        assert self.optimizer is not None
        return row_optimizers.read_row_settings(self.name, self.optimizer, self.group)

    def take_gradient(self) -> TableGradient:
        """Take this worker's gradient for the next step; the module keeps it until `zero_grad`."""
        pushed, spec = self.module.gradient(), self.lookup.spec
        merged = merge_gradients(pushed or [], spec.dim, spec.torch_dtype)
        if pushed:
            pushed[:] = [merged]  # more may be added to it before zero_grad
        return TableGradient(*merged, pushed is not None)


class RunTables:
    """All sparse tables of a run."""

    def __init__(self, context: SyncContext, backward: GradientTracker) -> None:
        self._context, self._backward = context, backward
        self._servers: TableServers | None = None
        self.recoverable_steps: LockstepRowSteps | None = None  # if losses are survived
        self._unlocked_steps: PerWorkerRowSteps | None = None  # out of lockstep
        self.tables: list[RunTable] = []
        # the gradients that the turn under way began with
        self._turn_start_gradients: list[tuple[SparseEmbedding, Any]] = []

    def find_new_tables(
        self, models: Sequence[tuple[str, nn.Module]]
    ) -> list[tuple[str, SparseEmbedding]]:
        """Find the tables in these models that are not open yet, each once."""
        new_tables: dict[int, tuple[str, SparseEmbedding]] = {}
        for prefix, model in models:
            for name, module in model.named_modules():
                if isinstance(module, SparseEmbedding) and all(
                    table.module is not module for table in self.tables
                ):
                    new_tables.setdefault(
                        id(module),
                        (prefix + name if name else prefix.rstrip(".") or "model", module),
                    )
        return list(new_tables.values())

    def open_on_servers(
        self,
        new_tables: Sequence[tuple[str, SparseEmbedding]],
        optimizers: Sequence[Optimizer],
        free: PerWorkerRowSteps | None = None,
    ) -> None:
        """Open these tables on servers. Collective.

        `free`: steps the tables if workers are not in lockstep.

        Raises `UsageError` for options that can't be honoured.
        """
        # Check all options first, on all workers alike: no server is started in vain.
        servers, replicas = (
            _get_shared_option("servers", new_tables),
            _get_shared_option("replicas", new_tables),
        )
        owned = [_find_owner(name, module.weight, optimizers) for name, module in new_tables]
        rules = [
            row_optimizers.describe_row_optimizer(name, *owner) if owner else None
            for (name, _), owner in zip(new_tables, owned, strict=True)
        ]
        for (name, module), owner in zip(new_tables, owned, strict=True):
            _check_table(name, module, frozen=owner is None)
        if new_tables and self._servers is None:
            self._start_servers(servers, replicas)
        elif self._servers is not None and not self._servers.is_waiting:
            here = {"servers": self._servers.shard_count, "replicas": self._servers.replicas}
            for option, wanted in (("servers", servers), ("replicas", replicas)):
                if wanted is not None and wanted != here[option]:
                    raise UsageError(
                        f"the tables of this run have {option}={here[option]}, and "
                        f"{option}={wanted} asks for another number: give all tables the same"
                    )
        for (name, module), owner, how in zip(new_tables, owned, rules, strict=True):
            assert self._servers is not None
            rule, settings = how or ("SGD", {"lr": 0.0})
            dtype = str(module.weight.dtype).removeprefix("torch.")
            lookup = self._servers.open_table(
                name,
                TableSpec(module.rows, module.dim, dtype, int(module.seed), module.std, rule),
                settings,
            )
            module.source = TableView(lookup, self._backward, frozen=owner is None)
            self.tables.append(RunTable(name, module, lookup, *(owner or (None, 0))))
        if new_tables and free is not None:
            assert self._servers is not None
            self._unlocked_steps = free
            free.open_tables(self._servers, self._get_stepped_tables, optimizers)

    def _start_servers(self, servers: int | None, replicas: int | None) -> None:
        self._servers = TableServers(self._context, servers, replicas or 1)
        if self._servers.endpoints.pool is not None:
            self.recoverable_steps = LockstepRowSteps(self._servers, self._servers.endpoints.pool)

    def get_handle_ids(self) -> set[int]:
        """Ids of the parameters that stand for tables."""
        return {id(table.module.weight) for table in self.tables}

    def steps_tables(self, optimizer: Any) -> bool:
        """Whether this optimizer steps any table."""
        return any(table.optimizer is optimizer for table in self.tables)

    def _get_stepped_tables(self, optimizer: Any) -> list[RunTable]:
        """Tables that this optimizer steps."""
        return [table for table in self.tables if table.optimizer is optimizer]

    def push_gradients(self, optimizer: Any) -> None:
        """Send the gradients for the next step of the optimizer's tables, without waiting.

        If losses are survived, this returns when all servers have the gradients of all workers, and
        `make_steps` makes the step; or it raises `CallDiscarded`. Out of lockstep, the rest of the
        step is sent along.
        """
        stepped = self._get_stepped_tables(optimizer)
        if stepped and self._unlocked_steps is not None:
            self._unlocked_steps.offer_gradients(optimizer)
        elif stepped and self._servers is not None:
            with _count_as_exchange(self._backward, "gradients of rows"):
                gradients = [
                    (table.lookup, table.take_gradient(), table.settings) for table in stepped
                ]
                if self.recoverable_steps is None:
                    self._servers.push_gradients(gradients)
                else:
                    self.recoverable_steps.settle_gradients(gradients)

    def make_steps(self, optimizer: Any) -> None:
        """Make the step of the optimizer's tables: servers have the gradients of all workers."""
        clients = [table.lookup for table in self._get_stepped_tables(optimizer)]
        if clients and self.recoverable_steps is not None:
            with _count_as_exchange(self._backward, "steps of rows"):
                self.recoverable_steps.make_steps(clients)

    @contextlib.contextmanager
    def hide_gradients(self, optimizer: Any) -> Iterator[None]:
        """Hide the gradients of tables from the optimizer's own step."""
        handles = [table.module.weight for table in self._get_stepped_tables(optimizer)]
        grads = [weight.grad for weight in handles]
        for weight in handles:
            weight.grad = None
        try:
            yield
        finally:
            for weight, grad in zip(handles, grads, strict=True):
                weight.grad = grad

    def check_clip(self, parameters: Iterable[Tensor]) -> None:
        """Raise `UsageError` if a table is to be clipped."""
        handles = self.get_handle_ids()
        for parameter in parameters:
            if id(parameter) in handles:
                name = next(table.name for table in self.tables if table.module.weight is parameter)
                raise UsageError(
                    f"run.clip can't see the gradients of the sparse table {name}, which go to "
                    "servers: give it the other parameters, "
                    "e.g. [p for p in model.parameters() if p.numel()]"
                )

    def check_scaler(self) -> None:
        """Raise `UsageError` if a GradScaler would judge gradients that it can't see."""
        if self.tables:
            raise UsageError(
                "a GradScaler can't see the gradients of sparse tables, which go to servers: "
                "use bfloat16, which needs no scaler"
            )

    def combine_digest(self, digest: str) -> str:
        """Combine `digest` with the rows in use, the same on all workers. Collective."""
        if not self.tables:
            return digest
        packed = self._context.agreement.tell_everyone(
            "sparse tables",
            lambda: msgpack.packb(
                [table.lookup.summarize_rows()["digest"] for table in self.tables]
            ),
        )
        return hashlib.sha256(digest.encode() + packed).hexdigest()

    # ---- if losses are survived

    def begin_turn(self) -> None:
        """Begin a turn of training."""
        if self.recoverable_steps is not None:
            self.recoverable_steps.begin_turn()
            self._turn_start_gradients = [
                (table.module, table.module.kept()) for table in self.tables
            ]

    def commit_turn(self, *_: Any) -> None:
        """Keep the changes of the turn. Collective if copies of servers are about to be made."""
        self._turn_start_gradients = []
        if self.recoverable_steps is not None:
            self.recoverable_steps.commit_turn()

    def undo_turn(self) -> None:
        """Undo the turn: each module has the gradients with which the turn began."""
        if self.recoverable_steps is not None:
            self.recoverable_steps.undo_turn()
        for module, gradients in self._turn_start_gradients:
            module.keep(gradients)

    def join_info(self) -> Any:
        """Facts that a joining worker needs for `regroup`, as JSON values."""
        return None if self.recoverable_steps is None else self.recoverable_steps.join_info()

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Go on with the context's new group of workers. Collective.

        Raises `StateLost` if no other server has a copy of a lost server's rows.
        """
        if self.recoverable_steps is not None:
            self.recoverable_steps.regroup(context, layout)

    @property
    def copies(self) -> ServerReplication | None:
        return None if self.recoverable_steps is None else self.recoverable_steps.copies

    def facts(self) -> list[dict[str, Any]]:
        """Work of each server so far, for the summary. Not collective."""
        servers = self._servers
        return (
            []
            if servers is None
            else self._context.agreement.retry_after_losses(
                lambda: servers.connections.read_facts(self._context.deadline)
            )
        )

    def served(self) -> list[ServerWork]:
        """Busy times of each server and their causes, for the timeline."""
        return (
            []
            if self._servers is None or not self._context.trace.keeps_spans
            else self._servers.connections.read_timelines(self._context.deadline)
        )

    def describe_layout(self) -> str:
        """Describe the tables, all but their seeds."""
        return " ".join(
            f"{table.name} {replace(table.lookup.spec, seed=0)}" for table in self.tables
        )

    @property
    def is_waiting(self) -> bool:
        """Whether this worker is not let in yet, and has no servers."""
        return self._servers is not None and self._servers.is_waiting

    def discard_prefetched(self) -> None:
        """Discard prefetched rows, as the tables have changed."""
        for table in self.tables:
            table.lookup.reset_seed(int(table.module.seed))

    def close(self, *, failed: bool) -> None:
        """Close the servers; modules have no rows any more. `failed`: other workers may go on."""
        for table in self.tables:
            table.module.source = None
        if self.recoverable_steps is not None:
            self.recoverable_steps.copies.close()
        if self._servers is not None:
            self._servers.close(left=failed)


@contextlib.contextmanager
def _count_as_exchange(backward: GradientTracker, what: str) -> Iterator[None]:
    """Count the time of this block as exchange, and not as compute."""
    began, inside = time.perf_counter_ns(), backward.meter.since > 0
    backward.meter.stop(began)
    try:
        yield
    finally:
        ended = time.perf_counter_ns()
        backward.meter.expose((ended - began) / 1e9)
        backward.meter.start(ended if inside else 0)
        backward.context.trace.record_span(what, "exchange", began, ended)


def _get_shared_option(option: str, tables: Sequence[tuple[str, SparseEmbedding]]) -> int | None:
    """Value of an option that all tables share; None if no table sets it.

    Raises `UsageError` if they differ.
    """
    values = {value for _, module in tables if (value := getattr(module, option)) is not None}
    if len(values) > 1:
        raise UsageError(
            f"all tables of a run share its servers, and tables ask for {option} {sorted(values)}; "
            "give one number"
        )
    return max(values, default=None)


def _find_owner(
    name: str, weight: Parameter, optimizers: Sequence[Optimizer]
) -> tuple[Optimizer, int] | None:
    """Find the optimizer of a table and the index of its group; None for a frozen table."""
    owners = [
        (optimizer, index)
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
        if any(parameter is weight for parameter in group["params"])
    ]
    if not weight.requires_grad:
        return None
    if len(owners) != 1:
        raise UsageError(
            f"the sparse table {name} is in {len(owners)} of the optimizers that are prepared with "
            "it; give its model to run.prepare "
            "together with the one optimizer that steps it, or freeze it "
            "(weight.requires_grad_(False))"
        )
    return owners[0]


def _check_table(name: str, module: SparseEmbedding, *, frozen: bool) -> None:
    if module.weight.dtype not in (torch.float32, torch.float64):
        raise UsageError(
            f"the sparse table {name} is of {module.weight.dtype}; rows are float32 or float64: "
            "use model.float() before autocast"
        )
    if module.weight.grad is not None and not frozen:
        raise UsageError(
            f"the sparse table {name} has a gradient before it is prepared; call zero_grad() first"
        )
