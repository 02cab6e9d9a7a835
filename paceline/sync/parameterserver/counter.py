"""The sample queue of workers out of lockstep, where no loss is survived (`sample_queue` where it is)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from paceline.errors import PacelineError
from paceline.sync.parameterserver.link import ServerLink
from paceline.sync.parameterserver.units import letters, packed


class LockstepSampleQueue:
    """Asks the scheduler for samples, and whether to go on (a `SampleQueue`).

    `leaving` is called before this worker takes no more turns.
    """

    def __init__(self, link: ServerLink, leaving: Callable[[], None]) -> None:
        self._link, self._leaving = link, leaving
        self.clock = 0
        self.open = False  # an epoch is under way
        self.paused = False
        self._had = 0  # how many letters came last

    def begin(self, epoch: int, first: int, sizes: Sequence[int]) -> None:
        """Deal these global batches, from number `first` of the epoch on. All workers call it."""
        link = self._link
        body = {"epoch": epoch, "first": first, "workers": link.workers}
        found = link.callers[0].call("deal", body=body, tensors=[torch.tensor(sizes, dtype=torch.int64)], seconds=link.seconds)
        self.clock, self.open = found.body["clock"], True

    def take(self, most: int) -> tuple[int, int, int] | None:
        """Return my next samples, at most so many: the number of their global batch, first, and last + 1; None if there are no more."""
        link = self._link
        began = time.perf_counter()
        sent = link.callers[0].send("take", body={"most": most}, seconds=link.seconds)
        found = link.wait(link.callers[0], sent, "the next batch", ("behind", {})).body["piece"]
        link.connections.waited += time.perf_counter() - began
        return None if found is None else (found[0], found[1], found[2])

    def pause(self) -> None:
        """Do nothing: no worker can be let in, as no loss is survived here."""

    def leave(self) -> None:
        """Take no more turns in this epoch, so that no worker waits for this one."""
        link = self._link
        if self.open and link.callers:
            with contextlib.suppress(PacelineError):  # a run that fails, too, comes here
                self._leaving()  # else the last push might be in no step
                link.callers[0].call("leave", seconds=link.seconds)

    def together(self) -> AbstractContextManager[None]:
        return self._link.context.agreement.entered()

    def post(self, body: bytes, *, stop: bool = False) -> list[tuple[int, bytes]]:
        link = self._link
        asked = {"stop": stop, "collect": link.context.group.rank == 0, "had": self._had}
        found = link.callers[0].call("post", body=asked, tensors=[packed(body)], seconds=link.seconds)
        self._had = len(found.tensors)
        return letters(found)
