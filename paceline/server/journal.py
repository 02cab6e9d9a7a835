"""The journal of steps that each server keeps, where losses are survived and workers are not in lockstep.

    close 7   worker 0: its gradient 5, of batch 3, samples 0 to 4         done       3: 0-4 8-12
              worker 2: its gradient 4, of batch 3, samples 8 to 12        gradients  worker 0: 5   worker 2: 4
                                                                           closes     ... 5 6 7

A server that is behind another one makes the steps that it lacks as that one has written them down. Nothing here waits or sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgpack

from paceline.errors import StateLost
from paceline.server.protocol.parameters import CloseStep
from paceline.server.spans import SampleSpans

KEPT = 1024  # closes of each optimizer; no server is further behind than there are workers
Part = tuple[int, int]  # of an epoch: its number, and that of the first batch in the part


class StepJournal:
    """The journal of one server."""

    def __init__(self) -> None:
        self.part: Part = (-1, -1)  # that is dealt now
        self.done = SampleSpans()  # samples of it that are in a step
        self.dropped: dict[tuple[int, int, int, int], None] = {}  # for good: epoch, batch, first sample, and the one after the last
        self.gradients: dict[tuple[int, int], int] = {}  # by optimizer and worker: its last that is in a step
        self._closes: dict[int, deque[CloseStep]] = {}  # by optimizer

    def made(self, close: CloseStep) -> None:
        """Record a step that was made as this message says, which tells what is in it."""
        assert close.of is not None and close.came is not None
        if close.of > self.part:
            self.part, self.done = close.of, SampleSpans()
        for gradient in close.came:
            key = close.optimizer, gradient.worker
            self.gradients[key] = max(gradient.number, self.gradients.get(key, 0))
            self.done.add(gradient.pieces if close.of == self.part else ())
        self._closes.setdefault(close.optimizer, deque(maxlen=KEPT)).append(close)

    def drop(self, epoch: int, rows: Iterable[Sequence[int]]) -> None:
        """Record that these samples are in no step, and won't be."""
        self.dropped |= {(epoch, batch, start, stop): None for batch, start, stop in rows}

    def since(self, optimizer: int, step: int) -> list[CloseStep]:
        """List how the steps after this one were made. Raises `StateLost` where that isn't known any more."""
        closes = [close for close in self._closes.get(optimizer, ()) if close.step > step]
        if [close.step for close in closes] != list(range(step + 1, step + 1 + len(closes))):
            raise StateLost(f"a server lacks steps of optimizer {optimizer} from {step + 1} on, and nobody knows how they were made")
        return closes

    def dump(self, *, closes: bool = True) -> bytes:
        """Write as bytes that `load` reads; with `closes`, how steps were made, too."""
        gradients = [[*key, number] for key, number in self.gradients.items()]
        made = [[optimizer, dump_closes(found)] for optimizer, found in self._closes.items() if closes]
        packed: bytes = msgpack.packb([self.part, self.done.rows(), [*self.dropped], gradients, made])
        return packed

    def load(self, packed: bytes) -> None:
        """Become what `dump` gave."""
        part, done, dropped, gradients, closes = msgpack.unpackb(packed, strict_map_key=False)
        self.part, self.done = (part[0], part[1]), SampleSpans(done)
        self.dropped = {(epoch, batch, start, stop): None for epoch, batch, start, stop in dropped}
        self.gradients = {(optimizer, worker): number for optimizer, worker, number in gradients}
        self._closes = {optimizer: deque(load_closes(found), maxlen=KEPT) for optimizer, found in closes}


def dump_closes(closes: Iterable[CloseStep]) -> bytes:
    """Write how steps were made as bytes that `load_closes` reads."""
    packed: bytes = msgpack.packb([close.pack().body for close in closes])
    return packed


def load_closes(packed: bytes) -> list[CloseStep]:
    """Read what `dump_closes` has written."""
    return [CloseStep.unpack(body, ()) for body in msgpack.unpackb(packed, strict_map_key=False)]


def merged(packed: Iterable[bytes]) -> StepJournal:
    """Merge the journals of several servers, of steps that all servers with a part of the optimizer's parameters have made."""
    whole = StepJournal()
    for each in packed:
        other = StepJournal()
        other.load(each)
        if other.part > whole.part:
            whole.part, whole.done = other.part, SampleSpans()
        whole.done.add(other.done.rows() if other.part == whole.part else ())
        whole.dropped |= other.dropped
        whole.gradients |= {key: max(number, whole.gradients.get(key, 0)) for key, number in other.gradients.items()}
    return whole
