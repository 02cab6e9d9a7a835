"""State of a run besides models and optimizers: its progress, and the state of each worker."""

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
from paceline.state.snapshot import Snapshot, make_snapshot
from paceline.state.versioned import GeneratorStates, WorkerGenerator
from paceline.sync.abilities import Abilities
from paceline.sync.base import Sync
from paceline.sync.route_choice import describe_route, is_same_route

# Keys of each worker's own state.
WORKER_STATE_KEYS: Final = frozenset({"randomness", "sync", "optimizers"})


class RunProgress:
    """Progress of a run: the epoch of `Run.epochs`, and the steps taken.

    Loaders are numbered in the order in which the run prepared them.
    """

    def __init__(self, loop: TrainingLoop, loaders: list[ShareLoader]) -> None:
        self._loop, self._loaders = loop, loaders
        # Loops over `Run.epochs` are counted from 1. `epoch` is under way or next in `loop`.
        self.epoch = 0
        self.loop = 0
        self._loops_begun = 0  # loops begun in this process
        self._epochs_at_begin: list[int] = []  # epoch of each loader when this epoch began
        # Numbers of the loaders whose loop in this epoch had ended when the present training loop
        # began.
        self._finished_loaders: list[int] = []

    def begin_epoch_loop(self) -> bool:
        """Begin a loop over `Run.epochs`.

        Returns False for a loop that was finished before the checkpoint was saved.
        """
        self._loops_begun += 1
        if self._loops_begun > self.loop:
            self.loop, self.epoch = self._loops_begun, 0
        return self._loops_begun == self.loop

    def begin_epoch(self) -> None:
        """Begin an epoch, or continue one that was under way."""
        # A loader whose loop in this epoch is over has counted the epoch already.
        self._epochs_at_begin = [
            loader.epoch - (index in self._finished_loaders)
            for index, loader in enumerate(self._loaders)
        ]

    def loop_began(self) -> None:
        """Note which training loops of this epoch are over, as another one begins.

        A training loop inside another one changes nothing.
        """
        # With exactly one training loop under way, the new one is not inside another.
        if (
            len([loader for loader in self._loaders if loader.terms.training and loader.under_way])
            == 1
        ):
            indexed = enumerate(zip(self._loaders, self._epochs_at_begin, strict=False))
            finished = (
                (index, loader)
                for index, (loader, first_epoch) in indexed
                if loader.epoch > first_epoch and not loader.under_way
            )
            self._finished_loaders = [
                index
                for index, loader in finished
                if loader.terms.training and not loader.terms.last_epoch_idle
            ]

    def end_epoch(self) -> None:
        """End the epoch under way: it counts as finished."""
        self.epoch += 1
        self._epochs_at_begin, self._finished_loaders = [], []

    def state_dict(self) -> dict[str, Any]:
        """State for `load_state_dict`.

        Inside the loop body the present step counts as taken, as it does for the loader.
        """
        in_step = self._loop.leading_turn is not None
        training = [
            (loader, began)
            for loader, began in zip(self._loaders, self._epochs_at_begin, strict=False)
            if loader.terms.training
        ]
        # Between the last training loop and the end of the epoch, the epoch counts as finished.
        under_way = any(loader.under_way for loader, _ in training)
        epoch_is_over = any(loader.epoch > began for loader, began in training) and not under_way
        finished = self._finished_loaders if under_way else []
        return {
            "loop": self.loop,
            "epoch": self.epoch + epoch_is_over,
            "steps": self._loop.steps_made + in_step,
            "through": finished,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.loop, self.epoch = state["loop"], state["epoch"]
        # The next loop that the script begins is the one that was under way.
        self._loops_begun = min(self._loops_begun, max(self.loop - 1, 0))
        self._finished_loaders = [
            index for index in state.get("through", ()) if index < len(self._loaders)
        ]
        # These loaders give no batches once, as their loop of this epoch is over.
        for index, loader in enumerate(self._loaders):
            loader.skip_next_epoch(index in self._finished_loaders)
        self._loop.go_to_step(state["steps"])


@dataclass(frozen=True)
class WorkerState:
    """State of one worker: its random generators, its strategy, and optimizers that differ.

    Attributes:
        randomness: The random generators of this worker.
        sync: The strategy. Its state, such as residuals, belongs to this worker alone.
        abilities: The abilities of the strategy.
        optimizers: The optimizers. They are saved here only if they differ between workers.
        layout: How models are cut between workers, and so which workers have equal states.
        say: Called with a message about state that can't be loaded.
        log: Logged values of steps that aren't written yet, if the job may be started again.
        route: The route between hosts, if a measured cluster has decided it. On another route, sums
            may differ in their last bits.
        generator: The generator among `randomness` that belongs to a place of the grid, not to a
            rank.
    """

    randomness: GeneratorStates
    sync: Sync
    abilities: Abilities
    optimizers: list[Optimizer]
    layout: StateLayout
    say: Callable[[str], None]
    log: MetricsLog | None = None
    route: dict[str, Any] | None = None
    generator: WorkerGenerator = field(kw_only=True)

    def pack_snapshot(self) -> Snapshot:
        """Pack this state. Its tensors are the live ones, not copies."""
        optimizer_states = (
            [optimizer.state_dict() for optimizer in self.optimizers]
            if self.sync.replicas_diverge
            else []
        )
        state = {
            "randomness": self.randomness.state_dict(),
            "sync": self.sync.state_dict(),
            "optimizers": optimizer_states,
        }
        if self.layout.is_cut:
            state["layout"] = self.layout.compute_fingerprint()
        if self.log is not None:
            state["log"] = self.log.state_dict()
        if self.route is not None:
            state["route"] = self.route
        return make_snapshot(state, copy=False)

    def load_worker_states(self, rank: int, snapshots: Mapping[int, Snapshot]) -> None:
        """Load the state of this worker from the saved states of all workers, by rank.

        Raises `CheckpointError` for states that another version of paceline saved.
        """
        states = {other: snapshot.unpack_state() for other, snapshot in snapshots.items()}
        for other, state in states.items():
            missing = (
                WORKER_STATE_KEYS.difference(state)
                if isinstance(state, dict)
                else WORKER_STATE_KEYS
            )
            if missing:
                raise CheckpointError(
                    f"the state of worker {other} lacks {', '.join(sorted(missing))}: "
                    "another version of paceline has saved it; "
                    "resume with that version, or remove this checkpoint"
                )
        self._compare_route(next((state.get("route") for state in states.values()), None))
        # A strategy's state depends on the cuts. It is loaded only if they are the same as before.
        fingerprint = self.layout.compute_fingerprint() if self.layout.is_cut else ""
        cuts_are_same = all(state.get("layout", "") == fingerprint for state in states.values())
        # The state of this place may have been saved by another rank; other places' are ignored.
        for state in states.values():
            if "generator" in state["randomness"]:
                self.generator.load_state_dict(state["randomness"]["generator"])
        if rank in states:
            self.randomness.load_state_dict(states[rank]["randomness"])
            if self.log is not None:
                self.log.load_state_dict(states[rank].get("log", {}))
        if not cuts_are_same:
            if any(state["sync"] or state["optimizers"] for state in states.values()):
                self.say(
                    "models were cut in another way when this checkpoint was saved: "
                    "the state of the strategy (such as residuals) begins anew"
                )
            return
        if rank in states:
            for optimizer, state in zip(self.optimizers, states[rank]["optimizers"], strict=False):
                optimizer.load_state_dict(state)
        replicas = self.layout.replica_ranks(rank) if self.layout.is_cut else sorted(states)
        self.sync.load_state_dicts([states[other]["sync"] for other in replicas if other in states])

    def _compare_route(self, saved: dict[str, Any] | None) -> None:
        """Announce if exchanges between hosts took another route when the state was saved."""
        if not is_same_route(saved, self.route):
            self.say(
                f"exchanges between hosts went {describe_route(saved)} when this was saved, and go "
                f"{describe_route(self.route)} now: sums may differ in their last bits; start both "
                "runs with the same --cluster"
            )
