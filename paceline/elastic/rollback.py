"""Rollback of a failed turn: buffers, generators and kept objects, or all state after a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from paceline.errors import WorkerLost
from paceline.parallel.batchnorm import NormWithBuffers
from paceline.state.snapshot import Snapshot, make_snapshot
from paceline.state.tensor_version import version_of
from paceline.state.versioned import GeneratorStates, Stateful
from paceline.sync.autograd import GradientTracker

# The first turns copy the whole state. After them it is known whether turns exchange after a step.
TRIAL_TURNS = 2


class Rollback:
    """Restores the state at the beginning of a turn.

    A turn may step before its last exchange (GANs). After the first such turn, the whole state is
    copied before the first step of each turn.

    Invariants: `_full_state` is set only in a turn that is about to step or has stepped.
    `_has_stepped` and `_passes_before_step` change together. `_exchanges_after_step` is never
    cleared. `_is_repeated` is set from a rollback until the turn begins again.

    Args:
        parts: Returns the objects with state, by name. Names with `kept.` are objects of the user.
        models: Models whose buffers are restored.
        randomness: Random generators of this worker.
        backward: Counts the exchanges of gradients in the turn.
    """

    def __init__(
        self,
        parts: Callable[[], Mapping[str, Stateful]],
        models: list[nn.Module],
        randomness: GeneratorStates,
        backward: GradientTracker,
    ) -> None:
        self._get_parts, self._models, self._randomness, self._backward = (
            parts,
            models,
            randomness,
            backward,
        )
        # Each buffer, its version, and a copy of its values.
        self._buffer_copies: list[tuple[Tensor, int | None, Tensor]] = []
        self._random_state: dict[str, Any] | None = None
        self._kept_objects: Snapshot | None = None
        self._full_state: Snapshot | None = None
        self._passes_before_step = 0  # exchanges of this turn before its first step
        self._has_stepped = False
        self._exchanges_after_step = False  # whether turns have exchanges after a step
        self._turn_count = 0
        self._is_repeated = False

    def begin_turn(self, passes: int) -> None:
        """Begin a turn, and copy the state that a rollback restores.

        A turn that is dealt again begins with the same random generators as the first time.
        `passes` is the number of exchanges of gradients in the turn before.
        """
        if self._is_repeated and self._random_state is not None:
            self._randomness.load_state_dict(self._random_state)
        else:
            self._exchanges_after_step = self._exchanges_after_step or (
                self._has_stepped and passes > self._passes_before_step
            )
            self._turn_count += 1
            self._random_state = self._randomness.state_dict()
        self._is_repeated = self._has_stepped = False
        self._full_state = None
        previous = {
            id(buffer): (version, values) for buffer, version, values in self._buffer_copies
        }
        self._buffer_copies = []
        for module in (module for model in self._models for module in model.modules()):
            # torch changes the statistics of BatchNorm without counting it in `_version`.
            is_counted = not isinstance(module, NormWithBuffers)
            for buffer in module.buffers(recurse=False):
                version, values = previous.get(id(buffer), (None, buffer))
                # Buffers such as masks don't change: one copy is enough for all turns.
                if version is None or version != version_of(buffer):
                    version, values = (
                        version_of(buffer) if is_counted else None,
                        buffer.detach().clone(),
                    )
                self._buffer_copies.append((buffer, version, values))
        kept_objects = {
            name: part for name, part in self._get_parts().items() if name.startswith("kept.")
        }
        self._kept_objects = (
            make_snapshot({name: part.state_dict() for name, part in kept_objects.items()})
            if kept_objects
            else None
        )

    def prepare_step(self, *, elsewhere: bool = False) -> None:
        """Prepare for an optimizer's step, and copy the whole state if it may be needed.

        With `elsewhere` the step may fail. The caller then calls `note_step` if it hasn't failed.
        """
        if self._has_stepped:
            self._exchanges_after_step = self._exchanges_after_step or elsewhere
            return
        if self._exchanges_after_step or self._turn_count <= TRIAL_TURNS:
            self._full_state = make_snapshot(
                {name: part.state_dict() for name, part in self._get_parts().items()}
            )
        if not elsewhere:
            self.note_step()

    def note_step(self) -> None:
        """Note that an optimizer has stepped."""
        if not self._has_stepped:
            self._has_stepped, self._passes_before_step = True, self._backward.passes

    def restore_turn(self) -> None:
        """Restore the state at the beginning of the turn, which has failed.

        Raises `WorkerLost` if an optimizer has stepped and no copy was made before.
        """
        self._is_repeated = True
        if self._has_stepped:
            if self._full_state is None:
                raise WorkerLost(
                    "a worker was lost between two exchanges of a turn, after an optimizer had "
                    "stepped, and no copy was made before, as no "
                    "turn had been like that: resume from a checkpoint"
                )
            self._load_parts(self._full_state)
        with torch.no_grad():
            for buffer, version, values in self._buffer_copies:
                if version is None or version != version_of(buffer):
                    buffer.copy_(values)
        if self._kept_objects is not None:
            self._load_parts(self._kept_objects)
        if self._random_state is not None:
            self._randomness.load_state_dict(self._random_state)

    def _load_parts(self, snapshot: Snapshot) -> None:
        parts = self._get_parts()
        for name, state in snapshot.unpack_state().items():
            parts[name].load_state_dict(state)
