"""Seconds that a quota needs to give what a step has used."""

from __future__ import annotations

from paceline.unequal.shares.quota import LOOK, ProcessorQuota


def test_a_step_lasts_for_as_long_as_the_quota_needs() -> None:
    used, now, cores = (
        iter([1.0, 1.06, 1.16, 1.16, 1.26]),
        iter([0.0, LOOK / 2, LOOK, LOOK * 2]),
        iter([0.5, 0.25, None]),
    )
    quota = ProcessorQuota(
        1, quota=lambda: next(cores), used=lambda: next(used), clock=lambda: next(now)
    )
    found = [quota.measure_lap() for _ in range(4)]
    assert [round(each, 9) for each in found] == [0.12, 0.2, 0.0, 0.0], (
        "looked up anew after a while; None limits nothing"
    )


def test_workers_of_a_host_share_its_quota() -> None:
    used = iter([0.0, 0.1])
    quota = ProcessorQuota(2, quota=lambda: 1.0, used=lambda: next(used), clock=lambda: 0.0)
    assert quota.measure_lap() == 0.2
