"""Versioned state: named objects with state_dict and load_state_dict, one version for all of
them.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from paceline.errors import CheckpointError, UsageError
from paceline.state.snapshot import UNREADABLE, Snapshot, pack

SHOWN = 5  # differences that a message lists
UNOWNED = "parameters of no model"  # the name of a part
CLASSES = "classes"  # of optimizers and schedulers, by name, beside the parts of a state


@runtime_checkable
class Stateful(Protocol):
    """Any object that can give its state, and take it back."""

    def state_dict(self) -> Any:
        """Return the whole state, as nested dicts, lists, tensors, numbers and text."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore the state that `state_dict` gave."""
        ...


class Versioned:
    """The whole state of a run, under names, with the number of the version that it is at.

    The version moves when the state does: `advance` after each committed step. Two workers with the
    same version have the same state, which `hash` proves.

    Example: `state = Versioned(model=model, optimizer=optimizer)`; `before = state.snapshot()`;
    later `state.restore(before)`.
    """

    def __init__(self, **parts: Stateful) -> None:
        self.version = 0
        self._parts: dict[str, Stateful] = {}
        self._later = set[str]()
        for name, part in parts.items():
            self.add(name, part)

    def add(self, name: str, part: Stateful, *, later: bool = False) -> None:
        """Add `part` under a new name.

        `later`: earlier versions of paceline have not saved it, so that a state may lack it.
        """
        if not isinstance(part, Stateful):
            raise UsageError(
                f"{name} is a {type(part).__qualname__} without state_dict and load_state_dict; "
                "give it both to have it kept"
            )
        if name in self._parts or name == CLASSES:
            raise UsageError(f"there is a {name!r} already; names in use: {', '.join(self._parts)}")
        self._parts[name] = part
        if later:
            self._later.add(name)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the parts, in the order they were added."""
        return tuple(self._parts)

    @property
    def parts(self) -> tuple[Stateful, ...]:
        """The parts themselves, in the order they were added."""
        return tuple(self._parts.values())

    def advance(self) -> int:
        """Count a change of the whole state; return the new version."""
        self.version += 1
        return self.version

    def snapshot(self, *, copy: bool = True) -> Snapshot:
        """Take a snapshot of the state; without `copy` its tensors are the live ones, to be
        written out before they change.
        """
        state = {name: part.state_dict() for name, part in self._parts.items()}
        return pack({**state, CLASSES: self._classes()}, self.version, copy=copy)

    def _classes(self) -> dict[str, str]:
        """Return the classes of optimizers and schedulers: torch loads the state of another one,
        and goes on with what fits.
        """
        return {
            name: type(part).__qualname__
            for name, part in self._parts.items()
            if isinstance(part, Optimizer | LRScheduler)
        }

    def hash(self) -> str:
        """Return the SHA-256 of the state, equal where every bit is equal."""
        return self.snapshot(copy=False).sha256()

    def restore(self, snapshot: Snapshot) -> tuple[str, ...]:
        """Restore what the snapshot holds, and take its version; the snapshot stays usable.

        Returns the names of parts that earlier versions of paceline have not saved, and that it
        lacks; they are left as they are.

        A snapshot of something else (other parts, parameters or shapes) raises CheckpointError with
        the first differences, before anything is changed.
        """
        state = snapshot.unpack()
        try:
            lines = self.differences(state)
        except UNREADABLE as error:
            raise CheckpointError(
                f"this state is not what a run saves ({type(error).__name__}: {error}); "
                "use another one"
            ) from error
        if lines:
            more = f" and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
            raise CheckpointError(
                f"this state is not of what it is loaded into: {'; '.join(lines[:SHOWN])}{more}. "
                "Build the same model and optimizers as "
                f"in the run that saved it, or start from the beginning"
            )
        done: list[str] = []
        for name, part in self._parts.items():
            if name not in state:
                continue
            try:
                part.load_state_dict(state[name])
                _check_settings(part)
            except (
                ValueError,
                TypeError,
                KeyError,
                RuntimeError,
                AttributeError,
                IndexError,
            ) as error:
                after = f" ({', '.join(done)} had been loaded before it)" if done else ""
                raise CheckpointError(
                    f"{name} ({type(part).__qualname__}) refused its state{after}: {error}"
                ) from error
            done.append(name)
        self.version = snapshot.version
        return tuple(name for name in self._parts if name not in state)

    def differences(self, state: Mapping[str, Any]) -> list[str]:
        """List why the unpacked `state` can't be loaded here, one sentence each; empty if it
        can, as far as can be known beforehand.
        """
        lines = [
            f"it lacks {name}, which is here"
            for name in self._parts
            if name not in state and name not in self._later
        ]
        lines += [
            f"it has {name}, which is not here"
            for name in state
            if name not in self._parts and name != CLASSES
        ]
        known = state.get(CLASSES, {})  # nothing in what older versions have saved
        lines += [
            f"{name} is a {known[name]} in it, a {kind} here"
            for name, kind in self._classes().items()
            if known.get(name, kind) != kind
        ]
        for name, part in self._parts.items():
            if name not in state:
                continue
            if isinstance(part, nn.Module):
                lines += _model_differences(name, part.state_dict(), state[name])
            elif isinstance(part, Optimizer):
                lines += _optimizer_differences(name, part, state[name])
        return lines


class UnownedParameters:
    """Parameters that optimizers have and no model, such as learned weights of losses, as state.

    They are told by their order.
    """

    def __init__(self) -> None:
        self._all: list[Parameter] = []

    def add(self, parameters: Iterable[Parameter], state: Versioned) -> None:
        """Count these in, too; with the first of them become a part of `state`."""
        self._all += parameters
        if self._all and UNOWNED not in state.names:
            state.add(UNOWNED, self, later=True)

    def state_dict(self) -> list[Tensor]:
        """Return the value of each parameter."""
        return [parameter.detach() for parameter in self._all]

    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        """Give the parameters these values. Raises `ValueError` where they are of others."""
        there, here = (
            [_form(value) for value in state],
            [_form(parameter.detach()) for parameter in self._all],
        )
        if there != here:
            raise ValueError(
                f"it has {', '.join(there) or 'none'}, and here optimizers have {', '.join(here)} "
                "that are in no model"
            )
        with torch.no_grad():
            for parameter, value in zip(self._all, state, strict=True):
                parameter.copy_(value)


class WorkerGenerator:
    """A generator with numbers of its own for the worker at `place`, as state that no other
    takes.
    """

    def __init__(self, seed: int, place: int, device: torch.device) -> None:
        self.generator, self._place = torch.Generator(device), place
        digest = hashlib.blake2b(f"{seed} {place}".encode(), digest_size=8).digest()
        self.generator.manual_seed(int.from_bytes(digest, "little") >> 1)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the generator, and whose it is."""
        return {"place": self._place, "state": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state_dict` was called, at this place; the state of another changes
        nothing.
        """
        if state["place"] == self._place:
            self.generator.set_state(state["state"].cpu())


class Randomness:
    """The random generators of this process, as state: torch's (CPU, and the given CUDA device),
    Python's, numpy's, and `more`.
    """

    def __init__(self, device: torch.device | None = None, **more: Stateful) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._more = more

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each generator."""
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }
        state |= {name: part.state_dict() for name, part in self._more.items()}
        return (
            state
            if self._device is None
            else {**state, "cuda": torch.cuda.get_rng_state(self._device)}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on drawing where `state_dict` was called; a CUDA state is left out where there is
        no such device, and kept where it lacks.
        """
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        for name, part in self._more.items():
            if name in state:
                part.load_state_dict(state[name])
        if self._device is not None and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"].cpu(), self._device)


def _model_differences(name: str, mine: Mapping[str, Any], theirs: Any) -> list[str]:
    if not isinstance(theirs, Mapping):
        return [f"{name} is a {type(theirs).__qualname__} in it, a model here"]
    lines = [f"{name}.{key} {_form(mine[key])} is not in it" for key in mine if key not in theirs]
    lines += [f"{name}.{key} {_form(theirs[key])} is not here" for key in theirs if key not in mine]
    both = [key for key in mine if key in theirs and _form(mine[key]) != _form(theirs[key])]
    return lines + [
        f"{name}.{key} is {_form(theirs[key])} in it, {_form(mine[key])} here" for key in both
    ]


def _optimizer_differences(name: str, optimizer: Optimizer, theirs: Any) -> list[str]:
    if not isinstance(theirs, Mapping) or "param_groups" not in theirs:
        return [f"{name} is no optimizer in it, a {type(optimizer).__qualname__} here"]
    mine, others = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, theirs["param_groups"])
    )
    if mine == others:
        return []
    return [f"{name} has groups of {others} parameters in it, of {mine} here"]


def _check_settings(part: Stateful) -> None:
    """Raise ValueError if the state was another optimizer's, which torch takes and fails of in
    its next step.
    """
    groups = part.param_groups if isinstance(part, Optimizer) else []
    defaults = [name for name in part.defaults if name != "differentiable"] if groups else []  # type: ignore[attr-defined]
    # torch adds that one to SparseAdam when it loads
    lacking = [name for group in groups for name in defaults if name not in group]
    if lacking:
        raise ValueError(f"it is of another optimizer, without {', '.join(dict.fromkeys(lacking))}")


def _form(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__qualname__
