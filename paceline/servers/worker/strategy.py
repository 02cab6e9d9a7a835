"""The parameter server as a user writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from paceline.codec.codec import Codec
from paceline.codec.coding import Coding
from paceline.errors import UsageError
from paceline.formatting import format_as_call
from paceline.removed import declare_removed_options
from paceline.servers.process.codings import check_codec
from paceline.servers.worker.client import ParameterServerSync
from paceline.servers.worker.consistency import (
    Asynchronous,
    BackupWorkers,
    BulkSynchronous,
    ConsistencyModel,
    StaleSynchronous,
)
from paceline.sync.base import Sync
from paceline.sync.context import SyncContext


@declare_removed_options(
    pull="optimizer.step() pulls the parameters; leave pull out",
    requeue=(
        "what backup workers drop is counted, and not dealt again; "
        "leave requeue out, or say AllReduce()"
    ),
)
@dataclass(frozen=True)
class ParameterServer:
    """Keep parameters on servers, where optimizers step them.

    >>> pl.start(sync=pl.ParameterServer(servers=2, staleness=4))

    Each server has a part of the parameters and the optimizer's state for them. When `backward()`
    returns, `p.grad` is the gradient of this worker's share. `optimizer.step()` sends `p.grad`, and
    sets the parameters to the values of the servers. Clip with `run.clip`, which clips the gradient
    that a step takes.

    Lockstep (`staleness=0`, bulk synchronous): all workers take the same steps at the same time,
    with the mean gradient weighted by samples. The weights are those of AllReduce.

    Stale synchronous (`staleness=s`, Ho et al. 2013): a worker goes on without late workers, and is
    at most s turns ahead of the slowest. Its parameters have all gradients of s turns ago. A step
    takes the mean over all gradients that have come since the step before, and a learning rate in
    proportion to their part of a global batch. So each sample counts the same (with momentum to the
    first order), and nothing is dropped.

    Asynchronous (`staleness=inf`): no worker waits. The gradient of each worker is a step of its
    own, with a learning rate in proportion to its part of the global batch.

    Out of lockstep a worker takes its next samples when it is ready, so fast workers train more.
    Calls that all workers make together (`run.mean`, `gather`, `save`, evaluation) belong between
    epochs. A lost worker's samples are dealt again, and a lost server ends the run.

    Args:
        servers: Number of servers. Default: one on each host.
        staleness: Turns that a worker may be ahead of the slowest: 0 (default), a number, or inf.
        backup_workers: Number of slowest workers that a step doesn't wait for (Chen et al. 2016,
            "Revisiting Distributed Synchronous SGD"). Their gradients are dropped and counted.
            Default: 0.
        replicas: Number of servers that keep the same part, on different hosts if possible, so that
            a server may be lost (`paceline run --min-workers`). In lockstep only. Default: 1.
        bucket_mb: Size of a bucket in MB. Default: 4.
        codec: How gradients are written on the way to the servers, such as `int8()` or
            `error_feedback(topk(0.01))`. Parameters come back exactly. Default: exact.

    Raises:
        UsageError: A value is out of its range, or two options don't go together.
    """

    servers: int | None = None
    staleness: float = 0
    backup_workers: int = 0
    replicas: int = 1
    bucket_mb: float = 4.0
    codec: Codec | Coding | None = None

    __repr__ = format_as_call

    def __post_init__(self) -> None:
        check_codec(self.codec)
        if self.servers is not None and self.servers < 1:
            raise UsageError(
                f"servers={self.servers} is not a number of servers; give 1 or more, or leave it "
                "out for one on each host"
            )
        if not self.bucket_mb > 0:
            raise UsageError(
                f"bucket_mb={self.bucket_mb} is not a size; "
                "give megabytes above 0, e.g. bucket_mb=4"
            )
        if not (
            self.staleness == math.inf
            or (self.staleness >= 0 and self.staleness == int(self.staleness))
        ):
            raise UsageError(
                f"staleness={self.staleness} is not a bound; give 0 (in lockstep), a number of "
                "turns, or inf (no bound)"
            )
        if self.backup_workers < 0:
            raise UsageError(
                f"backup_workers={self.backup_workers} is not a number of workers; give 0 or more"
            )
        if self.backup_workers and self.staleness:
            raise UsageError(
                "backup_workers is for steps that workers take together: "
                "leave out staleness, or backup_workers"
            )
        if self.replicas < 1:
            raise UsageError(
                f"replicas={self.replicas} is not a number of copies; give 1 (each parameter is on "
                "one server) or more"
            )
        if self.replicas > 1 and (self.staleness or self.backup_workers):
            raise UsageError(
                f"replicas={self.replicas} is for workers in lockstep, and with staleness or "
                "backup_workers they are not: leave out replicas and save checkpoints, or leave "
                "out staleness and backup_workers"
            )

    def begin(self, context: SyncContext) -> Sync:
        if context.cut_axes:
            raise UsageError(
                f"{self!r}: servers keep whole parameters, and the mesh cuts along "
                f"{' and '.join(context.cut_axes)}; use AllReduce, "
                "LocalSGD or Gossip, which work on the parts"
            )
        if self.backup_workers >= max(context.group.size, 2):
            raise UsageError(
                f"backup_workers={self.backup_workers} of {context.group.size} workers leaves none "
                "to wait for; give fewer"
            )
        return ParameterServerSync(context, self, self._make_model())

    def _make_model(self) -> ConsistencyModel:
        """Choose the consistency model."""
        if self.backup_workers:
            return ConsistencyModel(partial(BackupWorkers, backups=self.backup_workers), drops=True)
        if self.staleness == math.inf:
            return ConsistencyModel(Asynchronous, alone=True)
        if self.staleness:
            return ConsistencyModel(partial(StaleSynchronous, bound=int(self.staleness)))
        return ConsistencyModel(BulkSynchronous, lockstep=True)
