"""Finds the split of layers into stages with which a pipeline takes least time.

    layers     tokens positions | blocks.0 blocks.1 blocks.2 | blocks.3 blocks.4 norm | head
    counts     2                  3                            3                        1
    stages     0                  1                            2                        3
    workers    0                  1                            0                        1

The slowest of all stages that work at once decides, and every worker has a limit of memory. Here
each of two workers has two stages (interleaved).

First a dynamic programme finds the split whose slowest stage (or link) is fastest. It goes through
the stages, and keeps the best partial split for each number of layers used up. If workers have
several stages that share their memory, it keeps all partial splits that no other one beats in both
time and memory. Then splits are run through the schedule: all of them, or those close to the first.
The one that takes least time is chosen.
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
from paceline.formatting import format_bytes, format_count
from paceline.parallel.pipelining.schedule import COMPLETING_KINDS, PipelineSchedule
from paceline.parallel.pipelining.simulate import PipelineTimeline, StageTimes, simulate_schedule

# Number of partial splits that are kept for each number of layers.
NARROW_SEARCH, WIDE_SEARCH = 4, 32
# Loads that grow with the number of layers in a stage.
GROWING_LOADS = ("time", "memory")
# Simulated actions in the search for the best of several splits: about a second.
SIMULATED_ACTIONS = 60_000

# ("time", stage), ("there", stage), ("back", stage), ("memory", rank, case).
Load = tuple[str | int, ...]


@dataclass(frozen=True)
class LayerCost:
    """What one layer takes for one micro-batch.

    Attributes:
        name: Path of the module.
        forward_seconds: Seconds of its forward on a worker of speed 1.
        backward_seconds: Seconds of its backward on a worker of speed 1.
        parameters: Bytes of its parameters.
        trained: Bytes of those parameters that have gradients.
        kept: Bytes of activations that it makes and keeps for its backward.
        sends: Bytes that would go to the next worker, and be kept there, if a stage ended after it.
        returns: Bytes of gradients that would come back then.
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
    """Layers to be dealt to the stages of a schedule.

    Attributes:
        costs: Costs of all layers, in order.
        schedule: Schedule of the stages.
        speeds: How much faster each worker is than one of speed 1.
        memory: Bytes of each worker. Default: no limits.
        links: Speed of the link between each stage and the next. Default: transfers take no time.
        remembered: Bytes that the optimizer keeps for each byte of a trained parameter: 2 for Adam
            (default), 1 for a momentum.
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
                f"{format_count(len(self.costs), 'layer')} can't fill {stages} stages; "
                "take fewer stages, or name more layers"
            )
        lengths = {"speeds": ranks, "memory": ranks, "links": stages - 1}
        values_by_name: dict[str, Sequence[object] | None] = {
            "speeds": self.speeds,
            "memory": self.memory,
            "links": self.links,
        }
        for name, length in lengths.items():
            values = values_by_name[name]
            if values is not None and len(values) != length:
                raise UsageError(
                    f"{name} has {format_count(len(values), 'value')}; here it needs {length}"
                )
        if not all(0 < speed < float("inf") for speed in self.speeds):
            raise UsageError(f"speeds are {list(self.speeds)}; each has to be above 0")

    def layer_sizes(self, start: int, stop: int) -> tuple[float, float, float]:
        """Seconds, bytes of state and bytes of activations of layers `start` to before `stop`."""
        seconds, state, activations = [line[stop] - line[start] for line in self._sums]
        return seconds, state, activations + (self.costs[start - 1].sends if start else 0)

    @cached_property
    def _sums(self) -> tuple[list[float], list[int], list[int]]:
        """Seconds, bytes of state and bytes of activations of all layers before each one."""
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
        """Bytes of a layer's parameters, their gradients, and the optimizer's state for them."""
        return cost.parameters + round(cost.trained * (1 + self.remembered))

    @cached_property
    def kept_at_once(self) -> list[list[Mapping[int, int]]]:
        """Micro-batches that stages keep at the worst moments, one or several per worker."""
        return [_count_peaks(self.schedule, rank) for rank in range(self.schedule.ranks)]

    def find_loads(self, stage: int, start: int, stop: int) -> Iterator[tuple[Load, float]]:
        """Yield the loads of a stage with these layers: time, links, and its part of a memory."""
        rank = self.schedule.placed[stage]
        seconds, state, activations = self.layer_sizes(start, stop)
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
                    (state + counts.get(stage, 0) * activations) / max(self.memory[rank], 1),
                )

    def stage_times(self, counts: Sequence[int]) -> StageTimes:
        """Times and sizes of a split, to simulate a schedule with."""
        bounds = list(pairwise([0, *accumulate(counts)]))
        parts = [self.costs[start:stop] for start, stop in bounds]
        return StageTimes(
            forwards=[sum(cost.forward_seconds for cost in part) for part in parts],
            backwards=[sum(cost.backward_seconds for cost in part) for part in parts],
            kept=[self.layer_sizes(*part)[2] for part in bounds],
            sends=[part[-1].sends for part in parts[:-1]],
            returns=[part[-1].returns for part in parts[:-1]],
            links=self.links,
        )

    def simulate_split(self, counts: Sequence[int]) -> PipelineTimeline:
        """Simulate the schedule on a split."""
        return simulate_schedule(self.schedule, self.stage_times(counts), self.speeds)

    @cached_property
    def max_tries(self) -> int:
        """Number of splits that can be simulated in the time allowed."""
        return max(SIMULATED_ACTIONS // sum(map(len, self.schedule.rows)), 30)

    def slowest_seconds(self, counts: Sequence[int]) -> float:
        """Seconds that the slowest stage or link takes for one micro-batch."""
        bounds = enumerate(pairwise([0, *accumulate(counts)]))
        return max(
            load
            for stage, part in bounds
            for key, load in self.find_loads(stage, *part)
            if key[0] != "memory"
        )

    def split_price(self, counts: Sequence[int]) -> tuple[float, float]:
        """Sort key of a split: simulated time, rounded to a thousandth, then its slowest stage."""
        return float(f"{self.simulate_split(counts).makespan:.4g}"), self.slowest_seconds(counts)

    def fits_memory(self, counts: Sequence[int]) -> bool:
        """Whether no worker needs more memory than it has."""
        return self.memory is None or all(
            need <= have for need, have in zip(self.memory_bytes(counts), self.memory, strict=True)
        )

    def memory_bytes(self, counts: Sequence[int]) -> list[float]:
        """Bytes that each worker needs at most: parameters, gradients, optimizer, activations."""
        starts = [0, *accumulate(counts)]
        needed = list(self.simulate_split(counts).kept_bytes)
        for stage, (start, stop) in enumerate(pairwise(starts)):
            needed[self.schedule.placed[stage]] += self.layer_sizes(start, stop)[1]
        return needed


def find_best_split(problem: SplitProblem) -> list[int]:
    """Find the number of layers of each stage with which the schedule takes least time.

    Of splits that take equally long, it is the one whose slowest stage is fastest. Raises
    `UsageError` if no split fits into the memory of all workers.
    """
    start = minimise_slowest_stage(problem)
    if start is None:
        raise UsageError(_explain_memory(problem, problem.memory or ()))
    # Few splits are all tried. Of many, go on from the better one of two by moving layers.
    layers, stages = len(problem.costs), problem.schedule.stages
    if comb(layers - 1, stages - 1) <= problem.max_tries:
        return min(
            (counts for counts in list_splits(layers, stages) if problem.fits_memory(counts)),
            key=problem.split_price,
        )
    even = make_even_split(layers, stages)
    return _improve_split(
        problem, min([start, even], key=problem.split_price) if problem.fits_memory(even) else start
    )


def _improve_split(problem: SplitProblem, counts: list[int]) -> list[int]:
    """Move one layer from a stage to another as long as that makes the split better."""
    best, tried = problem.split_price(counts), 0
    while tried < problem.max_tries:
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
            if moved[source] and tried < problem.max_tries and problem.fits_memory(moved):
                tried += 1
                if (price := problem.split_price(moved)) < best:
                    counts, best = moved, price
        if counts is before:
            break
    return counts


def list_splits(layers: int, stages: int) -> Iterator[list[int]]:
    """Yield all ways to deal layers to stages."""
    for cuts in combinations(range(1, layers), stages - 1):
        yield [stop - start for start, stop in pairwise([0, *cuts, layers])]


def make_even_split(layers: int, stages: int) -> list[int]:
    """Deal equally many layers to all stages; the first ones get one more if that's impossible."""
    return [layers // stages + (stage < layers % stages) for stage in range(stages)]


def check_split(counts: Sequence[int], layers: Sequence[str], stages: int) -> list[int]:
    """Check a split that a user has written. Raises `UsageError` if it doesn't fit."""
    split = list(counts)
    if len(split) != stages or sum(split) != len(layers) or min(split) < 1:
        raise UsageError(
            f"split={split} doesn't deal {format_count(len(layers), 'layer')} to "
            f"{format_count(stages, 'stage')}: "
            f"it needs {stages} numbers above 0 with the sum {len(layers)}, such as "
            f"{make_even_split(len(layers), stages)}"
        )
    return split


def _explain_memory(problem: SplitProblem, memory: Sequence[float]) -> str:
    """Explain that no split fits, with the split that needs least memory."""
    counts = _SplitSearch(problem, minimised=("memory",), bounded=()).find_best()
    assert counts is not None
    needed = problem.memory_bytes(counts)
    worst = max(range(len(needed)), key=lambda rank: needed[rank] / max(memory[rank], 1))
    activation_bytes = problem.simulate_split(counts).kept_bytes[worst]
    return (
        f"no split of these {len(problem.costs)} layers fits: the one that needs least, {counts}, "
        f"takes {format_bytes(needed[worst])} on worker {worst}, which has "
        f"{format_bytes(memory[worst])} "
        f"({format_bytes(needed[worst] - activation_bytes)} for parameters, gradients and "
        "optimizer, "
        f"{format_bytes(activation_bytes)} "
        "for activations); take more stages, smaller micro-batches or activation checkpointing"
    )


class _PartialSplit(NamedTuple):
    """A split of the first layers over the first stages.

    `worst` is its largest load so far. `square` is the sum of squares of the times, so that of
    equals the more even one comes first. `loads` are those to which later stages may add.
    """

    worst: float
    square: float
    loads: tuple[float, ...]
    counts: tuple[int, ...]


def minimise_slowest_stage(problem: SplitProblem) -> list[int] | None:
    """Find the split whose slowest stage or link is fastest; None if none fits into memory."""
    return _SplitSearch(
        problem, minimised=("time", "there", "back"), bounded=("memory",)
    ).find_best()


@dataclass
class _SplitSearch:
    """Finds the split whose largest load is least.

    Loads of the kinds in `minimised` count. None of the kinds in `bounded` may be above 1.
    """

    problem: SplitProblem
    minimised: tuple[str, ...]
    bounded: tuple[str, ...]
    open_loads: list[tuple[Load, ...]] = field(init=False)

    def __post_init__(self) -> None:
        self._stages = stages = self.problem.schedule.stages
        used = [
            [key for key, _ in self.problem.find_loads(stage, stage, stage + 1)]
            for stage in range(stages)
        ]
        all_keys = dict.fromkeys(key for keys in used for key in keys)
        # After each stage: the loads that have begun, and will grow with later stages.
        self.open_loads = [
            tuple(
                key
                for key in all_keys
                if any(key in row for row in used[: at + 1])
                and any(key in row for row in used[at + 1 :])
            )
            for at in range(stages)
        ]

    def find_best(self) -> list[int] | None:
        """Find the best split; None if none is within the bounds."""
        # If the narrow search dropped a partial split, a wider one may find something better.
        best, dropped = self._find_least(NARROW_SEARCH, self._even_load())
        if dropped:
            best = (
                self._find_least(WIDE_SEARCH, best.worst if best else self._even_load())[0] or best
            )
        return list(best.counts) if best else None

    def _even_load(self) -> float:
        """Largest load of the even split, a limit for the best one; infinite if out of bounds."""
        loads = dict[Load, float]()
        for stage, part in enumerate(
            pairwise([0, *accumulate(make_even_split(len(self.problem.costs), self._stages))])
        ):
            for key, load in self.problem.find_loads(stage, *part):
                loads[key] = loads.get(key, 0.0) + load
        within = all(load <= 1 for key, load in loads.items() if key[0] in self.bounded)
        return (
            max(load for key, load in loads.items() if key[0] in self.minimised) * (1 + 1e-9)
            if within
            else float("inf")
        )

    def _find_least(self, width: int, limit: float) -> tuple[_PartialSplit | None, bool]:
        """Find a split whose largest load is least and at most `limit`; whether any was dropped."""
        # By number of layers used up: partial splits over the stages so far.
        cells, dropped = {0: [_PartialSplit(0.0, 0.0, (), ())]}, False
        keys: tuple[Load, ...] = ()
        for stage in range(self._stages):
            grown = dict[int, list[_PartialSplit]]()
            for start, partials in cells.items():
                for stop in self._possible_stops(stage, start):
                    added = list(self.problem.find_loads(stage, start, stop))
                    # More layers would only add to these loads.
                    if any(
                        load > self._limit_load(key, limit)
                        for key, load in added
                        if key[0] in GROWING_LOADS
                    ):
                        break
                    extended = (
                        self._extend_partial(one, keys, added, stage, stop - start)
                        for one in partials
                    )
                    grown.setdefault(stop, []).extend(
                        one for one in extended if one is not None and one.worst <= limit
                    )
            cells = {stop: _keep_undominated(partials, width) for stop, partials in grown.items()}
            dropped = dropped or any(len(partials) == width for partials in cells.values())
            keys = self.open_loads[stage]
        done = cells.get(len(self.problem.costs), [])
        return (min(done) if done else None), dropped

    def _limit_load(self, key: Load, limit: float) -> float:
        return (
            limit if key[0] in self.minimised else 1.0 if key[0] in self.bounded else float("inf")
        )

    def _possible_stops(self, stage: int, start: int) -> Sequence[int]:
        """Ends of a stage that begins at layer `start`, such that later stages have layers, too."""
        layers = len(self.problem.costs)
        return (
            [layers]
            if stage == self._stages - 1
            else range(start + 1, layers - self._stages + stage + 2)
        )

    def _extend_partial(
        self,
        one: _PartialSplit,
        keys: Sequence[Load],
        added: Sequence[tuple[Load, float]],
        stage: int,
        count: int,
    ) -> _PartialSplit | None:
        """Extend a partial split by a stage of `count` layers; None if it goes out of bounds."""
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
        return _PartialSplit(
            worst,
            square,
            tuple(loads.get(key, 0.0) for key in self.open_loads[stage]),
            (*one.counts, count),
        )


def _keep_undominated(partials: Sequence[_PartialSplit], width: int) -> list[_PartialSplit]:
    """Keep the `width` best partial splits that no better one beats in all open loads."""
    best = list[_PartialSplit]()
    for one in sorted(partials):
        # Those before it in this order have no larger worst load.
        if not any(
            all(load <= other for load, other in zip(better.loads, one.loads, strict=True))
            for better in best
        ):
            best.append(one)
            if len(best) == width:
                break
    return best


def _count_peaks(schedule: PipelineSchedule, rank: int) -> list[Mapping[int, int]]:
    """Count the micro-batches that stages of a rank keep, at all moments that no other exceeds.

    A moment is left out if at another one all of the rank's stages keep at least as many.
    """
    stages = schedule.stages_of_rank(rank)
    now, seen = dict.fromkeys(stages, 0), set[tuple[int, ...]]()
    for action in schedule.rows[rank]:
        now[action.stage] += (action.kind == "forward") - (action.kind in COMPLETING_KINDS)
        seen.add(tuple(now.values()))
    most = [
        one
        for one in seen
        if not any(
            other != one and all(a >= b for a, b in zip(other, one, strict=True)) for other in seen
        )
    ]
    return [dict(zip(stages, one, strict=True)) for one in sorted(most)]
