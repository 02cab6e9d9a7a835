"""An option that isn't there is refused with the one that was meant."""

from __future__ import annotations

from typing import Any

import pytest

import paceline as pl
from paceline.session.option_names import check_names


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("strategy", "sync"),
        ("loggers", "report_to"),
        ("nmae", "name"),
        ("num_processes", "paceline run --workers N"),
        ("accumulate_grad_batches", "run.step(micro_batches=...)"),
    ],
)
def test_start_names_what_was_meant(given: str, meant: str) -> None:
    options: dict[str, Any] = {given: 1}
    with pytest.raises(pl.UsageError) as error:
        pl.start(**options)
    assert str(error.value).startswith(f"pl.start has no option {given}; ") and str(
        error.value
    ).endswith(f"did you mean {meant}?")


def test_a_word_of_others_is_no_help_where_there_is_no_such_option() -> None:
    with pytest.raises(pl.UsageError, match="has no option strategy; possible: rate"):
        check_names("f", ["strategy"], ["rate"])
    check_names("f", ["rate"], ["rate"])
