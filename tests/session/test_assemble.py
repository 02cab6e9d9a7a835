"""A run is whole when it is assembled, and what can't be honoured is refused before it has a
folder.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import paceline as pl
from paceline.errors import UsageError
from paceline.replicas.compare import Comparison
from paceline.session.run import Run
from tests.harness.runs import workers


def test_it_knows_where_it_stands(tmp_path: Path) -> None:
    def body(run: Run) -> tuple[object, ...]:
        return (
            run.rank,
            run.size,
            run.local_rank,
            run.host,
            run.is_first,
            run.seed,
            run.steps,
            run.weight,
            run.results,
        )

    expected = [(0, 2, 0, "host0", True, 1, 0, 1.0, {}), (1, 2, 0, "host1", False, 1, 0, 1.0, {})]
    assert workers(2, body, hosts=(0, 1), folder=tmp_path) == expected
    assert (tmp_path / "test" / "summary.json").exists()


def test_a_comparison_that_would_never_come_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"start\(compare=5, differing='stop'\) can't be honoured"):
        workers(
            2, lambda run: None, strategy=pl.Gossip(), comparison=Comparison(5), folder=tmp_path
        )
    assert list(tmp_path.iterdir()) == []
