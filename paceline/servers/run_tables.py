"""The sparse tables of a run: found in prepared models, opened on servers, and stepped with their
optimizer.

model.parameters() -- handle of a table --> optimizer group       the group says how the table is
                                                                  stepped
optimizer.step     -- gradients of rows --> servers               then its own step, for everything
                                                                  else in it

Where workers are not in lockstep, both are made on servers, by the same workers
(`servers.tables.steps`). Where losses are survived, both are made on all workers or on none
(`servers.tables.steps`); a turn that is dealt again begins with the gradients that it began with at
first.
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
    """What a module sees of its table (a `parallel.embedding.RowSource`)."""

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
        """Return this worker's gradient for the next step."""
        found, spec = self.module.gradient(), self.lookup.spec
        whole = merge_gradients(found or [], spec.dim, spec.torch_dtype)
        if found:
            found[:] = [whole]  # more may be added to it before zero_grad
        return TableGradient(*whole, found is not None)


class RunTables:
    """All sparse tables of a run."""

    def __init__(self, context: SyncContext, backward: GradientTracker) -> None:
        self._context, self._backward = context, backward
        self._servers: TableServers | None = None
        self.recoverable_steps: LockstepRowSteps | None = None  # where losses are survived
        self._unlocked_steps: PerWorkerRowSteps | None = None  # where workers are not in lockstep
        self.tables: list[RunTable] = []
        # the gradients that the turn under way began with
        self._turn_start_gradients: list[tuple[SparseEmbedding, Any]] = []

    def find_new_tables(
        self, models: Sequence[tuple[str, nn.Module]]
    ) -> list[tuple[str, SparseEmbedding]]:
        """Return the tables in these models that are not open yet, once each."""
        found: dict[int, tuple[str, SparseEmbedding]] = {}
        for prefix, model in models:
            for name, module in model.named_modules():
                if isinstance(module, SparseEmbedding) and all(
                    kept.module is not module for kept in self.tables
                ):
                    found.setdefault(
                        id(module),
                        (prefix + name if name else prefix.rstrip(".") or "model", module),
                    )
        return list(found.values())

    def open_on_servers(
        self,
        found: Sequence[tuple[str, SparseEmbedding]],
        optimizers: Sequence[Optimizer],
        free: PerWorkerRowSteps | None = None,
    ) -> None:
        """Open these tables on servers.

        Collective. Raises `UsageError` for options that can't be honoured.

        `free`: steps the tables where workers are not in lockstep.
        """
        servers, replicas = (
            _get_shared_option("servers", found),
            _get_shared_option("replicas", found),
        )
        owned = [_find_owner(name, module.weight, optimizers) for name, module in found]
        rules = [
            row_optimizers.describe_row_optimizer(name, *owner) if owner else None
            for (name, _), owner in zip(found, owned, strict=True)
        ]
        for (name, module), owner in zip(found, owned, strict=True):
            _check_table(name, module, frozen=owner is None)
        if found and self._servers is None:
            self._start_servers(servers, replicas)
        elif self._servers is not None and not self._servers.is_waiting:
            here = {"servers": self._servers.shard_count, "replicas": self._servers.replicas}
            for option, wanted in (("servers", servers), ("replicas", replicas)):
                if wanted is not None and wanted != here[option]:
                    raise UsageError(
                        f"the tables of this run have {option}={here[option]}, and "
                        f"{option}={wanted} asks for others"
                    )
        for (name, module), owner, how in zip(found, owned, rules, strict=True):
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
        if found and free is not None:
            assert self._servers is not None
            self._unlocked_steps = free
            free.open_tables(self._servers, self._get_stepped_tables, optimizers)

    def _start_servers(self, servers: int | None, replicas: int | None) -> None:
        self._servers = TableServers(self._context, servers, replicas or 1)
        if self._servers.endpoints.pool is not None:
            self.recoverable_steps = LockstepRowSteps(self._servers, self._servers.endpoints.pool)

    def get_handle_ids(self) -> set[int]:
        """Return the ids of the parameters that stand for tables."""
        return {id(kept.module.weight) for kept in self.tables}

    def steps_tables(self, optimizer: Any) -> bool:
        """Whether this optimizer steps any table."""
        return any(kept.optimizer is optimizer for kept in self.tables)

    def _get_stepped_tables(self, optimizer: Any) -> list[RunTable]:
        """Return the tables that this optimizer steps."""
        return [kept for kept in self.tables if kept.optimizer is optimizer]

    def push_gradients(self, optimizer: Any) -> None:
        """Send the servers what they need for the next step of the optimizer's tables, without
        waiting.

        Where losses are survived it returns once all servers have that of all workers, and `make`
        makes the step; or it raises `CallDiscarded`. Where workers are not in lockstep, everything
        else of the step is sent with it.
        """
        mine = self._get_stepped_tables(optimizer)
        if mine and self._unlocked_steps is not None:
            self._unlocked_steps.offer_gradients(optimizer)
        elif mine and self._servers is not None:
            with _count_as_exchange(self._backward, "gradients of rows"):
                found = [(kept.lookup, kept.take_gradient(), kept.settings) for kept in mine]
                self._servers.push_gradients(
                    found
                ) if self.recoverable_steps is None else self.recoverable_steps.settle_gradients(
                    found
                )

    def make_steps(self, optimizer: Any) -> None:
        """Make the step of the optimizer's tables, which all workers have sent gradients for."""
        mine = [kept.lookup for kept in self._get_stepped_tables(optimizer)]
        if mine and self.recoverable_steps is not None:
            with _count_as_exchange(self._backward, "steps of rows"):
                self.recoverable_steps.make_steps(mine)

    @contextlib.contextmanager
    def hide_gradients(self, optimizer: Any) -> Iterator[None]:
        """Hide the gradients of tables from the optimizer's own step."""
        mine = [kept.module.weight for kept in self._get_stepped_tables(optimizer)]
        grads = [weight.grad for weight in mine]
        for weight in mine:
            weight.grad = None
        try:
            yield
        finally:
            for weight, grad in zip(mine, grads, strict=True):
                weight.grad = grad

    def check_clip(self, parameters: Iterable[Tensor]) -> None:
        """Raise `UsageError` if a table is to be clipped."""
        handles = self.get_handle_ids()
        for parameter in parameters:
            if id(parameter) in handles:
                name = next(kept.name for kept in self.tables if kept.module.weight is parameter)
                raise UsageError(
                    f"run.clip can't see the gradients of the sparse table {name}, which go to "
                    "servers: give it the other parameters, "
                    "e.g. [p for p in model.parameters() if p.numel()]"
                )

    def check_scaler(self) -> None:
        """Raise `UsageError` where a GradScaler would judge gradients that it can't see."""
        if self.tables:
            raise UsageError(
                "a GradScaler can't see the gradients of sparse tables, which go to servers: "
                "use bfloat16, which needs no scaler"
            )

    def combine_digest(self, digest: str) -> str:
        """Return one digest of `digest` and of the rows in use, the same on all workers.

        Collective.
        """
        if not self.tables:
            return digest
        packed = self._context.agreement.tell_everyone(
            "sparse tables",
            lambda: msgpack.packb([kept.lookup.summarize_rows()["digest"] for kept in self.tables]),
        )
        return hashlib.sha256(digest.encode() + packed).hexdigest()

    # ---- where losses are survived

    def begin_turn(self) -> None:
        """Begin a turn of training."""
        if self.recoverable_steps is not None:
            self.recoverable_steps.begin_turn()
            self._turn_start_gradients = [(kept.module, kept.module.kept()) for kept in self.tables]

    def commit_turn(self, *_: Any) -> None:
        """Keep what the turn has changed.

        Collective, where copies of servers are about to be made.
        """
        self._turn_start_gradients = []
        if self.recoverable_steps is not None:
            self.recoverable_steps.commit_turn()

    def undo_turn(self) -> None:
        """Undo the turn: give each module back what it kept when the turn began."""
        if self.recoverable_steps is not None:
            self.recoverable_steps.undo_turn()
        for module, kept in self._turn_start_gradients:
            module.keep(kept)

    def join_info(self) -> Any:
        """Facts that a joining worker needs for `regroup`, as JSON values."""
        return None if self.recoverable_steps is None else self.recoverable_steps.join_info()

    def regroup(self, context: SyncContext, layout: Any = None) -> None:
        """Go on with the context's new group of workers.

        Collective. Raises `StateLost` where what a lost server kept is nowhere else.
        """
        if self.recoverable_steps is not None:
            self.recoverable_steps.regroup(context, layout)

    @property
    def copies(self) -> ServerReplication | None:
        return None if self.recoverable_steps is None else self.recoverable_steps.copies

    def facts(self) -> list[dict[str, Any]]:
        """Work of each server so far, for the summary. Not collective."""
        found = self._servers
        return (
            []
            if found is None
            else self._context.agreement.retry_after_losses(
                lambda: found.connections.read_facts(self._context.deadline)
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
        return " ".join(f"{kept.name} {replace(kept.lookup.spec, seed=0)}" for kept in self.tables)

    @property
    def is_waiting(self) -> bool:
        """Whether this worker is not let in yet, and has no servers."""
        return self._servers is not None and self._servers.is_waiting

    def discard_prefetched(self) -> None:
        """Discard rows that were asked for ahead, as the tables have changed."""
        for kept in self.tables:
            kept.lookup.reset_seed(int(kept.module.seed))

    def close(self, *, failed: bool) -> None:
        """Close the servers; modules have no rows any more. `failed`: other workers may go on."""
        for kept in self.tables:
            kept.module.source = None
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


def _get_shared_option(option: str, found: Sequence[tuple[str, SparseEmbedding]]) -> int | None:
    """Return the value of an option that all tables share; None if no table asks for it.

    Raises `UsageError` if they differ.
    """
    asked = {value for _, module in found if (value := getattr(module, option)) is not None}
    if len(asked) > 1:
        raise UsageError(
            f"all tables of a run share its servers, and tables ask for {option} {sorted(asked)}; "
            "give one number"
        )
    return max(asked, default=None)


def _find_owner(
    name: str, weight: Parameter, optimizers: Sequence[Optimizer]
) -> tuple[Optimizer, int] | None:
    """Return the optimizer and the number of the group of a table; None for a frozen table."""
    found = [
        (optimizer, number)
        for optimizer in optimizers
        for number, group in enumerate(optimizer.param_groups)
        if any(parameter is weight for parameter in group["params"])
    ]
    if not weight.requires_grad:
        return None
    if len(found) != 1:
        raise UsageError(
            f"the sparse table {name} is in {len(found)} of the optimizers that are prepared with "
            "it; give its model to run.prepare "
            "together with the one optimizer that steps it, or freeze it "
            "(weight.requires_grad_(False))"
        )
    return found[0]


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
