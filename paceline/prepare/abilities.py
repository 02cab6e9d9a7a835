"""Finds out what a strategy can beyond the core; no other module asks."""

from __future__ import annotations

from paceline.sync.abilities import (
    Abilities,
    Converging,
    LendsGradients,
    Recoverable,
    RemoteClipping,
    RemoteOptimizer,
    Replicated,
    ServerKeeping,
    ServerReports,
    StepObserver,
    Unlocked,
    Unreplicated,
)
from paceline.sync.base import Sync


def resolve(sync: Sync) -> Abilities:
    """Return the abilities of a strategy."""
    return Abilities(
        observer=sync if isinstance(sync, StepObserver) else None,
        converging=sync if isinstance(sync, Converging) else None,
        replicated=sync if isinstance(sync, Replicated) else None,
        recoverable=sync if isinstance(sync, Recoverable) else None,
        unreplicated=sync if isinstance(sync, Unreplicated) else None,
        lender=sync if isinstance(sync, LendsGradients) else None,
        remote=sync if isinstance(sync, RemoteOptimizer) else None,
        clipping=sync if isinstance(sync, RemoteClipping) else None,
        unlocked=sync if isinstance(sync, Unlocked) else None,
        keeping=sync if isinstance(sync, ServerKeeping) else None,
        reports=sync if isinstance(sync, ServerReports) else None,
    )
