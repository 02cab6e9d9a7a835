"""Progress of a loader through an epoch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

from paceline.data.loader import ShareLoader, Turn
from paceline.errors import PacelineError, UsageError
from paceline.loop.ghost import SavedBuffers
from paceline.loop.idle_epochs import EpochActivity
from paceline.loop.out_of_memory import is_out_of_memory

MEMORY_HINT = (
    'Memory ran out. run.step(model, x, y, loss=..., micro_batches="auto") takes this worker\'s '
    "part of a batch in pieces that fit; "
    "in a loop of your own put all passes but the last into run.no_sync()"
)


@dataclass(slots=True)
class LoaderProgress:
    """One loader under way: its open turn, and the calls at which turn and epoch began."""

    loader: ShareLoader
    epoch_at: int = 0
    turn_at: int = 0
    turn: Turn | None = None
    saved_buffers: SavedBuffers = field(default_factory=list)  # as they were before a ghost's turn
    # passes that the turn around this one had exchanged, and whether it was silenced
    outer_turn: tuple[int, bool] = (0, False)
    rows_gathered: int = 0  # how many times rows of this batch were gathered
    # calls of gather in this turn, with those answered when the batch was dealt before
    row_requests: int = 0
    activity: EpochActivity = field(init=False)
    discarded: bool = False  # its rows died with a worker: it is dealt again

    def __post_init__(self) -> None:
        self.activity = EpochActivity(self.loader)

    def begin_epoch(self, moment: int) -> None:
        """Begin an epoch at this moment, by the count of `OpenTurns`."""
        self.epoch_at = moment

    def needs_rows(self) -> bool:
        """Count a request for rows of this batch; return whether they must still be gathered."""
        self.row_requests += 1
        return self.row_requests > self.rows_gathered and not self.discarded

    def keep_rows(self) -> None:
        """Note that all workers have the rows of this batch."""
        self.rows_gathered = self.row_requests

    def forget_rows(self, *, failed: bool) -> None:
        """End a turn; rows of one that has failed are not gathered again when it comes again."""
        self.discarded = False
        if not failed:
            self.rows_gathered = 0

    def discard(self) -> None:
        """Discard this turn, so that its batch is dealt again."""
        self.discarded = True


def find_innermost_turn(progresses: list[LoaderProgress]) -> Turn | None:
    """Return the innermost turn under way, or None.

    A turn left by `break` counts only where no other is under way.
    """
    if len(progresses) < 2:
        return progresses[0].turn if progresses else None
    return next(
        (progress for progress in reversed(progresses) if progress.loader.under_way), progresses[-1]
    ).turn


def explain_error(error: BaseException | None, progresses: list[LoaderProgress]) -> None:
    """Add a hint to an error of the script: memory ran out, or the batch had no rows."""
    if (
        is_out_of_memory(error)
        and error is not None
        and any(progress.turn is not None and progress.turn.train for progress in progresses)
    ):
        error.add_note(MEMORY_HINT)
    empty = next(
        (
            progress
            for progress in progresses
            if progress.turn is not None
            and progress.turn.share == 0
            and not progress.loader.terms.uses_ghosts
        ),
        None,
    )
    if (
        empty is None
        or empty.turn is None
        or not isinstance(error, Exception)
        or isinstance(error, PacelineError)
    ):
        return
    error.add_note(
        "This worker's share of the evaluation batch was empty: "
        f"{empty.turn.global_batch} samples for "
        f"{empty.loader.terms.agreement.group.size} workers, so its tensors have 0 rows, of which "
        "x.view(x.size(0), -1), max() and the "
        "like can't be had. Write x.flatten(1); or say run.prepare(loader, train=False, pad=True), "
        "and such a worker gets the batch's "
        "first sample, which run.gather, run.mean and run.log leave out"
    )


def worker_parts(progress: LoaderProgress) -> tuple[float, ...]:
    """Part of the present batch that each worker has; only this worker's if batches are weighed."""
    turn, terms = progress.turn, progress.loader.terms
    assert turn is not None
    if terms.weigh is not None or terms.shard == "mine" or terms.deals_by_cost:
        return (turn.scale,)
    return tuple(share / turn.global_batch for share in terms.shares(turn.global_batch))


def check_side_by_side(progresses: list[LoaderProgress]) -> None:
    """Raise `UsageError` if two training loaders that run side by side deal differently.

    Shares weight a worker's part of one loss, and two loaders would give two weights.
    """
    side = [
        progress
        for progress in progresses
        if progress.loader.terms.training and progress.loader.under_way
    ]
    for one, other in itertools.combinations(side, 2):
        # neither loop is inside a turn of the other
        beside = one.epoch_at < other.turn_at and other.epoch_at < one.turn_at
        if beside and worker_parts(one) != worker_parts(other):
            raise UsageError(
                "two training loaders are under way at once, and deal their batches differently: "
                f"{worker_parts(one)} and {worker_parts(other)} "
                "of each batch to the workers, so one loss can't be weighted by both; "
                "let both batch sizes be multiples of the number "
                "of workers, with drop_last=True, or finish one loop before the other"
            )
