"""Detects stragglers during a run: a few workers that have more to do in each step than most.

Own work (compute, data) of each worker in ms, mean over the steps between two flushes of the log:

flush   -4   -3   -2   -1    0
rank 0  48   50   51   49   50  ms
rank 1  51   49   50   90   51
rank 2  84   85   86   85   84   ->   35 ms late

A worker that is late in four of five flushes is named. So a worker that evaluates or saves now and
then isn't named, and short noise doesn't count.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from paceline.cluster.mesh import SAMPLE_AXES, Mesh
from paceline.trace import MEASURED_CAUSES, STEP_PARTS
from paceline.unequal.stragglers.causes import CAUSES, REMEDIES, WORDS
from paceline.unequal.stragglers.lateness import compute_lateness, find_main_cause

# lateness as a part of a step: to be named, and to stay named
LATE, STILL_LATE = 0.2, 0.1
LEAST = 1e-3  # seconds of lateness that are worth a line, at least
FLUSHES, STEPS, SECONDS = 5, 20, 3.0  # each is a minimum before workers are judged
# seconds of steps between two lines, and between two lines that name the same workers
PAUSE, AGAIN = 60.0, 1800.0
WORK = tuple(STEP_PARTS.index(part) for part in ("compute", "data"))


class _FlushMeans(NamedTuple):
    """Means over the steps of one flush."""

    steps: int
    seconds: float  # of all these steps, on the worker with the longest steps
    work: tuple[float, ...]  # seconds of own work in a step, of each rank
    # Seconds by which each rank was late in a step, for each of CAUSES.
    late: tuple[tuple[float, ...], ...]

    @property
    def lateness(self) -> tuple[float, ...]:
        """Seconds of own work of each rank above the usual; at least half of the ranks have 0."""
        usual = statistics.median_low(self.work)
        return tuple(seconds - usual for seconds in self.work)


class Judgement(NamedTuple):
    """Result of judging the last flushes."""

    late: frozenset[int]  # ranks
    work: tuple[float, ...]  # seconds of own work in a step, of each rank
    cause: str  # one of CAUSES: the main one of all late ranks together

    @property
    def cause_in_words(self) -> str:
        """The cause, in words."""
        return WORDS[self.cause]


class StragglerSensor:
    """Judges which workers are late by the last flushes.

    Its judgements are the same on all workers with the same input, as its clock counts seconds of
    steps. `mesh` has the places of workers if the model is cut between them.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self._mesh = mesh
        self._names: tuple[int, ...] = ()
        self._flushes: deque[_FlushMeans] = deque()
        self._clock = 0.0
        self._said = -PAUSE
        self._named: frozenset[int] = frozenset()
        # Of the last flush; None if there were too few steps to judge.
        self.judgement: Judgement | None = None

    def take_flush(
        self,
        names: Sequence[int],
        steps: Sequence[list[list[float]]],
        hosts: Sequence[str],
        causes: Sequence[Sequence[Sequence[float]]] | None = None,
    ) -> str | None:
        """Take in the steps of all workers since the last flush.

        Args:
            names: Number of each worker in the run; other numbers discard all earlier flushes.
            steps: Seconds of STEP_PARTS, by rank and step.
            hosts: Host of each rank.
            causes: Microseconds of MEASURED_CAUSES, by rank and step; None if nothing but the
                loading of data was measured.

        Returns:
            A line that names the stragglers, if it is time for one; else None.
        """
        self.judgement = None
        if tuple(names) != self._names:
            self._names, self._named = tuple(names), frozenset()
            self._flushes.clear()
        if len(steps) < 2 or not all(steps):
            return None

        # Ranks may have logged different numbers of steps, so all values are means of a step.
        length = max(sum(map(sum, rank_steps)) / len(rank_steps) for rank_steps in steps)
        work = tuple(
            sum(step[part] for step in rank_steps for part in WORK) / len(rank_steps)
            for rank_steps in steps
        )
        self._flushes.append(
            _FlushMeans(
                len(steps[0]), length * len(steps[0]), work, _mean_lateness(work, steps, causes)
            )
        )
        self._clock += self._flushes[-1].seconds
        if not _is_enough([*self._flushes]):
            return None

        # Forget old flushes as soon as the later ones are enough to judge by.
        while _is_enough([*self._flushes][1:]):
            self._flushes.popleft()
        return self._judge_flushes(hosts)

    def _judge_flushes(self, hosts: Sequence[str]) -> str | None:
        """Judge the last flushes, and describe the stragglers if a line is due."""
        step = statistics.median(flush.seconds / flush.steps for flush in self._flushes)

        # A rank is surely late by the lateness that it reaches in four of five flushes.
        columns = zip(*(flush.lateness for flush in self._flushes), strict=True)
        sure = [sorted(column)[len(column) // 5] for column in columns]
        limits = [
            max(LEAST, (STILL_LATE if rank in self._named else LATE) * step)
            for rank in range(len(sure))
        ]
        late = frozenset(rank for rank, limit in enumerate(limits) if sure[rank] > limit)
        since = self._clock - self._said
        work = tuple(
            statistics.median(column)
            for column in zip(*(flush.work for flush in self._flushes), strict=True)
        )

        # The judgement doesn't depend on which ranks were named before: eviction and other readers
        # have their own memory.
        newly_late = frozenset(
            rank for rank, seconds in enumerate(sure) if seconds > max(LEAST, LATE * step)
        )
        self.judgement = Judgement(newly_late, work, self._find_causes(newly_late))

        # The line does: a named rank stays named at half the lateness, and isn't repeated soon.
        if not late:
            self._named = late
        elif since >= PAUSE and (late != self._named or since >= AGAIN):
            self._named, self._said = late, self._clock
            return describe_stragglers(
                work, late, step, hosts, self._mesh, cause=self._find_causes(late)
            )
        return None

    def _find_causes(self, ranks: frozenset[int]) -> str:
        """Find the main cause of the lateness of these ranks in the last flushes."""
        seconds = [
            sum(sum(flush.late[rank][cause] for rank in ranks) for flush in self._flushes)
            for cause in range(len(CAUSES))
        ]
        return find_main_cause(dict(zip(CAUSES, seconds, strict=True)))


def _mean_lateness(
    work: Sequence[float],
    steps: Sequence[list[list[float]]],
    causes: Sequence[Sequence[Sequence[float]]] | None,
) -> tuple[tuple[float, ...], ...]:
    """Seconds by which each rank was late in a mean step, for each of CAUSES."""
    # The first measured cause is the loading of data, which steps have as well.
    data = STEP_PARTS.index("data")
    if causes is None:
        causes = [
            [[1e6 * step[data], *[0.0] * (len(MEASURED_CAUSES) - 1)] for step in rank_steps]
            for rank_steps in steps
        ]
    measured = [
        [1e-6 * sum(column) / len(rank_causes) for column in zip(*rank_causes, strict=True)]
        for rank_causes in causes
    ]

    # Compute, the first of CAUSES, is the rest of the own work.
    rows = [[max(own - sum(each), 0.0), *each] for own, each in zip(work, measured, strict=True)]
    return tuple(map(tuple, compute_lateness(np.array([rows]))[0].tolist()))


def _is_enough(flushes: Sequence[_FlushMeans]) -> bool:
    steps, seconds = sum(flush.steps for flush in flushes), sum(flush.seconds for flush in flushes)
    return len(flushes) >= FLUSHES and steps >= STEPS and seconds >= SECONDS


def describe_stragglers(
    work: Sequence[float],
    late: frozenset[int],
    step: float,
    hosts: Sequence[str],
    mesh: Mesh | None = None,
    *,
    cause: str = "compute",
) -> str:
    """Describe which workers make the others wait, how long, why, and what to do.

    Args:
        work: Seconds of own work in a step, of each rank.
        late: Ranks that are late.
        step: Seconds of a step.
        hosts: Host of each rank.
        mesh: Places of workers if the model is cut between them; None otherwise.
        cause: Main cause of the lateness, one of CAUSES.

    Returns:
        One line of text.
    """
    others = [seconds for rank, seconds in enumerate(work) if rank not in late]
    more = statistics.median(work[rank] for rank in late) - statistics.median(others)
    who = name_ranks(late, hosts, mesh)
    make = "makes" if len(late) == 1 else "make"
    remedy = REMEDIES.get(cause) or advise_remedy(
        work_by_share(work, mesh), staged=mesh is not None and mesh.axis_size("stage") > 1
    )
    took = f"{more * 1e3:.1f} ms in each step, {more / step:.0%} of it, for {WORDS[cause]}"
    return f"{who} {make} the others wait: {took}. {remedy}"


def name_ranks(ranks: frozenset[int], hosts: Sequence[str], mesh: Mesh | None = None) -> str:
    """Name ranks with their hosts; only the hosts come first if all their workers are meant.

    `hosts` has the host of each rank.
    """
    where = dict.fromkeys(hosts[rank] for rank in sorted(ranks))
    each = ", ".join(
        str(rank) if mesh is None else f"{rank} ({mesh.format_coordinates(rank)})"
        for rank in sorted(ranks)
    )
    if len(ranks) > 1 and {rank for rank, host in enumerate(hosts) if host in where} == ranks:
        return f"the workers of {', '.join(where)} (ranks {each})"
    return f"rank{'s' * (len(ranks) > 1)} {each} on {', '.join(where)}"


def measure_inequality(steps: Sequence[Mapping[int, float]]) -> list[dict[str, float]]:
    """Compute the median own work of each rank, and how often it was a tenth above the usual.

    A rank that is missing in all of the last steps has left the run, and is left out.

    Args:
        steps: For each step, the seconds of own work by rank.

    Returns:
        For each rank in order, the median `seconds` and the part of its steps in which it was
        `late`.
    """
    present = {rank for step in list(steps)[-STEPS:] for rank in step}
    limits = [1.1 * statistics.median_low(step.values()) for step in steps]
    summaries = []
    for rank in sorted(present):
        taken = [
            (step[rank], limit) for step, limit in zip(steps, limits, strict=True) if rank in step
        ]
        late = sum(seconds > limit for seconds, limit in taken)
        summaries.append(
            {
                "seconds": statistics.median(seconds for seconds, _ in taken),
                "late": late / len(taken),
            }
        )
    return summaries


def work_by_share(work: Sequence[float], mesh: Mesh | None) -> list[float]:
    """Seconds of own work for each share: those of the slowest worker with the same samples."""
    if mesh is None:
        return list(work)
    by_share: dict[int, float] = {}
    for rank, seconds in enumerate(work):
        share = mesh.index_along(rank, SAMPLE_AXES)
        by_share[share] = max(seconds, by_share.get(share, 0.0))
    return [seconds for _, seconds in sorted(by_share.items())]


def advise_remedy(work: Sequence[float], *, staged: bool = False) -> str:
    """Advise what to do about late workers.

    `work` has the seconds of own work in a step, each above 0; workers with the same samples count
    once. `staged` says whether workers have different layers.
    """
    if staged:
        return (
            "See what else runs there, or whether its layers take longer than other layers: "
            "once the run has ended, paceline report shows that"
        )
    if len(work) == 1:
        return "See what else runs there; all workers have the same samples, so shares can't help"
    speeds = ", ".join(f"{min(work) / seconds:.2g}" for seconds in work)
    return (
        "See what else runs there; if it is a slower machine and the "
        f"shares are equal now, deal by speed: prepare(..., shares='auto'), or shares=[{speeds}]"
    )
