"""What a script sees of a run is what the pages tell users of; what a run is made of is apart,
for paceline's own modules.
"""

from __future__ import annotations

import dataclasses
import re

from paceline.session.run import Run, parts_of_run
from paceline.session.run_parts import RunParts
from tests.harness.documents import PAGES, ROOT
from tests.harness.runs import workers


def public(names: list[str]) -> set[str]:
    return {name for name in names if not name.startswith("_")}


def test_a_run_shows_what_its_class_shows_and_keeps_its_parts_apart() -> None:
    def body(run: Run) -> tuple[set[str], bool, list[str]]:
        parts = parts_of_run(run)
        names = [field.name for field in dataclasses.fields(RunParts)]
        return public(dir(run)), parts.loop.turn is None and parts.history.seed == run.seed, names

    for shown, same, names in workers(2, body):
        assert shown == public(dir(Run)) and same
        # a folder is for users; `log` is the method, and not the MetricsLog
        assert shown & set(names) == {"folder", "log"}


def test_each_name_is_told_to_users() -> None:
    examples = [path.read_text() for path in sorted((ROOT / "examples").rglob("*.py"))]
    told = set(
        re.findall(r"\brun\.(\w+)", "\n".join([*(page.read_text() for page in PAGES), *examples]))
    )
    assert public(dir(Run)) - told == set(), (
        "tell users of these in docs/, or keep them out of what they see"
    )


def test_each_name_says_what_it_is() -> None:
    assert [name for name in public(dir(Run)) if not getattr(Run, name).__doc__] == []
