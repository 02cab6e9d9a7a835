"""The answer: verdicts, what fits, what would change it, files and ledgers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.planner import ledger
from paceline.planner.answer import Wishes, make_plan
from paceline.planner.ledger import LedgerEntry
from paceline.planner.plan_file import format_plan, parse_plan
from paceline.planner.planned_cluster import PlannedCluster, describe_this_host
from paceline.planner.trace_file import format_trace
from tests.harness.cut_plans import make_cut_profile
from tests.harness.plans import make_condition, make_hosts, make_profile

PAYS = make_profile((make_condition(),))
HEAVY = make_profile((make_condition(),), parameters=20, numel=200_000)
SHARED = make_profile((make_condition(1, 2), make_condition(2, 1)))


def verdict(cluster: PlannedCluster, profile: object = PAYS, **wishes: bool) -> str:
    return make_plan(profile, cluster, Wishes(**wishes)).verdict  # type: ignore[arg-type]


def test_verdicts() -> None:
    fast, slow = make_hosts(2, bytes_per_second=1e10), make_hosts(2, bytes_per_second=1e6)
    assert verdict(fast).startswith("2 workers on 2 hosts take 0.6")
    assert verdict(fast).endswith("they pay.")
    text = verdict(slow, HEAVY)
    assert "stay with one worker" in text and "The exchange takes" in text
    assert "LocalSGD(32)" in verdict(make_hosts(2, bytes_per_second=2e7), HEAVY, lossy=True)


def test_a_verdict_for_fewer_workers() -> None:
    cluster = make_hosts(2, workers=2, cores=2, bytes_per_second=1e6)
    text = verdict(cluster, SHARED)
    assert text.startswith("4 workers on 2 hosts take ") and "2 workers take 0.5" in text


def test_turnings_are_right() -> None:
    """At the link that is named, the other way is the best; the answer isn't yet on this side."""
    plan = make_plan(HEAVY, make_hosts(2, bytes_per_second=1e7))
    assert plan.best.candidate.cluster.workers == 1
    (turning,) = plan.turnings
    assert turning.best.candidate.cluster.workers == 2
    assert "Gbit/s" in turning.what or "Mbit/s" in turning.what


def test_pinned_strategies() -> None:
    cluster = make_hosts(2)
    pinned = make_plan(PAYS, cluster, Wishes(sync="LocalSGD(8)"))
    assert pinned.together.candidate.sync == "LocalSGD(8)"
    assert {each.candidate.cluster.workers for each in pinned.priced} == {1, 2}
    with pytest.raises(UsageError, match=r"there are: AllReduce\(\), AllReduce\(codec=int8\(\)\)"):
        make_plan(PAYS, cluster, Wishes(sync="Gossip()"))


def test_memory() -> None:
    needed = make_plan(PAYS, make_hosts(1)).best.memory_bytes
    assert make_plan(PAYS, make_hosts(1), Wishes(memory_bytes=needed)).best.memory_bytes == needed
    with pytest.raises(UsageError, match=r"A global batch of 63 samples would fit"):
        make_plan(PAYS, make_hosts(1), Wishes(memory_bytes=needed - 1000))
    with pytest.raises(UsageError, match=r"cut the model"):
        make_plan(PAYS, make_hosts(1), Wishes(memory_bytes=1e6))


def test_checkpoints_are_named_if_nothing_else_fits() -> None:
    profile = make_cut_profile()
    host = describe_this_host(2, 2)
    plain = [each for each in make_plan(profile, host).priced if not each.candidate.recompute]
    limit = min(each.memory_bytes for each in plain) - 1
    words = r"torch.utils.checkpoint around blocks\.\*, this would: .*activation checkpoints"
    with pytest.raises(UsageError, match=words):
        make_plan(profile, host, Wishes(memory_bytes=limit))


