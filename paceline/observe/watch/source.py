"""What a live page shows: the moment of a run, at each look, and the sections of its report, as
often as drawing them takes little.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from paceline.errors import UsageError
from paceline.observe.metrics import MetricsReader
from paceline.observe.page.data import page_data
from paceline.observe.page.document import page
from paceline.observe.page.markup import element
from paceline.observe.page.sections import sections
from paceline.observe.watch.now import NowReader, RunNow
from paceline.observe.watch.section import now_section
from paceline.record.folder import RunFolder

PART: Final = 0.005  # of one core, which drawing the report may take: training has the rest
LONGEST: Final = 60.0  # seconds for which it may stay as it is
Clock = Callable[[], float]


class _Followed:
    """One run that is followed."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.now, self.metrics = folder, NowReader(folder), MetricsReader(folder)
        self.data: dict[str, Any] | None = None  # of its report, once there is some
        self.drawn: dict[str, str] = {}  # of that
        # when it is drawn again, and of which state of the run it was drawn
        self._due, self._state = -float("inf"), ""

    def draw(self, state: str, clock: Clock, spent: Clock) -> None:
        """Draw the report, if it is time or the run has come to another state."""
        if clock() < self._due and state == self._state:
            return
        began = spent()
        try:
            self.data = {**page_data(self.folder, self.metrics), "beside_now": True}
            self.drawn = dict(sections([self.data]))
        except (UsageError, OSError) as error:  # a file of it is damaged, or has just been replaced
            self.drawn = {
                "problem": element(
                    "section", {"id": "problem"}, element("p", {"class": "warning"}, str(error))
                )
            }
        self._state, self._due = state, clock() + min((spent() - began) / PART, LONGEST)


class RunPage:
    """The page of a run.

    By `clock` the report is drawn again; `spent` are the seconds of a processor that this thread
    has taken.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        clock: Clock = time.monotonic,
        spent: Clock = time.thread_time,
    ) -> None:
        self._clock, self._spent = clock, spent
        self._run = None if folder is None else _Followed(RunFolder(folder))
        self._told: tuple[str, ...] = ()

    def follow(self, folder: Path) -> None:
        """Show this run from now on."""
        if self._run is None or self._run.folder.path != folder:
            self._run = _Followed(RunFolder(folder))

    def tell(self, words: str) -> None:
        """Show what the launcher says of the run."""
        self._told = (*self._told, words)[-3:]

    def look(self) -> Mapping[str, str]:
        """Return the sections as they are now, the moment first."""
        run = self._run
        if run is None:
            return {"now": now_section(RunNow(), self._told)}
        now = run.now.read()
        run.draw(now.state, self._clock, self._spent)
        return {"now": now_section(now, self._told), **run.drawn}

    @property
    def key(self) -> str:
        """What differs where a page has to be loaded again, as there is another run on it, or
        other sections.
        """
        run = self._run
        return "" if run is None else "\n".join([str(run.folder.path), *run.drawn])

    def document(self) -> str:
        """Return the page as it was at the last look, with what follows it from there on."""
        run, head = self._run, f"<style>\n{_static('live.css')}</style>"
        if run is None or run.data is None:
            return _EMPTY.format(head=head, script=_static("live.js"))
        return page([run.data], head=head, script=_static("live.js"))


_EMPTY: Final = """<!doctype html>
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


def _static(name: str) -> str:
    return files("paceline.observe.watch").joinpath("static", name).read_text(encoding="utf-8")
