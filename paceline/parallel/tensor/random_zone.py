"""Random numbers of workers that cut layers: equal for whole activations, independent for cut ones.

    whole    dropout of the residual stream    the process's generator, equal on all workers
    cut      dropout of this worker's heads    the same generator, with a seed made of that state
                                               and the worker's rank along the axis
    whole    ...                               set back; moved on by one number if any was drawn

The seed is a function of the state. So activation checkpointing, which sets the state back and runs
layers again, draws the same numbers. A model that draws none leaves the generator as without a cut.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict

import torch
from torch import Generator, Tensor

# States to go back to, for parts of layers that activation checkpointing may run again by
# themselves.
REMEMBERED_STATES = 256


class RandomZone:
    """Switches a device's generator between equal numbers on all workers and a worker's own."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        # By the seed of a zone: the state outside of it, and the first state in it.
        self._states_by_seed: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()

    def enter_zone(self, device: torch.device) -> None:
        """Draw this worker's own numbers from here on. Inside of a zone this does nothing."""
        generator = _default_generator(device)
        if generator.initial_seed() in self._states_by_seed:
            return
        state = _generator_state(device)
        seed = _derive_seed(state, self._rank)
        generator.manual_seed(seed)
        self._states_by_seed[seed] = state, _generator_state(device)
        if len(self._states_by_seed) > REMEMBERED_STATES:
            self._states_by_seed.popitem(last=False)

    def leave_zone(self, device: torch.device) -> None:
        """Draw equal numbers on all workers again. Outside of a zone this does nothing."""
        # Workers have the same layers, so either all of them have drawn numbers or none has.
        if self.restore_state(device):
            self.advance_generator(device)

    def restore_state(self, device: torch.device) -> bool:
        """Set back the state from before the zone; return whether numbers were drawn in it."""
        generator = _default_generator(device)
        # Only the generator knows whether it is in a zone: activation checkpointing may stop in the
        # middle of one, and sets the state back itself.
        if (states := self._states_by_seed.get(generator.initial_seed())) is None:
            return False
        state, first = states
        drawn = not torch.equal(_generator_state(device), first)
        generator.set_state(state)
        return drawn

    def shared_state(self, device: torch.device) -> Tensor:
        """State of the numbers that are equal on all workers, also inside of a zone."""
        zone = self._states_by_seed.get(_default_generator(device).initial_seed())
        return _generator_state(device) if zone is None else zone[0]

    @staticmethod
    def advance_generator(device: torch.device) -> None:
        """Draw one number, so that the next zone gets another seed."""
        torch.rand((), generator=_default_generator(device), device=device)


def _derive_seed(state: Tensor, rank: int) -> int:
    """Make a seed of a generator's state and a worker's rank."""
    digest = hashlib.blake2b(
        state.numpy().tobytes() + rank.to_bytes(8, "little"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little") >> 1


def _default_generator(device: torch.device) -> Generator:
    """The default generator of a device."""
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _generator_state(device: torch.device) -> Tensor:
    """The state of a device's default generator."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
