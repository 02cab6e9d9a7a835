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
from paceline.status.live_bar import bar_on, capable, reflows
from paceline.status.run_status import RunStatus


def is_there(environ: Mapping[str, str], *, bare: bool = False) -> bool:
    """Whether a bar is drawn below standard error, in this environment."""
    return not bare and os.isatty(2) and capable(environ)


def screens(environ: Mapping[str, str], *, bare: bool = False) -> tuple[Screen, Screen]:
    """Make the screens of standard output and error, with a bar if there is to be one."""
    bar = bar_on(sys.stderr, breaks=reflows(environ)) if is_there(environ, bare=bare) else None
    return output.screens(bare=bare, bar=bar)


class JobBar:
    """Shows the progress of the run on `screen`, as one of the workers reports it."""

    def __init__(self, screen: Screen) -> None:
        self._screen = screen
        self._teller: WorkerProcess | None = None

    def follow(self, workers: Sequence[WorkerProcess]) -> None:
        """Show the latest progress that a worker has reported, below the lines of all workers.

        When that worker has reported the last progress, or has ended, the bar becomes text.
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
