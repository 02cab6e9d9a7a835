"""Timings: their defaults fit each other, they are read from the environment, and all that waits
is given them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path

import pytest

from paceline.cluster.discover import discover_place, read_timings
from paceline.errors import PlaceError
from paceline.timings import DEFAULT_TIMINGS, Timings, parse_timings
from tests.harness.sources import TOGETHER, Parsed, parsed

PACKAGE = Path(__file__).parent.parent / "paceline"
SECONDS = asdict(DEFAULT_TIMINGS)
# modules with seconds of their own: why those are no timings of a job
ELSEWHERE: dict[str, str] = {
    "bridges/horovod/common/basics.py": "the default of an option",
    "bridges/horovod/engine/engine.py": "when a rank is worth a warning, as in Horovod",
    "cluster/control/progress.py": "a worker that somebody holds by hand",
    "cluster/launcher/janitor.py": "how exact the clock of files is",
    "cluster/launcher/output.py": "how lines are shown",
    "planner/planning/finished_run.py": "how long a run has to be measured for a plan",
    "data/reader_failure.py": "processes of a DataLoader, which no other host knows",
    "observe/advice.py": "times of steps that are worth advice",
    "observe/pipeline_report.py": "times of steps that are worth a line",
    "observe/report.py": "times of steps that are worth a line",
    "observe/watch/now.py": "the age of a run's files at which its page says so",
    "observe/watch/server.py": "connections of browsers to the page",
    "planner/exchange_cost.py": "what exchanges cost, for predictions",
    "record/live.py": "the age of a run's file at which its writer counts as gone",
    "record/pipeline_profile.py": "waits inside a pipeline that are worth a bar in the trace",
    "record/timeline.py": "lateness that is worth a mark in the trace",
    "sync/localsgd/options.py": "the default of an option",
    "unequal/probe/step_profiler.py": "how long copies of a script are measured on one machine",
}


def test_what_waits_is_more_patient_than_what_it_waits_for() -> None:
    t = DEFAULT_TIMINGS
    assert (
        t.membership.silence > 4 * t.membership.beat
        and t.rendezvous.silence > 4 * t.rendezvous.beat
    )
    assert t.rendezvous.invitation > 2 * t.membership.visit + t.membership.visited
    # a launcher that visits sends no heartbeats
    assert t.membership.visited < t.membership.silence - t.membership.beat
    assert t.supervisor.verdict > t.rendezvous.echo + t.rendezvous.culprit
    assert (
        t.hangs.margin
        > t.hangs.answer + t.hangs.stack_dump + 2 * t.hangs.look + 2 * t.supervisor.look
    )
    assert t.recovery.form >= t.recovery.view and t.replacement.leave > t.supervisor.kill


@pytest.mark.parametrize("group", SECONDS)
def test_what_differs_is_read_from_the_environment(group: str) -> None:
    for name, seconds in SECONDS[group].items():
        found = read_timings({"PACELINE_TIMINGS": json.dumps({group: {name: seconds / 2}})})
        assert asdict(found) == {**SECONDS, group: {**SECONDS[group], name: seconds / 2}}


def test_workers_have_those_of_their_environment() -> None:
    assert discover_place({}).timings == read_timings({}) == DEFAULT_TIMINGS
    assert (
        discover_place({"PACELINE_TIMINGS": '{"recovery": {"view": 1}}'}).timings.recovery.view == 1
    )


@pytest.mark.parametrize(
    "text",
    [
        "x",
        "[]",
        "7",
        '{"recovery": 1.0}',
        '{"recovery": {"views": 1.0}}',
        '{"recoveries": {}}',
        '{"recoveries": {"view": 1.0}}',
        '{"recovery": {"view": "1"}}',
        '{"recovery": {"view": -1}}',
        '{"recovery": {"view": true}}',
        '{"recovery": {"view": Infinity}}',
        '{"recovery": {"view": NaN}}',
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_timings(text)
    with pytest.raises(PlaceError, match="PACELINE_TIMINGS"):
        discover_place({"PACELINE_TIMINGS": text})


def test_seconds_are_kept_in_one_place() -> None:
    """A time for which parts of a job wait is a field of `Timings`, and no constant of a module."""
    found = [
        path
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"^_?[A-Z_]*SECONDS\b.* = ", path.read_text(), re.MULTILINE)
    ]
    names = {path.relative_to(PACKAGE).as_posix() for path in found}
    assert {name for name in names if not name.startswith("lab/")} == {*ELSEWHERE}


def takers(tree: ast.Module) -> Iterator[str]:
    """The functions, and the classes by their constructors or fields, that have timings with a
    default.
    """
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            members = [
                each
                for each in node.body
                if isinstance(each, ast.AnnAssign)
                and each.value
                and ast.unparse(each.target) == "timings"
            ]
            makers = [
                each
                for each in node.body
                if isinstance(each, ast.FunctionDef) and each.name == "__init__"
            ]
            if members or any(_takes(each) for each in makers):
                yield node.name
        elif isinstance(node, ast.FunctionDef) and _takes(node):
            yield node.name


def _takes(function: ast.FunctionDef) -> bool:
    return any(each.arg == "timings" for each in function.args.kwonlyargs)


def silent(module: str, source: Parsed, names: set[str]) -> list[str]:
    """The calls, in a module, of what has one of these dotted names, that give no timings."""
    known = {
        node.name: f"{module}.{node.name}"
        for node in source.tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    for node in source.nodes:
        if isinstance(node, ast.ImportFrom):
            known |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    calls = [
        node
        for node in source.nodes
        if isinstance(node, ast.Call) and known.get(ast.unparse(node.func)) in names
    ]
    return [
        ast.unparse(call)[:80]
        for call in calls
        if not any(each.arg == "timings" for each in call.keywords)
    ]


@TOGETHER
def test_all_that_has_timings_is_given_them() -> None:
    """The defaults of constructors are there for tests: a launcher, a worker and a server give
    down what they have.
    """
    paths = {
        path: ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in PACKAGE.rglob("*.py")
    }
    sources = {name: parsed(path.read_text()) for path, name in paths.items()}
    names = {
        f"{module}.{name}" for module, source in sources.items() for name in takers(source.tree)
    }
    assert {
        "paceline.cluster.launcher.supervisor.Supervisor",
        "paceline.cluster.hosts.meeting.Meeting",
    } <= names
    names -= {"paceline.cluster.discover.Place"}  # `discover` gives them at its end
    found = {
        module: missed
        for module, source in sources.items()
        if (missed := silent(module, source, names))
    }
    assert {
        module: missed for module, missed in found.items() if not module.startswith("paceline.lab.")
    } == {}


def test_a_call_without_timings_is_seen() -> None:
    tree = ast.parse(
        "class A:\n    def __init__(self, *, timings=T): ...\ndef f(*, timings=T): ...\n"
    )
    assert {*takers(tree)} == {"A", "f"}
    calls = parsed("from m import A, f as g\nfrom n import f\nA()\ng(timings=1)\ng()\nf()\n")
    assert silent("x", calls, {"m.A", "m.f"}) == ["A()", "g()"]


def test_every_timing_says_what_it_is() -> None:
    lines = (PACKAGE / "timings.py").read_text().splitlines()
    given = [number for number, line in enumerate(lines) if re.match(r"    \w+: float = ", line)]
    assert len(given) == sum(
        len(fields(getattr(DEFAULT_TIMINGS, each.name))) for each in fields(Timings)
    )
    explained = {n for n in given if "  # " in lines[n] or lines[n - 1].startswith("    # ")}
    assert [lines[number] for number in given if number not in explained] == []
