"""Versioned state: named objects with state_dict and load_state_dict, under one version."""

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
from paceline.state.snapshot import DECODING_ERRORS, Snapshot, make_snapshot

MAX_SHOWN_DIFFERENCES = 5  # number of differences that a message lists
UNOWNED_PART = "parameters of no model"  # name of a part
# Entry of a state, beside its parts, with the class of each optimizer and scheduler by name.
CLASSES_ENTRY = "classes"


@runtime_checkable
class Stateful(Protocol):
    """Any object with a state that can be saved and restored."""

    def state_dict(self) -> Any:
        """Copy the whole state out, as nested dicts, lists, tensors, numbers and text."""
        ...

    def load_state_dict(self, state: Any, /) -> Any:
        """Restore a state from `state_dict`."""
        ...


class VersionedState:
    """The whole state of a run as named parts, with a version.

    The version changes together with the state: `advance_version` is called after each committed
    step. Two workers with the same version have the same state, which `compute_hash` can prove.

    Example:
        >>> state = VersionedState(model=model, optimizer=optimizer)
        >>> before = state.take_snapshot()
        >>> state.restore_snapshot(before)
    """

    def __init__(self, **parts: Stateful) -> None:
        self.version = 0
        self._parts: dict[str, Stateful] = {}
        self._optional_parts = set[str]()
        for name, part in parts.items():
            self.add_part(name, part)

    def add_part(self, name: str, part: Stateful, *, later: bool = False) -> None:
        """Add a part.

        Args:
            name: A new name.
            part: The part.
            later: Whether earlier versions of paceline didn't save this part, so that a state may
                lack it. Default: False.
        """
        if not isinstance(part, Stateful):
            raise UsageError(
                f"{name} is a {type(part).__qualname__} without state_dict and load_state_dict; "
                "add both methods to have it saved"
            )
        if name in self._parts or name == CLASSES_ENTRY:
            raise UsageError(f"there is a {name!r} already; names in use: {', '.join(self._parts)}")
        self._parts[name] = part
        if later:
            self._optional_parts.add(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts, in the order in which they were added."""
        return tuple(self._parts)

    @property
    def parts(self) -> tuple[Stateful, ...]:
        """The parts, in the order in which they were added."""
        return tuple(self._parts.values())

    def advance_version(self) -> int:
        """Increase the version after a change of the state. Returns the new version."""
        self.version += 1
        return self.version

    def take_snapshot(self, *, copy: bool = True) -> Snapshot:
        """Take a snapshot of the state.

        Without `copy` it has the tensors of the run themselves, and must be used before they
        change.
        """
        state = {name: part.state_dict() for name, part in self._parts.items()}
        return make_snapshot(
            {**state, CLASSES_ENTRY: self._part_classes()}, self.version, copy=copy
        )

    def _part_classes(self) -> dict[str, str]:
        """Names of the classes of optimizers and schedulers.

        They are saved because torch accepts the state of another class, and uses the entries that
        fit.
        """
        return {
            name: type(part).__qualname__
            for name, part in self._parts.items()
            if isinstance(part, Optimizer | LRScheduler)
        }

    def compute_hash(self) -> str:
        """Compute the SHA-256 of the state. It is equal only if every bit is."""
        return self.take_snapshot(copy=False).compute_sha256()

    def restore_snapshot(self, snapshot: Snapshot) -> tuple[str, ...]:
        """Restore a snapshot, and take over its version. The snapshot can be used again.

        Args:
            snapshot: The snapshot.

        Returns:
            Names of the parts that the snapshot lacks, because earlier versions of paceline didn't
            save them. They stay as they are.

        Raises:
            CheckpointError: The snapshot has other parts, parameters or shapes; then nothing is
                changed, and the message has the first differences. Or a part refuses its state.
        """
        state = snapshot.unpack_state()
        # Everything that can be compared is compared before any part changes.
        try:
            lines = self.list_differences(state)
        except DECODING_ERRORS as error:
            raise CheckpointError(
                f"this state wasn't saved by a run ({type(error).__name__}: {error}); "
                "use another one"
            ) from error
        if lines:
            more = (
                f" and {len(lines) - MAX_SHOWN_DIFFERENCES} more"
                if len(lines) > MAX_SHOWN_DIFFERENCES
                else ""
            )
            raise CheckpointError(
                "this state belongs to other objects: "
                f"{'; '.join(lines[:MAX_SHOWN_DIFFERENCES])}{more}. "
                "Build the same model and optimizers as "
                "in the run that saved it, or start from the beginning"
            )
        loaded: list[str] = []
        for name, part in self._parts.items():
            if name not in state:
                continue
            # Parts may be objects of the user, and can fail in many ways. Name the part.
            try:
                part.load_state_dict(state[name])
                _check_optimizer_settings(part)
            except (
                ValueError,
                TypeError,
                KeyError,
                RuntimeError,
                AttributeError,
                IndexError,
            ) as error:
                after = f" ({', '.join(loaded)} had been loaded before it)" if loaded else ""
                raise CheckpointError(
                    f"{name} ({type(part).__qualname__}) refused its state{after}: {error}"
                ) from error
            loaded.append(name)
        self.version = snapshot.version
        return tuple(name for name in self._parts if name not in state)

    def list_differences(self, state: Mapping[str, Any]) -> list[str]:
        """List the differences of an unpacked state that keep it from being loaded here.

        Each is one sentence. Some parts can't be compared, so loading may fail although there is no
        difference.
        """
        # 1. Compare the names of the parts.
        lines = [
            f"it lacks {name}, which is here"
            for name in self._parts
            if name not in state and name not in self._optional_parts
        ]
        lines += [
            f"it has {name}, which is not here"
            for name in state
            if name not in self._parts and name != CLASSES_ENTRY
        ]
        # 2. Compare the classes of optimizers and schedulers. States of older versions have none.
        saved_classes = state.get(CLASSES_ENTRY, {})
        lines += [
            f"{name} is a {saved_classes[name]} in it, a {kind} here"
            for name, kind in self._part_classes().items()
            if saved_classes.get(name, kind) != kind
        ]
        # 3. Compare the parameters of models, and the groups of optimizers.
        for name, part in self._parts.items():
            if name not in state:
                continue
            if isinstance(part, nn.Module):
                lines += _list_model_differences(name, part.state_dict(), state[name])
            elif isinstance(part, Optimizer):
                lines += _list_optimizer_differences(name, part, state[name])
        return lines


class UnownedParameters:
    """State of parameters that only optimizers have, such as learned weights of losses.

    No model has names for them, so they are identified by their order.
    """

    def __init__(self) -> None:
        self._parameters: list[Parameter] = []

    def add_parameters(self, parameters: Iterable[Parameter], state: VersionedState) -> None:
        """Add parameters. With the first ones, this object becomes a part of `state`."""
        self._parameters += parameters
        if self._parameters and UNOWNED_PART not in state.names:
            state.add_part(UNOWNED_PART, self, later=True)

    def state_dict(self) -> list[Tensor]:
        """Values of all parameters."""
        return [parameter.detach() for parameter in self._parameters]

    def load_state_dict(self, state: Sequence[Tensor]) -> None:
        """Restore the values. Raises `ValueError` if the number, dtypes or shapes differ."""
        saved_forms, own_forms = (
            [_format_form(value) for value in state],
            [_format_form(parameter.detach()) for parameter in self._parameters],
        )
        if saved_forms != own_forms:
            raise ValueError(
                f"it has {', '.join(saved_forms) or 'none'}, and here optimizers have "
                f"{', '.join(own_forms)} that are in no model"
            )
        # In place: optimizers hold these very tensors.
        with torch.no_grad():
            for parameter, value in zip(self._parameters, state, strict=True):
                parameter.copy_(value)


class WorkerGenerator:
    """A random generator that draws other numbers on each worker, as state.

    `place` identifies the worker. Workers at other places don't take over the state.
    """

    def __init__(self, seed: int, place: int, device: torch.device) -> None:
        self.generator, self._place = torch.Generator(device), place
        # A hash, as neighbouring seeds can give similar numbers. Seeds have 63 bits.
        digest = hashlib.blake2b(f"{seed} {place}".encode(), digest_size=8).digest()
        self.generator.manual_seed(int.from_bytes(digest, "little") >> 1)

    def state_dict(self) -> dict[str, Any]:
        """State of the generator, with the place of its worker."""
        return {"place": self._place, "state": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of this place. The state of another place is ignored."""
        if state["place"] == self._place:
            self.generator.set_state(state["state"].cpu())


class GeneratorStates:
    """State of the random generators of this process.

    They are those of torch (for the CPU, and for `device` if it is a CUDA device), Python and
    numpy, and `more` by their names.
    """

    def __init__(self, device: torch.device | None = None, **more: Stateful) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._more_parts = more

    def state_dict(self) -> dict[str, Any]:
        """State of each generator."""
        state: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
        }
        state |= {name: part.state_dict() for name, part in self._more_parts.items()}
        return (
            state
            if self._device is None
            else {**state, "cuda": torch.cuda.get_rng_state(self._device)}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of each generator.

        A CUDA state is ignored without a CUDA device. A CUDA generator without a state stays as it
        is.
        """
        torch.set_rng_state(state["torch"])
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])
        for name, part in self._more_parts.items():
            if name in state:
                part.load_state_dict(state[name])
        if self._device is not None and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"].cpu(), self._device)


def _list_model_differences(name: str, own: Mapping[str, Any], saved: Any) -> list[str]:
    """List differences in names, dtypes and shapes between a model's state and a saved one."""
    if not isinstance(saved, Mapping):
        return [f"{name} is a {type(saved).__qualname__} in it, a model here"]
    lines = [
        f"{name}.{key} {_format_form(own[key])} is not in it" for key in own if key not in saved
    ]
    lines += [
        f"{name}.{key} {_format_form(saved[key])} is not here" for key in saved if key not in own
    ]
    changed = [
        key for key in own if key in saved and _format_form(own[key]) != _format_form(saved[key])
    ]
    return lines + [
        f"{name}.{key} is {_format_form(saved[key])} in it, {_format_form(own[key])} here"
        for key in changed
    ]


def _list_optimizer_differences(name: str, optimizer: Optimizer, saved: Any) -> list[str]:
    """List differences between the sizes of an optimizer's groups and saved ones."""
    if not isinstance(saved, Mapping) or "param_groups" not in saved:
        return [f"{name} is no optimizer in it, a {type(optimizer).__qualname__} here"]
    own_sizes, saved_sizes = (
        [len(group["params"]) for group in groups]
        for groups in (optimizer.param_groups, saved["param_groups"])
    )
    if own_sizes == saved_sizes:
        return []
    return [f"{name} has groups of {saved_sizes} parameters in it, of {own_sizes} here"]


def _check_optimizer_settings(part: Stateful) -> None:
    """Raise `ValueError` if an optimizer has loaded the state of another class.

    torch accepts such a state, and fails in the next step.
    """
    groups = part.param_groups if isinstance(part, Optimizer) else []
    # SparseAdam has the default "differentiable" only after it has loaded a state.
    defaults = [name for name in part.defaults if name != "differentiable"] if groups else []  # type: ignore[attr-defined]
    lacking = [name for group in groups for name in defaults if name not in group]
    if lacking:
        raise ValueError(f"it is of another optimizer, without {', '.join(dict.fromkeys(lacking))}")


def _format_form(value: Any) -> str:
    """Format the dtype and shape of a tensor, or the class of any other value."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__qualname__
