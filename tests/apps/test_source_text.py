"""The standard library as text: split by file, the same every time, windows that cover it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from paceline.apps import source_text
from paceline.errors import DataError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "hidden.py").write_text("left out")
    for number in range(40):
        (tmp_path / f"m{number}.py").write_text(f"{number}" * 100)
    return tmp_path


def test_every_file_is_in_one_part(folder: Path) -> None:
    files = source_text.list_sources(folder)
    train, validation = source_text.split_files(files)
    assert len(files) == 40 and sorted(train + validation) == sorted(files)
    assert train and validation and not set(train) & set(validation)


@pytest.mark.slow
def test_the_standard_library_is_there_and_stays_the_same() -> None:
    files = source_text.list_sources()
    assert len(files) > 100 and files == source_text.list_sources()
    assert {"argparse.py", "ast.py"} <= {path.name for path in files}


def test_the_split_does_not_depend_on_other_files(folder: Path) -> None:
    _, before = source_text.split_files(source_text.list_sources(folder))
    (folder / "a_new_one.py").write_text("x")
    _, after = source_text.split_files(source_text.list_sources(folder))
    assert set(before) <= set(after)


def test_windows_cover_the_text_once() -> None:
    windows = source_text.Windows(torch.arange(100, dtype=torch.uint8), context=9)
    assert len(windows) == 11
    assert torch.cat([windows[i][0] for i in range(11)]).tolist() == list(range(99))
    assert torch.cat([windows[i][1] for i in range(11)]).tolist() == list(range(1, 100))
    assert windows[0][0].dtype == torch.int64
    with pytest.raises(IndexError):
        windows[11]


def test_limit_and_decode(folder: Path) -> None:
    tokens = source_text.read_tokens(source_text.list_sources(folder), limit=50)
    assert tokens.numel() == 50 and tokens.dtype == torch.uint8
    assert source_text.decode_tokens(tokens) == "0" * 50


def test_too_little_text(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no \.py files under"):
        source_text.list_sources(tmp_path)
    with pytest.raises(
        DataError, match=r"0 tokens are too few for windows of 64: give more text \(one file in ten"
    ):
        source_text.Windows(source_text.read_tokens([]), 64)
    with pytest.raises(DataError, match="too few for windows of 64"):
        source_text.Windows(torch.zeros(64, dtype=torch.uint8), 64)
