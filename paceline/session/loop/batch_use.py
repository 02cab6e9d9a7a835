"""Whether batches are used in the turns that they were lent for: a turn has the weight of its own batch, and may be a ghost.

for x, y in loader:  use(x)      lent 0, used | lent 1, used | lent 2, used                  right
a prefetcher of the script       lent 0       | lent 1, 0 is used | lent 2, 1 is used        each with the next one's weight
itertools.cycle(loader), a list  lent 0, used | lent 1, used | the end | 0 is used           each counts alike, whatever its share
a buffer of batches, replayed    lent 0, used | lent 1, used, 0 is used                      as the one that is lent

What is used may be a copy, of which nobody knows the turn. Where the batch before wasn't used, and is still held, it is that one's by a
prefetcher, or that one was skipped and is kept to be looked at: who does so in two turns in a row is a prefetcher.
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

MOST = 100  # batches of an epoch that are remembered while the script keeps something of them: they are gone through in each turn
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
    """Follows the training loaders of a run. `open` are those with a turn; `courses` all that there have been, by their id."""

    def __init__(self, context: SyncContext, open_: list[LoaderProgress], courses: dict[int, LoaderProgress]) -> None:
        self._context, self._open, self._courses = context, open_, courses
        self.fresh = False  # whether the next use is to be looked at
        self._said = False

    def epoch_begins(self, course: LoaderProgress) -> None:
        """Of a training loader."""
        course.left = []
        course.skipped = course.doubted = course.reached = course.over = False

    def begins(self, course: LoaderProgress) -> None:
        """A turn of a training loader."""
        course.used, self.fresh = False, True

    def ends(self, course: LoaderProgress, index: int) -> None:
        """A turn of a training loader, the one with number `index` of its epoch."""
        lent = course.loader.lent
        course.doubted = course.doubted and course.used
        course.left = [] if course.used and not course.doubted else lent
        course.skipped = course.skipped or (index == 0 and not course.used and bool(lent) and not alive(lent))
        course.reached = course.reached or course.used
        course.early = [batch for batch in course.early if alive(batch)]
        if len(course.early) < MOST:
            course.early.append(lent)

    def epoch_ends(self, course: LoaderProgress) -> None:
        """Of a training loader; its last batch may be used again."""
        if course.early and course.early[-1] is course.loader.lent:
            course.early.pop()
        course.left, course.over, self.fresh = [], True, True

    def use(self, inputs: Iterable[Any] | None) -> None:
        """A model is run on `inputs` to be trained, or (None) a backward begins."""
        under_way = [course for course in self._open if course.turn is not None and course.turn.train]
        over = [course for course in self._courses.values() if course.over and course.early and course.turn is None]
        suspects = [course for course in under_way if course.left and not course.used]
        keeping = [course for course in under_way if any(map(alive, course.early))]
        given = set(memory(inputs)) if inputs is not None and (over or suspects or keeping) else set()
        for course in over:
            self._check_over(course, given)
        for course in suspects:
            self._check_ahead(course, given)
        for course in keeping:
            self._check_kept(course, given)
        for course in under_way:
            course.used = True
        self.fresh = not under_way or bool(keeping) or any(course.early for course in over)
        if not under_way and inputs is None:
            self._check_outside()

    def _check_ahead(self, course: LoaderProgress, given: Collection[int]) -> None:
        loader, doubted = course.loader, course.doubted
        course.doubted = places(loader.lent).isdisjoint(given) and alive(course.left)  # else it is the batch of this turn
        if course.doubted and (doubted or any(not places(batch).isdisjoint(given) for batch in (course.left, *course.early))):
            self._refuse(course, AHEAD)
            loader.terms.announce(EARLY)

    def _check_kept(self, course: LoaderProgress, given: Collection[int]) -> None:
        if not given or not places(course.loader.lent).isdisjoint(given):
            return  # seen first, as scripts that keep the labels of an epoch have many batches to go through
        if any(not places(batch).isdisjoint(given) for batch in course.early):
            self._refuse(course, KEPT)

    def _check_over(self, course: LoaderProgress, given: set[int]) -> None:
        course.early = [batch for batch in course.early if alive(batch)]
        if given and any(not places(batch).isdisjoint(given) for batch in course.early):
            self._refuse(course, AGAIN)

    def _check_outside(self) -> None:
        over = [course for course in self._courses.values() if course.loader.terms.training and not course.loader.terms.alone]
        for course in over:
            if course.over and (course.skipped or course.doubted) and course.reached:
                self._refuse(course, AHEAD)  # its first batch was kept for later, as something else
        if over and not self._said:
            self._said = True
            self._context.announce(OUTSIDE)

    def _refuse(self, course: LoaderProgress, why: str) -> None:
        if self._context.agreement.recovery is not None or not even(course.loader.terms):
            raise UsageError(why)


def even(terms: LoaderSpec) -> bool:
    """Whether all workers are known to have equal shares of all batches, in one piece: what each counts doesn't depend on the turn then."""
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
