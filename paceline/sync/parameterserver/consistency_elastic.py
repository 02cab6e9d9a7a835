"""Consistency models out of lockstep where losses are survived: after a loss all living workers meet, and everything goes on.

    push to all copies, acknowledged  |  who makes step n: the scheduler  |  close n on all copies, acknowledged  |  read
      a loss here: pushed again          a loss here: pushed again           a loss here: n was made if any living    here: n was made
                                                                             server has made it

A worker goes on from a step once all servers have made it, so no worker has built on what a lost server alone had made. In the meeting

    workers say     their clock, the pieces that they have taken      servers say     the steps that they have made
    the first       has each server make the steps that another has made; all discard what was pushed beyond; the scheduler, on the
                    server that is first now, is told where all are (`server.reconcile`), and what no step has is dealt again
    each worker     knows then whether its gradient is in a step, and pushes it again if it isn't: nothing is computed twice

A copy started in place of a lost server is given what the others have in such a meeting, too, which is called for it.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import msgpack
import torch

from paceline.comm.rpc import RpcClient
from paceline.errors import ServerLost, UsageError
from paceline.server import optimizers
from paceline.server.journal import merged
from paceline.server.reconcile import WorkerReport, latest, stand
from paceline.sync.parameterserver.consistency import Asynchronous, BackupWorkers, BulkSynchronous, Consistency, StaleSynchronous, again
from paceline.sync.parameterserver.link import ServerLink
from paceline.sync.parameterserver.replication import ServerReplication
from paceline.sync.parameterserver.sample_queue import SampleQueueClient
from paceline.sync.parameterserver.units import packed

if TYPE_CHECKING:
    from paceline.sync.tables.freerows import UnlockedRows


class ElasticConsistency:
    """Stale-synchronous, asynchronous, or with backup workers, as the options say."""

    copies: ServerReplication

    def __init__(self, link: ServerLink) -> None:
        spec = link.options
        self._link = link
        self._bound = spec.staleness if spec.staleness and not link.alone else math.inf
        self.sample_queue = SampleQueueClient(link, self._bound)
        self._begun: list[str] = []  # names of copies that have begun
        self._count: dict[int, int] = {}  # by optimizer: how many of this worker's gradients are in steps
        self._counted: dict[int, int] = {}  # by optimizer: this worker's last gradient that was in a step at the last loss
        self._made: list[int] = []  # by optimizer: the steps that had been made at the last loss
        self._decided: dict[int, Any] = {}  # by optimizer: who makes its next step, where that has been asked for
        self._norms: dict[int, float] = {}  # by optimizer: the norm of its step in this turn
        self._known: dict[int, int] = {}  # by optimizer: turns that all had completed when its parameters were last read
        self._late = self._stepped = False  # in this turn: late for any optimizer, and in a step of any

    def begin(self) -> None: ...

    def pushing(self, number: int) -> None: ...

    # ---- a step

    def step(self, number: int) -> None:
        link = self._link
        if not self.sample_queue.open:
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
        """Return the number of my next gradient; with backup workers that of the step."""
        return (self._link.steps_taken[number] if self._link.drops else self._count.get(number, 0)) + 1

    def _is_made(self, number: int) -> bool:
        """Whether my gradient is in a step that others have made, as was found at the last loss."""
        return self._counted.get(number, 0) >= self._gradient(number)

    def _step(self, number: int) -> None:
        link, units = self._link, self._link.units(number)
        if number in link.clips and number not in link.factors and not self._is_made(number):
            self._clip_again(number)
        if self._is_made(number):
            link.take_in(units, link.ask_for(units, self._made[number]))
            link.steps_taken[number], self._stepped = self._made[number], True
            return
        found = self._decide(number)
        link.settle(number)  # raises if p.grad has been changed since
        if "late" in found:
            self._skip(number, int(found["late"]))
        else:
            self._close(number, found)
            self._stepped = True

    @property
    def _again(self) -> bool:
        return self._link.options.requeue and again(self._decided, late=self._late, made=self._stepped)

    def _decide(self, number: int) -> Mapping[str, Any]:
        """Ask who makes my step: "workers", what the first of them "said", the sum of "parts"; or "late", the last step."""
        if number not in self._decided:
            self._link.settle(number)
            self._decided[number] = self._ask(number)
        found: Mapping[str, Any] = self._decided[number]
        return found

    def _ask(self, number: int) -> Mapping[str, Any]:
        link, gradient, began = self._link, self._gradient(number), time.perf_counter()
        settings = list(enumerate(optimizers.settings(link.optimizers[number])))
        said = {
            "part": link.context.step_state.share_of_step,
            "settings": settings,
            "number": gradient,
            "pieces": self.sample_queue.pieces(),
        }
        asked: dict[str, Any] = {"optimizer": number, "said": said}
        if self._link.drops:
            step = 0 if self._again else gradient  # 0: late
            kind, more = "arrive", {"step": step, "backups": self._link.options.backup_workers}
        else:
            bound = -1 if self._link.alone else int(self._bound)
            kind, step, more = "gather", 0, {"number": gradient, "bound": bound, "alone": self._link.alone, "part": False}
        scheduler = link.callers[0]
        sent = scheduler.send(kind, step=step, body=asked | more, seconds=link.seconds)
        found = link.wait(scheduler, sent, f"optimizer.step {gradient}", ("missing", {"optimizer": number, "step": step})).body
        link.connections.waited += time.perf_counter() - began
        return found

    def _number(self, number: int, found: Mapping[str, Any]) -> int:
        return int(found.get("step", self._gradient(number)))

    def _close(self, number: int, found: Mapping[str, Any]) -> None:
        """Let the found workers make this step, on all copies."""
        link, units, step = self._link, self._link.units(number), self._number(number, found)
        factor = link.factors.get(number, 1.0) / (1.0 if self._link.alone else found["parts"])
        body = {"workers": found["workers"], "factor": factor, "settings": found["said"]["settings"], "decided": True}
        body |= {"came": found["came"], "of": self.sample_queue.part}
        body |= {} if self._link.drops else {"part": found["parts"], "keep": True}
        closes, reads = link.everywhere("close", number, step, body), link.ask_for(units, step)
        for caller, message in closes:
            caller.wait(message, link.seconds)
        link.take_in(units, reads)
        link.steps_taken[number] = step
        self._known[number] = found.get("slowest", 0)

    def _skip(self, number: int, step: int) -> None:
        """Go on from this step, which I am too late for, once all copies have made it."""
        link, units, pieces = self._link, self._link.units(number), self.sample_queue.pieces()
        made, reads = link.everywhere("taken", number, step, {}), link.ask_for(units, step)
        for caller, message in made:
            caller.wait(message, link.seconds)
        if pieces and not self._again:
            body = {"epoch": self.sample_queue.part[0], "pieces": pieces}
            told = [(caller, caller.send("drop", body=body, seconds=link.seconds)) for caller in link.connections.callers]
            for caller, message in told:
                caller.wait(message, link.seconds)
        link.take_in(units, reads, stepped=False)
        link.steps_taken[number] = step
        self._late = self._late or bool(pieces)

    # ---- clipping

    def norms(self, numbers: Sequence[int], kind: float, limit: float) -> list[float]:
        """Return norms of the gradients that make the steps; of mine, where it is a step of its own, or too late."""
        return self._link.context.agreement.lasting(lambda: self._ask_norms(numbers, kind))

    def _clip_again(self, number: int) -> None:
        """Clip by the norm of the workers that make the step now, after a loss. A step already made with this clip keeps its norm."""
        clips = self._link.clips
        asked = clips[number]
        due = [other for other in asked.numbers if clips.get(other) is asked]
        self._ask_norms(due, asked.kind)
        self._link.clip_by(asked, [self._norms[other] for other in asked.numbers])

    def _ask_norms(self, numbers: Sequence[int], kind: float) -> list[float]:
        for number in numbers:
            mine = self._link.alone or self._is_made(number)
            self._norms[number] = self._link.norm([number], kind) if mine else self._norm(number, self._decide(number), kind)
        return [self._norms[number] for number in numbers]

    def _norm(self, number: int, found: Mapping[str, Any], kind: float) -> float:
        link = self._link
        if "late" in found:
            return link.norm([number], kind)
        body = {"workers": found["workers"], "kind": None if kind == math.inf else kind, "decided": True}
        sent = link.everywhere("norm", number, self._number(number, found), body, ask=True)
        norms = [float(caller.wait(message, link.seconds).body["norm"]) for caller, message in sent]
        return float(torch.linalg.vector_norm(torch.tensor(norms, dtype=torch.float64), kind)) / float(found["parts"])

    # ---- the end of a turn

    def commit(self) -> None:
        """End a turn. If I am too far ahead, wait, and then read what I waited for."""
        if not self.sample_queue.open:
            return
        link, dropped = self._link, "again" if self._again else "dropped" if self._late else ""
        self._late = self._stepped = False
        self.sample_queue.tick(dropped)
        known = min(self._known.get(number, 0) for number in range(len(link.optimizers)))
        if self.sample_queue.clock - known > self._bound:
            self.sample_queue.go()
            link.context.agreement.lasting(lambda: link.catch_up({}))
            self._known = dict.fromkeys(range(len(link.optimizers)), self.sample_queue.clock - int(self._bound))
        if self.copies.waits and self.copies.begun():
            link.context.agreement.call_all(ServerLost("a copy of a server has begun"))

    # ---- losses

    def regroup(self) -> None:
        """Go on after workers have changed, servers were lost, or copies have begun. Collective; may begin anew at any place.

        Raises `StateLost` where no copy of a shard is left.
        """
        link, group = self._link, self._link.context.group
        link.connections.follow(link.context.cancel_scope)
        link.release()
        self._decided.clear()
        link.factors.clear()
        self.copies.survey(link.context)
        mine = {"report": asdict(self.sample_queue.report()), "begun": self.copies.begun()}
        told = [json.loads(body) for body in group.agree(json.dumps(mine).encode())]
        begun = [found for each in told for found in each["begun"]]
        reports = {worker: WorkerReport.load(each["report"]) for worker, each in zip(link.workers, told, strict=True)}
        first = next(rank for rank, worker in enumerate(link.workers) if (reports[worker].part, reports[worker].times) == latest(reports))
        body = msgpack.packb(self._settle(reports, begun)) if group.rank == first else b""
        found = msgpack.unpackb(group.agree(body)[first], strict_map_key=False)
        self._made, gradients, filled, clocks, nobodys = found
        self._begun += self.copies.take_in(begun, filled)
        me = self.copies.me
        self._counted = {optimizer: numbers.get(me, 0) for optimizer, numbers in enumerate(gradients)}
        self.sample_queue.resume(clocks[me])
        if nobodys and group.rank == 0:
            link.context.announce(
                f"{nobodys} samples of epoch {self.sample_queue.part[0]} were lost with a worker, when all others had ended it"
            )

    def _settle(self, reports: Mapping[int, WorkerReport], begun: Sequence[Any]) -> list[Any]:
        """Bring all servers to the same steps, and the scheduler to where workers are. Returns steps, gradients, clocks, filled copies."""
        link = self._link
        heads = self._tell_all(link.connections.callers, "reckon", {"workers": link.workers})
        steps = {caller: head.body["steps"] for caller, head in heads.items()}
        for optimizer in range(len(link.optimizers)):
            self._even(optimizer, steps)
        ledgers = self._tell_all(link.connections.callers, "void", {})
        journal = merged(ledgers[caller].tensors[0].numpy().tobytes() for caller in link.callers)
        made = [max(found[optimizer] for found in steps.values()) for optimizer in range(len(link.optimizers))]
        standing = stand(reports, self.sample_queue.sizes, journal, made, gathers=not self._link.drops)
        link.callers[0].call("resume", tensors=[packed(standing.dump())], seconds=link.seconds)
        filled = self.copies.fill(begun)
        return [made, standing.gradients, filled, standing.clocks, standing.nobodys]

    def _tell_all(self, callers: Sequence[RpcClient], kind: str, body: dict[str, Any]) -> dict[RpcClient, Any]:
        seconds = self._link.seconds
        sent = [(caller, caller.send(kind, body=body, seconds=seconds)) for caller in callers]
        return {caller: caller.wait(message, seconds) for caller, message in sent}

    def _even(self, optimizer: int, steps: dict[RpcClient, list[int]]) -> None:
        """Let each server that keeps parameters of an optimizer make the steps that another has made."""
        link = self._link
        shards = {unit.server for unit in link.units(optimizer)}
        callers = [caller for shard in shards for caller in link.connections.of[shard]]
        ahead = max(callers, key=lambda caller: steps[caller][optimizer])
        for caller in callers:
            lacks = steps[caller][optimizer]
            if lacks == steps[ahead][optimizer]:
                continue
            answer = ahead.call("since", step=lacks, body={"optimizer": optimizer}, seconds=link.seconds)
            for body in msgpack.unpackb(answer.tensors[0].numpy().tobytes(), strict_map_key=False):
                caller.call("close", step=body["step"], body=body, seconds=link.seconds)

    def take_begun(self) -> list[str]:
        """Return the names of the copies that have begun since the last call."""
        found, self._begun = self._begun, []
        return found


def consistency(link: ServerLink, rows: UnlockedRows) -> Consistency:
    """Return the consistency model that the options ask for."""
    if link.context.survives and not link.lockstep:
        return ElasticConsistency(link)
    kind = BackupWorkers if link.drops else BulkSynchronous if link.lockstep else Asynchronous if link.alone else StaleSynchronous
    return kind(link, rows)
