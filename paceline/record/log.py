"""The log of each worker, and how logs come together on the first worker without any waiting.

    each worker   add_values ... end_step    values of the current step, then the step has ended
                  drain -> bytes             steps that ended since the last drain; they travel with
                                             a meeting that takes place anyway
    all workers   absorb(all bytes)          the first worker merges them by step and writes means;
                                             all learn of a loss that is not a number

A drain is msgpack: [upto, bad, [record, ...]]. A record has the fields of
`paceline.record.logged.record.LogRecord`. All records up to the number `upto` have been handed
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
from paceline.trace import DESTINATIONS, MEASURED_CAUSES, STEP_PARTS
from paceline.unequal.stragglers.lateness import LatenessTotals
from paceline.unequal.stragglers.stragglers import StragglerSensor

OnNan = Literal["warn", "stop"]
_DRAIN_INTERVAL = 1.0  # seconds between two drains, roughly
_MAX_STEPS_AHEAD = 1000  # steps between two drains, at most


@dataclass
class _LogEntry:
    """A step that has ended, or values that were logged after their step had ended."""

    number: int
    step: int
    time: float
    samples: int = 0
    seconds: list[float] | None = None
    causes: list[int] | None = None  # microseconds of MEASURED
    sent: list[int] | None = None  # bytes of SENT
    values: LoggedValues = field(default_factory=LoggedValues)


class MetricsLog:
    """The log of one worker.

    Values are collected in `_open_values` by step. When a step ends, they move to `_queue`, where
    numbers of a device travel to the host. A drain takes them out in order, so a number still on
    its way holds back all later steps. `_ended_steps` counts the steps that ended in this log. It
    never goes back, unlike the step of the run, which a resume sets back.

    Args:
        book: Writer on the first worker, and on workers that may become the first; else None.
        on_nan: What happens at the first loss that is not a number: "warn" says on which rank it
            was (the default); with "stop", `absorb` also returns this as the reason to stop.
        say: Function that is told of such losses, on every worker, and of stragglers.
        accounts: Accounts of codecs, which are logged with each step.
        mesh: Places of the workers, if a model is cut.
        clock: Seconds, as from `time.monotonic`.
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
        self.writer, self._on_nan, self._say, self._clock = book, on_nan, say, clock
        self._accounts = accounts
        self._began_at = clock()
        # Wall time at which this log began, as the history counts events from a wall time.
        self.opened_at = time.time()
        # Seconds that the run had taken before this log was created.
        self._earlier_seconds = 0.0
        self._open_values: dict[int, LoggedValues] = {}  # by step
        self._queue: deque[_LogEntry] = deque()
        # Steps that ended in this log.
        self._ended_steps = 0
        self._drained = (0, clock())
        self._steps_ahead = 1
        # First loss on this worker that is not a number: number, step, name, "nan" or "inf".
        self._bad_loss: tuple[int, int, str, str] | None = None
        # The first such loss of all workers, in words.
        self._stop_reason: str | None = None
        # Feed of the trackers, on workers that may become the first.
        self.feed = None if book is None else book.feed
        self.straggler_sensor = StragglerSensor(mesh)
        # Seconds of PARTS of each step in the last flush, by rank.
        self.flushed_seconds: list[list[list[float]]] = []
        # Lateness of all workers, on a worker that writes.
        self.lateness = LatenessTotals(0) if book is None else book.lateness
        self.total_steps: int | None = None
        self._epoch: tuple[int, int] | None = None

    def expect_steps(self, steps: int | None, epoch: tuple[int, int] | None = None) -> None:
        """Set the number of steps in all, for the time left, and the current epoch.

        `epoch` is the current one, counted from 1, and the number of epochs.
        """
        self.total_steps, self._epoch = steps, epoch

    # ---- while a step is under way: nothing here waits

    def add_values(self, step: int, values: Mapping[str, Any], weight: float = 1.0) -> None:
        """Add values to a step. Never waits for a device.

        Args:
            step: Step of the run. It may have ended already, as for the result of an evaluation.
            values: By name: numbers and tensors of one element, metrics, histograms or images.
                Numbers become a mean over all calls and workers. Histograms and images are those of
                the first worker.
            weight: Weight of the numbers in that mean. With weight 0 no number is logged.
        """
        shows, logged = (
            self.writer is not None and not self.writer.stands_by,
            self._open_values.get(step, LoggedValues()),
        )
        for name, value in values.items():
            metric = logged.add_value(name, value, weight, shows=shows)
            if metric is not None and self.writer is not None:
                self.writer.metrics.register_metric(name, metric)
        if not logged.is_empty:
            self._open_values[step] = logged

    def end_step(self, step: int, samples: int, seconds: Mapping[str, float]) -> None:
        """End a step.

        Args:
            step: Number of the step in the run.
            samples: Samples of all workers; only of this worker if the writer `adds_samples`.
            seconds: Seconds of each of PARTS on this worker. It also has MEASURED, the causes of
                lateness that were measured, in seconds, and SENT, in bytes.
        """
        for account in self._accounts:
            self.add_values(step, account.take_latest())
        self._ended_steps += 1
        now = self._run_seconds()
        # Values of other steps were logged after their step had ended. They travel along.
        for ended in sorted(number for number in self._open_values if number != step):
            self._enqueue_entry(
                _LogEntry(self._ended_steps, ended, now, values=self._open_values.pop(ended))
            )
        split = [seconds.get(part, 0.0) for part in STEP_PARTS]
        causes = [round(1e6 * seconds.get(cause, 0.0)) for cause in MEASURED_CAUSES]
        sent = [int(seconds.get(where, 0)) for where in DESTINATIONS]
        self._enqueue_entry(
            _LogEntry(
                self._ended_steps,
                step,
                now,
                samples,
                split,
                causes,
                sent,
                self._open_values.pop(step, LoggedValues()),
            )
        )

    def fold_later_steps(self, step: int) -> None:
        """Move the values of later steps, which have not ended either, to `step`."""
        for later in sorted(number for number in self._open_values if number > step):
            self._open_values.setdefault(step, LoggedValues()).add_later_values(
                self._open_values.pop(later)
            )

    def discard_open_steps(self) -> None:
        """Discard the values that were logged since the last step ended."""
        self._open_values.clear()

    def begin_at_step(self, number: int) -> None:
        """Begin at step `number`, because the other workers had finished that many steps."""
        self._ended_steps = number
        self._drained = (number, self._clock())

    def state_dict(self) -> dict[str, Any]:
        """Return the values of steps that have not ended, for `load_state_dict`."""
        states = {str(step): values.to_state() for step, values in self._open_values.items()}
        media = {step: shown_media for step, (_, shown_media) in states.items() if shown_media}
        return {step: sums for step, (sums, _) in states.items()} | (
            {"media": media} if media else {}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values of steps that had not ended."""
        media = state.get("media", {})
        self._open_values = {
            int(step): LoggedValues.from_state(sums, media.get(step, {}))
            for step, sums in state.items()
            if step != "media"
        }

    def rewind_to_step(self, step: int, seconds: float) -> None:
        """Go on after `step` of a run that has taken `seconds`.

        Lines of later steps are removed.
        """
        self._earlier_seconds = seconds - (self._clock() - self._began_at)
        if self.writer is not None:
            self.writer.rewind_to_step(step)

    def hand_over(self, agreement: Agreement) -> None:
        """Send all steps that have ended to the first worker, which writes them. Collective."""
        drained = self.drain(waits=True)
        self.absorb(
            agreement.meet("run.save, the log", drained), agreement.origins, agreement.hosts
        )

    def _run_seconds(self) -> float:
        """Return the seconds that the run has taken, all starts of its job included."""
        return self._earlier_seconds + self._clock() - self._began_at

    @property
    def ended_steps(self) -> int:
        """Number of steps that have ended in this log."""
        return self._ended_steps

    def take_over(self, line: StatusDisplay) -> None:
        """Write to the disk from now on, in place of a lost worker, and display on `line`."""
        if self.writer is not None:
            self.writer.take_over(line)

    def _enqueue_entry(self, entry: _LogEntry) -> None:
        """Queue an entry for the next drain, and start to copy its numbers to the host."""
        entry.values.send_to_host()
        self._queue.append(entry)

    # ---- at a meeting of all workers

    def drain(self, *, last: bool = False, waits: bool = False) -> bytes:
        """Return the steps that ended since the last drain, for `absorb`.

        Steps whose numbers are still on their way from a device stay for the next drain.

        Args:
            last: Include the values that were logged after the last step, and wait for devices.
            waits: Wait for devices.
        """
        if last:
            # On every worker, whether it has logged something or not, so that `upto` agrees.
            self._ended_steps += 1
            for step in sorted(self._open_values):
                self._enqueue_entry(
                    _LogEntry(
                        self._ended_steps,
                        step,
                        self._run_seconds(),
                        values=self._open_values.pop(step),
                    )
                )
        records = []
        while self._queue and (last or waits or self._queue[0].values.has_arrived()):
            records.append(self._make_record(self._queue.popleft()))
        upto = self._queue[0].number - 1 if self._queue else self._ended_steps
        self._update_pace()
        return bytes(msgpack.packb([upto, self._bad_loss, records]))

    def steps_ahead(self) -> int:
        """Return the number of steps until the next drain, so that drains are about a second apart.

        It at most doubles from one drain to the next.
        """
        return self._steps_ahead

    def _update_pace(self) -> None:
        """Adapt the number of steps between drains to the speed of the last ones."""
        now = self._clock()
        drained_number, drained_at = self._drained
        steps, seconds = max(self._ended_steps - drained_number, 1), max(now - drained_at, 1e-9)
        self._steps_ahead = max(
            1, min(int(steps * _DRAIN_INTERVAL / seconds), 2 * steps, _MAX_STEPS_AHEAD)
        )
        self._drained = (self._ended_steps, now)

    def _make_record(self, entry: _LogEntry) -> LogRecord:
        """Return the record of a queued entry, and note the first loss that is not a number."""
        means = entry.values.read_sums()
        for name, (total, _) in means.items():
            if self._bad_loss is None and "loss" in name and not math.isfinite(total):
                self._bad_loss = (entry.number, entry.step, name, repr(total))
        if self.writer is not None:
            self.writer.show_media(list(entry.values.read_media(entry.step, entry.time)))
        states = entry.values.pack_states()
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
        """Take in the drains of all ranks.

        Args:
            bodies: Drain of each rank, in rank order.
            names: Numbers of the workers, if ranks may change. Default: the ranks.
            hosts: Host of each rank, to name stragglers. Without it they are not looked for.
            remark: Text that the status line ends with.

        Returns:
            The reason to stop, the same on all workers; None to go on.
        """
        heads, logs = [], []
        for upto, bad, records in map(msgpack.unpackb, bodies):
            heads.append((upto, bad))
            logs.append([LogRecord(*record) for record in records])
        self._announce_bad_loss(heads)
        self.flushed_seconds = [
            [record.seconds for record in rank_records if record.seconds is not None]
            for rank_records in logs
        ]
        if self.writer is not None:
            drains = [
                (upto, rank_records) for (upto, _), rank_records in zip(heads, logs, strict=True)
            ]
            self.writer.enter_records(
                drains, self.total_steps, names, hosts, remark=remark, epoch=self._epoch
            )
            causes = [
                [record.causes for record in rank_records if record.causes is not None]
                for rank_records in logs
            ]
            straggler = (
                self.straggler_sensor.take_flush(
                    names or range(len(logs)), self.flushed_seconds, hosts, causes
                )
                if hosts
                else None
            )
            if straggler is not None:
                self._say(straggler)
        return self._stop_reason if self._on_nan == "stop" else None

    def _announce_bad_loss(self, heads: list[tuple[int, Any]]) -> None:
        """Announce the first loss of all workers that is not a number, once."""
        bad_losses = [(bad[0], rank, *bad[1:]) for rank, (_, bad) in enumerate(heads) if bad]
        if self._stop_reason is not None or not bad_losses:
            return
        # A rank that is behind may still report an earlier one. All workers have to name the same.
        if min(bad_losses)[0] > min(upto for upto, _ in heads):
            return
        _, rank, step, name, value = min(bad_losses)
        self._stop_reason = f"{name} was {value} first on rank {rank}, at step {step}"
        option = "" if self._on_nan == "stop" else "; start(on_nan='stop') would have stopped"
        self._say(
            f"{self._stop_reason}. The weights are likely lost from there on: "
            "lower the learning rate or clip gradients (run.clip), "
            f"and go on from a checkpoint before it{option}"
        )

    def finish(self, agreement: Agreement) -> str | None:
        """Hand over the rest, wait for devices, and close. Returns as `absorb`. Collective."""
        last = self.drain(last=True)
        reason = self.absorb(agreement.meet("the end of the log", last), agreement.origins)
        self.close()
        return reason

    def close(self) -> None:
        """Close files and the display, without other workers. Calling it twice is harmless."""
        if self.writer is not None:
            self.writer.close(self.total_steps)

    def close_quietly(self) -> None:
        """Close after an error. A further error is ignored, so that the first one is seen."""
        with contextlib.suppress(PacelineError, OSError):
            self.close()

    def compute_totals(self, *, work: bool = True) -> RunTotals | None:
        """Return the totals so far (`MetricsWriter.compute_totals`); None if it doesn't write."""
        return (
            None
            if self.writer is None or self.writer.stands_by
            else self.writer.compute_totals(self._clock() - self._began_at, work=work)
        )
