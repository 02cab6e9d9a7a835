"""Finds the optional abilities of a strategy. No other module looks for them."""

from __future__ import annotations

from paceline.sync.abilities import (
    Abilities,
    ConvergesReplicas,
    HasSyncPoints,
    KeepsServers,
    KeepsUnreplicatedState,
    LeavesLockstep,
    LendsGradients,
    Recoverable,
    RemoteClipping,
    RemoteOptimizer,
    ReportsServers,
    StepObserver,
)
from paceline.sync.base import Sync


def resolve_abilities(sync: Sync) -> Abilities:
    """Find the abilities of a strategy; None for each one that it lacks."""
    return Abilities(
        observer=sync if isinstance(sync, StepObserver) else None,
        converging=sync if isinstance(sync, ConvergesReplicas) else None,
        replicated=sync if isinstance(sync, HasSyncPoints) else None,
        recoverable=sync if isinstance(sync, Recoverable) else None,
        unreplicated=sync if isinstance(sync, KeepsUnreplicatedState) else None,
        lender=sync if isinstance(sync, LendsGradients) else None,
        remote=sync if isinstance(sync, RemoteOptimizer) else None,
        clipping=sync if isinstance(sync, RemoteClipping) else None,
        unlocked=sync if isinstance(sync, LeavesLockstep) else None,
        keeping=sync if isinstance(sync, KeepsServers) else None,
        reports=sync if isinstance(sync, ReportsServers) else None,
    )
