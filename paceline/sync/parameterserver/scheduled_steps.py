"""Steps of workers that are not in lockstep: the scheduler decides by which workers a step is made, and each of those has servers make it.

    worker            push ....... decide             close | read                        tick
    all servers       | kept                          | the step, once, whoever closes it
    scheduler                      | this step, by these workers; or too late             | the next turn may begin

Models differ in what they ask the scheduler, and in what a late worker does (`consistency`). Where losses are survived, each call is begun
anew after one: a step that is decided stays so, and a server that has made it doesn't make it twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from paceline.errors import ServerLost, UsageError
from paceline.server import optimizers
from paceline.sync.parameterserver.link import ServerLink
from paceline.sync.parameterserver.recovery import QueueRecovery
from paceline.sync.parameterserver.replication import ServerReplication
from paceline.sync.parameterserver.sample_queue import SampleQueueClient

if TYPE_CHECKING:
    from paceline.sync.tables.steps import PerWorkerRowSteps


class ScheduledSteps:
    """The base of consistency models in which workers are not in lockstep."""

    def __init__(self, link: ServerLink, rows: PerWorkerRowSteps, bound: float = math.inf) -> None:
        self._link, self._rows, self._bound = link, rows, bound
        self.sample_queue = SampleQueueClient(link, self._leave)
        self.recovery: QueueRecovery | None = None
        self._count: dict[int, int] = {}  # by optimizer: how many gradients of this worker are in steps, or were left out
        self._decided: dict[int, Any] = {}  # by optimizer: the decision on its next step, where that has been asked for
        self._norms: dict[int, float] = {}  # by optimizer: of its step in this turn, where it is clipped
        self._late = self._made = False  # in this turn: late for any optimizer, and in a step of any

    def survive(self, copies: ServerReplication) -> None:
        self.recovery = QueueRecovery(self._link, copies, self.sample_queue)

    def begin(self) -> None: ...

    def pushing(self, number: int) -> None: ...

    def _leave(self) -> None:
        """Wait until all that I have pushed is in a step, as I take no more turns."""
        for number in range(len(self._link.optimizers)):
            self.pushing(number)

    # ---- a step

    def step(self, number: int) -> None:
        link = self._link
        if not self.sample_queue.open and link.free:
            raise UsageError(
                "with staleness or backup_workers optimizers step inside the loop over a prepared DataLoader, whose samples are dealt to "
                "whoever is ready for them: prepare the loader too, or leave both out"
            )
        gradient = self._gradient(number)
        link.context.agreement.lasting(lambda: self._step(number))
        self._count[number] = gradient
        self._decided.pop(number, None)
        for known in (link.factors, link.clips):
            known.pop(number, None)
        self.sample_queue.stepped()

    def _gradient(self, number: int) -> int:
        """Return the number of my next gradient."""
        return self._count.get(number, 0) + 1

    def _step(self, number: int) -> None:
        link, made = self._link, self._made_by_others(number)
        if made is not None:
            units = link.units(number)
            link.take_in(units, link.ask_for(units, made))
            link.steps_taken[number], self._made = made, True
            return
        if number in link.clips and number not in link.factors:
            self._clip_again(number)
        found = self._decide(number)
        link.settle(number)  # raises if p.grad has been changed since run.clip
        if "late" in found:
            self._skip(number, int(found["late"]))
        else:
            self._close(number, found)
            self._made = True

    def _made_by_others(self, number: int) -> int | None:
        """Return the last step, where my gradient is in one that others have made, as was found at the last loss."""
        return None if self.recovery is None else self.recovery.made(number, self._gradient(number))

    def _decide(self, number: int, *, part: bool = True) -> Mapping[str, Any]:
        """Ask which "step" I am in, and who makes it: "workers", what the first of them "said", and the sum of "parts".

        Where I am too late for it there is "late", the last step.
        `part`: a late worker may go on before it is made, if the model allows that.
        """
        if number not in self._decided:
            self.pushing(number)
            self._link.settle(number)
            self._rows.hold(number)
            self._decided[number] = self._ask(number, part=part)
        found: Mapping[str, Any] = self._decided[number]
        return found

    def _ask(self, number: int, *, part: bool) -> Mapping[str, Any]:
        """Ask the scheduler in which step my next gradient is, which has been pushed."""
        raise NotImplementedError

    def _call(self, number: int, kind: str, gradient: int, step: int, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Ask the scheduler, and wait until it is decided in which step of an optimizer this gradient is."""
        link = self._link
        said = {
            "part": link.context.step_state.share_of_step,
            "settings": list(enumerate(optimizers.settings(link.optimizers[number]))),
            **({} if self.recovery is None else {"number": gradient, "pieces": self.sample_queue.pieces()}),
        }
        scheduler = link.callers[0]
        with link.connections.waiting():
            sent = scheduler.send(kind, step=step, body={"optimizer": number, "said": said, **body}, seconds=link.seconds)
            return link.wait(scheduler, sent, f"optimizer.step {gradient}", ("missing", {"optimizer": number, "step": step})).body

    def _weigh(self, found: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
        """Return the number by which a step's sum is divided, and what else servers are told of the sum."""
        return found["parts"], {"part": found["parts"], "keep": True}

    def _close(self, number: int, found: Mapping[str, Any], *, read: bool = True) -> None:
        """Let the found workers make this step, on all copies. `read`: take in the result."""
        link, step, units = self._link, int(found["step"]), self._link.units(number) if read else []
        divisor, more = self._weigh(found)
        body = {"workers": found["workers"], "settings": found["said"]["settings"], "decided": True, **more}
        body["factor"] = link.factors.get(number, 1.0) / divisor
        body |= {} if self.recovery is None else {"came": found["came"], "of": self.sample_queue.part}
        closes, reads = link.everywhere("close", number, step, body), link.ask_for(units, step)
        closes += self._rows.close(number, step, found, float(more.get("part", 1.0)))
        for caller, message in closes:
            caller.wait(message, link.seconds)
        if read:
            link.take_in(units, reads)
        link.steps_taken[number] = step

    def _skip(self, number: int, step: int) -> None:
        """Go on from this step, which I am too late for."""
        raise NotImplementedError

    # ---- clipping

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        return self._link.context.agreement.lasting(lambda: self._ask_norms(numbers, kind, limit))

    def _ask_norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        for number in numbers:
            if self._made_by_others(number) is not None:
                self._norms[number] = self._link.norm([number], kind)
            else:  # several are waited for: none goes on before its step is made
                self._norms[number] = self._norm_of_step(number, kind, limit, part=len(numbers) == 1)
        return [self._norms[number] for number in numbers]

    def _norm_of_step(self, number: int, kind: float, limit: float, *, part: bool) -> float:
        """Return the norm of the gradients that make the step; of mine, where I am too late."""
        found = self._decide(number)
        return self._link.norm([number], kind) if "late" in found else self._norm(number, found, kind)

    def _norm(self, number: int, found: Mapping[str, Any], kind: float) -> float:
        """Return the norm of the mean of the gradients of a step that is decided."""
        link = self._link
        body = {"workers": found["workers"], "kind": None if kind == math.inf else kind, "decided": True}
        sent = link.everywhere("norm", number, int(found["step"]), body, ask=True)
        norms = [float(caller.wait(message, link.seconds).body["norm"]) for caller, message in sent]
        return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), kind)) / float(found["parts"])

    def _clip_again(self, number: int) -> None:
        """Clip by the norm of the workers that make the step now, after a loss. A step already made with this clip keeps its norm."""
        clips = self._link.clips
        asked = clips[number]
        self._ask_norms([other for other in asked.numbers if clips.get(other) is asked], asked.kind, asked.most)
        self._link.clip_by(asked, [self._norms[other] for other in asked.numbers])

    # ---- the end of a turn, and losses

    def commit(self) -> None:
        if not self.sample_queue.open:
            return
        self.sample_queue.tick(self._dropped(), self._bound)
        self._late = self._made = False
        self._follow()
        if self.recovery is not None and self.recovery.has_begun():
            self._link.context.agreement.call_all(ServerLost("a copy of a server has begun"))

    def _dropped(self) -> str:
        """Return what becomes of this turn's samples: "" where they are in a step, "dropped", or "again" to be dealt again."""
        return ""

    def _follow(self) -> None:
        """Wait if I am too far ahead of the slowest."""

    def abort(self) -> None: ...

    def regroup(self) -> None:
        assert self.recovery is not None
        self._decided.clear()
        self.recovery.regroup()
