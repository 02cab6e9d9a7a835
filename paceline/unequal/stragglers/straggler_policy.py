"""Policies for workers that make the others wait, checked when a run starts and when it trains.

The option is `start(straggler=...)`.

warn       they are named, and that is all (the default)
rebalance  shares of the batch follow the speed of workers (the default with
           prepare(..., shares="auto"))
drop       late gradients of a step are dropped, by a strategy with backup workers
evict      a worker that is named repeatedly leaves, and its samples are dealt to the others (with
           --min-workers)
"""

from __future__ import annotations

from typing import Any

from paceline.cluster.launcher.request import Straggler
from paceline.data.loader import ShareLoader
from paceline.errors import UsageError
from paceline.formatting import describe_unknown_choice, format_as_call
from paceline.sync.base import Strategy

Policy = Straggler


def read_policy(asked: Any) -> Policy | None:
    """Return the policy that is asked for; None where nothing is.

    Raises `UsageError` for what is none.
    """
    if asked is not None and (wrong := describe_unknown_choice("straggler", asked, Policy)):
        raise UsageError(wrong)
    return asked  # type: ignore[no-any-return]


def check_policy(policy: Policy | None, strategy: Strategy, *, survives: bool) -> None:
    """Raise `UsageError` for a policy that this strategy, or this job, can't keep.

    `survives`: it goes on when workers are lost.
    """
    if policy == "drop" and not getattr(strategy, "backup_workers", 0):
        raise UsageError(
            f"straggler='drop' drops what comes last in a step, which {format_as_call(strategy)} "
            "doesn't: "
            "choose a strategy with backup workers, "
            "sync=ParameterServer(backup_workers=1), or straggler='warn'"
        )
    if policy == "evict" and not survives:
        raise UsageError(
            "straggler='evict' has slow workers leave, and this job needs all of them: "
            "start it with paceline run --min-workers N, or take straggler='warn'"
        )


class PolicyCheck:
    """Whether a loader that is trained from is dealt as the policy wants it."""

    def __init__(self, policy: Policy | None) -> None:
        self._policy = policy

    def check_leader(self, loader: ShareLoader) -> None:
        """Raise `UsageError` where the shares of this loader and the policy contradict each
        other.
        """
        follows = isinstance(loader.terms.asked, str)
        if self._policy == "rebalance" and not follows:
            raise UsageError(
                "straggler='rebalance' has shares follow the speed of workers, and those of this "
                "loader are fixed: prepare(..., "
                "shares='auto') deals by speed; or take straggler='warn'"
            )
        if self._policy == "warn" and follows:
            raise UsageError(
                "straggler='warn' leaves shares as they are, and those of this loader "
                f"(shares={loader.terms.asked!r}) follow the speed of "
                "workers: leave out straggler, or give shares that are fixed"
            )
