"""`pl.plan`: the answer of `paceline plan`, as an object."""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline as pl
from paceline.errors import UsageError
from paceline.planner import ledger
from paceline.planner.ledger import LedgerEntry
from paceline.planner.model_profile import format_profile
from paceline.planner.plan_file import format_plan, read_plan
from tests.harness.cut_plans import make_cut_profile


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    path = tmp_path / "profile.json"
    path.write_text(format_profile(make_cut_profile()))
    return path


def test_a_plan_is_an_object_that_is_saved(profile: Path) -> None:
    plan = pl.plan(profile, workers=2, cut=pl.shard(zero=2), memory="1GB")
    assert plan.verdict and plan.together.candidate.zero == 2
    assert plan.to_fields()["all_workers"]["workers"] == [2]
    plan.save(profile.parent / "plan.toml")
    saved = read_plan(profile.parent / "plan.toml")
    assert format_plan(saved) == format_plan(plan.to_file()) and saved.workers == (1,)
    assert repr(plan) == f"<Plan of train.py on this host: {plan.verdict}>"


def test_strategies_are_objects_or_texts(profile: Path) -> None:
    cluster = profile.parent / "two.toml"
    cluster.write_text('name = "two"\n[all]\nbandwidth = "1gbit"\n[[host]]\n[[host]]\n')
    plans = [
        pl.plan(str(profile), cluster=cluster, **chosen)  # type: ignore[arg-type]
        for chosen in (
            {"sync": pl.LocalSGD(every=8)},
            {"sync": "LocalSGD(every=8)"},
            {"what_if": ["sync=LocalSGD(8)"]},
        )
    ]
    assert {plan.together.candidate.sync for plan in plans} == {"LocalSGD(8)"}
    assert len({plan.together.step.seconds for plan in plans}) == 1
    assert pl.plan(profile, cluster=cluster, what_if=["hosts=4"]).cluster.workers == 4


def test_the_ledger_of_a_folder_is_read(profile: Path) -> None:
    entry = LedgerEntry("train.py", "this host", 2, "", 1.0, 2.0, 100)
    ledger.append_entry(profile.parent / ledger.NAME, entry)
    assert pl.plan(profile, workers=2, folder=profile.parent).correction == pytest.approx(2**0.5)
    assert pl.plan(profile, workers=2, folder=profile.parent / "other").correction == 1.0


def test_misuse(profile: Path, tmp_path: Path) -> None:
    for wishes, words in (
        ({}, "give either --workers N"),
        ({"workers": 2, "cluster": "x.json"}, "give either"),
        ({"workers": 2, "allow": "some"}, "allow='some' is unknown"),
        ({"workers": 2, "memory": "much"}, "--memory much"),
        ({"workers": 2, "sync": pl.LocalSGD(8), "what_if": ["sync=AllReduce()"]}, "one strategy"),
    ):
        with pytest.raises(UsageError, match=words):
            pl.plan(profile, **wishes)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="has its own workers"):
        pl.plan(tmp_path, workers=2)
    with pytest.raises(UsageError, match="has no summary of a run"):
        pl.plan(tmp_path)
    with pytest.raises(UsageError, match=r"say paceline plan model\.toml"):
        pl.plan("model.toml", workers=2)
