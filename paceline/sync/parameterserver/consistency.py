"""Consistency models of the parameter server: when workers wait for each other, and which gradients make a step.

    BulkSynchronous    all push, all close: one step with the sum of all       all workers in the same step
    BackupWorkers      all push; the first to arrive make the step             a late worker takes the result, and goes on with the next
    StaleSynchronous   all push; those on time make the step                   at most `staleness` turns ahead of the slowest;
                                                                               a late worker is in the next step, and goes on before it
    Asynchronous       each applies what it has pushed as a step of its own    no worker waits

In all but the first each worker takes its samples when it is ready for them (`counter`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch

from paceline.errors import UsageError
from paceline.server import optimizers
from paceline.sync.parameterserver.clipping import shrink
from paceline.sync.parameterserver.counter import LockstepSampleQueue
from paceline.sync.parameterserver.link import ServerLink

if TYPE_CHECKING:
    from paceline.sync.tables.freerows import UnlockedRows


def again(decided: Mapping[int, Any], *, late: bool, made: bool) -> bool:
    """Whether a turn is to be dealt again: it is late for the first of its optimizers, and so must be in no step of the others.

    `decided`: which workers make the steps that are still to come; `late`, `made`: what became of those before.
    """
    if late or made:
        return late and not made
    return bool(decided) and all("late" in found for found in decided.values())


class Consistency(Protocol):
    """A consistency model. Optimizers are known by their numbers."""

    def begin(self) -> None:
        """Begin, as servers have been started."""
        ...

    def pushing(self, number: int) -> None:
        """Prepare for a gradient of an optimizer to be pushed."""
        ...

    def step(self, number: int) -> None:
        """Make a step of an optimizer."""
        ...

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        """Return norms of parts of the gradients that will make the next steps of these optimizers, clipped to `limit` together."""
        ...

    def commit(self) -> None:
        """End a turn."""
        ...


class BulkSynchronous:
    """Bulk-synchronous: all workers make every step together."""

    def __init__(self, link: ServerLink, rows: UnlockedRows) -> None:
        self._link = link
        self._told: list[optimizers.Settings] = []

    def begin(self) -> None:
        self._told = [optimizers.settings(optimizer) for optimizer in self._link.optimizers]

    def pushing(self, number: int) -> None: ...

    def step(self, number: int) -> None:
        link = self._link
        units = link.settle(number, wait=False)
        now, step = optimizers.settings(link.optimizers[number]), link.steps_taken[number] + 1
        changes = [[group, values] for group, values in optimizers.changed(self._told[number], now).items()]
        factor = link.factors.pop(number, 1.0)
        body = {"workers": link.workers, "factor": factor, "settings": changes}
        closes = link.everywhere("close", number, step, body)
        reads = link.ask_for(units, step)
        began = time.perf_counter()
        who = ("absent", {"optimizer": number, "step": step, "workers": link.workers})
        for caller, message in closes:
            link.wait(caller, message, f"optimizer.step {step}", who)
        link.connections.waited += time.perf_counter() - began
        link.take_in(units, reads)
        self._told[number], link.steps_taken[number] = now, step

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        link, found = self._link, []
        for number in numbers:
            link.settle(number)
        for number in numbers:
            step = link.steps_taken[number] + 1
            body = {"workers": link.workers, "kind": None if kind == math.inf else kind}
            who = ("absent", {"optimizer": number, "step": -step, "workers": link.workers})
            sent = link.everywhere("norm", number, step, body)
            found += [float(link.wait(caller, message, "run.clip", who).body["norm"]) for caller, message in sent]
        return found

    def commit(self) -> None: ...


class OutOfLockstep:
    """Common base of the models in which workers are not in lockstep."""

    def __init__(self, link: ServerLink, rows: UnlockedRows) -> None:
        self._link, self._rows = link, rows
        self.sample_queue = LockstepSampleQueue(link, self._leave)
        self.going: int | None = None  # the message that is answered when this worker may go on

    def begin(self) -> None: ...

    def pushing(self, number: int) -> None: ...

    def _leave(self) -> None:
        """Wait until all that I have pushed is in a step, as I take no more turns."""
        for number in range(len(self._link.optimizers)):
            self.pushing(number)

    def _check(self) -> None:
        if not self.sample_queue.open and len(self._link.workers) > 1:
            raise UsageError(
                "with staleness or backup_workers optimizers step inside the loop over a prepared DataLoader, whose samples are dealt to "
                "whoever is ready for them: prepare the loader too, or leave both out"
            )

    def _ask(self, number: int, kind: str, count: int, step: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask which workers make a step of an optimizer that I have pushed for the `count`-th time, and wait until it is decided."""
        link = self._link
        said = {
            "part": link.context.step_state.share_of_step,
            "settings": list(enumerate(optimizers.settings(link.optimizers[number]))),
        }
        began = time.perf_counter()
        asked = {"optimizer": number, "said": said, **body}
        sent = link.callers[0].send(kind, step=step, body=asked, seconds=link.seconds)
        who = ("missing", {"optimizer": number, "step": step})
        found = link.wait(link.callers[0], sent, f"optimizer.step {count}", who).body
        link.connections.waited += time.perf_counter() - began
        return found

    def _close(self, number: int, step: int, found: Mapping[str, Any], *, read: bool = True, **more: Any) -> None:
        """Let the found workers make this step of an optimizer, by the mean of their gradients. `read`: take in the result."""
        link, units = self._link, self._link.units(number) if read else []
        body = {
            "workers": found["workers"],
            "factor": link.factors.pop(number, 1.0) / found["parts"],
            "settings": found["said"]["settings"],
            "decided": True,
            **more,
        }
        closes, reads = link.everywhere("close", number, step, body), link.ask_for(units, step)
        closes += self._rows.close(number, step, found, float(more.get("part", 1.0)))
        for caller, message in closes:
            caller.wait(message, link.seconds)
        if read:
            link.take_in(units, reads)
        link.steps_taken[number] = step

    def _norm(self, number: int, step: int, found: Mapping[str, Any], kind: float) -> float:
        """Return the norm of the mean of these workers' gradients."""
        link = self._link
        body = {"workers": found["workers"], "kind": None if kind == math.inf else kind, "decided": True}
        sent = link.everywhere("norm", number, step, body)
        norms = [float(caller.wait(message, link.seconds).body["norm"]) for caller, message in sent]
        return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), kind)) / float(found["parts"])

    def _tick(self, dropped: str = "", bound: float = math.inf) -> None:
        """End my turn. `going` becomes the message that is answered when I may go on."""
        link, sample_queue = self._link, self.sample_queue
        if self.going is not None:
            link.callers[0].wait(self.going, link.seconds)
        sample_queue.clock += 1
        body = {"clock": sample_queue.clock, "dropped": dropped, "bound": -1 if bound == math.inf else int(bound)}
        self.going = link.callers[0].send("tick", body=body, seconds=link.seconds)


