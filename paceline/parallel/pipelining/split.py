"""Which layers go to which stage: the slowest of all that works at once decides, and every worker
has so much memory.

    layers     tokens positions | blocks.0 blocks.1 blocks.2 | blocks.3 blocks.4 norm | head
               counts [2, 3, 3, 1]
    stages     0                  1                            2                         3
    workers    0                  1                            0                         1
                                                               interleaved: schedule.placed

First a dynamic programme finds the split whose slowest stage (or link) is fastest: it goes through
the stages and keeps, for each number of layers used up, the best partial split, or where workers
have several stages that share their memory, those of which no other is better in both. Then splits
are run through the schedule, all of them or those that lie near, and the one that takes least is
it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, combinations, pairwise
from math import comb
from typing import NamedTuple

from paceline.comm.schedule import LinkSpeed
from paceline.errors import UsageError
from paceline.formatting import counted, sized
from paceline.parallel.pipelining.schedule import COMPLETES, PipelineSchedule
from paceline.parallel.pipelining.simulate import PipelineTimeline, StageTimes, simulate

NARROW, WIDE = 4, 32  # so many partial splits are kept for each number of layers
GROWING = ("time", "memory")  # loads that are more the more layers a stage has
# actions of the schedule, run one after the other to find the best of several splits: about a
# second
TRIED = 60_000

# what is loaded: ("time", stage), ("there", stage), ("back", stage) or ("memory", rank, case)
Load = tuple[str | int, ...]


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes for one micro-batch: seconds on a worker of speed 1, and bytes.

    `trained` are the bytes of those parameters that have gradients, `kept` those of what it makes
    and keeps for its backward. `sends` would go to the next worker if a stage ended after this
    layer, and be kept there; `returns` would come back.
    """

    name: str
    forward_seconds: float
    backward_seconds: float
    parameters: int = 0
    trained: int = 0
    kept: int = 0
    sends: int = 0
    returns: int = 0


