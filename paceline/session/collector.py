"""Collects logs on the first worker about once a second, and realigns workers out of lockstep.

in lockstep        all meet at a step agreed before        records -> the first worker
out of lockstep    each posts a letter at its own pace     letters -> the first worker, as it posts
                   first collective call after an epoch    all get the same step and parameters
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
from paceline.session.saved_end import SavedEnd
from paceline.unequal.probe.link_watch import LinkWatch
from paceline.unequal.shares.follower import ShareFollower


class LogCollector:
    """Collects the logs of all workers (`everyone`) on the first worker.

    At the same meetings `follower` fits shares to speeds, `links` checks for slow links, and
    `eviction` makes late workers leave. Then `live` updates its file, and `saved_end` ends the run
    if a worker was asked to end it.
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
        saved_end: SavedEnd,
        eviction: Eviction | None = None,
    ) -> None:
        self._follower, self._links, self._live, self._eviction = follower, links, live, eviction
        self._saved_end = saved_end
        self._loop, self._prepared, self._everyone, self._recovery = (
            loop,
            prepared,
            everyone,
            recovery,
        )
        self._history, self._log, self._meetings = records.history, records.log, records.meetings
        # by worker: the state of its last letter, without records; used out of lockstep only
        self._known: dict[int, bytes] = {}
        self.asked = False  # this worker wants to stop
        self.stopping = False  # all workers have agreed to stop

    @property
    def sample_queue(self) -> SampleQueue | None:
        """Queue from which workers take samples while they are not in lockstep."""
        return self._loop.abilities.sample_queue

    def request_stop(self) -> None:
        """Ask all workers to stop; they learn of it at the next meeting."""
        self.asked = True

    def agree_to_stop(self) -> bool:
        """Agree on whether to stop now, which one request is enough for.

        Collective, until all have agreed to stop. Ends the run if a worker was asked to end it.
        """
        if self.stopping:
            return True
        wishes = (b"s" if self.asked else b"") + (b"e" if self._saved_end.is_asked else b"")
        answers = self._everyone.meet("run.epochs", wishes)
        if self._saved_end.is_wanted([b"e" in answer for answer in answers]):
            self._saved_end.save_and_end()
        if any(b"s" in answer for answer in answers):
            self._stop_loops()
        return self.stopping

    def _stop_loops(self) -> None:
        self.stopping = True
        self._loop.stop_training()

    def step_ended(self, step: int, *_: Any) -> None:
        """Collect logs after a step, if it is time."""
        if step < self._meetings.next_step:
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
        # fields by index: 0 records, 1 wants to stop, 2 steps until the next meeting,
        # 3 name, 4 news for recovery, 5 work of the last steps, 6 whether to save and end
        wish = self._saved_end.make_wish()
        report = msgpack.packb(
            [self._log.drain(), self.asked, self._log.steps_ahead(), name, news, work, wish]
        )
        answers = [msgpack.unpackb(a) for a in agreement.meet("run.log", report)]
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
        # all workers read the same answers, so they stop at the same step
        if reason is not None or any(a[1] for a in answers):
            self._stop_loops()
            for loader in self._prepared.loaders:
                if loader.terms.training:
                    loader.finish_epoch()
        self._follower.take_drained([answer[5] for answer in answers])
        self._live.update_file()
        if self._saved_end.hear_wishes([answer[6] for answer in answers]):
            self._meetings.meet_after_step(self._loop.steps_made + 1)

    def _announce_stop(self, reason: str | None) -> None:
        if reason is not None and not self.stopping:
            self._history.note_event(f"stopped: {reason}")
            self._prepared.context.announce(f"stopping: {reason}")

    # ---- not in lockstep

    def _post_letter(self) -> None:
        assert self.sample_queue is not None
        self._read_letters(self.sample_queue.post(self._log.drain(), stop=self.asked))

    def _read_letters(self, letters: list[tuple[int, bytes]]) -> None:
        """Absorb letters on the first worker, also from workers that were lost since."""
        agreement = self._everyone
        for worker, letter in letters:
            # a letter has the records of one worker; the others repeat their state without records
            lost = [] if worker in agreement.origins else [worker]
            names = [*agreement.origins, *lost]
            bodies = [
                letter if name == worker else self._known.get(name, _NOTHING) for name in names
            ]
            reason = self._log.absorb(bodies, names, () if lost else agreement.hosts)
            upto, bad, _ = msgpack.unpackb(letter)
            self._known[worker] = msgpack.packb([upto, bad, []])
            self._announce_stop(reason)
            if reason is not None and not self.asked:
                # all workers stop at the end of this epoch, which is now
                self.asked = True
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
        """Pause between two turns if a worker waits to join, or if too few workers are left.

        Once all workers have paused, the new workers are admitted.
        """
        sample_queue, loop, agreement = self.sample_queue, self._loop, self._everyone
        assert sample_queue is not None
        if not sample_queue.paused:
            if not loop.apart and sample_queue.open:
                self.leave_lockstep()  # the pause is over for all workers
            if recovery.has_waiting_workers or recovery.lacks_workers:
                sample_queue.pause()
            return
        # all workers have paused: they meet at one step, and the minimum is the newest view
        # of which all of them have heard
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
                "with staleness, backup_workers or a quorum workers are not in lockstep inside the "
                "loop over a training loader, so collective calls (run.mean, gather, barrier, "
                "save, an evaluation) can't be made there: make them between epochs"
            )
        agreement.lockstep.resume_lockstep()
        self._prepared.epochs.end_left()
        self._align_steps("the end of an epoch")
        loop.abilities.converge()

    def _align_steps(self, meeting: str, value: int = 0) -> list[int]:
        """Bring all workers to the step of the worker that is ahead. Collective.

        Returns the `value` of each worker.
        """
        loop = self._loop
        self._post_letter()
        answers = self._everyone.meet(
            meeting, msgpack.packb([loop.steps_made, self._log.ended_steps, value])
        )
        assert self.sample_queue is not None
        # every worker has posted its last letter before the meeting; an empty one fetches them
        self._read_letters(self.sample_queue.post(b""))
        steps, ended_steps, values = zip(*map(msgpack.unpackb, answers), strict=True)
        loop.come_together(max(steps))
        self._log.begin_at_step(max(ended_steps))
        self._known.clear()
        self._meetings.meet_after_step(max(steps) + 1)
        return list(values)


_NOTHING = msgpack.packb([0, None, []])
