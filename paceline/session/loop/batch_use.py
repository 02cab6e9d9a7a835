"""Checks that batches are used in the turns that they were lent for, as a turn has the weight of its own batch, and may be a ghost.

for x, y in loader:  use(x)      lent 0, used | lent 1, used | lent 2, used                  right
a prefetcher of the script       lent 0       | lent 1, 0 is used | lent 2, 1 is used        each with the next one's weight
itertools.cycle(loader), a list  lent 0, used | lent 1, used | the end | 0 is used           each counts alike, whatever its share
a buffer of batches, replayed    lent 0, used | lent 1, used, 0 is used                      as the one that is lent

A script may use a copy of a batch, whose turn can't be known. If the batch before wasn't used and is still held, either a prefetcher uses
it now, or the script skipped it and keeps it to look at. A script that does so in two turns in a row is taken for a prefetcher.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch.utils.data import IterableDataset

from paceline.data.batch_lifetime import alive, memory, places
from paceline.data.spec import LoaderSpec
from paceline.errors import UsageError
from paceline.session.loop.iteration import LoaderProgress
from paceline.sync.context import SyncContext

MOST = 100  # batches of an epoch remembered at most while the script keeps something of them, as each turn goes through all of them
AHEAD = (
    "a batch is trained on in the turn after its own. A loader weights each batch in its own turn, as workers have unequal shares of it "
    "or none, so this one would count as the next. Write `for x, y in loader:` and leave reading ahead to "
    "DataLoader(num_workers=..., prefetch_factor=...); loader.peek() gives the next batch early"
)
AGAIN = (
    "a batch of an epoch that is over is trained on again (out of a list of batches, or by itertools.cycle). A loader weights each batch "
    "in its own turn, as workers have unequal shares of it or none, and outside of it all workers would count alike. Iterate the loader "
    "anew in each epoch: `for x, y in loader:`, with DataLoader(num_workers=..., prefetch_factor=...) to read ahead; loader.peek() gives "
    "the next batch early"
)
KEPT = (
    "a batch that was kept is trained on again in a later turn. A loader weights each batch in its own turn, as workers have unequal "
    "shares of it or none, so this one would count as that turn's own. Let the batch size be a multiple of the number of workers, with "
    "drop_last=True; or give what is to be trained on again a data set and a prepared DataLoader of its own"
)
EARLY = (
    "batches are trained on in the turn after their own: they count right, as all workers have equal shares of all of them, but run.steps "
    "and checkpoints made inside of the loop are a batch ahead. `for x, y in loader:` with DataLoader(num_workers=...) reads ahead, too"
)
OUTSIDE = (
    "a backward outside of the loop over a prepared loader: its gradients are the plain mean over workers, each of which counts alike, "
    "whatever its share of the samples"
)


class BatchUse:
    """Follows the training loaders of a run. `open_`: those with a turn under way; `progresses`: all there have been, by id."""

    def __init__(self, context: SyncContext, open_: list[LoaderProgress], progresses: dict[int, LoaderProgress]) -> None:
        self._context, self._open, self._progresses = context, open_, progresses
        self.fresh = False  # whether the next use is to be looked at
        self._said = False

    def epoch_begins(self, progress: LoaderProgress) -> None:
        """Begin an epoch of a training loader."""
        progress.left = []
        progress.skipped = progress.doubted = progress.reached = progress.over = False

    def ends(self, progress: LoaderProgress, index: int) -> None:
        """End turn number `index` of an epoch of a training loader."""
        lent = progress.loader.lent
        progress.doubted = progress.doubted and progress.used
        progress.left = [] if progress.used and not progress.doubted else lent
        progress.skipped = progress.skipped or (index == 0 and not progress.used and bool(lent) and not alive(lent))
        progress.reached = progress.reached or progress.used
        early = list(filter(alive, progress.early))
        if lent and len(early) < MOST:
            early.append(lent)
        progress.early = early

    def epoch_ends(self, progress: LoaderProgress) -> None:
        """End an epoch of a training loader, whose last batch may be used again."""
        if progress.early and progress.early[-1] is progress.loader.lent:
            progress.early.pop()
        progress.left, progress.over, self.fresh = [], True, True

    def use(self, inputs: Iterable[Any] | None) -> None:
        """Check what a model is run on to be trained; None: a backward begins. Raises `UsageError` for a batch of another turn."""
        under_way = [progress for progress in self._open if progress.turn is not None and progress.turn.train]
        over = [progress for progress in self._progresses.values() if progress.over and progress.early and progress.turn is None]
        suspects = [progress for progress in under_way if progress.left and not progress.used]
        keeping = [progress for progress in under_way if any(map(alive, progress.early))]
        given = set(memory(inputs)) if inputs is not None and (over or suspects or keeping) else set()
        for progress in over:
            self._check_over(progress, given)
        for progress in suspects:
            self._check_ahead(progress, given)
        for progress in keeping:
            self._check_kept(progress, given)
        for progress in under_way:
            progress.used = True
        self.fresh = not under_way or bool(keeping) or any(progress.early for progress in over)
        if not under_way and inputs is None:
            self._check_outside()

    def _check_ahead(self, progress: LoaderProgress, given: Collection[int]) -> None:
        loader, doubted = progress.loader, progress.doubted
        progress.doubted = places(loader.lent).isdisjoint(given) and alive(progress.left)  # else it is the batch of this turn
        if progress.doubted and (doubted or any(not places(batch).isdisjoint(given) for batch in (progress.left, *progress.early))):
            self._refuse(progress, AHEAD)
            loader.terms.announce(EARLY)

    def _check_kept(self, progress: LoaderProgress, given: Collection[int]) -> None:
        if not given or not places(progress.loader.lent).isdisjoint(given):
            return  # seen first, as scripts that keep the labels of an epoch have many batches to go through
        if any(not places(batch).isdisjoint(given) for batch in progress.early):
            self._refuse(progress, KEPT)

    def _check_over(self, progress: LoaderProgress, given: set[int]) -> None:
        progress.early = [batch for batch in progress.early if alive(batch)]
        if given and any(not places(batch).isdisjoint(given) for batch in progress.early):
            self._refuse(progress, AGAIN)

    def _check_outside(self) -> None:
        over = [progress for progress in self._progresses.values() if progress.loader.terms.training and not progress.loader.terms.alone]
        for progress in over:
            if progress.over and (progress.skipped or progress.doubted) and progress.reached:
                self._refuse(progress, AHEAD)  # its first batch was kept for later, as something else
        if over and not self._said:
            self._said = True
            self._context.announce(OUTSIDE)

    def _refuse(self, progress: LoaderProgress, why: str) -> None:
        if self._context.agreement.recovery is not None or not even(progress.loader.terms):
            raise UsageError(why)


def even(terms: LoaderSpec) -> bool:
    """Whether all workers have equal shares of all batches, in one piece, so that a batch weighs the same in every turn."""
    loader = terms.loader
    batch = loader.batch_size
    if batch is None or terms.weigh is not None or terms.loss != "mean" or terms.accumulate > 1 or len(set(terms.shares(batch))) > 1:
        return False
    if isinstance(loader.dataset, IterableDataset):
        return False
    try:
        return loader.drop_last or len(loader.sampler) % batch == 0  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a sampler without a length
        return False
