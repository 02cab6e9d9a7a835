"""Checks the options of a launch before any process is started."""

from __future__ import annotations

from paceline import notation
from paceline.cluster.launcher.request import LaunchRequest
from paceline.record import folder as folders
from paceline.record.trackers import catalogue


def check_job(job: LaunchRequest) -> None:
    """Raise `UsageError` for a strategy, cuts, shares, trackers or a name that no worker can use.

    The error appears once here, and would appear once for each worker otherwise.
    `paceline.cluster.launcher.request` checks the options that concern only the launcher.
    """
    if job.sync is not None:
        notation.verify_strategy(job.sync)
    if job.cut is not None:
        notation.verify_cuts(job.cut)
    if job.shares is not None:
        notation.parse_shares(
            job.shares, job.workers if job.hosts == 1 and job.join is None else None
        )
    if job.report_to is not None:
        specs = catalogue.parse_trackers(job.report_to)
        # With several hosts, the worker that uses the trackers may run on another host.
        if job.hosts == 1:
            catalogue.check_trackers_installed(specs)
    if job.name is not None:
        folders.check_run_name(job.name)
