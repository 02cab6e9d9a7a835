"""`paceline plan --budget`: its options, and each answer in one line if they can't be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.planner.budgets.budget_options import (
    DEFAULT_TIMES,
    BudgetArguments,
    answer_budget,
    parse_budget_arguments,
    parse_time,
)

PLAN = (
    'script = "train.py"\nworkers = [2, 2]\n\n'
    "[samples_per_second]\n2 = 100.0\n4 = 190.0\n16 = 600.0\n"
)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "plan.toml").write_text(PLAN)
    return tmp_path / "plan.toml"


def ask(plan: Path, *words: str) -> BudgetArguments:
    return parse_budget_arguments(["--budget", "2000", "--price", "1.10", *words, str(plan)])


def read(plan: Path, *words: str) -> dict:  # type: ignore[type-arg]
    return json.loads(answer_budget(ask(plan, "--json", *words)))  # type: ignore[no-any-return]


def test_the_answer(plan: Path) -> None:
    text = answer_budget(ask(plan, "--failures", "6.5/1000-node-days"))
    for name in ("all train", "balanced", "replication first", "best"):
        assert any(line.startswith(name) for line in text.splitlines())
    assert "paceline run --workers 2 --hosts 8" in text and "train.py" in text
    # nobody asked for a number of samples
    assert "in time" not in text
    assert "in time" in answer_budget(ask(plan, "--samples", "1e6"))


def test_json(plan: Path) -> None:
    answer = read(plan, "--samples", "1e6")
    assert [row["name"] for row in answer["rows"]] == ["all train", "balanced", "replication first"]
    assert {*answer} == {"inputs", "servers", "rows", "best", "why", "changes", "run"}
    assert {"train", "standby", "copies", "period_seconds", "goodput", "samples_per_money", "days",
            "money", "chance_in_time"} <= {*answer["best"]}  # fmt: skip
    assert sum(answer["best"]["time"].values()) == pytest.approx(1)


def test_each_input_says_where_it_comes_from(plan: Path) -> None:
    assumed = {each["name"]: each["origin"] for each in read(plan)["inputs"]}
    given = {
        each["name"]: each["origin"]
        for each in read(plan, "--restart", "4min", "--servers", "4")["inputs"]
    }
    changed = {name for name, origin in given.items() if origin != assumed[name]}
    assert changed == {"servers", "samples/s of them", "to restart from a checkpoint, once noticed"}


@pytest.mark.parametrize(
    ("words", "row", "field"),
    [
        (("--failures", "5/day"), 0, "goodput"),
        (("--together", "4"), 0, "simulated"),
        (("--servers", "4"), 0, "train"),
        (("--workers-per-server", "1"), 0, "train"),
        (("--deadline", "3d"), 0, "train"),
        (("--samples", "1e6"), 0, "days"),
        (("--fixed",), 1, "goodput"),
        (("--max-copies", "1"), 1, "copies"),
        (("--notice", "4min"), 1, "goodput"),
        (("--heal", "4min"), 1, "goodput"),
        (("--join", "40min"), 1, "goodput"),
        (("--save", "1min"), 0, "period_seconds"),
        (("--restart", "1h"), 0, "goodput"),
        (("--replace", "2d"), 1, "goodput"),
        (("--copy-cost", "0.1"), 1, "goodput"),
    ],
)
def test_each_option_counts(plan: Path, words: tuple[str, ...], row: int, field: str) -> None:
    usual = ("--failures", "0.3/day", "--servers", "8")
    if words[0] in {"--servers", "--workers-per-server", "--deadline"}:
        usual = ("--failures", "0.3/day")
    before, after = read(plan, *usual), read(plan, *usual, *words)
    assert before["rows"][row][field] != after["rows"][row][field]


def test_times_of_a_run(plan: Path, tmp_path: Path) -> None:
    (tmp_path / "summary.json").write_text(
        json.dumps(
            {
                "checkpoints": {"count": 4, "stall_seconds": 10.0},
                "goodput": {
                    "heals": 2, "heal_seconds": 3.0, "restarts": 1, "restart_seconds": 50.0,
                },
            }
        )
    )  # fmt: skip
    inputs = {
        each["name"]: each["value"] for each in read(plan, "--measured", str(tmp_path))["inputs"]
    }
    assert inputs["a checkpoint stops training"] == "2.5 s"
    assert inputs["until the others train again, once they have noticed"] == "1.5 s"
    assert inputs["to restart from a checkpoint, once noticed"] == "50 s"
    # what is given counts more
    given = read(plan, "--measured", str(tmp_path), "--save", "7s")["inputs"]
    assert {each["name"]: each["value"] for each in given}["a checkpoint stops training"] == "7 s"


@pytest.mark.parametrize(
    "text", ["[]", "{}", "x", '{"checkpoints": 3}', '{"goodput": {"heals": 0}}']
)
def test_a_run_without_times(plan: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UsageError, match="--measured") as caught:
        read(plan, "--measured", str(tmp_path))
    assert "\n" not in str(caught.value)


def test_times() -> None:
    assert [parse_time(text, "--x") for text in ("90", "90s", "1.5min", "4h", "2d")] == [
        90, 90, 90, 14400, 172800,
    ]  # fmt: skip
    for text in ("", "soon", "3 weeks", "-5s"):
        with pytest.raises(UsageError, match="isn't a time"):
            parse_time(text, "--x")
    assert {*DEFAULT_TIMES} < {*BudgetArguments.__dataclass_fields__}


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--budget", "1"), "doesn't pay one server for one hour"),
        (("--budget", "0"), "above 0"),
        (("--budget", "much"), "invalid float"),
        (("--price", "-1"), "above 0"),
        (("--price", "nan"), "above 0"),
        (("--failures", "often"), "isn't a rate"),
        (("--failures", "none.csv"), "can't be read"),
        (("--servers", "9000"), "contradicts a budget"),
        (("--deadline", "0s"), "above 0"),
        (("--deadline", "300d"), "up to the deadline"),
        (("--samples", "0"), "above 0"),
        (("--together", "0"), "at least one"),
        (("--copy-cost", "2"), "below 0.5"),
        (("--copies", "2"), "unrecognized"),
        (("--max-copies", "0"), "1, 2 or 3"),
        (("--max-copies", "1", "--copy-cost", "0.1"), "contradicts"),
    ],
)
def test_what_is_refused_in_one_line(plan: Path, words: tuple[str, ...], fault: str) -> None:
    with pytest.raises(UsageError, match=fault) as caught:
        answer_budget(ask(plan, *words))
    assert "\n" not in str(caught.value)


def test_options_that_contradict_a_trace(plan: Path, tmp_path: Path) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text("server,from_hour,to_hour,state\na,0,5,up\na,5,6,down\na,6,40,up\n")
    answer_budget(ask(plan, "--failures", str(trace)))
    for words in (("--replace", "1h"), ("--together", "2"), ("--together", "1")):
        with pytest.raises(UsageError, match="contradicts a trace"):
            answer_budget(ask(plan, "--failures", str(trace), *words))
