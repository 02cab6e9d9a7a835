"""What makes no sense is refused before any process is started."""

from __future__ import annotations

import pytest

from paceline.cluster.launcher.request import LaunchRequest
from paceline.errors import NotationError, UsageError
from paceline.notebook.proof import check_job


def test_what_makes_sense() -> None:
    check_job(LaunchRequest("train.py"))
    check_job(
        LaunchRequest(
            "train.py", workers=2, sync="LocalSGD(4)", cut="shard('a')", shares="2,1", name="circle"
        )
    )
    # how many workers others have isn't known
    check_job(LaunchRequest("train.py", workers=2, hosts=2, join="here:1", shares="3,2,1,1"))


@pytest.mark.parametrize(
    ("field", "value", "kind", "said"),
    [
        ("sync", "AllReduce(via='rong')", UsageError, "rong"),
        ("sync", "AllReduce(", NotationError, "can't be read"),
        ("cut", "shart('a')", NotationError, "shart"),
        ("shares", "3,2,1", NotationError, "3 numbers for 2 workers"),
        ("name", ".hidden", UsageError, "a run can't be called"),
    ],
)
def test_what_makes_none(field: str, value: str, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        check_job(LaunchRequest("train.py", workers=2, **{field: value}))  # type: ignore[arg-type]
