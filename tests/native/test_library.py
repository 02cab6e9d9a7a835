"""A library that is missing, broken or of other sources is refused in one line."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.errors import UsageError
from paceline.native import build, library

LOADERS = (library.load_library, library.load_library_with_gil)


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Copy the folder of the library, and load from there."""
    folder = tmp_path / "native"
    shutil.copytree(build.FOLDER, folder)
    monkeypatch.setattr(build, "FOLDER", folder)
    monkeypatch.setattr(build, "LIBRARY", folder / build.LIBRARY.name)
    for load in LOADERS:
        load.cache_clear()
    yield folder
    for load in LOADERS:
        load.cache_clear()


def read_refusal() -> str:
    for load in LOADERS:
        with pytest.raises(UsageError) as caught:
            load()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_it_is_loaded_in_two_ways() -> None:
    assert type(library.load_library()) is ctypes.CDLL
    assert type(library.load_library_with_gil()) is ctypes.PyDLL
    for load in LOADERS:
        assert load().pl_version() == library.VERSION


def test_it_is_missing(copied: Path) -> None:
    build.LIBRARY.unlink()
    assert "is missing; run `python " in read_refusal()
    for source in build.list_sources():
        source.unlink()
    assert "is missing; install paceline again" in read_refusal()


def test_it_is_no_library(copied: Path) -> None:
    build.LIBRARY.write_bytes(b"no library")
    assert "can't be loaded" in read_refusal()


def test_it_has_another_version(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)
    wanted = f"has version {library.VERSION - 1}, wanted is {library.VERSION}"
    assert wanted in read_refusal()


def test_it_is_of_other_sources(copied: Path) -> None:
    header = copied / "core.h"
    header.write_text(header.read_text() + "/* changed */\n")
    assert "is of other sources; run `python " in read_refusal()
    # An installed package has no sources to compare with.
    for source in build.list_sources():
        source.unlink()
    assert library.load_library().pl_version() == library.VERSION
