"""Round lengths follow how far replicas drift apart, within their bounds; carried changes are
sent with one's own.
"""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.sync.localsgd.fragment import Fragment, adaptive


def test_rounds_grow_while_replicas_stay_close_and_shrink_when_they_part() -> None:
    lengths = adaptive(first=8, least=2, most=20, drift=1.0)
    assert lengths.next_steps(8, 0.4) == 16
    assert lengths.next_steps(8, 0.5) == 8 and lengths.next_steps(8, 1.0) == 8
    assert lengths.next_steps(8, 1.1) == 4


def test_rounds_stay_within_their_bounds() -> None:
    lengths = adaptive(first=8, least=2, most=20)
    assert lengths.next_steps(16, 0.0) == 20 and lengths.next_steps(20, 0.0) == 20
    assert lengths.next_steps(3, 9.0) == 2 and lengths.next_steps(2, 9.0) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"first": 0},
        {"least": 9},
        {"most": 7},
        {"least": 0},
        {"drift": 0.0},
        {"drift": float("nan")},
    ],
)
def test_bounds_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="least <= first <= most"):
        adaptive(**wrong)  # type: ignore[arg-type]


def test_a_fragment_without_changes_has_nothing_of_its_own() -> None:
    assert Fragment().copy_changes(lambda unit, into: into) is None


def test_after_landing_nothing_is_on_its_way() -> None:
    fragment = Fragment(in_exchange=True, has_arrived=True, carried_parts=2.0)
    fragment.end_round(7)
    assert (
        fragment.ended_step,
        fragment.in_exchange,
        fragment.has_arrived,
        fragment.carried_parts,
    ) == (
        7,
        False,
        False,
        0.0,
    )


def test_changes_of_other_units_dont_fit() -> None:
    assert Fragment().has_shapes_of(None) and Fragment().has_shapes_of({"changes": []})
    assert not Fragment().has_shapes_of({"changes": [torch.zeros(3)]})
