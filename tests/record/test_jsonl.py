"""A file of lines has whole ones only, whatever the disk does, and who goes on with it knows the
last.
"""

from __future__ import annotations

import errno
import os
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import ResourceError
from paceline.record import jsonl
from paceline.record.jsonl import JsonLines


def test_lines_are_added(tmp_path: Path) -> None:
    path = tmp_path / "new" / "x.jsonl"
    first, second = JsonLines(path), JsonLines(path)
    first.append_lines(['{"step": 1}', '{"step": 2}'])
    first.close()
    second.append_lines(['{"step": 3}'])
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'
    assert second.read_last_line() == {"step": 3}
    second.close()
    second.close()


class Small(FileIO):
    """A file on a disk that takes 30 bytes, and 7 at a time."""

    def write(self, data: Any, /) -> int:
        left = 30 - os.fstat(self.fileno()).st_size
        if left <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(memoryview(data)[: min(7, left)])


def test_a_disk_that_fills_up_in_the_middle_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jsonl, "FileIO", Small)
    written = JsonLines(tmp_path / "x.jsonl")
    written.append_lines(['{"step": 1}', '{"step": 2}'])
    for _ in range(2):
        with pytest.raises(
            ResourceError,
            match=r"x\.jsonl could not be written \(No space left on device\); free some space",
        ):
            written.append_lines(['{"step": 3, "loss": 1.0}'])
        assert (tmp_path / "x.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'
    written.close()


@pytest.mark.parametrize(
    ("text", "last", "left"),
    [
        ("", None, ""),
        ('{"step": 1}\n', {"step": 1}, '{"step": 1}\n'),
        ('{"step": 1}\n{"step": 2}\n{"st', {"step": 2}, '{"step": 1}\n{"step": 2}\n'),
        ('{"step": 1}\n{"step": 2', {"step": 1}, '{"step": 1}\n'),
        ('{"step": 1}\n{"st\n\n', {"step": 1}, '{"step": 1}\n'),
        ('{"st', None, ""),
    ],
)
def test_who_goes_on_takes_off_what_is_no_whole_line(
    tmp_path: Path, text: str, last: Any, left: str
) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(text)
    assert JsonLines(path).read_last_line() == last and path.read_text() == left


def test_a_place_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").mkdir()
    with pytest.raises(ResourceError, match=r"x\.jsonl could not be written \(Is a directory\)"):
        JsonLines(tmp_path / "x.jsonl").append_lines(["{}"])
    with pytest.raises(ResourceError, match=r"x\.jsonl could not be written \(Is a directory\)"):
        JsonLines(tmp_path / "x.jsonl").read_last_line()


def test_what_later_steps_have_written_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    written = JsonLines(path)
    assert written.cut_after_step(3) == []
    written.append_lines(
        ['{"step": 1}', '{"step": 3, "loss": NaN}', '{"step": 2, "late": 1}', '{"step": 4}']
    )
    path.write_text(path.read_text() + '{"step"')
    assert [line["step"] for line in written.cut_after_step(3)] == [1, 3, 2]
    written.append_lines(['{"step": 4, "again": 1}'])
    assert path.read_text() == (
        '{"step": 1}\n{"step": 3, "loss": NaN}\n{"step": 2, "late": 1}\n{"step": 4, "again": 1}\n'
    )
    written.close()
