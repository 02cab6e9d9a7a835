"""A policy that can't be kept is refused when the run starts, or when it trains, with what to do
instead.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast, get_args

import pytest

from paceline.cluster.launcher import request
from paceline.data.loader import ShareLoader
from paceline.errors import UsageError
from paceline.servers.worker.strategy import ParameterServer
from paceline.sync.allreduce import AllReduce
from paceline.unequal.stragglers import straggler_policy
from paceline.unequal.stragglers.straggler_policy import Policy, PolicyCheck


def test_launchers_know_the_same_policies() -> None:
    assert get_args(Policy) == request.STRAGGLERS


def test_unknown_ones() -> None:
    assert (
        straggler_policy.read_policy(None) is None
        and straggler_policy.read_policy("evict") == "evict"
    )
    with pytest.raises(UsageError, match=r"straggler='evit' is unknown; .*evict"):
        straggler_policy.read_policy("evit")


def test_dropping_needs_backup_workers() -> None:
    straggler_policy.check_policy("drop", ParameterServer(backup_workers=1), survives=False)
    for strategy in (AllReduce(), ParameterServer()):
        with pytest.raises(
            UsageError,
            match=(
                r"(AllReduce|ParameterServer)\(\) drops none: "
                r".*ParameterServer\(backup_workers=1\)"
            ),
        ):
            straggler_policy.check_policy("drop", strategy, survives=True)


def test_leaving_needs_a_job_that_goes_on() -> None:
    straggler_policy.check_policy("evict", AllReduce(), survives=True)
    with pytest.raises(UsageError, match=r"start it with paceline run --min-workers N"):
        straggler_policy.check_policy("evict", AllReduce(), survives=False)


def loader(asked: Any) -> ShareLoader:
    return cast("ShareLoader", SimpleNamespace(terms=SimpleNamespace(asked=asked)))


def test_shares_that_are_fixed_follow_nothing() -> None:
    PolicyCheck("rebalance").check_leader(loader("auto"))
    for asked in (None, [1.0, 2.0]):
        with pytest.raises(
            UsageError, match=r"deal by speed with prepare\(\.\.\., shares='auto'\)"
        ):
            PolicyCheck("rebalance").check_leader(loader(asked))


def test_shares_that_follow_are_no_warning_alone() -> None:
    with pytest.raises(UsageError, match=r"leave out straggler"):
        PolicyCheck("warn").check_leader(loader("auto"))
    PolicyCheck("warn").check_leader(loader([1.0, 2.0]))
    PolicyCheck(None).check_leader(loader("auto"))
    PolicyCheck("evict").check_leader(loader("auto"))
