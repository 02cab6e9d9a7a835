"""One training step, from top to bottom. This file calls the others; they don't call it by name.

    for x, y in loader:     begin_turn        my share of the batch and its weight; am I a ghost?
        loss.backward()     begin_backward    gradients of this pass count by the weight of the turn
                                              each gradient goes from a hook of its parameter to the
                                              strategy at once  (sync/autograd.py, `_take_gradient`)
                            end_backward      all workers agree, send the rest and wait; then
                                              p.grad is final
        optimizer.step()    step_optimizer    may it step? then torch's own step, or one
                                              that is made elsewhere
                            end_turn          the step holds on all workers or on none; it counts,
                                              and about once a second all workers meet

The loader calls `begin_turn` and `end_turn` (as a `LoaderObserver`), autograd the two functions of
a backward pass, and the `step` of a prepared optimizer `step_optimizer` (`prepare/hooks.py`).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from paceline.cluster.control.progress import ProgressPage
from paceline.comm.backward_pass import current_pass_id
from paceline.data.loader import ShareLoader, Turn
from paceline.loop.ghost import SavedBuffers, copy_buffers, restore_buffers, share_buffers
from paceline.loop.iteration import LoaderProgress, check_side_by_side
from paceline.loop.turns import TrainingLoop
from paceline.sync.abilities import Abilities
from paceline.sync.autograd import GradientTracker
from paceline.sync.base import Sync
from paceline.sync.context import SyncContext

CHECKED_STEPS = 2  # steps in which each optimizer, and its caller, is checked


class RemoteStepper(Protocol):
    """Steps an optimizer whose parameters are kept elsewhere."""

    def step(
        self,
        optimizer: Optimizer,
        own_step: Callable[..., Any],
        closure: Callable[[], Any] | None,
        args: Any,
        kwargs: Any,
    ) -> Any:
        """Make a step of `optimizer`, and return the result of its closure."""
        ...


class PreparedOptimizers(Protocol):
    """Everything that a step has to know of the optimizers that were given to `run.prepare`.

    `groups` has the number of parameter groups of each optimizer that was checked, and `remote` the
    stepper of each one that steps elsewhere, both by id.
    """

    groups: dict[int, int]
    remote: dict[int, RemoteStepper]

    def check(self, optimizer: Optimizer, *, has_gradients: bool) -> None:
        """Check an optimizer that steps for the first time, or has more parameters now."""
        ...


class TrainingStep:
    """The moments of a training step, in their order."""

    def __init__(
        self,
        sync: Sync,
        context: SyncContext,
        abilities: Abilities,
        page: ProgressPage | None = None,
    ) -> None:
        self.loop = TrainingLoop(
            sync,
            context,
            abilities,
            page,
            begin_backward=self.begin_backward,
            end_backward=self.end_backward,
        )

    # ---- 1. for x, y in loader: a turn begins

    def begin_turn(self, loader: ShareLoader, turn: Turn) -> None:
        """Begin the turn of a batch, which the loader is about to give to the script."""
        now, loop = time.perf_counter(), self.loop
        turns, backward = loop.turns, loop.backward
        progress = turns.by_loader[id(loader)]
        progress.turn, progress.turn_at, progress.row_requests = turn, next(turns.moments), 0
        if turn.train:
            # The first training loader that is under way leads: its turns are the steps.
            if turns.leader is None:
                turns.lead_by(progress)
                for observer in loop.observers.lead_taken:
                    observer(loader)
            # My share of the step. A ghost has no samples: it takes part with zeros.
            loop.share = turn.weight / turn.total if turn.total and not turn.ghost else 0.0
            progress.outer_turn = backward.begin_turn()
            # If a worker has died, all have agreed on the turn in which nothing is exchanged.
            if loop.cut_off or loop.context.step_state.exchange_closed:
                loop.close_exchange()
            # Parameters that the script has unfrozen since the last turn.
            if backward.watched.frozen:
                backward.watch_thawed()
            # From here on the turn can be dealt again.
            if backward.transaction.recovers:
                passes, _ = progress.outer_turn
                backward.transaction.begin_turn(leads=progress is turns.leader, passes=passes)
            # A ghost's buffers will be put back, or become those of the others.
            if turn.source is not None:
                progress.saved_buffers = copy_buffers(loop.models)
        turns.under_way.append(progress)
        # An evaluation inside of a training turn leaves the weight of gradients as it is.
        if turn.train or len(turns.under_way) == 1:
            loop.context.step_state.enter_turn(turn, loop.share, silent=loop.quiet > 0)
        if progress is turns.leader:
            loop.clock.begin_turn(now, turn.units)
            if loop.page is not None:
                loop.clock.leave_out(loop.page.reach_step(loop.steps_made))

    # ---- 2. loss.backward()

    def begin_backward(self) -> None:
        """Begin a backward pass: set what its gradients count in the mean over all workers."""
        loop = self.loop
        # Is the batch that is trained on the one of this turn?
        if loop.batch_use.due:
            loop.batch_use.check_use(None)
        loop.settle_state()
        # Training loaders side by side must give the pass the same weight.
        if len(loop.turns.under_way) > 1:
            check_side_by_side(loop.turns.under_way)

    @staticmethod
    def end_backward(backward: GradientTracker, where: str) -> None:
        """End the outermost backward pass: `p.grad` is final when this returns.

        `where` names the call for other workers: "backward", or whatever joins without a pass.
        """
        # Cut models deliver the rest of their gradients.
        if backward.sources:
            backward.end_sources()
        # Under run.no_sync() nothing is exchanged: p.grad shows this worker's own sum.
        if backward.is_silent:
            backward.show_sums()
            return
        # Sums of passes under run.no_sync() leave, of parameters that this pass has not reached.
        started = backward.begin_exchange()
        # All workers agree on the parameters that any of them has used, send what has not left
        # yet, and wait. If a worker dies meanwhile, the transaction gives zeros.
        exchange = functools.partial(backward.sync.end_backward, where)
        means = backward.transaction.end_backward(exchange)
        # p.grad = what it held before + the mean over all workers.
        backward.finish_exchange(where, means, started)

    # ---- 3. optimizer.step()

    def step_optimizer(
        self,
        optimizer: Optimizer,
        own_step: Callable[..., Any],
        optimizers: PreparedOptimizers,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Step a prepared optimizer; `own_step` is the method that it had before."""
        loop = self.loop
        closure = kwargs.get("closure", args[0] if args else None)
        # May it step? Not in a turn that comes again, nor for a batch without weight. Gradients
        # that are not exchanged yet are exchanged now; those of a closure when it has made them.
        if not (loop.may_step() if closure is None else loop.is_acting):
            return None if closure is None else _call_closure(closure)
        # Is it as it was prepared? Its first steps are checked, and any with more parameters.
        as_checked = optimizers.groups.get(id(optimizer)) == len(optimizer.param_groups)
        if not as_checked or loop.steps_made < CHECKED_STEPS:
            optimizers.check(optimizer, has_gradients=closure is None)
        # With whom? Its parameters may be kept elsewhere.
        remote = optimizers.remote.get(id(optimizer))
        if remote is not None:
            return remote.step(optimizer, own_step, closure, args, kwargs)
        # A step that may have to be undone is noted first.
        if loop.backward.transaction.recovers:
            loop.backward.transaction.note_step(remote=False)
        result = own_step(optimizer, *args, **kwargs)
        loop.note_optimizer_step(optimizer)
        return result

    # ---- 4. the next batch is asked for: the turn ends

    def end_turn(self, loader: ShareLoader) -> None:
        """End the turn of a loader; if the loader leads, this ends a step."""
        loop, state = self.loop, self.loop.context.step_state
        turns, backward = loop.turns, loop.backward
        progress = turns.by_loader[id(loader)]
        turn, progress.turn = progress.turn, None
        if turn is None:
            return
        inner, leads = turns.under_way[-1] is progress, progress is turns.leader
        buffers_before, progress.saved_buffers = progress.saved_buffers, []
        # Some worker has no samples. If it is this one, its buffers are as before the turn.
        if turn.source is not None:
            self._end_ghosts(loader, turn, buffers_before)
        if turn.train:
            loop.batch_use.end_turn(progress, turn.index)
            if inner or leads:
                # Backward reached nothing here: join the exchanges of the other workers.
                if (
                    backward.open
                    or current_pass_id() != -1
                    or (backward.watched.parameters and not (backward.passes or backward.silenced))
                ):
                    backward.join_exchange("the next batch")
                # An inner turn is over: go on in the turn around it.
                if inner and len(turns.under_way) > 1:
                    backward.return_to_turn(progress.outer_turn)
        failed = progress.discarded or (leads and backward.transaction.failed)
        if turn.train and not failed:
            # Was anything trained in this epoch? Once it is known, it need not be asked.
            if not progress.activity.trained or len(turns.under_way) > 1:
                around = [other.activity for other in turns.under_way]
                loop.idle_epochs.note_turn(progress.activity, around, last=inner or leads)
            if turn.source is not None:
                share_buffers(buffers_before, loop.context.agreement, ghost=turn.ghost)
        turns.under_way.remove(progress)
        if turns.under_way:
            loop.settle_state()
        else:
            state.leave_turns(1.0 / loop.context.group.size, silent=loop.quiet > 0)
        if leads:
            self._end_step(progress, turn, failed=failed)
        # A turn that has failed is dealt again, to the workers that are left.
        if failed:
            loader.repeat_turn()
        if progress.rows_gathered or progress.discarded:
            progress.forget_rows(failed=failed)

    def _end_ghosts(self, loader: ShareLoader, turn: Turn, buffers_before: SavedBuffers) -> None:
        if loader.terms.uses_ghosts:
            self.loop.note_ghosts(ghosts=True)
        if turn.train and turn.ghost:
            restore_buffers(buffers_before)

    def _end_step(self, progress: LoaderProgress, turn: Turn, *, failed: bool) -> None:
        """End a turn of the leading loader: it counts as a step, or it is rolled back."""
        loop = self.loop
        loop.clock.end_turn()
        if failed:
            for observer in loop.observers.turn_failed:
                observer()
            loop.roll_back()
        else:
            steps = loop.steps_made = loop.context.trace.step = loop.steps_made + 1
            # by which all workers are at the same call
            loop.context.step_state.set_step(steps, apart=loop.apart)
            if loop.page is not None:
                loop.page.write_step(steps)
            # The step holds. What the strategy and replicas do now is done in its time.
            began = time.perf_counter()
            loop.backward.sync.commit()
            for committed in loop.observers.committed:
                committed(steps)
            seconds = loop.clock.finish_step(began)
            # Observers log the step, and once a second they meet those of all workers. Steps of
            # an epoch in which nothing was trained so far are held back.
            activity = progress.activity
            if activity.held_steps or (activity.follows and not activity.trained):
                loop.idle_epochs.count_step(activity, steps, turn, seconds)
            else:
                for ended in loop.observers.step_ended:
                    ended(steps, turn.global_batch, seconds)
            if turn.source is not None:
                for observer in loop.observers.ghost_ended:
                    observer()
        loop.clock.begin_waiting()


def _call_closure(closure: Callable[[], Any]) -> Any:
    with torch.enable_grad():
        return closure()