def test_cuts_are_written_to_the_file() -> None:
    """A model that fits nowhere as a whole is cut."""
    plan = make_plan(make_cut_profile(), describe_this_host(2, 2))
    cut = next(each for each in plan.priced if each.candidate.stages > 1)
    file = replace(plan, best=cut).to_file()
    assert file.mesh == "stage=2" and file.cut.startswith('pipeline("auto", schedule=')
    assert parse_plan(format_plan(file), "plan.toml") == replace(
        file,
        seconds_per_step=pytest.approx(file.seconds_per_step, rel=1e-4),
        uncertainty=pytest.approx(file.uncertainty, rel=0.01),
        samples_per_second=pytest.approx(file.samples_per_second, rel=1e-4),
    )


def test_fields_of_json() -> None:
    fields = make_plan(PAYS, make_hosts(2)).to_fields()
    assert json.loads(json.dumps(fields)) == fields
    assert fields["pays"] is True
    assert fields["best"]["workers"] == [1, 1] and fields["one_worker"]["workers"] == [1]
    assert sum(fields["best"]["parts"].values()) == pytest.approx(
        fields["best"]["seconds_per_step"]
    )


def test_a_plan_is_written_and_read() -> None:
    plan = make_plan(SHARED, make_hosts(2, workers=2, cores=2, bytes_per_second=1e11)).to_file()
    read = parse_plan(format_plan(plan), "plan.toml")
    assert read.workers == plan.workers == (2, 2)
    assert read.seconds_per_step == pytest.approx(plan.seconds_per_step, rel=1e-5)
    assert set(read.samples_per_second) == {1, 2, 4}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("version = 1", "of this version"),
        ("workers = [1]", "for each host"),
        ("workers = [0, 1]", "above 0"),
        ("seconds_per_step = 0.0", "above 0"),
        ('hosts = "two"', "isn't a plan"),
        ("sync =", "isn't a plan"),
    ],
)
def test_damaged_plans_are_refused(line: str, words: str) -> None:
    name = line.partition(" ")[0]
    lines = format_plan(make_plan(PAYS, make_hosts(2)).to_file()).splitlines()
    text = "\n".join(line if each.startswith(f"{name} ") else each for each in lines)
    with pytest.raises(UsageError, match=words):
        parse_plan(text, "plan.toml")


def test_a_run_is_compared_by_its_median_without_the_first_steps() -> None:
    plan = make_plan(PAYS, describe_this_host(2, 2)).to_file()
    entry = ledger.compare_run(plan, [9.0, 9.0, 9.0, *[plan.seconds_per_step * 1.1] * 20])
    assert entry is not None and entry.steps == 20
    assert entry.ratio == pytest.approx(1.1) and "10% more" in entry.describe()
    assert ledger.compare_run(plan, []) is None


def test_a_ledger_corrects_the_next_plan(tmp_path: Path) -> None:
    def entry(ratio: float, script: str = "train.py", cluster: str = "mine") -> LedgerEntry:
        return LedgerEntry(script, cluster, 2, "", 0.1, 0.1 * ratio, 50)

    path = tmp_path / "plan.toml"
    for each in (entry(1.1), entry(1.3), entry(5.0), entry(2.0, cluster="other")):
        ledger.append_entry(path, each)
    with (tmp_path / ledger.NAME).open("a") as file:
        file.write('{"script": "damaged')
    entries = ledger.read_entries(tmp_path / ledger.NAME)
    assert len(entries) == 4
    expected = (1.1 * 1.3) ** (1 / 3)
    assert ledger.learn_correction(entries, "mine", "train.py") == pytest.approx(expected)
    assert ledger.learn_correction(entries, "mine", "another.py") == pytest.approx(expected)
    assert ledger.learn_correction(entries, "unknown", "train.py") == 1.0
    assert ledger.read_entries(tmp_path / "none") == []


def test_a_trace_has_all_events() -> None:
    plan = make_plan(PAYS, make_hosts(2))
    events = json.loads(format_trace(plan.together.step))["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == len(plan.together.step.events) > 5
    assert min(span["dur"] for span in spans) >= 0
