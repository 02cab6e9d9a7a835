"""The parameter server as a user writes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from paceline.codec.codec import Codec
from paceline.codec.coding import Coding
from paceline.errors import UsageError
from paceline.formatting import spell
from paceline.removed import removed
from paceline.servers.process.codings import check
from paceline.servers.worker.client import ParameterServerSync
from paceline.servers.worker.consistency import Asynchronous, BackupWorkers, BulkSynchronous, ConsistencyModel, StaleSynchronous
from paceline.sync.base import Sync
from paceline.sync.context import SyncContext


@removed(
    pull="optimizer.step() pulls the parameters; leave pull out",
    requeue="what backup workers drop is counted, and not dealt again; leave requeue out, or say AllReduce()",
)
@dataclass(frozen=True)
class ParameterServer:
    """Optimizers step on servers, each of which keeps a part of the parameters; what they remember lies there alone.

    >>> pl.start(sync=pl.ParameterServer(servers=2, staleness=4))

    p.grad is the gradient of my own share when backward returns. optimizer.step sends what p.grad is then, and sets the parameters to
    what the servers have. Clip with `run.clip`. `servers`: how many (None: one on each host).

    `staleness=0` (bulk synchronous): all workers take the same steps at the same time, with the gradients of all, weighted by samples:
    the same weights as with AllReduce. With `backup_workers=b` a step is made by the first workers that come, all but b (Chen et al.
    2016, "Revisiting Distributed Synchronous SGD"): what comes later is dropped and counted.

    `staleness=s` (stale synchronous, Ho et al. 2013): a worker goes on without those that are late, at most s turns ahead of the slowest,
    and has parameters with all that the others had sent s turns before. A step is made by all who are on time, as in lockstep, and by who
    has come late since the one before: nothing is dropped. It takes the mean of their gradients, weighted by samples, by the learning
    rate times their part of a global batch: each sample counts the same (with momentum to the first order), and a step of all is that of
    lockstep. `run.clip` clips the mean.

    `staleness=inf` (asynchronous): nobody waits. A worker's gradient, the mean over its own samples, is a step of its own, by the learning
    rate times its part of the global batch; `run.clip` clips it alone.

    `replicas=r` keeps each part on r servers, on different hosts if there are enough: what a lost one kept the others have. For runs that
    go on when something is lost (`paceline run --min-workers`), in lockstep: weights are those of a run in which nothing was lost. Else a
    lost server ends the run, and what a lost worker had under way is dealt again to the living.

    `codec`: how gradients are written on the way to servers, such as `int8()` or `error_feedback(topk(0.01))`. Parameters come back
    exactly.

    Where workers are not in lockstep each takes its next samples when it is ready for them, so that quick ones train more; what all have
    to do together (run.mean, gather, save, evaluation) belongs between epochs.
    """

    servers: int | None = None
    staleness: float = 0
    backup_workers: int = 0
    replicas: int = 1
    bucket_mb: float = 4.0
    codec: Codec | Coding | None = None

    __repr__ = spell

    def __post_init__(self) -> None:
        check(self.codec)
        if self.servers is not None and self.servers < 1:
            raise UsageError(f"servers={self.servers} is no number of servers; give 1 or more, or leave it out for one on each host")
        if not self.bucket_mb > 0:
            raise UsageError(f"bucket_mb={self.bucket_mb} is not a size; give megabytes above 0, e.g. bucket_mb=4")
        if not (self.staleness == math.inf or (self.staleness >= 0 and self.staleness == int(self.staleness))):
            raise UsageError(f"staleness={self.staleness} is no bound; give 0 (in lockstep), a number of turns, or inf (no bound)")
        if self.backup_workers < 0:
            raise UsageError(f"backup_workers={self.backup_workers} is no number of workers; give 0 or more")
        if self.backup_workers and self.staleness:
            raise UsageError("backup_workers is for steps that workers take together: leave out staleness, or backup_workers")
        if self.replicas < 1:
            raise UsageError(f"replicas={self.replicas} is no number of servers that keep the same; give 1 (no copies) or more")
        if self.replicas > 1 and (self.staleness or self.backup_workers):
            raise UsageError(
                f"replicas={self.replicas} is for workers in lockstep, and with staleness or backup_workers they are not: leave out "
                "replicas, and save checkpoints; or leave those out"
            )

    def begin(self, context: SyncContext) -> Sync:
        if context.cut_axes:
            raise UsageError(
                f"{self!r}: servers keep whole parameters, and the mesh cuts along {' and '.join(context.cut_axes)}; use AllReduce, "
                "LocalSGD or Gossip, which work on the parts"
            )
        if self.backup_workers >= max(context.group.size, 2):
            raise UsageError(f"backup_workers={self.backup_workers} of {context.group.size} workers leaves none to wait for; give fewer")
        return ParameterServerSync(context, self, self._model())

    def _model(self) -> ConsistencyModel:
        """Choose the consistency model."""
        if self.backup_workers:
            return ConsistencyModel(partial(BackupWorkers, backups=self.backup_workers), drops=True)
        if self.staleness == math.inf:
            return ConsistencyModel(Asynchronous, alone=True)
        if self.staleness:
            return ConsistencyModel(partial(StaleSynchronous, bound=int(self.staleness)))
        return ConsistencyModel(BulkSynchronous, lockstep=True)
