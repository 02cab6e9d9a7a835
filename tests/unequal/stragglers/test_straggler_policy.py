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
    assert straggler_policy.read(None) is None and straggler_policy.read("evict") == "evict"
    with pytest.raises(UsageError, match=r"straggler='evit' is unknown; .*evict"):
        straggler_policy.read("evit")


def test_dropping_needs_backup_workers() -> None:
    straggler_policy.check("drop", ParameterServer(backup_workers=1), survives=False)
    for strategy in (AllReduce(), ParameterServer()):
        with pytest.raises(
            UsageError,
            match=(
                r"which (AllReduce|ParameterServer)\(\) doesn't: "
                r".*ParameterServer\(backup_workers=1\)"
            ),
        ):
            straggler_policy.check("drop", strategy, survives=True)


def test_leaving_needs_a_job_that_goes_on() -> None:
    straggler_policy.check("evict", AllReduce(), survives=True)
    with pytest.raises(UsageError, match=r"start it with paceline run --min-workers N"):
        straggler_policy.check("evict", AllReduce(), survives=False)


def loader(asked: Any) -> ShareLoader:
    return cast("ShareLoader", SimpleNamespace(terms=SimpleNamespace(asked=asked)))


def test_shares_that_are_fixed_follow_nothing() -> None:
    PolicyCheck("rebalance").led(loader("auto"))
    for asked in (None, [1.0, 2.0]):
        with pytest.raises(UsageError, match=r"shares='auto'\) deals by speed"):
            PolicyCheck("rebalance").led(loader(asked))


def test_shares_that_follow_are_no_warning_alone() -> None:
    with pytest.raises(UsageError, match=r"leave out straggler"):
        PolicyCheck("warn").led(loader("auto"))
    PolicyCheck("warn").led(loader([1.0, 2.0]))
    PolicyCheck(None).led(loader("auto"))
    PolicyCheck("evict").led(loader("auto"))
