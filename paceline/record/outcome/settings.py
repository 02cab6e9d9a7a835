"""The settings of a run: script, arguments, what was prepared, and where it ran.

Pages that compare runs show which settings differ.
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
from paceline.formatting import format_as_call
from paceline.prepare.registry import Prepared
from paceline.record.folder import script_name

# Stands in place of a secret value.
HIDDEN_VALUE: Final = "..."
_SECRET_NAME = re.compile(r"key|token|secret|passw", re.IGNORECASE)


def collect_settings(
    place: Place, device: torch.device, seed: int, prepared: Prepared
) -> dict[str, Any]:
    """Return the settings of a run as plain data. Settings that were not given are left out."""
    # If a model is cut, this worker holds only a part of it, so the count is left out.
    parameters = [parameter for _, model in prepared.models for parameter in model.parameters()]
    fields = {
        "script": script_name(),
        "arguments": hide_secrets(sys.argv[1:]),
        "seed": seed,
        "cut": [format_as_call(cut) for cut in prepared.cuts.applied],
        "optimizers": [read_hyperparameters(optimizer) for optimizer in prepared.optimizers],
        "parameters": None
        if prepared.cuts.applied
        else sum(parameter.numel() for parameter in parameters),
        "dtypes": sorted({str(parameter.dtype).removeprefix("torch.") for parameter in parameters}),
        "device": device.type,
        "threads": torch.get_num_threads(),
        "launcher": place.launcher,
        "min_workers": place.min_workers if place.min_workers > 1 else None,
        "straggler": place.straggler,
        "paceline": _installed_version("paceline"),
        "torch": str(torch.__version__),
    }
    fields |= _describe_batches(prepared.loaders)
    return {name: value for name, value in fields.items() if value not in (None, [], "")}


def hide_secrets(arguments: Sequence[str]) -> list[str]:
    """Return the arguments of a script, with the values of secret options hidden.

    An option counts as secret if its name contains "key", "token", "secret" or "passw".
    """
    shown, hide_next = list[str](), False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_secret = name.startswith("-") and _SECRET_NAME.search(name) is not None
        # `--api-key VALUE`: the value follows as an argument of its own.
        if hide_next and not argument.startswith("-"):
            shown.append(HIDDEN_VALUE)
        else:
            shown.append(f"{name}={HIDDEN_VALUE}" if is_secret and equals else argument)
        hide_next = is_secret and not equals
    return shown


def read_hyperparameters(optimizer: Optimizer) -> dict[str, Any]:
    """Return the class of an optimizer and its numeric defaults."""
    return {"name": type(optimizer).__name__, **dict(_find_numbers(optimizer.defaults))}


def _find_numbers(defaults: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    """Yield the defaults that are one number, or several."""
    for name, value in defaults.items():
        # Booleans are numbers in Python, but no hyperparameters here.
        is_number = (
            value.numel() == 1
            if isinstance(value, Tensor)
            else isinstance(value, numbers.Real) and not isinstance(value, bool)
        )
        if is_number:
            yield name, float(value)
        elif isinstance(value, tuple | list) and all(
            isinstance(each, numbers.Real) for each in value
        ):
            yield name, [float(each) for each in value]


def _describe_batches(loaders: Iterable[ShareLoader]) -> dict[str, Any]:
    """Describe how batches of the first training loader are shared out."""
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
    shares = terms.asked if isinstance(terms.asked, str) else None
    return {"batch": terms.loader.batch_size, "shares": shares}


@functools.cache
def _installed_version(name: str) -> str | None:
    """Return the installed version of a package; None for a checkout that isn't installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
