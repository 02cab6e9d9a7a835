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

from paceline.elastic.replicate import BUDGET, CopyShelf, ReplicationTimes, cadence, heirs
from paceline.elastic.replicator import Replicator
from paceline.errors import LOSSES
from paceline.loop.turns import TrainingLoop
from paceline.sync.abilities import Unreplicated
from paceline.sync.context import SyncContext
from paceline.workers.replicate import Replicate

# Part of the time that copies should take. Measurements vary, so it is less than the budget.
AIM: Final = 0.8 * BUDGET
LATELY: Final = 32  # steps whose durations are remembered


class Fate(NamedTuple):
    """Fate of the unreplicated state of a lost worker."""

    keeper: int  # number of the worker that has loaded it; -1: none
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
        unreplicated: Unreplicated | None,
        loop: TrainingLoop,
        replicate: Replicate,
    ) -> None:
        self._context, self._unreplicated, self._loop = context, unreplicated, loop
        self._auto, self._off = replicate == "auto", replicate == "off"
        # Steps from one copy to the next. None: not decided yet.
        self.every = replicate if isinstance(replicate, int) else None
        self.shelf = CopyShelf()
        self.courier: Replicator | None = None
        self._on = False  # whether any worker has unreplicated state
        self._start = 0  # first step that is copied
        self._names: tuple[int, ...] = ()  # numbers of the workers, by rank
        self._owners: set[int] = set()  # numbers of workers that have or had unreplicated state
        self._fates: dict[int, Fate] = {}  # of lost workers, by number
        self._stalls: deque[float] = deque(maxlen=5)
        # Seconds of steps during which no copy was sent.
        self._steps: deque[float] = deque(maxlen=LATELY)
        # Time at which the last such step ended. None: a copy was being sent then.
        self._last: float | None = None

    # ---- after each step

    def committed(self, step: int) -> None:
        """Copy the unreplicated state after step `step`, if a copy is due."""
        now, replicator = time.perf_counter(), self.courier
        is_quiet = replicator is None or replicator.idle
        if is_quiet and self._last is not None:
            self._steps.append(now - self._last)
        if replicator is not None and self._due(step):
            self._copy(replicator, step, now)
            is_quiet = False
        self._last = time.perf_counter() if is_quiet else None

    def _due(self, step: int) -> bool:
        return step == self._start or (
            self.every is not None and step > self._start and step % self.every == 0
        )

    def _copy(self, replicator: Replicator, step: int, start: float) -> None:
        # The copy before is still being sent: copies are made too often, or a worker hangs.
        if not replicator.idle:
            self._context.agreement.wait_for_some(replicator.wait, "the last copies to buddies")
        while not replicator.remarks.empty():
            self._context.announce(replicator.remarks.get())
        if replicator.works:
            replicator.start(
                None if self._unreplicated is None else self._unreplicated.unreplicated_state(),
                step,
            )
            self._stalls.append(time.perf_counter() - start)
        elif replicator.broken is not None and not isinstance(replicator.broken, LOSSES):
            self._context.announce(
                "buddies get no more copies until the group of workers changes: "
                f"{replicator.broken}"
            )

    def depart(self) -> None:
        """Wait until the copy that is being sent has arrived, before this worker leaves."""
        if self.courier is not None:
            self.courier.wait(self._context.timings.recovery.copy)

    # ---- when all workers meet

    def figures(self) -> Any:
        """Collect this worker's news for `hear_news`.

        A list has the costs of its copies. A bool tells, before there are copies, whether this
        worker has unreplicated state. None: nothing is known.
        """
        if self._off or not self._apart:
            return None
        if self.courier is None:
            return self._owns
        replicator = self.courier
        if not replicator.seconds or not self._stalls or not self._steps:
            return None
        return [
            self._start,
            *map(statistics.median, (self._stalls, replicator.seconds, self._steps)),
            replicator.nbytes,
        ]

    @property
    def _owns(self) -> bool:
        """Whether this worker may have state that no other worker has."""
        return self._unreplicated is not None and self._unreplicated.has_unreplicated_state

    @property
    def _apart(self) -> bool:
        """Whether other workers can keep a copy. With "auto" they must be on other hosts."""
        return len(set(self._context.hosts)) > 1 if self._auto else self._context.group.size > 1

    def hear(self, reports: Sequence[Any], names: tuple[int, ...]) -> None:
        """Handle the news of all workers, whose numbers are `names`, after the same step."""
        self._names = names
        # A single owner has no buddy: copies are kept by another owner.
        if sum(figures is True for figures in reports) > 1:
            if not self._on:
                self._on, self._start = True, self._loop.steps + 1
                self._owners = {
                    name for name, figures in zip(names, reports, strict=True) if figures is True
                }
            # All workers have the same news, so all of them make the group.
            self._context.agreement.attempt_call(self._open, "a group for buddies")
        elif self._auto and all(
            isinstance(figures, list) and figures[0] == self._start for figures in reports
        ):
            # All measurements were made since the last loss.
            self._pace(
                [ReplicationTimes(*figures[1:4]) for figures in reports],
                max(figures[4] for figures in reports),
            )

    def _pace(self, times: Sequence[ReplicationTimes], nbytes: int) -> None:
        """Copy less often if copies exceed the budget, and more often if they need far less."""
        steps = cadence(times, AIM)
        if self.every is not None and cadence(times) <= self.every and steps > self.every // 2:
            return
        self.every = steps
        slowest = max(times, key=lambda item: item.stall + item.transfer)
        interval = "every step" if steps == 1 else f"every {steps} steps"
        self._context.announce(
            f"buddy snapshots {interval}: {nbytes / 1e6:.3g} MB, for which a step stands still for "
            f"{slowest.stall:.3f} s and which are on "
            f"their way for {slowest.transfer:.3f} s, beside steps of {slowest.step:.3f} s (at "
            f"most {BUDGET:.0%} of the time)"
        )

    def _open(self) -> None:
        """Make the group and the thread for copies. Collective."""
        if self.courier is not None:
            return  # a loss in this very call has already made it
        context = self._context
        group = context.group.make_subgroup(range(context.group.size))
        assert group is not None
        timings = context.timings.recovery
        self.courier = Replicator(
            group, context.hosts, self._names, self.shelf, trace=context.trace, timings=timings
        )
        context.extra_groups.append(self.courier)

    # ---- after a change of the group

    def regroup(self, names: tuple[int, ...]) -> None:
        """Move to the new group of workers, and load the state of lost workers. Collective.

        The strategy has moved to its new groups before.
        """
        if self._off:
            return
        replicator, self.courier, self._last = self.courier, None, None
        if replicator is not None:
            replicator.halt()
            self._owners |= replicator.owners
        # Measurements in the old group say nothing about the new one.
        for measurements in (self._steps, self._stalls):
            measurements.clear()
        self._names = names
        answers = self._tell()
        self._on = any(answer[0] for answer in answers)
        if not self._on:
            return
        self.every = max((answer[1] for answer in answers if answer[1] is not None), default=None)
        self._start = max(answer[2] for answer in answers) + 1
        self._inherit(answers)
        if self._apart:
            self._open()

    def _tell(self) -> list[Any]:
        """Exchange what each worker knows about copies, owners and fates. Collective.

        Each answer: [is_copying, steps_between_copies, reached_step, copies, owners, fates].
        """
        self._owners |= {self._names[self._context.group.rank]} if self._owns else set()
        own_knowledge = [
            self._on,
            self.every,
            self._step,
            [*self.shelf.held.items()],
            [*self._owners],
            [*self._fates.items()],
        ]
        answers = [
            msgpack.unpackb(body)
            for body in self._context.group.gather_bytes(msgpack.packb(own_knowledge))
        ]
        for answer in answers:
            self._owners |= {*answer[4]}
            self._fates |= {name: Fate(*fate) for name, fate in answer[5]}
        return answers

    @property
    def _step(self) -> int:
        """Step that training has reached.

        A turn whose gradients have been exchanged counts, even if it fails later.
        """
        backward, steps = self._loop.backward, self._loop.steps
        return steps + (
            self._loop.led is not None and backward.passes > 0 and not backward.transaction.failed
        )

    def _inherit(self, answers: list[Any]) -> None:
        """Let the worker with the newest copy of a lost worker's state load it, and tell all."""
        held_copies = [dict(answer[3]) for answer in answers]
        lost_owners = sorted(
            ({*self._owners} | {name for copies in held_copies for name in copies})
            - {*self._names}
            - self._fates.keys()
        )
        now = max(answer[2] for answer in answers)
        for name, rank in heirs(held_copies, lost_owners).items():
            if rank is None:
                self._fates[name] = Fate(-1, 0, now)
            elif rank == self._context.group.rank:
                step = self._take_over(name)
                self._fates[name] = (
                    Fate(-1, 0, now) if step is None else Fate(self._names[rank], step, now)
                )
        if lost_owners:
            self._tell()

    def _take_over(self, name: int) -> int | None:
        """Load the newest usable copy of a lost worker's state into the strategy.

        Returns the step of the copy, or None if none can be loaded.
        """
        unreplicated = self._unreplicated
        copies = [] if unreplicated is None else self.shelf.read(name, self._context.announce)
        return next(
            (
                step
                for step, state in copies
                if unreplicated is not None and unreplicated.load_unreplicated_state(state, step)
            ),
            None,
        )

    def fates(self, before: Sequence[int]) -> str:
        """Describe the fate of the unreplicated state of lost workers; empty if there was none.

        `before` has the numbers of all workers before the loss, by rank.
        """
        texts, lost_workers = (
            [],
            [(rank, name) for rank, name in enumerate(before) if name not in self._names],
        )
        for rank, name in lost_workers:
            if name not in self._fates:
                continue
            (keeper, step, now), owner_text = (
                self._fates[name],
                f"rank {rank}" if len(lost_workers) > 1 else "it",
            )
            if keeper not in self._names:
                texts.append(f"what {owner_text} alone had is lost")
                continue
            age_text = f"{now - step} step{'s' * (now - step != 1)} ago"
            texts.append(
                f"what {owner_text} alone had is kept by rank {self._names.index(keeper)}, "
                f"as of step {step} ({age_text})"
            )
            if any(fate.keeper == name and step <= fate.now for fate in self._fates.values()):
                texts.append("what it had taken over since is lost")
        return "".join(f"; {text}" for text in texts)
