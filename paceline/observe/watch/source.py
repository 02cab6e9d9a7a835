"""The content of a live page: the current state at each look, and the report at times.

The report is drawn as often as drawing takes a small share of a core.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from paceline.errors import UsageError
from paceline.observe.metrics_reader import MetricsReader
from paceline.observe.page.data import make_page_data
from paceline.observe.page.document import render_page
from paceline.observe.page.markup import element
from paceline.observe.page.sections import sections
from paceline.observe.watch.now import NowReader, RunNow
from paceline.observe.watch.section import draw_now_section
from paceline.record.folder import RunFolder

# Share of one core for drawing the report, because training needs the rest.
DRAWING_SHARE: Final = 0.005
MAX_DRAWING_INTERVAL: Final = 60.0  # most seconds between two drawings
Clock = Callable[[], float]


class _FollowedRun:
    """One run that a page follows."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.now_reader, self.metrics_reader = (
            folder,
            NowReader(folder),
            MetricsReader(folder),
        )
        # Data of the report, once there is some.
        self.report_data: dict[str, Any] | None = None
        # Sections of the report.
        self.drawn_sections: dict[str, str] = {}
        # Time of the next drawing, and the run's state at the last one.
        self._next_drawing, self._drawn_state = -float("inf"), ""

    def draw_report(self, state: str, clock: Clock, spent: Clock) -> None:
        """Draw the report, if it is time, or the run has reached another state."""
        if clock() < self._next_drawing and state == self._drawn_state:
            return
        began = spent()
        try:
            self.report_data = {
                **make_page_data(self.folder, self.metrics_reader),
                "beside_now": True,
            }
            self.drawn_sections = dict(sections([self.report_data]))
        # A file of the run is damaged, or has just been replaced.
        except (UsageError, OSError) as error:
            self.drawn_sections = {
                "problem": element(
                    "section", {"id": "problem"}, element("p", {"class": "warning"}, str(error))
                )
            }
        self._drawn_state, self._next_drawing = (
            state,
            clock() + min((spent() - began) / DRAWING_SHARE, MAX_DRAWING_INTERVAL),
        )


class RunPage:
    """The live page of a run.

    Args:
        folder: Folder of the run, if it is known.
        clock: Seconds, by which the report is drawn again.
        spent: Processor seconds of the calling thread, to measure the cost of drawing.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        clock: Clock = time.monotonic,
        spent: Clock = time.thread_time,
    ) -> None:
        self._clock, self._spent = clock, spent
        self._run = None if folder is None else _FollowedRun(RunFolder(folder))
        self._messages: tuple[str, ...] = ()

    def follow_run(self, folder: Path) -> None:
        """Show the run in this folder from now on."""
        if self._run is None or self._run.folder.path != folder:
            self._run = _FollowedRun(RunFolder(folder))

    def show_line(self, words: str) -> None:
        """Show a message of the launcher. The last three stay."""
        self._messages = (*self._messages, words)[-3:]

    def read_sections(self) -> Mapping[str, str]:
        """Return the current sections, the state first."""
        run = self._run
        if run is None:
            return {"now": draw_now_section(RunNow(), self._messages)}
        now = run.now_reader.read_state()
        run.draw_report(now.state, self._clock, self._spent)
        return {"now": draw_now_section(now, self._messages), **run.drawn_sections}

    @property
    def layout_key(self) -> str:
        """A value that changes with the run and with the list of its sections."""
        run = self._run
        return "" if run is None else "\n".join([str(run.folder.path), *run.drawn_sections])

    def render_document(self) -> str:
        """Return the page as it was at the last look, with the script that updates it."""
        run, head = self._run, f"<style>\n{_read_static_file('live.css')}</style>"
        if run is None or run.report_data is None:
            return _EMPTY_PAGE.format(head=head, script=_read_static_file("live.js"))
        return render_page([run.report_data], head=head, script=_read_static_file("live.js"))


_EMPTY_PAGE: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>paceline</title>
{head}
</head>
<body>
<main></main>
<script>{script}</script>
</body>
</html>
"""


def _read_static_file(name: str) -> str:
    """Read a file of the folder `static`."""
    return files("paceline.observe.watch").joinpath("static", name).read_text(encoding="utf-8")