@dataclass(frozen=True)
class SplitProblem:
    """Layers that a schedule's stages are to have, over workers of these `speeds`, each of so many
    bytes of `memory`.

    `links` has what each boundary between a stage and the next goes over. An optimizer keeps
    `remembered` bytes for each byte of a trained parameter: 2 for Adam, 1 for a momentum.
    """

    costs: Sequence[LayerCost]
    schedule: PipelineSchedule
    speeds: Sequence[float]
    memory: Sequence[float] | None = None
    links: Sequence[LinkSpeed] | None = None
    remembered: float = 2.0

    def __post_init__(self) -> None:
        ranks, stages = self.schedule.ranks, self.schedule.stages
        if len(self.costs) < stages:
            raise UsageError(
                f"{counted(len(self.costs), 'layer')} can't fill {stages} stages; "
                "take fewer stages, or name more layers"
            )
        wanted = {"speeds": ranks, "memory": ranks, "links": stages - 1}
        given: dict[str, Sequence[object] | None] = {
            "speeds": self.speeds,
            "memory": self.memory,
            "links": self.links,
        }
        for name, number in wanted.items():
            values = given[name]
            if values is not None and len(values) != number:
                raise UsageError(
                    f"{name} has {counted(len(values), 'value')}; here it has to have {number}"
                )
        if not all(0 < speed < float("inf") for speed in self.speeds):
            raise UsageError(f"speeds are {list(self.speeds)}; each has to be above 0")

    def sizes(self, start: int, stop: int) -> tuple[float, float, float]:
        """Return seconds, bytes of state and bytes of activations of the layers from `start` to
        before `stop`.
        """
        seconds, state, kept = [line[stop] - line[start] for line in self._sums]
        return seconds, state, kept + (self.costs[start - 1].sends if start else 0)

    @cached_property
    def _sums(self) -> tuple[list[float], list[int], list[int]]:
        seconds = accumulate(
            (cost.forward_seconds + cost.backward_seconds for cost in self.costs), initial=0.0
        )
        state = accumulate((self.state_bytes(cost) for cost in self.costs), initial=0)
        return (
            list(seconds),
            list(state),
            list(accumulate((cost.kept for cost in self.costs), initial=0)),
        )

    def state_bytes(self, cost: LayerCost) -> int:
        """Return the bytes of a layer's parameters, their gradients, and what the optimizer
        keeps for them.
        """
        return cost.parameters + round(cost.trained * (1 + self.remembered))

    @cached_property
    def kept_at_once(self) -> list[list[Mapping[int, int]]]:
        """How many micro-batches each stage of a worker keeps at once, wherever that is most:
        for each worker, one or several cases.
        """
        return [_most_at_once(self.schedule, rank) for rank in range(self.schedule.ranks)]

    def loads(self, stage: int, start: int, stop: int) -> Iterator[tuple[Load, float]]:
        """Yield what a stage of these layers loads: its time, the links after it, and a part of
        its worker's memory.
        """
        rank = self.schedule.placed[stage]
        seconds, state, kept = self.sizes(start, stop)
        yield ("time", stage), seconds / self.speeds[rank]
        if (
            self.links is not None
            and stage < self.schedule.stages - 1
            and self.schedule.placed[stage + 1] != rank
        ):
            yield ("there", stage), self.costs[stop - 1].sends / self.links[stage].bytes_per_second
            yield ("back", stage), self.costs[stop - 1].returns / self.links[stage].bytes_per_second
        if self.memory is not None:
            for case, counts in enumerate(self.kept_at_once[rank]):
                yield (
                    ("memory", rank, case),
                    (state + counts.get(stage, 0) * kept) / max(self.memory[rank], 1),
                )

    def times(self, counts: Sequence[int]) -> StageTimes:
        """Return what a split takes, as a schedule is run on."""
        bounds = list(pairwise([0, *accumulate(counts)]))
        parts = [self.costs[start:stop] for start, stop in bounds]
        return StageTimes(
            forwards=[sum(cost.forward_seconds for cost in part) for part in parts],
            backwards=[sum(cost.backward_seconds for cost in part) for part in parts],
            kept=[self.sizes(*part)[2] for part in bounds],
            sends=[part[-1].sends for part in parts[:-1]],
            returns=[part[-1].returns for part in parts[:-1]],
            links=self.links,
        )

    def timeline(self, counts: Sequence[int]) -> PipelineTimeline:
        """Run the schedule on a split."""
        return simulate(self.schedule, self.times(counts), self.speeds)

    @cached_property
    def tries(self) -> int:
        """How many splits can be run through the schedule."""
        return max(TRIED // sum(map(len, self.schedule.rows)), 30)

    def slowest(self, counts: Sequence[int]) -> float:
        """Return the seconds that the slowest stage or link takes for one micro-batch."""
        bounds = enumerate(pairwise([0, *accumulate(counts)]))
        return max(
            load
            for stage, part in bounds
            for key, load in self.loads(stage, *part)
            if key[0] != "memory"
        )

    def price(self, counts: Sequence[int]) -> tuple[float, float]:
        """Return what makes one split better than another: the time through the schedule, to a
        thousandth, and the slowest stage.
        """
        return float(f"{self.timeline(counts).makespan:.4g}"), self.slowest(counts)

    def fits(self, counts: Sequence[int]) -> bool:
        """Whether no worker needs more memory than it has."""
        return self.memory is None or all(
            need <= have for need, have in zip(self.memory_bytes(counts), self.memory, strict=True)
        )

    def memory_bytes(self, counts: Sequence[int]) -> list[float]:
        """Return the bytes that each worker needs at most, for parameters, gradients, the
        optimizer and activations.
        """
        starts = [0, *accumulate(counts)]
        needed = list(self.timeline(counts).kept_bytes)
        for stage, (start, stop) in enumerate(pairwise(starts)):
            needed[self.schedule.placed[stage]] += self.sizes(start, stop)[1]
        return needed


def best_split(problem: SplitProblem) -> list[int]:
    """Return how many layers each stage has, so that the schedule takes the least time within the
    memory of all workers.

    Of those that take as long it is the one whose slowest stage is fastest. UsageError where no
    split fits into the memory.
    """
    start = fastest_slowest(problem)
    if start is None:
        raise UsageError(_explain_memory(problem, problem.memory or ()))
    layers, stages = len(problem.costs), problem.schedule.stages
    if comb(layers - 1, stages - 1) <= problem.tries:
        return min(
            (counts for counts in all_splits(layers, stages) if problem.fits(counts)),
            key=problem.price,
        )
    even = even_split(layers, stages)
    return _improve(problem, min([start, even], key=problem.price) if problem.fits(even) else start)


def _improve(problem: SplitProblem, counts: list[int]) -> list[int]:
    """Move one layer from a stage to another as long as that makes the split better."""
    best, tried = problem.price(counts), 0
    while tried < problem.tries:
        before = counts
        for source, target in (
            (source, target)
            for source in range(len(counts))
            for target in range(len(counts))
            if source != target
        ):
            moved = list(counts)
            moved[source] -= 1
            moved[target] += 1
            if moved[source] and tried < problem.tries and problem.fits(moved):
                tried += 1
                if (price := problem.price(moved)) < best:
                    counts, best = moved, price
        if counts is before:
            break
    return counts


def all_splits(layers: int, stages: int) -> Iterator[list[int]]:
    """Yield all ways to deal layers to stages."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield [stop - start for start, stop in pairwise([0, *cuts, layers])]


def even_split(layers: int, stages: int) -> list[int]:
    """Return how many layers each stage has if all have as many, the first one more where they
    can't.
    """
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def check_split(counts: Sequence[int], layers: Sequence[str], stages: int) -> list[int]:
    """Return a split that somebody has written; UsageError where it is none of these layers and
    stages.
    """
    given = list(counts)
    if len(given) != stages or sum(given) != len(layers) or min(given) < 1:
        raise UsageError(
            f"split={given} doesn't deal {counted(len(layers), 'layer')} to "
            f"{counted(stages, 'stage')}: "
            f"it needs {stages} numbers above 0 with the sum {len(layers)}, such as "
            f"{even_split(len(layers), stages)}"
        )
    return given


def _explain_memory(problem: SplitProblem, memory: Sequence[float]) -> str:
    counts = _Search(problem, minimised=("memory",), bounded=()).best()
    assert counts is not None
    needed = problem.memory_bytes(counts)
    worst = max(range(len(needed)), key=lambda rank: needed[rank] / max(memory[rank], 1))
    kept = problem.timeline(counts).kept_bytes[worst]
    return (
        f"no split of these {len(problem.costs)} layers fits: the one that needs least, {counts}, "
        f"takes {sized(needed[worst])} on worker "
        f"{worst}, which has {sized(memory[worst])} ({sized(needed[worst] - kept)} for parameters, "
        f"gradients and optimizer, {sized(kept)} "
        "for activations); take more stages, smaller micro-batches or activation checkpointing"
    )


class _Partial(NamedTuple):
    """A split of the first layers over the first stages: its largest load so far, and those
    loads to which later stages may add.
    """

    worst: float
    square: float  # of the times, so that of equals the more even comes first
    loads: tuple[float, ...]
    counts: tuple[int, ...]


def fastest_slowest(problem: SplitProblem) -> list[int] | None:
    """Return the split whose slowest stage or link is fastest within the memory of all workers,
    None where none fits.
    """
    return _Search(problem, minimised=("time", "there", "back"), bounded=("memory",)).best()


@dataclass
class _Search:
    """Finds the split whose largest load is least, of those kinds that are `minimised`; none
    that are `bounded` may be above 1.
    """

    problem: SplitProblem
    minimised: tuple[str, ...]
    bounded: tuple[str, ...]
    open: list[tuple[Load, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._stages = stages = self.problem.schedule.stages
        used = [
            [key for key, _ in self.problem.loads(stage, stage, stage + 1)]
            for stage in range(stages)
        ]
        known = dict.fromkeys(key for keys in used for key in keys)
        self.open = [  # after each stage, the loads that were begun and will grow
            tuple(
                key
                for key in known
                if any(key in row for row in used[: at + 1])
                and any(key in row for row in used[at + 1 :])
            )
            for at in range(stages)
        ]

    def best(self) -> list[int] | None:
        """Return the best split, None where none is within the bounds."""
        best, dropped = self._least(NARROW, self._even())
        if dropped:
            best = self._least(WIDE, best.worst if best else self._even())[0] or best
        return list(best.counts) if best else None

    def _even(self) -> float:
        """Return the largest load of the split into as many layers each, which no best one is
        above; infinite where it is out of bounds.
        """
        loads = dict[Load, float]()
        for stage, part in enumerate(
            pairwise([0, *accumulate(even_split(len(self.problem.costs), self._stages))])
        ):
            for key, load in self.problem.loads(stage, *part):
                loads[key] = loads.get(key, 0.0) + load
        within = all(load <= 1 for key, load in loads.items() if key[0] in self.bounded)
        return (
            max(load for key, load in loads.items() if key[0] in self.minimised) * (1 + 1e-9)
            if within
            else float("inf")
        )

    def _least(self, width: int, limit: float) -> tuple[_Partial | None, bool]:
        """Return a split whose largest load is least, none above `limit`, and whether there were
        more partial ones than `width`.
        """
        cells, dropped = {0: [_Partial(0.0, 0.0, (), ())]}, False
        keys: tuple[Load, ...] = ()
        for stage in range(self._stages):
            grown = dict[int, list[_Partial]]()
            for start, partials in cells.items():
                for stop in self._stops(stage, start):
                    added = list(self.problem.loads(stage, start, stop))
                    if any(
                        load > self._limit(key, limit) for key, load in added if key[0] in GROWING
                    ):
                        break
                    made = (self._add(one, keys, added, stage, stop - start) for one in partials)
                    grown.setdefault(stop, []).extend(
                        one for one in made if one is not None and one.worst <= limit
                    )
            cells = {stop: _undominated(partials, width) for stop, partials in grown.items()}
            dropped = dropped or any(len(partials) == width for partials in cells.values())
            keys = self.open[stage]
        done = cells.get(len(self.problem.costs), [])
        return (min(done) if done else None), dropped

    def _limit(self, key: Load, limit: float) -> float:
        return (
            limit if key[0] in self.minimised else 1.0 if key[0] in self.bounded else float("inf")
        )

    def _stops(self, stage: int, start: int) -> Sequence[int]:
        """Return where a stage that begins at the layer `start` can end, so that those after it
        have layers too.
        """
        layers = len(self.problem.costs)
        return (
            [layers]
            if stage == self._stages - 1
            else range(start + 1, layers - self._stages + stage + 2)
        )

    def _add(
        self,
        one: _Partial,
        keys: Sequence[Load],
        added: Sequence[tuple[Load, float]],
        stage: int,
        count: int,
    ) -> _Partial | None:
        loads = dict(zip(keys, one.loads, strict=True))
        worst, square = one.worst, one.square
        for key, load in added:
            before = loads.get(key, 0.0)
            loads[key] = before + load
            if key[0] in self.bounded and loads[key] > 1:
                return None
            if key[0] in self.minimised:
                worst = max(worst, loads[key])
            if key[0] == "time":
                square += loads[key] ** 2 - before**2
        return _Partial(
            worst,
            square,
            tuple(loads.get(key, 0.0) for key in self.open[stage]),
            (*one.counts, count),
        )


def _undominated(partials: Sequence[_Partial], width: int) -> list[_Partial]:
    kept = list[_Partial]()
    for one in sorted(partials):
        # their worst is no more
        if not any(
            all(mine <= its for mine, its in zip(other.loads, one.loads, strict=True))
            for other in kept
        ):
            kept.append(one)
            if len(kept) == width:
                break
    return kept


def _most_at_once(schedule: PipelineSchedule, rank: int) -> list[Mapping[int, int]]:
    """Return how many micro-batches each stage of a rank keeps, at those times that no other
    time is above in all of them.
    """
    held = schedule.held(rank)
    now, seen = dict.fromkeys(held, 0), set[tuple[int, ...]]()
    for action in schedule.rows[rank]:
        now[action.stage] += (action.kind == "forward") - (action.kind in COMPLETES)
        seen.add(tuple(now.values()))
    most = [
        one
        for one in seen
        if not any(
            other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in seen
        )
    ]
    return [dict(zip(held, one, strict=True)) for one in sorted(most)]
