"""Finds out what each worker would hold of a prepared model, for `paceline layout`: where parameters are, and how many bytes.

parameters    as they are in the model now
gradients     as many bytes as what optimizers step, and the buckets that a cut keeps from pass to pass
optimizer     what a copy of it keeps, which has stepped parameters without memory
"""

from __future__ import annotations

import copy
import inspect
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from paceline.formatting import spell
from paceline.parallel.placement import Placement, local
from paceline.session.axes import RunAxes
from paceline.session.prepare.registry import Prepared
from paceline.session.record.folder import LAYOUT
from paceline.sync.base import Slot


class ModelLayout:
    """Writes the layout of what was `prepared` into `folder` in the place of training, and ends the script on all workers."""

    def __init__(self, prepared: Prepared, axes: RunAxes, folder: Path) -> None:
        self._prepared, self._axes, self._folder = prepared, axes, folder

    def write(self, *_: object) -> None:
        """Write the file on the first worker, then exit. Collective."""
        rows = self._rows()
        held = {kind: sum(row[kind] or 0 for row in rows) for kind in ("parameters", "gradients", "optimizer")}
        held["gradients"] += sum(source.kept_nbytes for source in self._prepared.cuts.sources)
        everyone = self._axes.everyone
        totals = [json.loads(body) for body in everyone.meet("layout", json.dumps(held).encode())]
        if everyone.group.rank == 0:
            cuts = [{"cut": spell(cut), "travels": cut.travels} for cut in self._prepared.cuts.applied]
            found = {"mesh": str(self._axes.mesh) if self._axes.cut else "", "cuts": cuts, "rows": rows, "workers": totals}
            (self._folder / LAYOUT).write_text(json.dumps(found))
        raise SystemExit(0)

    def _rows(self) -> list[dict[str, Any]]:
        """Return what this worker holds of each parameter."""
        cuts, slots = self._prepared.cuts, {id(slot.parameter): slot for slot in self._prepared.slots}
        rows = []
        for prefix, model in self._prepared.models:
            for name, parameter in model.named_parameters():
                trained = cuts.trained(parameter)
                slot = slots.get(id(trained), Slot(prefix + name, trained, None))
                rows.append(_row(slot, parameter, cuts.placements.of(trained, prefix + name)))
        return rows


def _row(slot: Slot, parameter: Parameter, placement: Placement) -> dict[str, Any]:
    stepped, optimizer = local(slot.parameter), slot.optimizer
    return {
        "name": placement.name,
        "shape": list(placement.shape),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "here": list(placement.local),
        "flat": len(placement.local) == 1 and placement.local != placement.shape,
        "axes": list(placement.axes),
        "parameters": _nbytes(local(parameter)),
        "gradients": _nbytes(stepped) if slot.parameter.requires_grad else 0,
        "optimizer": _memory(optimizer, slot.parameter) if optimizer is not None and slot.parameter.requires_grad else 0,
    }


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _memory(optimizer: Optimizer, parameter: Parameter) -> int | None:
    """Return the bytes that an optimizer will keep for a parameter, by a step of a copy of it without memory; None where that fails."""
    if parameter in optimizer.state:
        return sum(_nbytes(value) for value in optimizer.state[parameter].values() if isinstance(value, Tensor))
    group = next(group for group in optimizer.param_groups if any(parameter is each for each in group["params"]))
    probe = Parameter(torch.empty_like(local(parameter), device="meta"))
    probe.grad = torch.empty_like(probe)
    settings = {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
    if "fused" in settings:
        settings["fused"] = None  # fused steps need memory, and keep what others keep
    copied = copy.copy(optimizer)
    copied.__dict__.update(param_groups=[{**settings, "params": [probe]}], state=defaultdict(dict))
    step = inspect.unwrap(type(optimizer).step)  # without the hooks on steps
    try:
        with torch.no_grad():
            step(copied)
    except Exception:  # noqa: BLE001  a script's own optimizer may look at numbers, and raise anything
        return None
    return sum(_nbytes(value) for value in copied.state[probe].values() if isinstance(value, Tensor))
