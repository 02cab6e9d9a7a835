"""What a worker that is not in lockstep asks the scheduler for, where no loss is survived (`sample_queue` where it is)."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch

from paceline.errors import PacelineError
from paceline.sync.parameterserver.units import letters, packed

if TYPE_CHECKING:
    from paceline.sync.parameterserver.client import ParameterServerSync


class LockstepSampleQueue:
    """What the scheduler is asked for: samples, and whether to go on (a `SampleQueue`)."""

    def __init__(self, client: ParameterServerSync) -> None:
        self._client = client
        self.clock = 0
        self.open = False  # an epoch is under way
        self.paused = False
        self._had = 0  # letters that came last

    def begin(self, epoch: int, first: int, sizes: Sequence[int]) -> None:
        """Deal these global batches, from number `first` of the epoch on. All workers call it."""
        client = self._client
        body = {"epoch": epoch, "first": first, "workers": client.workers}
        found = client.callers[0].call("deal", body=body, tensors=[torch.tensor(sizes, dtype=torch.int64)], seconds=client.seconds)
        self.clock, self.open = found.body["clock"], True

    def take(self, most: int) -> tuple[int, int, int] | None:
        """My next samples, at most so many: the number of their global batch, the first, and the one after the last; None: no more."""
        client = self._client
        began = time.perf_counter()
        sent = client.callers[0].send("take", body={"most": most}, seconds=client.seconds)
        found = client.wait(client.callers[0], sent, "the next batch", ("behind", {})).body["piece"]
        client.wires.waited += time.perf_counter() - began
        return None if found is None else (found[0], found[1], found[2])

    def pause(self) -> None:
        """Let nobody in, as no loss is survived here."""

    def leave(self) -> None:
        """I take no more turns in this epoch: nobody waits for me."""
        client = self._client
        if self.open and client.callers:
            with contextlib.suppress(PacelineError):  # a run that fails, too, comes here
                for number in range(len(client.optimizers)):
                    client.pace.pushing(number)  # or what I had pushed last might be in no step
                client.callers[0].call("leave", seconds=client.seconds)

    def together(self) -> AbstractContextManager[None]:
        return self._client.context.agreement.entered()

    def post(self, body: bytes, *, stop: bool = False) -> list[tuple[int, bytes]]:
        client = self._client
        asked = {"stop": stop, "collect": client.context.group.rank == 0, "had": self._had}
        found = client.callers[0].call("post", body=asked, tensors=[packed(body)], seconds=client.seconds)
        self._had = len(found.tensors)
        return letters(found)
