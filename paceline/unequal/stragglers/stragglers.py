"""Detects stragglers during a run: a few workers that have more to do in each step than most.

seconds of own work (compute, data) of each worker, mean over the steps since the last flush of the
log:

flush   -4   -3   -2   -1    0
rank 0  48   50   51   49   50  ms
rank 1  51   49   50   90   51
rank 2  84   85   86   85   84   ->   35 ms late

A worker that is late in four of five flushes is named. So a worker that evaluates or saves now and
then is not named, and the noise of a moment doesn't count.
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

LATE, STILL_LATE = 0.2, 0.1  # parts of a step: to be named, and to stay named
LEAST = 1e-3  # seconds: less is not worth a line
FLUSHES, STEPS, SECONDS = 5, 20, 3.0  # the least that is looked at
# seconds (of steps) between two lines, and between two that name the same workers
PAUSE, AGAIN = 60.0, 1800.0
WORK = tuple(STEP_PARTS.index(part) for part in ("compute", "data"))


class _FlushMeans(NamedTuple):
    """Means over the steps of one flush."""

    steps: int
    seconds: float  # of all these steps, on the worker whose steps are the longest
    work: tuple[float, ...]  # seconds in a step, of each rank
    # seconds in a step by which each rank was late because of each of CAUSES
    late: tuple[tuple[float, ...], ...]

    @property
    def lateness(self) -> tuple[float, ...]:
        """Seconds of own work of each rank above the usual; at least half of the ranks have 0."""
        usual = statistics.median_low(self.work)
        return tuple(mine - usual for mine in self.work)


class Judgement(NamedTuple):
    """Result of one look at the last flushes: late ranks, own work of each rank, main cause."""

    late: frozenset[int]
    work: tuple[float, ...]
    cause: str  # of CAUSES; of all that are late together

    @property
    def cause_in_words(self) -> str:
        """The cause, in words."""
        return WORDS[self.cause]


class StragglerSensor:
    """Judges the last flushes.

    Its answers are the same on all workers with the same input, as its clock is the time of the
    steps.

    `mesh`: where workers are, if a model is cut between them.
    """

    def __init__(self, mesh: Mesh | None = None) -> None:
        self._mesh = mesh
        self._names: tuple[int, ...] = ()
        self._flushes: deque[_FlushMeans] = deque()
        self._clock = 0.0
        self._said = -PAUSE
        self._named: frozenset[int] = frozenset()
        # of the last flush; None where there was too little to judge by
        self.judgement: Judgement | None = None

    def take_flush(
        self,
        names: Sequence[int],
        steps: Sequence[list[list[float]]],
        hosts: Sequence[str],
        causes: Sequence[Sequence[Sequence[float]]] | None = None,
    ) -> str | None:
        """Take in the seconds of PARTS of each step since the last flush, by rank.

        Returns a line to be said, or None.

        All begins anew when `names`, the numbers of the workers, change. `hosts`: of each rank;
        `causes`: microseconds of MEASURED of the same steps (None: nothing but the loading of data
        was measured).
        """
        self.judgement = None
        if tuple(names) != self._names:
            self._names, self._named = tuple(names), frozenset()
            self._flushes.clear()
        if len(steps) < 2 or not all(steps):
            return None
        length = max(sum(map(sum, mine)) / len(mine) for mine in steps)
        work = tuple(
            sum(second[part] for second in mine for part in WORK) / len(mine) for mine in steps
        )
        self._flushes.append(
            _FlushMeans(
                len(steps[0]), length * len(steps[0]), work, _mean_lateness(work, steps, causes)
            )
        )
        self._clock += self._flushes[-1].seconds
        if not _is_enough([*self._flushes]):
            return None
        while _is_enough([*self._flushes][1:]):
            self._flushes.popleft()
        return self._judge_flushes(hosts)

    def _judge_flushes(self, hosts: Sequence[str]) -> str | None:
        step = statistics.median(flush.seconds / flush.steps for flush in self._flushes)
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
        # by no worker's memory
        anew = frozenset(
            rank for rank, seconds in enumerate(sure) if seconds > max(LEAST, LATE * step)
        )
        self.judgement = Judgement(anew, work, self._find_causes(anew))
        if not late:
            self._named = late
        elif since >= PAUSE and (late != self._named or since >= AGAIN):
            self._named, self._said = late, self._clock
            return describe_stragglers(
                work, late, step, hosts, self._mesh, cause=self._find_causes(late)
            )
        return None

    def _find_causes(self, ranks: frozenset[int]) -> str:
        """Return for what these ranks were late in the last flushes."""
        seconds = [
            sum(sum(flush.late[rank][at] for rank in ranks) for flush in self._flushes)
            for at in range(len(CAUSES))
        ]
        return find_main_cause(dict(zip(CAUSES, seconds, strict=True)))


def _mean_lateness(
    work: Sequence[float],
    steps: Sequence[list[list[float]]],
    causes: Sequence[Sequence[Sequence[float]]] | None,
) -> tuple[tuple[float, ...], ...]:
    """Return the seconds in a mean step by which each rank was late because of each of CAUSES."""
    data = STEP_PARTS.index("data")
    if causes is None:
        causes = [
            [[1e6 * second[data], *[0.0] * (len(MEASURED_CAUSES) - 1)] for second in mine]
            for mine in steps
        ]
    measured = [
        [1e-6 * sum(column) / len(mine) for column in zip(*mine, strict=True)] for mine in causes
    ]
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
    """Say which workers make the others wait, for how long, why, and what to do.

    `work` has the seconds of own work of each rank in a step, `late` the slow ranks, `cause` (of
    CAUSES) what they are late for; a step takes `step` seconds.
    """
    others = [mine for rank, mine in enumerate(work) if rank not in late]
    more = statistics.median(work[rank] for rank in late) - statistics.median(others)
    who = name_ranks(late, hosts, mesh)
    make = "makes" if len(late) == 1 else "make"
    what_helps = REMEDIES.get(cause) or advise_remedy(
        work_by_share(work, mesh), staged=mesh is not None and mesh.axis_size("stage") > 1
    )
    took = f"{more * 1e3:.1f} ms in each step, {more / step:.0%} of it, for {WORDS[cause]}"
    return f"{who} {make} the others wait: {took}. {what_helps}"


def name_ranks(ranks: frozenset[int], hosts: Sequence[str], mesh: Mesh | None = None) -> str:
    """Name ranks with their hosts, together if they are all workers of their hosts.

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
    """Median seconds of own work of each rank, and how often it was a tenth above the usual.

    A step has the seconds of each rank that took part. A rank that is missing in the last steps has
    left the run, and is left out.
    """
    there = {rank for step in list(steps)[-STEPS:] for rank in step}
    usual = [1.1 * statistics.median_low(step.values()) for step in steps]
    found = []
    for rank in sorted(there):
        mine = [
            (step[rank], limit) for step, limit in zip(steps, usual, strict=True) if rank in step
        ]
        late = sum(seconds > limit for seconds, limit in mine)
        found.append(
            {"seconds": statistics.median(seconds for seconds, _ in mine), "late": late / len(mine)}
        )
    return found


def work_by_share(work: Sequence[float], mesh: Mesh | None) -> list[float]:
    """Seconds of own work by share of the samples: the slowest of workers with the same samples."""
    if mesh is None:
        return list(work)
    found: dict[int, float] = {}
    for rank, mine in enumerate(work):
        share = mesh.index_along(rank, SAMPLE_AXES)
        found[share] = max(mine, found.get(share, 0.0))
    return [mine for _, mine in sorted(found.items())]


def advise_remedy(work: Sequence[float], *, staged: bool = False) -> str:
    """Advice for workers with these seconds of own work in a step, each above 0.

    Workers with the same samples count once. `staged` says whether they have different layers.
    """
    if staged:
        return (
            "See what else runs there, or whether its layers take longer than others': "
            "once the run has ended, paceline report says so"
        )
    if len(work) == 1:
        return "See what else runs there; all workers have the same samples, so shares can't help"
    speeds = ", ".join(f"{min(work) / seconds:.2g}" for seconds in work)
    return (
        "See what else runs there; if it is a slower machine and the "
        f"shares are equal now, deal by speed: prepare(..., shares='auto'), or shares=[{speeds}]"
    )
