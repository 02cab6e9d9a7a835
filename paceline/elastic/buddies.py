"""Buddies: a worker's unreplicated state is copied to another worker, its buddy.

Such state is residuals of a codec, and changes since the last round.

    step    copied while training pauses -> sent beside the next steps -> complete in the buddy's
                                                                          memory
    loss    workers say which copies they hold -> the newest is taken over -> its fate is announced

How often copies are made follows from their cost so far. All workers decide it together when they
hand over their logs.
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

AIM: Final = 0.8 * BUDGET  # when it is decided how often: figures go up and down
LATELY: Final = 32  # steps whose seconds are remembered


class Fate(NamedTuple):
    """What has become of the unreplicated state of a lost worker."""

    keeper: int  # number of the worker that goes on with it; -1: none
    step: int  # the step after which it was copied
    now: int  # the step that training had reached at the loss


class BuddyReplication:
    """One worker's part in keeping copies.

    `unreplicated` gives the state that only this worker has, and takes over that of lost workers.
    None: the strategy has no such state.
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
        # steps from one copy to the next; None: not known yet
        self.every = replicate if isinstance(replicate, int) else None
        self.shelf = CopyShelf()
        self.courier: Replicator | None = None
        self._on = False  # some worker has unreplicated state
        self._start = 0  # the first step as of which there are copies
        self._names: tuple[int, ...] = ()  # of the ranks; none is used twice
        self._owners: set[int] = set()  # numbers of the workers that had unreplicated state
        self._fates: dict[int, Fate] = {}  # of lost workers, by number
        self._stalls: deque[float] = deque(maxlen=5)
        # seconds of those beside which nothing was on its way
        self._steps: deque[float] = deque(maxlen=LATELY)
        # when the last one was over; None: something was on its way then
        self._last: float | None = None

    # ---- after each step

    def committed(self, step: int) -> None:
        """Copy the unreplicated state after step `step`, if a copy is due."""
        now, courier = time.perf_counter(), self.courier
        quiet = courier is None or courier.idle
        if quiet and self._last is not None:
            self._steps.append(now - self._last)
        if courier is not None and self._due(step):
            self._copy(courier, step, now)
            quiet = False
        self._last = time.perf_counter() if quiet else None

    def _due(self, step: int) -> bool:
        return step == self._start or (
            self.every is not None and step > self._start and step % self.every == 0
        )

    def _copy(self, courier: Replicator, step: int, began: float) -> None:
        if not courier.idle:  # the one before: copies are made too often, or a worker doesn't come
            self._context.agreement.wait_for_some(courier.wait, "the last copies to buddies")
        while not courier.remarks.empty():
            self._context.announce(courier.remarks.get())
        if courier.works:
            courier.start(
                None if self._unreplicated is None else self._unreplicated.unreplicated_state(),
                step,
            )
            self._stalls.append(time.perf_counter() - began)
        elif courier.broken is not None and not isinstance(courier.broken, LOSSES):
            self._context.announce(
                f"buddies get no more copies until the workers are others: {courier.broken}"
            )

    def depart(self) -> None:
        """Wait until the data on its way to this worker's buddy has arrived, before leaving."""
        if self.courier is not None:
            self.courier.wait(self._context.timings.recovery.copy)

    # ---- where all workers meet

    def figures(self) -> Any:
        """This worker's figures for `hear`: costs of its copies, or whether it has something to
        copy.
        """
        if self._off or not self._apart:
            return None
        if self.courier is None:
            return self._owns
        courier = self.courier
        if not courier.seconds or not self._stalls or not self._steps:
            return None
        return [
            self._start,
            *map(statistics.median, (self._stalls, courier.seconds, self._steps)),
            courier.nbytes,
        ]

    @property
    def _owns(self) -> bool:
        """Whether this worker may have something that no other has."""
        return self._unreplicated is not None and self._unreplicated.has_unreplicated_state

    @property
    def _apart(self) -> bool:
        """Whether other workers can keep a copy; with "auto" they must be on other hosts."""
        return len(set(self._context.hosts)) > 1 if self._auto else self._context.group.size > 1

    def hear(self, reports: Sequence[Any], names: tuple[int, ...]) -> None:
        """Take in the `figures` of all workers, whose numbers are `names`, after the same step."""
        self._names = names
        if sum(figures is True for figures in reports) > 1:
            if not self._on:
                self._on, self._start = True, self._loop.steps + 1
                self._owners = {
                    name for name, figures in zip(names, reports, strict=True) if figures is True
                }
            # by what was told: all of them make it
            self._context.agreement.attempt_call(self._open, "a group for buddies")
        elif self._auto and all(
            isinstance(figures, list) and figures[0] == self._start for figures in reports
        ):
            # since the last loss
            self._pace(
                [ReplicationTimes(*figures[1:4]) for figures in reports],
                max(figures[4] for figures in reports),
            )

    def _pace(self, figures: Sequence[ReplicationTimes], nbytes: int) -> None:
        """Copy less often if copies take more time than they may, more often if far less."""
        found = cadence(figures, AIM)
        if self.every is not None and cadence(figures) <= self.every and found > self.every // 2:
            return
        self.every = found
        slowest = max(figures, key=lambda each: each.stall + each.transfer)
        often = "every step" if found == 1 else f"every {found} steps"
        self._context.announce(
            f"buddy snapshots {often}: {nbytes / 1e6:.3g} MB, for which a step stands still for "
            f"{slowest.stall:.3f} s and which are on "
            f"their way for {slowest.transfer:.3f} s, beside steps of {slowest.step:.3f} s (at "
            f"most {BUDGET:.0%} of the time)"
        )

    def _open(self) -> None:
        """Make the group and the thread for copies. Collective."""
        if self.courier is not None:
            return  # made after a loss in this very call
        context = self._context
        group = context.group.make_subgroup(range(context.group.size))
        assert group is not None
        timings = context.timings.recovery
        self.courier = Replicator(
            group, context.hosts, self._names, self.shelf, trace=context.trace, timings=timings
        )
        context.extra_groups.append(self.courier)

    # ---- when the workers are others

    def regroup(self, names: tuple[int, ...]) -> None:
        """Take over, with the new group of workers, what lost workers alone had.

        The strategy has its new groups by then. Collective.
        """
        if self._off:
            return
        courier, self.courier, self._last = self.courier, None, None
        if courier is not None:
            courier.halt()
            self._owners |= courier.owners
        for figures in (self._steps, self._stalls):
            figures.clear()
        self._names = names
        answers = self._tell()
        self._on = any(each[0] for each in answers)
        if not self._on:
            return
        self.every = max((each[1] for each in answers if each[1] is not None), default=None)
        self._start = max(each[2] for each in answers) + 1
        self._inherit(answers)
        if self._apart:
            self._open()

    def _tell(self) -> list[Any]:
        """Exchange what each worker knows of copies, of their owners and of lost workers.

        Collective.
        """
        self._owners |= {self._names[self._context.group.rank]} if self._owns else set()
        mine = [
            self._on,
            self.every,
            self._step,
            [*self.shelf.held.items()],
            [*self._owners],
            [*self._fates.items()],
        ]
        answers = [
            msgpack.unpackb(body) for body in self._context.group.gather_bytes(msgpack.packb(mine))
        ]
        for each in answers:
            self._owners |= {*each[4]}
            self._fates |= {name: Fate(*fate) for name, fate in each[5]}
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
        """Let the holder of the newest copy of a lost worker's state take it over, and tell all."""
        held = [dict(each[3]) for each in answers]
        gone = sorted(
            ({*self._owners} | {name for copies in held for name in copies})
            - {*self._names}
            - self._fates.keys()
        )
        now = max(each[2] for each in answers)
        for name, rank in heirs(held, gone).items():
            if rank is None:
                self._fates[name] = Fate(-1, 0, now)
            elif rank == self._context.group.rank:
                step = self._take_over(name)
                self._fates[name] = (
                    Fate(-1, 0, now) if step is None else Fate(self._names[rank], step, now)
                )
        if gone:
            self._tell()

    def _take_over(self, name: int) -> int | None:
        """Load the copy of a lost worker's state here.

        Returns the step of the copy, or None if none can be loaded.
        """
        mine = self._unreplicated
        copies = [] if mine is None else self.shelf.read(name, self._context.announce)
        return next(
            (
                step
                for step, state in copies
                if mine is not None and mine.load_unreplicated_state(state, step)
            ),
            None,
        )

    def fates(self, before: Sequence[int]) -> str:
        """Say in words what became of the unreplicated state of lost workers; empty if none.

        `before`: all workers, in rank order.
        """
        texts, gone = (
            [],
            [(rank, name) for rank, name in enumerate(before) if name not in self._names],
        )
        for rank, name in gone:
            if name not in self._fates:
                continue
            (keeper, step, now), whose = (
                self._fates[name],
                f"rank {rank}" if len(gone) > 1 else "it",
            )
            if keeper not in self._names:
                texts.append(f"what {whose} alone had is lost")
                continue
            ago = f"{now - step} step{'s' * (now - step != 1)} ago"
            texts.append(
                f"what {whose} alone had is kept by rank {self._names.index(keeper)}, as of step "
                f"{step} ({ago})"
            )
            if any(fate.keeper == name and step <= fate.now for fate in self._fates.values()):
                texts.append("what it had taken over since is lost")
        return "".join(f"; {text}" for text in texts)
