"""Proof that what was asked of a launcher makes sense, before any process is started for it."""

from __future__ import annotations

from paceline import notation
from paceline.cluster.launcher.request import LaunchRequest
from paceline.record import folder as folders
from paceline.record.trackers import catalogue


def prove(job: LaunchRequest) -> None:
    """Raise `UsageError` for a strategy, cuts, shares, trackers or a name that no worker could use:
    once, rather than by each.

    What only the launcher can tell, `paceline.cluster.launcher.request.check` does.
    """
    if job.sync is not None:
        notation.prove(job.sync)
    if job.cut is not None:
        notation.prove_cuts(job.cut)
    if job.shares is not None:
        notation.shares(job.shares, job.workers if job.hosts == 1 and job.join is None else None)
    if job.report_to is not None:
        specs = catalogue.parse_trackers(job.report_to)
        if job.hosts == 1:  # else the first worker may run elsewhere
            catalogue.check_trackers_installed(specs)
    if job.name is not None:
        folders.check_run_name(job.name)
