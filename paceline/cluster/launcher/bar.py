"""The bar of a job on the launcher's terminal, below all output of the workers.

The worker that records the run reports its progress, and the bar shows it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from paceline.cluster.launcher import output
from paceline.cluster.launcher.output import Screen
from paceline.cluster.launcher.worker import WorkerProcess
from paceline.status.live_bar import can_show_bar, make_bar, reflows_lines
from paceline.status.run_status import RunStatus


def is_bar_drawn(environ: Mapping[str, str], *, bare: bool = False) -> bool:
    """Whether a bar is drawn below standard error, in this environment."""
    return not bare and os.isatty(2) and can_show_bar(environ)


def make_screens(environ: Mapping[str, str], *, bare: bool = False) -> tuple[Screen, Screen]:
    """Make the screens of standard output and error, with a bar if there is to be one."""
    bar = (
        make_bar(sys.stderr, breaks=reflows_lines(environ))
        if is_bar_drawn(environ, bare=bare)
        else None
    )
    return output.make_screens(bare=bare, bar=bar)


class JobBar:
    """Shows the progress of the run on `screen`, as one of the workers reports it."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._reporting_worker: WorkerProcess | None = None

    def show_progress(self, workers: Sequence[WorkerProcess]) -> None:
        """Show the latest progress that a worker has reported, below the lines of all workers.

        When that worker has reported the last progress, or has ended, the bar becomes text.
        """
        for worker in workers:
            status = worker.take_status()
            if status is not None:
                self._reporting_worker = worker
                self._screen.show_status(RunStatus.from_fields(status))
            if self._reporting_worker is worker and (
                worker.has_told_all or worker.ended_at is not None
            ):
                self._reporting_worker = None
                self._screen.show_status(None)
        self._screen.redraw_bar()
