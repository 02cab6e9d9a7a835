"""A page is written whole, or it is said in a line why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from paceline.errors import ResourceError, UsageError
from paceline.observe.page.writing import MAX_RUNS, write_page
from tests.harness.finished_runs import QUIET
from tests.harness.page_runs import whole
from tests.harness.pages import Tags


def test_a_page(tmp_path: Path) -> None:
    folder, out = whole(tmp_path), tmp_path / "out.html"
    assert write_page([folder], out) == out.stat().st_size < 500_000
    ids = [given.get("id") for tag, given in Tags(out.read_text()).found if tag == "section"]
    assert ids[0] == "overview" and len(ids) == 11
    write_page([folder, folder], out)
    assert "2 runs compared" in out.read_text()


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    folder = whole(tmp_path)
    line = {"samples": 8, "seconds": QUIET, "bytes_sent": {"within": 1, "between": 2}, "loss": 1.0}
    text = (
        json.dumps({"step": step, "time": step / 10, **line}) + "\n" for step in range(1, 20_001)
    )
    (folder / "metrics.jsonl").write_text("".join(text))
    assert write_page([folder], tmp_path / "out.html") < 500_000


def test_places_that_can_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = whole(tmp_path)
    with pytest.raises(
        UsageError, match=r"missing/out\.html: there is no folder .*missing; make it first"
    ):
        write_page([folder], tmp_path / "missing" / "out.html")
    with pytest.raises(UsageError, match="is a folder: give a file in it"):
        write_page([folder], tmp_path)

    def refuse(kind: type[OSError], number: int, why: str) -> None:
        def fail(self: Path, data: bytes) -> int:
            raise kind(number, why)

        monkeypatch.setattr(Path, "write_bytes", fail)

    refuse(PermissionError, 13, "Permission denied")  # as root may write anywhere
    with pytest.raises(
        UsageError, match=r"can't be written \(Permission denied\): give another place"
    ):
        write_page([folder], tmp_path / "out.html")
    refuse(OSError, 28, "No space left on device")
    with pytest.raises(ResourceError, match=r"can't be written \(No space left on device\)"):
        write_page([folder], tmp_path / "out.html")


def test_what_is_no_run_leaves_no_page(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no run folder"):
        write_page([whole(tmp_path), tmp_path / "other"], tmp_path / "out.html")
    assert not (tmp_path / "out.html").exists()


def test_too_many_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{MAX_RUNS + 1} runs are too many"):
        write_page([tmp_path] * (MAX_RUNS + 1), tmp_path / "out.html")
