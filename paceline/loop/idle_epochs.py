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

from paceline.cluster.control.progress import ProgressPage
from paceline.data.loader import ShareLoader, Turn
from paceline.loop.observers import LoopObservers
from paceline.state.tensor_version import version_of
from paceline.sync.autograd import GradientTracker
from paceline.sync.context import SyncContext
from paceline.sync.transaction import Transaction

COMPARED = 8  # parameters, and elements of each, that are compared once an epoch
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
    fingerprint: list[Any] | None = None  # versions of all parameters and gradients when it began
    # steps in which nothing was trained so far
    held_steps: list[tuple[int, Turn, dict[str, float]]] = field(default_factory=list)


class StepCounter(Protocol):
    """A loop that counts steps. `quiet`: depth of `no_sync` blocks."""

    steps_made: int
    quiet: int
    actions: int
    observers: LoopObservers
    models: list[nn.Module]

    @property
    def transaction(self) -> Transaction:
        """Makes a step hold on all workers or on none."""
        ...

    def go_to_step(self, steps: int) -> None:
        """Go to step number `steps`."""
        ...


class IdleEpochs:
    """Follows whether anything is trained in the turns that `loop` counts.

    `page`: where the number of steps is shown.
    """

    def __init__(
        self,
        loop: StepCounter,
        context: SyncContext,
        backward: GradientTracker,
        page: ProgressPage | None,
    ) -> None:
        self._loop, self._context, self._backward, self._page = loop, context, backward, page
        # steps that were held back are handed over, and the one that ends with them: what is
        # measured now isn't theirs
        self.flushing = False
        # acts of the loop, and passes that have reached a parameter, when `note` last looked
        self._seen_actions = (0, 0)

    def prepare_epoch(self, loader: ShareLoader) -> None:
        """Prepare for an epoch that is about to begin."""
        terms = loader.terms
        terms.idle = (
            terms.training
            and self._can_follow(loader)
            and (terms.last_epoch_idle or not any(model.training for model in self._loop.models))
        )

    def _can_follow(self, loader: ShareLoader) -> bool:
        """Whether all workers can tell if anything is trained, and the script doesn't say."""
        terms, sync = loader.terms, self._backward.sync
        visible = terms.is_alone or (
            sync.exchanges_in_backward and bool(self._backward.watched.parameters)
        )
        if terms.train is not None or not visible or self._loop.transaction.recovers:
            return False
        return any(p.requires_grad for model in self._loop.models for p in model.parameters())

    def begin_epoch(self, activity: EpochActivity) -> None:
        """Begin an epoch of a training loader."""
        activity.follows, activity.trained, activity.turned = (
            self._can_follow(activity.loader),
            False,
            False,
        )
        activity.fingerprint = self._fingerprint_parameters() if activity.follows else None
        self._has_acted()

    def _has_acted(self) -> bool:
        """Whether an optimizer, `no_sync` or a gradient was used since the last call."""
        before, self._seen_actions = (
            self._seen_actions,
            (self._loop.actions, self._backward.reached),
        )
        return before != self._seen_actions

    def _fingerprint_parameters(self) -> list[Any]:
        """Values that change with parameters and, on a single worker, with a backward pass.

        On several workers `reached` shows a backward pass.
        """
        parameters = [p for model in self._loop.models for p in model.parameters()]
        marks: list[Any] = [version_of(p) for p in parameters]
        some = [p for p in parameters if p.requires_grad and p.device.type == "cpu"][:COMPARED]
        # p.data changes without being counted
        marks += [p.detach().reshape(-1)[:COMPARED].tolist() for p in some]
        if self._context.group.size == 1:
            marks += [
                None if p.grad is None else (id(p.grad), version_of(p.grad)) for p in parameters
            ]
        return marks

    def note_turn(
        self, activity: EpochActivity, around: Iterable[EpochActivity], *, last: bool
    ) -> None:
        """Note that a turn of `activity` has ended, with those `around` it under way.

        `last`: its gradients are exchanged.
        """
        activity.turned = True
        if self._has_acted() or self._loop.quiet:
            for other in around:
                other.trained, other.loader.terms.idle = True, False
        elif last and activity.follows and not activity.trained:
            if self._fingerprint_parameters() != activity.fingerprint:
                activity.trained = True
            else:
                activity.loader.terms.idle = True

    def count_step(
        self, activity: EpochActivity, step: int, turn: Turn, seconds: dict[str, float]
    ) -> None:
        """Count a turn of `activity` as step `step`, or hold it back while nothing is trained."""
        if activity.follows and not activity.trained:
            activity.held_steps.append((step, turn, seconds))
            return
        activity.held_steps.append((step, turn, seconds))
        self.flush_held_steps(activity)

    def flush_held_steps(self, activity: EpochActivity) -> None:
        """Hand over the steps that were held back."""
        held, activity.held_steps = activity.held_steps, []
        now, self.flushing = self._loop.steps_made, True
        for step, turn, seconds in held:
            self._loop.go_to_step(step)
            for observer in self._loop.observers.step_ended:
                observer(step, turn.global_batch, seconds)
        self.flushing = False
        if held:
            self._loop.go_to_step(now)

    def end_epoch(self, activity: EpochActivity, *, whole: bool) -> None:
        """End an epoch of a training loader.

        `whole`: the loop wasn't left by `break`. An epoch resumed at its end tells nothing.
        """
        terms, held = activity.loader.terms, activity.held_steps
        terms.idle, whole = False, whole and activity.turned
        if activity.follows and not activity.trained and whole:
            changed = b"c" if self._fingerprint_parameters() != activity.fingerprint else b""
            activity.trained = any(
                self._context.agreement.meet("an epoch without a backward", changed)
            )
        if activity.trained or not activity.follows:
            terms.last_epoch_idle = False
        elif whole:
            terms.last_epoch_idle, activity.held_steps = True, []
            terms.announce_once(NOTHING_TRAINED)
            if held:
                self._uncount_steps(held[0][0] - 1)
        self.flush_held_steps(activity)

    def _uncount_steps(self, steps: int) -> None:
        self._loop.go_to_step(steps)
        if self._page is not None:
            self._page.write_step(steps)
        for observer in self._loop.observers.went_back:
            observer(steps)