class Asynchronous(OutOfLockstep):
    """Asynchronous: each gradient is a step of its own."""

    def step(self, number: int) -> None:
        self._check()
        link = self._link
        units = link.settle(number, wait=False)
        step = link.steps_taken[number] + 1
        body = {
            "factor": link.factors.pop(number, 1.0),
            "part": link.context.step_state.share_of_step,
            "settings": list(enumerate(optimizers.settings(link.optimizers[number]))),
        }
        sent, reads = link.everywhere("apply", number, step, body), link.ask_for(units, 0)
        sent += self._rows.apply(number)
        for caller, message in sent:
            caller.wait(message, link.seconds)
        link.take_in(units, reads)
        link.steps_taken[number] = step

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        """Return the norm of my own gradients."""
        link = self._link
        return [link.norm(numbers, kind)]

    def commit(self) -> None:
        if self.sample_queue.open:
            self._tick()


class StaleSynchronous(OutOfLockstep):
    """Stale-synchronous: a step is made by all workers on time, and by those that were late for the one before.

    A late worker doesn't wait for the open step, but goes on with the parameters there are; before it pushes more, that step has been made.
    """

    def __init__(self, link: ServerLink, rows: UnlockedRows) -> None:
        super().__init__(link, rows)
        self._bound = int(link.options.staleness)
        self._asked: dict[int, int] = {}  # by optimizer: how many gradients this worker has pushed
        self._decided: dict[int, Any] = {}  # by optimizer: who makes its next step, where that has been asked for
        self._known: dict[int, int] = {}  # by optimizer: turns that all had completed when its parameters were last read
        self._open: set[int] = set()  # optimizers whose step with this worker's last gradient had not been made when it went on
        self._clips: dict[int, tuple[float, float]] = {}  # of the open ones: the kind of norm, and its limit

    def _gather(self, number: int, *, part: bool) -> Mapping[str, Any]:
        count = self._asked[number]
        return self._ask(number, "gather", count, 0, {"number": count, "bound": self._bound, "part": part})

    def _decide(self, number: int, *, part: bool = True) -> Mapping[str, Any]:
        """Ask in which "step" I am, with which "workers", what the first of them "said", the sum of "parts", and what all have completed.

        With `part`, perhaps that it is "open" still, and the last "step" before it, where I go on.
        """
        if number not in self._decided:
            self.pushing(number)
            self._link.settle(number)
            self._rows.hold(number)
            self._asked[number] = self._asked.get(number, 0) + 1
            self._decided[number] = self._gather(number, part=part)
        found: Mapping[str, Any] = self._decided[number]
        return found

    def step(self, number: int) -> None:
        self._check()
        link, found = self._link, self._decide(number)
        link.settle(number)  # or p.grad was changed since
        del self._decided[number]
        if found["open"]:
            self._open.add(number)
            link.factors.pop(number, None)
            units = link.units(number)
            link.take_in(units, link.ask_for(units, found["step"]))
            link.steps_taken[number] = found["step"]
            self._rows.go(number, found["step"])
        else:
            self._close(number, found["step"], found, part=found["parts"], keep=True)
        self._known[number] = found["slowest"]

    def pushing(self, number: int) -> None:
        """Wait until what I pushed before is in a step that servers have made."""
        if number not in self._open:
            return
        link, found, clip = self._link, self._gather(number, part=False), self._clips.pop(number, None)
        self._open.remove(number)
        if found["mine"]:
            if clip is not None:
                link.factors[number] = shrink(self._norm(number, found["step"], found, clip[0]), clip[1])
            self._close(number, found["step"], found, read=False, part=found["parts"], keep=True)
        else:
            for caller, message in link.everywhere("taken", number, found["step"], {}):
                link.wait(caller, message, f"optimizer.step {found['step']}", ("missing", {"optimizer": number, "step": found["step"]}))
            self._rows.go(number, found["step"])

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        """Return norms of the gradients that make the step; of mine, where I go on before that. Steps of several optimizers wait."""
        norms = list[float]()
        for number in numbers:
            found = self._decide(number, part=len(numbers) == 1)
            if found["open"]:
                self._clips[number] = kind, limit
                norms.append(self._link.norm([number], kind))
            else:
                norms.append(self._norm(number, found["step"], found, kind))
        return norms

    def commit(self) -> None:
        """End a turn. If I am too far ahead, wait, and then read what I waited for."""
        if not self.sample_queue.open:
            return
        link = self._link
        self._tick("", self._bound)
        known = min(self._known.get(number, 0) for number in range(len(link.optimizers)))
        if self.sample_queue.clock - known > self._bound:
            began = time.perf_counter()
            assert self.going is not None
            told = link.wait(link.callers[0], self.going, f"turn {self.sample_queue.clock + 1}", ("behind", {})).body["made"]
            self.going = None
            link.connections.waited += time.perf_counter() - began
            link.catch_up(dict(told))
            for number, step in told:
                self._rows.go(number, step)
            self._known = dict.fromkeys(range(len(link.optimizers)), self.sample_queue.clock - self._bound)


