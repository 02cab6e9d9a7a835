"""Messages about rounds of local SGD that close by a quorum (`servers/process/quorum_rounds.py`).

OpenRounds       gives the keeper of the rounds the first values
SubmitChange     replies with the new values once the change is in a round
ListLate         lists the workers that the open round waits for
ReadOuterState   reads the state of the outer optimizer, for a checkpoint
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.servers.protocol.message import Acknowledged, Message, Request
from paceline.servers.protocol.samples import MissingWorkers


@dataclass(frozen=True)
class OpenRounds(Request[Acknowledged]):
    """Begin rounds with these values.

    Args:
        quorum: Part of the running workers that a round needs.
        grace_seconds: Seconds for which a round waits for others once it has its quorum.
        lr: Learning rate of the outer optimizer. 0: the mean is taken as it is.
        momentum: Momentum of the outer optimizer.
        workers: All workers.
        has_memories: The state of the outer optimizer follows the values.
        tensors: The values, then the state.
    """

    quorum: float
    grace_seconds: float
    lr: float
    momentum: float
    workers: tuple[int, ...]
    has_memories: bool
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class RoundValues(Message):
    """The values after a round, and the number of rounds so far."""

    count: int
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class SubmitChange(Request[RoundValues]):
    """Add this worker's change since its last round to the open round.

    Args:
        number: Count of the worker's changes, from 1 on. A repeated one counts once.
        weight: Samples in it, in global batches.
        final: The round waits for all workers.
        changes: The change of each tensor.
    """

    number: int
    weight: float
    final: bool
    changes: tuple[Tensor, ...]


@dataclass(frozen=True)
class ListLate(Request[MissingWorkers]):
    """List the workers that the open round waits for."""


@dataclass(frozen=True)
class OuterState(Message):
    """State of the outer optimizer; empty if it keeps none."""

    memories: tuple[Tensor, ...]


@dataclass(frozen=True)
class ReadOuterState(Request[OuterState]):
    """Read the state of the outer optimizer."""
