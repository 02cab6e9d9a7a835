"""Rollback of a failed turn: buffers, generators, kept objects; all state if an optimizer
stepped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from paceline.errors import WorkerLost
from paceline.state.snapshot import Snapshot, pack
from paceline.state.versioned import Randomness, Stateful
from paceline.sync.autograd import GradientTracker

# turns at the beginning that copy the whole state, before it is known whether a turn exchanges
# after a step
TRIED = 2


class Rollback:
    """Goes back to the beginning of a turn.

    `parts` returns the state by name; names with `kept.` are the user's own objects.

    A turn may step before its last exchange (GANs). Then the whole state is copied before the first
    step of each turn, from the first such turn on.
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
        # each with its version and a copy of its values
        self._buffers: list[tuple[Tensor, int | None, Tensor]] = []
        self._random: dict[str, Any] | None = None
        self._kept: Snapshot | None = None
        self._whole: Snapshot | None = None
        self._passes = 0  # of this turn, when something stepped first
        self._stepped = False
        self._split = False  # turns have exchanges after a step
        self._loop = 0
        self._again = False

    def begin(self, passes: int) -> None:
        """Begin a turn.

        One that is dealt again begins with the generators as they were when it began at first.

        `passes`: how many exchanges of gradients the turn before had.
        """
        if self._again and self._random is not None:
            self._randomness.load_state_dict(self._random)
        else:
            self._split = self._split or (self._stepped and passes > self._passes)
            self._loop += 1
            self._random = self._randomness.state_dict()
        self._again = self._stepped = False
        self._whole = None
        known = {id(buffer): (version, values) for buffer, version, values in self._buffers}
        self._buffers = []
        for module in (module for model in self._models for module in model.modules()):
            # torch's own statistics change without being counted
            counted = not isinstance(module, _NormBase)
            for buffer in module.buffers(recurse=False):
                version, values = known.get(id(buffer), (None, buffer))
                # masks and tables stay as they are: one copy is enough
                if version is None or version != _version(buffer):
                    version, values = _version(buffer) if counted else None, buffer.detach().clone()
                self._buffers.append((buffer, version, values))
        kept = {name: part for name, part in self._parts().items() if name.startswith("kept.")}
        self._kept = (
            pack({name: part.state_dict() for name, part in kept.items()}) if kept else None
        )

    def stepping(self, *, elsewhere: bool = False) -> None:
        """Prepare for an optimizer's step.

        `elsewhere`: the step may fail, and `stepped` is called once it hasn't.
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
        """Go back to the beginning of the turn, which has failed.

        Raises `WorkerLost` where no copy was made.
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
    """Number of changes in place that torch has counted; None if it doesn't count them."""
    return None if buffer.is_inference() else buffer._version
