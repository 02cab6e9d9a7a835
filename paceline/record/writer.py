"""Writes the metrics of a run on the first worker: records of all ranks merged by step, a line
for each, and totals.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from paceline.record.folder import RunFolder, RunTotals, strict_json
from paceline.record.jsonl import JsonLines
from paceline.record.logged.media import MediaItem
from paceline.record.logged.metric import MetricValues
from paceline.record.logged.record import LogRecord
from paceline.record.logged.values import RESERVED
from paceline.record.outcome.members import RunMembers
from paceline.record.status_line import FinishedStep, StatusDisplay
from paceline.record.trackers.feed import TrackerFeed
from paceline.trace import PARTS, SENT
from paceline.unequal.stragglers.lateness import (
    LatenessTotals,
    RankLateness,
    lateness,
    stacked,
    worst,
)
from paceline.unequal.stragglers.stragglers import WORK, unequal

# what says nothing new when a step is taken again
REPEATED = {"step", "time", "bytes_sent", "ranks"}
LAST = 1000  # steps that are searched for stragglers


class LatestRank(NamedTuple):
    """The rank that was latest in some steps, the seconds of a mean one, and the numbers of the
    workers that took part in them, by rank.
    """

    late: RankLateness
    step: float
    workers: tuple[int, ...]


class MetricsWriter:
    """Writes `folder.metrics`, shows the steps on `line` if there is one, and adds up.

    A writer that `stands_by` only adds up, until `take_over`. `adds`: the samples of a record are
    its worker's own, and not those of all. `feed` reports what is written to trackers.
    """

    def __init__(
        self,
        folder: RunFolder,
        line: StatusDisplay | None = None,
        *,
        stands_by: bool = False,
        adds: bool = False,
        feed: TrackerFeed | None = None,
    ) -> None:
        self._lines, self._line, self.feed = JsonLines(folder.metrics), line, feed
        self.metrics = MetricValues()
        self.stands_by = stands_by
        self.adds = adds
        # what another worker has written last, or not any more
        self._recent: list[dict[str, Any]] = []
        self._groups: defaultdict[tuple[int, int], dict[int, LogRecord]] = defaultdict(dict)
        self._steps = self._samples = 0
        self._final_loss: float | None = None
        # of all steps, means over ranks
        self._seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        # seconds of each rank, and its "steps"
        self._ranks: defaultdict[int, Counter[str]] = defaultdict(Counter)
        # by step: the fields of lines that an earlier start of the job has written
        self._there: dict[int, set[str]] = {}
        # seconds of own work of each rank in a step
        self._work: deque[dict[int, float]] = deque(maxlen=LAST)
        self._logged: dict[str, float] = {}  # the last value of each name
        self.lateness = LatenessTotals(LAST)
        self.latest: LatestRank | None = None  # in the steps that were entered last
        # of these steps: how many, their samples, and of PARTS the seconds of a mean one
        self.recent: dict[str, float] = {}
        self.members = RunMembers()

    def take_over(self, line: StatusDisplay) -> None:
        """Write from now on, in place of a worker that was lost: first the last lines that it
        had not written.
        """
        if not self.stands_by:
            return
        self.stands_by, self._line = False, line
        if self.feed is not None:
            self.feed.take_over()
        last = self._lines.last() or {"step": 0}
        self._write([found for found in self._recent if found["step"] > last["step"]])

    def rewind(self, step: int) -> None:
        """Remove the lines of later steps, which are taken again.

        What is there of earlier ones isn't written twice.
        """
        if self.feed is not None and not self.stands_by:
            self.feed.rewind(step)
        for line in self._lines.cut(step):
            self._logged |= {
                name: float(value) for name, value in line.items() if name not in RESERVED
            }
            if line["step"] > step - LAST:
                self._there.setdefault(line["step"], set()).update(line)

    def enter(
        self,
        parts: Sequence[tuple[int, list[LogRecord]]],
        total: int | None,
        names: Sequence[int] | None = None,
        hosts: Sequence[str] = (),
        *,
        remark: str = "",
        epoch: tuple[int, int] | None = None,
    ) -> None:
        """Take in (upto, records) of each rank and write what is complete.

        `names`: numbers of the workers (None: their ranks).

        `hosts`: of each rank, to name on the status line who is late; `remark`: what that line ends
        with; `epoch`: which one is under way, of how many.

        Raises `ResourceError` if the disk is full.
        """
        for rank, (_, records) in zip(names or range(len(parts)), parts, strict=False):
            for record in records:
                self._groups[record.number, record.step][rank] = record
        if self._line is not None:
            self._line.remark(remark)
            self._line.at(epoch)
        self.members.meet([*(names or range(len(parts)))][: len(hosts) or None], hosts)
        complete = min(upto for upto, _ in parts)
        ready = sorted(key for key in self._groups if key[0] <= complete)
        self._find_late(
            {key[1]: self._groups[key] for key in ready}, list(names or range(len(parts))), hosts
        )
        lines = [self._merge(key[1], self._groups.pop(key), total) for key in ready]
        if timed := [line for line in lines if "seconds" in line]:
            means = {
                part: sum(line["seconds"][part] for line in timed) / len(timed) for part in PARTS
            }
            self.recent = {
                "steps": len(timed),
                "samples": sum(line["samples"] for line in timed),
                **means,
            }
            if (looks := self.members.look(timed[-1]["time"])) is not None:
                timed[-1]["ranks"] = looks
        if self._line is not None:
            self._line.show()
        self._write(
            [
                line
                for line in lines
                if line.keys() - REPEATED - self._there.get(line["step"], set())
            ]
        )

    def show(self, items: Sequence[MediaItem]) -> None:
        """Report histograms and images of this worker."""
        if self.feed is not None and not self.stands_by:
            self.feed.show(items)

    def _find_late(
        self, steps: dict[int, dict[int, LogRecord]], ranks: list[int], hosts: Sequence[str]
    ) -> None:
        """Find out who was late in these steps, and why."""
        whole = {
            step: records
            for step, records in steps.items()
            if all(rank in records and records[rank].seconds for rank in ranks)
        }
        if not whole:
            return
        self.latest = None
        if len(ranks) < 2 or self.adds:
            return
        late = lateness(stacked([*whole.values()], ranks))
        self.lateness.add([*whole], ranks, late)
        self.members.late(dict(zip(ranks, late.sum(axis=(0, 2)).tolist(), strict=True)))
        latest = worst(late, range(len(ranks)))
        mean = sum(
            max(sum(record.seconds or ()) for record in records.values())
            for records in whole.values()
        ) / len(whole)
        self.latest = LatestRank(latest, mean, tuple(ranks))
        if self._line is not None and hosts:
            self._line.late(latest, hosts[latest.rank], mean)

    def totals(self, seconds: float, *, work: bool = True) -> RunTotals:
        """Return the totals of all steps, after `seconds` of running.

        Without `work` the `rank_work` is left out, which takes long.
        """
        inside = sum(self._seconds.values())
        # workers have taken different numbers of steps: the time is that of the one that trained
        # longest
        if self.adds:
            inside = max(
                (sum(ranks[part] for part in PARTS) for ranks in self._ranks.values()), default=0.0
            )
        return RunTotals(
            steps=self._steps,
            samples=self._samples,
            seconds=seconds,
            samples_per_second=self._samples / inside if inside > 0 else None,
            final_loss=self._final_loss,
            step_seconds={
                part: spent / max(self._steps, 1) for part, spent in self._seconds.items()
            },
            rank_seconds=[
                {part: ranks[part] / ranks["steps"] for part in PARTS}
                for _, ranks in sorted(self._ranks.items())
            ],
            rank_work=unequal(self._work) if work else [],
            rank_late=self.lateness.means(),
            members=self.members.fields(),
            logged=dict(self._logged),
        )

    def close(self, total: int | None) -> None:
        """Show the last step and close the file. Calling it twice is harmless."""
        self._lines.close()
        if self._line is not None:
            self._line.close(total)

    def _merge(self, step: int, records: dict[int, LogRecord], total: int | None) -> dict[str, Any]:
        """Return the line of one step, which is counted and shown, or of what was logged of it
        later.
        """
        sums: dict[str, list[float]] = {}
        for rank in sorted(records):
            for name, (value, weight) in records[rank].sums.items():
                whole = sums.setdefault(name, [0.0, 0.0])
                whole[0] += value
                whole[1] += weight
        values = {name: value / weight for name, (value, weight) in sums.items()} | self._measured(
            records
        )
        self._final_loss = values.get("loss", self._final_loss)
        self._logged |= values
        first = records[min(records)]
        line: dict[str, Any] = {"step": step, "time": round(first.time, 6), **values}
        timed = {
            rank: record.seconds for rank, record in records.items() if record.seconds is not None
        }
        if not timed:
            if self._line is not None and values:
                self._line.logged(step, values)
            return line
        samples = sum(record.samples for record in records.values()) if self.adds else first.samples
        sent = {rank: record.sent or [] for rank, record in records.items() if rank in timed}
        for rank, spent in timed.items():
            self.members.step(rank, step, spent, sent[rank])
        seconds = self._count(samples, timed)
        if self._line is not None:
            self._line.step(FinishedStep(step, first.time, samples, values, seconds), total)
        line |= {
            "samples": samples,
            "seconds": {part: round(spent, 6) for part, spent in seconds.items()},
        }
        nbytes = [sum(column) for column in zip(*sent.values(), strict=True)]
        return {**line, "bytes_sent": dict(zip(SENT, nbytes, strict=True))} if any(nbytes) else line

    def _measured(self, records: dict[int, LogRecord]) -> dict[str, float]:
        """Return the values of metrics, each by the states of all ranks that have logged it."""
        states = defaultdict[str, list[bytes]](list)
        for rank in sorted(records):
            for name, state in records[rank].states.items():
                states[name].append(state)
        return {
            key: value
            for name, found in states.items()
            for key, value in self.metrics.of(name, found).items()
        }

    def _count(self, samples: int, spent: dict[int, list[float]]) -> dict[str, float]:
        self._steps += 1
        self._samples += samples
        self._work.append(
            {rank: seconds[WORK[0]] + seconds[WORK[1]] for rank, seconds in spent.items()}
        )
        for rank, seconds in spent.items():
            self._ranks[rank].update({"steps": 1})
            for part, value in zip(PARTS, seconds, strict=True):
                self._ranks[rank][part] += value  # type: ignore[assignment]
        means = {
            part: sum(column) / len(spent)
            for part, column in zip(PARTS, zip(*spent.values(), strict=True), strict=True)
        }
        for part, value in means.items():
            self._seconds[part] += value
        return means

    def _write(self, lines: list[dict[str, Any]]) -> None:
        if self.feed is not None and self.stands_by:
            self.feed.pass_over()
        if not lines:
            return
        if self.stands_by:
            self._recent = lines
            return
        self._lines.append([strict_json(line) for line in lines])
        if self.feed is not None:
            self.feed.write(lines, self.lateness.of)
