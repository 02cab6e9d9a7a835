"""What a run came to, from what its workers noted down: which samples are in the final weights, and
what each fault cost.

A *turn* is one worker's part in one attempt at a step. A step may be tried several times: dealt
again to the living (paceline), computed again after a checkpoint was read (torchrun), not committed
(torchft). The last attempt that was taken is the one in the final weights: its turns *survive*.

    step 7, attempt 0    A ####......         killed: no second line
                         B ##########  not taken, or rolled back later
                         C ##########                             all three: in vain
    step 7, attempt 1    B ##########  taken    -> surviving
                         C ##########  taken    -> surviving

*Lost* samples are those of the epoch that no surviving turn had. *Repeated* are those beyond the
first time that surviving turns had them. *In vain* are samples whose gradients were computed (or
begun) by turns that didn't survive: most of these were computed again.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

# steps in a row that all workers take part in: a run is steady again from the first of them
STEADY = 5


@dataclass
class Turn:
    """One worker's part in one attempt at a step; `began` and `ended` are moments (seconds of
    the machine's monotonic clock).
    """

    worker: str  # the process
    rank: int
    step: int
    ids: tuple[int, ...]
    began: float
    attempt: int | None = None  # None: not known when the turn began, and it never ended
    ended: float = math.inf  # it never did: the process was killed
    size: int = 0  # workers whose gradients were in the mean
    taken: bool = False  # the optimizer stepped
    counted: bool = False  # this worker's gradients were in the mean


class Notes:
    """The turns of all workers of a run, as far as they are written."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._by_worker: dict[str, list[Turn]] = defaultdict(list)

    @property
    def turns(self) -> list[Turn]:
        """All of them."""
        return [turn for turns in self._by_worker.values() for turn in turns]

    @property
    def latest(self) -> dict[str, Turn]:
        """The last turn of each worker."""
        return {worker: turns[-1] for worker, turns in self._by_worker.items() if turns}

    def poll(self) -> None:
        """Read on; a line that isn't whole yet is left for the next time."""
        for path in sorted(self._folder.glob("turns-*")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                whole, newline, _ = file.read().rpartition(b"\n")
            self._read[path] = self._read.get(path, 0) + len(whole) + len(newline)
            worker = path.name.removeprefix("turns-")
            for line in whole.splitlines():
                note(self._by_worker[worker], worker, json.loads(line))


def note(turns: list[Turn], worker: str, line: dict[str, Any]) -> None:
    """Take one line of a worker's file in (`Journal` in task.py writes them).

    Who tries a step again hadn't taken it.
    """
    if "ids" in line:
        if turns and turns[-1].step == line["step"]:
            turns[-1].taken = False
        turns.append(
            Turn(
                worker, line["rank"], line["step"], tuple(line["ids"]), line["at"], line["attempt"]
            )
        )
    else:
        turn = turns[-1]
        turn.ended, turn.attempt, turn.size = line["at"], line["attempt"], line["size"]
        turn.taken, turn.counted = line["taken"], line["counted"]


def surviving(turns: Iterable[Turn]) -> dict[int, list[Turn]]:
    """Of each step, the turns whose gradients are in the final weights.

    A worker that was killed in a step which the others took left no second line; it counts where
    the mean was over more than are left.
    """
    tried: dict[int, list[Turn]] = defaultdict(list)
    for turn in turns:
        tried[turn.step].append(turn)
    kept = {}
    for step, attempts in sorted(tried.items()):
        if not any(turn.taken for turn in attempts):
            continue
        last = max(turn.attempt or 0 for turn in attempts if turn.taken)
        size = max(turn.size for turn in attempts if turn.taken and turn.attempt == last)
        counted = [turn for turn in attempts if turn.counted and turn.attempt == last]
        killed = [
            turn for turn in attempts if turn.ended == math.inf and turn.attempt in (None, last)
        ]
        killed.sort(key=lambda turn: turn.began, reverse=True)
        kept[step] = counted + killed[: max(0, size - len(counted))]
    return kept


class Samples(NamedTuple):
    """Of a whole run, in samples."""

    lost: int
    repeated: int
    vain: int


def samples(turns: Sequence[Turn], epoch: int) -> Samples:
    """What became of the samples 0 ... epoch - 1."""
    had = Counter(
        sample for kept in surviving(turns).values() for turn in kept for sample in turn.ids
    )
    strangers = sorted(set(had) - set(range(epoch)))
    assert not strangers, f"samples {strangers[:3]} are not of this epoch"
    computed = sum(len(turn.ids) for turn in turns)
    return Samples(epoch - len(had), had.total() - len(had), computed - had.total())


class Cost(NamedTuple):
    """Of one fault.

    `still`: seconds until a step that nobody had taken before was taken, beyond those of a usual
    step. `seconds`: until all workers take part again, beyond what as many samples usually take.
    `back`: steps that were rolled back.
    """

    still: float
    seconds: float
    back: int


def moments(turns: Sequence[Turn]) -> dict[int, float]:
    """When each surviving step was taken by the last of its workers."""
    kept = surviving(turns)
    return {step: max(turn.ended for turn in turns if turn.taken) for step, turns in kept.items()}


def usual(turns: Sequence[Turn], workers: int) -> float:
    """The median seconds from one step to the next, where all workers take part in both."""
    full, taken = whole(turns, workers), moments(turns)
    return statistics.median(
        taken[b] - taken[a] for a, b in pairwise(sorted(taken)) if a in full and b in full
    )


def whole(turns: Sequence[Turn], workers: int) -> set[int]:
    """Surviving steps that all workers take part in."""
    return {step for step, kept in surviving(turns).items() if len(kept) == workers}


def costs(turns: Sequence[Turn], kills: Sequence[float], workers: int) -> list[Cost]:
    """What each fault cost, given the moments of the kills: told from what was noted down until the
    next one, which may undo more.

    Usual are the steps from the kill before to the one after, as other work on the machine comes
    and goes.
    """
    kept = surviving(turns)
    batch = statistics.median(
        sum(len(turn.ids) for turn in kept[step]) for step in whole(turns, workers)
    )
    found = []
    for before, kill, after in zip(
        [-math.inf, *kills], kills, [*kills[1:], math.inf], strict=False
    ):
        known = [turn for turn in turns if turn.ended <= after]
        each = usual([turn for turn in known if turn.began > before], workers)
        found.append(cost(known, kill, workers, each, batch))
    return found


def cost(turns: Sequence[Turn], kill: float, workers: int, each: float, batch: float) -> Cost:
    """What one fault cost, where a usual step takes `each` seconds for `batch` samples."""
    full, taken, kept = whole(turns, workers), moments(turns), surviving(turns)
    highest, left_off = max(
        (turn.step, turn.ended) for turn in turns if turn.taken and turn.ended <= kill
    )
    after = [step for step in taken if step > highest]
    steady = (
        step for step in after if full.issuperset(set(range(step, step + STEADY)) & taken.keys())
    )
    again = min(steady, default=max(after))
    trained = sum(len(turn.ids) for step in after if step <= again for turn in kept[step])
    still, seconds = (
        taken[min(after)] - left_off - each,
        taken[again] - left_off - trained / batch * each,
    )
    return Cost(still, seconds, rolled_back(turns, kill))


def rolled_back(turns: Sequence[Turn], kill: float) -> int:
    """Steps taken before a fault that were taken again after it."""
    first: dict[int, float] = defaultdict(lambda: math.inf)
    for turn in turns:
        if turn.taken:
            first[turn.step] = min(first[turn.step], turn.ended)
    return sum(
        1
        for step, kept in surviving(turns).items()
        if first[step] <= kill < min(turn.began for turn in kept)
    )
