"""Tables of TOML files with a fixed set of keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.planner.transformers.toml_tables import check_number, read_toml_table


def test_a_table_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[a]\nx = 1\ny = 'z'\n")
    assert read_toml_table(path, "a", needed={"x"}, optional={"y", "w"}) == {"x": 1, "y": "z"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("[a]\ny = 1", "lacks x"),
        ("[a]\nx = 1\nxx = 1", "'xx' isn't a key"),
        ("[b]\nx = 1", "'b' isn't known"),
        ("x = 1\n[a]", "'x' isn't known"),
        ("", "no table"),
        ("a = 1", "no table"),
        ("[a", "isn't TOML"),
    ],
)
def test_a_wrong_table_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=word) as caught:
        read_toml_table(path, "a", needed={"x"}, optional={"y"})
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), True, "1", None])
def test_numbers_that_are_none(value: object) -> None:
    with pytest.raises(UsageError, match="x is"):
        check_number("x", value)


def test_whole_numbers() -> None:
    check_number("x", 2, whole=True)
    check_number("x", 0.5)
    with pytest.raises(UsageError, match="whole"):
        check_number("x", 2.0, whole=True)
