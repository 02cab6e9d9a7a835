"""What is logged of a step is kept by its kind, taken in later steps, and saved."""

from __future__ import annotations

import pytest
import torch

from paceline.errors import UsageError
from paceline.record.logged.histogram import HistogramCounts, histogram
from paceline.record.logged.values import LoggedValues


def logged(*, shows: bool = True, **values: object) -> LoggedValues:
    found = LoggedValues()
    for name, value in values.items():
        found.add_value(name, value, 2.0, shows=shows)
    return found


def test_kinds_are_kept_apart() -> None:
    found = logged(loss=3.0, weights=histogram(torch.ones(2), 2))
    found.send_to_host()
    assert found.has_arrived()
    assert found.read_sums() == {"loss": [6.0, 2.0]}
    assert [(item.step, item.time, item.name) for item in found.read_media(4, 1.5)] == [
        (4, 1.5, "weights")
    ]
    assert found.pack_states() == {}


def test_who_shows_nothing_computes_nothing() -> None:
    found = logged(shows=False, weights=histogram(torch.ones(2), 2))
    assert found.is_empty
    found.add_value("loss", 1.0, 0.0, shows=False)  # of a ghost
    assert found.is_empty


def test_what_comes_later_is_taken_in() -> None:
    found = logged(loss=3.0, a=histogram(torch.ones(2), 2))
    found.add_later_values(logged(loss=1.0, other=1.0, a=histogram(torch.zeros(2), 2)))
    assert found.read_sums() == {"loss": [8.0, 4.0], "other": [2.0, 2.0]}
    (shown,) = found.read_media(1, 0.0)
    assert isinstance(shown.content, HistogramCounts) and shown.content.high == 0.0


def test_it_is_saved() -> None:
    found = LoggedValues.from_state(
        *logged(loss=3.0, weights=histogram(torch.ones(2), 2)).to_state()
    )
    assert found.read_sums() == {"loss": [6.0, 2.0]}
    assert [item.name for item in found.read_media(4, 1.5)] == ["weights"]


@pytest.mark.parametrize("name", ["val/accuracy", "a b", "paceline", "x/paceline/y"])
def test_names_may_have_slashes(name: str) -> None:
    assert logged(**{name: 1.0}).read_sums() == {name: [2.0, 2.0]}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        *(
            ("step", "another name"),
            ("", "isn't empty"),
            ("paceline/seconds", "doesn't begin with"),
        ),
        *((name, "can't be printed") for name in ("a\x1b[31m", "a\nb", "\ud800", "\x9b2J")),
    ],
)
def test_names_of_our_own_are_refused(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        logged(**{name: 1.0})
