"""A bridge says which library is missing, and warns of versions that it wasn't tested with."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
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


def test_another_build_of_a_library_counts_as_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_version(name: str) -> str:
        if name != "somelib-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "2.6.1"

    monkeypatch.setattr(importlib.metadata, "version", find_version)
    library = TestedLibrary("somelib", (2, 5), (2, 6), builds=("somelib-gpu", "somelib-cpu"))
    assert library.check_version() == (2, 6, 1)
    with pytest.raises(UsageError, match="somelib isn't installed"):
        TestedLibrary("somelib", (2, 5), (2, 6), builds=("somelib-gpu",)).check_version()


@pytest.mark.parametrize(
    ("module", "library"),
    [("keras", "keras"), ("horovod.tensorflow", "tensorflow")],
)
def test_a_bridge_whose_library_is_missing_says_how_to_install_it(
    module: str, library: str
) -> None:
    if importlib.util.find_spec(library) is not None:
        pytest.skip(f"{library} is installed here")
    with pytest.raises(UsageError, match=rf"pip install 'paceline\[{library}\]'"):
        importlib.import_module(f"paceline.bridges.{module}")


def test_a_missing_library_is_an_error_with_the_line_for_pip() -> None:
    with pytest.raises(UsageError, match=r"pip install 'paceline\[some\]'"):
        LIBRARY.check_version()
