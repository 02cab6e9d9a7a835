"""Collects logs on the first worker, about once a second, and brings workers that are not in lockstep together again.

in lockstep    run.log: all meet, at a step agreed before             records -> the first worker
not so         each posts a letter at its own pace                    letters -> the first worker, when it posts
               the first call of all after an epoch: all come to the same step, with the same parameters
"""

from __future__ import annotations

from collections.abc import Callable

import msgpack

from paceline.comm.sample_queue import SampleQueue
from paceline.errors import UsageError
from paceline.session.elastic.recovery import Recovery
from paceline.session.loop.turns import TrainingLoop
from paceline.session.prepare.registry import Prepared
from paceline.session.record.log import MetricsLog
from paceline.sync.context import SyncContext


class LogCollector:
    """Hands over what was logged. `event` notes what happened, for the summary."""

    log: MetricsLog

    def __init__(self, loop: TrainingLoop, prepared: Prepared, context: SyncContext, event: Callable[[str], None]) -> None:
        self._loop, self._prepared, self._context, self._event = loop, prepared, context, event
        self._known: dict[int, bytes] = {}  # of each worker, how far its records are here, where they come by letter
        self.recovery: Recovery | None = None
        self.next = 1  # the step after which workers meet next
        self.asked = False  # this worker wants to stop
        self.stopping = False  # all have agreed to
        loop.parting = self._part

    @property
    def sample_queue(self) -> SampleQueue | None:
        """Where workers get their samples while they are not in lockstep."""
        return self._loop.abilities.sample_queue

    def open(self, log: MetricsLog) -> None:
        """Collect what is in this log."""
        self.log = log
        log.adds = self.sample_queue is not None

    def stop_agreed(self) -> bool:
        """Whether all stop now, as one of them has asked to. Collective, until all have agreed to stop."""
        if not self.stopping and any(self._context.agreement.meet("run.epochs", b"s" if self.asked else b"")):
            self._stop()
        return self.stopping

    def _stop(self) -> None:
        self.stopping = True
        self._loop.stop()

    def step_ended(self) -> None:
        """Collect logs after a step, if it is time."""
        if self._loop.steps < self.next:
            return
        self._prepared.check_known()
        if self._loop.apart:
            self._post()
            self.next = self._loop.steps + self.log.steps_ahead()
        else:
            self._meet()

    def _meet(self) -> None:
        agreement, recovery = self._context.agreement, self.recovery
        news = None if recovery is None else recovery.news()
        me = msgpack.packb([self.log.drain(), self.asked, self.log.steps_ahead(), agreement.origins[agreement.group.rank], news])
        answers = [msgpack.unpackb(a) for a in agreement.meet("run.log", me)]
        self.next = self._loop.steps + answers[0][2]
        if recovery is not None:
            recovery.hear([answer[4] for answer in answers])
        reason = self.log.absorb([a[0] for a in answers], [a[3] for a in answers], agreement.hosts)
        self._say(reason)
        if reason is not None or any(a[1] for a in answers):
            self._stop()
            for loader in self._prepared.loaders:
                if loader.terms.training:
                    loader.finish()

    def _say(self, reason: str | None) -> None:
        if reason is not None and not self.stopping:
            self._event(f"stopped: {reason}")
            self._context.announce(f"stopping: {reason}")

    # ---- not in lockstep

    def _post(self) -> None:
        assert self.sample_queue is not None
        self._read(self.sample_queue.post(self.log.drain(), stop=self.asked))

    def _read(self, letters: list[tuple[int, bytes]]) -> None:
        """Take in letters on the first worker. Some may be of workers that were lost since."""
        agreement = self._context.agreement
        for worker, letter in letters:
            gone = [] if worker in agreement.origins else [worker]
            names = [*agreement.origins, *gone]
            bodies = [letter if name == worker else self._known.get(name, _NOTHING) for name in names]
            reason = self.log.absorb(bodies, names, () if gone else agreement.hosts)
            upto, bad, _ = msgpack.unpackb(letter)
            self._known[worker] = msgpack.packb([upto, bad, []])
            self._say(reason)
            if reason is not None and not self.asked:
                self.asked = True  # all stop at the end of this epoch, which is now
                assert self.sample_queue is not None
                self.sample_queue.post(b"", stop=True)

    def _part(self) -> None:
        """Begin an epoch in which workers are not in lockstep."""
        if self.sample_queue is not None:
            self._loop.apart = True
            self._context.agreement.entering = self._come_together

    def between(self, recovery: Recovery) -> None:
        """Pause all workers between two turns where one waits to be let in, or others are waited for; once all pause, let them in."""
        sample_queue, loop, agreement = self.sample_queue, self._loop, self._context.agreement
        assert sample_queue is not None
        if not sample_queue.paused:
            if not loop.apart and sample_queue.open:
                self._part()  # all go on
            if recovery.waited or recovery.short:
                sample_queue.pause()
            return
        agreement.entering = None
        recovery.note(min(self._line_up("the middle of an epoch", recovery.orders.latest)))
        if recovery.short and not recovery.pending:
            text = f"{self._context.group.size} workers are left, and more are needed: waiting for others"
            self._event(text)
            self._context.announce(text)
            recovery.wait()
        if recovery.pending:
            loop.abilities.converge()
            recovery.admit()

    def _come_together(self) -> None:
        loop, agreement = self._loop, self._context.agreement
        if loop.training_now:
            raise UsageError(
                "with staleness or backup_workers workers are not in lockstep inside the loop over a training loader, so what all have to "
                "do together (run.mean, gather, barrier, save, an evaluation) can't be done there: do it between epochs"
            )
        agreement.entering = None
        loop.end_broken()
        self._line_up("the end of an epoch")
        loop.abilities.converge()

    def _line_up(self, where: str, mine: int = 0) -> list[int]:
        """Bring all workers to the step of the one that took most. Returns each one's `mine`. Collective."""
        loop = self._loop
        self._post()
        told = self._context.agreement.meet(where, msgpack.packb([loop.steps, self.log.number, mine]))
        assert self.sample_queue is not None
        self._read(self.sample_queue.post(b""))
        steps, numbers, theirs = zip(*map(msgpack.unpackb, told), strict=True)
        loop.apart = False
        loop.place(max(steps))
        self.log.place(max(numbers))
        self._known.clear()
        self.next = max(steps) + 1
        return list(theirs)


_NOTHING = msgpack.packb([0, None, []])
