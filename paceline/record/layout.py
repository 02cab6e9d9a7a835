"""Describes what each worker would hold of a prepared model, for `paceline layout`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn import Parameter

from paceline.formatting import format_as_call
from paceline.parallel.placement import Placement
from paceline.prepare.registry import Prepared
from paceline.record.folder import LAYOUT_FILE, MEMORY_KINDS
from paceline.record.held_memory import bucket_nbytes, predict_optimizer_nbytes, predict_parameters
from paceline.workers.axes import RunAxes


class ModelLayout:
    """Writes the layout of the prepared models into `folder`, in place of training.

    It ends the script on all workers.
    """

    def __init__(self, prepared: Prepared, axes: RunAxes, folder: Path) -> None:
        self._prepared, self._axes, self._folder = prepared, axes, folder

    def write_and_exit(self, *_: object) -> None:
        """Write the file on the first worker, then exit. Collective."""
        rows = [
            _describe_parameter(*layout)
            for layout in predict_parameters(self._prepared, predict_optimizer_nbytes)
        ]
        own_totals = {kind: sum(row[kind] or 0 for row in rows) for kind in MEMORY_KINDS}
        own_totals["gradients"] += bucket_nbytes(self._prepared)
        # Workers exchange their totals. The rows are those of the first worker.
        everyone = self._axes.everyone
        totals = [
            json.loads(body) for body in everyone.meet("layout", json.dumps(own_totals).encode())
        ]
        if everyone.group.rank == 0:
            cuts = [
                {"cut": format_as_call(cut), "travels": cut.travels}
                for cut in self._prepared.cuts.applied
            ]
            layout = {
                "mesh": str(self._axes.mesh) if self._axes.cut_axes else "",
                "cuts": cuts,
                "rows": rows,
                "workers": totals,
            }
            (self._folder / LAYOUT_FILE).write_text(json.dumps(layout))
        raise SystemExit(0)


def list_layout_writers(
    folder: str | None, prepared: Prepared, axes: RunAxes
) -> tuple[Callable[..., None], ...]:
    """List what is called before the first step if only the layout of the models is wanted.

    Args:
        folder: Where it is written. None: it isn't wanted, and nothing is called.
        prepared: The models.
        axes: The axes of the run.
    """
    if folder is None:
        return ()
    return (ModelLayout(prepared, axes, Path(folder)).write_and_exit,)


def _describe_parameter(
    placement: Placement, parameter: Parameter, held: dict[str, int | None]
) -> dict[str, Any]:
    """Describe what this worker holds of a parameter."""
    return {
        "name": placement.name,
        "shape": list(placement.shape),
        "dtype": str(parameter.dtype).removeprefix("torch."),
        "here": list(placement.local),
        "flat": len(placement.local) == 1 and placement.local != placement.shape,
        "axes": list(placement.axes),
        **held,
    }
