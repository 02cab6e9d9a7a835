"""What a run was asked for: its script and arguments, what was prepared, and where that ran.

Pages that compare runs show what differs.
"""

from __future__ import annotations

import functools
import numbers
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from importlib import metadata
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from paceline.cluster.discover import Place
from paceline.data.loader import ShareLoader
from paceline.formatting import spell
from paceline.prepare.registry import Prepared
from paceline.record.folder import script

HIDDEN: Final = "..."  # in the place of what is nobody's business
_SECRET = re.compile(r"key|token|secret|passw", re.IGNORECASE)


def settings(place: Place, device: torch.device, seed: int, prepared: Prepared) -> dict[str, Any]:
    """Return the settings of a run as plain data; what wasn't asked for is left out."""
    parameters = [parameter for _, model in prepared.models for parameter in model.parameters()]
    found = {
        "script": script(),
        "arguments": disclosed(sys.argv[1:]),
        "seed": seed,
        "cut": [spell(cut) for cut in prepared.cuts.applied],
        "optimizers": [hyperparameters(optimizer) for optimizer in prepared.optimizers],
        "parameters": None
        if prepared.cuts.applied
        else sum(parameter.numel() for parameter in parameters),
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "launcher": place.launcher,
        "min_workers": place.min_workers if place.min_workers > 1 else None,
        "straggler": place.straggler,
        "paceline": _version("paceline"),
        "torch": str(torch.__version__),
    }
    found |= _dealt(prepared.loaders)
    return {name: value for name, value in found.items() if value not in (None, [], "")}


def disclosed(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a script without those whose names say that they are secret."""
    found, hide = list[str](), False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        secret = name.startswith("-") and _SECRET.search(name) is not None
        if hide and not argument.startswith("-"):
            found.append(HIDDEN)
        else:
            found.append(f"{name}={HIDDEN}" if secret and equals else argument)
        hide = secret and not equals
    return found


def hyperparameters(optimizer: Optimizer) -> dict[str, Any]:
    """Return the class of an optimizer, and the numbers that it was made with."""
    return {"name": type(optimizer).__name__, **dict(_numbers(optimizer.defaults))}


def _numbers(defaults: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in defaults.items():
        one = (
            value.numel() == 1
            if isinstance(value, Tensor)
            else isinstance(value, numbers.Real) and not isinstance(value, bool)
        )
        if one:
            yield name, float(value)
        elif isinstance(value, tuple | list) and all(
            isinstance(each, numbers.Real) for each in value
        ):
            yield name, [float(each) for each in value]


def _dealt(loaders: Iterable[ShareLoader]) -> dict[str, Any]:
    """Return how batches of the first training loader are cut."""
    terms = next(
        (
            loader.terms
            for loader in loaders
            if loader.terms.train is not False and loader.terms.training
        ),
        None,
    )
    if terms is None:
        return {}
    asked = terms.asked if isinstance(terms.asked, str) else None
    return {"batch": terms.loader.batch_size, "shares": asked}


@functools.cache
def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:  # a checkout that isn't installed
        return None
