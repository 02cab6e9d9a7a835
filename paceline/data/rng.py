"""Random generators of samplers: find them, save and restore them, to draw an order again."""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from paceline.data.serialization import pack
from paceline.errors import DataError

State = dict[str, Any]
DEPTH = 4


def shared_state() -> State:
    """State of the generators that the whole process shares: torch's, Python's and numpy's."""
    return {
        "torch": torch.get_rng_state(),
        "python": _python(random.getstate()),
        "numpy": _listed(np.random.get_state(legacy=False)),
    }


def put_shared(state: State) -> None:
    """Set the generators that the whole process shares to a saved state, or a part of it."""
    if "torch" in state:
        torch.set_rng_state(state["torch"].clone())
    if "python" in state:
        random.setstate(_python_tuple(state["python"]))
    if "numpy" in state:
        np.random.set_state(_arrays(state["numpy"]))


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

    def begin(self) -> None:
        """Begin an epoch."""
        now, seed = torch.get_rng_state(), torch.initial_seed()
        fresh = torch.equal(now, torch.Generator().manual_seed(seed).get_state())
        if self._state is None or fresh or self._seed not in (None, seed):
            self._state = now
        self._seed = seed

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Let torch draw from this generator inside the block.

        Torch's own generator moves along while both have the same state.
        """
        process, before = torch.get_rng_state(), self._known
        torch.set_rng_state(before)
        try:
            yield
        finally:
            self._state = torch.get_rng_state()
            if not torch.equal(process, before):
                torch.set_rng_state(process)

    def shared_state(self) -> State:
        """The state of `rng.shared_state`, with the order's generator in place of torch's."""
        return {**shared_state(), "torch": self._known}

    def put_shared(self, state: State, *, together: bool = True) -> None:
        """Set a `shared_state`, or a part of it; the process's too if it moves `together`."""
        apart = not (together and torch.equal(torch.get_rng_state(), self._known))
        put_shared({name: part for name, part in state.items() if not (apart and name == "torch")})
        self._state = state["torch"].clone() if "torch" in state else self._state

    def state_dict(self) -> State:
        """Position of the order; empty before the first epoch."""
        return {} if self._state is None else {"torch": self._state}

    def load_state_dict(self, state: State) -> None:
        """Continue at the position of a `state_dict`."""
        self._state = state.get("torch")

    @property
    def _known(self) -> torch.Tensor:
        return torch.get_rng_state() if self._state is None else self._state


def own_state(loader: DataLoader[Any]) -> State:
    """State of every generator of `loader` and its samplers, and of samplers with `state_dict`."""
    state: State = {}
    for path, source in _sources(loader):
        if isinstance(source, torch.Generator):
            state[path] = source.get_state()
        elif isinstance(source, random.Random):
            state[path] = _python(source.getstate())
        elif isinstance(source, np.random.Generator):
            state[path] = _listed(source.bit_generator.state)
        elif isinstance(source, np.random.RandomState):
            state[path] = _listed(source.get_state(legacy=False))
        else:
            state[path] = source.state_dict()
    return state


def put_own(loader: DataLoader[Any], state: State) -> None:
    """Set the generators of a loader and its samplers to a saved state.

    Raises `DataError` if the samplers don't hold the same generators.
    """
    sources = dict(_sources(loader))
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
            source.bit_generator.state = _arrays(state[path])
        elif isinstance(source, np.random.RandomState):
            source.set_state(_arrays(state[path]))
        else:
            source.load_state_dict(state[path])


def twin(generator: torch.Generator | None) -> torch.Generator:
    """Copy a generator (None: torch's own), without moving it."""
    other = torch.Generator()
    other.set_state(torch.get_rng_state() if generator is None else generator.get_state())
    return other


def of_readers(generator: torch.Generator | None, rank: int) -> torch.Generator:
    """Make the generator of the base seed for the readers of one rank.

    Rank 0 gets the seed of a plain DataLoader. Other ranks get other seeds, even if `generator` is
    the same on all, so that random augmentations differ between workers.
    """
    seeds = twin(generator)
    if rank:
        drawn = torch.empty((), dtype=torch.int64).random_(generator=seeds)
        seeds.manual_seed(zlib.crc32(b"%d" % rank, int(drawn) & 0xFFFFFFFF))
    return seeds


def draw_seed(generator: torch.Generator | None) -> None:
    """Draw a base seed from `generator`, as a DataLoader does when it begins."""
    torch.empty((), dtype=torch.int64).random_(generator=generator)


def mark(state: Any) -> int:
    """Checksum of a state, to compare states."""
    return zlib.crc32(pack(state, what="the state of a sampler"))


def _sources(loader: DataLoader[Any]) -> Iterator[tuple[str, Any]]:
    seen: set[int] = set()
    for name in ("generator", "sampler", "batch_sampler"):
        yield from _walk(name, getattr(loader, name), seen, DEPTH)


def _walk(path: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
    if value is None or id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    if isinstance(
        value, torch.Generator | random.Random | np.random.Generator | np.random.RandomState
    ):
        yield path, value
    elif _draws(path, value):
        if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
            yield path, value
        for name, part in getattr(value, "__dict__", {}).items():
            yield from _walk(f"{path}.{name}", part, seen, depth - 1)


def _draws(path: str, value: Any) -> bool:
    return isinstance(value, Sampler) or path.rpartition(".")[2].endswith("sampler")


def _python(state: tuple[Any, ...]) -> list[Any]:
    version, words, gauss = state
    return [version, list(words), gauss]


def _python_tuple(state: list[Any]) -> tuple[Any, ...]:
    version, words, gauss = state
    return version, tuple(words), gauss


def _listed(value: Any) -> Any:
    """Convert the arrays in a numpy state to lists, so that it can be written as text."""
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "values": value.tolist()}
    if isinstance(value, np.generic):
        return value.item()
    return {key: _listed(part) for key, part in value.items()} if isinstance(value, dict) else value


def _arrays(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.keys() == {"dtype", "values"}:
        return np.array(value["values"], dtype=value["dtype"])
    return {key: _arrays(part) for key, part in value.items()}
