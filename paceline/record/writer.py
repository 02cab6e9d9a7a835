"""Writes the metrics of a run on the first worker: one line for each step, and totals."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.record.folder import RunFolder, RunTotals, to_strict_json
from paceline.record.jsonl import JsonLines
from paceline.record.logged.media import MediaItem
from paceline.record.logged.metric import MetricValues
from paceline.record.logged.record import LogRecord
from paceline.record.logged.values import RESERVED_FIELDS
from paceline.record.outcome.goodput import EarlierStarts
from paceline.record.outcome.members import RunMembers
from paceline.record.status_line import FinishedStep, StatusDisplay
from paceline.record.trackers.feed import TrackerFeed
from paceline.trace import DESTINATIONS, STEP_PARTS
from paceline.unequal.stragglers.lateness import (
    LatenessTotals,
    RankLateness,
    compute_lateness,
    find_latest_rank,
    stack_records,
)
from paceline.unequal.stragglers.stragglers import WORK, measure_inequality

# Fields that say nothing new when a step is taken again after a resume.
REPEATED_FIELDS = {"step", "time", "bytes_sent", "ranks"}
RECENT_STEPS = 1000  # steps that are searched for stragglers


class LatestRank(NamedTuple):
    """The rank that was latest in some steps, and the seconds of a mean step.

    `workers` are the numbers of the workers that took part in them, by rank.
    """

    late: RankLateness
    step: float
    workers: tuple[int, ...]


class MetricsWriter:
    """Merges the records of all ranks by step, writes a line for each step, and sums up.

    Records wait in `_records_by_step` until all ranks have handed over their step. Several workers
    may become the first. They all merge and sum up in the same way, but only one writes; the others
    stand by.

    Args:
        folder: Folder of the run.
        line: Display of the steps, if there is one.
        stands_by: Only sum up, until `take_over`.
        adds: The samples of a record are those of its own worker, and not of all workers. This is
            so if workers are not in lockstep.
        feed: Feed that reports the lines to trackers.
        earlier: The earlier starts of the job.
    """

    def __init__(
        self,
        folder: RunFolder,
        line: StatusDisplay | None = None,
        *,
        stands_by: bool = False,
        adds: bool = False,
        feed: TrackerFeed | None = None,
        earlier: EarlierStarts | None = None,
    ) -> None:
        self.earlier = EarlierStarts() if earlier is None else earlier
        self._lines, self._display, self.feed = JsonLines(folder.metrics), line, feed
        self.metrics = MetricValues()
        self.stands_by = stands_by
        self.adds_samples = adds
        # Lines of the last flush, which the writing worker may not have written. Kept while
        # standing by.
        self._unwritten_lines: list[dict[str, Any]] = []
        self._records_by_step: defaultdict[tuple[int, int], dict[int, LogRecord]] = defaultdict(
            dict
        )
        self._steps = self._samples = 0
        self._final_loss: float | None = None
        # Seconds of all steps, means over ranks.
        self._part_seconds: dict[str, float] = dict.fromkeys(STEP_PARTS, 0.0)
        # Seconds of each rank by part, and its number of "steps".
        self._rank_counters: defaultdict[int, Counter[str]] = defaultdict(Counter)
        # By step: the fields of lines that an earlier start of the job has written.
        self._written_fields: dict[int, set[str]] = {}
        # Seconds of own work of each rank in a step.
        self._work_seconds: deque[dict[int, float]] = deque(maxlen=RECENT_STEPS)
        # Last value of each logged name.
        self._last_values: dict[str, float] = {}
        self.lateness = LatenessTotals(RECENT_STEPS)
        # Latest rank in the steps of the last flush.
        self.latest: LatestRank | None = None
        # Number of steps of the last flush, their samples, and the seconds of PARTS of a mean one.
        self.recent: dict[str, float] = {}
        self.members = RunMembers()

    def take_over(self, line: StatusDisplay) -> None:
        """Write from now on, in place of a worker that was lost.

        The last lines come first, as far as that worker had not written them.
        """
        if not self.stands_by:
            return
        self.stands_by, self._display = False, line
        if self.feed is not None:
            self.feed.take_over()
        last = self._lines.read_last_line() or {"step": 0}
        self._write_lines(
            [fields for fields in self._unwritten_lines if fields["step"] > last["step"]]
        )

    def rewind_to_step(self, step: int) -> None:
        """Remove the lines of later steps, which will be taken again.

        Remaining lines of earlier steps are not written a second time.
        """
        if self.feed is not None and not self.stands_by:
            self.feed.rewind_to_step(step)
        self.earlier.move_repeated(self._lines.list_after_step(step))
        for line in self._lines.cut_after_step(step):
            self._last_values |= {
                name: float(value) for name, value in line.items() if name not in RESERVED_FIELDS
            }
            if line["step"] > step - RECENT_STEPS:
                self._written_fields.setdefault(line["step"], set()).update(line)

    def enter_records(
        self,
        parts: Sequence[tuple[int, list[LogRecord]]],
        total: int | None,
        names: Sequence[int] | None = None,
        hosts: Sequence[str] = (),
        *,
        remark: str = "",
        epoch: tuple[int, int] | None = None,
    ) -> None:
        """Merge the records of each rank, and write the steps that are complete.

        Args:
            parts: (upto, records) of each rank, in rank order, see `paceline.record.log`.
            total: Number of steps of the run, if it is known.
            names: Numbers of the workers. Default: their ranks.
            hosts: Host of each rank, to name the latest one on the status line.
            remark: Text that the status line ends with.
            epoch: Current epoch, from 1 on, and the number of epochs.

        Raises:
            ResourceError: The disk is full.
        """
        for rank, (_, records) in zip(names or range(len(parts)), parts, strict=False):
            for record in records:
                self._records_by_step[record.number, record.step][rank] = record
        if self._display is not None:
            self._display.remark(remark)
            self._display.at(epoch)
        self.members.set_workers([*(names or range(len(parts)))][: len(hosts) or None], hosts)
        # A step is complete once every rank has handed over all records up to it.
        complete = min(upto for upto, _ in parts)
        ready = sorted(key for key in self._records_by_step if key[0] <= complete)
        self._find_latest_rank(
            {key[1]: self._records_by_step[key] for key in ready},
            list(names or range(len(parts))),
            hosts,
        )
        lines = [self._merge_step(key[1], self._records_by_step.pop(key), total) for key in ready]
        if step_lines := [line for line in lines if "seconds" in line]:
            means = {
                part: sum(line["seconds"][part] for line in step_lines) / len(step_lines)
                for part in STEP_PARTS
            }
            self.recent = {
                "steps": len(step_lines),
                "samples": sum(line["samples"] for line in step_lines),
                **means,
            }
            if (looks := self.members.take_look(step_lines[-1]["time"])) is not None:
                step_lines[-1]["ranks"] = looks
        if self._display is not None:
            self._display.show()
        self._write_lines(
            [
                line
                for line in lines
                if line.keys() - REPEATED_FIELDS - self._written_fields.get(line["step"], set())
            ]
        )

    def show_media(self, items: Sequence[MediaItem]) -> None:
        """Report histograms and images of this worker."""
        if self.feed is not None and not self.stands_by:
            self.feed.show_media(items)

    def _find_latest_rank(
        self, steps: dict[int, dict[int, LogRecord]], ranks: list[int], hosts: Sequence[str]
    ) -> None:
        """Find out which rank was latest in these steps, and why."""
        # Lateness compares ranks, so only steps that all of them took count.
        complete_steps = {
            step: records
            for step, records in steps.items()
            if all(rank in records and records[rank].seconds for rank in ranks)
        }
        if not complete_steps:
            return
        self.latest = None
        if len(ranks) < 2 or self.adds_samples:
            return
        lateness_array = compute_lateness(stack_records([*complete_steps.values()], ranks))
        self.lateness.add_steps([*complete_steps], ranks, lateness_array)
        self.members.add_lateness(
            dict(zip(ranks, lateness_array.sum(axis=(0, 2)).tolist(), strict=True))
        )
        worst_rank = find_latest_rank(lateness_array, range(len(ranks)))
        # A step takes as long as it takes its slowest rank.
        step_seconds = [
            max(sum(record.seconds or ()) for record in records.values())
            for records in complete_steps.values()
        ]
        mean_step = sum(step_seconds) / len(step_seconds)
        self.latest = LatestRank(worst_rank, mean_step, tuple(ranks))
        if self._display is not None and hosts:
            self._display.late(worst_rank, hosts[worst_rank.rank], mean_step)

    def compute_totals(self, seconds: float, *, work: bool = True) -> RunTotals:
        """Return the totals of all steps, after `seconds` of running.

        Without `work` the field `rank_work` is left out, which takes long to compute.
        """
        step_seconds = sum(self._part_seconds.values())
        # Workers have taken different numbers of steps: the one that trained longest sets the time.
        if self.adds_samples:
            step_seconds = max(
                (sum(ranks[part] for part in STEP_PARTS) for ranks in self._rank_counters.values()),
                default=0.0,
            )
        return RunTotals(
            steps=self._steps,
            samples=self._samples,
            seconds=seconds,
            samples_per_second=self._samples / step_seconds if step_seconds > 0 else None,
            final_loss=self._final_loss,
            step_seconds={
                part: seconds_of_part / max(self._steps, 1)
                for part, seconds_of_part in self._part_seconds.items()
            },
            rank_seconds=[
                {part: ranks[part] / ranks["steps"] for part in STEP_PARTS}
                for _, ranks in sorted(self._rank_counters.items())
            ],
            rank_work=measure_inequality(self._work_seconds) if work else [],
            rank_late=self.lateness.mean_lateness(),
            members=self.members.to_fields(),
            logged=dict(self._last_values),
        )

    def close(self, total: int | None) -> None:
        """Show the last step and close the file. Calling it twice is harmless."""
        self._lines.close()
        if self._display is not None:
            self._display.close(total)

    def _merge_step(
        self, step: int, records: dict[int, LogRecord], total: int | None
    ) -> dict[str, Any]:
        """Return the line of one step, or of values that were logged after it had ended.

        A step is also counted and shown.
        """
        sums: dict[str, list[float]] = {}
        for rank in sorted(records):
            for name, (value, weight) in records[rank].sums.items():
                weighted_sum = sums.setdefault(name, [0.0, 0.0])
                weighted_sum[0] += value
                weighted_sum[1] += weight
        values = {
            name: value / weight for name, (value, weight) in sums.items()
        } | self._compute_metrics(records)
        self._final_loss = values.get("loss", self._final_loss)
        self._last_values |= values
        first = records[min(records)]
        line: dict[str, Any] = {"step": step, "time": round(first.time, 6), **values}
        timed = {
            rank: record.seconds for rank, record in records.items() if record.seconds is not None
        }
        # No rank reports seconds: the step had ended before, and these are later values.
        if not timed:
            if self._display is not None and values:
                self._display.logged(step, values)
            return line
        samples = (
            sum(record.samples for record in records.values())
            if self.adds_samples
            else first.samples
        )
        sent = {rank: record.sent or [] for rank, record in records.items() if rank in timed}
        for rank, rank_seconds in timed.items():
            self.members.add_step(rank, step, rank_seconds, sent[rank], records[rank].time)
        seconds = self._count_step(samples, timed)
        if self._display is not None:
            self._display.step(FinishedStep(step, first.time, samples, values, seconds), total)
        line |= {
            "samples": samples,
            "seconds": {part: round(mean, 6) for part, mean in seconds.items()},
        }
        nbytes = [sum(column) for column in zip(*sent.values(), strict=True)]
        return (
            {**line, "bytes_sent": dict(zip(DESTINATIONS, nbytes, strict=True))}
            if any(nbytes)
            else line
        )

    def _compute_metrics(self, records: dict[int, LogRecord]) -> dict[str, float]:
        """Compute the value of each metric from the states of all ranks that have logged it."""
        states = defaultdict[str, list[bytes]](list)
        for rank in sorted(records):
            for name, state in records[rank].states.items():
                states[name].append(state)
        return {
            key: value
            for name, rank_states in states.items()
            for key, value in self.metrics.compute_values(name, rank_states).items()
        }

    def _count_step(
        self, samples: int, seconds_by_rank: dict[int, list[float]]
    ) -> dict[str, float]:
        """Add a step to the totals, and return its seconds of PARTS, means over ranks."""
        self._steps += 1
        self._samples += samples
        self._work_seconds.append(
            {rank: seconds[WORK[0]] + seconds[WORK[1]] for rank, seconds in seconds_by_rank.items()}
        )
        for rank, seconds in seconds_by_rank.items():
            self._rank_counters[rank].update({"steps": 1})
            for part, value in zip(STEP_PARTS, seconds, strict=True):
                self._rank_counters[rank][part] += value  # type: ignore[assignment]
        columns = zip(*seconds_by_rank.values(), strict=True)
        means = {
            part: sum(column) / len(seconds_by_rank)
            for part, column in zip(STEP_PARTS, columns, strict=True)
        }
        for part, value in means.items():
            self._part_seconds[part] += value
        return means

    def _write_lines(self, lines: list[dict[str, Any]]) -> None:
        """Write these lines and report them, or keep them while standing by."""
        if self.feed is not None and self.stands_by:
            self.feed.skip_events()
        if not lines:
            return
        if self.stands_by:
            self._unwritten_lines = lines
            return
        self._lines.append_lines([to_strict_json(line) for line in lines])
        if self.feed is not None:
            self.feed.write_lines(lines, self.lateness.late_ranks_of)
