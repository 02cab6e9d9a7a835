"""State of a run beside its models and optimizers: its progress, and each worker's own state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from torch.optim import Optimizer

from paceline.checkpoint.layout import StateLayout
from paceline.data.loader import ShareLoader
from paceline.errors import CheckpointError
from paceline.loop.turns import TrainingLoop
from paceline.record.log import MetricsLog
from paceline.state.snapshot import Snapshot, pack
from paceline.state.versioned import Randomness, WorkerGenerator
from paceline.sync.abilities import Abilities
from paceline.sync.base import Sync
from paceline.sync.route_choice import alike, describe

OWN: Final = frozenset({"randomness", "sync", "optimizers"})  # what each worker has for itself


class RunProgress:
    """How far a run is: the epoch of `Run.epochs`, and the steps taken."""

    def __init__(self, loop: TrainingLoop, loaders: list[ShareLoader]) -> None:
        self._loop, self._loaders = loop, loaders
        # under way or next, in the loop over `Run.epochs` that has the number `loop`, from 1 on
        self.epoch = 0
        self.loop = 0
        self._loops = 0  # begun in this process
        self._began_at: list[int] = []  # the epoch of each loader when this epoch began
        # loaders whose loop in this epoch was over when the training loop under way began
        self._through: list[int] = []

    def enter(self) -> bool:
        """Begin a loop over `Run.epochs`.

        Returns False for a loop that the checkpoint had finished.
        """
        self._loops += 1
        if self._loops > self.loop:
            self.loop, self.epoch = self._loops, 0
        return self._loops == self.loop

    def begin(self) -> None:
        """Begin an epoch, or go on with one that was under way."""
        self._began_at = [
            loader.epoch - (number in self._through) for number, loader in enumerate(self._loaders)
        ]

    def loop_began(self) -> None:
        """Note which training loops of this epoch are over, where another begins that is not
        inside of one.
        """
        if (
            len([loader for loader in self._loaders if loader.terms.training and loader.under_way])
            == 1
        ):
            began = enumerate(zip(self._loaders, self._began_at, strict=False))
            over = (
                (number, loader)
                for number, (loader, at) in began
                if loader.epoch > at and not loader.under_way
            )
            self._through = [
                number
                for number, loader in over
                if loader.terms.training and not loader.terms.idled
            ]

    def end(self) -> None:
        """End the epoch under way: it counts as finished."""
        self.epoch += 1
        self._began_at, self._through = [], []

    def state_dict(self) -> dict[str, Any]:
        """Return the progress for `load_state_dict`.

        Inside the loop body the present step counts as taken, as the loader counts it.
        """
        turn = self._loop.led
        inside = turn is not None
        training = [
            (loader, began)
            for loader, began in zip(self._loaders, self._began_at, strict=False)
            if loader.terms.training
        ]
        under_way = any(loader.under_way for loader, _ in training)
        over = any(loader.epoch > began for loader, began in training) and not under_way
        through = self._through if under_way else []
        return {
            "loop": self.loop,
            "epoch": self.epoch + over,
            "steps": self._loop.steps + inside,
            "through": through,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from where `state_dict` was called."""
        self.loop, self.epoch = state["loop"], state["epoch"]
        # the next loop is the one that was under way
        self._loops = min(self._loops, max(self.loop - 1, 0))
        self._through = [
            number for number in state.get("through", ()) if number < len(self._loaders)
        ]
        for number, loader in enumerate(self._loaders):
            loader.leave_out(number in self._through)
        self._loop.place(state["steps"])


@dataclass(frozen=True)
class WorkerState:
    """State of one worker: its random generators, its strategy's own state, and its optimizers
    where they differ between workers.

    `layout`: how models are cut between workers, which says whose states are alike; `say` is told
    what can't be loaded into another one. `log`: what was logged of steps that aren't written yet,
    where another start of the job may go on with it. `route`: the way between hosts that a measured
    cluster has decided: sums that went another way may differ in their last bits.
    """

    randomness: Randomness
    sync: Sync
    abilities: Abilities
    optimizers: list[Optimizer]
    layout: StateLayout
    say: Callable[[str], None]
    log: MetricsLog | None = None
    route: dict[str, Any] | None = None
    generator: WorkerGenerator = field(kw_only=True)  # of `randomness`: that of a place, not a rank

    def snapshot(self) -> Snapshot:
        """Pack this state; the tensors in it are the live ones, not copies."""
        apart = (
            [optimizer.state_dict() for optimizer in self.optimizers]
            if self.sync.replicas_diverge
            else []
        )
        mine = {
            "randomness": self.randomness.state_dict(),
            "sync": self.sync.state_dict(),
            "optimizers": apart,
        }
        if self.layout.is_cut:
            mine["layout"] = self.layout.fingerprint()
        if self.log is not None:
            mine["log"] = self.log.state_dict()
        if self.route is not None:
            mine["route"] = self.route
        return pack(mine, copy=False)

    def load(self, rank: int, found: Mapping[int, Snapshot]) -> None:
        """Go on from the saved states of all workers, by rank.

        Raises `CheckpointError` for states of another version of paceline.
        """
        states = {other: snapshot.unpack() for other, snapshot in found.items()}
        for other, state in states.items():
            hints = OWN.difference(state) if isinstance(state, dict) else OWN
            if hints:
                raise CheckpointError(
                    f"what worker {other} had for itself lacks {', '.join(sorted(hints))}: "
                    "another version of paceline has saved it; "
                    f"resume with that one, or remove this checkpoint"
                )
        self._compare_route(next((state.get("route") for state in states.values()), None))
        layout = self.layout.fingerprint() if self.layout.is_cut else ""
        same = all(state.get("layout", "") == layout for state in states.values())
        for state in states.values():
            if "generator" in state["randomness"]:
                self.generator.load_state_dict(state["randomness"]["generator"])
        if rank in states:
            self.randomness.load_state_dict(states[rank]["randomness"])
            if self.log is not None:
                self.log.load_state_dict(states[rank].get("log", {}))
        if not same:
            if any(state["sync"] or state["optimizers"] for state in states.values()):
                self.say(
                    "models were cut in another way when this was saved: "
                    "what the strategy kept beside them (such as residuals) begins anew"
                )
            return
        if rank in states:
            for optimizer, state in zip(self.optimizers, states[rank]["optimizers"], strict=False):
                optimizer.load_state_dict(state)
        replicas = self.layout.replicas(rank) if self.layout.is_cut else sorted(states)
        self.sync.load_state_dicts([states[other]["sync"] for other in replicas if other in states])

    def _compare_route(self, saved: dict[str, Any] | None) -> None:
        """Say so if exchanges between hosts went another way when this was saved."""
        if not alike(saved, self.route):
            self.say(
                f"exchanges between hosts went {describe(saved)} when this was saved, and go "
                f"{describe(self.route)} now: "
                "sums may differ in their last bits; give both the same --cluster"
            )
