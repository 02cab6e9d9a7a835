"""Reconciles a run after a loss, where workers are not in lockstep: from the reports of the living and of the servers.

    workers   clock, pieces taken and not done, what was left over     --+
    servers   steps made, samples in them, gradients of each worker    --+-->  RecoveryState: clocks over the living, and samples to deal

All of a part of an epoch that is neither in a step, nor under way with one of the living, nor dropped for good, is dealt again. Nothing
here waits or sends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack

from paceline.server.journal import Part, StepJournal
from paceline.server.spans import Rows, SampleSpan, SampleSpans

NONE: Part = (-1, -1)


@dataclass
class WorkerReport:
    """The report of one worker on itself."""

    part: Part = NONE  # of an epoch, that it has begun last
    times: int = 0  # how often it has gone on with that, when all had come together
    open: bool = False  # that is under way
    left: bool = False  # it takes no more pieces of it
    clock: int = 0
    held: bool = False  # it may not begin its next turn yet, as far as it knows
    taken: Rows = field(default_factory=list)  # pieces whose turns are not over, the oldest first
    carried: Rows = field(default_factory=list)  # whose turns are, and whose gradients are in no step yet
    stopped: bool = False  # this worker wants all to stop
    paused: bool = False  # it waits for all to have stopped taking

    @classmethod
    def load(cls, fields: Mapping[str, Any]) -> WorkerReport:
        """Read what `asdict` gave, perhaps through JSON."""
        return cls(**{**fields, "part": (fields["part"][0], fields["part"][1])})


@dataclass(frozen=True)
class RecoveryState:
    """The state from which a scheduler resumes. `gathers`: steps are made by all that have come, and not by the first.

    Lists with an entry for each optimizer: `steps` that were made, and `gradients` of each worker that are in them or were left out.
    """

    part: Part
    times: int
    sizes: Sequence[int]
    todo: Sequence[SampleSpan]  # to be dealt
    active: Sequence[int]  # workers that have turns to take; the others may end one, or ask again whether there is anything
    under_way: Mapping[int, Sequence[SampleSpan]]  # by worker: its pieces, the oldest first
    clocks: Mapping[int, int]
    held: Sequence[int]  # workers that may not begin their next turn yet
    paused: Sequence[int]  # workers that have stopped taking
    stopped: bool
    steps: Sequence[int]
    gradients: Sequence[Mapping[int, int]]
    gathers: bool
    dropped: Sequence[tuple[int, SampleSpan]]  # for good, with their epochs

    def dump(self) -> bytes:
        """Write as bytes that `load` reads."""
        packed: bytes = msgpack.packb(asdict(self))
        return packed

    @classmethod
    def load(cls, packed: bytes) -> RecoveryState:
        """Read what `dump` has written."""
        fields = msgpack.unpackb(packed, strict_map_key=False)
        fields["part"] = (fields["part"][0], fields["part"][1])
        fields["todo"] = [SampleSpan(*piece) for piece in fields["todo"]]
        fields["under_way"] = {worker: [SampleSpan(*piece) for piece in found] for worker, found in fields["under_way"].items()}
        fields["dropped"] = [(epoch, SampleSpan(*piece)) for epoch, piece in fields["dropped"]]
        return cls(**fields)

    @property
    def nobodys(self) -> int:
        """Number of samples that were to be dealt again, where no worker takes any more."""
        return 0 if self.active or self.stopped else sum(piece.stop - piece.start for piece in self.todo)


def latest(reports: Mapping[int, WorkerReport]) -> tuple[Part, int]:
    """Return the latest part of an epoch that any worker has begun, and all begin; and how often it was resumed."""
    return max(((report.part, report.times) for report in reports.values()), default=(NONE, 0))


def stand(
    reports: Mapping[int, WorkerReport], sizes: Sequence[int], journal: StepJournal, steps: Sequence[int], *, gathers: bool
) -> RecoveryState:
    """Reconstruct where the living are, from each one's report in `reports`; `sizes` are those of the batches in the latest part."""
    part, times = latest(reports)
    there = {worker: report for worker, report in reports.items() if (report.part, report.times) == (part, times)}
    inside = {worker: report for worker, report in there.items() if (report.open or report.paused) and not report.left}
    coming = [worker for worker in reports if worker not in there]  # they are cut off in the call before they begin it
    slowest = min((report.clock for report in inside.values()), default=max((report.clock for report in reports.values()), default=0))
    clocks = {worker: slowest if worker in coming else report.clock for worker, report in reports.items()}
    gone = SampleSpans(journal.done.rows() if journal.part == part else ())
    for report in reports.values():
        gone.add([*report.taken, *report.carried] if report.part == part else ())
    gone.add([batch, start, stop] for epoch, batch, start, stop in journal.dropped if epoch == part[0])
    gradients: list[dict[int, int]] = [{} for _ in steps]
    for (optimizer, worker), number in journal.gradients.items():
        gradients[optimizer][worker] = number
    return RecoveryState(
        part,
        times,
        sizes,
        [SampleSpan(*row) for row in gone.holes(part[1], sizes)],
        [*inside, *coming],
        {worker: [SampleSpan(*row) for row in report.taken] if worker in there else [] for worker, report in reports.items()},
        clocks,
        [worker for worker, report in inside.items() if report.held],
        [worker for worker, report in inside.items() if report.paused],
        any(report.stopped for report in reports.values() if report.part == part),
        steps,
        [{worker: found.get(worker, 0) for worker in reports} for found in gradients],
        gathers,
        [(epoch, SampleSpan(*row)) for epoch, *row in journal.dropped],
    )
