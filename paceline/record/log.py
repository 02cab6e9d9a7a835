"""The log of each worker, and how logs come together on the first worker without any waiting.

    each worker   log, log, ... step      numbers of the step under way, then the step is over
                  drain -> bytes          what was finished since the last drain; travels with a
                                          meeting that takes place anyway
    all workers   absorb(all bytes)       the first merges them by step and writes the means; all
                                          learn of a loss that is no number

All travels as msgpack: [upto, bad, [record, ...]], a record being the fields of a
`paceline.record.logged.record.LogRecord`. Every record up to the number `upto` has been handed
over, so a step is complete once the smallest `upto` of all workers reaches it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgpack

from paceline.cluster.mesh import Mesh
from paceline.comm.agreement import Agreement
from paceline.errors import PacelineError, UsageError
from paceline.record.folder import RunTotals
from paceline.record.logged.record import LogRecord
from paceline.record.logged.values import LoggedValues
from paceline.record.status_line import StatusDisplay
from paceline.record.writer import MetricsWriter
from paceline.sync.codec_cost import CodecAccount
from paceline.trace import MEASURED, PARTS, SENT
from paceline.unequal.stragglers.lateness import LatenessTotals
from paceline.unequal.stragglers.stragglers import StragglerSensor

OnNan = Literal["warn", "stop"]
_APART = 1.0  # seconds between two drains, about
_MOST = 1000  # steps between two drains


@dataclass
class _LogEntry:
    """A finished step, or what was logged of it after it was finished."""

    number: int
    step: int
    time: float
    samples: int = 0
    seconds: list[float] | None = None
    causes: list[int] | None = None  # microseconds of MEASURED
    sent: list[int] | None = None  # bytes of SENT
    values: LoggedValues = field(default_factory=LoggedValues)


class MetricsLog:
    """What a script logs, on every worker.

    `book`: where the first worker writes them; None on the others. `on_nan`: "warn" says which rank
    had the first loss that was no number, "stop" has `absorb` return the reason to stop too. `say`
    is told of such losses, on every worker, and who makes the others wait. `accounts` of codecs are
    logged with each step. `mesh`: where workers are, if a model is cut between them.
    """

    def __init__(
        self,
        book: MetricsWriter | None,
        *,
        on_nan: OnNan = "warn",
        say: Callable[[str], None],
        accounts: Sequence[CodecAccount] = (),
        mesh: Mesh | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if on_nan not in ("warn", "stop"):
            raise UsageError(f"on_nan={on_nan!r} is unknown; possible are 'warn' and 'stop'")
        self.book, self._on_nan, self._say, self._clock = book, on_nan, say, clock
        self._accounts = accounts
        self._began = clock()
        self.opened = time.time()  # when that was, as the times of events are told
        self._earlier = 0.0  # seconds that the run had taken when this log was made
        self._open: dict[int, LoggedValues] = {}  # by step
        self._queue: deque[_LogEntry] = deque()
        # of the last finished step in this log; steps of a run go on from a checkpoint, this
        # doesn't
        self._number = 0
        self._drained = (0, clock())
        self._ahead = 1
        # my first loss that is no number: number, step, name, nan or inf
        self._bad: tuple[int, int, str, str] | None = None
        self._reason: str | None = None  # the first of all workers, in words
        # of trackers, on workers that may be the first
        self.feed = None if book is None else book.feed
        self.slowness = StragglerSensor(mesh)
        # the seconds of PARTS of each step in the last flush, by rank
        self.flushed: list[list[list[float]]] = []
        # of all workers, where it is written
        self.lateness = LatenessTotals(0) if book is None else book.lateness
        self.total_steps: int | None = None
        self._epoch: tuple[int, int] | None = None

    def expect(self, steps: int | None, epoch: tuple[int, int] | None = None) -> None:
        """Tell the time left by so many steps in all, where that is known.

        `epoch`: which is under way, from 1 on, and of how many.
        """
        self.total_steps, self._epoch = steps, epoch

    # ---- while a step is under way: never waits

    def log(self, step: int, values: Mapping[str, Any], weight: float = 1.0) -> None:
        """Add `values` to what is known of `step`: numbers and tensors of one element, whose mean
        goes by weight over all calls and workers; metrics; histograms and images of the first
        worker.

        With weight 0 no number is logged. Never waits for a device. `step` may be over already (a
        result of an evaluation).
        """
        shows, found = (
            self.book is not None and not self.book.stands_by,
            self._open.get(step, LoggedValues()),
        )
        for name, value in values.items():
            metric = found.add(name, value, weight, shows=shows)
            if metric is not None and self.book is not None:
                self.book.metrics.know(name, metric)
        if not found.empty:
            self._open[step] = found

    def step(self, step: int, samples: int, seconds: Mapping[str, float]) -> None:
        """End step number `step`: it had `samples` over all workers (or only here: `adds`), and
        took `seconds` of each part here.

        `seconds` has those of MEASURED, too: what was measured of causes for which workers are
        late; and the bytes of SENT.
        """
        for account in self._accounts:
            self.log(step, account.take())
        self._number += 1
        now = self._now()
        for late in sorted(number for number in self._open if number != step):
            self._enqueue(_LogEntry(self._number, late, now, values=self._open.pop(late)))
        split = [seconds.get(part, 0.0) for part in PARTS]
        causes = [round(1e6 * seconds.get(cause, 0.0)) for cause in MEASURED]
        sent = [int(seconds.get(where, 0)) for where in SENT]
        self._enqueue(
            _LogEntry(
                self._number,
                step,
                now,
                samples,
                split,
                causes,
                sent,
                self._open.pop(step, LoggedValues()),
            )
        )

    def fold(self, step: int) -> None:
        """Count what was logged of later steps, none of which is over, to `step`."""
        for later in sorted(number for number in self._open if number > step):
            self._open.setdefault(step, LoggedValues()).take_in(self._open.pop(later))

    def undo(self) -> None:
        """Discard what was logged since the last step was over."""
        self._open.clear()

    def place(self, number: int) -> None:
        """Begin at step `number`: the other workers had finished so many when this one joined."""
        self._number = number
        self._drained = (number, self._clock())

    def state_dict(self) -> dict[str, Any]:
        """Return what was logged of steps that aren't over, for `load_state_dict`."""
        states = {str(step): values.state() for step, values in self._open.items()}
        media = {step: shown for step, (_, shown) in states.items() if shown}
        return {step: sums for step, (sums, _) in states.items()} | (
            {"media": media} if media else {}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what was logged of steps that weren't over."""
        media = state.get("media", {})
        self._open = {
            int(step): LoggedValues.load(sums, media.get(step, {}))
            for step, sums in state.items()
            if step != "media"
        }

    def rewind(self, step: int, seconds: float) -> None:
        """Go on behind this step, of a run that has taken so many seconds: lines of later steps
        are removed.
        """
        self._earlier = seconds - (self._clock() - self._began)
        if self.book is not None:
            self.book.rewind(step)

    def hand_over(self, agreement: Agreement) -> None:
        """Bring all steps that are over to the first worker, which writes them. Collective."""
        mine = self.drain(waits=True)
        self.absorb(agreement.meet("run.save, the log", mine), agreement.origins, agreement.hosts)

    def _now(self) -> float:
        return self._earlier + self._clock() - self._began

    @property
    def number(self) -> int:
        """How many steps this log has finished."""
        return self._number

    def take_over(self, line: StatusDisplay) -> None:
        """Write to disk from now on, in place of a worker that was lost, and show `line`."""
        if self.book is not None:
            self.book.take_over(line)

    def _enqueue(self, entry: _LogEntry) -> None:
        entry.values.send()
        self._queue.append(entry)

    # ---- at a meeting

    def drain(self, *, last: bool = False, waits: bool = False) -> bytes:
        """Return what was finished since the last drain, for `absorb`.

        Numbers still on their way from a device stay for the next.

        With `waits` it waits for devices; with `last` it does, too, and includes what was logged
        after the last step.
        """
        if last:
            self._number += 1  # on every worker, whether it has logged something or not
            for step in sorted(self._open):
                self._enqueue(
                    _LogEntry(self._number, step, self._now(), values=self._open.pop(step))
                )
        records = []
        while self._queue and (last or waits or self._queue[0].values.done()):
            records.append(self._record(self._queue.popleft()))
        upto = self._queue[0].number - 1 if self._queue else self._number
        self._pace()
        return bytes(msgpack.packb([upto, self._bad, records]))

    def steps_ahead(self) -> int:
        """Return in how many steps to drain again, so that drains are about a second apart; at
        most twice as many as the last time.
        """
        return self._ahead

    def _pace(self) -> None:
        now = self._clock()
        number, before = self._drained
        steps, seconds = max(self._number - number, 1), max(now - before, 1e-9)
        self._ahead = max(1, min(int(steps * _APART / seconds), 2 * steps, _MOST))
        self._drained = (self._number, now)

    def _record(self, entry: _LogEntry) -> LogRecord:
        means = entry.values.means()
        for name, (total, _) in means.items():
            if self._bad is None and "loss" in name and not math.isfinite(total):
                self._bad = (entry.number, entry.step, name, repr(total))
        if self.book is not None:
            self.book.show(list(entry.values.shown(entry.step, entry.time)))
        states = entry.values.packed_states()
        return LogRecord(
            entry.number,
            entry.step,
            entry.time,
            entry.samples,
            entry.seconds,
            means,
            entry.causes,
            entry.sent,
            states,
        )

    def absorb(
        self,
        bodies: Sequence[bytes],
        names: Sequence[int] | None = None,
        hosts: Sequence[str] = (),
        remark: str = "",
    ) -> str | None:
        """Take in what every rank has drained, in rank order.

        Returns the reason to stop, if there is one: the same on all workers.

        `names`: numbers of the workers, where ranks may change. `hosts`: host of each rank, to name
        stragglers. `remark`: what the status line ends with.
        """
        heads, logs = [], []
        for upto, bad, records in map(msgpack.unpackb, bodies):
            heads.append((upto, bad))
            logs.append([LogRecord(*record) for record in records])
        self._judge(heads)
        self.flushed = [
            [record.seconds for record in mine if record.seconds is not None] for mine in logs
        ]
        if self.book is not None:
            entered = [(upto, mine) for (upto, _), mine in zip(heads, logs, strict=True)]
            self.book.enter(
                entered, self.total_steps, names, hosts, remark=remark, epoch=self._epoch
            )
            causes = [
                [record.causes for record in mine if record.causes is not None] for mine in logs
            ]
            slow = (
                self.slowness.take(names or range(len(logs)), self.flushed, hosts, causes)
                if hosts
                else None
            )
            if slow is not None:
                self._say(slow)
        return self._reason if self._on_nan == "stop" else None

    def _judge(self, heads: list[tuple[int, Any]]) -> None:
        found = [(bad[0], rank, *bad[1:]) for rank, (_, bad) in enumerate(heads) if bad]
        if self._reason is not None or not found or min(found)[0] > min(upto for upto, _ in heads):
            # said already, nothing to say, or another rank may still come with an earlier one
            return
        _, rank, step, name, what = min(found)
        self._reason = f"{name} was {what} first on rank {rank}, at step {step}"
        option = "" if self._on_nan == "stop" else "; start(on_nan='stop') would have stopped"
        self._say(
            f"{self._reason}. The weights are likely lost from there on: "
            "lower the learning rate or clip gradients (run.clip), "
            f"and go on from a checkpoint before it{option}"
        )

    def finish(self, agreement: Agreement) -> str | None:
        """Hand over the rest and close, waiting for devices.

        Returns what `absorb` returns. Collective.
        """
        last = self.drain(last=True)
        reason = self.absorb(agreement.meet("the end of the log", last), agreement.origins)
        self.close()
        return reason

    def close(self) -> None:
        """Close files and terminal, without the others. Calling it twice is harmless."""
        if self.book is not None:
            self.book.close(self.total_steps)

    def leave(self) -> None:
        """Close after an error, and hide it by no other."""
        with contextlib.suppress(PacelineError, OSError):
            self.close()

    def totals(self, *, work: bool = True) -> RunTotals | None:
        """Return the totals of the run so far (`MetricsWriter.totals`); None on a worker that
        doesn't write.
        """
        return (
            None
            if self.book is None or self.book.stands_by
            else self.book.totals(self._clock() - self._began, work=work)
        )
