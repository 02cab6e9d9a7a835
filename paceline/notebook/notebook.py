"""Shows the progress of a run in a notebook: a bar in the cell's output, above the status line.

The bar stays in the notebook when the notebook is saved.
"""

from __future__ import annotations

import html
import importlib
import sys
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from paceline.record.status_line import (
    ESTIMATE_WINDOW,
    FinishedStep,
    describe_lateness,
    estimate_time_left,
    format_late_values,
    make_status,
)
from paceline.status.run_status import format_status
from paceline.trace import STEP_PARTS
from paceline.unequal.stragglers.lateness import RankLateness

# Colours that colour-blind people can tell apart.
_COLOURS = {"compute": "#0072b2", "exchange": "#e69f00", "wait": "#cc79a7", "data": "#009e73"}


def is_notebook_kernel() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and hasattr(shell, "kernel")


class NotebookBar:
    """Shows the progress of a run: a bar, the parts of the time of a step, and the status line.

    `show` is IPython's `display`.
    """

    def __init__(self, show: Callable[..., Any] | None = None) -> None:
        self._show = importlib.import_module("IPython.display").display if show is None else show
        # IPython's handle of the output, which replaces it; None until the first step.
        self._handle: Any = None
        self._marks: deque[tuple[int, float]] = deque(maxlen=ESTIMATE_WINDOW)
        self._late = self._remark = ""
        self._epoch: tuple[int, int] | None = None
        # The last step, as text and as HTML.
        self._last: tuple[str, str] = ("", "")
        # Line of values that were logged after their step had ended.
        self._beside = ""

    def step(self, beat: FinishedStep, total: int | None) -> None:
        """Show the newest step.

        `beat` has the samples and the seconds of all steps since the last one that was shown.
        """
        self._marks.append((beat.step, beat.time))
        time_left = estimate_time_left(self._marks, total)
        text = format_status(
            make_status(
                beat,
                total,
                left=time_left,
                epoch=self._epoch,
                late=self._late,
                remark=self._remark,
            )
        )
        self._last = text, draw_html(beat, total, text)
        self._draw_bar()

    def logged(self, step: int, values: Mapping[str, float]) -> None:
        """Show values that were logged after their step had ended, in a line of their own."""
        self._beside = format_late_values(step, values)
        self._draw_bar()

    def _draw_bar(self) -> None:
        text, drawing = self._last
        below = f"<div><code>{html.escape(self._beside)}</code></div>" if self._beside else ""
        bundle = {
            "text/plain": "\n".join(filter(None, (text, self._beside))),
            "text/html": drawing + below,
        }
        if self._handle is None:
            self._handle = self._show(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)

    def show(self) -> None:
        """Do nothing: steps arrive seldom, and each is shown at once."""

    def at(self, epoch: tuple[int, int] | None) -> None:
        """Set the epoch that is shown from the next line on."""
        self._epoch = epoch

    def late(self, latest: RankLateness, host: str, step: float) -> None:
        """Set the latest worker, its host, and the mean seconds of a step, for the next line."""
        self._late = describe_lateness(latest, host, step)

    def remark(self, text: str) -> None:
        """Set the remark at the end of the line, from the next step on."""
        self._remark = text

    def close(self, total: int | None) -> None:
        """Leave the last step in the cell."""


def draw_html(beat: FinishedStep, total: int | None, text: str) -> str:
    """Draw a bar as HTML: the progress, the parts of the time in `beat`, and the line `text`."""
    progress = f'value="{min(beat.step, total)}" max="{total}"' if total else ""
    total_seconds = sum(beat.seconds.values())
    coloured_parts = "".join(
        f'<span title="{part} {beat.seconds.get(part, 0.0) / total_seconds:.0%}" '
        'style="display:inline-block;height:4px;'
        f"width:{beat.seconds.get(part, 0.0) / total_seconds:.2%};"
        f'background:{_COLOURS[part]}"></span>'
        for part in (STEP_PARTS if total_seconds > 0 else ())
    )
    return (
        f'<div style="max-width:60em"><progress {progress} style="width:100%"></progress>'
        "<div "
        f'style="line-height:4px;font-size:0">{coloured_parts}</div><code>{html.escape(text)}</code></div>'
    )
