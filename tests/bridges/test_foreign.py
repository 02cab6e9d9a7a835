"""A bridge says which library is missing, and warns of versions that it wasn't tested with."""

from __future__ import annotations

import importlib.metadata
import warnings

import pytest

from paceline.bridges.foreign import TestedLibrary
from paceline.errors import UsageError

TestedLibrary.__test__ = False  # type: ignore[attr-defined]  # it is no class of tests
LIBRARY = TestedLibrary("somelib", (2, 5), (2, 6), extra="some")


def check(monkeypatch: pytest.MonkeyPatch, installed: str) -> list[str]:
    """Check a version, and return the warnings."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        LIBRARY.check_version()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("installed", ["2.5", "2.5.0", "2.5.3rc1", "2.6.0", "2.6.9"])
def test_a_tested_version_says_nothing(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    assert check(monkeypatch, installed) == []


@pytest.mark.parametrize("installed", ["2.4.9", "2.7.0", "3.0"])
def test_another_version_is_a_warning_with_the_range(
    monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    assert check(monkeypatch, installed) == [
        f"somelib {installed} is not a version that paceline is tested with (2.5 to 2.6)"
    ]


def test_a_missing_library_is_an_error_with_the_line_for_pip() -> None:
    with pytest.raises(UsageError, match=r"pip install 'paceline\[some\]'"):
        LIBRARY.check_version()
