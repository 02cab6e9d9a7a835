"""Checks that each batch is used in its own turn, because a turn has the weight of its batch.

for x, y in loader:  use(x)      lent 0, used | lent 1, used | lent 2, used              right
a prefetcher of the script       lent 0       | lent 1, 0 is used | lent 2, 1 is used    each has
                                                                       the weight of the next one
itertools.cycle(loader), a list  lent 0, used | lent 1, used | the end | 0 is used       each has
                                                               equal weight, whatever its share
a buffer of batches, replayed    lent 0, used | lent 1, used, 0 is used                  0 has the
                                                                       weight of the lent one

A script may use a copy of a batch, and the turn of a copy can't be known. If the batch before
wasn't used and is still held, either a prefetcher uses it now, or the script skipped it and keeps
it to look at. A script that does so in two turns in a row is taken for a prefetcher.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import IterableDataset

from paceline.data.batch_lifetime import LentTensors, held_addresses, is_alive, storage_addresses
from paceline.data.loader import ShareLoader
from paceline.data.spec import LoaderSpec
from paceline.errors import UsageError
from paceline.loop.iteration import LoaderProgress
from paceline.sync.context import SyncContext

# batches of an epoch remembered at most while the script keeps something of them, as each turn goes
# through all of them
MOST_KEPT = 100
USED_LATE = (
    "a batch is trained on in the turn after its own. A loader weights each batch in its own turn, "
    "as workers have unequal shares of it "
    "or none, so this one would count as the next. Write `for x, "
    "y in loader:` and leave reading ahead to "
    "DataLoader(num_workers=..., prefetch_factor=...); loader.peek() gives the next batch early"
)
USED_AFTER_EPOCH = (
    "a batch of an epoch that is over is trained on again (out of a list of batches, or by "
    "itertools.cycle). A loader weights each batch "
    "in its own turn, as workers have unequal shares of it or none, and outside of it all workers "
    "would count alike. Iterate the loader "
    "anew in each epoch: `for x, y in loader:`, with DataLoader(num_workers=..., "
    "prefetch_factor=...) to read ahead; loader.peek() gives "
    "the next batch early"
)
USED_TWICE = (
    "a batch that was kept is trained on again in a later turn. A loader weights each batch in its "
    "own turn, as workers have unequal "
    "shares of it or none, so this one would count as that turn's own. "
    "Let the batch size be a multiple of the number of workers, with "
    "drop_last=True; or give what is to be trained on again a data "
    "set and a prepared DataLoader of its own"
)
USED_LATE_ALIKE = (
    "batches are trained on in the turn after their own: they count right, as all workers have "
    "equal shares of all of them, but run.steps "
    "and checkpoints made inside of the loop are a batch ahead. `for x, y in loader:` with "
    "DataLoader(num_workers=...) reads ahead, too"
)
USED_OUTSIDE_LOOP = (
    "a backward outside of the loop over a prepared loader: its gradients are the plain mean over "
    "workers, each of which counts alike, whatever its share of the samples"
)


@dataclass(slots=True)
class LentBatches:
    """The batches that one training loader has lent in an epoch."""

    progress: LoaderProgress
    used: bool = False  # a model was run to be trained in this turn, or a backward
    # the batch of the turn before, if it was not used there
    left: LentTensors = field(default_factory=list)
    # batches of earlier turns that the script still held
    early: list[LentTensors] = field(default_factory=list)
    # the first turn of the epoch used nothing, and the script dropped its batch
    skipped: bool = False
    doubted: bool = False  # what was used last may have been the batch of the turn before
    reached: bool = False  # something was used in a turn of the epoch
    over: bool = False  # the epoch has ended

    @property
    def loader(self) -> ShareLoader:
        """The loader that lends them."""
        return self.progress.loader


class BatchUse:
    """Follows the training loaders of a run."""

    def __init__(self, context: SyncContext) -> None:
        self._context = context
        self._by_progress: dict[int, LentBatches] = {}  # by id of the progress of their loader
        self.due = False  # whether the next use is to be looked at
        self._announced = False

    def begin_epoch(self, progress: LoaderProgress) -> None:
        """Begin an epoch of a training loader."""
        batches = self._by_progress.setdefault(id(progress), LentBatches(progress))
        batches.left, self.due = [], True
        batches.used = batches.skipped = batches.doubted = batches.reached = batches.over = False

    def end_turn(self, progress: LoaderProgress, index: int) -> None:
        """End turn number `index` of an epoch of a training loader."""
        batches, lent = self._by_progress[id(progress)], progress.loader.lent_batch
        used = batches.used
        batches.doubted = batches.doubted and used
        batches.left = [] if used and not batches.doubted else lent
        batches.skipped = batches.skipped or (
            index == 0 and not used and bool(lent) and not is_alive(lent)
        )
        batches.reached = batches.reached or used
        early = list(filter(is_alive, batches.early))
        if lent and len(early) < MOST_KEPT:
            early.append(lent)
        batches.early, batches.used, self.due = early, False, True

    def end_epoch(self, progress: LoaderProgress) -> None:
        """End an epoch of a training loader, whose last batch may be used again."""
        batches = self._by_progress[id(progress)]
        if batches.early and batches.early[-1] is progress.loader.lent_batch:
            batches.early.pop()
        batches.left, batches.over, self.due = [], True, True

    def check_use(self, inputs: Iterable[Any] | None) -> None:
        """Check what a model is run on to be trained; None: a backward begins.

        Raises `UsageError` for a batch of another turn.
        """
        loaders = self._by_progress.values()
        under_way = [
            batches
            for batches in loaders
            if (turn := batches.progress.turn) is not None and turn.train
        ]
        over = [
            batches
            for batches in loaders
            if batches.over and batches.early and batches.progress.turn is None
        ]
        suspects = [batches for batches in under_way if batches.left and not batches.used]
        keeping = [batches for batches in under_way if any(map(is_alive, batches.early))]
        given = (
            set(storage_addresses(inputs))
            if inputs is not None and (over or suspects or keeping)
            else set()
        )
        for batches in over:
            self._check_over(batches, given)
        for batches in suspects:
            self._check_ahead(batches, given)
        for batches in keeping:
            self._check_kept(batches, given)
        for batches in under_way:
            batches.used = True
        self.due = not under_way or bool(keeping) or any(batches.early for batches in over)
        if not under_way and inputs is None:
            self._check_outside()

    def _check_ahead(self, batches: LentBatches, given: Collection[int]) -> None:
        loader, doubted = batches.loader, batches.doubted
        # else it is the batch of this turn
        batches.doubted = held_addresses(loader.lent_batch).isdisjoint(given) and is_alive(
            batches.left
        )
        if batches.doubted and (
            doubted
            or any(
                not held_addresses(batch).isdisjoint(given)
                for batch in (batches.left, *batches.early)
            )
        ):
            self._refuse(batches, USED_LATE)
            loader.terms.announce_once(USED_LATE_ALIKE)

    def _check_kept(self, batches: LentBatches, given: Collection[int]) -> None:
        if not given or not held_addresses(batches.loader.lent_batch).isdisjoint(given):
            # seen first, as scripts that keep the labels of an epoch have many batches to go
            # through
            return
        if any(not held_addresses(batch).isdisjoint(given) for batch in batches.early):
            self._refuse(batches, USED_TWICE)

    def _check_over(self, batches: LentBatches, given: set[int]) -> None:
        batches.early = [batch for batch in batches.early if is_alive(batch)]
        if given and any(not held_addresses(batch).isdisjoint(given) for batch in batches.early):
            self._refuse(batches, USED_AFTER_EPOCH)

    def _check_outside(self) -> None:
        over = [
            batches
            for batches in self._by_progress.values()
            if batches.loader.terms.training and not batches.loader.terms.is_alone
        ]
        for batches in over:
            if batches.over and (batches.skipped or batches.doubted) and batches.reached:
                # its first batch was kept for later, as something else
                self._refuse(batches, USED_LATE)
        if over and not self._announced:
            self._announced = True
            self._context.announce(USED_OUTSIDE_LOOP)

    def _refuse(self, batches: LentBatches, why: str) -> None:
        if self._context.agreement.recovery is not None or not has_equal_shares(
            batches.loader.terms
        ):
            raise UsageError(why)


def has_equal_shares(terms: LoaderSpec) -> bool:
    """Whether all workers have equal shares of all batches, in one piece.

    Then a batch weighs the same in every turn.
    """
    loader = terms.loader
    batch = loader.batch_size
    if batch is None or terms.weigh is not None or terms.loss != "mean" or terms.deals_by_cost:
        return False
    if len(set(terms.shares(batch))) > 1:
        return False
    if isinstance(loader.dataset, IterableDataset):
        return False
    try:
        return loader.drop_last or len(loader.sampler) % batch == 0  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # a sampler without a length
        return False
