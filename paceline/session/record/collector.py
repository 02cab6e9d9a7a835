"""How what was logged comes to the first worker, about once a second; and how workers that are not in lockstep come together again.

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
from paceline.sync.abilities import RemoteOptimizer
from paceline.sync.context import SyncContext


class LogCollector:
    """Hands over what was logged. `event` notes what happened, for the summary."""

    log: MetricsLog

    def __init__(self, turns: TrainingLoop, cast: Prepared, scene: SyncContext, event: Callable[[str], None]) -> None:
        self._turns, self._cast, self._scene, self._event = turns, cast, scene, event
        self._known: dict[int, bytes] = {}  # of each worker, how far its records are here, where they come by letter
        self.survival: Recovery | None = None
        self.next = 1  # the step after which it happens next
        self.asked = False  # this worker wants to stop
        self.stopping = False  # all have agreed to
        turns.parting = self._part

    @property
    def desk(self) -> SampleQueue | None:
        """Where workers get their samples while they are not in lockstep."""
        sync = self._turns.backward.sync
        return sync.desk if isinstance(sync, RemoteOptimizer) else None

    def open(self, log: MetricsLog) -> None:
        """Hand over what is in this log."""
        self.log = log
        log.adds = self.desk is not None

    def step_ended(self) -> None:
        """A step is over."""
        if self._turns.steps < self.next:
            return
        self._cast.check_known()
        if self._turns.apart:
            self._post()
            self.next = self._turns.steps + self.log.steps_ahead()
        else:
            self._meet()

    def _meet(self) -> None:
        agreement, survival = self._scene.agreement, self.survival
        news = None if survival is None else survival.news()
        me = msgpack.packb([self.log.drain(), self.asked, self.log.steps_ahead(), agreement.origins[agreement.group.rank], news])
        answers = [msgpack.unpackb(a) for a in agreement.meet("run.log", me)]
        self.next = self._turns.steps + answers[0][2]
        if survival is not None:
            survival.hear([answer[4] for answer in answers])
        reason = self.log.absorb([a[0] for a in answers], [a[3] for a in answers], agreement.hosts)
        self._say(reason)
        if reason is not None or any(a[1] for a in answers):
            self.stopping = self._turns.over = True
            for loader in self._cast.loaders:
                if loader.terms.training:
                    loader.finish()

    def _say(self, reason: str | None) -> None:
        if reason is not None and not self.stopping:
            self._event(f"stopped: {reason}")
            self._scene.announce(f"stopping: {reason}")

    # ---- not in lockstep

    def _post(self) -> None:
        assert self.desk is not None
        self._read(self.desk.post(self.log.drain(), stop=self.asked))

    def _read(self, letters: list[tuple[int, bytes]]) -> None:
        """Take in what has come, on the first worker. Some may be of workers that were lost since."""
        agreement = self._scene.agreement
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
                assert self.desk is not None
                self.desk.post(b"", stop=True)

    def _part(self) -> None:
        """An epoch begins in which workers are not in lockstep."""
        if self.desk is not None:
            self._turns.apart = True
            self._scene.agreement.entering = self._come_together

    def between(self, survival: Recovery) -> None:
        """Two turns of an epoch: have all stop where somebody waits to be let in, or has to be waited for; where they have, do that."""
        desk, turns, agreement = self.desk, self._turns, self._scene.agreement
        assert desk is not None
        if not desk.paused:
            if not turns.apart and desk.open:
                self._part()  # all go on
            if survival.waited or survival.short:
                desk.pause()
            return
        agreement.entering = None
        survival.note(min(self._line_up("the middle of an epoch", survival.orders.latest)))
        if survival.short and not survival.pending:
            text = f"{self._scene.group.size} workers are left, and more are needed: waiting for others"
            self._event(text)
            self._scene.announce(text)
            survival.wait()
        if survival.pending:
            turns.backward.sync.converge()
            survival.admit()

    def _come_together(self) -> None:
        turns, agreement = self._turns, self._scene.agreement
        if turns.training_now:
            raise UsageError(
                "with staleness or backup_workers workers are not in lockstep inside the loop over a training loader, so what all have to "
                "do together (run.mean, gather, barrier, save, an evaluation) can't be done there: do it between epochs"
            )
        agreement.entering = None
        turns.end_broken()
        self._line_up("the end of an epoch")
        turns.backward.sync.converge()

    def _line_up(self, where: str, mine: int = 0) -> list[int]:
        """All are here: at the same step from now on, that of whoever took most; gives what each has as `mine`."""
        turns = self._turns
        self._post()
        told = self._scene.agreement.meet(where, msgpack.packb([turns.steps, self.log.number, mine]))
        assert self.desk is not None
        self._read(self.desk.post(b""))
        steps, numbers, theirs = zip(*map(msgpack.unpackb, told), strict=True)
        turns.apart = False
        turns.place(max(steps))
        self.log.place(max(numbers))
        self._known.clear()
        self.next = max(steps) + 1
        return list(theirs)


_NOTHING = msgpack.packb([0, None, []])
