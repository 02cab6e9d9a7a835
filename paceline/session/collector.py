"""Collects logs on the first worker about once a second, and realigns workers out of lockstep.

in lockstep        run.log: all meet at a step agreed before      records -> the first worker
out of lockstep    each posts a letter at its own pace            letters -> the first worker,
                                                                  when it posts
                   first call of all after an epoch: all come to the same step, with the same
                   parameters
"""

from __future__ import annotations

from typing import Any

import msgpack

from paceline.comm.agreement import Agreement
from paceline.comm.sample_queue import SampleQueue
from paceline.elastic.eviction import Eviction
from paceline.elastic.recovery import Recovery
from paceline.errors import UsageError
from paceline.loop.turns import TrainingLoop
from paceline.prepare.registry import Prepared
from paceline.record.live import LiveRecord
from paceline.record.run_records import RunRecords
from paceline.unequal.probe.link_watch import LinkWatch
from paceline.unequal.shares.follower import ShareFollower


class LogCollector:
    """Collects on the first worker what was logged. `everyone`: all workers.

    At the same meetings `follower` has shares follow speeds, `links` looks after slow links, and
    `eviction` has those leave that are late. Then `live` is brought up to date.
    """

    def __init__(
        self,
        loop: TrainingLoop,
        prepared: Prepared,
        everyone: Agreement,
        records: RunRecords,
        *,
        recovery: Recovery | None,
        follower: ShareFollower,
        links: LinkWatch,
        live: LiveRecord,
        eviction: Eviction | None = None,
    ) -> None:
        self._follower, self._links, self._live, self._eviction = follower, links, live, eviction
        self._loop, self._prepared, self._everyone, self._recovery = (
            loop,
            prepared,
            everyone,
            recovery,
        )
        self._history, self._log, self._meetings = records.history, records.log, records.meetings
        # of each worker, how far its records are here, where they come by letter
        self._known: dict[int, bytes] = {}
        self.asked = False  # this worker wants to stop
        self.stopping = False  # all have agreed to

    @property
    def sample_queue(self) -> SampleQueue | None:
        """Where workers get their samples while they are not in lockstep."""
        return self._loop.abilities.sample_queue

    def request_stop(self) -> None:
        """Have all workers stop, when they learn that this one wants to."""
        self.asked = True

    def agree_to_stop(self) -> bool:
        """Whether all workers stop now, because one of them has asked for it.

        Collective, until all have agreed to stop.
        """
        if not self.stopping and any(
            self._everyone.meet("run.epochs", b"s" if self.asked else b"")
        ):
            self._stop_loops()
        return self.stopping

    def _stop_loops(self) -> None:
        self.stopping = True
        self._loop.stop_training()

    def step_ended(self, step: int, *_: Any) -> None:
        """Collect logs after a step, if it is time."""
        if step < self._meetings.next_server:
            return
        self._prepared.check_known()
        if self._loop.apart:
            self._post_letter()
            self._meetings.meet_after_step(step + self._log.steps_ahead())
        else:
            self._meet_workers()

    def _meet_workers(self) -> None:
        agreement, recovery = self._everyone, self._recovery
        news = None if recovery is None else recovery.collect_news()
        name, work = agreement.origins[agreement.group.rank], self._follower.drain_steps()
        me = msgpack.packb(
            [self._log.drain(), self.asked, self._log.steps_ahead(), name, news, work]
        )
        answers = [msgpack.unpackb(a) for a in agreement.meet("run.log", me)]
        self._meetings.meet_after_step(self._loop.steps_made + answers[0][2])
        if recovery is not None:
            recovery.hear_news([answer[4] for answer in answers])
        names = [a[3] for a in answers]
        reason = self._log.absorb(
            [a[0] for a in answers], names, agreement.hosts, self._links.status_remark
        )
        self._links.take_flush(names, self._log.flushed_seconds)
        if self._eviction is not None:
            self._eviction.handle_judgement(
                names, self._log.straggler_sensor.judgement, agreement.hosts, agreement.group.rank
            )
        self._announce_stop(reason)
        if reason is not None or any(a[1] for a in answers):
            self._stop_loops()
            for loader in self._prepared.loaders:
                if loader.terms.training:
                    loader.finish_epoch()
        self._follower.take_drained([answer[5] for answer in answers])
        self._live.update_file()

    def _announce_stop(self, reason: str | None) -> None:
        if reason is not None and not self.stopping:
            self._history.note_event(f"stopped: {reason}")
            self._prepared.context.announce(f"stopping: {reason}")

    # ---- not in lockstep

    def _post_letter(self) -> None:
        assert self.sample_queue is not None
        self._read_letters(self.sample_queue.post(self._log.drain(), stop=self.asked))

    def _read_letters(self, letters: list[tuple[int, bytes]]) -> None:
        """Take in letters on the first worker. Some may be of workers that were lost since."""
        agreement = self._everyone
        for worker, letter in letters:
            gone = [] if worker in agreement.origins else [worker]
            names = [*agreement.origins, *gone]
            bodies = [
                letter if name == worker else self._known.get(name, _NOTHING) for name in names
            ]
            reason = self._log.absorb(bodies, names, () if gone else agreement.hosts)
            upto, bad, _ = msgpack.unpackb(letter)
            self._known[worker] = msgpack.packb([upto, bad, []])
            self._announce_stop(reason)
            if reason is not None and not self.asked:
                self.asked = True  # all stop at the end of this epoch, which is now
                assert self.sample_queue is not None
                self.sample_queue.post(b"", stop=True)
        if letters:
            self._live.update_file()

    def leave_lockstep(self) -> None:
        """Begin an epoch in which workers are not in lockstep."""
        if self.sample_queue is not None:
            self._loop.leave_lockstep()
            self._everyone.lockstep.leave_lockstep(self._return_to_lockstep)

    def pause_between_turns(self, recovery: Recovery) -> None:
        """Pause between two turns if a worker waits to be let in, or if others are waited for.

        Once all workers pause, the new ones are let in.
        """
        sample_queue, loop, agreement = self.sample_queue, self._loop, self._everyone
        assert sample_queue is not None
        if not sample_queue.paused:
            if not loop.apart and sample_queue.open:
                self.leave_lockstep()  # all go on
            if recovery.has_waiting_workers or recovery.lacks_workers:
                sample_queue.pause()
            return
        agreement.lockstep.resume_lockstep()
        recovery.note_view(
            min(self._align_steps("the middle of an epoch", recovery.orders.latest_view))
        )
        if recovery.lacks_workers and not recovery.pending_view:
            text = (
                f"{self._everyone.group.size} workers are left, and more are needed: "
                "waiting for others"
            )
            self._history.announce_event(text)
            recovery.wait_for_workers()
        if recovery.pending_view:
            recovery.admit_workers(loop.abilities.converge)

    def _return_to_lockstep(self) -> None:
        loop, agreement = self._loop, self._everyone
        if loop.turns.in_training_loop:
            raise UsageError(
                "with staleness or backup_workers workers are not in lockstep inside the loop over "
                "a training loader, so what all have to "
                "do together (run.mean, gather, barrier, save, an evaluation) can't be done there: "
                "do it between epochs"
            )
        agreement.lockstep.resume_lockstep()
        self._prepared.epochs.end_left()
        self._align_steps("the end of an epoch")
        loop.abilities.converge()

    def _align_steps(self, where: str, mine: int = 0) -> list[int]:
        """Bring all workers to the step of the worker that is ahead.

        Returns the value `mine` of each worker. Collective.
        """
        loop = self._loop
        self._post_letter()
        answers = self._everyone.meet(
            where, msgpack.packb([loop.steps_made, self._log.ended_steps, mine])
        )
        assert self.sample_queue is not None
        self._read_letters(self.sample_queue.post(b""))
        steps, numbers, theirs = zip(*map(msgpack.unpackb, answers), strict=True)
        loop.come_together(max(steps))
        self._log.begin_at_step(max(numbers))
        self._known.clear()
        self._meetings.meet_after_step(max(steps) + 1)
        return list(theirs)


_NOTHING = msgpack.packb([0, None, []])
