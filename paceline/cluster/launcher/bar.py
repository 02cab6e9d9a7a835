"""The bar of a job on the launcher's terminal: below all that workers write, as the worker that
writes the run down tells of its steps.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence

from paceline.cluster.launcher import output
from paceline.cluster.launcher.output import Screen
from paceline.cluster.launcher.worker import WorkerProcess
from paceline.status.live_bar import bar_on, capable, reflows
from paceline.status.run_status import RunStatus


def is_there(environ: Mapping[str, str], *, bare: bool = False) -> bool:
    """Whether a bar is drawn in these surroundings, below what workers write to standard error."""
    return not bare and os.isatty(2) and capable(environ)


def screens(environ: Mapping[str, str], *, bare: bool = False) -> tuple[Screen, Screen]:
    """Make the screens of standard output and error (`output.screens`), with a bar where there
    is to be one.
    """
    bar = bar_on(sys.stderr, breaks=reflows(environ)) if is_there(environ, bare=bare) else None
    return output.screens(bare=bare, bar=bar)


class JobBar:
    """Shows on `screen` how far the run is, as one of the workers tells."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._teller: WorkerProcess | None = None

    def follow(self, workers: Sequence[WorkerProcess]) -> None:
        """Show what one of them has told since, if anything, below the lines that all have written.

        When that worker has told all, or has ended, it is for the last time.
        """
        for worker in workers:
            status = worker.take_status()
            if status is not None:
                self._teller = worker
                self._screen.follow(RunStatus.read(status))
            if self._teller is worker and (worker.told_all or worker.ended is not None):
                self._teller = None
                self._screen.follow(None)
        self._screen.settle()
