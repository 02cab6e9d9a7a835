"""Messages after a loss: what servers have made, what they discard, and what a copy of a server becomes.

RollBackSteps                  in lockstep: discard this worker's pushes, and undo steps of this turn
FenceWorkers                   only these are heard from now on, delayed messages are discarded; which steps have been made here
ReadClosedSteps(step)          how the later ones were made, for a server that lacks them
DiscardPushes                  discard pushes that are in no step; gives the journal
DropSamples                    samples that no step will have
ReadShard, LoadShard           all that is kept, for a copy that has begun
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from paceline.server.protocol.message import Acknowledged, Index, Message, Request
from paceline.server.protocol.samples import Piece


@dataclass(frozen=True)
class RollBackSteps(Request[Acknowledged], kind="back"):
    """Begin a turn again: discard this worker's pushes for it, and undo these steps (optimizer, step), if that has not been done."""

    steps: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class StepsMade(Message):
    """How many steps of each optimizer have been made."""

    steps: tuple[int, ...]


@dataclass(frozen=True)
class FenceWorkers(Request[StepsMade], kind="reckon"):
    """Hear these workers alone from now on, which are the living, and discard what waits here."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class ClosedSteps(Message):
    """How steps were made: `CloseStep` messages (`journal.dump_closes`, as uint8)."""

    packed: Tensor


@dataclass(frozen=True)
class ReadClosedSteps(Request[ClosedSteps], kind="since"):
    """Ask how the steps of an optimizer after `step` were made."""

    optimizer: Index
    step: int


@dataclass(frozen=True)
class Journal(Message):
    """A server's journal (`StepJournal.dump`, as uint8), without how steps were made."""

    packed: Tensor


@dataclass(frozen=True)
class DiscardPushes(Request[Journal], kind="void"):
    """Discard all pushes that are in no step."""


@dataclass(frozen=True)
class DropSamples(Request[Acknowledged], kind="drop"):
    """Write down that these samples of an epoch are in no step, and won't be."""

    epoch: int
    pieces: tuple[Piece, ...]


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
