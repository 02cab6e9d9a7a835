"""Ordinary loops give with several workers what they give in one plain process: each of them written as people write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import PacelineError
from paceline.session.log import RESERVED
from paceline.sync.base import Strategy
from tests.loops import data, evaluating, gradients, models, optimizers, several
from tests.loops.collection import LOOPS, Loop, Plain, differences, flat
from tests.runs import workers

assert data and evaluating and gradients and models and optimizers and several  # they fill LOOPS
SIZES = (1, 2, 3)


def plain(known: Loop) -> tuple[list[tuple[str, Any]], Plain]:
    """What comes of it in one process without paceline."""
    run = Plain()
    return list(flat(known.body(run))), run


def logged(path: Path) -> dict[int, dict[str, float]]:
    """What was logged of each step."""
    found: dict[int, dict[str, float]] = {}
    for line in (path / "metrics.jsonl").read_text().splitlines():
        values = json.loads(line)
        mine = {name: float(value) for name, value in values.items() if name not in RESERVED}
        found.setdefault(values["step"], {}).update(mine)
    return {step: values for step, values in found.items() if values}


def check(known: Loop, size: int, folder: Path, strategy: Strategy | None = None) -> None:
    """`size` workers come to what one plain process comes to, all of them; or it is refused."""
    said: list[str] = []
    runs: list[Any] = []

    def body(run: Any) -> Any:
        if run.rank == 0:
            runs.append(run)
        return list(flat(known.body(run)))

    try:
        found = workers(size, body, folder=folder, said=said, strategy=strategy, deadline=15)
    except PacelineError as error:
        assert known.refused and known.refused in str(error), str(error)
        return
    assert size == 1 or not known.refused, "it isn't refused"
    wanted, one = plain(known)
    for rank, mine in enumerate(found):
        assert differences(mine, wanted, known.near) == [], f"rank {rank} of {size}"
    if known.said and size > 1:
        assert any(known.said in line for line in said), said
    if known.counted:
        assert runs[0].steps == one.steps
        written, expected = ([(str(step), values) for step, values in sorted(found.items())] for found in (logged(runs[0].folder.path), one.means()))
        assert differences(list(flat(written)), list(flat(expected)), max(known.near, 1e-8)) == []


def marked(names: list[str]) -> list[Any]:
    """Parameters of a test: those that aren't right yet are marked."""
    waiting = {name: [pytest.mark.xfail(reason=LOOPS[name].pending, strict=False)] if LOOPS[name].pending else [] for name in names}
    return [pytest.param(name, marks=marks) for name, marks in waiting.items()]


@pytest.mark.parametrize("name", marked([name for name, known in LOOPS.items() if not known.threads]))
def test_a_loop_of_many_workers_is_that_of_one(name: str, tmp_path: Path) -> None:
    for size in SIZES:
        check(LOOPS[name], size, tmp_path / str(size))
