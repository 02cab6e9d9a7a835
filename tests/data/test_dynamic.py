"""Pieces of batches that a queue deals: what is left of an epoch, after all have come together
in the middle of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch.utils.data import DataLoader

from paceline.comm.agreement import Agreement
from paceline.comm.group_protocol import Group
from paceline.data.loader import deal_loader
from tests.harness.thread_groups import spawn


class Queue:
    """Deals the last batch first, and has all come together then."""

    open, paused = True, False

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self._left: list[tuple[int, int, int]] = [(5, 0, 4)]

    def begin(self, epoch: int, first: int, sizes: Sequence[int]) -> None:
        self.begun.append([first, *sizes])
        self._left += [(batch, 0, 4) for batch in range(5)] if self.paused else []
        self.paused = False

    def take(self, most: int) -> tuple[int, int, int] | None:
        self.paused = not self._left and len(self.begun) == 1
        return self._left.pop(0) if self._left else None

    def pause(self) -> None: ...

    def leave(self) -> None: ...

    def together(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()

    def post(self, body: bytes, *, stop: bool = False) -> list[tuple[int, bytes]]:
        return []


def test_a_worker_that_is_alone_goes_on_with_the_whole_part() -> None:
    def work(group: Group) -> tuple[list[int], list[list[int]]]:
        queue = Queue()
        loader = deal_loader(DataLoader(torch.arange(24), 4), Agreement(group), sample_queue=queue)  # type: ignore[arg-type]
        return [int(x) for batch in loader for x in batch], queue.begun

    ((found, begun),) = spawn(1, work)
    assert sorted(found) == [*range(24)] and begun[1] == [0, 4, 4, 4, 4, 4, 4], (found, begun)
