"""Arguments of `paceline bench collectives` are read without torch."""

from __future__ import annotations

import pytest

from paceline.bench import collective_options
from paceline.errors import UsageError


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4KB", 4000), (" 33MB", 33_000_000), ("7B", 4), ("1MB", 1_000_000)]
)
def test_sizes(text: str, nbytes: int) -> None:
    assert collective_options.parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["", "4", "KB", "-4KB", "4 GB", "3B", "1.5MB", "0MB"])
def test_sizes_that_make_no_sense(text: str) -> None:
    with pytest.raises(UsageError, match="such as 256KB"):
        collective_options.parse_size(text)
