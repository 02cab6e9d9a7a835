"""Marks in the `state_dict` of a cut model, so that no worker loads another worker's parts.

    worker 0, tensor=0    torch.save(model.state_dict(), ...)       "up.weight": rows 0 to 2
    worker 1, tensor=1    model.load_state_dict(torch.load(...))    has rows 2 to 4: refused,
                                                                    although the shapes would fit

A mark is a digest of the placement of each cut parameter. It lies beside the tensors, in
`_metadata`, where torch keeps the versions of modules. A dict that is built anew, such as a
checkpoint's, has no marks, and is loaded as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn
from torch.nn import Parameter

from paceline.errors import UsageError
from paceline.parallel.placement import Placement
from paceline.state.snapshot import PARTS_ENTRY


def mark_state_parts(model: nn.Module, place_of: Callable[[Parameter], Placement]) -> None:
    """Mark the states of modules with cut parameters; refuse states of other parts from now on."""
    # Pickle goes through attributes in their order. The guard comes first, so that pickling fails
    # before anything is written.
    state = {"_paceline_parts": _PickleGuard(), **vars(model)}
    vars(model).clear()
    vars(model).update(state)
    for place, module in model.named_modules():
        placements = {
            name: place_of(parameter) for name, parameter in module.named_parameters(recurse=False)
        }
        parts = {
            name: _digest_placement(placement)
            for name, placement in placements.items()
            if placement.axes
        }
        if parts:
            _check_marks(module, f"{place}." if place else "", parts)


class _PickleGuard:
    """An attribute of a cut model that refuses to be pickled with it."""

    def __deepcopy__(self, memo: object) -> _PickleGuard:
        return self

    def __reduce__(self) -> NoReturn:
        raise UsageError(
            "a cut model has this worker's parts alone, so it can't be pickled as a whole "
            "(torch.save(model)): "
            "save by run.save, and read the whole model by pl.load or paceline.state_dict(folder)"
        )


def _check_marks(module: nn.Module, place: str, parts: dict[str, str]) -> None:
    """Write marks into states of a module, and compare those of states that it loads."""

    def write(_: nn.Module, state: Any, prefix: str, metadata: dict[str, Any]) -> None:
        metadata[PARTS_ENTRY] = dict(parts)

    def read(
        _: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *options: Any
    ) -> None:
        for name, digest in metadata.get(PARTS_ENTRY, {}).items():
            if digest != parts.get(name, digest):
                raise UsageError(
                    f"this state_dict has another worker's part of {place}{name}: "
                    "where a model is cut, model.state_dict() has the parts "
                    "of its own worker alone. Save by run.save and go on by run.resume; "
                    "paceline.state_dict(folder) reads the whole model of a checkpoint"
                )

    module.register_state_dict_post_hook(write)
    module.register_load_state_dict_pre_hook(read)


def _digest_placement(placement: Placement) -> str:
    return hashlib.sha256(
        repr((placement.shape, placement.local, placement.regions)).encode()
    ).hexdigest()[:16]
