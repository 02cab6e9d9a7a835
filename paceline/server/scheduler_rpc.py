"""The scheduler's messages: what workers ask the sample scheduler on the first server.

deal(batches)     begin an epoch, or the next part of one       leave              take no more turns in it
take(most)        the worker's next samples, when there are     slowest            turns that all have completed
pause             let all stop taking, and come together
tick(bound)       a turn is over: once the next may begin       behind, missing    the workers waited for
arrive(step)      once it is decided which make the step        post               a note to the first worker
gather(number)    once it is decided in which step it is        resume(standing)   after a loss: go on from there
                  (or that the worker goes on)
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from paceline.comm.rpc import RpcMessage
from paceline.errors import UsageError
from paceline.server.reconcile import RecoveryState
from paceline.server.scheduler import SampleScheduler
from paceline.server.stragglers import OpenStep, StepDecision

LONGEST = 1 << 22  # batches in a part of an epoch, and bytes of a note
Answer = Callable[[RpcMessage, Mapping[str, Any] | None, tuple[Tensor, ...]], bool]


class SchedulerRpc:
    """Answers the scheduler's messages; False where the answer has to wait."""

    def __init__(self, answer: Answer) -> None:
        self.scheduler = SampleScheduler()
        self._answer = answer
        self.kinds: dict[str, Callable[[RpcMessage], bool]] = {
            "deal": self._deal,
            "take": self._take,
            "leave": self._leave,
            "pause": self._pause,
            "tick": self._tick,
            "slowest": self._slowest,
            "arrive": self._arrive,
            "gather": self._gather,
            "behind": self._behind,
            "missing": self._missing,
            "post": self._post,
            "resume": self._resume,
        }

    def _deal(self, message: RpcMessage) -> bool:
        body, sizes = message.body, message.tensors[0]
        if sizes.dim() != 1 or sizes.is_floating_point() or not 0 < sizes.numel() <= LONGEST:
            raise UsageError(f"a part of an epoch has 1 to {LONGEST} batches, each of a whole number of samples")
        times = int(body.get("times", 0))
        self.scheduler.begin(int(body["epoch"]), int(body["first"]), sizes.tolist(), map(int, body["workers"]), times)
        self.scheduler.starts(message.sender, time.monotonic(), first=True)
        return self._answer(message, {"clock": self.scheduler.clocks[message.sender]}, ())

    def _take(self, message: RpcMessage) -> bool:
        found = self.scheduler.take(message.sender, int(message.body["most"]))
        if found is None:
            return False
        over, piece = not self.scheduler.takes(message.sender), list(found) if isinstance(found, tuple) else None
        paused = piece is None and self.scheduler.paused and not self.scheduler.busy(message.sender)
        return self._answer(message, {"piece": piece, "over": over, "paused": paused}, ())

    def _pause(self, message: RpcMessage) -> bool:
        self.scheduler.pause()
        return self._answer(message, None, ())

    def _leave(self, message: RpcMessage) -> bool:
        self.scheduler.leave(message.sender)
        return self._answer(message, None, ())

    def _tick(self, message: RpcMessage) -> bool:
        body, clock, bound = message.body, int(message.body["clock"]), float(message.body["bound"])
        if clock > self.scheduler.clocks.get(message.sender, -1):  # else it has come before, and had to wait
            self.scheduler.tick(message.sender, clock, str(body["dropped"]))
        if not self.scheduler.may(message.sender, math.inf if bound < 0 else bound):
            return False
        self.scheduler.went(message.sender, time.monotonic())
        return self._answer(message, {"made": self.scheduler.made()}, ())

    def _slowest(self, message: RpcMessage) -> bool:
        return self._answer(message, {"clock": self.scheduler.slowest}, ())

    def _behind(self, message: RpcMessage) -> bool:
        return self._answer(message, {"missing": self.scheduler.behind(message.sender)}, ())

    def _arrive(self, message: RpcMessage) -> bool:
        body, optimizer = message.body, int(message.body["optimizer"])
        found = self.scheduler.arrive(message.sender, optimizer, int(body["step"]), _said(body["said"]), int(body["backups"]))
        if isinstance(found, StepDecision):
            all_said = [found.came[worker] for worker in found.workers]
            parts = math.fsum(float(said["part"]) for said in all_said)
            facts = {"workers": found.workers, "said": all_said[0], "parts": parts, **_came(found.workers, all_said)}
            return self._answer(message, facts, ())
        return found is not None and self._answer(message, {"late": self.scheduler.decided(optimizer)}, ())

    def _gather(self, message: RpcMessage) -> bool:
        body, bound, now = message.body, float(message.body["bound"]), time.monotonic()
        optimizer, number, alone, part = int(body["optimizer"]), int(body["number"]), bool(body.get("alone")), bool(body["part"])
        made = self.scheduler.gather(message.sender, optimizer, number, _said(body["said"]), bound=bound, now=now, alone=alone, part=part)
        if made is None:
            return False
        slowest = self.scheduler.slowest
        if isinstance(made, OpenStep):
            return self._answer(message, {"open": True, "step": made.after, "slowest": slowest}, ())
        all_said, mine = list(made.came.values()), message.sender in made.takers
        parts = math.fsum(float(said["part"]) for said in all_said)
        facts = {"open": False, "step": made.number, "workers": list(made.came), "said": all_said[0], "parts": parts, "mine": mine}
        return self._answer(message, {**facts, **_came([*made.came], all_said), "slowest": slowest}, ())

    def patience(self, most: float) -> float:
        """Return how long to wait for a message, `most` seconds at most, before delayed answers are tried again."""
        return min(max(self.scheduler.due - time.monotonic(), 0.001), most)

    def _missing(self, message: RpcMessage) -> bool:
        return self._answer(message, {"missing": self.scheduler.absent(int(message.body["optimizer"]), int(message.body["step"]))}, ())

    def _post(self, message: RpcMessage) -> bool:
        body = message.tensors[0].numpy().tobytes()
        if len(body) > LONGEST:
            raise UsageError(f"a letter may have {LONGEST} bytes, and this one has {len(body)}")
        if body:
            self.scheduler.notes.post(message.sender, message.tensors[0], int(message.body.get("number", 0)))
        if message.body["stop"]:
            self.scheduler.stop()
        found = self.scheduler.notes.collect(int(message.body["had"])) if message.body["collect"] else []
        return self._answer(message, {"workers": [worker for worker, _ in found]}, tuple(letter for _, letter in found))

    def _resume(self, message: RpcMessage) -> bool:
        self.scheduler.resume(RecoveryState.load(message.tensors[0].numpy().tobytes()))
        return self._answer(message, None, ())


def _said(found: Any) -> Any:
    """Check what a worker says that comes to a step; it is kept, and answered to others. Raises what comes of something else."""
    if not math.isfinite(float(found["part"])):
        raise UsageError("a part of a batch is a number")
    if "pieces" in found and (type(found["number"]) is not int or [*map(len, found["pieces"])] != [3] * len(found["pieces"])):
        raise UsageError("pieces of a batch are three numbers each")
    return found


def _came(workers: Sequence[int], all_said: Sequence[Any]) -> dict[str, Any]:
    """Return, for each worker in a step, the number of its gradient and the samples in it; where losses are survived."""
    if any("pieces" not in said for said in all_said):
        return {}
    return {"came": [[worker, said["number"], said["pieces"]] for worker, said in zip(workers, all_said, strict=True)]}
