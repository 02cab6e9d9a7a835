"""Policies for workers that make the others wait: read at the start, checked during training.

The option is `start(straggler=...)`.

warn       stragglers are named, and nothing else happens (the default)
rebalance  shares of the batch follow the speed of workers (the default with
           prepare(..., shares="auto"))
drop       the last gradients of a step are dropped, by a strategy with backup workers
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


def read_policy(name: Any) -> Policy | None:
    """Read the policy of the option `straggler`; None if it isn't given.

    Raises:
        UsageError: No policy has this name.
    """
    if name is not None and (wrong := describe_unknown_choice("straggler", name, Policy)):
        raise UsageError(wrong)
    return name  # type: ignore[no-any-return]


def check_policy(policy: Policy | None, strategy: Strategy, *, survives: bool) -> None:
    """Raise `UsageError` if the strategy or the job can't follow the policy.

    Args:
        policy: Policy of the run; None is always possible.
        strategy: Strategy of the run.
        survives: Whether the job goes on when workers are lost.
    """
    if policy == "drop" and not getattr(strategy, "backup_workers", 0):
        raise UsageError(
            "straggler='drop' drops the last gradients of a step, and "
            f"{format_as_call(strategy)} drops none: "
            "choose a strategy with backup workers, "
            "sync=ParameterServer(backup_workers=1), or straggler='warn'"
        )
    if policy == "evict" and not survives:
        raise UsageError(
            "straggler='evict' removes slow workers, and this job needs all of its workers: "
            "start it with paceline run --min-workers N, or choose straggler='warn'"
        )


class PolicyCheck:
    """Checks that the shares of a loader fit the policy."""

    def __init__(self, policy: Policy | None) -> None:
        self._policy = policy

    def check_leader(self, loader: ShareLoader) -> None:
        """Raise `UsageError` if the shares of this loader contradict the policy."""
        # Shares are a word such as "auto" if they follow speeds, and numbers if they are fixed.
        follows = isinstance(loader.terms.asked, str)
        if self._policy == "rebalance" and not follows:
            raise UsageError(
                "straggler='rebalance' adjusts shares to the speed of workers, and the shares of "
                "this loader are fixed: deal by speed with prepare(..., shares='auto'), or choose "
                "straggler='warn'"
            )
        if self._policy == "warn" and follows:
            raise UsageError(
                "straggler='warn' leaves shares as they are, and the shares of this loader "
                f"(shares={loader.terms.asked!r}) follow the speed of workers: leave out "
                "straggler, or give fixed shares"
            )
