"""Finds, saves and restores the random generators of samplers, to draw an order again."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from paceline.data.serialization import pack_value
from paceline.errors import DataError

State = dict[str, Any]
MAX_DEPTH = 4


def get_shared_state() -> State:
    """State of the generators that the whole process shares: torch's, Python's and numpy's."""
    return {
        "torch": torch.get_rng_state(),
        "python": _python_to_list(random.getstate()),
        "numpy": _arrays_to_lists(np.random.get_state(legacy=False)),
    }


def set_shared_state(state: State) -> None:
    """Set the generators that the whole process shares to a saved state, or a part of it."""
    if "torch" in state:
        torch.set_rng_state(state["torch"].clone())
    if "python" in state:
        random.setstate(_python_tuple(state["python"]))
    if "numpy" in state:
        np.random.set_state(_lists_to_arrays(state["numpy"]))


class SampleOrder:
    """A generator for samplers without one of their own, which dropout doesn't move.

        process   s s  dropout dropout dropout ...           s: draws of a loader in an epoch
        order     s s                          s s  s s

    It begins in the state of torch's generator on the first worker, and begins anew if the script
    seeds torch again.
    """

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None
        self._seed: int | None = None  # of torch's generator, at the begin of the last epoch

    def begin_epoch(self) -> None:
        """Begin an epoch, in torch's state if the script has seeded torch since the last one."""
        # Freshly seeded means: torch's generator is in the first state of its seed, or the seed is
        # another one than at the last epoch.
        now, seed = torch.get_rng_state(), torch.initial_seed()
        fresh = torch.equal(now, torch.Generator().manual_seed(seed).get_state())
        if self._state is None or fresh or self._seed not in (None, seed):
            self._state = now
        self._seed = seed

    @contextlib.contextmanager
    def draw_from_order(self) -> Iterator[None]:
        """Let torch draw from this generator inside the block.

        Torch's own generator moves along while both have the same state.
        """
        # Samplers draw from torch's own generator, so the order's state is put into it meanwhile.
        process, before = torch.get_rng_state(), self._current_state
        torch.set_rng_state(before)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            if not torch.equal(process, before):
                torch.set_rng_state(process)

    def get_shared_state(self) -> State:
        """The state of `rng.get_shared_state`, with the order's generator in place of torch's."""
        return {**get_shared_state(), "torch": self._current_state}

    def set_shared_state(self, state: State, *, together: bool = True) -> None:
        """Set the order and the shared generators to a saved state, or a part of it.

        Args:
            state: State from `get_shared_state`, or some of its items.
            together: Whether torch's own generator moves along, if it is in the order's state.
                Default: True.
        """
        apart = not (together and torch.equal(torch.get_rng_state(), self._current_state))
        set_shared_state(
            {name: part for name, part in state.items() if not (apart and name == "torch")}
        )
        self._state = state["torch"].clone() if "torch" in state else self._state

    def state_dict(self) -> State:
        """Position of the order; empty before the first epoch."""
        return {} if self._state is None else {"torch": self._state}

    def load_state_dict(self, state: State) -> None:
        """Continue at the position of a `state_dict`."""
        self._state = state.get("torch")

    @property
    def _current_state(self) -> torch.Tensor:
        return torch.get_rng_state() if self._state is None else self._state


def get_own_state(loader: DataLoader[Any]) -> State:
    """State of all generators of a loader and its samplers, and of samplers with `state_dict`."""
    state: State = {}
    for path, source in _find_sources(loader):
        if isinstance(source, torch.Generator):
            state[path] = source.get_state()
        elif isinstance(source, random.Random):
            state[path] = _python_to_list(source.getstate())
        elif isinstance(source, np.random.Generator):
            state[path] = _arrays_to_lists(source.bit_generator.state)
        elif isinstance(source, np.random.RandomState):
            state[path] = _arrays_to_lists(source.get_state(legacy=False))
        else:
            state[path] = source.state_dict()
    return state


def set_own_state(loader: DataLoader[Any], state: State) -> None:
    """Set the generators of a loader and its samplers to a saved state.

    Raises `DataError` if the samplers don't hold the same generators.
    """
    sources = dict(_find_sources(loader))
    if sources.keys() != state.keys():
        raise DataError(
            f"the state of a loader was saved with the generators {sorted(state)}, and this one "
            f"has {sorted(sources)}: build the loader with the same sampler, shuffle and generator"
        )
    for path, source in sources.items():
        if isinstance(source, torch.Generator):
            source.set_state(state[path].clone())
        elif isinstance(source, random.Random):
            source.setstate(_python_tuple(state[path]))
        elif isinstance(source, np.random.Generator):
            source.bit_generator.state = _lists_to_arrays(state[path])
        elif isinstance(source, np.random.RandomState):
            source.set_state(_lists_to_arrays(state[path]))
        else:
            source.load_state_dict(state[path])


def copy_generator(generator: torch.Generator | None) -> torch.Generator:
    """Copy a generator (None: torch's own), without moving it."""
    other = torch.Generator()
    other.set_state(torch.get_rng_state() if generator is None else generator.get_state())
    return other


def make_reader_generator(generator: torch.Generator | None, rank: int) -> torch.Generator:
    """Make the generator of the base seed for the readers of one rank.

    Rank 0 gets the seed of a plain DataLoader. Other ranks get other seeds, even if `generator` is
    the same on all, so that random augmentations differ between workers.
    """
    seeds = copy_generator(generator)
    # Mix the rank into the seed that would be drawn.
    if rank:
        drawn = torch.empty((), dtype=torch.int64).random_(generator=seeds)
        seeds.manual_seed(zlib.crc32(b"%d" % rank, int(drawn) & 0xFFFFFFFF))
    return seeds


def draw_seed(generator: torch.Generator | None) -> None:
    """Draw a base seed from `generator`, as a DataLoader does when it begins."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)


def mark_state(state: Any) -> int:
    """Checksum of a state, to compare states."""
    return zlib.crc32(pack_value(state, what="the state of a sampler"))


def _find_sources(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the generators and stateful samplers of a loader, with their paths."""
    # A batch sampler often has the same sampler and generator as the loader: yield each once.
    seen: set[int] = set()
    for name in ("generator", "sampler", "batch_sampler"):
        yield from _walk_sources(name, getattr(loader, name), seen, MAX_DEPTH)


def _walk_sources(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if value is None or id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    if isinstance(
        value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState
    ):
        yield path, value
    elif _is_sampler(path, value):
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            yield path, value
        for name, part in getattr(value, "__dict__", {}).items():
            yield from _walk_sources(f"{path}.{name}", part, seen, depth - 1)


def _is_sampler(path: str, value: Any) -> bool:
    return isinstance(value, Sampler) or path.rpartition(".")[2].endswith("sampler")


def _python_to_list(state: tuple[Any, ...]) -> list[Any]:
    version, words, gauss = state
    return [version, list(words), gauss]


def _python_tuple(state: list[Any]) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(words), gauss


def _arrays_to_lists(value: Any) -> Any:
    """Convert the arrays in a numpy state to lists, so that it can be written as text."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "values": value.tolist()}
    if isinstance(value, np.generic):
        return value.item()
    return (
        {key: _arrays_to_lists(part) for key, part in value.items()}
        if isinstance(value, dict)
        else value
    )


def _lists_to_arrays(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "values"}:
        return np.array(value["values"], dtype=value["dtype"])
    return {key: _lists_to_arrays(part) for key, part in value.items()}
