"""Schedulers that take machines away: whether SIGTERM has a run save a checkpoint first."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import PlaceError

# Variables of schedulers that send SIGTERM before they take a machine away.
_PREEMPTING_VARIABLES = ("KUBERNETES_SERVICE_HOST", "SLURM_JOB_ID", "RAY_JOB_ID")


def saves_on_term(environ: Mapping[str, str]) -> bool:
    """Whether SIGTERM has a run save a checkpoint.

    By default it has under Kubernetes, Slurm and Ray. PACELINE_SAVE_ON_TERM is 0 or 1 to say it.
    """
    text = environ.get("PACELINE_SAVE_ON_TERM", "")
    if text not in {"", "0", "1"}:
        raise PlaceError(f"PACELINE_SAVE_ON_TERM={text} has to be 0 or 1")
    return text == "1" or (not text and any(map(environ.get, _PREEMPTING_VARIABLES)))
