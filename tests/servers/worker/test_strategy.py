"""The arguments of `ParameterServer`."""

from __future__ import annotations

import math
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.servers.worker.strategy import ParameterServer


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"staleness": -1}, "is not a bound"),
        ({"staleness": 1.5}, "is not a bound"),
        ({"staleness": math.nan}, "is not a bound"),
        ({"backup_workers": -1}, "is not a number of workers"),
        ({"staleness": 1, "backup_workers": 1}, "leave out staleness, or backup_workers"),
        ({"replicas": 2, "staleness": 2}, "is for workers in lockstep"),
        ({"replicas": 2, "staleness": math.inf}, "is for workers in lockstep"),
        ({"replicas": 2, "backup_workers": 1}, "is for workers in lockstep"),
    ],
)
def test_what_can_not_be_asked_for(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        ParameterServer(**options)