class BackupWorkers(OutOfLockstep):
    """Backup workers: the first to arrive make a step."""

    def __init__(self, link: ServerLink, rows: UnlockedRows) -> None:
        super().__init__(link, rows)
        self._decided: dict[int, Any] = {}  # by optimizer: who makes its next step, where that has been asked for
        self._late = self._made = False  # in this turn: late for any optimizer, and in a step of any

    @property
    def _again(self) -> bool:
        """Whether my samples are dealt again."""
        return self._link.options.requeue and again(self._decided, late=self._late, made=self._made)

    def _decide(self, number: int) -> dict[str, Any]:
        """Ask who makes the next step: "workers", what the first of them "said", and the sum of "parts"; or "late", the last step."""
        if number not in self._decided:
            self._link.settle(number)
            self._rows.hold(number)
            step = 0 if self._again else self._link.steps_taken[number] + 1  # 0: late
            self._decided[number] = self._ask(number, "arrive", step, step, {"step": step, "backups": self._link.options.backup_workers})
        found: dict[str, Any] = self._decided[number]
        return found

    def step(self, number: int) -> None:
        self._check()
        link, found = self._link, self._decide(number)
        link.settle(number)  # or p.grad was changed since
        step = link.steps_taken[number] + 1
        del self._decided[number]
        if "late" in found:
            link.factors.pop(number, None)
            units, self._late, step = link.units(number), True, int(found["late"])
            link.take_in(units, link.ask_for(units, step), stepped=False)
            link.steps_taken[number] = step
            self._rows.go(number, step)
        else:
            self._close(number, step, found)
            self._made = True

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        """Return norms of the gradients that make the step; of mine, where I am too late."""
        link, norms = self._link, list[float]()
        for number in numbers:
            found, step = self._decide(number), link.steps_taken[number] + 1
            if "late" in found:
                norms.append(link.norm([number], kind))
                continue
            norms.append(self._norm(number, step, found, kind))
        return norms

    def commit(self) -> None:
        if not self.sample_queue.open:
            return
        dropped = "again" if self._again else "dropped" if self._late else ""
        self._late = self._made = False
        self._tick(dropped)
