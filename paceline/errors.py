"""The errors of paceline, drawn as a tree.

PacelineError
├── UsageError (ValueError)         a mistake of the user; the message has the value found, the
│   │                               values possible, and the next thing to do
│   ├── NotationError               a strategy written as text can't be read
│   ├── PlaceError                  the place of this process (rank, host, interface, meeting
│   │                               point) is unknown or makes no sense
│   ├── SecretError                 the job's secret is missing, unreadable, or differs
│   └── DataError                   a loader, sampler or batch can't be dealt
├── Mismatch                        workers were about to do different things; names both
├── ReplicasDiffer                  state that should be equal differs; names workers and tensors
├── DeadlineExceeded (TimeoutError) a wait has passed its deadline; names missing ranks and hosts
├── WorkerLost                      another worker is gone
│   └── ServerLost                  a server is gone; the workers may all be alive
├── WorkerFailed                    a worker of `pl.launch` failed; the message has its traceback
├── StateLost                       lost state exists nowhere else: only a checkpoint helps
├── ViewChanged                     the group of this work has been replaced
├── ResourceError                   this machine lacks something (shared memory, a kernel feature,
│                                   disk space)
└── CheckpointError                 a checkpoint is missing, half-written, corrupted, or of another
                                    model
"""

from __future__ import annotations


class PacelineError(Exception):
    """Any error that paceline raises on purpose."""


class UsageError(PacelineError, ValueError):
    """A mistake of the caller. The message has the value found, the values possible, the fix."""


class NotationError(UsageError):
    """A strategy written as text can't be turned into an object."""


class PlaceError(UsageError):
    """The place of this process in the job can't be told from its environment."""


class SecretError(UsageError):
    """The job's secret is missing, unreadable, or differs between hosts."""


class DataError(UsageError):
    """A loader, sampler or batch can't be dealt to the workers."""


class Mismatch(PacelineError):
    """Workers were about to exchange different things. The message names both sides."""


class ReplicasDiffer(PacelineError):
    """Parameters, buffers or optimizer state differ between workers.

    The message names the ranks and the tensors.
    """


class DeadlineExceeded(PacelineError, TimeoutError):
    """A wait has passed its deadline. `missing` holds the ranks that never came."""

    def __init__(self, message: str, missing: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.missing = missing


class WorkerLost(PacelineError):
    """Another worker is gone. `ranks` holds the workers that are gone."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class WorkerFailed(PacelineError):
    """A worker of `pl.launch` has failed. The message has its traceback.

    `rank` is the rank of the worker, or None if no worker started.
    """

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class StateLost(PacelineError):
    """State that only the lost workers had exists nowhere else."""


class ServerLost(WorkerLost):
    """A server is gone, or out of reach."""


class ViewChanged(PacelineError):
    """The view of the group has changed, and work pending in the old view is cancelled."""


# Errors after which the workers that are still alive can go on.
RECOVERABLE_ERRORS = (WorkerLost, ViewChanged)


class ResourceError(PacelineError):
    """The machine lacks something that is needed. The message says what to do."""


class CheckpointError(PacelineError):
    """A checkpoint can't be used. The message says why, and which other checkpoint can."""
