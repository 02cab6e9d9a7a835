"""Rollback of a failed turn: buffers, generators and kept objects, or all state after a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase  # private: the base of all BatchNorms

from paceline.errors import WorkerLost
from paceline.state.snapshot import Snapshot, pack
from paceline.state.versioned import Randomness, Stateful
from paceline.sync.autograd import GradientTracker

# The first turns copy the whole state. After them it is known whether turns exchange after a step.
TRIED = 2


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
        randomness: Randomness,
        backward: GradientTracker,
    ) -> None:
        self._parts, self._models, self._randomness, self._backward = (
            parts,
            models,
            randomness,
            backward,
        )
        # Each buffer, its version, and a copy of its values.
        self._buffers: list[tuple[Tensor, int | None, Tensor]] = []
        self._random: dict[str, Any] | None = None
        self._kept: Snapshot | None = None
        self._whole: Snapshot | None = None
        self._passes = 0  # exchanges of this turn before its first step
        self._stepped = False
        self._split = False  # whether turns have exchanges after a step
        self._loop = 0
        self._again = False

    def begin(self, passes: int) -> None:
        """Begin a turn, and copy the state that a rollback restores.

        A turn that is dealt again begins with the same random generators as the first time.
        `passes` is the number of exchanges of gradients in the turn before.
        """
        if self._again and self._random is not None:
            self._randomness.load_state_dict(self._random)
        else:
            self._split = self._split or (self._stepped and passes > self._passes)
            self._loop += 1
            self._random = self._randomness.state_dict()
        self._again = self._stepped = False
        self._whole = None
        previous = {id(buffer): (version, values) for buffer, version, values in self._buffers}
        self._buffers = []
        for module in (module for model in self._models for module in model.modules()):
            # torch changes the statistics of BatchNorm without counting it in `_version`.
            is_counted = not isinstance(module, _NormBase)
            for buffer in module.buffers(recurse=False):
                version, values = previous.get(id(buffer), (None, buffer))
                # Buffers such as masks don't change: one copy is enough for all turns.
                if version is None or version != _version(buffer):
                    version, values = (
                        _version(buffer) if is_counted else None,
                        buffer.detach().clone(),
                    )
                self._buffers.append((buffer, version, values))
        kept_objects = {
            name: part for name, part in self._parts().items() if name.startswith("kept.")
        }
        self._kept = (
            pack({name: part.state_dict() for name, part in kept_objects.items()})
            if kept_objects
            else None
        )

    def stepping(self, *, elsewhere: bool = False) -> None:
        """Prepare for an optimizer's step, and copy the whole state if it may be needed.

        With `elsewhere` the step may fail. The caller then calls `note_step` if it hasn't failed.
        """
        if self._stepped:
            self._split = self._split or elsewhere
            return
        if self._split or self._loop <= TRIED:
            self._whole = pack({name: part.state_dict() for name, part in self._parts().items()})
        if not elsewhere:
            self.stepped()

    def stepped(self) -> None:
        """Note that an optimizer has stepped."""
        if not self._stepped:
            self._stepped, self._passes = True, self._backward.passes

    def back(self) -> None:
        """Restore the state at the beginning of the turn, which has failed.

        Raises `WorkerLost` if an optimizer has stepped and no copy was made before.
        """
        self._again = True
        if self._stepped:
            if self._whole is None:
                raise WorkerLost(
                    "a worker was lost between two exchanges of a turn, after an optimizer had "
                    "stepped, and no copy was made before, as no "
                    "turn had been like that: resume from a checkpoint"
                )
            self._load(self._whole)
        with torch.no_grad():
            for buffer, version, values in self._buffers:
                if version is None or version != _version(buffer):
                    buffer.copy_(values)
        if self._kept is not None:
            self._load(self._kept)
        if self._random is not None:
            self._randomness.load_state_dict(self._random)

    def _load(self, snapshot: Snapshot) -> None:
        parts = self._parts()
        for name, state in snapshot.unpack().items():
            parts[name].load_state_dict(state)


def _version(buffer: Tensor) -> int | None:
    """Number of in-place changes that torch has counted; None if it doesn't count them."""
    # A private part of torch: autograd's counter of in-place changes. Without it, treat all buffers
    # as uncounted (None), which copies them in each turn.
    return None if buffer.is_inference() else buffer._version
