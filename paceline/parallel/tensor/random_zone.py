"""Random numbers of workers that cut layers between them: equal where activations are whole,
independent where they are cut.

    whole    dropout of the residual stream       the process's generator, in the same state on all
                                                  workers
    cut      dropout of this worker's heads       the same generator, seeded anew by that state and
                                                  by the worker's coordinate
    whole    ...                                  set back; moved on by one number if any was drawn

The seed is a function of the state, so that activation checkpointing, which sets the state back and
runs layers again, draws the same. A model that draws nothing leaves the generator as it is without
a cut.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import torch
from torch import Generator, Tensor

# generators' states to go back to: of parts of layers that activation checkpointing may run again
# by themselves
REMEMBERED = 256


class RandomZone:
    """Switches the generator of a device between numbers that are equal on all workers and
    numbers of this worker's own.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # seed of my own: the state of all, and my first one
        self._whole: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()

    def enter(self, device: torch.device) -> None:
        """Draw this worker's own numbers from here on; nothing changes inside of such a zone."""
        generator = _generator(device)
        if generator.initial_seed() in self._whole:
            return
        state = _state(device)
        seed = _seed(state, self._rank)
        generator.manual_seed(seed)
        self._whole[seed] = state, _state(device)
        if len(self._whole) > REMEMBERED:
            self._whole.popitem(last=False)

    def leave(self, device: torch.device) -> None:
        """Draw numbers that are equal on all workers again, if they aren't."""
        if self.back(device):  # on all workers alike: they have the same layers
            self.move_on(device)

    def back(self, device: torch.device) -> bool:
        """Go back to the state that was there before the zone, and return whether numbers were
        drawn in it.
        """
        generator = _generator(device)
        # The generator itself tells where it is: activation checkpointing may stop in the middle of
        # a zone, and sets it back.
        if (found := self._whole.get(generator.initial_seed())) is None:
            return False
        state, first = found
        drawn = not torch.equal(_state(device), first)
        generator.set_state(state)
        return drawn

    def outside(self, device: torch.device) -> Tensor:
        """Return the state of the numbers that are equal on all workers, in a zone too."""
        zone = self._whole.get(_generator(device).initial_seed())
        return _state(device) if zone is None else zone[0]

    @staticmethod
    def move_on(device: torch.device) -> None:
        """Draw a number, so that the next zone has others."""
        torch.rand((), generator=_generator(device), device=device)


def _seed(state: Tensor, rank: int) -> int:
    """Make a seed of a generator's state and the number of a worker."""
    digest = hashlib.blake2b(
        state.numpy().tobytes() + rank.to_bytes(8, "little"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") >> 1


def _generator(device: torch.device) -> Generator:
    """Return the generator that functions use on a device when they are given none."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _state(device: torch.device) -> Tensor:
    """Return the state of that generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
