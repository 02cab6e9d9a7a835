"""Messages after workers or servers were lost: what servers discard, and how a copy begins.

RollBackSteps                  in lockstep: discards this worker's pushes, and undoes steps of this
                               turn
ReadShard, LoadShard           in lockstep: copies the whole state to a server that has just begun
SkipStep                       out of lockstep: leaves out a step that only lost workers were to
                               make
DiscardPushes                  discards pushes that are in no step
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.servers.protocol.message import Acknowledged, Index, Message, Request


@dataclass(frozen=True)
class RollBackSteps(Request[Acknowledged]):
    """Begin a turn again: discard this worker's pushes for it, and undo steps of it.

    `steps` are pairs of optimizer and step. A step that was undone before is left out.
    """

    steps: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class SkipStep(Request[Acknowledged]):
    """Count a step as made, without changing anything, unless it was made.

    The reply waits until the step is the next one.
    """

    optimizer: Index
    step: int


@dataclass(frozen=True)
class DiscardPushes(Request[Acknowledged]):
    """Discard all pushes that are in no step."""


@dataclass(frozen=True)
class ShardState(Message):
    """The whole state of a server's shard: a packed snapshot, as uint8, in chunks."""

    chunks: tuple[Tensor, ...]


@dataclass(frozen=True)
class ReadShard(Request[ShardState]):
    """Read the whole state of the shard, for a copy that has just begun."""


@dataclass(frozen=True)
class LoadShard(Request[Acknowledged]):
    """Take over the state that `ReadShard` gave."""

    chunks: tuple[Tensor, ...]
