"""Finds epochs of a training loader that train nothing, such as evaluations inside the loop.

    until now no backward and no optimizer step, on any worker   steps are counted, and kept from
                                                                 the log
    the first one comes                                          the kept steps are logged: they
                                                                 were a warm-up
    none in the whole epoch                                      the turns were no steps, and a
                                                                 message says so

All workers must come to the same result, because steps end with collective calls. So an action that
a single worker may take is no sign. If workers may come and go nothing is followed, because a
worker that joins in the middle of an epoch has not seen its first turns.

Before the first backward or step, an empty share is a batch of no rows, as in evaluation, and no
ghost. This holds from the second turn on; and from the first if all models are in eval mode, or if
nothing was trained in the epoch before.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn

from paceline.cluster.control.progress import Page
from paceline.data.loader import ShareLoader, Turn
from paceline.loop.observers import LoopObservers
from paceline.sync.autograd import GradientTracker
from paceline.sync.context import SyncContext
from paceline.sync.transaction import Transaction

SOME = 8  # parameters, and elements of each, that are compared once an epoch
NOTHING_TRAINED = (
    "an epoch of a loader had no backward and no step of an optimizer: it was an evaluation, and "
    "its turns are no steps. Say "
    "run.prepare(loader, train=False), or put `with torch.no_grad():` around the loop, so that "
    "this is known from its first turn on; or "
    "train=True, if it was training"
)


@dataclass(slots=True)
class EpochActivity:
    """What is known of a training loader's epoch."""

    loader: ShareLoader
    follows: bool = False  # whether anything is trained in it is followed
    trained: bool = False  # there was a backward, or a step of an optimizer
    turned: bool = False  # a turn of it has ended
    marks: list[Any] | None = None  # versions of all parameters and gradients when it began
    # steps in which nothing was trained so far
    held: list[tuple[int, Turn, dict[str, float]]] = field(default_factory=list)


class StepCounter(Protocol):
    """A loop that counts steps. `quiet`: depth of `no_sync` blocks."""

    steps: int
    quiet: int
    acts: int
    observers: LoopObservers
    models: list[nn.Module]

    @property
    def transaction(self) -> Transaction:
        """Makes a step hold on all workers or on none."""
        ...

    def place(self, steps: int) -> None:
        """Go to step number `steps`."""
        ...


class IdleEpochs:
    """Follows whether anything is trained in the turns that `loop` counts.

    `page`: where the number of steps is shown.
    """

    def __init__(
        self, loop: StepCounter, context: SyncContext, backward: GradientTracker, page: Page | None
    ) -> None:
        self._loop, self._context, self._backward, self._page = loop, context, backward, page
        # steps that were held back are handed over, and the one that ends with them: what is
        # measured now isn't theirs
        self.late = False
        # acts of the loop, and passes that have reached a parameter, when `note` last looked
        self._seen = (0, 0)

    def asked(self, loader: ShareLoader) -> None:
        """Prepare for an epoch that is about to begin."""
        terms = loader.terms
        terms.idle = (
            terms.training
            and self._follows(loader)
            and (terms.idled or not any(model.training for model in self._loop.models))
        )

    def _follows(self, loader: ShareLoader) -> bool:
        """Whether all workers can tell if anything is trained, and the script doesn't say."""
        terms, sync = loader.terms, self._backward.sync
        visible = terms.alone or (
            sync.exchanges_in_backward and bool(self._backward.watched.parameters)
        )
        if terms.train is not None or not visible or self._loop.transaction.recovers:
            return False
        return any(p.requires_grad for model in self._loop.models for p in model.parameters())

    def begins(self, activity: EpochActivity) -> None:
        """Begin an epoch of a training loader."""
        activity.follows, activity.trained, activity.turned = (
            self._follows(activity.loader),
            False,
            False,
        )
        activity.marks = self._marks() if activity.follows else None
        self._acted()

    def _acted(self) -> bool:
        """Whether an optimizer, `no_sync` or a gradient was used since the last call."""
        before, self._seen = self._seen, (self._loop.acts, self._backward.reached)
        return before != self._seen

    def _marks(self) -> list[Any]:
        """Values that change with parameters and, on a single worker, with a backward pass.

        On several workers `reached` shows a backward pass.
        """
        parameters = [p for model in self._loop.models for p in model.parameters()]
        marks: list[Any] = [p._version for p in parameters]
        some = [p for p in parameters if p.requires_grad and p.device.type == "cpu"][:SOME]
        # p.data changes without being counted
        marks += [p.detach().reshape(-1)[:SOME].tolist() for p in some]
        if self._context.group.size == 1:
            marks += [None if p.grad is None else (id(p.grad), p.grad._version) for p in parameters]
        return marks

    def note(self, activity: EpochActivity, around: Iterable[EpochActivity], *, last: bool) -> None:
        """Note that a turn of `activity` has ended, with those `around` it under way.

        `last`: its gradients are exchanged.
        """
        activity.turned = True
        if self._acted() or self._loop.quiet:
            for other in around:
                other.trained, other.loader.terms.idle = True, False
        elif last and activity.follows and not activity.trained:
            if self._marks() != activity.marks:
                activity.trained = True
            else:
                activity.loader.terms.idle = True

    def count(
        self, activity: EpochActivity, step: int, turn: Turn, seconds: dict[str, float]
    ) -> None:
        """Count a turn of `activity` as step `step`, or hold it back while nothing is trained."""
        if activity.follows and not activity.trained:
            activity.held.append((step, turn, seconds))
            return
        activity.held.append((step, turn, seconds))
        self.flush(activity)

    def flush(self, activity: EpochActivity) -> None:
        """Hand over the steps that were held back."""
        held, activity.held = activity.held, []
        now, self.late = self._loop.steps, True
        for step, turn, seconds in held:
            self._loop.place(step)
            for observer in self._loop.observers.step_ended:
                observer(step, turn.global_batch, seconds)
        self.late = False
        if held:
            self._loop.place(now)

    def ends(self, activity: EpochActivity, *, whole: bool) -> None:
        """End an epoch of a training loader.

        `whole`: the loop wasn't left by `break`. An epoch resumed at its end tells nothing.
        """
        terms, held = activity.loader.terms, activity.held
        terms.idle, whole = False, whole and activity.turned
        if activity.follows and not activity.trained and whole:
            changed = b"c" if self._marks() != activity.marks else b""
            activity.trained = any(
                self._context.agreement.meet("an epoch without a backward", changed)
            )
        if activity.trained or not activity.follows:
            terms.idled = False
        elif whole:
            terms.idled, activity.held = True, []
            terms.announce(NOTHING_TRAINED)
            if held:
                self._go_back(held[0][0] - 1)
        self.flush(activity)

    def _go_back(self, steps: int) -> None:
        self._loop.place(steps)
        if self._page is not None:
            self._page.passed(steps)
        for observer in self._loop.observers.went_back:
            observer(steps)
