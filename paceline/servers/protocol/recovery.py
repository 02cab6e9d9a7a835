"""Messages after a loss: what servers discard, and what a copy of a server becomes.

RollBackSteps                  in lockstep: discard this worker's pushes, and undo steps of this
                               turn
ReadShard, LoadShard           in lockstep: all that is kept, for a copy that has begun
SkipStep                       out of lockstep: leave out a step that lost workers alone were to
                               make
DiscardPushes                  discard pushes that are in no step
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.servers.protocol.message import Acknowledged, Index, Message, Request


@dataclass(frozen=True)
class RollBackSteps(Request[Acknowledged], kind="back"):
    """Begin a turn again: discard this worker's pushes for it, and undo these steps (optimizer,
    step), if that has not been done.
    """

    steps: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SkipStep(Request[Acknowledged], kind="skip"):
    """Count a step as made, with nothing in it, unless it has been made; as soon as it is the
    next one.
    """

    optimizer: Index
    step: int


@dataclass(frozen=True)
class DiscardPushes(Request[Acknowledged], kind="void"):
    """Discard all pushes that are in no step."""


@dataclass(frozen=True)
class ShardState(Message):
    """All that a server keeps of its shard: a packed snapshot, as uint8, in chunks."""

    chunks: tuple[Tensor, ...]


@dataclass(frozen=True)
class ReadShard(Request[ShardState], kind="state"):
    """Read all that is kept of the shard, for a copy that has begun."""


@dataclass(frozen=True)
class LoadShard(Request[Acknowledged], kind="become"):
    """Become what `ReadShard` gave."""

    chunks: tuple[Tensor, ...]
