"""What workers ask the keeper of the first server for, as messages.

deal(batches)                begin an epoch, or the next part of one              leave       take no more turns in it
take(most)                   my next samples, once there are some or none come    tick        my turn is over
go(bound)                    once I may begin the next turn                       slowest     turns that all have completed
arrive(step)                 once it is decided who makes a step                  post        a letter to the first worker
behind, missing              who is waited for
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from paceline.comm.messages import Message
from paceline.errors import UsageError
from paceline.sync.keeper import Decision, Keeper

LONGEST = 1 << 22  # batches in a part of an epoch, and bytes of a letter
Answer = Callable[[Message, Mapping[str, Any] | None, tuple[Tensor, ...]], bool]


class Dealing:
    """Answers them; False where the answer has to wait."""

    def __init__(self, answer: Answer) -> None:
        self.keeper = Keeper()
        self._answer = answer
        self.kinds: dict[str, Callable[[Message], bool]] = {
            "deal": self._deal,
            "take": self._take,
            "leave": self._leave,
            "tick": self._tick,
            "go": self._go,
            "slowest": self._slowest,
            "arrive": self._arrive,
            "behind": self._behind,
            "missing": self._missing,
            "post": self._post,
        }

    def _deal(self, message: Message) -> bool:
        body, sizes = message.body, message.tensors[0]
        if sizes.dim() != 1 or sizes.is_floating_point() or not 0 < sizes.numel() <= LONGEST:
            raise UsageError(f"a part of an epoch has 1 to {LONGEST} batches, each of a whole number of samples")
        self.keeper.begin(int(body["epoch"]), int(body["first"]), sizes.tolist(), map(int, body["workers"]))
        return self._answer(message, {"clock": self.keeper.clocks[message.sender]}, ())

    def _take(self, message: Message) -> bool:
        found = self.keeper.take(message.sender, int(message.body["most"]))
        return found is not None and self._answer(message, {"piece": list(found) if isinstance(found, tuple) else None}, ())

    def _leave(self, message: Message) -> bool:
        self.keeper.leave(message.sender)
        return self._answer(message, None, ())

    def _tick(self, message: Message) -> bool:
        self.keeper.tick(message.sender, int(message.body["clock"]), str(message.body["dropped"]))
        return self._answer(message, None, ())

    def _go(self, message: Message) -> bool:
        bound = float(message.body["bound"])
        if not self.keeper.may(message.sender, math.inf if bound < 0 else bound):
            return False
        self.keeper.went(message.sender)
        return self._answer(message, None, ())

    def _slowest(self, message: Message) -> bool:
        return self._answer(message, {"clock": self.keeper.slowest}, ())

    def _behind(self, message: Message) -> bool:
        return self._answer(message, {"missing": self.keeper.behind(message.sender)}, ())

    def _arrive(self, message: Message) -> bool:
        body, optimizer = message.body, int(message.body["optimizer"])
        found = self.keeper.arrive(message.sender, optimizer, message.body["step"], body["said"], int(body["backups"]))
        if isinstance(found, Decision):
            told = [found.came[worker] for worker in found.workers]
            parts = math.fsum(float(said["part"]) for said in told)
            return self._answer(message, {"workers": found.workers, "said": told[0], "parts": parts}, ())
        return found is not None and self._answer(message, {"late": self.keeper.decided(optimizer)}, ())

    def _missing(self, message: Message) -> bool:
        return self._answer(message, {"missing": self.keeper.absent(int(message.body["optimizer"]), int(message.body["step"]))}, ())

    def _post(self, message: Message) -> bool:
        body = message.tensors[0].numpy().tobytes()
        if len(body) > LONGEST:
            raise UsageError(f"a letter may have {LONGEST} bytes, and this one has {len(body)}")
        if body:
            self.keeper.post(message.sender, message.tensors[0])
        if message.body["stop"]:
            self.keeper.stop()
        found = self.keeper.collect() if message.body["collect"] else []
        return self._answer(message, {"workers": [worker for worker, _ in found]}, tuple(letter for _, letter in found))
