"""Where the time of this worker went, apart from its steps: start, checkpoints, recovery.

    run begins                                   steps                                  run ends
    |-- start --|-- data compute exchange wait --| save |-- ... --| recover |-- ... ----|
                            | save |                       | a turn that is dealt again |

Steps are measured by the `StepClock`. What is measured here may be inside a step: a checkpoint in
the loop's body, or a recovery. Then it is noted by which part of the step that time was counted,
so that no time counts twice.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Literal, NamedTuple, ParamSpec, TypeVar

from paceline.cluster.discover import Place
from paceline.loop.turns import TrainingLoop
from paceline.trace import STEP_PARTS

P = ParamSpec("P")
T = TypeVar("T")

LossKind = Literal["checkpoint", "recovery"]


class WorkerSeconds(NamedTuple):
    """The time of one worker, in seconds. It travels as a msgpack list."""

    present: float  # since the run began on this worker
    start: float  # until training began
    checkpoint: float
    recovery: float
    repeated: float  # turns that were dealt again
    # Of PARTS: all steps, without what belongs to the four fields above.
    steps: tuple[float, ...]


class _Pause(NamedTuple):
    """A time inside a turn that doesn't belong to its step."""

    step: int
    waited: float  # seconds of it that the clock of the step counts as waiting
    rest: float
    part: str  # of the step that has the rest


class WorkerTime:
    """Measures the time of this worker apart from its steps.

    Invariant: `_inside` has the seconds of each part of a step that belong to something else.
    Pauses of the turn under way wait in `_pauses`, as the turn may be dealt again.

    Args:
        began: Wall time at which the run began on this worker.
        replaces: Whether this worker takes the place of one that was lost. Its start is a recovery.
        step: Returns the number of steps so far.
        is_in_turn: Tells whether a turn of training is under way.
        waited: Returns the seconds for which this worker has waited so far.
        step_seconds: Returns the seconds of PARTS of all steps.
        open_seconds: Returns those of the step under way.
        clock: Seconds. Default: those of `time.perf_counter`.
    """

    def __init__(
        self,
        began: float,
        *,
        replaces: bool,
        step: Callable[[], int],
        is_in_turn: Callable[[], bool],
        waited: Callable[[], float],
        step_seconds: Callable[[], Mapping[str, float]],
        open_seconds: Callable[[], Mapping[str, float]],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock, self._began = clock, clock() - max(time.time() - began, 0.0)
        self._replaces, self._find_step, self._is_in_turn = replaces, step, is_in_turn
        self._find_waited, self._step_seconds, self._open_seconds = (
            waited,
            step_seconds,
            open_seconds,
        )
        self._training_began: float | None = None
        self._is_measuring = False
        self._lost = defaultdict[str, float](float)
        self._inside = defaultdict[str, float](float)
        self._pauses: list[_Pause] = []
        # Seconds of PARTS of the step under way that belong to turns that were dealt again.
        self._discarded: tuple[int, dict[str, float]] = (-1, {})
        self.heals = 0  # recoveries from losses
        self.heal_seconds = 0.0

    def begin_training(self) -> None:
        """Note that training begins. Only the first call counts."""
        if self._training_began is None:
            self._training_began = self._clock()

    @property
    def began(self) -> float:
        """Wall time at which the run began on this worker."""
        return time.time() - (self._clock() - self._began)

    @property
    def start_seconds(self) -> float:
        """Seconds until training began, or until now."""
        end = self._clock() if self._training_began is None else self._training_began
        return end - self._began

    @contextmanager
    def measure_loss(self, kind: LossKind, part: str = "compute") -> Iterator[None]:
        """Count the time of the `with` block as lost. Blocks inside of it count as a part of it.

        Args:
            kind: What the time is lost to.
            part: Part of a step that the clock counts the time as, except what it counts as
                waiting. "data": also between two turns. Default: "compute".
        """
        if self._is_measuring:
            yield
            return
        self._is_measuring = True
        began, waited, in_turn = self._clock(), self._find_waited(), self._is_in_turn()
        try:
            yield
        finally:
            self._is_measuring = False
            seconds = self._clock() - began
            # Before training everything is part of the start.
            if self._training_began is not None:
                self._lost[kind] += seconds
                if in_turn or part == "data":
                    passed = min(max(self._find_waited() - waited, 0.0), seconds) * in_turn
                    self._pauses.append(_Pause(self._find_step(), passed, seconds - passed, part))

    def measure_healing(self, heal: Callable[P, T]) -> Callable[P, T]:
        """Return a function that recovers as `heal` does, and is measured."""

        def heal_and_measure(*args: P.args, **options: P.kwargs) -> T:
            began = self._clock()
            with self.measure_loss("recovery", "exchange"):
                result = heal(*args, **options)
            self.heals += 1
            self.heal_seconds += self._clock() - began
            return result

        return heal_and_measure

    def discard_turn(self) -> None:
        """Note that the turn under way will be dealt again: what it took is repeated work."""
        step, seconds = self._find_step(), dict(self._open_seconds())
        before = self._discarded[1] if self._discarded[0] == step else {}
        self._discarded = (step, seconds)
        paused = sum(pause.waited + pause.rest for pause in self._pauses if pause.step == step)
        self._pauses = [pause for pause in self._pauses if pause.step != step]
        discarded = {part: seconds[part] - before.get(part, 0.0) for part in seconds}
        for part, value in discarded.items():
            self._inside[part] += value
        self._lost["repeated"] += max(sum(discarded.values()) - paused, 0.0)

    def collect_seconds(self) -> WorkerSeconds:
        """Sum up where the time went so far."""
        steps = self._step_seconds()
        inside = self._inside.copy()
        for pause in self._pauses:
            inside["wait"] += pause.waited
            inside[pause.part] += pause.rest
        start = self.start_seconds
        return WorkerSeconds(
            self._clock() - self._began,
            0.0 if self._replaces else start,
            self._lost["checkpoint"],
            self._lost["recovery"] + (start if self._replaces else 0.0),
            self._lost["repeated"],
            tuple(max(steps[part] - inside[part], 0.0) for part in STEP_PARTS),
        )


def follow_loop(loop: TrainingLoop, place: Place, began: float) -> WorkerTime:
    """Measure the time of a worker beside its training loop.

    Args:
        loop: The loop.
        place: Place of the worker.
        began: Wall time at which the run began on this worker.
    """
    is_restarted = place.job_start is not None and place.job_start.folder is not None
    return WorkerTime(
        began,
        replaces=place.joining or is_restarted,
        step=lambda: loop.steps_made,
        is_in_turn=lambda: loop.leading_turn is not None,
        waited=lambda: loop.context.sent_and_waited()[1],
        step_seconds=lambda: loop.clock.step_seconds,
        open_seconds=loop.clock.read_open_step,
    )
