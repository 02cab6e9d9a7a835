"""What a run that outlives lost workers does before it trains, and after a step."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from paceline.elastic.survival import Survival


def survival(*, fresh: bool = False, apart: bool = False) -> tuple[Survival, MagicMock]:
    parts = MagicMock()
    parts.recovery.has_no_state = fresh
    parts.prepared.optimizers = []
    parts.prepared.state = SimpleNamespace(parts=[])
    parts.loop.apart = apart
    rest = {
        name: getattr(parts, name) for name in ("collector", "records", "tally", "save", "depart")
    }
    return Survival(
        parts.recovery, parts.leaving, parts.view, parts.loop, parts.prepared, **rest
    ), parts


def test_who_trains_is_armed_and_who_has_just_come_is_let_in_first() -> None:
    found, parts = survival()
    found.begin_surviving()
    assert (
        parts.recovery.arm_recovery.called
        and not parts.recovery.join_run.called
        and not found.take_joined_flag()
    )
    found, parts = survival(fresh=True)
    found.begin_surviving()
    assert (
        parts.recovery.join_run.called
        and parts.tally.enter_job.called
        and parts.view.take_part.called
        and not parts.recovery.arm_recovery.called
    )
    assert found.take_joined_flag() and not found.take_joined_flag()


@pytest.mark.parametrize("apart", [False, True])
def test_hosts_leave_where_workers_are_in_lockstep(apart: bool) -> None:
    found, parts = survival(apart=apart)
    found.step_ended(3)
    assert parts.leaving.copy_before_leaving.called is not apart
