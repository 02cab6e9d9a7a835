"""Buddies: a worker's unreplicated state is copied to another worker, its buddy.

Such state is the residuals of a codec, or the changes since the last round.

    step    copied while training pauses -> sent during the next steps -> complete in the buddy's
                                                                          memory
    loss    workers list the copies they hold -> the newest is loaded -> its fate is announced

The number of steps between two copies follows from the cost of copies so far. All workers decide
it together when they hand over their logs.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import msgpack

from paceline.elastic.replicator import Replicator
from paceline.elastic.state_copies import (
    BUDGET,
    CopyStore,
    ReplicationTimes,
    compute_cadence,
    find_heirs,
)
from paceline.errors import RECOVERABLE_ERRORS
from paceline.loop.turns import TrainingLoop
from paceline.sync.abilities import KeepsUnreplicatedState
from paceline.sync.context import SyncContext
from paceline.workers.copy_interval import Replicate

# Part of the time that copies should take. Measurements vary, so it is less than the budget.
TARGET_BUDGET: Final = 0.8 * BUDGET
REMEMBERED_STEPS: Final = 32  # steps whose durations are remembered


class StateFate(NamedTuple):
    """Fate of the unreplicated state of a lost worker."""

    keeper_number: int  # number of the worker that has loaded it; -1: none
    step: int  # step after which it was copied
    now: int  # step that training had reached at the loss


class BuddyReplication:
    """One worker's part in copying unreplicated state to buddies.

    Workers have numbers, none of which is used twice in a job. Ranks change with each loss.

    Invariants: `replicator` is set while copies are made. `_is_copying`, `_first_copied_step` and
    `steps_between_copies` are equal on all workers, because they follow from exchanged news alone.
    `_owner_numbers` only grows. A lost worker has a fate as soon as all workers know it.

    Args:
        context: Groups and settings of the strategy.
        unreplicated: Gives the state that only this worker has, and loads that of lost workers.
            None: the strategy has no such state.
        loop: The training loop.
        replicate: Steps between two copies, "auto" or "off".
    """

    def __init__(
        self,
        context: SyncContext,
        unreplicated: KeepsUnreplicatedState | None,
        loop: TrainingLoop,
        replicate: Replicate,
    ) -> None:
        self._context, self._unreplicated, self._loop = context, unreplicated, loop
        self._is_auto, self._is_off = replicate == "auto", replicate == "off"
        # Steps from one copy to the next. None: not decided yet.
        self.steps_between_copies = replicate if isinstance(replicate, int) else None
        self.shelf = CopyStore()
        self.replicator: Replicator | None = None
        self._is_copying = False  # whether any worker has unreplicated state
        self._first_copied_step = 0  # first step that is copied
        self._worker_numbers: tuple[int, ...] = ()  # numbers of the workers, by rank
        self._owner_numbers: set[int] = (
            set()
        )  # numbers of workers that have or had unreplicated state
        self._fates: dict[int, StateFate] = {}  # of lost workers, by number
        self._stall_seconds: deque[float] = deque(maxlen=5)
        # Seconds of steps during which no copy was sent.
        self._quiet_step_seconds: deque[float] = deque(maxlen=REMEMBERED_STEPS)
        # Time at which the last such step ended. None: a copy was being sent then.
        self._quiet_step_end: float | None = None

    # ---- after each step

    def copy_if_due(self, step: int) -> None:
        """Copy the unreplicated state after step `step`, if a copy is due."""
        now, replicator = time.perf_counter(), self.replicator
        is_quiet = replicator is None or replicator.is_idle
        if is_quiet and self._quiet_step_end is not None:
            self._quiet_step_seconds.append(now - self._quiet_step_end)
        if replicator is not None and self._is_due(step):
            self._start_copy(replicator, step, now)
            is_quiet = False
        self._quiet_step_end = time.perf_counter() if is_quiet else None

    def _is_due(self, step: int) -> bool:
        return step == self._first_copied_step or (
            self.steps_between_copies is not None
            and step > self._first_copied_step
            and step % self.steps_between_copies == 0
        )

    def _start_copy(self, replicator: Replicator, step: int, start: float) -> None:
        # The copy before is still being sent: copies are made too often, or a worker hangs.
        if not replicator.is_idle:
            self._context.agreement.wait_for_some(
                replicator.wait_for_transfer, "the last copies to buddies"
            )
        while not replicator.messages.empty():
            self._context.announce(replicator.messages.get())
        if replicator.can_send:
            replicator.start_transfer(
                None if self._unreplicated is None else self._unreplicated.unreplicated_state(),
                step,
            )
            self._stall_seconds.append(time.perf_counter() - start)
        elif replicator.error is not None and not isinstance(replicator.error, RECOVERABLE_ERRORS):
            self._context.announce(
                f"buddies get no more copies until the group of workers changes: {replicator.error}"
            )

    def finish_sending(self) -> None:
        """Wait until the copy that is being sent has arrived, before this worker leaves."""
        if self.replicator is not None:
            self.replicator.wait_for_transfer(self._context.timings.recovery.copy)

    # ---- when all workers meet

    def collect_news(self) -> Any:
        """Collect this worker's news for `hear_news`.

        A list has the costs of its copies. A bool tells, before there are copies, whether this
        worker has unreplicated state. None: nothing is known.
        """
        if self._is_off or not self._has_buddies:
            return None
        if self.replicator is None:
            return self._has_unreplicated_state
        replicator = self.replicator
        if (
            not replicator.transfer_seconds
            or not self._stall_seconds
            or not self._quiet_step_seconds
        ):
            return None
        return [
            self._first_copied_step,
            *map(
                statistics.median,
                (self._stall_seconds, replicator.transfer_seconds, self._quiet_step_seconds),
            ),
            replicator.sent_nbytes,
        ]

    @property
    def _has_unreplicated_state(self) -> bool:
        """Whether this worker may have state that no other worker has."""
        return self._unreplicated is not None and self._unreplicated.has_unreplicated_state

    @property
    def _has_buddies(self) -> bool:
        """Whether other workers can keep a copy. With "auto" they must be on other hosts."""
        return len(set(self._context.hosts)) > 1 if self._is_auto else self._context.group.size > 1

    def hear_news(self, reports: Sequence[Any], names: tuple[int, ...]) -> None:
        """Handle the news of all workers, whose numbers are `names`, after the same step."""
        self._worker_numbers = names
        # A single owner has no buddy: copies are kept by another owner.
        if sum(figures is True for figures in reports) > 1:
            if not self._is_copying:
                self._is_copying, self._first_copied_step = True, self._loop.steps_made + 1
                self._owner_numbers = {
                    name for name, figures in zip(names, reports, strict=True) if figures is True
                }
            # All workers have the same news, so all of them make the group.
            self._context.agreement.attempt_call(self._open_replicator, "a group for buddies")
        elif self._is_auto and all(
            isinstance(figures, list) and figures[0] == self._first_copied_step
            for figures in reports
        ):
            # All measurements were made since the last loss.
            self._adjust_cadence(
                [ReplicationTimes(*figures[1:4]) for figures in reports],
                max(figures[4] for figures in reports),
            )

    def _adjust_cadence(self, times: Sequence[ReplicationTimes], nbytes: int) -> None:
        """Copy less often if copies exceed the budget, and more often if they need far less."""
        steps = compute_cadence(times, TARGET_BUDGET)
        if (
            self.steps_between_copies is not None
            and compute_cadence(times) <= self.steps_between_copies
            and steps > self.steps_between_copies // 2
        ):
            return
        self.steps_between_copies = steps
        slowest = max(times, key=lambda item: item.stall + item.transfer)
        interval = "every step" if steps == 1 else f"every {steps} steps"
        self._context.announce(
            f"buddy snapshots {interval}: {nbytes / 1e6:.3g} MB, for which a step stands still for "
            f"{slowest.stall:.3f} s and which are on "
            f"their way for {slowest.transfer:.3f} s, beside steps of {slowest.step:.3f} s (at "
            f"most {BUDGET:.0%} of the time)"
        )

    def _open_replicator(self) -> None:
        """Make the group and the thread for copies. Collective."""
        if self.replicator is not None:
            return  # a loss in this very call has already made it
        context = self._context
        group = context.group.make_subgroup(range(context.group.size))
        assert group is not None
        timings = context.timings.recovery
        self.replicator = Replicator(
            group,
            context.hosts,
            self._worker_numbers,
            self.shelf,
            trace=context.trace,
            timings=timings,
        )
        context.extra_groups.append(self.replicator)

    # ---- after a change of the group

    def regroup(self, names: tuple[int, ...]) -> None:
        """Move to the new group of workers, and load the state of lost workers. Collective.

        The strategy has moved to its new groups before.
        """
        if self._is_off:
            return
        replicator, self.replicator, self._quiet_step_end = self.replicator, None, None
        if replicator is not None:
            replicator.stop_sending()
            self._owner_numbers |= replicator.owner_numbers
        # Measurements in the old group say nothing about the new one.
        for measurements in (self._quiet_step_seconds, self._stall_seconds):
            measurements.clear()
        self._worker_numbers = names
        answers = self._exchange_knowledge()
        self._is_copying = any(answer[0] for answer in answers)
        if not self._is_copying:
            return
        self.steps_between_copies = max(
            (answer[1] for answer in answers if answer[1] is not None), default=None
        )
        self._first_copied_step = max(answer[2] for answer in answers) + 1
        self._assign_heirs(answers)
        if self._has_buddies:
            self._open_replicator()

    def _exchange_knowledge(self) -> list[Any]:
        """Exchange what each worker knows about copies, owners and fates. Collective.

        Each answer: [is_copying, steps_between_copies, reached_step, copies, owners, fates].
        """
        self._owner_numbers |= (
            {self._worker_numbers[self._context.group.rank]}
            if self._has_unreplicated_state
            else set()
        )
        own_knowledge = [
            self._is_copying,
            self.steps_between_copies,
            self._reached_step,
            [*self.shelf.held_steps.items()],
            [*self._owner_numbers],
            [*self._fates.items()],
        ]
        answers = [
            msgpack.unpackb(body)
            for body in self._context.group.gather_bytes(msgpack.packb(own_knowledge))
        ]
        for answer in answers:
            self._owner_numbers |= {*answer[4]}
            self._fates |= {name: StateFate(*fate) for name, fate in answer[5]}
        return answers

    @property
    def _reached_step(self) -> int:
        """Step that training has reached.

        A turn whose gradients have been exchanged counts, even if it fails later.
        """
        backward, steps = self._loop.backward, self._loop.steps_made
        return steps + (
            self._loop.leading_turn is not None
            and backward.passes > 0
            and not backward.transaction.failed
        )

    def _assign_heirs(self, answers: list[Any]) -> None:
        """Let the worker with the newest copy of a lost worker's state load it, and tell all."""
        held_copies = [dict(answer[3]) for answer in answers]
        lost_owners = sorted(
            ({*self._owner_numbers} | {name for copies in held_copies for name in copies})
            - {*self._worker_numbers}
            - self._fates.keys()
        )
        now = max(answer[2] for answer in answers)
        for name, rank in find_heirs(held_copies, lost_owners).items():
            if rank is None:
                self._fates[name] = StateFate(-1, 0, now)
            elif rank == self._context.group.rank:
                step = self._load_copy(name)
                self._fates[name] = (
                    StateFate(-1, 0, now)
                    if step is None
                    else StateFate(self._worker_numbers[rank], step, now)
                )
        if lost_owners:
            self._exchange_knowledge()

    def _load_copy(self, name: int) -> int | None:
        """Load the newest usable copy of a lost worker's state into the strategy.

        Returns the step of the copy, or None if none can be loaded.
        """
        unreplicated = self._unreplicated
        copies = (
            [] if unreplicated is None else self.shelf.read_copies(name, self._context.announce)
        )
        return next(
            (
                step
                for step, state in copies
                if unreplicated is not None and unreplicated.load_unreplicated_state(state, step)
            ),
            None,
        )

    def describe_fates(self, before: Sequence[int]) -> str:
        """Describe the fate of the unreplicated state of lost workers; empty if there was none.

        `before` has the numbers of all workers before the loss, by rank.
        """
        texts, lost_workers = (
            [],
            [(rank, name) for rank, name in enumerate(before) if name not in self._worker_numbers],
        )
        for rank, name in lost_workers:
            if name not in self._fates:
                continue
            (keeper, step, now), owner_text = (
                self._fates[name],
                f"rank {rank}" if len(lost_workers) > 1 else "it",
            )
            if keeper not in self._worker_numbers:
                texts.append(f"what {owner_text} alone had is lost")
                continue
            age_text = f"{now - step} step{'s' * (now - step != 1)} ago"
            texts.append(
                f"what {owner_text} alone had is kept by rank "
                f"{self._worker_numbers.index(keeper)}, "
                f"as of step {step} ({age_text})"
            )
            if any(
                fate.keeper_number == name and step <= fate.now for fate in self._fates.values()
            ):
                texts.append("what it had taken over since is lost")
        return "".join(f"; {text}" for text in texts)
