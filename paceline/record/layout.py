"""Finds out what each worker would hold of a prepared model, for `paceline layout`: where
parameters are, and how many bytes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.nn import Parameter

from paceline.formatting import spell
from paceline.parallel.placement import Placement
from paceline.prepare.registry import Prepared
from paceline.record.folder import KINDS, LAYOUT
from paceline.record.memory import kept_in_buckets, optimizer_nbytes, predict
from paceline.workers.axes import RunAxes


class ModelLayout:
    """Writes the layout of what was `prepared` into `folder` in the place of training, and ends
    the script on all workers.
    """

    def __init__(self, prepared: Prepared, axes: RunAxes, folder: Path) -> None:
        self._prepared, self._axes, self._folder = prepared, axes, folder

    def write(self, *_: object) -> None:
        """Write the file on the first worker, then exit. Collective."""
        rows = [_row(*found) for found in predict(self._prepared, optimizer_nbytes)]
        held = {kind: sum(row[kind] or 0 for row in rows) for kind in KINDS}
        held["gradients"] += kept_in_buckets(self._prepared)
        everyone = self._axes.everyone
        totals = [json.loads(body) for body in everyone.meet("layout", json.dumps(held).encode())]
        if everyone.group.rank == 0:
            cuts = [
                {"cut": spell(cut), "travels": cut.travels} for cut in self._prepared.cuts.applied
            ]
            found = {
                "mesh": str(self._axes.mesh) if self._axes.cut else "",
                "cuts": cuts,
                "rows": rows,
                "workers": totals,
            }
            (self._folder / LAYOUT).write_text(json.dumps(found))
        raise SystemExit(0)


def _row(placement: Placement, parameter: Parameter, held: dict[str, int | None]) -> dict[str, Any]:
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
